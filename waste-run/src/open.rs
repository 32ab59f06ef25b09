//! Opening a model: resolve, plan, reserve, load.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use waste_common::cli::{
    ByteSize, Chained, Failure, Interrupt, Kind, Model, Output, Progress, Unit, from_env, whole,
};
use waste_common::config::ModelConfig;
use waste_common::io::{Bypass, filesystem};
use waste_common::machine::{Machine, Paging, PagingWatch, Reservation};
use waste_common::plan::{Budget, MemoryPlan, ModelSizes, PlanOptions};
use waste_engine::open::{self, Reserved};
use waste_engine::weights::Source;
use waste_engine::{Engine, EngineError, EngineOptions, Event, Watch, open_source};

use crate::args::{self, ModelArgs};
use crate::learn::Learning;

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
    learning: Option<Learning>,
    paging: PagingWatch,
    /// Held so that other engines know.
    _reservation: Option<Reservation>,
}

/// A model that was looked at: what can be refused without a plan was.
pub struct Found<'a> {
    dir: &'a Path,
    args: &'a ModelArgs,
    fingerprint: String,
    sizes: ModelSizes,
    options: PlanOptions,
    learning: Option<Learning>,
}

/// A model whose run has its share of the RAM, and tokens that fit.
pub struct Planned<'a> {
    found: Found<'a>,
    plan: MemoryPlan,
    interrupt: Interrupt,
    reservation: Option<Reservation>,
}

/// Looks at a model: is it one, and can it be run so?
pub fn find<'a>(model: &'a Model, args: &'a ModelArgs, output: &Output) -> Result<Found<'a>, Failure> {
    let dir = model.path();
    if let Some(chained) = model.chained().filter(|chained| chained.kind == Kind::Config) {
        return Err(Failure::data(
            "wrong_kind",
            format!(
                "the previous tool ({}) names a {}, `{}`, which has no weights; a container or a checkpoint is needed",
                chained.schema(),
                chained.kind.key(),
                dir.display()
            ),
        ));
    }
    let (source, _) = open_source(dir)?;
    let direct = matches!(source, Source::Checkpoint(_));
    if direct && args.verify {
        return Err(Failure::usage(format!(
            "--verify checks the records of a container; {} is a checkpoint, and its experts have no checksums",
            dir.display()
        )));
    }
    let options = plan_options(model, args, direct, output)?;
    let learning = match &source {
        Source::Container(container) => Some(Learning::find(dir, container, args, output)?),
        Source::Checkpoint(_) if args.learn || args.usage.is_some() => {
            return Err(Failure::usage(format!(
                "--learn and --usage are for containers; {} is a checkpoint",
                dir.display()
            )));
        }
        Source::Checkpoint(_) => None,
    };
    let fingerprint = source.fingerprint();
    let sizes = match source {
        Source::Container(container) => ModelSizes::of_container(&container)?,
        Source::Checkpoint(checkpoint) => ModelSizes::of_checkpoint_run_directly(checkpoint.config())?,
    };
    Ok(Found { dir, args, fingerprint, sizes, options, learning })
}

impl<'a> Found<'a> {
    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.sizes.config
    }

    /// Which model it is.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// The context length of the run.
    pub fn ctx(&self) -> usize {
        self.options.ctx
    }

    /// Whether the plan counts images.
    pub fn vision(&self) -> bool {
        self.options.vision
    }

    /// Makes the plan count images.
    pub fn count_images(&mut self) {
        self.options.vision = true;
    }

    /// The same for so many sequences that decode together.
    #[must_use]
    pub fn together(mut self, sequences: usize) -> Found<'a> {
        self.options.parallel = sequences;
        self
    }

    /// Plans a run and reserves what it takes; refuses `tokens` that do not fit.
    pub fn plan(self, tokens: &[u32], output: &Output) -> Result<Planned<'a>, Failure> {
        let interrupt = Interrupt::install()?;
        let what = format!("waste-run {}", self.dir.display());
        let Reserved { plan, reservation, unseen } =
            open::reserve(&self.sizes, &self.options, &Machine::probe()?, &what)?;
        if let Some(error) = unseen {
            output.detail(format_args!("other engines are not considered: {error}"));
        }
        EngineError::check_tokens(tokens, 0, self.options.ctx, self.sizes.config.vocab)?;
        Ok(Planned { found: self, plan, interrupt, reservation })
    }
}

impl Planned<'_> {
    /// Loads the model.
    pub fn load(self, output: &Output) -> Result<Opened, Failure> {
        let Planned { found: Found { dir, args, learning, .. }, plan, interrupt, reservation } = self;
        let start = Instant::now();
        output.note(&plan.explanation);
        for warning in &plan.warnings {
            output.warn(warning);
        }
        for detail in &plan.details {
            output.detail(detail);
        }
        if let Ok(filesystem) = filesystem(dir)
            && let Some(warning) = filesystem.warning
        {
            output.warn(format_args!("{}: {warning}", dir.display()));
        }
        let engine_options = EngineOptions {
            arith: args.arith,
            cpus: args.cpus.as_ref().map(|cpus| cpus.0.clone()),
            readers: count_from_env("WASTE_IO_DEPTH", 4)?,
            lookahead: count_from_env("WASTE_LOOKAHEAD", 6)?,
            bypass: if args.no_direct_io { Bypass::Off } else { Bypass::On },
            verify: args.verify,
            usage: learning.as_ref().and_then(Learning::usage),
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
        let paging = watch_paging(&plan, output);
        Ok(Opened { engine, plan, load_seconds, interrupt, learning, paging, _reservation: reservation })
    }
}

