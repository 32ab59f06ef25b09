//! The command line, as clap sees it.

use clap::{Parser, Subcommand};
use waste_common::cli::CommonArgs;

use crate::synth::SynthArgs;

/// Measure how fast a model runs on this machine, and what limits it.
#[derive(Debug, Parser)]
pub struct Args {
    /// What to measure
    #[command(subcommand)]
    pub command: Command,
    /// Output options
    #[command(flatten)]
    pub common: CommonArgs,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Write a synthetic container or checkpoint of a named shape
    Synth(SynthArgs),
}
