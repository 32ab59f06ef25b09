//! One matrix of an expert: row scales, indices, and how far the result is from the source.

use rayon::prelude::*;
use waste_common::quant::QuantError;
use waste_common::quant::half::{f16_to_f32, f32_to_f16};
use waste_common::quant::search::{Codebooks, Vector};
use waste_common::quant::vq::{IndexBits, Layout, Matrix, ROW_BLOCK, VEC_DIM, pack_six};

use crate::fit::Samples;
use crate::options::Recipe;

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

/// The f16 bits of a row's first scale: its largest magnitude, at least 1e-8. Weights are divided by the rounded scale,
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

/// A row's vectors over its scale.
fn divided(weights: &[f32], scale: f32, out: &mut Vec<Vector>) {
    out.clear();
    let divide = |weight: f32| if scale == 0.0 { 0.0 } else { weight / scale };
    out.extend(weights.as_chunks().0.iter().map(|vector| vector.map(divide)));
}

/// All vectors of a row, weighted by what an error of theirs means for the matrix, whose columns may matter more or less.
///
/// # Errors
/// A weight is not finite, or too large for an f16 scale.
pub fn sample(row: usize, weights: &[f32], importance: Option<&[f32]>) -> Result<Samples, QuantError> {
    let scale = f16_to_f32(row_scale(row, weights)?);
    let mut vectors = Vec::new();
    divided(weights, scale, &mut vectors);
    let mut weights = vec![scale * scale; vectors.len()];
    for (weight, columns) in weights.iter_mut().zip(importance.unwrap_or_default().as_chunks::<VEC_DIM>().0) {
        *weight *= columns.iter().sum::<f32>() / VEC_DIM as f32;
    }
    Ok(Samples { vectors, weights })
}

/// Encodes `weights`, `[rows, cols]` of the layout, and measures the error of what a reader will decode. With the
/// `importance` of each column, it is the weighted error that is made small. Work is spread over the threads of the
/// current pool.
///
/// # Errors
/// A weight is not finite, or too large for an f16 scale.
///
/// # Panics
/// If a length or a codebook disagrees with the layout.
pub fn encode(
    weights: &[f32],
    layout: &Layout,
    books: &Codebooks,
    importance: Option<&[f32]>,
    recipe: &Recipe,
) -> Result<EncodedMatrix, QuantError> {
    let cols = layout.cols();
    assert_eq!(weights.len(), layout.rows() * cols, "weights of {layout:?}");
    assert_eq!(books.stages(), layout.stages(), "codebooks of {layout:?}");
    let mut scales = weights
        .par_chunks(cols)
        .enumerate()
        .map(|(row, weights)| row_scale(row, weights))
        .collect::<Result<Vec<u16>, QuantError>>()?;
    let mut indices = vec![0; layout.payload_bytes()];
    match importance {
        None => indices
            .par_chunks_mut(layout.payload_bytes() / layout.blocks())
            .zip(weights.par_chunks(ROW_BLOCK * cols).zip(scales.par_chunks_mut(ROW_BLOCK)))
            .for_each(|(indices, (weights, scales))| {
                encode_rows(weights, scales, layout, books, recipe, indices);
            }),
        Some(columns) => encode_columns(weights, &mut scales, layout, books, columns, recipe, &mut indices),
    }
    let error = measure(weights, layout, books, &indices, &scales)?;
    Ok(EncodedMatrix { indices, scales, error })
}

/// Encodes up to 64 rows into their index block; the scales become those fitted to the indices.
fn encode_rows(
    weights: &[f32],
    scales: &mut [u16],
    layout: &Layout,
    books: &Codebooks,
    recipe: &Recipe,
    indices: &mut [u8],
) {
    let (cols, width) = (layout.cols(), layout.vector_bytes());
    let mut vectors = Vec::with_capacity(layout.vectors());
    let mut fields = vec![0; layout.vectors() * layout.stages()];
    for (row, (weights, scale)) in weights.chunks_exact(cols).zip(scales).enumerate() {
        for _ in 0..recipe.passes {
            divided(weights, f16_to_f32(*scale), &mut vectors);
            search(books, recipe.width, &vectors, &mut fields);
            let fitted = fitted_scale(weights, books, fields.chunks_exact(layout.stages()), None);
            let fitted = fitted.unwrap_or(*scale);
            if std::mem::replace(scale, fitted) == fitted {
                break;
            }
        }
        for (vector, fields) in fields.chunks_exact(layout.stages()).enumerate() {
            pack(fields, layout, &mut indices[(vector * ROW_BLOCK + row) * width..][..width]);
        }
    }
}

