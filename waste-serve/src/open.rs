//! The model: looked at, planned, and opened by the worker.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use waste_common::cli::{Chained, Failure, Kind, Output, from_env, resolve_model, whole};
use waste_common::config::ModelConfig;
use waste_common::io::Bypass;
use waste_common::machine::{Machine, Reservation};
use waste_common::plan::{
    self, Budget, MemoryPlan, ModelSizes, PlanOptions, VISION_DECODING, VISION_IMAGES, VISION_ROWS,
    vision_row_bytes,
};
use waste_engine::chat::{self, ChatError, ChatFormat, Effort};
use waste_engine::defaults::Defaults;
use waste_engine::experts::Usage;
use waste_engine::experts::usage::USAGE;
use waste_engine::open::{self, Reserved};
use waste_engine::sampler::SamplerOptions;
use waste_engine::tokenizer::Tokenizer;
use waste_engine::vision::Reader;
use waste_engine::weights::Source;
use waste_engine::{Engine, EngineOptions, open_source};

use crate::args::Args;
use crate::images::{self, Images};
use crate::model::{EngineModel, Gallery, Model, Reuse, ScriptModel, Sight};
use crate::service::{Facts, READERS, Settings};
use crate::worker::Open;

/// How often something is sent with --blocking-keepalive.
const KEEPALIVE: Duration = Duration::from_secs(15);
/// The states of a conversation that are kept.
const STATES: u64 = 3;
/// Conversations whose states are kept by default, if no more than that are written at a time.
const REUSE_SLOTS: usize = 2;
/// The default share of the usable RAM for kept states.
const REUSE_SHARE: u64 = 16;

/// A model that was looked at.
pub struct Found {
    /// What requests need to know.
    pub facts: Facts,
    /// What is set.
    pub settings: Settings,
    /// How the worker opens it.
    pub open: Box<Open>,
    /// Set while it does, it gives up.
    pub give_up: Arc<AtomicBool>,
}

/// Looks at the model, and plans its memory.
///
/// # Errors
/// It is none, or does not fit.
pub fn find(args: &Args, output: &Output) -> Result<Found, Failure> {
    let model = resolve_model(&args.model)?;
    let dir = model.path().to_owned();
    if let Some(chained) = model.chained().filter(|chained| chained.kind == Kind::Config) {
        let message =
            format!("{} has no weights; a container or a checkpoint is needed", chained.path.display());
        return Err(Failure::data("wrong_kind", message));
    }
    let (source, config) = open_source(&dir)?;
    let tokenizer = Tokenizer::open(&dir)?;
    let format = ChatFormat::find(&dir, &tokenizer, chat::Choice::default());
    let defaults = Defaults::read(&dir, &config, Some(&tokenizer))?;
    let settings = settings(args, &dir, format.as_ref().ok(), &defaults);
    let fingerprint = source.fingerprint();
    let loading = Arc::new(AtomicBool::new(false));
    let options = plan_options(args, model.chained(), matches!(source, Source::Checkpoint(_)), output)?;
    let eyes = Eyes::open(args, &options, (&source, &config), (&tokenizer, format.as_ref().ok()))?;
    let images = eyes.as_ref().map(|Eyes { reader, room }| {
        Images::new(reader.clone(), config.media_placeholder, &args.allow_image_dir, *room)
    });
    let images = images.transpose()?;
    let Planned { ctx, budget_bytes, parallel, open } = match &args.script {
        Some(script) => {
            let (script, tokens) = (script.clone(), dir.clone());
            let open = move || -> Result<Box<dyn Model>, Failure> {
                Ok(Box::new(ScriptModel::read(&script, &Tokenizer::open(&tokens)?)?))
            };
            let PlanOptions { ctx, parallel, .. } = options;
            Planned { ctx, budget_bytes: None, parallel, open: Box::new(open) }
        }
        None => engine(args, &dir, source, options, eyes, &loading, output)?,
    };
    let settings = Settings { parallel, ..settings };
    let vocab = config.vocab;
    let stop_ids = defaults.stop_ids;
    let facts = Facts { tokenizer, format, vocab, ctx, stop_ids, fingerprint, budget_bytes, images };
    Ok(Found { facts, settings, open, give_up: loading })
}

/// How a model is run.
struct Planned {
    ctx: usize,
    budget_bytes: Option<u64>,
    parallel: usize,
    open: Box<Open>,
}

fn settings(args: &Args, dir: &Path, format: Option<&ChatFormat>, defaults: &Defaults) -> Settings {
    // What the hosted models are run with, where the files say nothing.
    let (temperature, top_p) = if format.is_some_and(ChatFormat::thinks) { (1.0, 0.95) } else { (0.6, 1.0) };
    let name = dir.file_stem().map(|name| name.to_string_lossy().into_owned());
    let effort: Option<Effort> = args.effort.parse().ok().filter(|_| !args.no_thinking);
    Settings {
        model_id: args.model_id.clone().or(name).unwrap_or_else(|| "model".to_owned()),
        any_model: args.any_model,
        max_tokens: args.max_tokens.max(1),
        effort,
        strict_effort: args.strict_effort,
        sampler: SamplerOptions {
            temperature: defaults.temperature.unwrap_or(temperature),
            top_p: defaults.top_p.unwrap_or(top_p),
            ..SamplerOptions::default()
        },
        completions_markup: args.completions_markup,
        extra: !args.no_extra,
        queue: args.queue,
        queue_timeout: args.queue_timeout,
        max_body: usize::try_from(args.max_body.bytes()).unwrap_or(usize::MAX),
        log_content: args.log_content,
        ui: !args.no_ui,
        blocking_keepalive: args.blocking_keepalive.then_some(KEEPALIVE),
        ..Settings::default()
    }
}

