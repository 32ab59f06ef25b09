//! Files of a container, opened with care, and read at 64-bit positions.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::ContainerError;
use crate::files::FileError;

/// A regular file of a container, and its size when it was opened.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl Source {
    /// Opens `name` in `dir`. Refuses names that are no plain file name, anything but a regular file, and a link that
    /// leads out of the directory.
    pub fn open(dir: &Path, name: &str) -> Result<Self, ContainerError> {
        let path = dir.join(name);
        if let Err(problem) = check_file_name(name) {
            return Err(ContainerError::unusable(dir, format!("the file name {name:?} {problem}")));
        }
        let link = fs::symlink_metadata(&path).map_err(FileError::io("open", &path))?;
        if link.is_symlink() {
            let real = fs::canonicalize(&path).map_err(FileError::io("open", &path))?;
            let home = fs::canonicalize(dir).map_err(FileError::io("open", dir))?;
            if !real.starts_with(&home) {
                return Err(ContainerError::unusable(
                    &path,
                    "a link that leaves the container; put the file itself there",
                ));
            }
        }
        // Before opening: a named pipe would block.
        if !fs::metadata(&path).map_err(FileError::io("open", &path))?.is_file() {
            return Err(ContainerError::unusable(&path, "not a regular file"));
        }
        let file = File::open(&path).map_err(FileError::io("open", &path))?;
        let bytes = file.metadata().map_err(FileError::io("open", &path))?.len();
        Ok(Source { path, file, bytes })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its size when it was opened.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Fills `out` from `offset`.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), ContainerError> {
        let end = offset.checked_add(out.len() as u64);
        if end.is_none_or(|end| end > self.bytes) {
            return Err(ContainerError::Size {
                file: self.path.clone(),
                what: format!("a read of {} bytes at {offset}", out.len()),
                expected: end.unwrap_or(u64::MAX),
                found: self.bytes,
            });
        }
        read_exact_at(&self.file, out, offset).map_err(FileError::io("read", &self.path))?;
        Ok(())
    }

    /// Reads `[offset, offset + len)` in pieces of at most 1 MiB.
    pub fn stream(
        &self,
        mut offset: u64,
        len: u64,
        mut piece: impl FnMut(&[u8]),
    ) -> Result<(), ContainerError> {
        let mut buffer = vec![0; len.min(1 << 20) as usize];
        let mut left = len;
        while left > 0 {
            let part = &mut buffer[..left.min(1 << 20) as usize];
            self.read_at(offset, part)?;
            piece(part);
            offset += part.len() as u64;
            left -= part.len() as u64;
        }
        Ok(())
    }
}

#[cfg(unix)]
fn read_exact_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut out: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !out.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, out, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => {
                out = &mut out[read..];
                offset += read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether `name` is a plain file name on every system. The error continues "the file name …".
pub fn check_file_name(name: &str) -> Result<(), &'static str> {
    const DEVICES: [&str; 4] = ["CON", "PRN", "AUX", "NUL"];
    if name.is_empty() || name.len() > 255 {
        return Err("must have 1 to 255 bytes");
    }
    if name.contains(['/', '\\', ':']) || name.contains("..") || name == "." {
        return Err("must not contain a path separator, a colon or `..`");
    }
    if name.chars().any(char::is_control) {
        return Err("contains a control character");
    }
    if name.ends_with(['.', ' ']) {
        return Err("ends in a dot or a space");
    }
    let stem = name.split('.').next().unwrap_or(name).trim_end().to_ascii_uppercase();
    let numbered = stem.strip_prefix("COM").or(stem.strip_prefix("LPT"));
    if DEVICES.contains(&stem.as_str()) || numbered.is_some_and(|n| matches!(n.as_bytes(), [b'0'..=b'9'])) {
        return Err("is a reserved device name");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_file_names_pass() {
        for name in ["experts-L1.bin", "tokenizer.model", "COMET.bin", "a b", ".hidden"] {
            assert_eq!(check_file_name(name), Ok(()), "{name}");
        }
        for name in [
            "",
            ".",
            "..",
            "../x",
            "a/b",
            "/etc/passwd",
            "C:\\x",
            "a\\b",
            "C:x",
            "a\0",
            "nul",
            "NUL.bin",
            "com1.txt",
            "x.",
            "x ",
            "..x",
            "a\nb",
        ] {
            assert!(check_file_name(name).is_err(), "{name:?}");
        }
        assert!(check_file_name(&"x".repeat(256)).is_err());
    }

    #[test]
    #[cfg(unix)]
    fn links_out_of_the_directory_and_odd_files_are_refused() {
        use std::os::unix::fs::symlink;
        let outside = tempfile::NamedTempFile::new().unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("real"), b"12345").unwrap();
        symlink("real", dir.path().join("inside")).unwrap();
        symlink(outside.path(), dir.path().join("outside")).unwrap();
        fs::create_dir(dir.path().join("folder")).unwrap();
        assert_eq!(Source::open(dir.path(), "inside").unwrap().bytes(), 5);
        assert!(matches!(Source::open(dir.path(), "outside"), Err(ContainerError::Unusable { .. })));
        assert!(matches!(Source::open(dir.path(), "folder"), Err(ContainerError::Unusable { .. })));
        assert!(Source::open(dir.path(), "../real").is_err());
    }

    #[test]
    fn reads_beyond_4_gib_and_not_beyond_the_end() {
        use std::io::{Seek, SeekFrom, Write};
        let dir = tempfile::tempdir().unwrap();
        let mut file = File::create(dir.path().join("big")).unwrap();
        file.seek(SeekFrom::Start(5 << 30)).unwrap();
        file.write_all(b"here").unwrap();
        let source = Source::open(dir.path(), "big").unwrap();
        let mut found = [0; 4];
        source.read_at(5 << 30, &mut found).unwrap();
        assert_eq!(&found, b"here");
        assert!(matches!(source.read_at((5 << 30) + 1, &mut found), Err(ContainerError::Size { .. })));
        assert!(source.read_at(u64::MAX, &mut found).is_err());
    }
}
