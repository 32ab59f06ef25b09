//! Files read at positions, past the page cache where the system lets us.

use super::{ALIGNMENT, AlignedBuf};
use crate::error::{Coded, Exit};
use serde_json::{Map, Value};
use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

/// Bytes asked for in one system call. Every system takes less than 4 GiB, some less than 2.
const CALL: usize = 1 << 30;

/// Whether to read past the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bypass {
    /// Where the file system allows it.
    On,
    /// The same, but what the page cache holds already is taken from it, where the system tells (Linux). For whoever
    /// reads everything once.
    Uncached,
    /// Read through the page cache.
    Off,
}

/// A read that did not give what was asked for.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file cannot be opened.
    #[error("cannot open {}", file.display())]
    Open {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A directory, pipe or device where a file should be.
    #[error("{} is not a regular file", file.display())]
    NotAFile {
        /// The path.
        file: PathBuf,
    },
    /// The caller broke the rule of alignment (a bug).
    #[error("read of {length} bytes at offset {offset} of {} is not aligned to 4096 bytes", file.display())]
    Unaligned {
        /// The file.
        file: PathBuf,
        /// Where the read was to begin, in bytes.
        offset: u64,
        /// The length of the buffer.
        length: usize,
    },
    /// The file ends before the read does.
    #[error("{} is truncated: expected {expected} bytes at offset {offset}, found {got}", file.display())]
    Truncated {
        /// The file.
        file: PathBuf,
        /// Where the read began, in bytes.
        offset: u64,
        /// The bytes asked for.
        expected: usize,
        /// The bytes there were.
        got: usize,
    },
    /// The system reports an error.
    #[error("cannot read {expected} bytes at offset {offset} of {} (got {got})", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Where the read began, in bytes.
        offset: u64,
        /// The bytes asked for.
        expected: usize,
        /// The bytes read before the error.
        got: usize,
        /// What the system says.
        source: io::Error,
    },
}

impl ReadError {
    /// The file concerned.
    pub fn file(&self) -> &Path {
        match self {
            ReadError::Open { file, .. }
            | ReadError::NotAFile { file }
            | ReadError::Unaligned { file, .. }
            | ReadError::Truncated { file, .. }
            | ReadError::Read { file, .. } => file,
        }
    }
}

impl Coded for ReadError {
    fn exit(&self) -> Exit {
        match self {
            ReadError::Unaligned { .. } => Exit::Internal,
            _ => Exit::Data,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            ReadError::Open { .. } => "cannot_open",
            ReadError::NotAFile { .. } => "not_a_file",
            ReadError::Unaligned { .. } => "unaligned_read",
            ReadError::Truncated { .. } => "truncated",
            ReadError::Read { .. } => "read_failed",
        }
    }

    fn fields(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        fields.insert("file".into(), self.file().to_string_lossy().into());
        if let ReadError::Truncated { offset, expected, got, .. }
        | ReadError::Read { offset, expected, got, .. } = self
        {
            fields.insert("offset".into(), (*offset).into());
            fields.insert("expected_bytes".into(), (*expected).into());
            fields.insert("found_bytes".into(), (*got).into());
        }
        fields
    }
}

/// A file for large aligned reads, past the page cache if it can be. May be read from several threads at once.
#[derive(Debug)]
pub struct ReadFile {
    plain: PlainFile,
    /// The same file by way of the page cache, if what is there is wanted from it.
    cached: Option<PlainFile>,
    /// Why the page cache is not bypassed; None if it is.
    buffered: Option<String>,
}

impl ReadFile {
    /// Open a file and try one read, because some file systems accept the flag and then refuse the transfer.
    /// If bypassing fails the file is opened again the plain way, and [`reason`](Self::reason) says why.
    ///
    /// # Errors
    /// There is no such readable regular file.
    pub fn open(path: &Path, bypass: Bypass) -> Result<ReadFile, ReadError> {
        let reason = match bypass {
            Bypass::Off => "not asked for".to_owned(),
            Bypass::On | Bypass::Uncached => match open_regular(path).and_then(|_| open_direct(path)) {
                Ok(plain) => {
                    let cached = (bypass == Bypass::Uncached).then(|| open_regular(path)).transpose()?;
                    return Ok(ReadFile { plain, cached, buffered: None });
                }
                Err(ReadError::Open { source, .. }) => format!("the system refuses to open it so: {source}"),
                Err(ReadError::Read { source, .. }) => {
                    format!("the file system refuses direct reads: {source}")
                }
                Err(error) => return Err(error),
            },
        };
        let plain = PlainFile::open(path)?;
        advise_random(&plain.file);
        Ok(ReadFile { plain, cached: None, buffered: Some(reason) })
    }

