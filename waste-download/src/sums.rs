//! Checksums, on a thread of their own beside whatever brings the bytes.

use std::fmt::Write;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use bytes::Bytes;
use sha1::Sha1;
use sha2::{Digest as _, Sha256};
use waste_common::files::FileError;

use crate::error::DownloadError;
use crate::hub::{Digest, Entry};
use crate::wait::Stop;

/// Pieces that wait to be hashed at most.
const WAITING_MAX: usize = 16;
/// Bytes read from a file at once.
const PIECE: usize = 1 << 20;

/// The checksums of a content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sums {
    pub sha256: String,
    /// Only of small files.
    git_blob: Option<String>,
}

impl Sums {
    /// The checksum of the kind the hub gives for `entry`.
    pub fn found(&self, entry: &Entry) -> &str {
        match (&entry.digest, &self.git_blob) {
            (Digest::GitBlob(_), Some(found)) => found,
            _ => &self.sha256,
        }
    }

    /// Whether the content is what the hub says.
    pub fn fit(&self, entry: &Entry) -> bool {
        let (Digest::Sha256(expected) | Digest::GitBlob(expected)) = &entry.digest;
        self.found(entry) == expected
    }
}

/// A content that is being hashed, from its beginning.
pub(crate) struct Hashing {
    pieces: SyncSender<Bytes>,
    thread: JoinHandle<Sums>,
}

impl Hashing {
    pub fn start(entry: &Entry) -> Hashing {
        let (pieces, receiver) = sync_channel::<Bytes>(WAITING_MAX);
        let mut sha256 = Sha256::new();
        let mut git = matches!(entry.digest, Digest::GitBlob(_))
            .then(|| Sha1::new_with_prefix(format!("blob {}\0", entry.size)));
        let thread = std::thread::spawn(move || {
            for piece in receiver {
                sha256.update(&piece);
                if let Some(git) = &mut git {
                    git.update(&piece);
                }
            }
            Sums { sha256: hex(&sha256.finalize()), git_blob: git.map(|git| hex(&git.finalize())) }
        });
        Hashing { pieces, thread }
    }

    /// Takes the next piece. A thread that is gone is noticed at the end.
    pub fn update(&self, piece: Bytes) {
        let _ = self.pieces.send(piece);
    }

    pub fn finish(self) -> Result<Sums, DownloadError> {
        drop(self.pieces);
        self.thread.join().map_err(|_| DownloadError::Internal("the thread of checksums has died".to_owned()))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The checksums of a whole file; `read` is told of every piece.
pub(crate) fn of_file(
    path: &Path,
    entry: &Entry,
    stop: &Stop,
    mut read: impl FnMut(u64),
) -> Result<Sums, DownloadError> {
    let mut file = File::open(path).map_err(FileError::io("open", path))?;
    let hashing = Hashing::start(entry);
    loop {
        stop.check()?;
        let piece = piece(&mut file, PIECE).map_err(FileError::io("read", path))?;
        if piece.is_empty() {
            return hashing.finish();
        }
        read(piece.len() as u64);
        hashing.update(piece);
    }
}

/// The next bytes of a file, `max` of them unless it ends.
pub(crate) fn piece(file: &mut File, max: usize) -> io::Result<Bytes> {
    let mut bytes = Vec::with_capacity(max);
    file.take(max as u64).read_to_end(&mut bytes)?;
    Ok(bytes.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_git_and_of_sha256sum() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, "hello\n").unwrap();
        let small = Entry {
            name: "f".to_owned(),
            size: 6,
            digest: Digest::GitBlob("ce013625030ba8dba906f756967f9e9ca394464a".to_owned()),
        };
        let sha256 = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03".to_owned();
        let large = Entry { digest: Digest::Sha256(sha256.clone()), ..small.clone() };
        let of = |entry: &Entry| of_file(&path, entry, &Stop::default(), |_| {}).unwrap();
        assert_eq!(of(&small).sha256, sha256);
        assert!(of(&small).fit(&small) && of(&large).fit(&large));
        let other = Entry { size: 7, ..small };
        assert!(!of(&other).fit(&other));
    }
}
