//! Expert banks: every record's header, payload checksum, padding, indices and scales.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use waste_common::cli::Failure;
use waste_common::container::record::{HEADER_BYTES, Header};
use waste_common::container::{
    Bank, ContainerError, Expected, Geometry, Kind, MANIFEST, Manifest, RecordView, Source,
};
use waste_common::error::Coded;

use crate::crew::Worker;
use crate::finite;
use crate::job::Job;
use crate::report::Problem;

/// Checks all banks.
pub(crate) fn check(job: &Job, geometry: &Geometry) -> Result<(), Failure> {
    for (layer, bank) in &job.manifest.layers {
        Check { job, geometry, layer: *layer, bank }.all()?;
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

/// The check of one bank.
struct Check<'a> {
    job: &'a Job<'a>,
    geometry: &'a Geometry,
    layer: u32,
    bank: &'a Bank,
}

impl Check<'_> {
    fn all(&self) -> Result<(), Failure> {
        let (job, experts) = (self.job, self.bank.experts as usize);
        let place = self.place();
        let sums = job.manifest.integrity.as_ref();
        let sum = sums.and_then(|sums| sums.banks.get(&self.layer));
        if sum.is_none() {
            let padding = if job.strict() { "" } else { " and padding" };
            job.found.unprotected(format!("{}: record headers{padding}", self.bank.file));
        }
        let Some(source) = job.open(&place) else { return Ok(()) };
        self.sizes(source.bytes());
        if job.known_sound(&source, &self.bank.file) {
            return Ok(());
        }
        // What is there of a truncated bank is still worth checking.
        let whole = experts.min((source.bytes() / self.stride()) as usize);
        let reader = if job.quick { None } else { job.reader(&source, &place)? };
        let kept = looked_at(self.geometry);
        let headers = Mutex::new(vec![0; whole * HEADER_BYTES]);
        let read = AtomicUsize::new(0);
        job.crew.each(whole, job.progress, |expert, worker| {
            // Layers and experts end at 65535: the manifest was checked for it.
            let expert = expert as u16;
            let place = self.record_place(expert);
            let (mut crc, mut payload) =
                (crc32fast::Hasher::new(), HEADER_BYTES..self.geometry.payload_end());
            let record = match &reader {
                None if job.quick => header_only(job, &source, worker, &place)?,
                None => None,
                Some(reader) => {
                    let (offset, bytes) = (self.offset(expert), self.geometry.record_bytes());
                    let read = worker.read(reader, offset, bytes, &kept, |piece| {
                        crc.update(&piece[payload.start.min(piece.len())..payload.end.min(piece.len())]);
                        payload = payload.start.saturating_sub(piece.len())
                            ..payload.end.saturating_sub(piece.len());
                    });
                    job.settle(read, &place)?
                }
            };
            let Some(record) = record else { return Ok(()) };
            read.fetch_add(1, Ordering::Relaxed);
            let mut headers = headers.lock().unwrap_or_else(PoisonError::into_inner);
            let header = &mut headers[usize::from(expert) * HEADER_BYTES..][..HEADER_BYTES];
            header.copy_from_slice(&record[..HEADER_BYTES]);
            drop(headers);
            self.record(expert, record, crc.finalize());
            Ok(())
        })?;
        // With records missing or unreadable the sum of all headers would say nothing new.
        if let Some(sum) = sum.filter(|_| read.into_inner() == experts) {
            let found = crc32fast::hash(&headers.into_inner().unwrap_or_else(PoisonError::into_inner));
            if found != sum.crc32_headers {
                let message = format!(
                    "checksum of all record headers is {found}, expected {}: a header has changed since it was written",
                    sum.crc32_headers
                );
                job.found.problem(Problem { kind: "checksum", message, ..place });
            }
        }
        job.looked_at(&self.bank.file)
    }

    fn place(&self) -> Problem {
        Problem::new(&self.bank.file, "", "").layer(self.layer)
    }

    fn record_place(&self, expert: u16) -> Problem {
        self.place().expert(expert.into()).offset(self.offset(expert))
    }

    fn stride(&self) -> u64 {
        self.geometry.record_bytes() as u64
    }

    fn offset(&self, expert: u16) -> u64 {
        u64::from(expert) * self.stride()
    }

    fn sizes(&self, found: u64) {
        let expected = u64::from(self.bank.experts) * self.stride();
        if found != expected {
            let message = format!(
                "the file has {found} bytes, but {} records of {} bytes need {expected}",
                self.bank.experts,
                self.stride()
            );
            self.job.found.problem(Problem { kind: "wrong_size", message, ..self.place() });
        }
        if self.bank.bytes != expected {
            let message = format!(
                "layers.{}.bytes is {}, but its records take {expected}",
                self.layer, self.bank.bytes
            );
            self.job.found.problem(Problem::new(MANIFEST, "wrong_size", message).layer(self.layer));
        }
    }

    /// Checks a record, whose payload has this checksum, or only its header if that is all `bytes` holds.
    fn record(&self, expert: u16, bytes: &[u8], crc: u32) {
        let expected = Expected {
            file: Path::new(&self.bank.file),
            layer: self.layer as u16,
            expert,
            codebook_base: self.bank.codebook_base,
            // Whether the codebooks are there is checked once, with their file.
            codebook_count: u32::MAX,
            geometry: self.geometry,
        };
        let header = RecordView::check_header(bytes, &expected);
        match &header {
            Err(error) => self.report(expert, None, error),
            Ok(header) if self.job.strict() => self.fixed_fields(expert, header),
            Ok(_) => {}
        }
        let Some(view) = RecordView::unchecked(bytes, self.geometry) else { return };
        if let Err(error) = view.compare_crc(&expected, crc) {
            self.report(expert, None, &error);
        }
        let padding = self.geometry.payload_end();
        if self.job.strict()
            && let Err(error) = view.verify_padding(&expected)
        {
            let at = bytes[padding..].iter().position(|byte| *byte != 0).unwrap_or(0);
            self.report(expert, Some(padding + at), &error);
        }
        // Else the payload is not what its place says.
        if header.is_ok() {
            self.payload(expert, &view);
        }
    }

    /// What v0 readers do not look at, but our writer always fills the same way.
    fn fixed_fields(&self, expert: u16, header: &Header) {
        for (field, expected, found) in
            [("fmt", self.geometry.fmt().code(), header.fmt), ("flags", 0, header.flags)]
        {
            if expected != found {
                let message = format!("{field} is {found}, expected {expected}");
                self.job.found.problem(Problem { kind: "header", message, ..self.record_place(expert) });
            }
        }
    }

    fn payload(&self, expert: u16, view: &RecordView) {
        for kind in Kind::ALL {
            let place = self.record_place(expert);
            if let Err(error) = self.geometry.layout(kind).check_indices(view.indices(kind)) {
                let message = format!("{}: {error}", kind.name());
                self.job.found.problem(Problem { kind: error.code(), message, ..place.clone() });
            }
            if let Some(row) = finite::first_f16(view.scale_bytes(kind)) {
                let offset = self.offset(expert) + (self.geometry.scales(kind).start + 2 * row) as u64;
                let message = format!("{}: the scale of row {row} is not finite", kind.name());
                self.job.found.problem(Problem { kind: "not_finite", message, ..place }.offset(offset));
            }
        }
    }

    /// Reports what the record module found, at byte `at` of the record.
    fn report(&self, expert: u16, at: Option<usize>, error: &ContainerError) {
        let Problem { kind, message, .. } = Problem::from_error(&self.bank.file, error);
        let place = self.record_place(expert).offset(self.offset(expert) + at.unwrap_or(0) as u64);
        self.job.found.problem(Problem { kind, message, ..place });
    }
}

/// The parts of a record that are looked at, not only summed up: header, doubtful indices, scales and padding.
fn looked_at(geometry: &Geometry) -> Vec<Range<usize>> {
    let doubtful = |kind| {
        let (start, doubtful) = (geometry.indices(kind).start, geometry.layout(kind).doubtful());
        start + doubtful.start..start + doubtful.end
    };
    let ends = [0..HEADER_BYTES, geometry.scales_offset()..geometry.record_bytes()];
    ends.into_iter().chain(Kind::ALL.into_iter().map(doubtful)).collect()
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
