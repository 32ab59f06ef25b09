//! The whole conversion: what is there, what is missing, and the order in which it becomes a container.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Map, Value};
use waste_common::cli::{ByteSize, Interrupt, Output, Progress, Unit};
use waste_common::container::writer::{ContainerWriter, bank_entry};
use waste_common::container::{
    Container, ExpertQuant, Geometry, MANIFEST, Manifest, TrunkEntry, codebook_bytes,
};
use waste_common::files::FileError;
use waste_common::io::filesystem;
use waste_common::machine;
use waste_common::{staging, tensors};

use crate::crew::{Crew, Owner};
use crate::error::ConvertError;
use crate::layer::{self, Errors, LayerJob, Probe};
use crate::options::Options;
use crate::parts;
use crate::probe::{DryRun, Status};
use crate::sidecars::{self, Sidecar};
use crate::source::Source;
use crate::state::{self, STATE};
use crate::supply::{Reclaim, Shards, Supply};
use crate::tracker::Tracker;
use crate::trunk;
use crate::worker::{self, Begin};

/// Time between two looks at what has arrived, or at the free space.
const PAUSE: Duration = Duration::from_millis(300);
/// Key of the manifest that says where the weights are from and what made them.
pub const PROVENANCE: &str = "provenance";
/// Key of the manifest that says how the container was made. Readers don't need it.
pub const CONVERSION: &str = "conversion";

/// What to convert, and how.
#[derive(Debug, Clone)]
pub struct Request {
    /// The checkpoint's directory.
    pub checkpoint: PathBuf,
    /// The container's directory.
    pub container: PathBuf,
    /// What decides the container's bytes.
    pub options: Options,
    /// What to do of it.
    pub work: Work,
    /// Threads of all workers together.
    pub threads: usize,
    /// Worker processes.
    pub jobs: usize,
    /// Wait for shards that waste-download is still fetching.
    pub follow: bool,
    /// What becomes of shards that are used up.
    pub reclaim: Reclaim,
    /// Free bytes that are never written: below, the conversion pauses.
    pub reserve: u64,
    /// This program, to be started as a worker; without it layers are converted in this process.
    pub program: Option<PathBuf>,
    /// Replace what stands in the container's directory.
    pub force: bool,
}

/// Which part of a conversion a run does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// Everything that is missing.
    All,
    /// These layers, or all; neither trunk nor manifest. Other processes may be at other layers.
    Layers(Option<BTreeSet<u16>>),
    /// What is left when all layers are there.
    Finish,
}

/// What came of it: the tool's JSON.
#[derive(Debug, Clone, serde::Serialize)]
#[allow(missing_docs)]
pub struct Report {
    pub container: String,
    pub checkpoint: String,
    pub arch: String,
    pub format: &'static str,
    pub effort: &'static str,
    pub trunk_bits: u8,
    /// Finished ones.
    pub layers: usize,
    /// Experts of these.
    pub experts: usize,
    /// Layers that are not finished; without any there is a container, if the trunk is there too.
    pub owed_layers: Vec<u16>,
    /// Of all files.
    pub bytes: u64,
    pub seconds: f64,
    /// Root mean square over the layers of the relative Frobenius errors; `None` without routed experts.
    pub error: Option<Errors>,
    /// Layers that an earlier run had finished.
    pub resumed_layers: usize,
    /// None until the container is finished.
    pub manifest_sha256: Option<String>,
    pub peak_rss_bytes: Option<u64>,
}

/// Converts a checkpoint. What an interrupted run has finished is taken over, after a check, if its options were
/// the same; a finished container of the same checkpoint and options is left as it is.
///
/// # Errors
/// See [`ConvertError`].
pub fn convert(request: &Request, output: &Output, interrupt: &Interrupt) -> Result<Report, ConvertError> {
    let start = Instant::now();
    let threads = request.threads;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|source| ConvertError::Threads { threads, source })?;
    if same_directory(&request.checkpoint, &request.container) {
        return Err(ConvertError::SameDirectory { dir: request.container.clone() });
    }
    refuse_checkpoint(&request.container)?;
    let source = open_source(request, output, interrupt)?;
    let conversion = Conversion::new(request, &source)?;
    conversion.check_space(free_bytes(&request.container))?;
    if let Some(warning) = filesystem(&request.container).ok().and_then(|system| system.warning) {
        output.warn(format_args!("{}: {warning}", request.container.display()));
    }
    conversion.warnings.iter().for_each(|warning| output.warn(warning));
    let writer = writer(request)?;
    let done = match conversion.begin()? {
        Begun::Finished(layers) => {
            output.note(format_args!("{} is finished already", request.container.display()));
            Done { resumed: layers.len(), layers }
        }
        Begun::Unfinished => pool.install(|| conversion.work(writer, output, interrupt))?,
    };
    conversion.report(&done, start)
}

/// Takes the container's directory. A run of some layers gives it back as soon as it has looked around, so another one
/// that meets it there waits a moment.
fn writer(request: &Request) -> Result<ContainerWriter, ConvertError> {
    let patience = match request.work {
        Work::Layers(_) => Duration::from_secs(10),
        _ => Duration::ZERO,
    };
    let start = Instant::now();
    loop {
        match ContainerWriter::create(&request.container) {
            Err(waste_common::container::ContainerError::File(FileError::Locked { .. }))
                if start.elapsed() < patience =>
            {
                std::thread::sleep(Duration::from_millis(50));
            }
            other => return Ok(other?),
        }
    }
}