    /// True if reads bypass the page cache.
    pub fn bypass(&self) -> bool {
        self.buffered.is_none()
    }

    /// Why reads do not bypass the page cache.
    pub fn reason(&self) -> Option<&str> {
        self.buffered.as_deref()
    }

    /// The length when opened, in bytes.
    pub fn len(&self) -> u64 {
        self.plain.len
    }

    /// True for a file that was empty when opened.
    pub fn is_empty(&self) -> bool {
        self.plain.len == 0
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.plain.path
    }

    /// Fill `buf` from `offset`. Both, and the buffer's address, are multiples of [`ALIGNMENT`], whether the cache is
    /// bypassed or not.
    ///
    /// # Errors
    /// Not aligned (a bug), the file ends before, or the system reports an error.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), ReadError> {
        let got = self.read_tail(offset, buf)?;
        self.plain.whole(offset, buf.len(), got)
    }

    /// Fill `buf` from `offset` as far as the file goes; the number of bytes read. Aligned like
    /// [`read_at`](Self::read_at).
    ///
    /// # Errors
    /// Not aligned (a bug), or the system reports an error.
    pub fn read_tail(&self, offset: u64, buf: &mut [u8]) -> Result<usize, ReadError> {
        let aligned = |value: usize| value.is_multiple_of(ALIGNMENT);
        if !offset.is_multiple_of(ALIGNMENT as u64) || !aligned(buf.len()) || !aligned(buf.as_ptr().addr()) {
            return Err(ReadError::Unaligned { file: self.path().to_owned(), offset, length: buf.len() });
        }
        if self.in_cache(offset, buf.len())
            && let Some(cached) = &self.cached
        {
            return cached.read_while(offset, buf, |_| true);
        }
        // A direct read that stops between two sectors has met the end; asking on from there would be refused.
        self.plain.read_while(offset, buf, |got| !self.bypass() || aligned(got))
    }

    /// Whether a read comes from the page cache although others bypass it. Then it need not be large to be fast: what
    /// is small stays in the cache of the CPU.
    pub fn in_cache(&self, offset: u64, len: usize) -> bool {
        let there = self.len().saturating_sub(offset).min(len as u64);
        self.cached.as_ref().is_some_and(|plain| super::cached::all_cached(&plain.file, offset, there))
    }
}

/// A file for small unaligned reads through the page cache: headers, tables, the trunk.
#[derive(Debug)]
pub struct PlainFile {
    file: File,
    path: PathBuf,
    len: u64,
}

impl PlainFile {
    /// Open a regular file.
    ///
    /// # Errors
    /// There is no such readable regular file.
    pub fn open(path: &Path) -> Result<PlainFile, ReadError> {
        open_regular(path)
    }

    /// The length when opened, in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True for a file that was empty when opened.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fill `buf` from `offset`.
    ///
    /// # Errors
    /// The file ends before, or the system reports an error.
    pub fn read_exact_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), ReadError> {
        let got = self.read_while(offset, buf, |_| true)?;
        self.whole(offset, buf.len(), got)
    }

    /// Read until `buf` is full, the file ends, or `more` of the bytes so far says no.
    fn read_while(
        &self,
        offset: u64,
        buf: &mut [u8],
        more: impl Fn(usize) -> bool,
    ) -> Result<usize, ReadError> {
        let expected = buf.len();
        let mut got = 0;
        while got < expected && more(got) {
            // A position beyond 2^64 is beyond the end of any file.
            let Some(position) = offset.checked_add(got as u64) else { break };
            let end = expected.min(got + CALL);
            match read_once(&self.file, position, &mut buf[got..end]) {
                Ok(0) => break,
                Ok(count) => got += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
                Err(source) => {
                    return Err(ReadError::Read { file: self.path.clone(), offset, expected, got, source });
                }
            }
        }
        Ok(got)
    }

    fn whole(&self, offset: u64, expected: usize, got: usize) -> Result<(), ReadError> {
        if got == expected {
            return Ok(());
        }
        Err(ReadError::Truncated { file: self.path.clone(), offset, expected, got })
    }
}

