//! Chat formats: their vectors, and what must hold for any conversation and any answer.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod properties;
mod turns;
mod util;
mod vectors;