impl Opened {
    /// What paging has cost the run so far, where the system tells.
    pub fn paging(&self) -> Option<Paging> {
        self.paging.so_far()
    }

    /// Leaves to later runs what this one has learned, if it is to.
    pub fn learn(&self) -> Result<(), Failure> {
        self.learning.as_ref().map_or(Ok(()), |learning| learning.save(&self.engine))
    }
}

/// Says once, if the machine pages, what to do about it.
fn watch_paging(plan: &MemoryPlan, output: &Output) -> PagingWatch {
    let (budget, lower, output) = (plan.taken_bytes(), plan.lower_budget(), output.clone());
    PagingWatch::start(move || {
        let advice = match lower {
            Some(lower) => format!("--budget {lower} ({}) would leave it more room", size(lower)),
            None => "the model takes the least it can; a shorter --ctx or fewer other programs would help"
                .to_owned(),
        };
        output.warn(format_args!(
            "the machine pages, which slows every token: {} is too much; {advice}",
            size(budget)
        ));
    })
}

/// Explicit options win over those of a plan, those over the defaults. `direct`: the model is a checkpoint.
fn plan_options(
    model: &Model,
    args: &ModelArgs,
    direct: bool,
    output: &Output,
) -> Result<PlanOptions, Failure> {
    let file;
    let planned = match &args.plan {
        None => model.chained(),
        Some(path) => {
            let name = path.display().to_string();
            file = Chained::open(path)?;
            if file.kind != Kind::Config && !same_place(&file.path, model.path()) {
                output.note(format_args!(
                    "the plan {name} was made for the {} {}, not for {}",
                    file.kind.key(),
                    file.path.display(),
                    model.path().display()
                ));
            }
            Some(&file)
        }
    };
    let budget =
        args.budget.map_or_else(|| from_env("WASTE_BUDGET", str::parse), |budget| Ok(Some(budget)))?;
    let threads =
        args.threads.map_or_else(|| from_env("WASTE_THREADS", args::threads), |threads| Ok(Some(threads)))?;
    let cpus = args.cpus.as_ref().map(|cpus| cpus.0.len());
    let mut options = PlanOptions {
        chunk: args.prefill_chunk.unwrap_or(PlanOptions::CHUNK),
        ram_share: args.ram_share,
        allow_swap: args.allow_swap,
        threads: threads.or(cpus).unwrap_or_else(|| EngineOptions::default().threads),
        ..PlanOptions::default()
    };
    if let Some(planned) = planned {
        let of_the_container = direct && planned.kind != Kind::Container;
        match planned.budget_bytes()? {
            Some(bytes) if !of_the_container => options.budget = Budget::Bytes(bytes),
            Some(_) if budget.is_none() => output.note(
                "the budget of the plan is not followed: it is for the container to be made, and the checkpoint runs \
                 directly, in f32",
            ),
            _ => (),
        }
        if let Some(ctx) = planned.ctx()? {
            options.ctx = usize::try_from(ctx).unwrap_or(usize::MAX);
        }
        if let Some(kv) = planned.kv()? {
            options.kv =
                kv.parse().map_err(|error| Failure::data("invalid_plan", format!("kv `{kv}`: {error}")))?;
        }
        options.vision = planned.vision()?.unwrap_or(false);
    }
    options.ctx = args.ctx.unwrap_or(options.ctx);
    options.kv = args.kv.unwrap_or(options.kv);
    options.budget = budget.unwrap_or(options.budget);
    Ok(options)
}

/// Whether two paths lead to the same place, as far as can be seen.
fn same_place(one: &Path, other: &Path) -> bool {
    match (one.canonicalize(), other.canonicalize()) {
        (Ok(one), Ok(other)) => one == other,
        _ => one == other,
    }
}

/// A small whole number from the environment.
fn count_from_env(name: &str, default: usize) -> Result<usize, Failure> {
    Ok(from_env(name, |text| whole(text, 0, 64))?.unwrap_or(default))
}

/// Bars for loading and for long prompts.
fn watch(output: &Output) -> Watch {
    let output = output.clone();
    let bar: Mutex<Option<(Progress, u64, &str)>> = Mutex::new(None);
    Watch(Some(Arc::new(move |event| {
        let (label, unit, done, total) = match event {
            Event::Loaded { bytes, of } => ("loading the trunk", Unit::Bytes, bytes, of),
            Event::Prefilled { tokens, of } => ("reading the prompt", Unit::Count, tokens as u64, of as u64),
        };
        let mut bar = bar.lock().unwrap_or_else(PoisonError::into_inner);
        // What was not told to its end is over when something else begins.
        if let Some((progress, ..)) = bar.take_if(|(_, _, shown)| *shown != label) {
            progress.finish();
        }
        let (progress, shown, _) =
            bar.get_or_insert_with(|| (Progress::new(&output, label, total, unit), 0, label));
        progress.add(done.saturating_sub(*shown));
        *shown = done;
        if done >= total
            && let Some((progress, ..)) = bar.take()
        {
            progress.finish();
        }
    })))
}

/// Bytes for people.
pub fn size(bytes: u64) -> ByteSize {
    ByteSize(bytes)
}
