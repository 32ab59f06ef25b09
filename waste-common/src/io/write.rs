//! Writing past the page cache: what is read back afterwards to measure a disk must not be in RAM already.

use super::file::{make_direct, set_direct};
use super::{ALIGNMENT, AlignedBuf};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

/// A new file, written past the page cache where the system lets us.
#[derive(Debug)]
pub struct DirectWriter {
    file: File,
    bypass: bool,
}

impl DirectWriter {
    /// Creates a file that must not exist yet. If the page cache cannot be bypassed it is written the plain way, and
    /// [`bypass`](Self::bypass) says so.
    ///
    /// # Errors
    /// It exists, or cannot be created.
    pub fn create(path: &Path) -> io::Result<DirectWriter> {
        let mut options = OpenOptions::new();
        set_direct(options.write(true).create_new(true));
        if let Ok(file) = options.open(path) {
            if make_direct(&file).is_ok() {
                return Ok(DirectWriter { file, bypass: true });
            }
            return Ok(DirectWriter { file, bypass: false });
        }
        // Some systems create the file before they refuse the flag.
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
        Ok(DirectWriter { file, bypass: false })
    }

    /// True if writes bypass the page cache.
    pub fn bypass(&self) -> bool {
        self.bypass
    }

    /// Appends a buffer of whole pages.
    ///
    /// # Errors
    /// The buffer is no multiple of [`ALIGNMENT`] long (`InvalidInput`), the disk is full, or the system reports an
    /// error.
    pub fn append(&mut self, pages: &AlignedBuf) -> io::Result<()> {
        if !pages.len().is_multiple_of(ALIGNMENT) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.file.write_all(pages.bytes())
    }

    /// Makes the file durable, and asks the system to forget what it keeps of it in RAM.
    ///
    /// # Errors
    /// The system reports an error.
    pub fn finish(self) -> io::Result<()> {
        self.file.sync_all()?;
        #[cfg(target_os = "linux")]
        let _ = rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut writer = DirectWriter::create(&path).unwrap();
        let mut buffer = AlignedBuf::zeroed(3 * ALIGNMENT).unwrap();
        for value in [1, 2] {
            buffer.bytes_mut().fill(value);
            writer.append(&buffer).unwrap();
        }
        let odd = AlignedBuf::zeroed(100).unwrap();
        assert_eq!(writer.append(&odd).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        writer.finish().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len(), 6 * ALIGNMENT);
        assert!(
            bytes[..3 * ALIGNMENT].iter().all(|&b| b == 1) && bytes[3 * ALIGNMENT..].iter().all(|&b| b == 2)
        );
    }
}
