//! Helpers shared by the tests across the WASTE tools.
#![forbid(unsafe_code)]

pub mod files;
pub mod hub;
pub mod logits;
pub mod synthetic;
pub mod tool;