/// What a conversion would take; one expert is encoded to see how long. Nothing is written.
///
/// # Errors
/// The checkpoint cannot be converted.
pub fn dry_run(request: &Request, output: &Output, interrupt: &Interrupt) -> Result<DryRun, ConvertError> {
    let source = open_source(request, output, interrupt)?;
    let conversion = Conversion::new(request, &source)?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(request.threads).build();
    let pool = pool.map_err(|source| ConvertError::Threads { threads: request.threads, source })?;
    let tick = |_| if interrupt.requested() { Err(ConvertError::Interrupted) } else { Ok(()) };
    let probe = match conversion.jobs.first() {
        Some(job) => Some(pool.install(|| layer::probe(&source, job, &request.options, &tick))?),
        None => None,
    };
    let experts: usize = conversion.jobs.iter().map(|job| job.experts).sum();
    let eta = |probe: &Probe| {
        conversion.jobs.len() as f64 * probe.fit_seconds + experts as f64 * probe.expert_seconds
    };
    let (needed, free) = (conversion.needed()?, free_bytes(&request.container));
    Ok(DryRun {
        container: request.container.display().to_string(),
        checkpoint: request.checkpoint.display().to_string(),
        arch: source.config.arch.to_owned(),
        format: conversion.quant.fmt.name(),
        effort: request.options.effort.name(),
        layers: conversion.jobs.len(),
        experts,
        source_bytes: source.checkpoint.bytes(),
        container_bytes: conversion.bytes()?,
        needed_bytes: needed,
        free_bytes: free,
        fits: free.is_none_or(|free| free >= needed),
        eta_seconds: probe.as_ref().map(eta),
        probe,
    })
}

/// How far a conversion with these options has come, from outside: no lock is taken and only headers are read.
///
/// # Errors
/// It was begun with other options; the checkpoint cannot be read.
pub fn status(request: &Request) -> Result<Status, ConvertError> {
    let source = Source::open_some(&request.checkpoint)?;
    let conversion = Conversion::new(request, &source)?;
    let dir = conversion.dir();
    let finished = dir.join(MANIFEST).exists();
    if !finished {
        state::begun(dir, &conversion.fingerprint)?;
    }
    let done = |job: &&LayerJob| finished || state::looks_finished(dir, job);
    let done_layers: Vec<u16> = conversion.jobs.iter().filter(done).map(|job| job.layer).collect();
    let all = conversion.jobs.iter().map(|job| job.layer);
    Ok(Status {
        container: dir.display().to_string(),
        checkpoint: request.checkpoint.display().to_string(),
        finished,
        trunk: finished || matches!(state::sound_trunk(dir), Ok(Some(_))),
        owed_layers: all.filter(|layer| !done_layers.contains(layer)).collect(),
        done_layers,
        needed_bytes: if finished { 0 } else { conversion.needed()? },
        free_bytes: free_bytes(dir),
    })
}

/// Opens the checkpoint; waits for its small files where it is still being fetched.
fn open_source(request: &Request, output: &Output, interrupt: &Interrupt) -> Result<Source, ConvertError> {
    if request.reclaim != Reclaim::Off {
        check_reclaim(request)?;
    }
    if request.follow {
        let mut told = false;
        while !small_files_are_there(&request.checkpoint)? {
            if !told {
                output.note(format_args!("waiting for the small files of {}", request.checkpoint.display()));
                told = true;
            }
            if interrupt.requested() {
                return Err(ConvertError::Interrupted);
            }
            std::thread::sleep(PAUSE);
        }
    }
    if comes_and_goes(request) {
        return Source::open_some(&request.checkpoint);
    }
    let source = Source::open(&request.checkpoint)?;
    for name in source.ignored.iter().take(8) {
        output.warn(format_args!("tensor `{name}` is not carried over: the model has no use for it"));
    }
    Ok(source)
}

/// Whether shards may be absent.
fn comes_and_goes(request: &Request) -> bool {
    request.follow || request.reclaim != Reclaim::Off || request.checkpoint.join(staging::RECLAIMED).exists()
}

/// Whether everything but the shards has been fetched.
fn small_files_are_there(checkpoint: &Path) -> Result<bool, ConvertError> {
    let state = staging::State::read(checkpoint)?;
    let there = |state: staging::State| {
        state.files.iter().all(|(name, file)| name.ends_with(".safetensors") || file.done)
    };
    Ok(state.is_some_and(there))
}

