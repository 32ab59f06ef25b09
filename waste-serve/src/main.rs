//! Serves a model over HTTP.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    waste_common::cli::main(waste_serve::TOOL, waste_serve::run)
}
