//! Helpers shared by the tests across the WASTE tools.
#![forbid(unsafe_code)]

pub mod synthetic;
