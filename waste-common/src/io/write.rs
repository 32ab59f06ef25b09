//! Writing past the page cache: what is read back afterwards to measure a disk must not be in RAM already, and what is
//! written once and for long need not push other things out of it.

use super::file::{make_direct, set_direct};
use super::{ALIGNMENT, AlignedBuf};
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;

/// A file, written past the page cache where the system lets us.
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

    /// Opens a file that exists, to write [anywhere](Self::write_at) in it; None if the page cache cannot be bypassed
    /// there.
    pub fn open(path: &Path) -> Option<DirectWriter> {
        let mut options = OpenOptions::new();
        set_direct(options.write(true));
        let file = options.open(path).ok()?;
        make_direct(&file).ok()?;
        Some(DirectWriter { file, bypass: true })
    }

    /// Writes whole pages, which lie in memory as in the file: from the beginning of a page on.
    ///
    /// # Errors
    /// It is not so, or the file system refuses such writes after all (`InvalidInput`); the disk is full, or the system
    /// reports an error.
    pub fn write_at(&mut self, offset: u64, pages: &[u8]) -> io::Result<()> {
        let aligned = |value: usize| value.is_multiple_of(ALIGNMENT);
        if !offset.is_multiple_of(ALIGNMENT as u64)
            || !aligned(pages.len())
            || !aligned(pages.as_ptr().addr())
        {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.file.seek(SeekFrom::Start(offset))?;
        self.file.write_all(pages)
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

    #[test]
    fn pages_of_a_file_are_overwritten_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        assert!(DirectWriter::open(&path).is_none());
        std::fs::write(&path, [1; 3 * ALIGNMENT + 5]).unwrap();
        let Some(mut writer) = DirectWriter::open(&path) else { return };
        let mut buffer = AlignedBuf::zeroed(2 * ALIGNMENT).unwrap();
        buffer.bytes_mut().fill(2);
        let refused =
            |result: io::Result<()>| result.is_err_and(|error| error.kind() == io::ErrorKind::InvalidInput);
        assert!(refused(writer.write_at(5, &buffer.bytes()[..ALIGNMENT])));
        assert!(refused(writer.write_at(0, &buffer.bytes()[..5])));
        assert!(refused(writer.write_at(0, &buffer.bytes()[8..][..ALIGNMENT])));
        match writer.write_at(ALIGNMENT as u64, &buffer.bytes()[..ALIGNMENT]) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return,
            written => written.unwrap(),
        }
        let mut expected = vec![1; 3 * ALIGNMENT + 5];
        expected[ALIGNMENT..2 * ALIGNMENT].fill(2);
        assert!(std::fs::read(&path).unwrap() == expected);
    }
}
