//! The models and vectors of this package, and copies of them to damage.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use crate::tool::{arg, run};

/// A path below the `tests` folder, wherever the test that asks stands.
///
/// # Panics
/// There is nothing. (Tests only.)
pub fn data(relative: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(relative);
    assert!(path.exists(), "{} is missing", path.display());
    path
}

/// A JSON file below the `tests` folder.
///
/// # Panics
/// It cannot be read. (Tests only.)
pub fn json(relative: &str) -> Value {
    let path = data(relative);
    let text = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A model in a directory that goes with it.
#[derive(Debug)]
pub struct Model {
    _home: TempDir,
    /// Where it is.
    pub dir: PathBuf,
}

impl Model {
    /// An empty directory called `name`.
    ///
    /// # Panics
    /// It cannot be made. (Tests only.)
    pub fn empty(name: &str) -> Model {
        let home = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        let dir = home.path().join(name);
        fs::create_dir(&dir).unwrap_or_else(|error| panic!("{error}"));
        Model { _home: home, dir }
    }

    /// A copy of a model below the `tests` folder.
    ///
    /// # Panics
    /// It cannot be copied. (Tests only.)
    pub fn copy(relative: &str) -> Model {
        let model = Model::empty("copy.waste");
        let entries = fs::read_dir(data(relative)).unwrap_or_else(|error| panic!("{error}"));
        for entry in entries {
            let entry = entry.unwrap_or_else(|error| panic!("{error}"));
            // Not `copy`: the copies must be writable.
            model.set(arg(Path::new(&entry.file_name())), &read(&entry.path()));
        }
        model
    }

    /// A checkpoint below the `tests` folder, converted by waste-convert in its usual format, quickly.
    ///
    /// # Panics
    /// It cannot be. (Tests only.)
    pub fn converted(relative: &str) -> Model {
        let model = Model::empty("model.waste");
        run("waste-convert", [arg(&data(relative)), arg(&model.dir), "--effort", "fast", "-q"]).done();
        model
    }

    /// A file in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A file beside it.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.dir.with_file_name(name)
    }

    /// The directory as an argument.
    pub fn arg(&self) -> &str {
        arg(&self.dir)
    }

    /// A file's content.
    ///
    /// # Panics
    /// It cannot be read. (Tests only.)
    pub fn read(&self, name: &str) -> Vec<u8> {
        read(&self.path(name))
    }

    /// Writes a file.
    ///
    /// # Panics
    /// It cannot be written. (Tests only.)
    pub fn set(&self, name: &str, content: &[u8]) {
        fs::write(self.path(name), content).unwrap_or_else(|error| panic!("{name}: {error}"));
    }

    /// Changes a JSON file. (A container's manifest.sha256 is removed: it would notice before anything else.)
    ///
    /// # Panics
    /// It cannot be read or written. (Tests only.)
    pub fn edit(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        let mut value = serde_json::from_slice(&self.read(name)).unwrap_or_else(|error| panic!("{error}"));
        edit(&mut value);
        self.set(name, value.to_string().as_bytes());
        let _ = fs::remove_file(self.path("manifest.sha256"));
    }
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
