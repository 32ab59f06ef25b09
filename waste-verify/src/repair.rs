//! Copying what is bad from another copy of the container, and nothing else.
//!
//! Records and tensors are written in their place: what is killed in between is as bad as before, and found again.
//! Other files are replaced whole. What comes from the other copy is checked before it is written.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use serde::Serialize;
use waste_common::cli::{Failure, Interrupt};
use waste_common::container::{
    Bank, CODEBOOKS, Expected, Geometry, MANIFEST, MANIFEST_SHA256, Manifest, RecordView, Source, TRUNK,
    integrity,
};
use waste_common::files::{AtomicFile, FileError, write_atomic};
use waste_common::io::AlignedBuf;
use waste_common::json;

use crate::report::Problem;

/// What was copied into one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Repaired {
    /// The file's name in the container.
    pub file: String,
    /// Records or tensors; none if the whole file was copied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parts: Option<u64>,
    /// Bytes that were copied.
    pub bytes: u64,
}

/// A container and its other copy.
pub(crate) struct Repair<'a> {
    pub dir: &'a Path,
    pub other: &'a Path,
    pub manifest: &'a Manifest,
    pub geometry: Option<&'a Geometry>,
    pub interrupt: &'a Interrupt,
}

/// Makes sure that `other` is a copy of `dir`; a damaged manifest is restored from it.
///
/// # Errors
/// It is none, or cannot be read.
pub(crate) fn manifest(dir: &Path, other: &Path) -> Result<Option<Repaired>, Failure> {
    let read = |dir: &Path| -> Result<Vec<u8>, Failure> {
        let source = Source::open(dir, MANIFEST)?;
        Ok(json::read_bounded(source.path(), json::MANIFEST_BYTES_MAX)?)
    };
    let theirs = read(other)?;
    if read(dir).is_ok_and(|ours| ours == theirs) {
        return Ok(None);
    }
    // Ours may be damaged: then its own checksum names the other one.
    if integrity::check_manifest_sidecar(dir, &theirs).is_ok_and(|checked| checked) {
        write_atomic(&dir.join(MANIFEST), &theirs)?;
        return Ok(Some(Repaired { file: MANIFEST.to_owned(), parts: None, bytes: theirs.len() as u64 }));
    }
    let message = format!(
        "{} is no copy of {}: their manifests differ; nothing was changed",
        other.display(),
        dir.display()
    );
    Err(Failure::data("other_container", message).with("file", other.display().to_string()))
}

