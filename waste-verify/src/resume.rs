//! What an earlier run has found sound, so that one that was interrupted goes on where it stopped. A file counts only
//! as long as its size and its time of change are what they were.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};
use waste_common::cli::Failure;
use waste_common::files::write_atomic;
use waste_common::json;

const VERSION: u32 = 1;

/// The state, and where it is kept.
#[derive(Debug)]
pub(crate) struct Resume {
    dir: PathBuf,
    /// None: in memory only.
    path: Option<PathBuf>,
    state: Mutex<State>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct State {
    version: u32,
    manifest_sha256: String,
    /// What was found sound was read from the disk.
    #[serde(default)]
    from_disk: bool,
    files: BTreeMap<String, Known>,
}

/// A file, and what is known of it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Known {
    bytes: u64,
    modified_ns: u64,
    sound: bool,
    sha256: Option<String>,
}

impl Resume {
    /// Reads the state of an earlier run on the same container, or begins one. What was found sound in memory does not
    /// count where all is to be read from the disk.
    ///
    /// # Errors
    /// The file is there, but is no such state (exit 3).
    pub fn open(
        dir: &Path,
        path: Option<&Path>,
        manifest_sha256: &str,
        from_disk: bool,
    ) -> Result<Resume, Failure> {
        let fresh = || State {
            version: VERSION,
            manifest_sha256: manifest_sha256.to_owned(),
            from_disk,
            files: BTreeMap::new(),
        };
        let state = match path {
            Some(path) if path.exists() => read(path)?,
            _ => fresh(),
        };
        // Of another container, or of what this one was before, or of less.
        let counts = state.manifest_sha256 == manifest_sha256 && (state.from_disk || !from_disk);
        let mut state = if counts { state } else { fresh() };
        state.from_disk &= from_disk;
        Ok(Resume { dir: dir.to_owned(), path: path.map(Path::to_owned), state: Mutex::new(state) })
    }

    /// Whether a file has been found sound and has not changed since.
    pub fn is_sound(&self, file: &str) -> bool {
        self.known(file).is_some_and(|known| known.sound)
    }

    /// The SHA-256 of a file that has not changed since it was computed.
    pub fn sha256(&self, file: &str) -> Option<String> {
        self.known(file)?.sha256
    }

    fn known(&self, file: &str) -> Option<Known> {
        let (bytes, modified_ns) = self.look(file)?;
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let known = state.files.get(file)?;
        (known.bytes == bytes && known.modified_ns == modified_ns).then(|| known.clone())
    }

    fn look(&self, file: &str) -> Option<(u64, u64)> {
        let meta = std::fs::metadata(self.dir.join(file)).ok()?;
        let modified = meta.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        Some((meta.len(), u64::try_from(modified.as_nanos()).ok()?))
    }

    /// A file has been found sound.
    pub fn sound(&self, file: &str) -> Result<(), Failure> {
        self.note(file, |known| known.sound = true)
    }

    /// The SHA-256 of a file has been computed.
    pub fn digest(&self, file: &str, sha256: &str) -> Result<(), Failure> {
        self.note(file, |known| known.sha256 = Some(sha256.to_owned()))
    }

    fn note(&self, file: &str, change: impl FnOnce(&mut Known)) -> Result<(), Failure> {
        let Some((bytes, modified_ns)) = self.look(file) else { return Ok(()) };
        let mut known = self.known(file).unwrap_or(Known { bytes, modified_ns, ..Known::default() });
        change(&mut known);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.files.insert(file.to_owned(), known);
        let Some(path) = &self.path else { return Ok(()) };
        let content = serde_json::to_vec(&*state).map_err(|error| Failure::internal(error.to_string()))?;
        Ok(write_atomic(path, &content)?)
    }

    /// The end: the next run begins anew.
    pub fn finish(self) -> Result<(), Failure> {
        match self.path.as_deref().map(std::fs::remove_file) {
            Some(Err(error)) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Failure::data("file_error", format!("cannot remove the state of --resume: {error}")))
            }
            _ => Ok(()),
        }
    }
}

fn read(path: &Path) -> Result<State, Failure> {
    let bad = |problem: String| {
        let message =
            format!("{} is no state of --resume ({problem}); remove it to begin anew", path.display());
        Failure::data("bad_state", message).with("file", path.display().to_string())
    };
    let value = json::read(path, json::MANIFEST_BYTES_MAX)?;
    let state = State::deserialize(value).map_err(|error| bad(error.to_string()))?;
    if state.version == VERSION { Ok(state) } else { Err(bad(format!("version {}", state.version))) }
}
