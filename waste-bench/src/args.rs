//! The command line, as clap sees it.

use clap::{Parser, Subcommand};
use waste_common::cli::CommonArgs;

use crate::cache::CacheArgs;
use crate::disk::DiskArgs;
use crate::encode::EncodeArgs;
use crate::kernels::KernelArgs;
use crate::report::FormatArgs;
use crate::speed::SpeedArgs;
use crate::sweep::SweepArgs;
use crate::synth::SynthArgs;
use crate::vision::VisionArgs;

/// Measure how fast a model runs on this machine, and what limits it.
///
/// Without a subcommand: prefill and decoding of MODEL, cold and warm.
#[derive(Debug, Parser)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Args {
    /// What to measure instead of a model's speed
    #[command(subcommand)]
    pub command: Option<Command>,
    /// A model's speed
    #[command(flatten)]
    pub speed: SpeedArgs,
    /// The form of the result
    #[command(flatten)]
    pub format: FormatArgs,
    /// Output options
    #[command(flatten)]
    pub common: CommonArgs,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Decode with rising budgets, stop where the machine begins to page, and say which budget to use
    Sweep(SweepArgs),
    /// Simulate the expert cache on a routing trace: hit rates by size and policy
    Cache(CacheArgs),
    /// Measure how fast a disk delivers records, past the page cache
    Disk(DiskArgs),
    /// Measure every kernel against the portable one, and look-ups against a plain gather
    Kernels(KernelArgs),
    /// Measure how fast weights are encoded, on one thread
    Encode(EncodeArgs),
    /// Measure how fast a model's vision tower encodes an image
    Vision(VisionArgs),
    /// Write a synthetic container or checkpoint of a named shape
    Synth(SynthArgs),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }
}
