//! The latent cache of an MLA layer: a row of kv_lora + rope numbers for each token, kept in one of three types.

use waste_common::plan::KvType;
use waste_common::quant::{GROUP, half};
use zerocopy::IntoBytes;

use crate::kernels::Kernels;

/// The largest finite f16.
const F16_MAX: f32 = 65504.0;

/// The rows of all tokens of a sequence; allocated for the whole context.
#[derive(Clone, Debug, PartialEq)]
pub struct KvCache {
    width: usize,
    rows: Rows,
}

#[derive(Clone, Debug, PartialEq)]
enum Rows {
    F32(Vec<f32>),
    F16(Vec<u16>),
    /// int8 in groups of up to 128 with an f16 scale each, like the trunk's Q8G but without padding.
    Q8 {
        values: Vec<u8>,
        scales: Vec<u16>,
    },
}

impl KvCache {
    /// An empty cache for `ctx` rows of `width` numbers.
    pub fn new(kv: KvType, ctx: usize, width: usize) -> Self {
        let rows = match kv {
            KvType::F32 => Rows::F32(vec![0.0; ctx * width]),
            KvType::F16 => Rows::F16(vec![0; ctx * width]),
            KvType::Q8 => {
                Rows::Q8 { values: vec![0; ctx * width], scales: vec![0; ctx * width.div_ceil(GROUP)] }
            }
        };
        KvCache { width, rows }
    }

    /// The first `rows` rows, as they are kept.
    pub fn head(&self, rows: usize) -> KvCache {
        let numbers = rows * self.width;
        let rows = match &self.rows {
            Rows::F32(all) => Rows::F32(all[..numbers].to_vec()),
            Rows::F16(all) => Rows::F16(all[..numbers].to_vec()),
            Rows::Q8 { values, scales } => Rows::Q8 {
                values: values[..numbers].to_vec(),
                scales: scales[..rows * self.width.div_ceil(GROUP)].to_vec(),
            },
        };
        KvCache { width: self.width, rows }
    }

    /// The bytes of the first `rows` rows as they are kept, for a state that is stored elsewhere; shorter than wanted
    /// if the cache is.
    pub fn parts(&self, rows: usize) -> Vec<&[u8]> {
        let (numbers, scales_wanted) = (rows * self.width, rows * self.width.div_ceil(GROUP));
        match &self.rows {
            Rows::F32(all) => vec![all[..numbers.min(all.len())].as_bytes()],
            Rows::F16(all) => vec![all[..numbers.min(all.len())].as_bytes()],
            Rows::Q8 { values, scales } => vec![
                &values[..numbers.min(values.len())],
                scales[..scales_wanted.min(scales.len())].as_bytes(),
            ],
        }
    }

    /// The same to write to.
    pub fn parts_mut(&mut self, rows: usize) -> Vec<&mut [u8]> {
        let (numbers, scales_wanted) = (rows * self.width, rows * self.width.div_ceil(GROUP));
        match &mut self.rows {
            Rows::F32(all) => {
                let end = numbers.min(all.len());
                vec![all[..end].as_mut_bytes()]
            }
            Rows::F16(all) => {
                let end = numbers.min(all.len());
                vec![all[..end].as_mut_bytes()]
            }
            Rows::Q8 { values, scales } => {
                let (end, scales_end) = (numbers.min(values.len()), scales_wanted.min(scales.len()));
                vec![&mut values[..end], scales[..scales_end].as_mut_bytes()]
            }
        }
    }

    /// Keeps a token's row.
    pub fn store(&mut self, position: usize, row: &[f32]) {
        let at = position * self.width..(position + 1) * self.width;
        match &mut self.rows {
            Rows::F32(rows) => rows[at].copy_from_slice(row),
            Rows::F16(rows) => {
                for (kept, &x) in rows[at].iter_mut().zip(row) {
                    *kept = half::f32_to_f16(x.clamp(-F16_MAX, F16_MAX));
                }
            }
            Rows::Q8 { values, scales } => {
                let groups = self.width.div_ceil(GROUP);
                let scales = &mut scales[position * groups..(position + 1) * groups];
                for ((kept, x), scale) in values[at].chunks_mut(GROUP).zip(row.chunks(GROUP)).zip(scales) {
                    *scale = encode_group(x, kept);
                }
            }
        }
    }

    /// Rows `start .. end` as f32: as they stand, or decoded into `buffer`.
    pub fn rows<'a>(
        &'a self,
        kernels: &Kernels,
        start: usize,
        end: usize,
        buffer: &'a mut [f32],
    ) -> &'a [f32] {
        let at = start * self.width..end * self.width;
        let out = &mut buffer[..at.len()];
        match &self.rows {
            Rows::F32(rows) => return &rows[at],
            Rows::F16(rows) => (kernels.widen_f16)(&rows[at], out),
            Rows::Q8 { values, scales } => {
                let groups = self.width.div_ceil(GROUP);
                let rows =
                    values[at].chunks_exact(self.width).zip(scales[start * groups..].chunks_exact(groups));
                for (out, (values, scales)) in out.chunks_exact_mut(self.width).zip(rows) {
                    for ((out, values), &scale) in out.chunks_mut(GROUP).zip(values.chunks(GROUP)).zip(scales)
                    {
                        let scale = half::f16_to_f32(scale);
                        for (out, &value) in out.iter_mut().zip(values) {
                            *out = f32::from(value as i8) * scale;
                        }
                    }
                }
            }
        }
        out
    }
}

/// int8 values of a group and its f16 scale; divided by the scale as it is stored.
fn encode_group(x: &[f32], values: &mut [u8]) -> u16 {
    let max = x.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    let bits = half::f32_to_f16((max / 127.0).clamp(1e-7, F16_MAX));
    let scale = half::f16_to_f32(bits);
    for (value, x) in values.iter_mut().zip(x) {
        *value = (x / scale).round_ties_even().clamp(-127.0, 127.0) as i8 as u8;
    }
    bits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back_as_precisely_as_their_type_allows() {
        let width = 130;
        let row = |seed: usize| -> Vec<f32> {
            (0..width).map(|i| ((i * 37 + seed * 101) % 211) as f32 / 50.0 - 2.0).collect()
        };
        for (kv, tolerance) in [(KvType::F32, 0.0), (KvType::F16, 1e-3), (KvType::Q8, 0.02)] {
            let mut cache = KvCache::new(kv, 5, width);
            for position in 0..5 {
                cache.store(position, &row(position));
            }
            let mut buffer = vec![f32::NAN; 3 * width];
            let rows = cache.rows(Kernels::detect(), 2, 5, &mut buffer).to_vec();
            for (i, found) in rows.chunks_exact(width).enumerate() {
                for (found, expected) in found.iter().zip(row(i + 2)) {
                    assert!((found - expected).abs() <= tolerance, "{kv}: {found} {expected}");
                }
            }
        }
    }

    #[test]
    fn numbers_beyond_f16_stay_finite() {
        let mut cache = KvCache::new(KvType::F16, 1, 2);
        cache.store(0, &[1e9, -1e9]);
        assert_eq!(cache.rows(Kernels::detect(), 0, 1, &mut [0.0; 2]), [65504.0, -65504.0]);
    }
}