/// Encodes a matrix whose columns matter more or less, vector by vector of columns: what is searched is the nearest sum
/// after both sides were multiplied by the roots of the columns' importance, which all rows share.
fn encode_columns(
    weights: &[f32],
    scales: &mut Vec<u16>,
    layout: &Layout,
    books: &Codebooks,
    importance: &[f32],
    recipe: &Recipe,
    indices: &mut [u8],
) {
    let (cols, rows, stages) = (layout.cols(), layout.rows(), layout.stages());
    // [vectors][rows][stages]
    let mut fields = vec![0; layout.vectors() * rows * stages];
    for _ in 0..recipe.passes {
        let columns = importance.par_chunks_exact(VEC_DIM).zip(fields.par_chunks_exact_mut(rows * stages));
        columns.enumerate().for_each(|(vector, (importance, fields))| {
            let mut roots = [0.0; VEC_DIM];
            roots.iter_mut().zip(importance).for_each(|(root, importance)| *root = importance.sqrt());
            let vectors: Vec<Vector> = weights
                .chunks_exact(cols)
                .zip(&*scales)
                .map(|(row, scale)| {
                    let scale = f16_to_f32(*scale);
                    let weights = &row[vector * VEC_DIM..];
                    std::array::from_fn(|d| if scale == 0.0 { 0.0 } else { weights[d] / scale * roots[d] })
                })
                .collect();
            search(&books.scaled(&roots), recipe.width, &vectors, fields);
        });
        let fitted =
            weights.par_chunks_exact(cols).zip(&*scales).enumerate().map(|(row, (weights, scale))| {
                let fields = fields.chunks_exact(stages).skip(row).step_by(rows);
                fitted_scale(weights, books, fields, Some(importance)).unwrap_or(*scale)
            });
        let fitted: Vec<u16> = fitted.collect();
        if std::mem::replace(scales, fitted) == *scales {
            break;
        }
    }
    let width = layout.vector_bytes();
    for (place, fields) in fields.chunks_exact(stages).enumerate() {
        let (vector, row) = (place / rows, place % rows);
        let block = row / ROW_BLOCK * layout.vectors();
        let at = ((block + vector) * ROW_BLOCK + row % ROW_BLOCK) * width;
        pack(fields, layout, &mut indices[at..][..width]);
    }
}

fn search(books: &Codebooks, width: usize, vectors: &[Vector], fields: &mut [u8]) {
    if width == 1 {
        books.greedy(vectors, fields);
    } else {
        books.beam(width, vectors, fields);
    }
}

/// The indices of a vector, as they are stored.
fn pack(fields: &[u8], layout: &Layout, out: &mut [u8]) {
    match layout.bits() {
        IndexBits::Eight => out.copy_from_slice(fields),
        IndexBits::Six => out.copy_from_slice(&pack_six([fields[0], fields[1], fields[2], fields[3]])),
    }
}

/// The f16 scale with the least squared error for given indices, of a row's vectors one after the other; `None` if there
/// is none above 0.
fn fitted_scale<'a>(
    weights: &[f32],
    books: &Codebooks,
    fields: impl Iterator<Item = &'a [u8]>,
    importance: Option<&[f32]>,
) -> Option<u16> {
    let (mut product, mut square) = (0.0f64, 0.0f64);
    for (i, (vector, fields)) in weights.as_chunks::<VEC_DIM>().0.iter().zip(fields).enumerate() {
        let sum = books.sum(fields);
        let (mut p, mut s) = (0.0f32, 0.0f32);
        match importance {
            None => {
                for (weight, sum) in vector.iter().zip(&sum) {
                    p += weight * sum;
                    s += sum * sum;
                }
            }
            Some(importance) => {
                for ((weight, sum), importance) in vector.iter().zip(&sum).zip(&importance[i * VEC_DIM..]) {
                    p += importance * weight * sum;
                    s += importance * sum * sum;
                }
            }
        }
        product += f64::from(p);
        square += f64::from(s);
    }
    let bits = f32_to_f16((product / square) as f32);
    (bits > 0 && bits < 0x7c00).then_some(bits)
}

