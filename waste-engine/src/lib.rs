//! The WASTE model engine.

pub mod sampler;
pub mod tokenizer;