/// Refuses to remove shards where that could lose something.
fn check_reclaim(request: &Request) -> Result<(), ConvertError> {
    let refuse = |problem: String| Err(ConvertError::Reclaim { problem });
    let absolute = |path: &Path| fs::canonicalize(path).or_else(|_| std::path::absolute(path));
    if let (Ok(one), Ok(other)) = (absolute(&request.checkpoint), absolute(&request.container))
        && (one.starts_with(&other) || other.starts_with(&one))
    {
        return refuse("checkpoint and container must not lie in each other".to_owned());
    }
    if request.work != Work::All {
        return refuse("it goes with the whole conversion only, not with a selection of layers".to_owned());
    }
    if staging::State::read(&request.checkpoint)?.is_none() {
        let file = request.checkpoint.join(staging::STATE);
        return refuse(format!(
            "every shard must have been verified by waste-download; there is no {}",
            file.display()
        ));
    }
    Ok(())
}

/// Refuses a target that holds files of a checkpoint, forced or not: some have the names of a container's.
fn refuse_checkpoint(dir: &Path) -> Result<(), ConvertError> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(FileError::io("list", dir))?,
    };
    for entry in entries {
        let name = entry.map_err(FileError::io("list", dir))?.file_name();
        let file = name.to_string_lossy();
        let lower = file.to_lowercase();
        if ["config.json", "model.safetensors.index.json"].contains(&lower.as_str())
            || lower.ends_with(".safetensors")
        {
            return Err(ConvertError::InCheckpoint { dir: dir.to_owned(), file: file.into_owned() });
        }
    }
    Ok(())
}

/// A conversion whose input has been checked.
struct Conversion<'a> {
    request: &'a Request,
    source: &'a Source,
    fingerprint: Map<String, Value>,
    quant: ExpertQuant,
    jobs: Vec<LayerJob>,
    sidecars: Vec<Sidecar>,
    warnings: Vec<String>,
    /// Of a checkpoint whose shards come and go.
    shards: Option<Shards>,
}

enum Begun {
    Finished(Layers),
    Unfinished,
}

/// What a run leaves.
struct Done {
    /// Finished layers.
    layers: Layers,
    /// How many of them were there before.
    resumed: usize,
}

impl<'a> Conversion<'a> {
    fn new(request: &'a Request, source: &'a Source) -> Result<Self, ConvertError> {
        let quant = request.options.quant();
        let jobs = jobs(source, &quant)?;
        if let Work::Layers(Some(layers)) = &request.work
            && let Some(layer) = layers.iter().find(|layer| jobs.iter().all(|job| job.layer != **layer))
        {
            return Err(ConvertError::NoSuchLayer { layer: *layer });
        }
        let (sidecars, warnings) = sidecars::collect(source)?;
        let fingerprint = request.options.fingerprint(&source.fingerprint);
        let shards = comes_and_goes(request).then(|| Shards::of(&source.checkpoint, &source.config));
        Ok(Conversion { request, source, fingerprint, quant, jobs, sidecars, warnings, shards })
    }

    fn dir(&self) -> &Path {
        &self.request.container
    }

    /// Bytes of the finished container, a little more for the work files of the merge.
    fn bytes(&self) -> Result<u64, ConvertError> {
        let trunk = trunk::trunk_bytes(self.source, &self.request.options)?;
        let bank = |job: &LayerJob| job.experts as u64 * job.geometry.record_bytes() as u64;
        let banks: u64 = self.jobs.iter().map(bank).sum();
        let books = self.jobs.len() as u64 * u64::from(self.quant.codebooks_per_layer());
        let sidecars: usize = self.sidecars.iter().map(|(_, content)| content.len()).sum();
        let manifest = (1 << 16) + 1024 * (self.source.trunk.len() + self.jobs.len()) as u64;
        Ok(trunk + banks + 2 * books * codebook_bytes(self.quant.entries) + sidecars as u64 + 2 * manifest)
    }

    /// Bytes still to be written.
    fn needed(&self) -> Result<u64, ConvertError> {
        let written = if self.dir().is_dir() { state::written_files(self.dir())? } else { Vec::new() };
        Ok(self.bytes()?.saturating_sub(state::bytes_of(self.dir(), written)))
    }

    /// Compares the bytes still to be written with what is free.
    fn check_space(&self, free: Option<u64>) -> Result<(), ConvertError> {
        // Where room is made on the way, it is looked at layer by layer.
        if self.request.reclaim == Reclaim::On {
            return Ok(());
        }
        let needed = self.needed()?;
        match free {
            Some(free) if free < needed => {
                Err(ConvertError::NoSpace { dir: self.dir().to_owned(), needed, free })
            }
            _ => Ok(()),
        }
    }

