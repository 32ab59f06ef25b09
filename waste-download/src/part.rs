//! A partial file and its journal, as they are written.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use bytes::Bytes;
use waste_common::files::FileError;
use waste_common::io::{ALIGNMENT, DirectWriter, filesystem};

use crate::hub::Entry;
use crate::journal::{Journal, Written};
use crate::paths::{Places, length, remove};
use crate::sums;
use crate::writing::{Held, Writing};

/// Bytes after which the disk is asked to catch up, so that a crash of the machine costs no more, and the end of a
/// large file need not wait long. Four times as many made nothing faster.
const SYNC_EVERY: u64 = 32 << 20;

/// Files of this length on are written past the page cache: a sixth less work for the CPU, and what is not read again
/// soon pushes nothing out of memory. Smaller ones are written in pieces too small for it.
const DIRECT_FROM: u64 = 256 << 20;
/// Bytes of a large file that are written at once. Four times as many were slower: they leave the cache of the CPU.
const GRANULE_MAX: usize = 1 << 20;

pub(crate) struct Part {
    pub kept: Kept,
    held: Held,
    /// What is written past the page cache is written by another thread, from another buffer.
    writing: Option<Writing>,
    other: Option<Held>,
}

/// What is in the file, and written down.
pub(crate) struct Kept {
    path: PathBuf,
    file: File,
    pub journal: Journal,
    syncing: Syncing,
    unsynced: u64,
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
        let hold = || {
            Held::new(granule as usize)
                .map_err(|error| FileError::io("write", &path)(io::Error::other(error)))
        };
        let (held, other) = (hold()?, direct.is_some().then(hold).transpose()?);
        let handles = file.try_clone().and_then(|file| Ok((file, journal.handle()?)));
        let (data, notes) = handles.map_err(FileError::io("open", &path))?;
        let kept = Kept { path, file, journal, syncing: Syncing::start(data, notes), unsynced: 0 };
        Ok(Part { kept, held, writing: direct.map(Writing::start), other })
    }

    /// Begins again, with a content the server calls `etag`. What was taken and not written is forgotten.
    pub fn reset(&mut self, etag: Option<&str>) -> Result<(), FileError> {
        self.take_back()?;
        for held in self.other.iter_mut().chain([&mut self.held]) {
            held.begin(0);
        }
        self.kept.journal.reset(etag)
    }

    /// The content of the range at `start`, if it is what was written.
    pub fn read(&mut self, start: u64, written: Written) -> Result<Option<Bytes>, FileError> {
        let Kept { path, file, .. } = &mut self.kept;
        let read = file
            .seek(SeekFrom::Start(start))
            .and_then(|_| sums::piece(file, written.bytes as usize))
            .map_err(FileError::io("read", path))?;
        let same = read.len() == written.bytes as usize && crc32fast::hash(&read) == written.crc32;
        Ok(same.then_some(read))
    }

    /// Gets ready to take the bytes from `start` on. What was taken before has been written.
    pub fn seek(&mut self, start: u64) {
        debug_assert!(self.held.content().is_empty());
        self.held.begin(start);
    }

    /// Takes the next bytes, and writes as much as is worth it.
    pub fn write(&mut self, mut piece: &[u8]) -> Result<(), FileError> {
        while !piece.is_empty() {
            let (now, later) = piece.split_at(piece.len().min(self.held.room()));
            self.held.take(now);
            piece = later;
            if self.held.room() == 0 {
                self.hand_over()?;
            }
        }
        Ok(())
    }

    /// Lets what is held be written while more is taken, if there is who does it.
    fn hand_over(&mut self) -> Result<(), FileError> {
        self.settle()?;
        match (&mut self.writing, self.other.take()) {
            (Some(writing), Some(mut next)) => {
                next.begin(self.held.end());
                writing.give(std::mem::replace(&mut self.held, next));
                Ok(())
            }
            _ => self.note(),
        }
    }

    /// Waits until nothing is under way. What could not be written stays.
    fn take_back(&mut self) -> Result<(), FileError> {
        let Some(writing) = &mut self.writing else { return Ok(()) };
        let Some((mut held, done)) = writing.wait().map_err(FileError::io("write", &self.kept.path))? else {
            return Ok(());
        };
        let noted = match done {
            Ok(crc32) => self.kept.enter(&mut held, crc32),
            Err(_) => Ok(()),
        };
        self.other = Some(held);
        noted
    }

    /// Waits until what was handed over is in the file and in the journal. What was refused goes the plain way, which
    /// is the right one where a whole page at either end is missing, or tells why it cannot be.
    fn settle(&mut self) -> Result<(), FileError> {
        self.take_back()?;
        self.other.as_mut().map_or(Ok(()), |other| self.kept.put(other))
    }

    /// Writes what has been taken since, and puts it into the journal.
    pub fn note(&mut self) -> Result<(), FileError> {
        self.settle()?;
        self.kept.put(&mut self.held)
    }

    /// Makes the whole durable, and closes it.
    pub fn finish(mut self) -> Result<(), FileError> {
        self.note()?;
        let Kept { path, file, syncing, .. } = self.kept;
        syncing.finish().and_then(|()| file.sync_all()).map_err(FileError::io("write", &path))
    }

    /// Takes a content that is wrong out of the way, and forgets its journal.
    pub fn quarantine(self, places: &Places) -> Result<PathBuf, FileError> {
        let Part { kept: Kept { file, journal, syncing, .. }, writing, .. } = self;
        // Windows renames and removes nothing that is open.
        let _ = syncing.finish();
        drop((file, writing, journal));
        let bad = places.quarantine(&places.part())?;
        remove(&places.journal())?;
        Ok(bad)
    }
}

