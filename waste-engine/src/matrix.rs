//! Weight matrices of the trunk, kept in the format in which they are stored.

use std::ops::Range;

use rayon::prelude::*;
use waste_common::plan::scratch::TILE_ROWS;

use crate::compute::Compute;
use crate::kernels::columns::Columns;
use crate::kernels::portable::{whole_len, words_len};
use crate::kernels::{Kernels, RowsMany, RowsQuant};
use crate::options::Arith;
use crate::resident::Weights;

/// Rows that a kernel takes at a time.
const ROWS_UNIT: usize = 4;
/// Rows that several tokens share while they are in the cache.
const SHARED_ROWS: usize = 8;

/// Rows from one on, times an input.
type Product<'a> = &'a dyn Fn(usize, &[f32], &mut [f32]);

/// A weight matrix [rows, cols].
pub struct Matrix {
    /// Output width.
    pub rows: usize,
    /// Input width.
    pub cols: usize,
    /// The weights.
    pub data: MatrixData,
}

/// The formats a matrix can be kept in; row-major.
pub enum MatrixData {
    /// f32.
    F32(Weights<f32>),
    /// IEEE binary16.
    F16(Weights<u16>),
    /// Groups of 128 along the row: payload rows of equal stride, then f16 scales.
    Quant {
        /// Bits of a weight.
        format: QuantFormat,
        /// Bytes of a row.
        stride: usize,
        /// All rows' weights.
        payload: Weights<u8>,
        /// All rows' group scales.
        scales: Weights<u16>,
    },
}

/// The trunk's quantised formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantFormat {
    /// 8 bits.
    Q8,
    /// 4 bits.
    Q4,
    /// 3 bits.
    Q3,
}

impl Matrix {
    /// A matrix of f32 weights.
    pub fn f32(rows: usize, cols: usize, weights: Vec<f32>) -> Self {
        debug_assert_eq!(weights.len(), rows * cols);
        Matrix { rows, cols, data: MatrixData::F32(weights.into()) }
    }

    /// `out[i] = row(first + i) · x` for as many rows as `out` has.
    pub fn rows_into(&self, kernels: &Kernels, first: usize, x: &[f32], out: &mut [f32]) {
        let rows = first..first + out.len();
        match &self.data {
            MatrixData::F32(w) => {
                (kernels.rows_f32)(&w[rows.start * self.cols..rows.end * self.cols], x, out);
            }
            MatrixData::F16(w) => {
                (kernels.rows_f16)(&w[rows.start * self.cols..rows.end * self.cols], x, out);
            }
            MatrixData::Quant { format, stride, payload, scales } => {
                let kernel = match format {
                    QuantFormat::Q8 => kernels.rows_q8,
                    QuantFormat::Q4 => kernels.rows_q4,
                    QuantFormat::Q3 => kernels.rows_q3,
                };
                let groups = self.cols.div_ceil(128);
                let payload = &payload[rows.start * stride..rows.end * stride];
                kernel(payload, &scales[rows.start * groups..rows.end * groups], x, out);
            }
        }
    }

    /// One row, decoded.
    pub fn decode_row(&self, kernels: &Kernels, row: usize, out: &mut [f32]) {
        match &self.data {
            MatrixData::F32(w) => out.copy_from_slice(&w[row * self.cols..(row + 1) * self.cols]),
            MatrixData::F16(w) => (kernels.widen_f16)(&w[row * self.cols..(row + 1) * self.cols], out),
            MatrixData::Quant { format, stride, payload, scales } => {
                let groups = self.cols.div_ceil(128);
                let payload = &payload[row * stride..(row + 1) * stride];
                let scales = &scales[row * groups..(row + 1) * groups];
                let decode = match format {
                    QuantFormat::Q8 => kernels.decode_q8,
                    QuantFormat::Q4 => kernels.decode_q4,
                    QuantFormat::Q3 => kernels.decode_q3,
                };
                decode(payload, scales, out);
            }
        }
    }

    /// `out[t] = W · x[t]` for every token; `x` is [tokens, cols], `out` [tokens, rows]. Each element is one dot
    /// product, whatever the threads. A prompt's tokens go through tiles of decoded rows: f32 weights give the bits of
    /// one token alone, quantised ones differ by the rounding of each weight's product with its scale, and with
    /// [`Arith::Fast`] by that of a single token's input.
    pub fn apply(&self, compute: &Compute, x: &[f32], out: &mut [f32]) {
        debug_assert_eq!(x.len() / self.cols, out.len() / self.rows);
        if x.len() == self.cols || compute.together {
            return self.decode(compute, x, out);
        }
        let kernels = compute.kernels;
        let tiles = Columns::new(out, self.rows).chunks(TILE_ROWS);
        tiles.into_par_iter().enumerate().for_each(|(tile, mut out)| {
            let rows = tile * TILE_ROWS..tile * TILE_ROWS + out.width();
            if let MatrixData::F32(w) = &self.data {
                let weights = &w[rows.start * self.cols..rows.end * self.cols];
                return (kernels.gemm)(weights, x, self.cols, &mut out);
            }
            compute.with_scratch(rows.len() * self.cols, |decoded| {
                for (row, decoded) in rows.zip(decoded.chunks_exact_mut(self.cols)) {
                    self.decode_row(kernels, row, decoded);
                }
                (kernels.gemm)(decoded, x, self.cols, &mut out);
            });
        });
    }

