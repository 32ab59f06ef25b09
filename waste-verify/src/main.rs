//! Tells whether a .waste container is sound, and where it is not.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    waste_common::cli::main(waste_verify::TOOL, waste_verify::run)
}
