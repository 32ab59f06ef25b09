//! The files of `waste-run eval --save-logits`, and golden ones to compare them with.

use std::path::Path;

use safetensors::{Dtype, SafeTensors};

/// A safetensors file.
#[derive(Debug)]
pub struct Tensors(Vec<u8>);

impl Tensors {
    /// Reads a file.
    ///
    /// # Panics
    /// It cannot be read. (Tests only.)
    pub fn open(path: &Path) -> Tensors {
        Tensors(std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
    }

    /// A tensor's shape, and its elements widened to f64.
    ///
    /// # Panics
    /// There is none of that name, or of another type than f64, f32 or i32. (Tests only.)
    pub fn get(&self, name: &str) -> (Vec<usize>, Vec<f64>) {
        let file = SafeTensors::deserialize(&self.0).unwrap_or_else(|error| panic!("{error}"));
        let tensor = file.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        let data = tensor.data();
        let values = match tensor.dtype() {
            Dtype::F64 => data.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
            Dtype::F32 => data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b).into()).collect(),
            Dtype::I32 => data.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect(),
            other => panic!("{name} is {other:?}"),
        };
        (tensor.shape().to_vec(), values)
    }
}

/// The largest relative L2 difference of any row of `width`.
///
/// # Panics
/// The lengths differ. (Tests only.)
pub fn worst_row(found: &[f64], expected: &[f64], width: usize) -> f64 {
    assert_eq!(found.len(), expected.len());
    let rows = found.chunks_exact(width).zip(expected.chunks_exact(width));
    let distance = |(found, expected): (&[f64], &[f64])| {
        let difference: f64 = found.iter().zip(expected).map(|(f, e)| (f - e).powi(2)).sum();
        (difference / expected.iter().map(|e| e * e).sum::<f64>()).sqrt()
    };
    rows.map(distance).fold(0.0, f64::max)
}
