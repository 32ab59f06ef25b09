//! What every WASTE tool agrees on: the container format, the quantisation codecs, the memory plan, the
//! machine, aligned cache-bypassing I/O and the manners of a command line.
//!
//! Nothing outside `cli` knows a command line; it is behind the feature of its name, which a library that embeds
//! the engine goes without. Every error type says which [`Exit`](error::Exit) it means.

pub mod checkpoint;
#[cfg(feature = "cli")]
pub mod cli;
pub mod config;
pub mod container;
pub mod error;
pub mod files;
mod fma;
pub mod importance;
pub mod io;
pub mod json;
pub mod machine;
pub mod plan;
pub mod quant;
pub mod size;
pub mod staging;
pub mod tensors;
#[cfg(test)]
mod testing;
pub mod tokens;
