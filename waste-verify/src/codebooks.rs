//! `codebooks.bin`: the checksum of the whole, every header, every value, and the slots that no layer names.

use waste_common::cli::Failure;
use waste_common::container::{CODEBOOKS, CodebookFile, codebook_bytes, integrity};

use crate::finite;
use crate::job::Job;
use crate::report::Problem;

const HEADER_BYTES: usize = 16;

/// Checks the codebooks.
pub(crate) fn check(job: &Job) -> Result<(), Failure> {
    let place = Problem::new(CODEBOOKS, "", "");
    let sums = job.manifest.integrity.as_ref();
    if sums.is_none_or(|sums| sums.codebooks.is_none()) {
        job.found.unprotected(CODEBOOKS);
    }
    let Some(source) = job.open(&place) else { return Ok(()) };
    let entries = job.manifest.expert_quant.entries;
    let record = codebook_bytes(entries);
    let owned = job.manifest.expert_quant.codebooks_per_layer();
    // Which layer a codebook belongs to.
    let mut owners = vec![None; (source.bytes() / record).min(1 << 16) as usize];
    for (layer, bank) in &job.manifest.layers {
        let base = u32::from(bank.codebook_base);
        for id in base..base + owned {
            if let Some(owner) = owners.get_mut(id as usize) {
                *owner = Some(*layer);
            }
        }
        if u64::from(base + owned) * record > source.bytes() {
            let message = format!(
                "the file has {} bytes, but codebook {} ends at {}",
                source.bytes(),
                base + owned - 1,
                u64::from(base + owned) * record
            );
            job.found.problem(Problem::new(CODEBOOKS, "wrong_size", message).layer(*layer));
        }
    }
    let books = match CodebookFile::new(source, entries) {
        Ok(books) => books,
        Err(error) => {
            job.found.error(CODEBOOKS, &error);
            return Ok(());
        }
    };
    if !job.quick
        && let Err(error) = integrity::check_codebooks(&books, sums)
    {
        job.found.error(CODEBOOKS, &error);
    }
    job.crew.each(owners.len(), job.progress, |id, worker| {
        let offset = id as u64 * record;
        let bytes = match books.read(id as u32) {
            Ok(bytes) => bytes,
            Err(error) => {
                job.found.problem(Problem::from_error(CODEBOOKS, &error).offset(offset));
                return Ok(());
            }
        };
        let checked = match owners[id] {
            Some(_) => books.check(id as u32, &bytes),
            None => books.check_unnamed(id as u32, &bytes, job.strict()),
        };
        let of_layer = |problem: Problem| Problem { layer: owners[id], ..problem };
        if let Err(error) = checked {
            job.found.problem(of_layer(Problem::from_error(CODEBOOKS, &error)).offset(offset));
        } else if let Some(at) = finite::first_f16(&bytes[HEADER_BYTES..]) {
            let message = format!("codebook {id}: value {at} is not finite");
            let problem = Problem::new(CODEBOOKS, "not_finite", message);
            job.found.problem(of_layer(problem).offset(offset + (HEADER_BYTES + 2 * at) as u64));
        }
        worker.advance(record);
        Ok(())
    })
}
