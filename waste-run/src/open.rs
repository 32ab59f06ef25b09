//! Opening a model: resolve, plan, reserve, load.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Instant;

use waste_common::cli::{ByteSize, Chained, Failure, Interrupt, Model, Output, Progress, Unit};
use waste_common::io::{Bypass, filesystem};
use waste_common::machine::{Machine, Reservation};
use waste_common::plan::{Budget, MemoryPlan, PlanOptions};
use waste_engine::open::{self, Reserved};
use waste_engine::{Engine, EngineError, EngineOptions, Event, Watch};

use crate::args::ModelArgs;

/// An opened model.
pub struct Opened {
    /// The engine.
    pub engine: Engine,
    /// What it was opened with.
    pub plan: MemoryPlan,
    /// Seconds it took.
    pub load_seconds: f64,
    /// The signal that ends the run.
    pub interrupt: Interrupt,
    /// Held so that other engines know.
    _reservation: Option<Reservation>,
}

/// Opens a model for a run of `tokens`; what cannot be run is refused before anything is loaded.
pub fn open(model: &Model, args: &ModelArgs, tokens: &[u32], output: &Output) -> Result<Opened, Failure> {
    let start = Instant::now();
    let interrupt = Interrupt::install()?;
    let dir = model.path();
    let options = plan_options(model, args)?;
    let what = format!("waste-run {}", dir.display());
    let sizes = open::sizes(dir)?;
    let Reserved { plan, reservation, unseen } = open::reserve(&sizes, &options, &Machine::probe()?, &what)?;
    if let Some(error) = unseen {
        output.detail(format_args!("other engines are not considered: {error}"));
    }
    EngineError::check_tokens(tokens, 0, options.ctx, sizes.config.vocab)?;
    output.note(&plan.explanation);
    for warning in &plan.warnings {
        output.warn(warning);
    }
    if let Ok(filesystem) = filesystem(dir)
        && let Some(warning) = filesystem.warning
    {
        output.warn(format_args!("{}: {warning}", dir.display()));
    }
    let engine_options = EngineOptions {
        arith: args.arith,
        cpus: args.cpus.as_ref().map(|cpus| cpus.0.clone()),
        readers: from_env("WASTE_IO_DEPTH", 4)?,
        lookahead: from_env("WASTE_LOOKAHEAD", 6)?,
        bypass: if args.no_direct_io { Bypass::Off } else { Bypass::On },
        verify: args.verify,
        cancelled: interrupt.flag(),
        watch: watch(output),
        ..EngineOptions::default()
    };
    let engine = Engine::open(dir, engine_options.within(&plan))?;
    let load_seconds = start.elapsed().as_secs_f64();
    output.detail(format_args!(
        "loaded in {load_seconds:.2} s: {} kernels, {} threads, direct I/O {}",
        engine.kernels(),
        plan.threads,
        if engine.direct_io() { "on" } else { "off" },
    ));
    Ok(Opened { engine, plan, load_seconds, interrupt, _reservation: reservation })
}

/// Explicit options win over those of a plan, those over the defaults.
fn plan_options(model: &Model, args: &ModelArgs) -> Result<PlanOptions, Failure> {
    let file;
    let planned = match &args.plan {
        None => model.chained(),
        Some(path) => {
            let name = path.display().to_string();
            let reader = std::fs::File::open(path).map_err(|error| {
                Failure::data("unreadable_file", format!("cannot read the plan {name}: {error}"))
            })?;
            file = Chained::read(reader, &name)?;
            Some(&file)
        }
    };
    let threads = args.cpus.as_ref().map(|cpus| cpus.0.len());
    let mut options = PlanOptions {
        chunk: args.prefill_chunk.unwrap_or(PlanOptions::CHUNK),
        ram_share: args.ram_share,
        allow_swap: args.allow_swap,
        threads: args.threads.or(threads).unwrap_or_else(|| EngineOptions::default().threads),
        ..PlanOptions::default()
    };
    if let Some(planned) = planned {
        if let Some(bytes) = planned.budget_bytes()? {
            options.budget = Budget::Bytes(bytes);
        }
        if let Some(ctx) = planned.ctx()? {
            options.ctx = usize::try_from(ctx).unwrap_or(usize::MAX);
        }
        if let Some(kv) = planned.kv()? {
            options.kv =
                kv.parse().map_err(|error| Failure::data("invalid_plan", format!("kv `{kv}`: {error}")))?;
        }
        if planned.vision()?.unwrap_or(false) {
            return Err(Failure::usage(
                "the plan includes images, which waste-run cannot take yet; plan without --vision",
            ));
        }
    }
    options.ctx = args.ctx.unwrap_or(options.ctx);
    options.kv = args.kv.unwrap_or(options.kv);
    options.budget = args.budget.unwrap_or(options.budget);
    Ok(options)
}

/// A whole number from the environment.
fn from_env(name: &str, default: usize) -> Result<usize, Failure> {
    match std::env::var(name) {
        Err(std::env::VarError::NotPresent) => Ok(default),
        Ok(text) if text.is_empty() => Ok(default),
        Ok(text) => match text.parse() {
            Ok(number) if number <= 64 => Ok(number),
            _ => Err(Failure::usage(format!("{name} is `{text}`; expected a whole number from 0 to 64"))),
        },
        Err(std::env::VarError::NotUnicode(_)) => Err(Failure::usage(format!("{name} is not a number"))),
    }
}

/// Bars for loading and for long prompts.
fn watch(output: &Output) -> Watch {
    let output = output.clone();
    let bar: Mutex<Option<(Progress, usize)>> = Mutex::new(None);
    Watch(Some(Arc::new(move |event| {
        let (label, done, total) = match event {
            Event::Loaded { layers, of } => ("loading layers", layers, of),
            Event::Prefilled { tokens, of } => ("reading the prompt", tokens, of),
        };
        let mut bar = bar.lock().unwrap_or_else(PoisonError::into_inner);
        let (progress, shown) =
            bar.get_or_insert_with(|| (Progress::new(&output, label, total as u64, Unit::Count), 0));
        progress.add(done.saturating_sub(*shown) as u64);
        *shown = done;
        if done >= total
            && let Some((progress, _)) = bar.take()
        {
            progress.finish();
        }
    })))
}

/// Bytes for people.
pub fn size(bytes: u64) -> ByteSize {
    ByteSize(bytes)
}
