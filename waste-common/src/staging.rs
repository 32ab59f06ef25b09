//! What waste-download and `waste-convert --follow` tell each other in the directory of a checkpoint that is being
//! fetched: which files are there for good, which are wanted first, and which have been used up.
//!
//! Each file has one writer and appears whole or not at all, so the other side may read it at any time.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::container::check_file_name;
use crate::error::{Coded, Exit};
use crate::files::{FileError, write_atomic};
use crate::json::{self, JsonError, MANIFEST_BYTES_MAX};

/// Written by waste-download: a [`State`].
pub const STATE: &str = ".waste-download.json";
/// Written by waste-convert: the files it wants, the first one first, one name a line.
pub const ORDER: &str = ".waste-order";
/// Written by waste-convert before it removes a file it needs no more: their names, one a line. waste-download does
/// not fetch them again.
pub const RECLAIMED: &str = ".waste-reclaimed";

const VERSION: u64 = 1;
/// Most bytes of a relative name.
const NAME_BYTES_MAX: usize = 1024;

/// Why a file of the staging directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum StagingError {
    #[error(transparent)]
    Json(#[from] JsonError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{}: version {found} is not understood (1 is): use the tools of one release", path.display())]
    Version { path: PathBuf, found: String },
    #[error("{}: {problem}", path.display())]
    Content { path: PathBuf, problem: String },
}

impl Coded for StagingError {
    fn exit(&self) -> Exit {
        match self {
            StagingError::Json(error) => error.exit(),
            StagingError::File(error) => error.exit(),
            _ => Exit::Data,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            StagingError::Json(error) => error.code(),
            StagingError::File(error) => error.code(),
            StagingError::Version { .. } => "state_version",
            StagingError::Content { .. } => "bad_state",
        }
    }

    fn fields(&self) -> Map<String, Value> {
        match self {
            StagingError::File(error) => error.fields(),
            StagingError::Json(_) => Map::new(),
            StagingError::Version { path, .. } | StagingError::Content { path, .. } => {
                Map::from_iter([("file".to_owned(), path.display().to_string().into())])
            }
        }
    }
}

/// What is known of a download: where from, and how far each file has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    version: u64,
    /// The repository, `owner/name`.
    pub repo: String,
    /// The revision that was asked for, such as a branch; the commit is what it was then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// The commit all files are of.
    pub commit: String,
    /// Every file that was chosen, by its relative name with `/` between the parts.
    pub files: BTreeMap<String, FileState>,
}

/// How far one file has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileState {
    /// Its length when it is whole.
    pub size: u64,
    /// Its SHA-256, lower-case hex. None for a small file that has not been fetched yet: the hub does not tell theirs.
    pub sha256: Option<String>,
    /// True once its content is durable and has been found right.
    pub done: bool,
}

impl State {
    /// A download of nothing yet.
    pub fn new(repo: &str, revision: Option<&str>, commit: &str) -> State {
        State {
            version: VERSION,
            repo: repo.to_owned(),
            revision: revision.map(str::to_owned),
            commit: commit.to_owned(),
            files: BTreeMap::new(),
        }
    }

    /// Reads the state of the download into `dir`; None if there never was one.
    ///
    /// # Errors
    /// It cannot be read, is of another version, or names what is no file below `dir`.
    pub fn read(dir: &Path) -> Result<Option<State>, StagingError> {
        let path = dir.join(STATE);
        let Some(content) = read_if_there(&path)? else { return Ok(None) };
        State::parse(&path, &content).map(Some)
    }

    fn parse(path: &Path, content: &[u8]) -> Result<State, StagingError> {
        let bad = |problem: String| StagingError::Content { path: path.to_owned(), problem };
        let value = json::parse(path, content)?;
        // The version first: another one may look different in every other respect.
        match value.get("version") {
            Some(found) if found.as_u64() == Some(VERSION) => {}
            Some(found) => {
                return Err(StagingError::Version { path: path.to_owned(), found: found.to_string() });
            }
            None => return Err(bad("it has no version".to_owned())),
        }
        let state = State::deserialize(value).map_err(|error| bad(error.to_string()))?;
        for (name, file) in &state.files {
            check_relative_name(name).map_err(|problem| bad(format!("the name {name:?} {problem}")))?;
            match &file.sha256 {
                Some(sum) if !is_sha256(sum) => return Err(bad(format!("{name}: {sum:?} is no SHA-256"))),
                None if file.done => return Err(bad(format!("{name} is done, but has no SHA-256"))),
                _ => {}
            }
        }
        Ok(state)
    }

    /// Writes the state, durably.
    ///
    /// # Errors
    /// The disk is full, or the system reports an error.
    pub fn write(&self, dir: &Path) -> Result<(), StagingError> {
        let path = dir.join(STATE);
        let mut content = serde_json::to_vec(self)
            .map_err(|error| StagingError::Content { path: path.clone(), problem: error.to_string() })?;
        content.push(b'\n');
        Ok(write_shared(&path, &content)?)
    }

    /// Whether a file is there for good.
    pub fn is_done(&self, name: &str) -> bool {
        self.files.get(name).is_some_and(|file| file.done)
    }
}

/// Reads a list of names (see [`ORDER`] and [`RECLAIMED`]), each once, in its order; None if there is no such file.
///
/// # Errors
/// It cannot be read, or a line is no relative name.
pub fn read_names(path: &Path) -> Result<Option<Vec<String>>, StagingError> {
    let Some(content) = read_if_there(path)? else { return Ok(None) };
    let bad = |problem: String| StagingError::Content { path: path.to_owned(), problem };
    let text = std::str::from_utf8(&content).map_err(|_| bad("it is not UTF-8".to_owned()))?;
    let mut seen = HashSet::new();
    let mut names = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        check_relative_name(line)
            .map_err(|problem| bad(format!("line {}: the name {line:?} {problem}", number + 1)))?;
        if seen.insert(line) {
            names.push(line.to_owned());
        }
    }
    Ok(Some(names))
}

