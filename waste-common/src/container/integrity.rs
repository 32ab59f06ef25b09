//! Checksums of what v0 leaves unprotected: computed when a container is written, compared when it is verified.
//! All of it streams through buffers of at most 1 MiB.

use std::path::Path;

use sha2::{Digest, Sha256};

use super::ContainerError;
use super::bank::BankFile;
use super::codebook::CodebookFile;
use super::manifest::{BankSum, CodebooksSum, FileSum, Integrity, MANIFEST, MANIFEST_SHA256, TrunkEntry};
use super::pread::Source;
use super::trunk::Trunk;
use crate::files::FileError;

/// CRC-32 of a range of a file.
pub fn crc32_of(source: &Source, offset: u64, bytes: u64) -> Result<u32, ContainerError> {
    let mut crc = crc32fast::Hasher::new();
    source.stream(offset, bytes, |piece| crc.update(piece))?;
    Ok(crc.finalize())
}

/// Lower-case hex SHA-256.
pub fn sha256_hex(content: &[u8]) -> String {
    hex(&Sha256::digest(content))
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Size and SHA-256 of a file.
pub fn file_sum(source: &Source) -> Result<FileSum, ContainerError> {
    let mut sha = Sha256::new();
    source.stream(0, source.bytes(), |piece| sha.update(piece))?;
    Ok(FileSum { bytes: source.bytes(), sha256: hex(&sha.finalize()) })
}

/// Size and CRC-32 of a whole file.
pub fn codebooks_sum(source: &Source) -> Result<CodebooksSum, ContainerError> {
    Ok(CodebooksSum { bytes: source.bytes(), crc32: crc32_of(source, 0, source.bytes())? })
}

/// Size of a bank and CRC-32 of its record headers.
pub fn bank_sum(bank: &BankFile) -> Result<BankSum, ContainerError> {
    let mut crc = crc32fast::Hasher::new();
    for expert in 0..bank.experts() {
        // At most 65536 experts, so ids fit.
        crc.update(&bank.read_header(expert as u16)?);
    }
    Ok(BankSum { bytes: bank.source().bytes(), crc32_headers: crc.finalize() })
}

/// An integrity section without sums.
pub fn empty() -> Integrity {
    Integrity {
        algorithm: "crc32".into(),
        codebooks: None,
        banks: Default::default(),
        files: Default::default(),
        extra: Default::default(),
    }
}

/// Compares a tensor with its checksum; `Ok(false)` if it has none.
pub fn check_trunk_entry(trunk: &Trunk, entry: &TrunkEntry) -> Result<bool, ContainerError> {
    let Some(expected) = entry.crc32 else { return Ok(false) };
    let found = crc32_of(trunk.source(), entry.off, entry.bytes)?;
    let what = || format!("tensor {}", entry.name);
    compare(trunk.source().path(), what, Some(entry.off), &expected, &found)
}

/// Compares `codebooks.bin` with its checksum; `Ok(false)` if it has none.
pub fn check_codebooks(books: &CodebookFile, sums: Option<&Integrity>) -> Result<bool, ContainerError> {
    let Some(expected) = sums.and_then(|sums| sums.codebooks.as_ref()) else { return Ok(false) };
    let source = books.source();
    check_size(source, expected.bytes)?;
    let found = crc32_of(source, 0, source.bytes())?;
    compare(source.path(), || "the file".into(), None, &expected.crc32, &found)
}

/// Compares a bank's headers with their checksum; `Ok(false)` if there is none.
pub fn check_bank(bank: &BankFile, layer: u32, sums: Option<&Integrity>) -> Result<bool, ContainerError> {
    let Some(expected) = sums.and_then(|sums| sums.banks.get(&layer)) else { return Ok(false) };
    let found = bank_sum(bank)?;
    let what = || format!("record headers of layer {layer}");
    compare(bank.source().path(), what, None, &expected.crc32_headers, &found.crc32_headers)
}

/// Compares a small file with its checksum.
pub fn check_file(dir: &Path, name: &str, expected: &FileSum) -> Result<(), ContainerError> {
    let source = Source::open(dir, name)?;
    check_size(&source, expected.bytes)?;
    let found = file_sum(&source)?;
    compare(source.path(), || "the file".into(), None, &expected.sha256, &found.sha256).map(drop)
}

fn check_size(source: &Source, expected: u64) -> Result<(), ContainerError> {
    if source.bytes() != expected {
        return Err(ContainerError::Size {
            file: source.path().to_owned(),
            what: "its checksum entry in the manifest".into(),
            expected,
            found: source.bytes(),
        });
    }
    Ok(())
}

fn compare<T: PartialEq + ToString>(
    file: &Path,
    what: impl Fn() -> String,
    offset: Option<u64>,
    expected: &T,
    found: &T,
) -> Result<bool, ContainerError> {
    if expected != found {
        return Err(ContainerError::Checksum {
            file: file.to_owned(),
            what: what(),
            offset,
            expected: expected.to_string(),
            found: found.to_string(),
        });
    }
    Ok(true)
}

/// The content of `manifest.sha256`: one line of `sha256sum`.
pub fn manifest_sidecar(manifest: &[u8]) -> String {
    format!("{}  {MANIFEST}\n", sha256_hex(manifest))
}

/// Compares the manifest with `manifest.sha256`, which holds exactly one line as `sha256sum` writes it (lower-case
/// hex, two spaces, the name, a newline); `Ok(false)` if there is no such file.
pub fn check_manifest_sidecar(dir: &Path, manifest: &[u8]) -> Result<bool, ContainerError> {
    let path = dir.join(MANIFEST_SHA256);
    match std::fs::symlink_metadata(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        other => other.map_err(FileError::io("read", &path))?,
    };
    let source = Source::open(dir, MANIFEST_SHA256)?;
    let mut line = vec![0; source.bytes().min(1024) as usize];
    source.read_at(0, &mut line)?;
    let hex = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let sum = match line.split_at_checked(64) {
        Some((sum, rest)) if sum.iter().all(hex) && rest == format!("  {MANIFEST}\n").as_bytes() => sum,
        _ => {
            return Err(ContainerError::unusable(
                &path,
                format!("exactly the line `sha256sum {MANIFEST}` writes is expected"),
            ));
        }
    };
    compare(
        &dir.join(MANIFEST),
        || format!("against {MANIFEST_SHA256} (after an interrupted conversion, run it again)"),
        None,
        &String::from_utf8_lossy(sum).into_owned(),
        &sha256_hex(manifest),
    )
}
