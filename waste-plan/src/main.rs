//! Plans the memory a model needs on a machine.
#![forbid(unsafe_code)]

fn main() {}