    /// Looks at what stands in the directory: a finished container, a begun one, nothing, or a reason to stop.
    fn begin(&self) -> Result<Begun, ConvertError> {
        let dir = self.dir();
        if self.request.force {
            if let Some(shards) = &self.shards {
                // What is here may be all that is left of them.
                let missing = shards.gone(&self.request.checkpoint, self.request.follow)?;
                if !missing.is_empty() {
                    return Err(ConvertError::Shards { dir: self.request.checkpoint.clone(), missing });
                }
            }
            // The manifest first: from here on there is no container. Then the state, so that what is left of the
            // old one is vouched for by nothing.
            state::remove(dir, &[MANIFEST.to_owned()])?;
            state::remove(dir, &[STATE.to_owned()])?;
            state::remove(dir, &state::written_files(dir)?)?;
            parts::remove(dir)?;
            return self.begin_anew();
        }
        let begun = state::begun(dir, &self.fingerprint)?;
        if dir.join(MANIFEST).exists() {
            return match (self.finished()?, begun) {
                (Ok(layers), _) => {
                    // Killed between the commit and the tidying up.
                    let work = state::written_files(dir)?.into_iter();
                    let work = work.filter(|name| self.is_work_file(name)).collect::<Vec<_>>();
                    state::remove(dir, &work)?;
                    state::remove(dir, &[STATE.to_owned()])?;
                    Ok(Begun::Finished(layers))
                }
                (Err(reason), false) => Err(ConvertError::Exists { dir: dir.to_owned(), reason }),
                // Ours, but damaged: what is missing is made again.
                (Err(_), true) => {
                    state::remove(dir, &[MANIFEST.to_owned()])?;
                    Ok(Begun::Unfinished)
                }
            };
        }
        // Killed before the state was there.
        let unborn = format!("{STATE}.tmp");
        let others = state::written_files(dir)?.into_iter().filter(|name| *name != unborn);
        match (begun, { others }.next()) {
            (true, _) => Ok(Begun::Unfinished),
            (false, None) => self.begin_anew(),
            (false, Some(file)) => Err(ConvertError::Foreign { dir: dir.to_owned(), file }),
        }
    }

    fn begin_anew(&self) -> Result<Begun, ConvertError> {
        state::begin(self.dir(), &self.fingerprint)?;
        Ok(Begun::Unfinished)
    }

    fn is_work_file(&self, name: &str) -> bool {
        ["codebooks-L", "convert-L"].iter().any(|prefix| name.starts_with(prefix))
            || name.ends_with(".tmp")
            || name == "trunk-index.json"
    }

    /// The layers' errors of the container that stands here if it is what this conversion would make; else why not.
    fn finished(&self) -> Result<Result<Layers, String>, ConvertError> {
        let container = match Container::open(self.dir()) {
            Ok(container) => container,
            Err(error) => return Ok(Err(format!(" that does not open ({error})"))),
        };
        let Some(made) = container.manifest().extra.get(CONVERSION).and_then(Value::as_object) else {
            return Ok(Err(" of another tool".to_owned()));
        };
        for (key, wanted) in &self.fingerprint {
            let found = made.get(key).unwrap_or(&Value::Null);
            if found != wanted {
                return Ok(Err(format!(" with {key} {found}, this run says {wanted}")));
            }
        }
        let errors = made.get("layers").cloned().unwrap_or_default();
        Ok(serde_json::from_value(errors).map_err(|_| " of another version".to_owned()))
    }

    /// Makes what is missing, then the container of it.
    fn work(
        &self,
        writer: ContainerWriter,
        output: &Output,
        interrupt: &Interrupt,
    ) -> Result<Done, ConvertError> {
        // Other processes may work on other layers beside this one; what is for all layers needs the lock.
        let alone = match &self.request.work {
            Work::Layers(_) => {
                drop(writer);
                None
            }
            _ => Some(writer),
        };
        let mut layers = self.sweep(alone.is_some(), output)?;
        let resumed = layers.len();
        let wanted = |job: &&LayerJob| match &self.request.work {
            Work::All | Work::Layers(None) => true,
            Work::Layers(Some(some)) => some.contains(&job.layer),
            Work::Finish => false,
        };
        let owed: Vec<&LayerJob> = self.jobs.iter().filter(wanted).collect();
        let owed = owed.into_iter().filter(|job| !layers.contains_key(&job.layer)).collect::<Vec<_>>();
        if let Work::Finish = self.request.work {
            let missing = self.owed(&layers);
            if !missing.is_empty() {
                return Err(ConvertError::Owed { dir: self.dir().to_owned(), layers: missing });
            }
        }
        let trunk = match (&alone, &self.shards) {
            (None, _) => None,
            (Some(_), None) => Some(self.trunk(output, interrupt)?),
            (Some(_), Some(_)) => self.whole_trunk()?,
        };
        let stop = AtomicBool::new(false);
        let trunk = match &self.shards {
            None => {
                layers.extend(self.layers(&owed, None, &stop, output, interrupt)?);
                trunk
            }
            Some(shards) => {
                let mut used = Vec::new();
                for shard in shards.trunk.keys() {
                    if trunk.is_some() || parts::is_finished(self.dir(), shard)? {
                        used.push(shard.clone());
                    }
                }
                let request = self.request;
                let done = layers.keys().copied();
                let supply = Supply::begin(
                    &request.checkpoint,
                    shards,
                    request.follow,
                    request.reclaim,
                    output,
                    done,
                    used.clone(),
                )?;
                let made = std::thread::scope(|scope| {
                    let parts = scope.spawn(|| match alone {
                        Some(_) => self.parts(&supply, shards, &used, &stop, interrupt),
                        None => Ok(()),
                    });
                    let made = self.layers(&owed, Some(&supply), &stop, output, interrupt);
                    if made.is_err() {
                        stop.store(true, Ordering::Relaxed);
                    }
                    let parts = parts.join().unwrap_or(Err(ConvertError::Interrupted));
                    // What stopped the other is the reason.
                    match (made, parts) {
                        (Err(error), Err(ConvertError::Interrupted)) => Err(error),
                        (made, parts) => parts.and(made),
                    }
                })?;
                layers.extend(made);
                let tick = |_| if interrupt.requested() { Err(ConvertError::Interrupted) } else { Ok(()) };
                match (&alone, trunk) {
                    (Some(_), None) => Some(parts::merge(self.source, shards, self.dir(), &tick)?),
                    (_, trunk) => trunk,
                }
            }
        };
        if let (Some(writer), Some(trunk)) = (alone, trunk) {
            parts::remove(self.dir())?;
            self.commit(writer, trunk, &layers)?;
        }
        Ok(Done { layers, resumed })
    }

