//! Runs a model: text, evaluation, perplexity, tokens.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    waste_common::cli::main(waste_run::TOOL, waste_run::run)
}
