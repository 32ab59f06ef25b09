//! Fetches a checkpoint from a hub: resumable, verified, at one commit.
//!
//! What is there is never taken on trust: of a partial file only the ranges count that a journal names and whose
//! checksums are right ([`journal`]); a whole file is done when its content has the hub's checksum, is durable and is
//! recorded in the state file that waste-convert reads too ([`waste_common::staging`]).
#![forbid(unsafe_code)]

mod args;
mod check;
mod download;
mod error;
mod fetch;
mod http;
mod hub;
mod journal;
mod part;
mod paths;
mod report;
mod request;
mod space;
mod sums;
mod survey;
mod talk;
mod wait;
mod writing;

use waste_common::cli::{Exit, Failure, Interrupt, Output, Tool};

pub use args::{Against, Args};
pub use error::DownloadError;
pub use hub::{Digest, Entry, Listing};
pub use report::{Check, Done, DryRun, DryRunFile, Problem};
pub use request::{OrderFile, Request, Task, Token, Wanted};

/// The tool.
pub const TOOL: Tool = Tool {
    name: "waste-download",
    version: env!("CARGO_PKG_VERSION"),
    schema: "waste-download/1",
    examples: "  waste-download moonshotai/Kimi-K3 --dest Kimi-K3            go on where it stopped, too
  waste-download moonshotai/Kimi-K3 --dest Kimi-K3 --dry-run  what, how large, does it fit
  waste-download moonshotai/Kimi-K3 --dest Kimi-K3 --exclude '*.safetensors'
  waste-download moonshotai/Kimi-K3 --dest Kimi-K3 --check    every byte that is there; no request is made
  waste-download moonshotai/Kimi-K3 --dest Kimi-K3 --wait-for-space & waste-convert Kimi-K3 k3.waste --follow
  waste-download moonshotai/Kimi-K3 --dest Kimi-K3 --json | waste-convert - k3.waste",
    details: Vec::new,
};

/// Runs the tool: prints [`Done`], [`DryRun`] or [`Check`]; [`Exit::No`] if the last two answer no.
///
/// # Errors
/// Wrong usage, the network, the disk or the content fails for good, another process is at work in the directory, or an
/// interruption.
pub fn run(args: Args, output: &Output) -> Result<Exit, Failure> {
    let request = Request::from_args(args)?;
    let interrupt = Interrupt::install()?;
    let (answer, printed) = match request.task {
        Task::Fetch => (true, report::print(&download::fetch(&request, output, &interrupt)?, output)),
        Task::DryRun => {
            let plan = download::dry_run(&request, output, &interrupt)?;
            (plan.disk_fits != Some(false), report::print(&plan, output))
        }
        Task::Check(against) => {
            let found = check::check(&request, against, output, &interrupt)?;
            (found.ok, report::print(&found, output))
        }
    };
    printed.map(|()| if answer { Exit::Done } else { Exit::No })
}