impl Repair<'_> {
    /// Copies what these problems name.
    pub fn all(&self, problems: &[Problem]) -> Result<Vec<Repaired>, Failure> {
        let mut files: BTreeMap<&str, Vec<&Problem>> = BTreeMap::new();
        for problem in problems {
            files.entry(&problem.file).or_default().push(problem);
        }
        let mut repaired = Vec::new();
        for (file, problems) in files {
            self.interrupt.check()?;
            let bank = self.manifest.layers.iter().find(|(_, bank)| bank.file == file);
            let there = Source::open(self.dir, file).is_ok();
            repaired.extend(match bank {
                Some((layer, bank)) if there => self.bank(*layer, bank, &problems)?,
                _ if file == TRUNK && there && problems.iter().all(|problem| problem.tensor.is_some()) => {
                    self.tensors(&problems)?
                }
                _ if file != MANIFEST => self.whole(file)?,
                _ => None,
            });
        }
        Ok(repaired)
    }

    /// Copies the bad records of a bank, and those that a wrong size or a changed header hides.
    fn bank(&self, layer: u32, bank: &Bank, problems: &[&Problem]) -> Result<Option<Repaired>, Failure> {
        let Some(geometry) = self.geometry else { return Ok(None) };
        let (ours, theirs) = (Source::open(self.dir, &bank.file)?, Source::open(self.other, &bank.file)?);
        let stride = geometry.record_bytes() as u64;
        let mut bad: BTreeSet<u32> = problems.iter().filter_map(|problem| problem.expert).collect();
        let headers = problems.iter().any(|problem| problem.expert.is_none() && problem.kind == "checksum");
        bad.extend((0..bank.experts).filter(|expert| (u64::from(*expert) + 1) * stride > ours.bytes()));
        let mut buffer = AlignedBuf::zeroed(geometry.record_bytes())?;
        let record = buffer.bytes_mut();
        let mut copied = 0;
        let mut file = open(ours.path())?;
        for expert in 0..bank.experts {
            self.interrupt.check()?;
            let offset = u64::from(expert) * stride;
            let mut header = [[0; waste_common::container::record::HEADER_BYTES]; 2];
            let wanted = bad.contains(&expert)
                || headers && {
                    let [mine, other] = &mut header;
                    ours.read_at(offset, mine)?;
                    // Where the other copy ends there is nothing to take.
                    theirs.read_at(offset, other).is_ok() && mine != other
                };
            if !wanted || theirs.read_at(offset, record).is_err() {
                continue;
            }
            let expected = Expected {
                file: theirs.path(),
                layer: layer as u16,
                expert: expert as u16,
                codebook_base: bank.codebook_base,
                codebook_count: u32::MAX,
                geometry,
            };
            let sound = RecordView::check(record, &expected).and_then(|view| {
                view.verify_crc(&expected)?;
                // Without our checksums padding may hold anything.
                if self.manifest.integrity.is_some() { view.verify_padding(&expected) } else { Ok(()) }
            });
            if sound.is_ok() {
                write_at(&mut file, ours.path(), offset, record)?;
                copied += 1;
            }
        }
        let bytes = u64::from(bank.experts) * stride;
        if ours.bytes() > bytes {
            file.set_len(bytes).map_err(FileError::io("write", ours.path()))?;
        }
        file.sync_all().map_err(FileError::io("write", ours.path()))?;
        let changed = copied > 0 || ours.bytes() > bytes;
        Ok(changed.then(|| Repaired { file: bank.file.clone(), parts: Some(copied), bytes: copied * stride }))
    }

    /// Copies the bad tensors of the trunk.
    fn tensors(&self, problems: &[&Problem]) -> Result<Option<Repaired>, Failure> {
        let names: BTreeSet<&str> = problems.iter().filter_map(|problem| problem.tensor.as_deref()).collect();
        let (ours, theirs) = (Source::open(self.dir, TRUNK)?, Source::open(self.other, TRUNK)?);
        let mut file = open(ours.path())?;
        let (mut parts, mut bytes) = (0, 0);
        for entry in self.manifest.trunk.iter().filter(|entry| names.contains(&*entry.name)) {
            let found = integrity::crc32_of(&theirs, entry.off, entry.bytes);
            if found.is_err() || entry.crc32.is_some_and(|expected| found.ok() != Some(expected)) {
                continue;
            }
            let mut offset = entry.off;
            let mut written = Ok(());
            theirs.stream(entry.off, entry.bytes, |piece| {
                if written.is_ok() {
                    written = write_at(&mut file, ours.path(), offset, piece);
                    offset += piece.len() as u64;
                }
            })?;
            written?;
            parts += 1;
            bytes += entry.bytes;
        }
        file.sync_all().map_err(FileError::io("write", ours.path()))?;
        Ok((parts > 0).then(|| Repaired { file: TRUNK.to_owned(), parts: Some(parts), bytes }))
    }

    /// Copies a whole file, if the manifest's checksum of it is right there.
    fn whole(&self, name: &str) -> Result<Option<Repaired>, Failure> {
        let Ok(theirs) = Source::open(self.other, name) else { return Ok(None) };
        let sums = self.manifest.integrity.as_ref();
        let sound = match name {
            CODEBOOKS => match sums.and_then(|sums| sums.codebooks.as_ref()) {
                Some(expected) => integrity::codebooks_sum(&theirs)? == *expected,
                None => true,
            },
            MANIFEST_SHA256 => true,
            _ => match sums.and_then(|sums| sums.files.get(name)) {
                Some(expected) => integrity::file_sum(&theirs)? == *expected,
                // Banks and the trunk are looked at again, record by record, after.
                None => true,
            },
        };
        if !sound {
            return Ok(None);
        }
        let path = self.dir.join(name);
        // A broken link, or worse, is not written through.
        if fs::symlink_metadata(&path).is_ok_and(|meta| !meta.is_file()) {
            return Err(FileError::NotAFile { path }.into());
        }
        let mut copy = AtomicFile::create(&path)?;
        let mut written = Ok(());
        theirs.stream(0, theirs.bytes(), |piece| {
            if written.is_ok() {
                written = self.interrupt.check().and_then(|()| Ok(copy.append(piece)?));
            }
        })?;
        written?;
        copy.commit()?;
        Ok(Some(Repaired { file: name.to_owned(), parts: None, bytes: theirs.bytes() }))
    }
}

fn open(path: &Path) -> Result<File, Failure> {
    Ok(OpenOptions::new().write(true).open(path).map_err(FileError::io("open", path))?)
}

fn write_at(file: &mut File, path: &Path, offset: u64, bytes: &[u8]) -> Result<(), Failure> {
    let written = file.seek(SeekFrom::Start(offset)).and_then(|_| file.write_all(bytes));
    Ok(written.map_err(FileError::io("write", path))?)
}
