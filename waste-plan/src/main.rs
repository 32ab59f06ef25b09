//! Plans the memory a model needs on a machine.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    waste_common::cli::main(waste_plan::TOOL, waste_plan::run)
}
