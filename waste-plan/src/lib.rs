//! Plans the memory a model needs on a machine.
//!
//! [`run`] is the whole tool. The plan itself is `waste_common::plan`; here are the sources it can be made from, the
//! disk's part, and the two ways of printing it.
#![forbid(unsafe_code)]

mod args;
mod disk;
mod report;
mod source;

pub use args::Args;
pub use disk::{Estimate, Space, Speed, measured};
pub use report::Report;
pub use source::Source;

use waste_common::cli::{ByteSize, Exit, Failure, Output, Tool, resolve_model};
use waste_common::machine::{Machine, reserved};
use waste_common::plan::{PlanOptions, plan};

/// The tool.
pub const TOOL: Tool = Tool {
    name: "waste-plan",
    version: env!("CARGO_PKG_VERSION"),
    schema: "waste-plan/1",
    examples: "  waste-plan k3.waste                                what a container needs on this machine
  waste-plan kimi-k3 --ram 64GiB --ctx 32768         would it run there, before anything is downloaded?
  waste-plan kimi-linear-48b --budget max            everything in RAM, if it goes in
  waste-plan kimi-k3 --dest /data --disk-gbps 5      is there disk for it, and how fast would it be?
  waste-verify k3.waste --json | waste-plan - --json | waste-run - \"hello\"",
    details: Vec::new,
};

/// Plans, prints, and answers: done if the budget stays within the cap (and the files go onto the disk), else no.
///
/// # Errors
/// See [`Source::open`] and [`plan`].
pub fn run(args: Args, output: &Output) -> Result<Exit, Failure> {
    let gbps = match &args.bench {
        Some(file) => Some(measured(file)?),
        None => args.disk_gbps,
    };
    let speed = match (gbps, args.hit_rate) {
        (Some(gbps), hit_rate) => Some(Speed::new(gbps, hit_rate)?),
        (None, None) => None,
        (None, Some(_)) => {
            return Err(Failure::usage("--hit-rate needs the speed of the disk: --disk-gbps or --bench"));
        }
    };
    let source = Source::open(&resolve_model(&args.model)?)?;
    let machine = match args.ram {
        Some(ram) => Machine::with_ram(ram.bytes()),
        None => Machine::probe()?,
    };
    let options = PlanOptions {
        ctx: args.ctx,
        kv: args.kv,
        chunk: args.prefill_chunk,
        parallel: args.parallel,
        threads: args.threads.unwrap_or(machine.cpus.clamp(1, PlanOptions::THREADS_MAX)),
        vision: args.vision,
        budget: args.budget,
        ram_share: args.ram_share,
        allow_swap: args.allow_swap,
    };
    describe(&machine, args.ram.is_some(), output);
    let plan = plan(&source.sizes, &options, &machine)?;
    plan.details.iter().for_each(|detail| output.detail(detail));
    for warning in &plan.warnings {
        output.warn(warning);
    }
    let space = args.dest.as_deref().map(|dest| Space::look(dest, source.kind, &plan)).transpose()?;
    if let Some(warning) = space.as_ref().and_then(|space| space.disk_warning) {
        output.warn(warning);
    }
    let estimate = speed.map(|speed| Estimate::new(&plan, speed));
    let report = Report { kind: source.kind, path: source.path, plan, space, estimate };
    if output.json() {
        let object =
            report.object().map_err(|error| Failure::internal(format!("the plan as JSON: {error}")))?;
        output.result(&object)?;
    } else {
        write!(output.text(), "{report}")?;
    }
    Ok(if report.fits() { Exit::Done } else { Exit::No })
}

/// With `-v`: where the figures of the machine come from.
fn describe(machine: &Machine, assumed: bool, output: &Output) {
    let (ram, cpus) = (ByteSize(machine.physical_ram_bytes), machine.cpus);
    if assumed {
        output.detail(format_args!(
            "machine: {ram} of RAM as --ram says; neither limits nor engines of this one count; {cpus} CPUs"
        ));
        return;
    }
    let limit = machine.limit.as_ref().map_or("no limit on them".to_owned(), |limit| {
        format!("{} allowed by {}", ByteSize(limit.bytes), limit.source.display())
    });
    output.detail(format_args!("machine: {ram} of RAM, {limit}; {cpus} CPUs"));
    for engine in reserved().unwrap_or_default() {
        let (bytes, pid, what) = (ByteSize(engine.bytes), engine.pid, engine.what);
        output.detail(format_args!("reserved: {bytes} by process {pid}, {what:?}"));
    }
}
