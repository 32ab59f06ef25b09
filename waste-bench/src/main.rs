//! Measures decoding, prefill, disk and cache policies; writes synthetic containers.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    waste_common::cli::main(waste_bench::TOOL, waste_bench::run)
}