    /// The trunk's parts that are still to be made, each as its shard arrives.
    fn parts(
        &self,
        supply: &Supply,
        shards: &Shards,
        finished: &[String],
        stop: &AtomicBool,
        interrupt: &Interrupt,
    ) -> Result<(), ConvertError> {
        let stopped = || stop.load(Ordering::Relaxed) || interrupt.requested();
        let tick = |_| if stopped() { Err(ConvertError::Interrupted) } else { Ok(()) };
        let work = || {
            let mut owed: Vec<&String> =
                shards.trunk.keys().filter(|shard| !finished.contains(shard)).collect();
            while !owed.is_empty() {
                tick(0)?;
                let state = supply.state()?;
                let Some(at) = owed.iter().position(|shard| supply.there(state.as_ref(), [*shard])) else {
                    std::thread::sleep(PAUSE);
                    continue;
                };
                let shard = owed.remove(at);
                let request = self.request;
                parts::write(&request.checkpoint, shards, &request.options, self.dir(), shard, &tick)?;
                supply.trunk_used(shard)?;
            }
            Ok(())
        };
        let result = work();
        if result.is_err() {
            stop.store(true, Ordering::Relaxed);
        }
        result
    }

    /// The finished trunk of a checkpoint whose shards come and go.
    fn whole_trunk(&self) -> Result<Option<Vec<TrunkEntry>>, ConvertError> {
        let Some(entries) = state::sound_trunk(self.dir())? else { return Ok(None) };
        let config = &self.source.config;
        let mut needed = tensors::trunk(config).into_iter().chain(tensors::vision(config));
        let whole = needed.all(|spec| entries.iter().any(|entry| entry.name == spec.name));
        Ok(whole.then_some(entries))
    }

    fn owed(&self, layers: &Layers) -> Vec<u16> {
        self.jobs.iter().map(|job| job.layer).filter(|layer| !layers.contains_key(layer)).collect()
    }

