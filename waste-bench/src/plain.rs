//! The opponent of the kernels: look-ups as a compiler makes them of a scalar loop over f32 tables.

use std::sync::LazyLock;

use waste_common::quant::half;
use waste_engine::kernels::Kernels;
use waste_engine::kernels::portable::VqShape;

/// What these kernels are called.
pub const NAME: &str = "plain";

/// The best kernels of this CPU, but for experts in exact arithmetic: those are looked up by [`gather`].
pub fn kernels() -> &'static Kernels {
    static PLAIN: LazyLock<Kernels> =
        LazyLock::new(|| Kernels { name: NAME, vq_rows: rows, ..*Kernels::detect() });
    &PLAIN
}

fn rows(indices: &[u8], shape: VqShape, scales: &[u8], tables: &[f32], out: &mut [f32]) {
    gather(indices, shape, tables, out);
    for (out, &[low, high]) in out.iter_mut().zip(scales.as_chunks::<2>().0) {
        *out *= half::f16_to_f32(u16::from_le_bytes([low, high]));
    }
}

/// Sums of look-ups, without the scales of the rows.
pub fn gather(indices: &[u8], shape: VqShape, tables: &[f32], out: &mut [f32]) {
    let per_vector = shape.stages * shape.entries;
    for (out, block) in out.chunks_mut(64).zip(indices.chunks_exact(shape.block_bytes())) {
        out.fill(0.0);
        let vectors = block.chunks_exact(64 * shape.index_bytes()).zip(tables.chunks_exact(per_vector));
        for (rows, table) in vectors {
            match (shape.packed, shape.stages) {
                (true, _) => {
                    let Some(table) = table.first_chunk::<256>() else { return };
                    for (out, i) in out.iter_mut().zip(rows.as_chunks::<3>().0) {
                        let word = u32::from_le_bytes([i[0], i[1], i[2], 0]) as usize;
                        *out += table[word & 63]
                            + table[64 + (word >> 6 & 63)]
                            + table[128 + (word >> 12 & 63)]
                            + table[192 + (word >> 18 & 63)];
                    }
                }
                (false, 2) => {
                    let Some(table) = table.first_chunk::<512>() else { return };
                    for (out, i) in out.iter_mut().zip(rows.as_chunks::<2>().0) {
                        *out += table[usize::from(i[0])] + table[256 + usize::from(i[1])];
                    }
                }
                (false, _) => {
                    let Some(table) = table.first_chunk::<768>() else { return };
                    for (out, i) in out.iter_mut().zip(rows.as_chunks::<3>().0) {
                        *out += table[usize::from(i[0])]
                            + table[256 + usize::from(i[1])]
                            + table[512 + usize::from(i[2])];
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plain_look_ups_are_right() {
        for (stages, entries, packed) in [(3, 256, false), (2, 256, false), (4, 64, true)] {
            let shape = VqShape { stages, entries, packed, vectors: 5 };
            let byte = |i: usize| (i * 97 % 251) as u8;
            let indices: Vec<u8> = (0..2 * shape.block_bytes()).map(byte).collect();
            let tables: Vec<f32> = (0..shape.table_len()).map(|i| f32::from(byte(i)) - 100.0).collect();
            let scales: Vec<u8> =
                (0..128).flat_map(|i| half::f32_to_f16(0.5 + i as f32).to_le_bytes()).collect();
            let (mut found, mut expected) = (vec![f32::NAN; 100], vec![f32::NAN; 100]);
            rows(&indices, shape, &scales, &tables, &mut found);
            (Kernels::detect().vq_rows)(&indices, shape, &scales, &tables, &mut expected);
            // Whole numbers: every order of summation gives the same.
            assert_eq!(found, expected, "{stages} x {entries}");
        }
    }
}
