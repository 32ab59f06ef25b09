//! Measures decoding, prefill, disk, kernels and cache policies; writes synthetic containers.
#![forbid(unsafe_code)]

pub mod args;
pub mod cache;
pub mod disk;
pub mod encode;
pub mod environment;
pub mod kernels;
pub mod plain;
pub mod random;
pub mod report;
pub mod speed;
pub mod stats;
pub mod sweep;
pub mod synth;
pub mod trace;
pub mod vision;

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
  One option against it:   waste-bench bench.waste --budget 4GiB --compare lookahead=0,6
  What the CPU gives:      waste-bench kernels --only vq_rows
  How fast a disk is:      waste-bench disk /data --json > disk.json; waste-plan k3.waste --bench disk.json
  How fast an encoder is:  waste-bench encode
  How long an image takes: waste-bench vision k3.waste
  Weights to encode:       waste-bench synth wide-k3 bench --layers 3 --checkpoint --gaussian
  Which budget is best:    waste-bench sweep bench.waste --budget 2GiB..16GiB
  What a cache would hit:  waste-bench cache --trace tests/traces/kimi-linear-48b-300tok.jsonl",
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
    let format = args.format;
    match args.command {
        None => speed::run(args.speed, format, output),
        Some(Command::Sweep(args)) => {
            output.set_schema("waste-bench-sweep/1");
            sweep::run(args, format, output)
        }
        Some(Command::Cache(args)) => {
            output.set_schema("waste-bench-cache/1");
            cache::run(args, format, output)
        }
        Some(Command::Disk(args)) => {
            output.set_schema("waste-bench-disk/1");
            disk::run(args, format, output)
        }
        Some(Command::Kernels(args)) => {
            output.set_schema("waste-bench-kernels/1");
            kernels::run(args, format, output)
        }
        Some(Command::Encode(args)) => {
            output.set_schema("waste-bench-encode/1");
            encode::run(args, output)
        }
        Some(Command::Vision(args)) => {
            output.set_schema("waste-bench-vision/1");
            vision::run(args, output)
        }
        Some(Command::Synth(args)) => {
            output.set_schema("waste-bench-synth/1");
            synth::run(args, output)
        }
    }
}
