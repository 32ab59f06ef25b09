//! The file of answers: a line for each, durable as soon as it is written, and the ids of those that are there.

use std::collections::HashSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use waste_common::cli::{Exit, Failure};

/// Longest line of an answer that is read again.
const LINE_BYTES_MAX: u64 = 256 << 20;

/// The file, locked for as long as this lives.
pub struct Results {
    path: PathBuf,
    file: File,
    /// Ids with an answer.
    pub finished: HashSet<String>,
}

#[derive(Deserialize)]
struct Known {
    id: String,
}

impl Results {
    /// Opens or creates the file. What a kill left of a last line is cut off.
    ///
    /// # Errors
    /// Another process writes it, it cannot be written, or holds something else.
    pub fn open(path: &Path) -> Result<Results, Failure> {
        let failed = |doing: &str, error: std::io::Error| {
            Failure::data("unwritable_file", format!("cannot {doing} {}: {error}", path.display()))
        };
        if std::fs::metadata(path).is_ok_and(|meta| !meta.is_file()) {
            return Err(Failure::data("not_a_file", format!("{} is no regular file", path.display())));
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(path).map_err(|error| failed("open", error))?;
        match file.try_lock() {
            Ok(()) => (),
            Err(TryLockError::WouldBlock) => {
                let message = format!("another process writes {}", path.display());
                return Err(Failure::new(Exit::Locked, "locked", message));
            }
            Err(TryLockError::Error(error)) => return Err(failed("lock", error)),
        }
        let mut finished = HashSet::new();
        let mut whole = 0u64;
        let mut reader = BufReader::new(&file);
        for number in 1.. {
            let mut line = Vec::new();
            let read = std::io::Read::take(&mut reader, LINE_BYTES_MAX).read_until(b'\n', &mut line);
            let read = read.map_err(|error| failed("read", error))?;
            if line.last() != Some(&b'\n') {
                if read as u64 == LINE_BYTES_MAX {
                    return Err(not_ours(path, number));
                }
                break;
            }
            let known: Known = serde_json::from_slice(&line).map_err(|_| not_ours(path, number))?;
            finished.insert(known.id);
            whole += read as u64;
        }
        file.set_len(whole).map_err(|error| failed("write", error))?;
        file.seek(SeekFrom::Start(whole)).map_err(|error| failed("write", error))?;
        Ok(Results { path: path.to_owned(), file, finished })
    }

    /// Appends an answer.
    ///
    /// # Errors
    /// It cannot be written; what of it is in the file is cut off by the next run.
    pub fn append(&mut self, answer: &impl Serialize) -> Result<(), Failure> {
        let mut line = serde_json::to_vec(answer).map_err(|error| Failure::internal(error.to_string()))?;
        line.push(b'\n');
        let written = self.file.write_all(&line).and_then(|()| self.file.sync_data());
        written.map_err(|error| {
            let exit = match error.kind() {
                std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => Exit::Space,
                _ => Exit::Data,
            };
            Failure::new(exit, "unwritable_file", format!("cannot write {}: {error}", self.path.display()))
        })
    }
}

fn not_ours(path: &Path, line: usize) -> Failure {
    let message = format!(
        "{}, line {line}: no answer of this tool; it was left as it is, use another file",
        path.display()
    );
    Failure::data("invalid_answers", message)
}
