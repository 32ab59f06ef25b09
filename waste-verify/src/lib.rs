//! Tells whether a .waste container is sound, and where it is not.
//!
//! Nothing stops at the first problem: every file is checked as far as it is there, and each problem names file,
//! layer, expert or tensor, and the offset where it is known. Only a manifest that cannot be understood ends the
//! work (exit 3), for without it nothing else has a meaning.
#![forbid(unsafe_code)]

mod args;
mod banks;
mod codebooks;
mod crew;
mod finite;
mod job;
mod model;
mod repair;
mod report;
mod request;
mod resume;
mod seal;
mod sidecars;
mod source;
mod sums;
mod text;
mod trunk;

use std::path::PathBuf;
use std::time::Instant;

use waste_common::cli::{Exit, Failure, Interrupt, Output, Progress, Tool, Unit};
use waste_common::container::record::HEADER_BYTES;
use waste_common::container::{Container, Geometry, MANIFEST, MANIFEST_SHA256, Manifest, Source, integrity};
use waste_common::files::DirLock;
use waste_common::io::Bypass;
use waste_common::json;

pub use args::Args;
pub use repair::Repaired;
pub use report::{FileResult, LISTED_MAX, Note, Problem, Report};
pub use request::{Request, Sampling, SourceRequest};
pub use source::{KindErrors, LayerErrors, SourceReport, TrunkErrors};

use crew::Crew;
use job::Job;
use repair::Repair;
use report::Findings;
use resume::Resume;

/// The tool.
pub const TOOL: Tool = Tool {
    name: "waste-verify",
    version: env!("CARGO_PKG_VERSION"),
    schema: "waste-verify/1",
    examples: "  waste-verify k3.waste                              every checksum, header, index and scale
  waste-verify --quick k3.waste                      headers and sizes only
  waste-verify --source Kimi-K3 k3.waste             compare the weights with the checkpoint, 4 experts a layer
  waste-verify --source Kimi-K3 --experts all k3.waste
  waste-verify --from-disk k3.waste                  after a copy: the disk, not what memory still holds of it
  waste-verify --resume state.json k3.waste          goes on where it was interrupted
  waste-verify --sums k3.waste                       writes k3.waste/SHA256SUMS for `sha256sum -c`
  waste-verify --check-sums SHA256SUMS k3.waste      against a list from whom you trust
  waste-verify --repair --from /mnt/copy/k3.waste k3.waste
  waste-verify --seal foreign.waste                  adds the checksums another converter left out
  waste-convert Kimi-K3 k3.waste --json | waste-verify - --json | waste-plan -",
    details: Vec::new,
};

/// Runs the tool: prints a [`Report`]; [`Exit::No`] if anything is wrong.
///
/// # Errors
/// Wrong usage, a container whose manifest cannot be understood, an unreadable checkpoint or list of sums, an
/// interruption.
pub fn run(args: Args, output: &Output) -> Result<Exit, Failure> {
    let request = Request::from_args(args)?;
    let report = verify(&request, output, &Interrupt::install()?)?;
    if output.json() {
        output.result(&report)?;
    } else {
        text::print(&report, output)?;
    }
    Ok(if report.ok { Exit::Done } else { Exit::No })
}

/// Verifies a container; repairs or seals it if the request says so.
///
/// # Errors
/// As for [`run`].
pub fn verify(request: &Request, output: &Output, interrupt: &Interrupt) -> Result<Report, Failure> {
    let start = Instant::now();
    request.check_directory()?;
    let dir = request.container.as_path();
    let writes = request.seal || request.repair_from.is_some();
    let _lock = writes.then(|| DirLock::acquire(dir)).transpose()?;
    let mut repaired = Vec::new();
    if let Some(other) = &request.repair_from {
        repaired.extend(repair::manifest(dir, other)?);
    }
    let (mut resume, mut before) = (None, None);
    let mut report = loop {
        let found = Findings::default();
        let opened = Opened::new(request, &found)?;
        // What was found sound once is not looked at again after a repair.
        let known = match resume.take() {
            Some(known) => known,
            None => Resume::open(dir, request.resume.as_deref(), &opened.sha256, request.from_disk)?,
        };
        let known = resume.insert(known);
        let geometry = banks::geometry(dir, &opened.manifest)?;
        let report = look(request, output, interrupt, &opened, geometry.as_ref(), found, known)?;
        let Some(other) = request.repair_from.as_ref().filter(|_| !report.ok) else { break report };
        if before.is_some_and(|before| report.problem_count >= before) {
            break report;
        }
        before = Some(report.problem_count);
        let manifest = &opened.manifest;
        let copied =
            Repair { dir, other, manifest, geometry: geometry.as_ref(), interrupt }.all(&report.problems)?;
        if copied.is_empty() {
            break report;
        }
        repaired.extend(copied);
    };
    resume.map_or(Ok(()), Resume::finish)?;
    report.repaired = repaired;
    report.seconds = (start.elapsed().as_secs_f64() * 1e3).round() / 1e3;
    Ok(report)
}

