//! A partial file and its journal, as they are written.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use bytes::Bytes;
use waste_common::files::FileError;

use crate::hub::Entry;
use crate::journal::{Journal, Written};
use crate::paths::{Places, length, remove};
use crate::sums;

/// Bytes after which the disk is asked to catch up, so that a crash of the machine costs no more, and the end of a
/// large file need not wait long.
const SYNC_EVERY: u64 = 32 << 20;

pub(crate) struct Part {
    path: PathBuf,
    file: File,
    pub journal: Journal,
    /// Written, but not in the journal yet.
    pending: Pending,
    /// Bytes a range of the journal has at least; a killed process loses no more.
    granule: u64,
    syncing: Syncing,
    unsynced: u64,
}

#[derive(Default)]
struct Pending {
    start: u64,
    bytes: u32,
    crc: crc32fast::Hasher,
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
        let handles = file.try_clone().and_then(|file| Ok((file, journal.handle()?)));
        let (data, notes) = handles.map_err(FileError::io("open", &path))?;
        Ok(Part {
            path,
            file,
            journal,
            pending: Pending::default(),
            granule: (entry.size / 4096).clamp(4 << 10, 1 << 20),
            syncing: Syncing::start(data, notes),
            unsynced: 0,
        })
    }

    /// Begins again, with a content the server calls `etag`.
    pub fn reset(&mut self, etag: Option<&str>) -> Result<(), FileError> {
        self.pending = Pending::default();
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

    /// Gets ready to write from `start` on.
    pub fn seek(&mut self, start: u64) -> Result<(), FileError> {
        self.pending = Pending { start, ..Pending::default() };
        self.file.seek(SeekFrom::Start(start)).map(drop).map_err(FileError::io("write", &self.path))
    }

    /// Writes the next bytes.
    pub fn write(&mut self, piece: &[u8]) -> Result<(), FileError> {
        self.file.write_all(piece).map_err(FileError::io("write", &self.path))?;
        self.pending.crc.update(piece);
        // Pieces are far below 4 GiB, and the sum stays near the granule.
        self.pending.bytes += piece.len() as u32;
        if u64::from(self.pending.bytes) >= self.granule {
            self.note()?;
        }
        self.unsynced += piece.len() as u64;
        if self.unsynced >= SYNC_EVERY {
            self.unsynced = 0;
            self.syncing.ask();
        }
        Ok(())
    }

    /// Puts into the journal what was written since.
    pub fn note(&mut self) -> Result<(), FileError> {
        let pending = std::mem::take(&mut self.pending);
        self.pending.start = pending.start + u64::from(pending.bytes);
        if pending.bytes == 0 {
            return Ok(());
        }
        let written = Written { bytes: pending.bytes, crc32: pending.crc.finalize() };
        self.journal.append(pending.start, written)
    }

    /// Makes the whole durable, and closes it.
    pub fn finish(self) -> Result<(), FileError> {
        let path = self.path;
        self.syncing.finish().and_then(|()| self.file.sync_all()).map_err(FileError::io("write", &path))
    }

    /// Takes a content that is wrong out of the way, and forgets its journal.
    pub fn quarantine(self, places: &Places) -> Result<PathBuf, FileError> {
        let Part { file, journal, syncing, .. } = self;
        // Windows renames and removes nothing that is open.
        let _ = syncing.finish();
        drop((file, journal));
        let bad = places.quarantine(&places.part())?;
        remove(&places.journal())?;
        Ok(bad)
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
