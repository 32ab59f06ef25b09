//! Measures decoding, prefill, disk and cache policies; writes synthetic containers.
#![forbid(unsafe_code)]

pub mod args;
pub mod environment;
pub mod random;
pub mod report;
pub mod speed;
pub mod stats;
pub mod synth;

use waste_common::cli::{Exit, Failure, Output, Tool};
use waste_engine::kernels::Kernels;

use args::{Args, Command};

/// What the tool says about itself.
pub const TOOL: Tool = Tool {
    name: "waste-bench",
    version: env!("CARGO_PKG_VERSION"),
    schema: "waste-bench/1",
    examples: "  \
  A container to measure:  waste-bench synth kimi-linear-48b bench.waste --layers 6
  How fast it is:          waste-bench bench.waste --prompt-tokens 512 --tokens 128 --runs 5
  One option against it:   waste-bench bench.waste --budget 4GiB --compare lookahead=0,6",
    details,
};

fn details() -> Vec<(&'static str, String)> {
    let kernels =
        Kernels::from_env().map_or_else(|error| error.to_string(), |kernels| kernels.name.to_owned());
    vec![("kernels", kernels), ("kernels in this build", Kernels::NAMES.join(", "))]
}

/// Runs the tool.
///
/// # Errors
/// Whatever the subcommand meets, with its exit code.
pub fn run(args: Args, output: &Output) -> Result<Exit, Failure> {
    match args.command {
        None => speed::run(args.speed, args.format, output),
        Some(Command::Synth(args)) => {
            output.set_schema("waste-bench-synth/1");
            synth::run(args, output)
        }
    }
}
