//! The journal of a partial file: which ranges of it have been written, and their checksums.
//!
//! A range counts only if what is read back has its checksum. So nothing depends on the order in which the system
//! brings data, lengths and journal to the disk: after a crash, what did not arrive is fetched again.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use waste_common::files::FileError;
use waste_common::json;

use crate::hub::{Digest, Entry};

const VERSION: u32 = 1;
/// Far above what any file needs.
const JOURNAL_BYTES_MAX: u64 = 256 << 20;
/// Far above what is written at once: a range is read back as a whole.
const RANGE_BYTES_MAX: u32 = 16 << 20;
/// start: u64, length: u32, crc32 of the content: u32, crc32 of these 16 bytes: u32; little-endian.
const RECORD_BYTES: usize = 20;

/// The first line: what the ranges are of.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Head {
    version: u32,
    size: u64,
    digest: String,
    etag: Option<String>,
}

/// A range that has been written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Written {
    pub bytes: u32,
    pub crc32: u32,
}

/// An open journal.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: File,
    /// Its length.
    bytes: u64,
    head: Head,
    ranges: Ranges,
}

/// Ranges by their start; none overlaps another.
#[derive(Debug, Default, PartialEq, Eq)]
struct Ranges(BTreeMap<u64, Written>);

impl Journal {
    /// Opens the journal of `entry`, or begins one. What is of another content, or damaged, does not count.
    pub fn open(path: &Path, entry: &Entry) -> Result<Journal, FileError> {
        let known = load(path, entry);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(path).map_err(FileError::io("open", path))?;
        let mut journal = Journal {
            path: path.to_owned(),
            file,
            bytes: 0,
            head: head(entry, None),
            ranges: Ranges::default(),
        };
        match known {
            Some((head, ranges, bytes)) => {
                // What was torn off at the end must not stand before what comes now.
                journal.file.set_len(bytes).map_err(FileError::io("write", path))?;
                journal.file.seek(SeekFrom::End(0)).map_err(FileError::io("write", path))?;
                (journal.head, journal.ranges, journal.bytes) = (head, ranges, bytes);
            }
            None => journal.reset(None)?,
        }
        Ok(journal)
    }

    /// Forgets everything; `etag` is what the server calls the content that follows.
    pub fn reset(&mut self, etag: Option<&str>) -> Result<(), FileError> {
        self.ranges = Ranges::default();
        self.head.etag = etag.map(str::to_owned);
        let mut line = serde_json::to_vec(&self.head)
            .map_err(|error| FileError::io("write", &self.path)(io::Error::other(error)))?;
        line.push(b'\n');
        self.bytes = line.len() as u64;
        self.file
            .set_len(0)
            .and_then(|()| self.file.seek(SeekFrom::Start(0)))
            .and_then(|_| self.file.write_all(&line))
            .map_err(FileError::io("write", &self.path))
    }

    /// What the server called the content.
    pub fn etag(&self) -> Option<&str> {
        self.head.etag.as_deref()
    }

    /// Writes down a range whose content is in the file.
    pub fn append(&mut self, start: u64, written: Written) -> Result<(), FileError> {
        let record = encode(start, written);
        if let Err(error) = self.file.write_all(&record) {
            // Half a record would hide all that follow.
            let _ = self.file.set_len(self.bytes).and_then(|()| self.file.seek(SeekFrom::Start(self.bytes)));
            return Err(FileError::io("write", &self.path)(error));
        }
        self.bytes += RECORD_BYTES as u64;
        self.ranges.insert(start, written);
        Ok(())
    }

    /// The range that begins at `start`.
    pub fn at(&self, start: u64) -> Option<Written> {
        self.ranges.0.get(&start).copied()
    }

    /// Where the next range after `position` begins.
    pub fn next_after(&self, position: u64) -> Option<u64> {
        self.ranges.0.range(position + 1..).next().map(|(start, _)| *start)
    }

