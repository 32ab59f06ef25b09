//! The command line as it is written.

use std::path::PathBuf;

use waste_common::cli::CommonArgs;

/// Tell whether a container is sound, and where it is not: every checksum, header, index, scale and padding byte.
#[derive(Debug, clap::Parser)]
pub struct Args {
    /// The container's directory; `-` takes it from the JSON of the previous tool
    #[arg(value_name = "CONTAINER")]
    pub container: PathBuf,

    /// Read headers and sizes only, no payload and no checksum of it
    #[arg(long)]
    pub quick: bool,

    /// The manifest must have this SHA-256
    #[arg(long, value_name = "SHA256")]
    pub expect_manifest: Option<String>,

    /// Compare every file with this list in the format of sha256sum; missing and additional files are named
    #[arg(long, value_name = "FILE")]
    pub sums: Option<PathBuf>,

    /// If the container is sound, write the SHA-256 of every file to this list (for --sums and `sha256sum -c`)
    #[arg(long, value_name = "FILE")]
    pub write_sums: Option<PathBuf>,

    /// Compare the decoded weights with the checkpoint the container was made from
    #[arg(long, value_name = "CHECKPOINT")]
    pub source: Option<PathBuf>,

    /// How many evenly spaced experts of a layer are compared with --source, or `all` [default: 4]
    #[arg(long, value_name = "N", requires = "source")]
    pub experts: Option<String>,

    /// Threads that read and check [default: one per CPU]
    #[arg(long, value_name = "N", env = "WASTE_THREADS", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,

    /// The options every tool has.
    #[command(flatten)]
    pub common: CommonArgs,
}
