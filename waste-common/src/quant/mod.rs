//! Weight formats: encoding, decoding and the scalar definition that every kernel must match.
//!
//! - [`half`]: f16 and bf16, one decoder for all of the project
//! - [`q8g`], [`q4g`], [`q3g`]: the trunk, groups of 128 along a row with one f16 scale each
//! - [`mxfp4`]: the routed experts of a checkpoint
//! - [`vq`]: the routed experts of a container, [`search`]: which codebook entries stand for given weights

pub mod half;
pub mod mxfp4;
pub mod q3g;
pub mod q4g;
pub mod q8g;
pub mod search;
pub mod vq;

#[cfg(test)]
pub(crate) mod golden;
mod grouped;

use crate::error::{Coded, Exit};

pub use grouped::{Encoded, GROUP, groups, padded, scale_count};

/// Why weights could not be encoded or decoded.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum QuantError {
    #[error("cannot quantise row {row}: weight {col} is {value}, a finite number was expected")]
    NotFinite { row: usize, col: usize, value: f32 },
    #[error(
        "cannot quantise row {row}: the scale {scale} of group {group} is too large for f16 (at most 65504)"
    )]
    ScaleTooLarge { row: usize, group: usize, scale: f32 },
    #[error(
        "vector quantisation of {rows} x {cols}, {stages} stages, {entries} entries, {bits} bits: {problem}"
    )]
    Layout { rows: u64, cols: u64, stages: u32, entries: u32, bits: u32, problem: &'static str },
    #[error("index {found} of row {row}, vector {vector}, stage {stage}: the codebook has {entries} entries")]
    Index { row: usize, vector: usize, stage: usize, found: u8, entries: usize },
    #[error("the padding row {row} of the last block holds index bytes other than 0 (vector {vector})")]
    Padding { row: usize, vector: usize },
}

impl Coded for QuantError {
    fn exit(&self) -> Exit {
        Exit::Data
    }

    fn code(&self) -> &'static str {
        match self {
            QuantError::NotFinite { .. } => "weight_not_finite",
            QuantError::ScaleTooLarge { .. } => "weight_too_large",
            QuantError::Layout { .. } => "bad_vq_layout",
            QuantError::Index { .. } => "index_out_of_range",
            QuantError::Padding { .. } => "index_padding_not_zero",
        }
    }
}
