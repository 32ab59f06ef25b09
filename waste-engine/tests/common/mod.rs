//! Reading the golden vectors, and comparing with them.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

/// A path below the project's `tests` folder.
pub fn path(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests").join(relative)
}

/// A file of tensors, widened to f64.
pub struct Golden(Vec<u8>);

impl Golden {
    pub fn open(relative: &str) -> Self {
        let path = path(relative);
        Golden(std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
    }

    pub fn shape(&self, name: &str) -> Vec<usize> {
        SafeTensors::deserialize(&self.0).unwrap().tensor(name).unwrap().shape().to_vec()
    }

    pub fn has(&self, name: &str) -> bool {
        SafeTensors::deserialize(&self.0).unwrap().tensor(name).is_ok()
    }

    pub fn bytes(&self, name: &str) -> Vec<u8> {
        SafeTensors::deserialize(&self.0).unwrap().tensor(name).unwrap().data().to_vec()
    }

    pub fn f64(&self, name: &str) -> Vec<f64> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = file.tensor(name).unwrap_or_else(|_| panic!("no tensor {name}"));
        let data = tensor.data();
        match tensor.dtype() {
            Dtype::F64 => data.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect(),
            Dtype::F32 => {
                data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect()
            }
            Dtype::I32 => {
                data.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap()).into()).collect()
            }
            Dtype::U8 => data.iter().map(|&b| b.into()).collect(),
            other => panic!("{name} is {other:?}"),
        }
    }

    pub fn f32(&self, name: &str) -> Vec<f32> {
        self.f64(name).into_iter().map(|x| x as f32).collect()
    }

    pub fn u32(&self, name: &str) -> Vec<u32> {
        self.f64(name).into_iter().map(|x| x as u32).collect()
    }
}

/// Largest absolute difference.
pub fn max_abs(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(f, e)| (f64::from(*f) - e).abs()).fold(0.0, f64::max)
}

/// Relative L2 difference.
pub fn relative_l2(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let difference: f64 = found.iter().zip(expected).map(|(f, e)| (f64::from(*f) - e).powi(2)).sum();
    let norm: f64 = expected.iter().map(|e| e * e).sum();
    (difference / norm).sqrt()
}

/// Asserts that every row of `width` differs by at most `relative` (L2) and `absolute`.
pub fn assert_rows(what: &str, found: &[f32], expected: &[f64], width: usize, relative: f64, absolute: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let rows = found.chunks_exact(width).zip(expected.chunks_exact(width));
    for (row, (found, expected)) in rows.enumerate() {
        let (l2, abs) = (relative_l2(found, expected), max_abs(found, expected));
        assert!(l2 <= relative && abs <= absolute, "{what}, row {row}: relative L2 {l2:e}, max abs {abs:e}");
    }
}

/// Index of the largest value, the smaller one on ties.
pub fn argmax(values: &[f32]) -> u32 {
    let mut best = 0;
    for (i, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = i;
        }
    }
    best as u32
}