/// Plans, reserves, and says how the engine is opened.
fn engine(
    args: &Args,
    dir: &Path,
    source: Source,
    mut options: PlanOptions,
    eyes: Option<Eyes>,
    give_up: &Arc<AtomicBool>,
    output: &Output,
) -> Result<Planned, Failure> {
    let mut sizes = match &source {
        Source::Container(container) => ModelSizes::of_container(container)?,
        Source::Checkpoint(checkpoint) => ModelSizes::of_checkpoint_run_directly(checkpoint.config())?,
    };
    let machine = Machine::probe()?;
    let slots = if args.no_reuse { 0 } else { args.reuse_slots.unwrap_or(options.parallel.max(REUSE_SLOTS)) };
    let one = PlanOptions { parallel: 1, ..options.clone() };
    let state = plan::plan(&sizes, &one, &machine)?.state_bytes;
    let wanted = state.saturating_mul(STATES).saturating_mul(slots as u64);
    let most = args.reuse_bytes.map_or(machine.usable_ram_bytes / REUSE_SHARE, |size| size.bytes());
    let kept = wanted.min(most);
    // They stay in memory like the trunk, so they are planned with it.
    sizes.trunk_bytes = sizes.trunk_bytes.saturating_add(kept);
    let mut gallery = 0;
    if let (Some(eyes), Some(vision)) = (&eyes, &sizes.config.vision) {
        // What is planned for the embeddings of a conversation is for those that were encoded lately. Beside them: images
        // that wait, one that is decoded meanwhile, and in each lane those that begin in a chunk.
        gallery = bytes(VISION_IMAGES as u128 * vision_row_bytes(vision, VISION_ROWS));
        let queued = bytes(vision_row_bytes(vision, options.chunk as u64 + VISION_ROWS));
        let queued = queued.saturating_mul(options.parallel as u64);
        let more = eyes.room.saturating_add(VISION_DECODING).saturating_add(queued);
        sizes.trunk_bytes = sizes.trunk_bytes.saturating_add(more);
    }
    if let Budget::Bytes(planned) = options.budget
        && args.budget.is_none()
        && from_env::<Budget>("WASTE_BUDGET", str::parse)?.is_none()
    {
        // It was planned without what a server keeps.
        let least = PlanOptions { budget: Budget::Auto, ..options.clone() };
        let floor = plan::plan(&sizes, &least, &machine)?.floor_bytes;
        if planned < floor {
            output.note("the budget of the plan is raised to what serving takes at least");
            options.budget = Budget::Bytes(floor);
        }
    }
    let what = format!("waste-serve {}", dir.display());
    let Reserved { plan, reservation, unseen } = open::reserve(&sizes, &options, &machine, &what)?;
    if let Some(error) = unseen {
        output.detail(format_args!("other engines are not considered: {error}"));
    }
    output.note(&plan.explanation);
    plan.warnings.iter().for_each(|warning| output.warn(warning));
    output.detail(format_args!("{kept} bytes are for the states of {slots} conversations"));
    let engine_options = EngineOptions {
        arith: args.arith,
        cpus: args.cpus.as_ref().map(|cpus| cpus.0.clone()),
        readers: count("WASTE_IO_DEPTH", EngineOptions::default().readers)?,
        lookahead: count("WASTE_LOOKAHEAD", EngineOptions::default().lookahead)?,
        cancelled: Arc::clone(give_up),
        bypass: if args.no_direct_io { Bypass::Off } else { Bypass::On },
        verify: args.verify,
        ..EngineOptions::default()
    }
    .within(&plan);
    let usage = match &source {
        Source::Container(container) => Some((dir.join(USAGE), container.manifest_sha256().to_owned())),
        Source::Checkpoint(_) => None,
    };
    let (ctx, budget_bytes, parallel) = (plan.ctx, Some(plan.budget_bytes), plan.parallel);
    let opening = Opening {
        dir: dir.to_owned(),
        options: engine_options,
        usage,
        learn: args.learn,
        slots,
        kept: usize::try_from(kept).unwrap_or(usize::MAX),
        reader: eyes.map(|eyes| eyes.reader),
        gallery: usize::try_from(gallery).unwrap_or(usize::MAX),
        _plan: plan,
        _reservation: reservation,
    };
    Ok(Planned { ctx, budget_bytes, parallel, open: Box::new(move || opening.open()) })
}

