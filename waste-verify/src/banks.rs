//! Expert banks: every record's header, payload checksum, padding, indices and scales.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use waste_common::cli::Failure;
use waste_common::container::record::HEADER_BYTES;
use waste_common::container::{
    Bank, ContainerError, Expected, Geometry, Kind, MANIFEST, Manifest, RecordView, Source,
};
use waste_common::io::ReadFile;

use crate::crew::Worker;
use crate::finite;
use crate::job::Job;
use crate::report::Problem;

/// Checks all banks.
pub(crate) fn check(job: &Job, geometry: &Geometry) -> Result<(), Failure> {
    for (layer, bank) in &job.manifest.layers {
        check_bank(job, geometry, *layer, bank)?;
    }
    Ok(())
}

/// The geometry of the manifest's experts; `None` without MoE layers.
///
/// # Errors
/// The manifest's numbers make no record (exit 3).
pub(crate) fn geometry(dir: &Path, manifest: &Manifest) -> Result<Option<Geometry>, Failure> {
    if manifest.layers.is_empty() {
        return Ok(None);
    }
    let file = dir.join(MANIFEST);
    let (inter, input) = manifest.expert_shape(&file)?;
    let layout = Geometry::new(&manifest.expert_quant, inter, input).map_err(|error| {
        ContainerError::Manifest { file, at: "expert_quant".to_owned(), problem: error.to_string() }
    })?;
    Ok(Some(layout))
}

