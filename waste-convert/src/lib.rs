//! Turns a safetensors checkpoint into a .waste container.
//!
//! [`convert()`](convert::convert) is the whole of it; [`layer::convert_layer`] is its unit of work.
#![forbid(unsafe_code)]

pub mod args;
mod conversion;
pub mod convert;
mod crew;
pub mod encode;
mod error;
pub mod fit;
pub mod importance;
pub mod layer;
mod linear;
mod options;
mod parts;
mod probe;
pub mod random;
mod run;
mod sidecars;
pub mod source;
mod state;
mod supply;
mod tracker;
pub mod trunk;
mod worker;

pub use convert::{Report, Request, Work};
pub use error::ConvertError;
pub use options::{CB_SAMPLE, Effort, Options, RECIPE, Recipe};
pub use supply::Reclaim;

use std::path::PathBuf;

use args::{Args, EffortArg, Format, ReclaimArg};
use waste_common::cli::chain::Kind;
use waste_common::cli::{Exit, Failure, Interrupt, Output, Tool, resolve_model};
use waste_common::container::ExpertFmt;
use waste_common::importance::Importance;

/// What the tool says about itself.
pub const TOOL: Tool = Tool {
    name: "waste-convert",
    version: env!("CARGO_PKG_VERSION"),
    schema: "waste-convert/1",
    examples: "  waste-convert k3 k3.waste                       convert, or go on after an interruption\n  \
               waste-convert k3 k3.waste --trunk-bits 8        a more exact trunk\n  \
               waste-convert k3 k3.waste --format vq4p         experts whose tables fit vector registers\n  \
               waste-convert k3 k3.waste --effort max          better weights, at some times the time\n  \
               waste-convert k3 k3.waste --importance k3.imp   errors weigh as waste-run perplexity saw them\n  \
               waste-convert k3 k3.waste --layers 1-30         a part, on one of several machines\n  \
               waste-convert k3 k3.waste --finish              the rest, when all layers are there\n  \
               waste-convert k3 k3.waste --dry-run             bytes and hours, before\n  \
               waste-convert k3 k3.waste --status              how far it has come\n  \
               waste-convert k3 k3.waste --follow --reclaim on beside waste-download, on one disk\n  \
               waste-convert k3 k3.waste --force               begin anew\n  \
               waste-download moonshotai/Kimi-K3 --dest k3 --json | waste-convert - k3.waste --json",
    details: Vec::new,
};

/// Runs the tool.
///
/// # Errors
/// See [`ConvertError`]; the chained tool failed.
pub fn run(args: Args, output: &Output) -> Result<Exit, Failure> {
    if args.worker {
        worker::run(&Interrupt::install()?)?;
        return Ok(Exit::Done);
    }
    let request = request(&args)?;
    if args.status {
        output.set_schema("waste-convert-status/1");
        return say(&convert::status(&request)?, output);
    }
    let interrupt = Interrupt::install()?;
    if args.dry_run {
        output.set_schema("waste-convert-dry-run/1");
        let found = convert::dry_run(&request, output, &interrupt)?;
        say(&found, output)?;
        return Ok(if found.fits { Exit::Done } else { Exit::No });
    }
    say(&convert::convert(&request, output, &interrupt)?, output)
}

/// The result as JSON or as text.
fn say(report: &(impl serde::Serialize + std::fmt::Display), output: &Output) -> Result<Exit, Failure> {
    if output.json() {
        output.result(report)?;
    } else {
        writeln!(output.text(), "{report}")?;
    }
    Ok(Exit::Done)
}

/// Worker processes, where there are as many CPUs.
const JOBS: usize = 3;

fn request(args: &Args) -> Result<Request, Failure> {
    let model = resolve_model(&args.checkpoint)?;
    let checkpoint = model.expect_kind(Kind::Checkpoint)?.to_owned();
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let work = match (&args.layers, args.skip_trunk, args.finish) {
        (_, _, true) => Work::Finish,
        (Some(layers), ..) => Work::Layers(Some(layers.0.clone())),
        (None, true, _) => Work::Layers(None),
        (None, false, _) => Work::All,
    };
    let sha256 = |file: &PathBuf| Importance::open(file)?.sha256();
    Ok(Request {
        checkpoint,
        container: args.container.clone(),
        options: Options {
            format: match args.format {
                Format::Vq3r => ExpertFmt::Vq3r,
                Format::Vq2r => ExpertFmt::Vq2r,
                Format::Vq4p => ExpertFmt::Vq4p,
            },
            effort: match args.effort {
                EffortArg::Fast => Effort::Fast,
                EffortArg::Normal => Effort::Normal,
                EffortArg::Max => Effort::Max,
            },
            trunk_bits: if args.trunk_bits == "8" { 8 } else { 4 },
            trunk_min_elements: args.trunk_min_elements,
            cb_sample: args.cb_sample as usize,
            seed: args.seed,
            importance: args.importance.as_ref().map(sha256).transpose()?,
        },
        importance: args.importance.clone(),
        work,
        follow: args.follow,
        reclaim: match args.reclaim {
            ReclaimArg::Off => Reclaim::Off,
            ReclaimArg::Dry => Reclaim::Dry,
            ReclaimArg::On => Reclaim::On,
        },
        reserve: args.reserve.0,
        threads: args.threads.map_or(cpus, usize::from),
        jobs: args.jobs.map_or(JOBS.min(cpus), usize::from),
        program: std::env::current_exe().ok(),
        force: args.force,
    })
}
