//! Turns a safetensors checkpoint into a .waste container.
#![forbid(unsafe_code)]

fn main() {}