/// The error of a matrix as its scalar definition decodes it; summed row block by row block.
fn measure(
    weights: &[f32],
    layout: &Layout,
    books: &Codebooks,
    indices: &[u8],
    scales: &[u16],
) -> Result<SquaredError, QuantError> {
    let cols = layout.cols();
    let scales: Vec<u8> = scales.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let tables: Vec<&[f32]> = (0..books.stages()).map(|stage| books.entries(stage).as_flattened()).collect();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Effort;
    use crate::random::SplitMix64;
    use waste_common::container::{ExpertFmt, ExpertQuant, Geometry, Kind};

    fn noise(count: usize, seed: u64) -> Vec<f32> {
        let mut random = SplitMix64::of(&[seed]);
        (0..count).map(|_| (random.draw() >> 40) as f32 / (1u64 << 23) as f32 - 1.0).collect()
    }

    /// Errors of the columns that matter and of the others, with this importance for every second one, which
    /// matters.
    fn errors(fmt: ExpertFmt, stages: u32, entries: u32, effort: Effort, importance: f32) -> [f64; 2] {
        let quant = ExpertQuant::new(fmt, stages, entries);
        let geometry = Geometry::new(&quant, 136, 128).unwrap();
        let layout = *geometry.layout(Kind::Gate);
        let weights = noise(layout.rows() * layout.cols(), 1);
        let books = (0..stages).map(|stage| {
            let entries = noise(entries as usize * VEC_DIM, 2 + u64::from(stage));
            entries.as_chunks().0.iter().map(|c| c.map(|x| x * 0.6f32.powi(stage as i32))).collect()
        });
        let books = Codebooks::new(books.collect());
        let columns: Vec<f32> =
            (0..layout.cols()).map(|c| if c % 2 == 0 { importance } else { 1.0 }).collect();
        let found = encode(&weights, &layout, &books, Some(&columns), &effort.recipe()).unwrap();
        let scales: Vec<u8> = found.scales.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let tables: Vec<&[f32]> =
            (0..books.stages()).map(|stage| books.entries(stage).as_flattened()).collect();
        let matrix = Matrix::new(layout, &found.indices, &scales);
        let (mut sums, mut decoded) = ([0.0; 2], vec![0.0; layout.cols()]);
        for (row, weights) in weights.chunks_exact(layout.cols()).enumerate() {
            matrix.decode_row(row, &tables, &mut decoded).unwrap();
            for (column, (a, b)) in decoded.iter().zip(weights).enumerate() {
                sums[column % 2] += f64::from(a - b).powi(2);
            }
        }
        assert!((sums[0] + sums[1] - found.error.difference).abs() < 1e-6 * found.error.difference);
        if importance == 1.0 {
            let plain = encode(&weights, &layout, &books, None, &effort.recipe()).unwrap();
            assert_eq!(
                (plain.indices, plain.scales),
                (found.indices, found.scales),
                "weights of 1 change nothing"
            );
        }
        sums
    }

    #[test]
    fn columns_that_matter_come_out_better() {
        for (fmt, stages, entries) in [(ExpertFmt::Vq3r, 3, 256), (ExpertFmt::Vq4p, 4, 64)] {
            for effort in [Effort::Fast, Effort::Normal] {
                let (even, weighted) =
                    (errors(fmt, stages, entries, effort, 1.0), errors(fmt, stages, entries, effort, 30.0));
                assert!(weighted[0] < 0.8 * even[0] && weighted[1] > even[1], "{even:?} {weighted:?}");
            }
        }
    }
}