    /// The products of tokens that are decoded, each by itself.
    fn decode(&self, compute: &Compute, x: &[f32], out: &mut [f32]) {
        if x.len() == self.cols {
            return compute.rows(out, ROWS_UNIT, |first, out| {
                let rows = out.len();
                self.decode_rows(compute, first, x, &mut Columns::new(out, rows), rows);
            });
        }
        let shares = Columns::new(out, self.rows).chunks(compute.share(self.rows, ROWS_UNIT));
        let starts = shares.iter().scan(0, |end, share| Some(std::mem::replace(end, *end + share.width())));
        let starts: Vec<usize> = starts.collect();
        shares.into_par_iter().zip(starts).for_each(|(mut share, first)| {
            self.decode_rows(compute, first, x, &mut share, SHARED_ROWS);
        });
    }

    /// Rows `first ..`, `at_a_time` for all tokens, so that they come from memory once.
    fn decode_rows(&self, compute: &Compute, first: usize, x: &[f32], out: &mut Columns, at_a_time: usize) {
        let kernels = compute.kernels;
        let fast = match (compute.arith, &self.data) {
            (Arith::Fast, MatrixData::Quant { format, stride, payload, scales }) => {
                format.fast(kernels).map(|fast| (fast, *stride, payload, scales))
            }
            _ => None,
        };
        let Some((fast, stride, payload, scales)) = fast else {
            return each(at_a_time, self.cols, x, out, &|start, x, out| {
                self.rows_into(kernels, first + start, x, out);
            });
        };
        let (len, groups) = ((fast.len)(self.cols), self.cols.div_ceil(128));
        let part = |rows: Range<usize>| {
            let payload = &payload[rows.start * stride..rows.end * stride];
            (payload, &scales[rows.start * groups..rows.end * groups])
        };
        compute.with_scratch(x.len() / self.cols * len, |wholes| {
            for (x, whole) in x.chunks_exact(self.cols).zip(wholes.chunks_exact_mut(len)) {
                (fast.input)(x, whole);
            }
            if let Some(many) = fast.many.filter(|_| x.len() > self.cols) {
                let (payload, scales) = part(first..first + out.width());
                return many(payload, scales, wholes, len, out);
            }
            each(at_a_time, len, wholes, out, &|start, whole, out| {
                let (payload, scales) = part(first + start..first + start + out.len());
                (fast.rows)(payload, scales, whole, out);
            });
        });
    }
}

/// The kernels of a format in the *fast* arithmetic.
struct Fast {
    /// Elements of an input as whole numbers, by its columns.
    len: fn(usize) -> usize,
    /// Makes those.
    input: fn(&[f32], &mut [f32]),
    rows: RowsQuant,
    many: Option<RowsMany>,
}

impl QuantFormat {
    fn fast(self, kernels: &Kernels) -> Option<Fast> {
        match self {
            QuantFormat::Q8 => Some(Fast {
                len: words_len,
                input: kernels.to_words,
                rows: kernels.rows_q8_fast,
                many: kernels.many.map(|many| many.rows_q8_fast),
            }),
            QuantFormat::Q4 => Some(Fast {
                len: whole_len,
                input: kernels.to_whole,
                rows: kernels.rows_q4_fast,
                many: kernels.many.map(|many| many.rows_q4_fast),
            }),
            // Rare, and as fast as it needs to be.
            QuantFormat::Q3 => None,
        }
    }
}

/// So many rows at a time for all inputs of this length, so that they come from memory once.
fn each(at_a_time: usize, len: usize, inputs: &[f32], out: &mut Columns, product: Product<'_>) {
    for start in (0..out.width()).step_by(at_a_time) {
        let end = out.width().min(start + at_a_time);
        for (t, input) in inputs.chunks_exact(len).enumerate() {
            product(start, input, &mut out.row(t)[start..end]);
        }
    }
}

/// [`Matrix::apply`] for several matrices that have the input in common.
pub fn apply_all(compute: &Compute, x: &[f32], products: &mut [(&Matrix, &mut [f32])]) {
    products.par_iter_mut().with_max_len(1).for_each(|(matrix, out)| matrix.apply(compute, x, out));
}
