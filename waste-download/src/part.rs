//! A partial file and its journal, as they are written.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use bytes::Bytes;
use waste_common::files::FileError;
use waste_common::io::{ALIGNMENT, AlignedBuf, DirectWriter, filesystem};

use crate::hub::Entry;
use crate::journal::{Journal, Written};
use crate::paths::{Places, length, remove};
use crate::sums;

/// Bytes after which the disk is asked to catch up, so that a crash of the machine costs no more, and the end of a
/// large file need not wait long.
const SYNC_EVERY: u64 = 32 << 20;

/// Files of this length on are written past the page cache: a sixth less work for the CPU, and what is not read again
/// soon pushes nothing out of memory. Smaller ones are written in pieces too small for it.
const DIRECT_FROM: u64 = 256 << 20;
/// Bytes of a large file that are written at once.
const GRANULE_MAX: usize = 1 << 20;

pub(crate) struct Part {
    path: PathBuf,
    file: File,
    /// The same file past the page cache.
    direct: Option<DirectWriter>,
    pub journal: Journal,
    held: Held,
    syncing: Syncing,
    unsynced: u64,
}

/// What has come, but is not in the file and its journal yet; a killed process loses no more. Full, it is a range of the
/// journal.
struct Held {
    buffer: AlignedBuf,
    /// Where in the file it begins.
    start: u64,
    bytes: usize,
}

impl Part {
    /// Opens what has come of `entry` so far; nothing if it is of another content. Its places have been prepared.
    pub fn open(places: &Places, entry: &Entry) -> Result<Part, FileError> {
        let path = places.part();
        for path in [&path, &places.journal()] {
            length(path)?;
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(&path).map_err(FileError::io("open", &path))?;
        let bytes = file.metadata().map_err(FileError::io("look at", &path))?.len();
        let mut journal = Journal::open(&places.journal(), entry)?;
        journal.limit(bytes);
        if bytes > entry.size {
            file.set_len(entry.size).map_err(FileError::io("write", &path))?;
        }
        let large = cfg!(target_os = "linux") && entry.size >= DIRECT_FROM;
        // Where seeks or round trips are dear the system's own large writes are better.
        let quick = || filesystem(&path).is_ok_and(|found| found.warning.is_none());
        let direct = if large && quick() { DirectWriter::open(&path) } else { None };
        let granule = if direct.is_some() { GRANULE_MAX as u64 } else { entry.size / 4096 };
        let granule = granule.clamp(ALIGNMENT as u64, GRANULE_MAX as u64).next_multiple_of(ALIGNMENT as u64);
        let buffer = AlignedBuf::zeroed(granule as usize)
            .map_err(|error| FileError::io("write", &path)(io::Error::other(error)))?;
        let handles = file.try_clone().and_then(|file| Ok((file, journal.handle()?)));
        let (data, notes) = handles.map_err(FileError::io("open", &path))?;
        Ok(Part {
            path,
            file,
            direct,
            journal,
            held: Held { buffer, start: 0, bytes: 0 },
            syncing: Syncing::start(data, notes),
            unsynced: 0,
        })
    }

    /// Begins again, with a content the server calls `etag`. What was taken and not written is forgotten.
    pub fn reset(&mut self, etag: Option<&str>) -> Result<(), FileError> {
        self.held.bytes = 0;
        self.journal.reset(etag)
    }

    /// The content of the range at `start`, if it is what was written.
    pub fn read(&mut self, start: u64, written: Written) -> Result<Option<Bytes>, FileError> {
        let read = self
            .file
            .seek(SeekFrom::Start(start))
            .and_then(|_| sums::piece(&mut self.file, written.bytes as usize))
            .map_err(FileError::io("read", &self.path))?;
        let same = read.len() == written.bytes as usize && crc32fast::hash(&read) == written.crc32;
        Ok(same.then_some(read))
    }

    /// Gets ready to take the bytes from `start` on. What was taken before has been written.
    pub fn seek(&mut self, start: u64) {
        debug_assert_eq!(self.held.bytes, 0);
        self.held.start = start;
    }

    /// Takes the next bytes, and writes as much as is worth it.
    pub fn write(&mut self, mut piece: &[u8]) -> Result<(), FileError> {
        while !piece.is_empty() {
            let (now, later) = piece.split_at(piece.len().min(self.held.room()));
            self.held.take(now);
            piece = later;
            if self.held.room() == 0 {
                self.note()?;
            }
        }
        Ok(())
    }

    /// Writes what has been taken since, and puts it into the journal.
    pub fn note(&mut self) -> Result<(), FileError> {
        let Held { buffer, start, bytes } = &mut self.held;
        let content = &buffer.bytes()[..*bytes];
        if content.is_empty() {
            return Ok(());
        }
        let direct = self.direct.as_mut().map(|direct| direct.write_at(*start, content));
        match direct {
            // A whole page at either end is missing, or the file system does not want it.
            None => put(&mut self.file, *start, content),
            Some(Err(error)) if error.kind() == io::ErrorKind::InvalidInput => {
                put(&mut self.file, *start, content)
            }
            Some(written) => written,
        }
        .map_err(FileError::io("write", &self.path))?;
        let written = Written { bytes: content.len() as u32, crc32: crc32fast::hash(content) };
        let noted = self.journal.append(*start, written);
        self.unsynced += *bytes as u64;
        (*start, *bytes) = (*start + *bytes as u64, 0);
        if self.unsynced >= SYNC_EVERY {
            self.unsynced = 0;
            self.syncing.ask();
        }
        noted
    }

    /// Makes the whole durable, and closes it.
    pub fn finish(mut self) -> Result<(), FileError> {
        self.note()?;
        let path = self.path;
        self.syncing.finish().and_then(|()| self.file.sync_all()).map_err(FileError::io("write", &path))
    }

    /// Takes a content that is wrong out of the way, and forgets its journal.
    pub fn quarantine(self, places: &Places) -> Result<PathBuf, FileError> {
        let Part { file, direct, journal, syncing, .. } = self;
        // Windows renames and removes nothing that is open.
        let _ = syncing.finish();
        drop((file, direct, journal));
        let bad = places.quarantine(&places.part())?;
        remove(&places.journal())?;
        Ok(bad)
    }
}

impl Held {
    /// Bytes until it is full, which it is where a page of the file ends.
    fn room(&self) -> usize {
        self.buffer.len() - (self.start % ALIGNMENT as u64) as usize - self.bytes
    }