/// Looks at everything once.
fn look(
    request: &Request,
    output: &Output,
    interrupt: &Interrupt,
    opened: &Opened,
    geometry: Option<&Geometry>,
    found: Findings,
    resume: &Resume,
) -> Result<Report, Failure> {
    let dir = request.container.as_path();
    let list = request.check_sums.as_deref().map(sums::read).transpose()?;
    let manifest = &opened.manifest;
    let listing = sidecars::list(dir)?;
    let members = sidecars::members(manifest, &listing);
    let present = || members.iter().filter_map(|name| listing.get(name).copied().flatten());
    let experts = manifest.layers.values().map(|bank| u64::from(bank.experts)).sum();
    let progress = {
        let work = if request.quick { experts * HEADER_BYTES as u64 } else { total(present()) };
        let hashed = total(listing.values().flatten().copied());
        let passes = u64::from(list.is_some()) + u64::from(request.write_sums.is_some());
        Progress::new(output, "verifying", work.saturating_add(hashed.saturating_mul(passes)), Unit::Bytes)
    };
    let crew = Crew::new(request.threads, interrupt)?;
    let bypass = if request.from_disk { Bypass::On } else { Bypass::Uncached };
    let quick = request.quick;
    let mut job =
        Job { dir, manifest, quick, bypass, found: &found, crew: &crew, progress: &progress, resume };
    let sealed = match request.seal && manifest.integrity.is_none() {
        true => seal::prepare(&job, &opened.content, geometry, &listing)?,
        false => None,
    };
    if let Some(sealed) = &sealed {
        // Held against its checksums, padding and all, before they are given.
        job.manifest = &sealed.manifest;
    }

    let config = model::check(&job, &listing)?;
    if let Some(geometry) = geometry {
        banks::check(&job, geometry)?;
        codebooks::check(&job)?;
    }
    trunk::check(&job)?;
    sidecars::check(&job, &listing)?;
    sidecars::note_strangers(&listing, &members, &found);
    let sealed_sha256 = match &sealed {
        Some(sealed) if found.sound() => Some(sealed.write(&job)?),
        _ => None,
    };
    let lists: Vec<PathBuf> = request.check_sums.iter().chain(&request.write_sums).cloned().collect();
    if let Some(sums) = &list {
        sums::check(&job, &listing, sums, &lists)?;
    }
    let source = match &request.source {
        None => None,
        Some(source) => match (Container::open(dir), &config) {
            (Ok(container), Some(config)) => Some(source::compare(&job, config, &container, source, output)?),
            _ => {
                found.note(
                    MANIFEST,
                    "the container cannot be opened, so it was not compared with the checkpoint",
                );
                None
            }
        },
    };
    if let Some(path) = &request.write_sums {
        if found.sound() {
            // Sealing may have added a file.
            sums::write(&job, &sidecars::list(dir)?, path, &lists)?;
        } else {
            output.warn(format_args!("{} was not written: the container is not sound", path.display()));
        }
    }
    progress.finish();

    let file_results = members
        .iter()
        .map(|name| {
            let problem_count = found.problems_of(name);
            let bytes = listing.get(name).copied().flatten();
            FileResult { file: name.clone(), bytes, ok: problem_count == 0, problem_count }
        })
        .collect();
    let (files, bytes) = (present().count() as u64, total(present()));
    let (layers, tensors) = (manifest.layers.len() as u64, manifest.trunk.len() as u64);
    drop(crew);
    let (problems, problem_count, notes, unprotected) = found.take();
    Ok(Report {
        container: dir.display().to_string(),
        ok: problem_count == 0,
        mode: if request.quick { "quick" } else { "full" },
        files,
        bytes,
        file_results,
        layers,
        experts,
        tensors,
        sealed: request.seal.then_some(sealed_sha256.is_some()),
        manifest_sha256: sealed_sha256.unwrap_or_else(|| opened.sha256.clone()),
        unprotected,
        problem_count,
        problems,
        notes,
        repaired: Vec::new(),
        source,
        seconds: 0.0,
    })
}

/// A container whose manifest has been read.
struct Opened {
    manifest: Manifest,
    content: Vec<u8>,
    sha256: String,
}

impl Opened {
    /// Reads the manifest, and compares it with its checksum and the one that is expected.
    fn new(request: &Request, found: &Findings) -> Result<Opened, Failure> {
        let dir = request.container.as_path();
        let source = Source::open(dir, MANIFEST)?;
        let content = json::read_bounded(source.path(), json::MANIFEST_BYTES_MAX)?;
        let sha256 = integrity::sha256_hex(&content);
        let manifest = match Manifest::parse(source.path(), &content) {
            Ok(manifest) => manifest,
            Err(error) => {
                let mut failure = Failure::from(error);
                if integrity::check_manifest_sidecar(dir, &content).is_err() {
                    let advice = format!(
                        "; it also differs from {MANIFEST_SHA256}: it has changed since it was written"
                    );
                    failure.message.push_str(&advice);
                }
                return Err(failure.with("manifest_sha256", sha256));
            }
        };
        // Sealing, which gives it a checksum, knows one more that is right.
        if !request.seal || manifest.integrity.is_some() {
            sidecars::check_manifest_sum(dir, &content, found);
        }
        if let Some(expected) = request.expect_manifest.as_ref().filter(|expected| **expected != sha256) {
            let message = format!("sha256 is {sha256}, {expected} was expected");
            found.problem(Problem::new(MANIFEST, "unexpected_manifest", message));
        }
        Ok(Opened { manifest, content, sha256 })
    }
}

/// A sum of file sizes; sparse files can claim more than 64 bits hold.
fn total(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(0, u64::saturating_add)
}
