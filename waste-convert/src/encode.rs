//! One matrix of an expert: row scales, indices, and how far the result is from the source.

use rayon::prelude::*;
use waste_common::quant::QuantError;
use waste_common::quant::half::{f16_to_f32, f32_to_f16};
use waste_common::quant::vq::{IndexBits, Layout, Matrix, ROW_BLOCK, STAGES_MAX, VEC_DIM, pack_six};

use crate::kmeans::{Block, Codebook, LANES, Samples};

/// An encoded matrix.
#[derive(Debug)]
pub struct EncodedMatrix {
    /// Packed as the layout says.
    pub indices: Vec<u8>,
    /// f16 bits, one per row.
    pub scales: Vec<u16>,
    /// Of the decoded matrix.
    pub error: SquaredError,
}

/// Squared Frobenius norms: of decoded − source, and of the source.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SquaredError {
    /// Of the difference.
    pub difference: f64,
    /// Of the source.
    pub source: f64,
}

impl SquaredError {
    /// Adds another matrix.
    pub fn add(&mut self, other: SquaredError) {
        self.difference += other.difference;
        self.source += other.source;
    }

    /// The relative Frobenius error, to six decimals: short in JSON, and read back exactly.
    pub fn relative(&self) -> f64 {
        let relative = if self.source > 0.0 { (self.difference / self.source).sqrt() } else { 0.0 };
        (relative * 1e6).round() / 1e6
    }
}

/// The f16 bits of a row's scale: its largest magnitude, at least 1e-8. Weights are divided by the rounded scale,
/// which is what a reader multiplies by; where that is 0 (below 3e-8), they become 0.
fn row_scale(row: usize, weights: &[f32]) -> Result<u16, QuantError> {
    if let Some(col) = weights.iter().position(|weight| !weight.is_finite()) {
        return Err(QuantError::NotFinite { row, col, value: weights[col] });
    }
    let scale = weights.iter().fold(1e-8f32, |max, weight| max.max(weight.abs()));
    match f32_to_f16(scale) {
        0x7c00 => Err(QuantError::ScaleTooLarge { row, group: 0, scale }),
        bits => Ok(bits),
    }
}

fn divide(weight: f32, scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { weight / scale }
}

/// Adds the vectors `picked` (ascending, counted through the rows) of `weights`, `[rows, cols]`, to the samples.
pub fn sample(
    weights: &[f32],
    cols: usize,
    picked: &[usize],
    samples: &mut Vec<[f32; VEC_DIM]>,
) -> Result<(), QuantError> {
    let per_row = cols / VEC_DIM;
    let mut current = None;
    for vector in picked {
        let row = vector / per_row;
        let scale = match current {
            Some((scaled, scale)) if scaled == row => scale,
            _ => f16_to_f32(row_scale(row, &weights[row * cols..][..cols])?),
        };
        current = Some((row, scale));
        let source = &weights[vector * VEC_DIM..][..VEC_DIM];
        samples.push(std::array::from_fn(|d| divide(source[d], scale)));
    }
    Ok(())
}

/// All vectors of some matrices as one set.
pub fn collect(vectors: &[Vec<[f32; VEC_DIM]>]) -> Samples {
    let mut samples = Samples::default();
    vectors.iter().flatten().for_each(|vector| samples.push(vector));
    samples
}

/// Encodes `weights`, `[rows, cols]` of the layout, greedily stage by stage, and measures the error of what a
/// reader will decode. Rows are spread over the threads of the current pool.
///
/// # Errors
/// A weight is not finite, or too large for an f16 scale.
///
/// # Panics
/// If a length or a codebook disagrees with the layout.
pub fn encode(weights: &[f32], layout: &Layout, books: &[Codebook]) -> Result<EncodedMatrix, QuantError> {
    let cols = layout.cols();
    assert_eq!(weights.len(), layout.rows() * cols, "weights of {layout:?}");
    assert_eq!(books.len(), layout.stages(), "codebooks of {layout:?}");
    let scales = weights
        .par_chunks(cols)
        .enumerate()
        .map(|(row, weights)| row_scale(row, weights))
        .collect::<Result<Vec<u16>, QuantError>>()?;
    let mut indices = vec![0; layout.payload_bytes()];
    indices
        .par_chunks_mut(layout.payload_bytes() / layout.blocks())
        .zip(weights.par_chunks(ROW_BLOCK * cols).zip(scales.par_chunks(ROW_BLOCK)))
        .for_each(|(indices, (weights, scales))| encode_rows(weights, scales, layout, books, indices));
    let error = measure(weights, layout, books, &indices, &scales)?;
    Ok(EncodedMatrix { indices, scales, error })
}

/// Encodes up to 64 rows into their index block.
fn encode_rows(weights: &[f32], scales: &[u16], layout: &Layout, books: &[Codebook], indices: &mut [u8]) {
    let (cols, width) = (layout.cols(), layout.vector_bytes());
    for (first, scales) in (0..).step_by(LANES).zip(scales.chunks(LANES)) {
        let scales: Vec<f32> = scales.iter().map(|bits| f16_to_f32(*bits)).collect();
        for vector in 0..layout.vectors() {
            let mut block: Block = [[0.0; LANES]; VEC_DIM];
            for (lane, scale) in scales.iter().enumerate() {
                let source = &weights[(first + lane) * cols + vector * VEC_DIM..][..VEC_DIM];
                for (x, weight) in block.iter_mut().zip(source) {
                    x[lane] = divide(*weight, *scale);
                }
            }
            let mut fields = [[0u8; STAGES_MAX]; LANES];
            for (stage, book) in books.iter().enumerate() {
                let index = book.nearest(&block);
                book.subtract(&mut block, &index);
                for (fields, index) in fields.iter_mut().zip(index) {
                    fields[stage] = index as u8;
                }
            }
            let place = (vector * ROW_BLOCK + first) * width;
            let out = indices[place..].chunks_exact_mut(width);
            for (out, fields) in out.zip(&fields).take(scales.len()) {
                match layout.bits() {
                    IndexBits::Eight => out.copy_from_slice(&fields[..width]),
                    IndexBits::Six => {
                        out.copy_from_slice(&pack_six([fields[0], fields[1], fields[2], fields[3]]));
                    }
                }
            }
        }
    }
}

/// The error of a matrix as its scalar definition decodes it; summed row block by row block.
fn measure(
    weights: &[f32],
    layout: &Layout,
    books: &[Codebook],
    indices: &[u8],
    scales: &[u16],
) -> Result<SquaredError, QuantError> {
    let cols = layout.cols();
    let scales: Vec<u8> = scales.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let tables: Vec<&[f32]> = books.iter().map(|book| book.entries().as_flattened()).collect();
    let matrix = Matrix::new(*layout, indices, &scales);
    let blocks = weights
        .par_chunks(ROW_BLOCK * cols)
        .enumerate()
        .map(|(block, weights)| {
            let mut decoded = vec![0.0; cols];
            let mut sum = SquaredError::default();
            for (row, weights) in weights.chunks_exact(cols).enumerate() {
                matrix.decode_row(block * ROW_BLOCK + row, &tables, &mut decoded)?;
                for (decoded, weight) in decoded.iter().zip(weights) {
                    let (difference, weight) = (f64::from(decoded - weight), f64::from(*weight));
                    sum.difference += difference * difference;
                    sum.source += weight * weight;
                }
            }
            Ok(sum)
        })
        .collect::<Result<Vec<SquaredError>, QuantError>>()?;
    let mut total = SquaredError::default();
    blocks.into_iter().for_each(|sum| total.add(sum));
    Ok(total)
}