#[cfg(unix)]
fn read_once(file: &File, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
    if offset > i64::MAX as u64 {
        return Ok(0); // pread takes a signed offset; no file reaches there
    }
    std::os::unix::fs::FileExt::read_at(file, buf, offset)
}

#[cfg(windows)]
fn read_once(file: &File, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
    if offset > i64::MAX as u64 {
        return Ok(0);
    }
    std::os::windows::fs::FileExt::seek_read(file, buf, offset)
}

fn open_regular(path: &Path) -> Result<PlainFile, ReadError> {
    open_with(path, OpenOptions::new().read(true))
}

fn open_with(path: &Path, options: &OpenOptions) -> Result<PlainFile, ReadError> {
    let fault = |source| ReadError::Open { file: path.to_owned(), source };
    // Asked before opening, because opening a pipe would wait for its writer.
    if !std::fs::metadata(path).map_err(fault)?.is_file() {
        return Err(ReadError::NotAFile { file: path.to_owned() });
    }
    let file = options.open(path).map_err(fault)?;
    let len = file.metadata().map_err(fault)?.len();
    Ok(PlainFile { file, path: path.to_owned(), len })
}

/// Open past the page cache and read one block to see that it works.
fn open_direct(path: &Path) -> Result<PlainFile, ReadError> {
    let mut options = OpenOptions::new();
    set_direct(options.read(true));
    let plain = open_with(path, &options)?;
    let refused = |source| ReadError::Open { file: path.to_owned(), source };
    make_direct(&plain.file).map_err(refused)?;
    let mut block = AlignedBuf::zeroed(ALIGNMENT).map_err(|error| refused(io::Error::other(error)))?;
    plain.read_while(0, block.bytes_mut(), |got| got == 0)?;
    Ok(plain)
}

/// Asks for a file past the page cache, where that is asked for when it is opened.
pub(super) fn set_direct(options: &mut OpenOptions) {
    #[cfg(target_os = "linux")]
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, rustix::fs::OFlags::DIRECT.bits() as i32);
    #[cfg(windows)]
    {
        const FILE_FLAG_NO_BUFFERING: u32 = 0x2000_0000;
        std::os::windows::fs::OpenOptionsExt::custom_flags(options, FILE_FLAG_NO_BUFFERING);
    }
    #[cfg(not(any(target_os = "linux", windows)))]
    let _ = options;
}

/// The same where it is asked for of an open file; an error on systems that have neither.
pub(super) fn make_direct(file: &File) -> io::Result<()> {
    #[cfg(target_vendor = "apple")]
    rustix::fs::fcntl_nocache(file, true)?;
    let _ = file;
    if cfg!(not(any(target_os = "linux", windows, target_vendor = "apple"))) {
        return Err(io::Error::from(io::ErrorKind::Unsupported));
    }
    Ok(())
}

