//! The command line as it is written.

use std::path::PathBuf;

use waste_common::cli::{ByteSize, CommonArgs};

/// Fetch a checkpoint from a hub: resumable to the byte, every file checked, all of one commit.
///
/// Proxies are taken from HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY. A token for private and gated repositories
/// comes from --token-file, HF_TOKEN or the file HF_TOKEN_PATH; it is sent to the hub itself only.
#[derive(Debug, clap::Parser)]
pub struct Args {
    /// The repository, such as moonshotai/Kimi-K3
    #[arg(value_name = "REPO")]
    pub repo: String,

    /// The directory the files go to; made if it is not there
    #[arg(long, value_name = "DIR")]
    pub dest: PathBuf,

    /// Branch, tag or commit; what a branch was at first is kept through all resumes [default: main]
    #[arg(long, value_name = "REV")]
    pub revision: Option<String>,

    /// Take what the branch is now, though an earlier run began with another commit; equal files are kept
    #[arg(long)]
    pub update: bool,

    /// Only files that match; may be repeated (`*` matches `/` too)
    #[arg(long, value_name = "GLOB", help_heading = "What")]
    pub include: Vec<String>,

    /// No file that matches; may be repeated
    #[arg(long, value_name = "GLOB", help_heading = "What")]
    pub exclude: Vec<String>,

    /// Fetch the files named here first, in this order, one name a line; read again for every file [default:
    /// DIR/.waste-order, where waste-convert --follow says what it wants]
    #[arg(long, value_name = "FILE", help_heading = "What")]
    pub order_file: Option<PathBuf>,

    /// Only say what would be fetched, how large it is, and whether it fits
    #[arg(long, conflicts_with = "check", help_heading = "What")]
    pub dry_run: bool,

    /// Only check the files that are there, every byte: against what an earlier run knows (local), or against the hub
    /// (server). What is found bad is fetched again by the next run
    #[arg(
        long,
        value_name = "AGAINST",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "local",
        help_heading = "What"
    )]
    pub check: Option<Against>,

    /// Files fetched at once
    #[arg(short, long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub jobs: u16,

    /// The hub
    #[arg(
        long,
        value_name = "URL",
        env = "HF_ENDPOINT",
        default_value = "https://huggingface.co",
        help_heading = "Network"
    )]
    pub endpoint: String,

    /// A file that holds the token for the hub
    #[arg(long, value_name = "FILE", help_heading = "Network")]
    pub token_file: Option<PathBuf>,

    /// At most so many bytes a second, all files together
    #[arg(long, value_name = "SIZE", help_heading = "Network")]
    pub limit_rate: Option<ByteSize>,

    /// Give up after so many failures in a row without a byte in between
    #[arg(long, value_name = "N", default_value_t = 20, help_heading = "Network")]
    pub retries: u32,

    /// The first wait before a retry is at most this; it doubles up to a minute
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, help_heading = "Network")]
    pub retry_wait: f64,

    /// A connection without a byte for so long has stalled
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, help_heading = "Network")]
    pub stall: f64,

    /// Leave so much of the disk free
    #[arg(long, value_name = "SIZE", default_value = "1GiB", help_heading = "Disk")]
    pub reserve: ByteSize,

    /// Wait for room on the disk instead of stopping
    #[arg(long, help_heading = "Disk")]
    pub wait_for_space: bool,

    /// The options every tool has.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// What files are compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Against {
    /// What an earlier run wrote down; no request is made.
    Local,
    /// What the hub says now.
    Server,
}