    /// A range is not what it was: it does not count until it is written again.
    pub fn forget(&mut self, start: u64) {
        self.ranges.0.remove(&start);
    }

    /// Nothing that ends beyond `bytes` counts: the file is no longer.
    pub fn limit(&mut self, bytes: u64) {
        self.ranges.0.retain(|start, written| start + u64::from(written.bytes) <= bytes);
    }

    /// Bytes that have been written.
    pub fn bytes(&self) -> u64 {
        self.ranges.bytes()
    }

    /// A second handle, to make it durable from another thread.
    pub fn handle(&self) -> io::Result<File> {
        self.file.try_clone()
    }
}

/// Bytes of `entry` that a journal says are there, without touching it.
pub(crate) fn claimed(path: &Path, entry: &Entry) -> u64 {
    load(path, entry).map_or(0, |(_, ranges, _)| ranges.bytes())
}

fn head(entry: &Entry, etag: Option<String>) -> Head {
    let digest = match &entry.digest {
        Digest::Sha256(sum) => format!("sha256:{sum}"),
        Digest::GitBlob(sum) => format!("git:{sum}"),
    };
    Head { version: VERSION, size: entry.size, digest, etag }
}

/// Head, ranges and the length of what is sound; None if there is no journal of this content.
fn load(path: &Path, entry: &Entry) -> Option<(Head, Ranges, u64)> {
    parse(&json::read_bounded(path, JOURNAL_BYTES_MAX).ok()?, entry)
}

fn parse(content: &[u8], entry: &Entry) -> Option<(Head, Ranges, u64)> {
    let end = content.iter().position(|byte| *byte == b'\n')?;
    let found: Head = serde_json::from_slice(&content[..end]).ok()?;
    if found != head(entry, found.etag.clone()) {
        return None;
    }
    let mut ranges = Ranges::default();
    let mut sound = end + 1;
    for record in content[end + 1..].chunks_exact(RECORD_BYTES) {
        let Some((start, written)) = decode(record) else { break };
        if start.checked_add(written.bytes.into()).is_none_or(|end| end > entry.size) {
            break;
        }
        ranges.insert(start, written);
        sound += RECORD_BYTES;
    }
    Some((found, ranges, sound as u64))
}

fn encode(start: u64, written: Written) -> [u8; RECORD_BYTES] {
    let mut record = [0; RECORD_BYTES];
    record[..8].copy_from_slice(&start.to_le_bytes());
    record[8..12].copy_from_slice(&written.bytes.to_le_bytes());
    record[12..16].copy_from_slice(&written.crc32.to_le_bytes());
    let check = crc32fast::hash(&record[..16]);
    record[16..].copy_from_slice(&check.to_le_bytes());
    record
}

fn decode(record: &[u8]) -> Option<(u64, Written)> {
    let start = u64::from_le_bytes(record.get(..8)?.try_into().ok()?);
    let number = |at: usize| Some(u32::from_le_bytes(record.get(at..at + 4)?.try_into().ok()?));
    let (bytes, crc32, check) = (number(8)?, number(12)?, number(16)?);
    let sound = check == crc32fast::hash(&record[..16]) && (1..=RANGE_BYTES_MAX).contains(&bytes);
    sound.then_some((start, Written { bytes, crc32 }))
}

impl Ranges {
    /// Adds a range; earlier ones it overlaps are gone.
    fn insert(&mut self, start: u64, written: Written) {
        let end = start + u64::from(written.bytes);
        while let Some((&other, &old)) = self.0.range(..end).next_back() {
            if other + u64::from(old.bytes) <= start {
                break;
            }
            self.0.remove(&other);
        }
        self.0.insert(start, written);
    }

