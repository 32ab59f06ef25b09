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
mod report;
mod request;
mod sidecars;
mod source;
mod sums;
mod text;
mod trunk;

use std::path::PathBuf;
use std::time::Instant;

use waste_common::cli::{Exit, Failure, Interrupt, Output, Progress, Tool, Unit};
use waste_common::container::record::HEADER_BYTES;
use waste_common::container::{Container, MANIFEST, MANIFEST_SHA256, Manifest, Source, integrity};
use waste_common::json;

pub use args::Args;
pub use report::{LISTED_MAX, Note, Problem, Report};
pub use request::{Request, Sampling, SourceRequest};
pub use source::{KindErrors, LayerErrors, SourceReport, TrunkErrors};

use crew::Crew;
use job::Job;
use report::Findings;

/// The tool.
pub const TOOL: Tool = Tool {
    name: "waste-verify",
    version: env!("CARGO_PKG_VERSION"),
    schema: "waste-verify/1",
    examples: "  waste-verify k3.waste                              every checksum, header, index and scale
  waste-verify --quick k3.waste                      headers and sizes only
  waste-verify --source Kimi-K3 k3.waste             compare the weights with the checkpoint, 4 experts a layer
  waste-verify --source Kimi-K3 --experts all k3.waste
  waste-verify --write-sums SHA256SUMS k3.waste      as `cd k3.waste && sha256sum *` would
  waste-verify --sums SHA256SUMS k3.waste            against a list from whom you trust
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

/// Verifies a container.
///
/// # Errors
/// As for [`run`].
pub fn verify(request: &Request, output: &Output, interrupt: &Interrupt) -> Result<Report, Failure> {
    let start = Instant::now();
    request.check_directory()?;
    let dir = request.container.as_path();
    let list = request.sums.as_deref().map(sums::read).transpose()?;
    let found = Findings::default();
    let (manifest, manifest_sha256) = open_manifest(request, &found)?;
    let geometry = banks::geometry(dir, &manifest)?;
    let listing = sidecars::list(dir)?;
    let members = sidecars::members(&manifest, &listing);
    let present = || members.iter().filter_map(|name| listing.get(name).copied().flatten());
    let experts = manifest.layers.values().map(|bank| u64::from(bank.experts)).sum();
    let progress = {
        let work = if request.quick { experts * HEADER_BYTES as u64 } else { total(present()) };
        let hashed = total(listing.values().flatten().copied());
        let passes = u64::from(list.is_some()) + u64::from(request.write_sums.is_some());
        Progress::new(output, "verifying", work.saturating_add(hashed.saturating_mul(passes)), Unit::Bytes)
    };
    let crew = Crew::new(request.threads, interrupt)?;
    let job = Job {
        dir,
        manifest: &manifest,
        quick: request.quick,
        found: &found,
        crew: &crew,
        progress: &progress,
    };

    let config = model::check(&job, &listing)?;
    if let Some(geometry) = &geometry {
        banks::check(&job, geometry)?;
        codebooks::check(&job)?;
    }
    trunk::check(&job)?;
    sidecars::check(&job, &listing)?;
    sidecars::note_strangers(&listing, &members, &found);
    let lists: Vec<PathBuf> = request.sums.iter().chain(&request.write_sums).cloned().collect();
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
            sums::write(&job, &listing, path, &lists)?;
        } else {
            output.warn(format_args!("{} was not written: the container is not sound", path.display()));
        }
    }
    progress.finish();

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
        layers,
        experts,
        tensors,
        manifest_sha256,
        unprotected,
        problem_count,
        problems,
        notes,
        source,
        seconds: (start.elapsed().as_secs_f64() * 1e3).round() / 1e3,
    })
}

/// Reads the manifest, and compares it with its checksum and the one that is expected.
fn open_manifest(request: &Request, found: &Findings) -> Result<(Manifest, String), Failure> {
    let dir = request.container.as_path();
    let source = Source::open(dir, MANIFEST)?;
    let content = json::read_bounded(source.path(), json::MANIFEST_BYTES_MAX)?;
    let sha256 = integrity::sha256_hex(&content);
    let manifest = match Manifest::parse(source.path(), &content) {
        Ok(manifest) => manifest,
        Err(error) => {
            let mut failure = Failure::from(error);
            if integrity::check_manifest_sidecar(dir, &content).is_err() {
                let advice =
                    format!("; it also differs from {MANIFEST_SHA256}: it has changed since it was written");
                failure.message.push_str(&advice);
            }
            return Err(failure.with("manifest_sha256", sha256));
        }
    };
    sidecars::check_manifest_sum(dir, &content, found);
    if let Some(expected) = request.expect_manifest.as_ref().filter(|expected| **expected != sha256) {
        let message = format!("sha256 is {sha256}, {expected} was expected");
        found.problem(Problem::new(MANIFEST, "unexpected_manifest", message));
    }
    Ok((manifest, sha256))
}

/// A sum of file sizes; sparse files can claim more than 64 bits hold.
fn total(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(0, u64::saturating_add)
}
