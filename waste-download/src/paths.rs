//! Where the files of a download lie: the finished ones under their names, the rest in a directory of its own.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use waste_common::files::{FileError, sync_dir};

/// The directory of what is not finished.
const PARTS: &str = ".waste-parts";

/// The places of one file.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    dest: PathBuf,
    name: String,
}

impl Places {
    /// `name` has been checked: it stays below `dest`.
    pub fn new(dest: &Path, name: &str) -> Places {
        Places { dest: dest.to_owned(), name: name.to_owned() }
    }

    /// Where the finished file stands.
    pub fn whole(&self) -> PathBuf {
        self.dest.join(&self.name)
    }

    fn unfinished(&self, kind: &str) -> PathBuf {
        self.dest.join(PARTS).join(format!("{}.{kind}", self.name))
    }

    /// What has come of it so far.
    pub fn part(&self) -> PathBuf {
        self.unfinished("part")
    }

    /// Which ranges that are.
    pub fn journal(&self) -> PathBuf {
        self.unfinished("journal")
    }

    /// Where a content that was found wrong is kept until the right one has come.
    pub fn bad(&self) -> PathBuf {
        self.unfinished("bad")
    }

    /// Makes the directories of the file and of what is unfinished of it.
    pub fn prepare(&self) -> Result<(), FileError> {
        self.make_parents(&self.part())?;
        self.make_parents(&self.whole())
    }

    /// Makes the directories between the destination and a file. A link among them would lead out of it.
    fn make_parents(&self, file: &Path) -> Result<(), FileError> {
        let dirs: Vec<&Path> = file
            .ancestors()
            .skip(1)
            .take_while(|dir| *dir != self.dest && dir.starts_with(&self.dest))
            .collect();
        for dir in dirs.into_iter().rev() {
            match fs::create_dir(dir) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(FileError::io("create", dir)(error));
                }
                _ => {}
            }
            if !fs::symlink_metadata(dir).map_err(FileError::io("look at", dir))?.is_dir() {
                return Err(FileError::NotADirectory { path: dir.to_owned() });
            }
        }
        Ok(())
    }

    /// Puts a wrong content aside.
    pub fn quarantine(&self, from: &Path) -> Result<PathBuf, FileError> {
        let bad = self.bad();
        fs::rename(from, &bad).map_err(FileError::io("move", from))?;
        Ok(bad)
    }

    /// Gives the part, which is durable, its name, durably.
    pub fn publish(&self) -> Result<(), FileError> {
        let (part, whole) = (self.part(), self.whole());
        self.make_parents(&whole)?;
        fs::rename(&part, &whole).map_err(FileError::io("rename", &part))?;
        self.settle()
    }

    /// Makes the finished file's name durable.
    pub fn settle(&self) -> Result<(), FileError> {
        let whole = self.whole();
        whole.ancestors().skip(1).take_while(|dir| dir.starts_with(&self.dest)).try_for_each(sync_dir)
    }

    /// Removes what is only of use until the file is finished.
    pub fn tidy(&self) -> Result<(), FileError> {
        for path in [self.journal(), self.part(), self.bad()] {
            remove(&path)?;
        }
        Ok(())
    }
}

/// Removes the directories of what was unfinished, as far as they are empty. None of them may be in use.
pub(crate) fn tidy(dest: &Path) {
    fn empty(dir: &Path) {
        // A link leads to what is not ours.
        if !fs::symlink_metadata(dir).is_ok_and(|found| found.is_dir()) {
            return;
        }
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            empty(&entry.path());
        }
        // Fails where something is left, and shall.
        let _ = fs::remove_dir(dir);
    }
    empty(&dest.join(PARTS));
}

/// Removes a file that may not be there.
pub(crate) fn remove(path: &Path) -> Result<(), FileError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(FileError::io("remove", path)(error)),
        _ => Ok(()),
    }
}

/// The length of a regular file; None if there is none of the name.
///
/// # Errors
/// It is a link or something else, or cannot be looked at.
pub(crate) fn length(path: &Path) -> Result<Option<u64>, FileError> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_file() => Ok(Some(meta.len())),
        Ok(_) => Err(FileError::NotAFile { path: path.to_owned() }),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(FileError::io("look at", path)(error)),
    }
}
