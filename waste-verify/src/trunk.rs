//! `trunk.bin`: every tensor's checksum and numbers, and the bytes that are no tensor's.

use waste_common::cli::Failure;
use waste_common::container::{TRUNK, TrunkEntry, TrunkFmt};
use waste_common::io::ReadFile;

use crate::crew::Worker;
use crate::finite::{Watch, Width};
use crate::job::Job;
use crate::report::Problem;

/// Checks the trunk.
pub(crate) fn check(job: &Job) -> Result<(), Failure> {
    let place = Problem::new(TRUNK, "", "");
    unprotected(job);
    let Some(source) = job.open(&place) else { return Ok(()) };
    let inside =
        |entry: &TrunkEntry| entry.off.checked_add(entry.bytes).is_some_and(|end| end <= source.bytes());
    let (entries, beyond): (Vec<_>, Vec<_>) = job.manifest.trunk.iter().partition(|entry| inside(entry));
    for entry in beyond {
        let message = format!(
            "the file has {} bytes, but the tensor ends at {}",
            source.bytes(),
            entry.off.saturating_add(entry.bytes)
        );
        job.found.problem(Problem::new(TRUNK, "wrong_size", message).tensor(&entry.name).offset(entry.off));
    }
    for (start, end) in gaps(&entries, source.bytes()) {
        uncovered(job, start, end);
    }
    if job.quick || job.known_sound(&source, TRUNK) {
        return Ok(());
    }
    let Some(reader) = job.reader(&source, &place)? else { return Ok(()) };
    job.crew
        .each(entries.len(), job.progress, |at, worker| check_tensor(job, &reader, entries[at], worker))?;
    job.looked_at(TRUNK)
}

/// Lists the tensors without a checksum; the whole file if none has one.
fn unprotected(job: &Job) {
    let bare: Vec<_> = job.manifest.trunk.iter().filter(|entry| entry.crc32.is_none()).collect();
    if bare.len() == job.manifest.trunk.len() {
        job.found.unprotected(TRUNK);
        return;
    }
    for entry in bare {
        job.found.unprotected(format!("{TRUNK}: tensor {}", entry.name));
    }
}

/// The ranges that belong to no tensor.
fn gaps(entries: &[&TrunkEntry], bytes: u64) -> Vec<(u64, u64)> {
    let mut spans: Vec<_> = entries.iter().map(|entry| (entry.off, entry.off + entry.bytes)).collect();
    spans.push((bytes, bytes));
    spans.sort_unstable();
    let mut covered = 0;
    let mut gaps = Vec::new();
    for (start, end) in spans {
        if start > covered {
            gaps.push((covered, start));
        }
        covered = covered.max(end);
    }
    gaps
}

fn uncovered(job: &Job, start: u64, end: u64) {
    let part = format!("bytes {start} to {end}");
    if job.strict() {
        let message = format!("{part} belong to no tensor, and no checksum covers them");
        job.found.problem(Problem::new(TRUNK, "gap", message).offset(start));
    } else {
        job.found.unprotected(format!("{TRUNK}: {part}"));
        job.found.note(TRUNK, format!("{part} belong to no tensor"));
    }
}

fn check_tensor(
    job: &Job,
    reader: &ReadFile,
    entry: &TrunkEntry,
    worker: &mut Worker,
) -> Result<(), Failure> {
    let place = Problem::new(TRUNK, "", "").tensor(&entry.name).offset(entry.off);
    let sizes = match entry.sizes() {
        Ok(sizes) => sizes,
        Err(problem) => {
            job.found.problem(Problem { kind: "bad_tensor", message: problem, ..place });
            return Ok(());
        }
    };
    let mut crc = crc32fast::Hasher::new();
    let (payload, mut numbers) = match entry.fmt {
        TrunkFmt::F32 => (0, Watch::new(Width::F32)),
        TrunkFmt::F16 => (0, Watch::new(Width::F16)),
        // Only the scales can be anything but finite.
        _ => (sizes.payload_bytes, Watch::new(Width::F16)),
    };
    for (start, len, watched) in [(0, payload, false), (payload, sizes.bytes - payload, true)] {
        let streamed = worker.stream(reader, entry.off + start, len, |piece| {
            crc.update(piece);
            if watched {
                numbers.push(piece);
            }
        });
        if job.settle(streamed, &place)?.is_none() {
            return Ok(());
        }
    }
    let found = crc.finalize();
    if let Some(expected) = entry.crc32.filter(|expected| *expected != found) {
        let message =
            format!("checksum is {found}, expected {expected}: the tensor has changed since it was written");
        job.found.problem(Problem { kind: "checksum", message, ..place.clone() });
    }
    if let Some(at) = numbers.first() {
        let (what, size) = match entry.fmt {
            TrunkFmt::F32 => ("weight", 4),
            TrunkFmt::F16 => ("weight", 2),
            _ => ("scale", 2),
        };
        let message = format!("{what} {at} is not finite");
        job.found.problem(
            Problem { kind: "not_finite", message, ..place }.offset(entry.off + payload + at * size),
        );
    }
    Ok(())
}