/// Records are read at random: reading ahead would only waste the disk.
fn advise_random(file: &File) {
    #[cfg(target_os = "linux")]
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random);
    #[cfg(not(target_os = "linux"))]
    let _ = file;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, SeekFrom, Write};

    fn write(dir: &Path, bytes: &[u8]) -> PathBuf {
        let path = dir.join("bank");
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 31 + i / 4096) as u8).collect()
    }

    /// The bug behind it: an alignment of 16384 disabled direct I/O without a word.
    #[test]
    fn direct_reads_work_where_the_file_system_is_known_to_have_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = write(dir.path(), &pattern(3 * ALIGNMENT));
        let file = ReadFile::open(&path, Bypass::On).unwrap();
        assert_eq!(file.bypass(), file.reason().is_none());
        let kind = super::super::filesystem(dir.path()).unwrap().kind;
        if ["ext4", "xfs", "btrfs", "apfs", "f2fs"].contains(&kind.as_str()) {
            assert!(file.bypass(), "{kind}: {:?}", file.reason());
        }
    }

    #[test]
    fn both_ways_read_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = pattern(5 * ALIGNMENT);
        let path = write(dir.path(), &bytes);
        for bypass in [Bypass::On, Bypass::Uncached, Bypass::Off] {
            let file = ReadFile::open(&path, bypass).unwrap();
            assert_eq!(
                (file.len(), file.is_empty(), file.path()),
                (bytes.len() as u64, false, path.as_path())
            );
            let mut buf = AlignedBuf::zeroed(2 * ALIGNMENT).unwrap();
            for page in 0..4 {
                file.read_at((page * ALIGNMENT) as u64, buf.bytes_mut()).unwrap();
                assert_eq!(buf.bytes(), &bytes[page * ALIGNMENT..][..2 * ALIGNMENT]);
            }
        }
        assert!(ReadFile::open(&path, Bypass::Off).unwrap().reason().is_some());
    }

    /// Whether a page is in the cache nobody can rely on: right is what is read, whatever is there.
    #[cfg(target_os = "linux")]
    #[test]
    fn what_the_cache_holds_only_in_part_is_read_whole() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = pattern(64 * ALIGNMENT + 100);
        let path = write(dir.path(), &bytes);
        let file = File::open(&path).unwrap();
        file.sync_all().unwrap();
        let mut page = [0; ALIGNMENT];
        for warm in [0..0, 0..3, 5..9, 60..65, 0..65] {
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
            for at in warm.clone() {
                std::os::unix::fs::FileExt::read_at(&file, &mut page, (at * ALIGNMENT) as u64).unwrap();
            }
            let read = ReadFile::open(&path, Bypass::Uncached).unwrap();
            assert!(!read.in_cache(u64::MAX, 9) && !read.in_cache(bytes.len() as u64, ALIGNMENT));
            let mut buf = AlignedBuf::zeroed(8 * ALIGNMENT).unwrap();
            for start in (0..65).step_by(4) {
                let (offset, end) = (start * ALIGNMENT, bytes.len().min((start + 8) * ALIGNMENT));
                assert_eq!(read.read_tail(offset as u64, buf.bytes_mut()).unwrap(), end - offset);
                assert_eq!(&buf.bytes()[..end - offset], &bytes[offset..end]);
            }
        }
    }

    #[test]
    fn the_tail_of_a_file_can_be_read_and_a_truncated_record_is_named() {
        for len in [0, 1, 100, 4095, 4096, 4097, 8000] {
            let dir = tempfile::tempdir().unwrap();
            let bytes = pattern(len);
            let path = write(dir.path(), &bytes);
            for bypass in [Bypass::On, Bypass::Uncached, Bypass::Off] {
                let file = ReadFile::open(&path, bypass).unwrap();
                let mut buf = AlignedBuf::zeroed(3 * ALIGNMENT).unwrap();
                assert_eq!(file.read_tail(0, buf.bytes_mut()).unwrap(), len);
                assert_eq!(&buf.bytes()[..len], bytes);
                assert_eq!(file.read_tail(1 << 40, buf.bytes_mut()).unwrap(), 0);
                assert_eq!(file.read_tail(u64::MAX - 4095, buf.bytes_mut()).unwrap(), 0);
                let error = file.read_at(0, buf.bytes_mut()).unwrap_err();
                assert!(
                    matches!(&error, ReadError::Truncated { offset: 0, expected: 12288, got, .. } if *got == len)
                );
                assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
                assert_eq!(error.fields()["found_bytes"], len);
            }
        }
    }

    #[test]
    fn a_file_truncated_after_it_was_opened_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = write(dir.path(), &pattern(4 * ALIGNMENT));
        let file = ReadFile::open(&path, Bypass::On).unwrap();
        // Windows does not let a file shrink while it is mapped or open in some ways; then there is nothing to see.
        if OpenOptions::new().write(true).open(&path).and_then(|file| file.set_len(5000)).is_ok() {
            let mut buf = AlignedBuf::zeroed(2 * ALIGNMENT).unwrap();
            let error = file.read_at(0, buf.bytes_mut()).unwrap_err();
            assert!(matches!(error, ReadError::Truncated { got: 5000, .. }), "{error:?}");
        }
    }

    /// The bug behind it: 32-bit file offsets on Windows.
    #[test]
    fn a_record_beyond_4_gib_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sparse");
        let offset = (4u64 << 30) + ALIGNMENT as u64;
        let record = pattern(ALIGNMENT);
        let mut file = File::create(&path).unwrap();
        let written = file.seek(SeekFrom::Start(offset)).and_then(|_| file.write_all(&record));
        if let Err(error) = written {
            // A small disk without sparse files.
            assert!(
                matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::FileTooLarge),
                "{error}"
            );
            return;
        }
        drop(file);
        for bypass in [Bypass::On, Bypass::Uncached, Bypass::Off] {
            let file = ReadFile::open(&path, bypass).unwrap();
            assert_eq!(file.len(), offset + 4096);
            let mut buf = AlignedBuf::zeroed(ALIGNMENT).unwrap();
            file.read_at(offset, buf.bytes_mut()).unwrap();
            assert_eq!(buf.bytes(), record);
        }
        let mut four = [0; 4];
        PlainFile::open(&path).unwrap().read_exact_at(offset + 1, &mut four).unwrap();
        assert_eq!(four, record[1..5]);
    }

    #[test]
    fn what_is_not_aligned_is_refused_also_where_it_would_work() {
        let dir = tempfile::tempdir().unwrap();
        let path = write(dir.path(), &pattern(4 * ALIGNMENT));
        for bypass in [Bypass::On, Bypass::Uncached, Bypass::Off] {
            let file = ReadFile::open(&path, bypass).unwrap();
            let mut buf = AlignedBuf::zeroed(2 * ALIGNMENT).unwrap();
            for error in [
                file.read_at(512, buf.bytes_mut()),
                file.read_at(0, &mut buf.bytes_mut()[..100]),
                file.read_at(0, &mut buf.bytes_mut()[8..][..ALIGNMENT]),
            ] {
                let error = error.unwrap_err();
                assert!(matches!(error, ReadError::Unaligned { .. }) && error.exit() == Exit::Internal);
            }
        }
    }

    #[test]
    fn several_threads_may_read_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = pattern(64 * ALIGNMENT);
        let file = ReadFile::open(&write(dir.path(), &bytes), Bypass::On).unwrap();
        std::thread::scope(|scope| {
            for start in 0..4 {
                let (file, bytes) = (&file, &bytes);
                scope.spawn(move || {
                    let mut buf = AlignedBuf::zeroed(ALIGNMENT).unwrap();
                    for page in (start..64).step_by(4) {
                        file.read_at((page * ALIGNMENT) as u64, buf.bytes_mut()).unwrap();
                        assert_eq!(buf.bytes(), &bytes[page * ALIGNMENT..][..ALIGNMENT]);
                    }
                });
            }
        });
    }

    #[test]
    fn small_reads_need_no_alignment() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = pattern(10_000);
        let file = PlainFile::open(&write(dir.path(), &bytes)).unwrap();
        let mut buf = [0; 777];
        file.read_exact_at(4001, &mut buf).unwrap();
        assert_eq!(buf, bytes[4001..4778]);
        let error = file.read_exact_at(9_900, &mut buf).unwrap_err();
        assert!(matches!(error, ReadError::Truncated { got: 100, expected: 777, .. }), "{error:?}");
        file.read_exact_at(1 << 50, &mut []).unwrap();
    }

    #[test]
    fn missing_files_and_directories_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        for bypass in [Bypass::On, Bypass::Uncached, Bypass::Off] {
            let missing = ReadFile::open(&dir.path().join("missing"), bypass).unwrap_err();
            assert!(matches!(missing, ReadError::Open { .. }), "{missing:?}");
            let directory = ReadFile::open(dir.path(), bypass).unwrap_err();
            assert!(matches!(directory, ReadError::NotAFile { .. }), "{directory:?}");
        }
    }

    /// tmpfs: some kernels refuse the flag, some accept it; both must answer.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_file_in_memory_is_read_either_way() {
        let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return };
        let bytes = pattern(2 * ALIGNMENT);
        let file = ReadFile::open(&write(dir.path(), &bytes), Bypass::On).unwrap();
        assert_eq!(file.bypass(), file.reason().is_none());
        let mut buf = AlignedBuf::zeroed(2 * ALIGNMENT).unwrap();
        file.read_at(0, buf.bytes_mut()).unwrap();
        assert_eq!(buf.bytes(), bytes);
    }

    /// A file system that opens with the flag and then refuses to read: procfs does the like.
    #[cfg(target_os = "linux")]
    #[test]
    fn where_direct_reads_are_refused_the_reason_is_remembered() {
        let file = ReadFile::open(Path::new("/proc/self/status"), Bypass::On).unwrap();
        assert!(!file.bypass() && file.reason().unwrap().contains("refuses"), "{:?}", file.reason());
        let mut buf = AlignedBuf::zeroed(ALIGNMENT).unwrap();
        assert!(file.read_tail(0, buf.bytes_mut()).unwrap() > 100);
    }
}