/// Everything to open the engine with, again if need be.
struct Opening {
    dir: PathBuf,
    options: EngineOptions,
    usage: Option<(PathBuf, String)>,
    learn: bool,
    slots: usize,
    kept: usize,
    reader: Option<Reader>,
    gallery: usize,
    _plan: MemoryPlan,
    /// Held so that other engines know.
    _reservation: Option<Reservation>,
}

impl Opening {
    fn open(&self) -> Result<Box<dyn Model>, Failure> {
        let learned =
            self.usage.as_ref().and_then(|(path, manifest)| Usage::load(path, manifest).ok().flatten());
        let options = EngineOptions { usage: learned.map(Arc::new), ..self.options.clone() };
        let engine = Engine::open(&self.dir, options)?;
        let usage = self.usage.clone().filter(|_| self.learn);
        let farewell = usage.map(|(path, manifest)| {
            let leave = move |engine: &Engine| {
                let mut usage = Usage::load(&path, &manifest).ok().flatten().unwrap_or_default();
                engine.learn(&mut usage);
                // It only saves time.
                let _ = usage.save(&path, &manifest);
            };
            Box::new(leave) as _
        });
        let tower = self.reader.as_ref().map(|reader| reader.load(&engine)).transpose()?;
        let sight = tower.map(|tower| Sight::new(tower, Gallery::new(self.gallery)));
        Ok(Box::new(EngineModel::new(engine, Reuse::new(self.slots, self.kept), sight, farewell)?))
    }
}

/// Explicit options win over those of a plan, those over the defaults. `direct`: the model is a checkpoint.
fn plan_options(
    args: &Args,
    planned: Option<&Chained>,
    direct: bool,
    output: &Output,
) -> Result<PlanOptions, Failure> {
    let file;
    let planned = match &args.plan {
        None => planned,
        Some(path) => {
            file = Chained::open(path)?;
            Some(&file)
        }
    };
    let mut options = PlanOptions {
        chunk: args.prefill_chunk.unwrap_or(PlanOptions::CHUNK),
        threads: EngineOptions::default().threads,
        ..PlanOptions::default()
    };
    if let Some(planned) = planned {
        if direct && planned.kind != Kind::Container {
            output.note(
                "the budget of the plan is for the container to be made; the checkpoint runs without it",
            );
        } else {
            options.budget = planned.budget_bytes()?.map_or(options.budget, Budget::Bytes);
        }
        options.ctx = planned.ctx()?.map_or(options.ctx, |ctx| usize::try_from(ctx).unwrap_or(usize::MAX));
        if let Some(kv) = planned.kv()? {
            options.kv = kv.parse().map_err(|error: String| Failure::data("invalid_plan", error))?;
        }
        let parallel = planned.parallel()?.map(|parallel| usize::try_from(parallel).unwrap_or(usize::MAX));
        options.parallel = parallel.unwrap_or(options.parallel);
        options.vision = planned.vision()?.unwrap_or(false);
    }
    options.budget = from_env("WASTE_BUDGET", str::parse)?.unwrap_or(options.budget);
    let threads = |text: &str| whole(text, 1, PlanOptions::THREADS_MAX);
    options.threads = from_env("WASTE_THREADS", threads)?.unwrap_or(options.threads);
    options.parallel = args.parallel.unwrap_or(options.parallel);
    options.vision |= args.vision;
    options.budget = args.budget.unwrap_or(options.budget);
    options.ctx = args.ctx.unwrap_or(options.ctx);
    options.kv = args.kv.unwrap_or(options.kv);
    options.threads = args.threads.or(args.cpus.as_ref().map(|cpus| cpus.0.len())).unwrap_or(options.threads);
    Ok(options)
}

/// How images are looked at, and the memory for those that wait.
struct Eyes {
    reader: Reader,
    room: u64,
}

impl Eyes {
    /// Those of the model, if it is to take images.
    fn open(
        args: &Args,
        options: &PlanOptions,
        (source, config): (&Source, &ModelConfig),
        (tokenizer, format): (&Tokenizer, Option<&ChatFormat>),
    ) -> Result<Option<Eyes>, Failure> {
        if !options.vision {
            let more = args.max_patches.is_some() || !args.allow_image_dir.is_empty();
            let why = || Failure::usage("--max-patches and --allow-image-dir go with --vision");
            return if more { Err(why()) } else { Ok(None) };
        }
        let reader = Reader::open(source, config, args.max_patches)?;
        if !format.is_some_and(ChatFormat::takes_images) {
            return Err(Failure::usage("the model's chat format has no place for images"));
        }
        let pad = tokenizer.special_id("<|media_pad|>");
        if pad.is_none() || pad != config.media_placeholder {
            return Err(ChatError::NoPlaceholder.into());
        }
        // Those that wait, those that are begun, and those that are being read.
        let requests = args.queue.saturating_add(options.parallel).saturating_add(READERS);
        let room = config.vision.as_ref().map_or(0, |vision| images::room_bytes(vision, requests));
        Ok(Some(Eyes { reader, room }))
    }
}

/// A size of the plan.
fn bytes(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// A small whole number from the environment.
fn count(name: &str, default: usize) -> Result<usize, Failure> {
    Ok(from_env(name, |text| whole(text, 0, 64))?.unwrap_or(default))
}
