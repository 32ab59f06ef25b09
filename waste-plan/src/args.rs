//! The command line.

use std::path::PathBuf;

use waste_common::cli::{ByteSize, CommonArgs};
use waste_common::plan::{Budget, KvType, PlanOptions, RamShare};

/// Plan the memory a model needs on a machine: what it is made of, how much to give it, and whether it fits
#[derive(Clone, Debug, clap::Parser)]
#[allow(missing_docs)]
pub struct Args {
    /// A container, a checkpoint, a config.json, a known model (kimi-k3, kimi-linear-48b), or `-`
    pub model: PathBuf,

    /// Plan for a machine with so much RAM instead of this one
    #[arg(long, value_name = "SIZE", help_heading = "Machine")]
    pub ram: Option<ByteSize>,
    /// The share of the usable RAM a budget may take
    #[arg(long, value_name = "N/M", default_value_t, help_heading = "Machine")]
    pub ram_share: RamShare,
    /// Plan also if even the floor is above the usable RAM
    #[arg(long, help_heading = "Machine")]
    pub allow_swap: bool,
    /// Compute threads [default: one for each CPU]
    #[arg(long, value_name = "N", env = "WASTE_THREADS", help_heading = "Machine")]
    pub threads: Option<usize>,

    /// Context length in tokens
    #[arg(long, value_name = "N", default_value_t = PlanOptions::CTX, help_heading = "Run")]
    pub ctx: usize,
    /// How the latents of the context are kept: f32, f16 or q8
    #[arg(long, value_name = "TYPE", default_value_t, help_heading = "Run")]
    pub kv: KvType,
    /// RAM to take: auto, max (all experts if they fit) or a size
    #[arg(long, value_name = "auto|max|SIZE", default_value_t, env = "WASTE_BUDGET", help_heading = "Run")]
    pub budget: Budget,
    /// Accept images
    #[arg(long, help_heading = "Run")]
    pub vision: bool,
    /// Tokens of a prefill chunk
    #[arg(long, value_name = "N", default_value_t = PlanOptions::CHUNK, help_heading = "Run")]
    pub prefill_chunk: usize,
    /// Sequences that may decode together
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Run")]
    pub parallel: usize,

    /// Plan the disk too, for files in this directory
    #[arg(long, value_name = "DIR", help_heading = "Disk")]
    pub dest: Option<PathBuf>,
    /// Estimate the speed with a disk that reads so many GB (10^9 bytes) a second
    #[arg(long, value_name = "X", conflicts_with = "bench", help_heading = "Disk")]
    pub disk_gbps: Option<f64>,
    /// Take the disk's speed from a file with the output of `waste-bench disk --json`
    #[arg(long, value_name = "FILE", help_heading = "Disk")]
    pub bench: Option<PathBuf>,
    /// Share of the experts found in the cache, from 0 to 1 [default: 1 if all are held, else 0]
    #[arg(long, value_name = "P", help_heading = "Disk")]
    pub hit_rate: Option<f64>,

    #[command(flatten)]
    pub common: CommonArgs,
}
