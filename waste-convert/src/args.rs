//! The command line.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use waste_common::cli::CommonArgs;

/// Turns a safetensors checkpoint into a .waste container
///
/// The container is written layer by layer. An interrupted conversion goes on where it stopped when the same command
/// is run again; same checkpoint and options give the same bytes, whatever the machine and its threads.
#[derive(Debug, Parser)]
pub struct Args {
    /// Directory of the checkpoint (config.json, index, safetensors), or `-` for the JSON of waste-download
    #[arg(value_name = "CHECKPOINT")]
    pub checkpoint: PathBuf,

    /// Directory of the container to write
    #[arg(value_name = "CONTAINER")]
    pub container: PathBuf,

    /// How routed experts are stored: vq3r and vq4p at 3 bits per weight, vq2r at 2 (its error is far larger)
    #[arg(long, value_enum, default_value_t = Format::Vq3r)]
    pub format: Format,

    /// How much time goes into good weights: the time for encoding roughly doubles with each step
    #[arg(long, value_enum, default_value_t = EffortArg::Normal)]
    pub effort: EffortArg,

    /// Bits of the other matrices; embedding, head and vision tower have 8 always
    #[arg(long, value_name = "BITS", default_value = "4", value_parser = ["4", "8"])]
    pub trunk_bits: String,

    /// Weight vectors each layer's codebooks are fitted to
    #[arg(long, value_name = "N", default_value_t = crate::options::CB_SAMPLE as u32,
          value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub cb_sample: u32,

    /// Matrices of the trunk with fewer elements stay f32
    #[arg(long, value_name = "N", default_value_t = crate::options::TRUNK_MIN_ELEMENTS)]
    pub trunk_min_elements: u64,

    /// Seed of the samples: another one gives a container that is as good, of other bytes
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Worker threads; all CPUs by default
    #[arg(long, value_name = "N", env = "WASTE_THREADS", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,

    /// Replace what stands in CONTAINER: a finished container, or one begun with other options
    #[arg(long)]
    pub force: bool,

    /// Common options.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// Names of the expert formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum Format {
    Vq3r,
    Vq2r,
    Vq4p,
}

/// Names of the efforts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EffortArg {
    /// The cost of the published recipe: residual k-means, greedy search
    Fast,
    /// Codebooks refined together, a beam search of 4
    Normal,
    /// A beam search of 16, row scales and codes fitted to each other
    Max,
}