impl Kept {
    /// Writes through the page cache, and empties what is in the file then.
    fn put(&mut self, held: &mut Held) -> Result<(), FileError> {
        let content = held.content();
        if content.is_empty() {
            return Ok(());
        }
        let written = self.file.seek(SeekFrom::Start(held.start)).and_then(|_| self.file.write_all(content));
        written.map_err(FileError::io("write", &self.path))?;
        let crc32 = crc32fast::hash(content);
        self.enter(held, crc32)
    }

    /// Puts what is in the file into the journal, and empties it.
    fn enter(&mut self, held: &mut Held, crc32: u32) -> Result<(), FileError> {
        let (start, bytes) = (held.start, held.content().len() as u32);
        held.begin(held.end());
        self.unsynced += u64::from(bytes);
        if self.unsynced >= SYNC_EVERY {
            self.unsynced = 0;
            self.syncing.ask();
        }
        self.journal.append(start, Written { bytes, crc32 })
    }
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
        assert!(part.writing.is_none(), "too small");
        if let Some(direct) = direct.then(|| DirectWriter::open(&places.part())).flatten() {
            (part.writing, part.other) =
                (Some(Writing::start(direct)), Some(Held::new(4 * ALIGNMENT).unwrap()));
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
                let written = part.kept.journal.at(at as u64).unwrap();
                let end = at + written.bytes as usize;
                assert!(part.read(at as u64, written).unwrap().unwrap() == content[at..end], "{direct} {at}");
                at = end;
            }
            part.finish().unwrap();
            assert!(fs::read(places.part()).unwrap() == content, "{direct}");
        }
    }

    /// What the thread cannot write is written the plain way, or kept and told.
    #[test]
    fn what_the_other_thread_is_refused_is_not_lost() {
        let content = content(50_000);
        let dir = tempfile::tempdir().unwrap();
        let (mut part, places) = open(dir.path(), content.len(), true);
        if part.writing.is_none() {
            return;
        }
        let writable = std::mem::replace(&mut part.kept.file, File::open(places.part()).unwrap());
        // From an odd place, which only the plain way can write.
        part.seek(1);
        part.write(&content[1..4_096]).unwrap();
        assert!(part.write(&content[4_096..30_000]).is_err() && part.note().is_err());
        part.kept.file = writable;
        part.note().unwrap();
        let end = 1 + part.kept.journal.at(1).unwrap().bytes as usize;
        assert_eq!(end, 4_096);
        assert!(fs::read(places.part()).unwrap()[1..end] == content[1..end]);
        // Begun again, nothing of before is left over.
        part.write(&content[..9_000]).unwrap();
        part.reset(None).unwrap();
        part.seek(0);
        part.write(&content).unwrap();
        part.finish().unwrap();
        assert!(fs::read(places.part()).unwrap() == content);
    }

    /// As on a disk that is full for a while.
    #[test]
    fn what_could_not_be_written_is_kept() {
        let content = content(10_000);
        let dir = tempfile::tempdir().unwrap();
        let (mut part, places) = open(dir.path(), content.len(), false);
        let writable = std::mem::replace(&mut part.kept.file, File::open(places.part()).unwrap());
        part.seek(0);
        part.write(&content[..3_000]).unwrap();
        assert!(part.write(&content[3_000..5_000]).is_err() && part.note().is_err());
        assert_eq!(part.kept.journal.bytes(), 0);
        part.kept.file = writable;
        part.note().unwrap();
        let written = part.kept.journal.at(0).unwrap();
        assert_eq!(part.read(0, written).unwrap().unwrap(), content[..4_096]);
    }
}
