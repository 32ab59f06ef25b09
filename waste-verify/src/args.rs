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

    /// Read everything from the disk, also what the page cache holds: what was written a moment ago is checked in memory
    /// otherwise (Linux). Repairing does so anyway
    #[arg(long, conflicts_with = "quick")]
    pub from_disk: bool,

    /// The manifest must have this SHA-256
    #[arg(long, value_name = "SHA256")]
    pub expect_manifest: Option<String>,

    /// If the container is sound, write the SHA-256 of every file to a list for `sha256sum -c`, by default SHA256SUMS
    /// in the container. The container's own checksums guard against accidents; against tampering only such a list
    /// does, kept where nobody else can write
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    pub sums: Option<Option<PathBuf>>,

    /// Compare every file with a list in the format of sha256sum; missing and additional files are named
    #[arg(long, value_name = "FILE")]
    pub check_sums: Option<PathBuf>,

    /// Go on where an earlier run with the same STATE was interrupted; the file is removed at the end
    #[arg(long, value_name = "STATE", conflicts_with = "quick")]
    pub resume: Option<PathBuf>,

    /// Copy what is bad from the copy that --from names, and check again; records one by one, other files whole
    #[arg(long, requires = "from", conflicts_with_all = ["quick", "resume", "check_sums", "expect_manifest"])]
    pub repair: bool,

    /// Another copy of the container, for --repair
    #[arg(long, value_name = "OTHER", requires = "repair")]
    pub from: Option<PathBuf>,

    /// Give checksums to a sound container that has none; readers that do not know them are not disturbed
    #[arg(long, conflicts_with_all = ["quick", "repair", "expect_manifest"])]
    pub seal: bool,

    /// Compare the decoded weights with the checkpoint the container was made from
    #[arg(long, value_name = "CHECKPOINT")]
    pub source: Option<PathBuf>,

    /// How many evenly spaced experts of a layer are compared with --source, or `all` [default: 4]
    #[arg(long, value_name = "N", requires = "source")]
    pub experts: Option<String>,

    /// Threads that read and check [default: one per CPU]
    #[arg(
        short,
        long,
        alias = "threads",
        value_name = "N",
        env = "WASTE_THREADS",
        value_parser = clap::value_parser!(u16).range(1..=1024)
    )]
    pub jobs: Option<u16>,

    /// The options every tool has.
    #[command(flatten)]
    pub common: CommonArgs,
}