    fn bytes(&self) -> u64 {
        self.0.values().map(|written| u64::from(written.bytes)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry(size: u64) -> Entry {
        Entry { name: "a".to_owned(), size, digest: Digest::Sha256("0".repeat(64)) }
    }

    fn written(bytes: u32) -> Written {
        Written { bytes, crc32: 7 }
    }

    fn open(path: &Path) -> Journal {
        Journal::open(path, &entry(1000)).unwrap()
    }

    #[test]
    fn what_was_written_down_is_known_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let mut journal = open(&path);
        journal.reset(Some("\"tag\"")).unwrap();
        journal.append(0, written(100)).unwrap();
        journal.append(300, written(50)).unwrap();
        drop(journal);
        let journal = open(&path);
        assert_eq!((journal.etag(), journal.bytes()), (Some("\"tag\""), 150));
        assert_eq!((journal.at(0), journal.at(1)), (Some(written(100)), None));
        assert_eq!((journal.next_after(0), journal.next_after(300)), (Some(300), None));
        assert_eq!(claimed(&path, &entry(1000)), 150);
    }

    #[test]
    fn the_journal_of_another_content_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        open(&path).append(0, written(100)).unwrap();
        assert_eq!(claimed(&path, &entry(1001)), 0);
        let other = Entry { digest: Digest::GitBlob("0".repeat(40)), ..entry(1000) };
        assert_eq!(Journal::open(&path, &other).unwrap().bytes(), 0);
        assert_eq!(open(&path).bytes(), 0);
    }

    #[test]
    fn a_torn_end_is_cut_off_before_more_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        open(&path).append(0, written(100)).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for torn in 1..=RECORD_BYTES {
            std::fs::write(&path, [&whole, &[9; RECORD_BYTES][..torn]].concat()).unwrap();
            open(&path).append(100, written(100)).unwrap();
            assert_eq!(open(&path).bytes(), 200, "{torn}");
            std::fs::write(&path, &whole[..whole.len() - torn]).unwrap();
            assert_eq!(open(&path).bytes(), 0, "{torn}");
        }
    }

    /// It would be read into memory at once.
    #[test]
    fn a_range_of_gigabytes_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let entry = entry(u64::MAX / 2);
        for (bytes, counts) in [(RANGE_BYTES_MAX, true), (RANGE_BYTES_MAX + 1, false), (u32::MAX, false)] {
            let mut journal = Journal::open(&path, &entry).unwrap();
            journal.reset(None).unwrap();
            journal.append(0, written(bytes)).unwrap();
            assert_eq!(claimed(&path, &entry), if counts { bytes.into() } else { 0 });
        }
    }

    #[test]
    fn ranges_beyond_the_file_or_that_changed_do_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = open(&dir.path().join("journal"));
        for start in [0, 100, 200] {
            journal.append(start, written(100)).unwrap();
        }
        journal.limit(299);
        assert_eq!(journal.bytes(), 200);
        journal.forget(0);
        assert_eq!((journal.bytes(), journal.next_after(0)), (100, Some(100)));
    }

    proptest! {
        #[test]
        fn ranges_never_overlap_and_the_last_one_wins(list in prop::collection::vec((0u64..60, 1u32..20), 1..30)) {
            let mut ranges = Ranges::default();
            for (start, bytes) in &list {
                ranges.insert(*start, written(*bytes));
            }
            let mut end = 0;
            for (start, written) in &ranges.0 {
                prop_assert!(*start >= end);
                end = start + u64::from(written.bytes);
            }
            let (start, bytes) = list[list.len() - 1];
            prop_assert_eq!(ranges.0.get(&start), Some(&written(bytes)));
        }

        #[test]
        fn any_content_is_read_without_a_panic(tail in prop::collection::vec(any::<u8>(), 0..100), head in any::<bool>()) {
            let mut content = if head { serde_json::to_vec(&super::head(&entry(9), None)).unwrap() } else { vec![] };
            content.push(b'\n');
            content.extend(&tail);
            if let Some((_, _, sound)) = parse(&content, &entry(9)) {
                prop_assert!(sound as usize <= content.len());
            }
        }
    }
}