    /// Converts layers, in worker processes where there can be any.
    fn layers(
        &self,
        jobs: &[&LayerJob],
        supply: Option<&Supply>,
        stop: &AtomicBool,
        output: &Output,
        interrupt: &Interrupt,
    ) -> Result<Layers, ConvertError> {
        let request = self.request;
        let expert = |job: &LayerJob| self.source.expert_bytes(job.layer.into());
        let run = Run {
            conversion: self,
            supply,
            stop,
            queue: Mutex::new(jobs.iter().map(|job| job.layer).collect()),
            active: Mutex::default(),
            failure: Mutex::default(),
            expert_bytes: jobs.iter().map(|job| (job.layer, expert(job))).collect(),
            tracker: Tracker::new(
                output,
                jobs.len(),
                jobs.iter().map(|job| job.experts as u64 * expert(job)).sum(),
                jobs.iter().map(|job| job.experts as u64).sum(),
            ),
            finished: Mutex::default(),
            output,
        };
        let workers = request.jobs.clamp(1, jobs.len().max(1));
        let begin = Begin {
            checkpoint: request.checkpoint.clone(),
            container: request.container.clone(),
            options: request.options,
            threads: (request.threads / workers).max(1),
            some: supply.is_some(),
        };
        let crew = request.program.clone().filter(|_| !jobs.is_empty()).map(|program| Crew {
            program,
            begin,
            workers,
            output,
            interrupt,
        });
        let crew = crew.filter(|crew| match crew.can_start() {
            Ok(()) => true,
            Err(error) => {
                output.warn(format_args!(
                    "no worker can be started ({error}): layers are converted in this process"
                ));
                false
            }
        });
        match crew {
            Some(crew) => crew.work(&run)?,
            None => self.in_this_process(jobs, &run, interrupt)?,
        }
        if let Some(failure) = lock(&run.failure).take() {
            return Err(failure);
        }
        Ok(run.finished.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    fn in_this_process(
        &self,
        jobs: &[&LayerJob],
        run: &Run,
        interrupt: &Interrupt,
    ) -> Result<(), ConvertError> {
        while let Some(layer) = run.next(&|| interrupt.requested()) {
            let Some(job) = jobs.iter().find(|job| job.layer == layer) else { continue };
            let tick = |experts| {
                run.experts(layer, i64::try_from(experts).unwrap_or(i64::MAX));
                if interrupt.requested() { Err(ConvertError::Interrupted) } else { Ok(()) }
            };
            tick(0)?;
            let options = &self.request.options;
            let errors = worker::finish_layer(self.source, job, options, self.dir(), &tick)?;
            run.done(layer, errors)?;
        }
        if interrupt.requested() { Err(ConvertError::Interrupted) } else { Ok(()) }
    }

    fn commit(
        &self,
        writer: ContainerWriter,
        trunk: Vec<TrunkEntry>,
        layers: &Layers,
    ) -> Result<(), ConvertError> {
        for (name, content) in &self.sidecars {
            writer.sidecar(name, content)?;
        }
        let names: Vec<&str> = self.sidecars.iter().map(|(name, _)| *name).collect();
        writer.commit(self.manifest(trunk, layers), &names)?;
        let work = state::written_files(self.dir())?.into_iter();
        state::remove(self.dir(), &work.filter(|name| self.is_work_file(name)).collect::<Vec<_>>())?;
        state::remove(self.dir(), &[STATE.to_owned()])
    }

    /// The layers that are finished and sound. Alone, it also removes what an interruption left half-made.
    fn sweep(&self, alone: bool, output: &Output) -> Result<Layers, ConvertError> {
        let mut sound = Layers::new();
        let recorded = |job: &LayerJob| state::is_recorded(self.dir(), job.layer);
        let total = self.jobs.iter().filter(|job| recorded(job)).count();
        let progress = Progress::new(output, "layers checked", total as u64, Unit::Count);
        for job in self.jobs.iter().filter(|job| recorded(job)) {
            match state::finished(self.dir(), job, &self.fingerprint)? {
                Some(errors) => {
                    sound.insert(job.layer, errors);
                }
                None => output.warn(format_args!("layer {} is damaged on disk and is made again", job.layer)),
            }
            progress.add(1);
        }
        progress.finish();
        if alone {
            // A damaged layer whose shards may be gone is not thrown away before it has been made again.
            let kept = |job: &&LayerJob| self.shards.is_some() || sound.contains_key(&job.layer);
            let kept = self.jobs.iter().filter(kept).flat_map(|job| state::layer_files(job.layer));
            let kept: Vec<String> = kept.collect();
            let prefixes = ["experts-L", "codebooks-L", "convert-L"];
            let of_a_layer = |name: &String| prefixes.iter().any(|prefix| name.starts_with(prefix));
            let left = state::written_files(self.dir())?.into_iter().filter(|name| !name.ends_with(".lock"));
            let left =
                left.filter(|name| name.ends_with(".tmp") || (of_a_layer(name) && !kept.contains(name)));
            state::remove(self.dir(), &left.collect::<Vec<_>>())?;
        }
        Ok(sound)
    }

    /// The trunk that an earlier run finished, or a new one.
    fn trunk(&self, output: &Output, interrupt: &Interrupt) -> Result<Vec<TrunkEntry>, ConvertError> {
        if let Some(entries) = state::sound_trunk(self.dir())? {
            let planned = |(entry, name): (&TrunkEntry, &String)| {
                let info = self.source.checkpoint.info(name)?;
                let plan = trunk::plan(&self.source.config, &self.request.options, name, &info)?;
                Ok(entry.name == *name && entry.fmt == plan.fmt && entry.shape == plan.shape)
            };
            let fits = entries.iter().zip(&self.source.trunk).map(planned);
            let fits = fits.collect::<Result<Vec<bool>, ConvertError>>()?;
            if entries.len() == self.source.trunk.len() && fits.iter().all(|fits| *fits) {
                return Ok(entries);
            }
        }
        let bytes = trunk::trunk_bytes(self.source, &self.request.options)?;
        let progress = Progress::new(output, "trunk", bytes, Unit::Bytes);
        let tick = |bytes| {
            progress.add(bytes);
            if interrupt.requested() { Err(ConvertError::Interrupted) } else { Ok(()) }
        };
        let names = &self.source.trunk;
        let entries = trunk::convert_trunk(self.source, &self.request.options, names, self.dir(), &tick)?;
        progress.finish();
        Ok(entries)
    }

    fn manifest(&self, trunk: Vec<TrunkEntry>, layers: &Layers) -> Manifest {
        let config = &self.source.config;
        let bank = |job: &LayerJob| {
            let bank = bank_entry(job.layer, job.experts as u32, job.codebook_base, &job.geometry);
            (u32::from(job.layer), bank)
        };
        let mut conversion = self.fingerprint.clone();
        let layers: Map<String, Value> =
            layers.iter().map(|(layer, errors)| (layer.to_string(), errors_value(errors))).collect();
        conversion.insert("layers".into(), layers.into());
        Manifest {
            arch: config.arch.to_owned(),
            tensor_prefix: config.tensor_prefix.to_owned(),
            config: inner_config(self.source.checkpoint.config()),
            expert_quant: self.quant.clone(),
            layers: self.jobs.iter().map(bank).collect(),
            trunk,
            integrity: None,
            extra: Map::from_iter([
                (CONVERSION.to_owned(), conversion.into()),
                (PROVENANCE.to_owned(), self.source.provenance()),
            ]),
        }
    }

    fn report(&self, done: &Done, start: Instant) -> Result<Report, ConvertError> {
        let finished = self.dir().join(MANIFEST).exists();
        let container = if finished { Some(Container::open(self.dir())?) } else { None };
        let written = state::written_files(self.dir())?;
        let bytes = state::bytes_of(self.dir(), written.iter().map(String::as_str).chain([MANIFEST]));
        let layers = &done.layers;
        Ok(Report {
            container: self.dir().display().to_string(),
            checkpoint: self.request.checkpoint.display().to_string(),
            arch: self.source.config.arch.to_owned(),
            format: self.quant.fmt.name(),
            effort: self.request.options.effort.name(),
            trunk_bits: self.request.options.trunk_bits,
            layers: layers.len(),
            experts: self
                .jobs
                .iter()
                .filter(|job| layers.contains_key(&job.layer))
                .map(|job| job.experts)
                .sum(),
            owed_layers: self.owed(layers),
            bytes,
            seconds: (start.elapsed().as_secs_f64() * 1e3).round() / 1e3,
            error: mean(layers.values()),
            resumed_layers: done.resumed,
            manifest_sha256: container.map(|container| container.manifest_sha256().to_owned()),
            peak_rss_bytes: machine::peak_rss_bytes(),
        })
    }
}

/// What the workers are given and what they have done.
struct Run<'a> {
    conversion: &'a Conversion<'a>,
    supply: Option<&'a Supply<'a>>,
    /// Something else has failed.
    stop: &'a AtomicBool,
    queue: Mutex<VecDeque<u16>>,
    /// Layers in work.
    active: Mutex<BTreeSet<u16>>,
    failure: Mutex<Option<ConvertError>>,
    /// Source bytes of an expert of each layer.
    expert_bytes: BTreeMap<u16, u64>,
    tracker: Tracker,
    finished: Mutex<Layers>,
    output: &'a Output,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Run<'_> {
    fn job(&self, layer: u16) -> Option<&LayerJob> {
        self.conversion.jobs.iter().find(|job| job.layer == layer)
    }

    /// A layer whose shards are there, if there is one.
    fn ready(&self) -> Result<Option<u16>, ConvertError> {
        let mut queue = lock(&self.queue);
        let at = match self.supply {
            None => (!queue.is_empty()).then_some(0),
            Some(supply) => {
                let state = supply.state()?;
                queue.iter().position(|layer| supply.has_layer(state.as_ref(), *layer))
            }
        };
        Ok(at.and_then(|at| queue.remove(at)))
    }

    /// Bytes that are missing for a layer, those in work and the reserve.
    fn shortfall(&self, layer: u16) -> u64 {
        let bytes = |layer: &u16| {
            self.job(*layer).map_or(0, |job| job.experts as u64 * job.geometry.record_bytes() as u64)
        };
        let needed = bytes(&layer) + lock(&self.active).iter().map(bytes).sum::<u64>();
        let needed = needed + self.conversion.request.reserve;
        free_bytes(self.conversion.dir()).map_or(0, |free| needed.saturating_sub(free))
    }
}

impl Owner for Run<'_> {
    fn next(&self, stopped: &dyn Fn() -> bool) -> Option<u16> {
        let mut told = false;
        let mut wait = |message: String| {
            if !std::mem::replace(&mut told, true) {
                self.output.note(message);
            }
            std::thread::sleep(PAUSE);
        };
        while !stopped() && !self.stop.load(Ordering::Relaxed) && !lock(&self.queue).is_empty() {
            let layer = match self.ready() {
                Ok(Some(layer)) => layer,
                Ok(None) => {
                    wait(format!("waiting for shards of {} layers", lock(&self.queue).len()));
                    continue;
                }
                Err(error) => {
                    lock(&self.failure).get_or_insert(error);
                    return None;
                }
            };
            let missing = self.shortfall(layer);
            if missing == 0 {
                lock(&self.active).insert(layer);
                return Some(layer);
            }
            lock(&self.queue).push_front(layer);
            wait(format!(
                "paused: {} more must be free for layer {layer} and the reserve of {}; make room and it goes on, or \
                 press Ctrl-C: what is finished is kept",
                ByteSize(missing),
                ByteSize(self.conversion.request.reserve)
            ));
        }
        None
    }

    fn experts(&self, layer: u16, experts: i64) {
        let bytes = self.expert_bytes.get(&layer).map_or(0, |bytes| *bytes as i64);
        self.tracker.experts(experts, experts.saturating_mul(bytes));
    }

    fn done(&self, layer: u16, errors: Errors) -> Result<(), ConvertError> {
        lock(&self.active).remove(&layer);
        lock(&self.finished).insert(layer, errors);
        let (done, of) = self.tracker.layer();
        self.output.note(format_args!("layer {layer}: error {} ({done} of {of} layers)", show(&errors)));
        let conversion = self.conversion;
        if let (Some(supply), Some(job)) = (self.supply, self.job(layer)) {
            if conversion.request.reclaim != Reclaim::Off
                && state::finished(conversion.dir(), job, &conversion.fingerprint)?.is_none()
            {
                let [bank, ..] = state::layer_files(layer);
                return Err(ConvertError::ReadBack { file: conversion.dir().join(bank) });
            }
            supply.layer_used(layer)?;
        }
        Ok(())
    }
}

type Layers = BTreeMap<u16, Errors>;

/// One job per MoE layer; codebooks are numbered by the layer's place, so that nothing is ever renumbered.
pub fn jobs(source: &Source, quant: &ExpertQuant) -> Result<Vec<LayerJob>, ConvertError> {
    let layers: Vec<usize> = source.config.moe_layers().collect();
    let owned = quant.codebooks_per_layer();
    let codebooks = layers.len() as u64 * u64::from(owned);
    if codebooks > 1 << 16 {
        return Err(ConvertError::Codebooks { layers: layers.len(), codebooks });
    }
    let job = |(i, layer): (usize, &usize)| {
        let moe = source.config.moe_of(*layer);
        let (experts, inter, input) =
            moe.map_or((0, 0, 0), |moe| (moe.experts, moe.intermediate as u64, moe.input as u64));
        let geometry = Geometry::new(quant, inter, input)
            .map_err(|source| ConvertError::Experts { format: quant.fmt.name(), source })?;
        let codebook_base = (i * owned as usize) as u16;
        Ok(LayerJob { layer: *layer as u16, codebook_base, experts, quant: quant.clone(), geometry })
    };
    layers.iter().enumerate().map(job).collect()
}

/// The text model's object, verbatim; what is left of the outer one stands under `_outer`.
fn inner_config(config: &Value) -> Value {
    let Some(outer) = config.as_object() else { return config.clone() };
    let mut outer = outer.clone();
    match outer.shift_remove("text_config") {
        Some(Value::Object(mut text)) => {
            text.insert("_outer".to_owned(), outer.into());
            text.into()
        }
        _ => config.clone(),
    }
}

fn errors_value(errors: &Errors) -> Value {
    serde_json::json!({"gate": errors.gate, "up": errors.up, "down": errors.down})
}

fn mean<'a>(layers: impl ExactSizeIterator<Item = &'a Errors> + Clone) -> Option<Errors> {
    if layers.len() == 0 {
        return None;
    }
    let count = layers.len() as f64;
    let mean = |of: fn(&Errors) -> f64| {
        let square = layers.clone().map(|errors| of(errors) * of(errors)).sum::<f64>() / count;
        (square.sqrt() * 1e6).round() / 1e6
    };
    Some(Errors { gate: mean(|e| e.gate), up: mean(|e| e.up), down: mean(|e| e.down) })
}

