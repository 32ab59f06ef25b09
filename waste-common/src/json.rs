//! Reading JSON files that may come from anyone: bounded in size and in depth.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Coded, Exit};

/// Largest manifest or configuration file that is read.
pub const MANIFEST_BYTES_MAX: u64 = 64 << 20;
/// Largest safetensors index that is read (K3's is about 55 MB).
pub const INDEX_BYTES_MAX: u64 = 256 << 20;

/// Why a JSON file could not be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum JsonError {
    #[error("cannot read {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{} is not a regular file", path.display())]
    NotAFile { path: PathBuf },
    #[error("{} has {bytes} bytes; at most {max} are accepted", path.display())]
    TooLarge { path: PathBuf, bytes: u64, max: u64 },
    #[error("{} is not valid JSON (nested at most 128 deep): {source}", path.display())]
    Syntax { path: PathBuf, source: serde_json::Error },
}

impl Coded for JsonError {
    fn exit(&self) -> Exit {
        Exit::Data
    }

    fn code(&self) -> &'static str {
        match self {
            JsonError::Io { .. } => "unreadable_file",
            JsonError::NotAFile { .. } => "not_a_file",
            JsonError::TooLarge { .. } => "json_too_large",
            JsonError::Syntax { .. } => "invalid_json",
        }
    }
}

/// Reads a whole regular file of at most `max` bytes.
pub fn read_bounded(path: &Path, max: u64) -> Result<Vec<u8>, JsonError> {
    let io = |source| JsonError::Io { path: path.to_owned(), source };
    // Before opening: a named pipe would block.
    if !std::fs::metadata(path).map_err(io)?.is_file() {
        return Err(JsonError::NotAFile { path: path.to_owned() });
    }
    let file = File::open(path).map_err(io)?;
    let bytes = file.metadata().map_err(io)?.len();
    if bytes > max {
        return Err(JsonError::TooLarge { path: path.to_owned(), bytes, max });
    }
    let mut content = Vec::new();
    // The length is only a promise (growing files): count what is really read.
    file.take(max + 1).read_to_end(&mut content).map_err(io)?;
    if content.len() as u64 > max {
        return Err(JsonError::TooLarge { path: path.to_owned(), bytes: content.len() as u64, max });
    }
    Ok(content)
}

/// Parses a JSON document; nesting beyond serde_json's limit of 128 is refused.
pub fn parse(path: &Path, content: &[u8]) -> Result<Value, JsonError> {
    serde_json::from_slice(content).map_err(|source| JsonError::Syntax { path: path.to_owned(), source })
}

/// Reads and parses a JSON file of at most `max` bytes.
pub fn read(path: &Path, max: u64) -> Result<Value, JsonError> {
    parse(path, &read_bounded(path, max)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(content: &[u8]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        file
    }

    #[test]
    fn deep_nesting_is_an_error_not_a_stack_overflow() {
        let deep = [b'['].repeat(100_000);
        assert!(matches!(read(file(&deep).path(), 1 << 20), Err(JsonError::Syntax { .. })));
    }

    #[test]
    fn a_directory_is_no_file() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(read(dir.path(), 1 << 20), Err(JsonError::NotAFile { .. })));
    }

    /// Opening one for reading waits for a writer, for ever.
    #[cfg(unix)]
    #[test]
    fn a_named_pipe_is_refused_and_does_not_hang() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("config.json");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let link = dir.path().join("link.json");
        std::os::unix::fs::symlink(&pipe, &link).unwrap();
        for path in [pipe, link] {
            assert!(matches!(read(&path, 1 << 20), Err(JsonError::NotAFile { .. })));
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_link_to_a_file_is_followed() {
        let (dir, target) = (tempfile::tempdir().unwrap(), file(b"{}"));
        let link = dir.path().join("config.json");
        std::os::unix::fs::symlink(target.path(), &link).unwrap();
        assert!(read(&link, 1 << 20).unwrap().is_object());
    }

    #[test]
    fn a_large_file_is_refused_before_it_is_read() {
        let sparse = tempfile::NamedTempFile::new().unwrap();
        sparse.as_file().set_len(1 << 30).unwrap();
        assert!(matches!(
            read(sparse.path(), MANIFEST_BYTES_MAX),
            Err(JsonError::TooLarge { bytes: 0x4000_0000, .. })
        ));
    }
}
