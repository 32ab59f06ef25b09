//! Turns a safetensors checkpoint into a .waste container.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    waste_common::cli::main(waste_convert::TOOL, waste_convert::run)
}
