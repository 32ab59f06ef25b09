//! Giving checksums to a container that has none, such as one of another converter.

use std::sync::{Mutex, PoisonError};

use waste_common::cli::Failure;
use waste_common::container::{
    BankFile, CODEBOOKS, CodebookFile, Geometry, MANIFEST, MANIFEST_SHA256, Manifest, Source, TRUNK,
    integrity,
};
use waste_common::error::Exit;
use waste_common::files::write_atomic;
use waste_common::json;

use crate::job::Job;
use crate::sidecars::{Listing, SIDECARS, check_manifest_sum};

/// A manifest with checksums, ready to be written once all else has been found sound.
pub(crate) struct Sealed {
    pub manifest: Manifest,
    content: Vec<u8>,
}

/// Computes the checksums; None where files are not what the manifest says, which the checks that follow tell.
pub(crate) fn prepare(
    job: &Job,
    manifest: &[u8],
    geometry: Option<&Geometry>,
    listing: &Listing,
) -> Result<Option<Sealed>, Failure> {
    let sealed = match Sealed::new(job, geometry, listing) {
        Ok(sealed) => Some(sealed),
        Err(failure) if failure.exit == Exit::Data => None,
        Err(failure) => return Err(failure),
    };
    // An earlier sealing may have been killed between its two files.
    let begun = |sealed: &Sealed| {
        integrity::check_manifest_sidecar(job.dir, &sealed.content).is_ok_and(|checked| checked)
    };
    let there = job.dir.join(MANIFEST_SHA256).symlink_metadata().is_ok();
    if there && !sealed.as_ref().is_some_and(begun) {
        check_manifest_sum(job.dir, manifest, job.found);
    }
    Ok(sealed)
}

impl Sealed {
    /// Computes the checksums of what is on the disk.
    fn new(job: &Job, geometry: Option<&Geometry>, listing: &Listing) -> Result<Sealed, Failure> {
        let dir = job.dir;
        let mut manifest = job.manifest.clone();
        let mut sums = integrity::empty();
        if let Some(geometry) = geometry {
            let books = Source::open(dir, CODEBOOKS)?;
            sums.codebooks = Some(integrity::codebooks_sum(&books)?);
            let count = CodebookFile::new(books, manifest.expert_quant.entries)?.count();
            for (layer, bank) in &manifest.layers {
                let bank = BankFile::open(dir, *layer as u16, bank, count, geometry)?;
                sums.banks.insert(*layer, integrity::bank_sum(&bank)?);
            }
        }
        for name in SIDECARS.into_iter().filter(|name| listing.contains_key(*name)) {
            sums.files.insert(name.to_owned(), integrity::file_sum(&Source::open(dir, name)?)?);
        }
        let trunk = Source::open(dir, TRUNK)?;
        let found = Mutex::new(vec![None; manifest.trunk.len()]);
        job.crew.each(manifest.trunk.len(), job.progress, |at, worker| {
            worker.check()?;
            let entry = &job.manifest.trunk[at];
            let crc = integrity::crc32_of(&trunk, entry.off, entry.bytes)?;
            found.lock().unwrap_or_else(PoisonError::into_inner)[at] = Some(crc);
            Ok(())
        })?;
        let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
        for (entry, crc) in manifest.trunk.iter_mut().zip(found) {
            entry.crc32 = crc;
        }
        manifest.integrity = Some(sums);
        let content = manifest.to_bytes().map_err(|error| Failure::internal(error.to_string()))?;
        if content.len() as u64 > json::MANIFEST_BYTES_MAX {
            return Err(Failure::data("json_too_large", "the manifest would exceed 64 MiB with checksums"));
        }
        Ok(Sealed { manifest, content })
    }

    /// Writes the manifest, and says its SHA-256. Readers of version 0 see what they saw. Killed in between, the next
    /// run writes the same.
    pub fn write(&self, job: &Job) -> Result<String, Failure> {
        let sidecar = integrity::manifest_sidecar(&self.content);
        write_atomic(&job.dir.join(MANIFEST_SHA256), sidecar.as_bytes())?;
        write_atomic(&job.dir.join(MANIFEST), &self.content)?;
        Ok(integrity::sha256_hex(&self.content))
    }
}
