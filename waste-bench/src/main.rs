//! Measures decoding, prefill, disk, kernels and cache policies; writes synthetic containers.
#![forbid(unsafe_code)]

fn main() {}