/// `gate 19.42 %, up 19.40 %, down 19.51 %`
pub fn show(errors: &Errors) -> String {
    let percent = |value: f64| format!("{:.2} %", 100.0 * value);
    format!("gate {}, up {}, down {}", percent(errors.gate), percent(errors.up), percent(errors.down))
}

/// Free bytes where `dir` is or will be.
fn free_bytes(dir: &Path) -> Option<u64> {
    let absolute = std::path::absolute(dir).ok()?;
    let existing = absolute.ancestors().find(|path| path.exists())?;
    filesystem(existing).ok()?.free_bytes
}

fn same_directory(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| fs::canonicalize(path).map_err(FileError::io("open", path));
    matches!((real(one), real(other)), (Ok(one), Ok(other)) if one == other)
}

/// One line for people.
impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}, {} layers", self.container, ByteSize(self.bytes), self.layers)?;
        if let Some(error) = &self.error {
            write!(f, ", {} error {}", self.format, show(error))?;
        }
        if !self.owed_layers.is_empty() {
            write!(f, ", {} layers owed", self.owed_layers.len())?;
        }
        write!(f, ", {:.1} s", self.seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use waste_common::error::{Coded, Exit};

    #[test]
    fn what_does_not_fit_the_disk_is_refused_and_what_is_there_counts() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny-linear/ckpt");
        let source = Source::open(&checkpoint).unwrap();
        let request = Request {
            checkpoint,
            container: dir.path().join("not yet"),
            options: Options::default(),
            work: Work::All,
            threads: 1,
            jobs: 1,
            follow: false,
            reclaim: Reclaim::Off,
            reserve: 0,
            program: None,
            force: false,
        };
        let conversion = Conversion::new(&request, &source).unwrap();
        let bytes = conversion.bytes().unwrap();
        // The finished container has 6,162,165; the rest is work files.
        assert!((6_162_165..7_000_000).contains(&bytes), "{bytes}");
        conversion.check_space(Some(bytes)).unwrap();
        conversion.check_space(None).unwrap();
        let error = conversion.check_space(Some(bytes - 1)).unwrap_err();
        assert_eq!((error.exit(), error.code()), (Exit::Space, "disk_full"));
        assert_eq!(error.fields()["shortfall_bytes"], 1);
        fs::create_dir(&request.container).unwrap();
        fs::write(request.container.join("experts-L1.bin"), [0; 1000]).unwrap();
        conversion.check_space(Some(bytes - 1000)).unwrap();
    }

    #[test]
    fn the_mean_over_layers() {
        let layer = |gate| Errors { gate, up: 0.2, down: 0.0 };
        let found = mean([layer(0.3), layer(0.4)].iter());
        assert_eq!(found, Some(Errors { gate: 0.353553, up: 0.2, down: 0.0 }));
        assert_eq!(mean([].iter()), None);
    }
}
