//! Fetches a checkpoint from a hub: resumable, verified, at one commit.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    waste_common::cli::main(waste_download::TOOL, waste_download::run)
}