    /// Takes bytes there is room for.
    fn take(&mut self, bytes: &[u8]) {
        self.buffer.bytes_mut()[self.bytes..][..bytes.len()].copy_from_slice(bytes);
        self.bytes += bytes.len();
    }
}

fn put(file: &mut File, start: u64, content: &[u8]) -> io::Result<()> {
    file.seek(SeekFrom::Start(start))?;
    file.write_all(content)
}

/// A thread that makes durable what has been written so far, while more is written.
struct Syncing {
    wanted: SyncSender<()>,
    thread: JoinHandle<io::Result<()>>,
}

impl Syncing {
    fn start(data: File, notes: File) -> Syncing {
        let (wanted, receiver) = sync_channel(1);
        let thread = std::thread::spawn(move || {
            for () in receiver {
                data.sync_data()?;
                notes.sync_data()?;
            }
            Ok(())
        });
        Syncing { wanted, thread }
    }

    /// Asks for it; it may be busy with the last time still.
    fn ask(&self) {
        let _ = self.wanted.try_send(());
    }

    /// The end, and whether all went well.
    fn finish(self) -> io::Result<()> {
        drop(self.wanted);
        self.thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that syncs has died")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::Digest;
    use std::fs;

    fn content(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|at| (at * 7 % 251) as u8).collect()
    }

    fn open(dir: &std::path::Path, bytes: usize, direct: bool) -> (Part, Places) {
        let digest = Digest::Sha256("0".repeat(64));
        let (places, entry) =
            (Places::new(dir, "a"), Entry { name: "a".to_owned(), size: bytes as u64, digest });
        places.prepare().unwrap();
        let mut part = Part::open(&places, &entry).unwrap();
        assert!(part.direct.is_none(), "too small");
        if direct {
            part.direct = DirectWriter::open(&places.part());
        }
        (part, places)
    }

    /// From an odd place on, in odd pieces, and then the rest; past the page cache too.
    #[test]
    fn what_is_taken_is_in_the_file_and_in_the_journal() {
        let content = content(100_003);
        for direct in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let (mut part, places) = open(dir.path(), content.len(), direct);
            for (start, end) in [(5_001, content.len()), (0, 5_001)] {
                part.seek(start as u64);
                content[start..end].chunks(1_777).for_each(|piece| part.write(piece).unwrap());
                part.note().unwrap();
            }
            let mut at = 0;
            while at < content.len() {
                let written = part.journal.at(at as u64).unwrap();
                let end = at + written.bytes as usize;
                assert!(part.read(at as u64, written).unwrap().unwrap() == content[at..end], "{direct} {at}");
                at = end;
            }
            part.finish().unwrap();
            assert!(fs::read(places.part()).unwrap() == content, "{direct}");
        }
    }

    /// As on a disk that is full for a while.
    #[test]
    fn what_could_not_be_written_is_kept() {
        let content = content(10_000);
        let dir = tempfile::tempdir().unwrap();
        let (mut part, places) = open(dir.path(), content.len(), false);
        let writable = std::mem::replace(&mut part.file, File::open(places.part()).unwrap());
        part.seek(0);
        part.write(&content[..3_000]).unwrap();
        assert!(part.write(&content[3_000..5_000]).is_err() && part.note().is_err());
        assert_eq!(part.journal.bytes(), 0);
        part.file = writable;
        part.note().unwrap();
        let written = part.journal.at(0).unwrap();
        assert_eq!(part.read(0, written).unwrap().unwrap(), content[..4_096]);
    }
}