/// Writes a list of names, durably.
///
/// # Errors
/// A name is no relative one, the disk is full, or the system reports an error.
pub fn write_names<'a>(path: &Path, names: impl IntoIterator<Item = &'a str>) -> Result<(), StagingError> {
    let mut text = String::new();
    for name in names {
        check_relative_name(name).map_err(|problem| StagingError::Content {
            path: path.to_owned(),
            problem: format!("the name {name:?} {problem}"),
        })?;
        text.push_str(name);
        text.push('\n');
    }
    Ok(write_shared(path, text.as_bytes())?)
}

/// Whether `name` is a path below a directory, with `/` between its parts, that every system can have.
///
/// # Errors
/// What is wrong with it, to be put behind the name.
pub fn check_relative_name(name: &str) -> Result<(), &'static str> {
    if name.len() > NAME_BYTES_MAX {
        return Err("has more than 1024 bytes");
    }
    // An absolute name begins with an empty part.
    name.split('/').try_for_each(check_file_name)
}

/// Whether a text is a SHA-256 in lower-case hex.
pub fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>, JsonError> {
    match json::read_bounded(path, MANIFEST_BYTES_MAX) {
        Ok(content) => Ok(Some(content)),
        Err(JsonError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes a file that another process may be reading: Windows does not replace it in that moment.
fn write_shared(path: &Path, content: &[u8]) -> Result<(), FileError> {
    let mut tries = if cfg!(windows) { 50 } else { 0 };
    loop {
        match write_atomic(path, content) {
            Err(FileError::Io { source, .. })
                if tries > 0 && source.kind() == std::io::ErrorKind::PermissionDenied =>
            {
                tries -= 1;
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn state() -> State {
        let mut state = State::new("moonshotai/Kimi-K3", Some("main"), &"a".repeat(40));
        let file = |size, done: bool| FileState { size, sha256: done.then(|| "0".repeat(64)), done };
        state.files.insert("config.json".to_owned(), file(12, false));
        state.files.insert("sub/model.safetensors".to_owned(), file(1 << 40, true));
        state
    }

    #[test]
    fn a_state_is_read_back_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(State::read(dir.path()).unwrap(), None);
        state().write(dir.path()).unwrap();
        let read = State::read(dir.path()).unwrap().unwrap();
        assert_eq!(read, state());
        assert!(read.is_done("sub/model.safetensors") && !read.is_done("config.json"));
        assert!(!read.is_done("other"));
    }

    #[test]
    fn the_form_is_the_one_agreed_on() {
        let text = format!(
            r#"{{"version":1,"repo":"o/n","commit":"c","files":{{"a":{{"size":1,"sha256":"{}","done":true}}}}}}"#,
            "f".repeat(64)
        );
        let state = State::parse(Path::new(STATE), text.as_bytes()).unwrap();
        assert!(state.is_done("a") && state.revision.is_none());
        assert_eq!(serde_json::to_string(&state).unwrap(), text);
    }

    #[test]
    fn other_versions_and_bad_content_are_refused() {
        let file = |name: &str, sum: &str, done: bool| {
            format!(
                r#"{{"version":1,"repo":"r","commit":"c","files":{{"{name}":{{"size":1,"sha256":{sum},"done":{done}}}}}}}"#
            )
        };
        for (text, code) in [
            (r#"{"version":2}"#.to_owned(), "state_version"),
            (r#"{"version":"1"}"#.to_owned(), "state_version"),
            ("{}".to_owned(), "bad_state"),
            ("[1]".to_owned(), "bad_state"),
            (r#"{"version":1}"#.to_owned(), "bad_state"),
            ("{".to_owned(), "invalid_json"),
            (file("../a", "null", false), "bad_state"),
            (file("/a", "null", false), "bad_state"),
            (file("a//b", "null", false), "bad_state"),
            (file("a", "\"abc\"", false), "bad_state"),
            (file("a", "null", true), "bad_state"),
        ] {
            let error = State::parse(Path::new("x"), text.as_bytes()).unwrap_err();
            assert_eq!((error.exit(), error.code()), (Exit::Data, code), "{text}: {error}");
        }
    }

    #[test]
    fn names_are_read_in_their_order_and_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(ORDER);
        assert_eq!(read_names(&path).unwrap(), None);
        std::fs::write(&path, "b\r\n\na/c\nb\n").unwrap();
        assert_eq!(read_names(&path).unwrap().unwrap(), ["b", "a/c"]);
        write_names(&path, ["x", "y/z"]).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"x\ny/z\n");
        assert!(write_names(&path, ["a\nb"]).is_err());
        for bad in [&b"a\n../b\n"[..], b"/etc/passwd\n", b"c:x\n", b"\xff\n"] {
            std::fs::write(&path, bad).unwrap();
            assert_eq!(read_names(&path).unwrap_err().code(), "bad_state");
        }
    }

    proptest! {
        #[test]
        fn an_accepted_name_stays_below_its_directory(name in "[a-z./\\\\: ]{0,12}") {
            if check_relative_name(&name).is_ok() {
                let path = Path::new(&name);
                prop_assert!(path.components().all(|part| matches!(part, std::path::Component::Normal(_))));
                prop_assert!(!name.contains("..") && !name.starts_with('/'));
            }
        }
    }
}
