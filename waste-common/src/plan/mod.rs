//! The memory plan: what a model needs on a machine, computed before anything is loaded.

pub mod scratch;