fn check_bank(job: &Job, geometry: &Geometry, layer: u32, bank: &Bank) -> Result<(), Failure> {
    let place = Problem::new(&bank.file, "", "").layer(layer);
    let Some(source) = job.open(&place) else { return Ok(()) };
    let stride = geometry.record_bytes() as u64;
    let size = |what: &str, expected: u64, found: u64| {
        let message = format!("the file has {found} bytes, but {what} needs {expected}");
        job.found.problem(Problem { kind: "wrong_size", message, ..place.clone() });
    };
    let expected = u64::from(bank.experts) * stride;
    if source.bytes() != expected {
        size(&format!("{} records of {stride} bytes", bank.experts), expected, source.bytes());
    }
    if bank.bytes != expected {
        let at = format!("layers.{layer}.bytes is {}, but its records take {expected}", bank.bytes);
        job.found.problem(Problem::new(MANIFEST, "wrong_size", at).layer(layer));
    }
    // What is there of a truncated bank is still worth checking.
    let whole = u64::from(bank.experts).min(source.bytes() / stride) as usize;
    let expected = |expert: usize| Expected {
        file: Path::new(&bank.file),
        // Checked with the manifest: layers and experts end at 65535.
        layer: layer as u16,
        expert: expert as u16,
        codebook_base: bank.codebook_base,
        // Whether the codebooks are there is checked once, with their file.
        codebook_count: u32::MAX,
        geometry,
    };
    let headers = Mutex::new(vec![0; whole * HEADER_BYTES]);
    let keep = |expert: usize, header: &[u8]| {
        let mut headers = headers.lock().unwrap_or_else(PoisonError::into_inner);
        headers[expert * HEADER_BYTES..][..HEADER_BYTES].copy_from_slice(header);
    };
    let reader = if job.quick { None } else { job.reader(&source, &place)? };
    let failed = AtomicBool::new(false);
    job.crew.each(whole, job.progress, |expert, worker| {
        let place = place.clone().expert(expert as u32).offset(expert as u64 * stride);
        let report = |kind: &str, error: &ContainerError| {
            let mut problem = Problem::from_error(&bank.file, error);
            if !kind.is_empty() {
                problem.message = format!("{kind}: {}", problem.message);
            }
            let Problem { kind, message, .. } = problem;
            job.found.problem(Problem { kind, message, ..place.clone() });
        };
        let record = match &reader {
            None => header_only(job, &source, worker, &place)?,
            Some(reader) => whole_record(job, reader, geometry, worker, &place)?,
        };
        let Some(record) = record else {
            failed.store(true, Ordering::Relaxed);
            return Ok(());
        };
        keep(expert, &record[..HEADER_BYTES]);
        let expected = expected(expert);
        let header = RecordView::check_header(record, &expected);
        match &header {
            Err(error) => report("", error),
            Ok(header) if job.strict() => {
                for (field, wanted, is) in
                    [("fmt", geometry.fmt().code(), header.fmt), ("flags", 0, header.flags)]
                {
                    if wanted != is {
                        let message = format!("{field} is {is}, expected {wanted}");
                        job.found.problem(Problem { kind: "header", message, ..place.clone() });
                    }
                }
            }
            Ok(_) => {}
        }
        // None too if only the header was read.
        let Some(view) = RecordView::unchecked(record, geometry) else { return Ok(()) };
        if let Err(error) = view.verify_crc(&expected) {
            report("", &error);
        }
        if job.strict()
            && let Err(error) = view.verify_padding(&expected)
        {
            let at = record[geometry.payload_end()..].iter().position(|byte| *byte != 0).unwrap_or(0);
            let offset = expert as u64 * stride + (geometry.payload_end() + at) as u64;
            let Problem { kind, message, .. } = Problem::from_error(&bank.file, &error);
            job.found.problem(Problem { kind, message, ..place.clone() }.offset(offset));
        }
        if header.is_err() {
            // The rest would be read by a header that is not this record's.
            return Ok(());
        }
        for kind in Kind::ALL {
            if let Err(source) = geometry.layout(kind).check_indices(view.indices(kind)) {
                report(kind.name(), &ContainerError::Quant { what: String::new(), source });
            }
            if let Some(row) = finite::first_f16(view.scale_bytes(kind)) {
                let offset = expert as u64 * stride + (geometry.scales(kind).start + 2 * row) as u64;
                let message = format!("{}: the scale of row {row} is not finite", kind.name());
                job.found.problem(Problem { kind: "not_finite", message, ..place.clone() }.offset(offset));
            }
        }
        Ok(())
    })?;
    let sum = job.manifest.integrity.as_ref().and_then(|sums| sums.banks.get(&layer));
    match sum {
        None if job.strict() => job.found.unprotected(format!("{}: record headers", bank.file)),
        None => job.found.unprotected(format!("{}: record headers and padding", bank.file)),
        // With records missing or unreadable the sum says nothing new.
        Some(_) if whole as u64 != u64::from(bank.experts) || failed.into_inner() => {}
        Some(sum) => {
            let headers = headers.into_inner().unwrap_or_else(PoisonError::into_inner);
            let found = crc32fast::hash(&headers);
            if found != sum.crc32_headers {
                let message = format!(
                    "checksum of all record headers is {found}, expected {}: a header has changed since it was \
                     written",
                    sum.crc32_headers
                );
                job.found.problem(Problem { kind: "checksum", message, ..place.clone() });
            }
        }
    }
    Ok(())
}

fn header_only<'w>(
    job: &Job,
    source: &Source,
    worker: &'w mut Worker,
    place: &Problem,
) -> Result<Option<&'w [u8]>, Failure> {
    let header = worker.small(HEADER_BYTES)?;
    match source.read_at(place.offset.unwrap_or(0), header) {
        Ok(()) => Ok(Some(header)),
        Err(error) => {
            let Problem { kind, message, .. } = Problem::from_error(&place.file, &error);
            job.found.problem(Problem { kind, message, ..place.clone() });
            Ok(None)
        }
    }
}

fn whole_record<'w>(
    job: &Job,
    reader: &ReadFile,
    geometry: &Geometry,
    worker: &'w mut Worker,
    place: &Problem,
) -> Result<Option<&'w [u8]>, Failure> {
    let read = worker.read(reader, place.offset.unwrap_or(0), geometry.record_bytes());
    job.settle(read, place)
}
