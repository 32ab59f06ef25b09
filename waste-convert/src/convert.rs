//! What the tool does: a conversion, a dry run, a look at how far one has come.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use waste_common::cli::{ByteSize, Interrupt, Output};
use waste_common::container::writer::ContainerWriter;
use waste_common::container::{ContainerError, MANIFEST};
use waste_common::files::FileError;
use waste_common::io::filesystem;
use waste_common::staging;

use crate::conversion::{Begun, Conversion, Done, free_bytes};
use crate::error::ConvertError;
use crate::layer::{self, Errors, LayerJob, Probe};
use crate::options::Options;
use crate::probe::{DryRun, Status};
use crate::source::Source;
use crate::state;
use crate::supply::Reclaim;

/// Time between two looks at what has arrived, or at the free space.
pub(crate) const PAUSE: Duration = Duration::from_millis(300);

/// What to convert, and how.
#[derive(Debug, Clone)]
pub struct Request {
    /// The checkpoint's directory.
    pub checkpoint: PathBuf,
    /// The container's directory.
    pub container: PathBuf,
    /// What decides the container's bytes.
    pub options: Options,
    /// The file of `options.importance`.
    pub importance: Option<PathBuf>,
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

/// Takes the container's directory. Another run of some layers gives it back as soon as it has looked around, and a
/// worker that was just being started when its parent was killed as soon as it runs: both are waited for.
fn writer(request: &Request) -> Result<ContainerWriter, ConvertError> {
    let patience = Duration::from_secs(match request.work {
        Work::Layers(_) => 10,
        _ => 1,
    });
    let start = Instant::now();
    loop {
        match ContainerWriter::create(&request.container) {
            Err(ContainerError::File(FileError::Locked { .. })) if start.elapsed() < patience => {
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
    let importance = request.importance.as_deref();
    if comes_and_goes(request) {
        return Source::open_some(&request.checkpoint)?.weigh(importance, request.options.importance);
    }
    let source = Source::open(&request.checkpoint)?.weigh(importance, request.options.importance)?;
    for name in source.ignored.iter().take(8) {
        output.warn(format_args!("tensor `{name}` is not carried over: the model has no use for it"));
    }
    Ok(source)
}

/// Whether shards may be absent.
pub(crate) fn comes_and_goes(request: &Request) -> bool {
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

fn same_directory(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| fs::canonicalize(path).map_err(FileError::io("open", path));
    matches!((real(one), real(other)), (Ok(one), Ok(other)) if one == other)
}

/// One line for people.
impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}, {} layers", self.container, ByteSize(self.bytes), self.layers)?;
        if let Some(error) = &self.error {
            write!(f, ", {} error {}", self.format, layer::show(error))?;
        }
        if !self.owed_layers.is_empty() {
            write!(f, ", {} layers owed", self.owed_layers.len())?;
        }
        write!(f, ", {:.1} s", self.seconds)
    }
}
