//! Files that survive an interruption: written beside their place, synced, renamed, the directory synced; and the
//! lock of a directory that is being written.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::{Coded, Exit};

/// The lock file of a directory.
pub const LOCK_NAME: &str = ".waste.lock";

/// Why a file operation failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum FileError {
    #[error("cannot {doing} {}: {source}", path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("{} is a link or no regular file; nothing is written through it: remove it", path.display())]
    NotAFile { path: PathBuf },
    #[error("{} is a link or no directory; nothing is written beyond it: remove it", path.display())]
    NotADirectory { path: PathBuf },
    #[error(
        "{} is in use by {}; wait for it to end, or stop it",
        dir.display(),
        pid.map_or("another process".to_owned(), |pid| format!("process {pid}"))
    )]
    Locked { dir: PathBuf, pid: Option<u32> },
    #[error("{} is in use by another process; wait for it to end, or name another file", path.display())]
    InUse { path: PathBuf },
}

impl FileError {
    /// For `map_err`: names the operation and the path.
    pub fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
        move |source| FileError::Io { doing, path: path.to_owned(), source }
    }
}

impl Coded for FileError {
    fn exit(&self) -> Exit {
        match self {
            FileError::Io { source, .. } => match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Exit::Space,
                _ => Exit::Data,
            },
            FileError::NotAFile { .. } | FileError::NotADirectory { .. } => Exit::Data,
            FileError::Locked { .. } | FileError::InUse { .. } => Exit::Locked,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            FileError::Io { .. } if self.exit() == Exit::Space => "disk_full",
            FileError::Io { .. } => "file_error",
            FileError::NotAFile { .. } => "not_a_file",
            FileError::NotADirectory { .. } => "not_a_directory",
            FileError::Locked { .. } | FileError::InUse { .. } => "locked",
        }
    }

    fn fields(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        match self {
            FileError::Io { path, .. }
            | FileError::NotAFile { path }
            | FileError::NotADirectory { path }
            | FileError::InUse { path } => {
                fields.insert("file".into(), path.display().to_string().into());
            }
            FileError::Locked { dir, pid } => {
                fields.insert("directory".into(), dir.display().to_string().into());
                fields.insert("pid".into(), (*pid).into());
            }
        }
        fields
    }
}

/// A file that appears under its name whole or not at all. Dropped before [`AtomicFile::commit`], it leaves nothing.
#[derive(Debug)]
pub struct AtomicFile {
    path: PathBuf,
    tmp: PathBuf,
    /// `None` once committed.
    writer: Option<BufWriter<File>>,
}

impl AtomicFile {
    /// Starts `path`, as `path.tmp` in the same directory; a leftover of that name is replaced. A link of that name
    /// is refused: it is none of ours, and its target must not be written.
    pub fn create(path: &Path) -> Result<Self, FileError> {
        let mut tmp = path.as_os_str().to_owned();
        tmp.push(".tmp");
        let tmp = PathBuf::from(tmp);
        if regular_or_absent(&tmp)? {
            fs::remove_file(&tmp).map_err(FileError::io("remove", &tmp))?;
        }
        // New, so never through a link that was planted since.
        let file = File::create_new(&tmp).map_err(FileError::io("create", &tmp))?;
        Ok(AtomicFile { path: path.to_owned(), tmp, writer: Some(BufWriter::with_capacity(1 << 20, file)) })
    }

    /// The name it will have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends bytes.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        self.write_all(bytes).map_err(FileError::io("write", &self.tmp))
    }

    /// Syncs the content, renames it into place and syncs the directory.
    pub fn commit(mut self) -> Result<(), FileError> {
        if let Some(mut writer) = self.writer.take() {
            let synced = writer.flush().and_then(|()| writer.get_ref().sync_all());
            // Closed first: Windows does not like renaming open files.
            drop(writer);
            let renamed = synced
                .and_then(|()| step())
                .map_err(FileError::io("write", &self.tmp))
                .and_then(|()| fs::rename(&self.tmp, &self.path).map_err(FileError::io("rename", &self.tmp)));
            if renamed.is_err() {
                let _ = fs::remove_file(&self.tmp);
            }
            renamed?;
        }
        sync_dir(parent(&self.path))
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.writer {
            Some(writer) => writer.write(bytes),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.as_mut().map_or(Ok(()), Write::flush)
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if let Some(writer) = self.writer.take() {
            // What is buffered need not reach the disk any more.
            drop(writer.into_parts());
            let _ = fs::remove_file(&self.tmp);
        }
    }
}

/// Writes a whole small file atomically and durably.
pub fn write_atomic(path: &Path, content: &[u8]) -> Result<(), FileError> {
    let mut file = AtomicFile::create(path)?;
    file.append(content)?;
    file.commit()
}

/// Makes renames and removals in `dir` durable. Windows has no such operation, and needs none.
pub fn sync_dir(dir: &Path) -> Result<(), FileError> {
    if !cfg!(windows) {
        File::open(dir).and_then(|dir| dir.sync_all()).map_err(FileError::io("sync directory", dir))?;
    }
    step().map_err(FileError::io("sync directory", dir))
}

/// Where something becomes durable. Builds for tests die at the step whose number is in `WASTE_ABORT_AT_STEP`, or find
/// the disk full at the one in `WASTE_FULL_AT_STEP`.
fn step() -> io::Result<()> {
    #[cfg(debug_assertions)]
    {
        static STEPS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let number = (STEPS.fetch_add(1, std::sync::atomic::Ordering::SeqCst) + 1).to_string();
        let here = |key| std::env::var(key).is_ok_and(|at| at == number);
        if here("WASTE_ABORT_AT_STEP") {
            std::process::abort();
        }
        if here("WASTE_FULL_AT_STEP") {
            return Err(io::ErrorKind::StorageFull.into());
        }
    }
    Ok(())
}

/// Whether there is a regular file of this name; a link or anything else is an error.
fn regular_or_absent(path: &Path) -> Result<bool, FileError> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_file() => Ok(true),
        Ok(_) => Err(FileError::NotAFile { path: path.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(FileError::io("look at", path)(error)),
    }
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}

/// Exclusive use of a directory, by an advisory lock that ends with the process.
#[derive(Debug)]
pub struct DirLock {
    dir: PathBuf,
    file: File,
}

impl DirLock {
    /// Locks `dir`, or says which process holds it. A lock file that is a link is refused, its target left alone.
    pub fn acquire(dir: &Path) -> Result<Self, FileError> {
        let path = dir.join(LOCK_NAME);
        regular_or_absent(&pid_path(dir))?;
        let Some(file) = lock(&path)? else {
            return Err(FileError::Locked { dir: dir.to_owned(), pid: read_pid(dir) });
        };
        let lock = DirLock { dir: dir.to_owned(), file };
        lock.write_pid().map_err(FileError::io("write", &path))?;
        Ok(lock)
    }

    fn write_pid(&self) -> io::Result<()> {
        let pid = std::process::id().to_string();
        if cfg!(windows) {
            return fs::write(pid_path(&self.dir), pid);
        }
        self.file.set_len(0)?;
        (&self.file).write_all(pid.as_bytes())
    }
}

impl Drop for DirLock {
    fn drop(&mut self) {
        let _ = fs::remove_file(pid_path(&self.dir));
        let _ = self.file.unlock();
    }
}

/// Exclusive use of a file that is read and later replaced, by a lock beside it that ends with the process.
#[derive(Debug)]
pub struct FileLock {
    path: PathBuf,
    file: File,
}

impl FileLock {
    /// Locks the file, which need not exist, or says that another process holds it.
    pub fn acquire(path: &Path) -> Result<Self, FileError> {
        let mut name = path.as_os_str().to_owned();
        // `Cargo` must not meet `Cargo.lock`.
        name.push(".waste-lock");
        let beside = PathBuf::from(name);
        match lock(&beside)? {
            Some(file) => Ok(FileLock { path: beside, file }),
            None => Err(FileError::InUse { path: path.to_owned() }),
        }
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Only where `lock` sees that a file it opened has been removed; and never what somebody has written.
        if cfg!(unix) && self.file.metadata().is_ok_and(|meta| meta.len() == 0) {
            let _ = fs::remove_file(&self.path);
        }
        let _ = self.file.unlock();
    }
}

/// Locks the file of this name, which is created, or gives nothing if another process holds it. A link is refused.
fn lock(path: &Path) -> Result<Option<File>, FileError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, rustix::fs::OFlags::NOFOLLOW.bits() as i32);
    loop {
        regular_or_absent(path)?;
        let file = options.open(path).map_err(FileError::io("open", path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(source)) => return Err(FileError::io("lock", path)(source)),
        }
        // The last holder may have removed the file between open and lock: then this lock protects nothing.
        if is_current(&file, path) {
            return Ok(Some(file));
        }
    }
}

/// Where the holder's pid stands. On Windows a locked file cannot be read by others, so it has its own.
fn pid_path(dir: &Path) -> PathBuf {
    dir.join(if cfg!(windows) { ".waste.lock.pid" } else { LOCK_NAME })
}

fn read_pid(dir: &Path) -> Option<u32> {
    let mut text = String::new();
    File::open(pid_path(dir)).ok()?.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

#[cfg(unix)]
fn is_current(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), fs::metadata(path)) {
        (Ok(held), Ok(named)) => (held.dev(), held.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}

/// Elsewhere the lock file is never removed.
#[cfg(not(unix))]
fn is_current(_: &File, _: &Path) -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_locked_file_is_refused_until_its_holder_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let held = FileLock::acquire(&path).unwrap();
        let error = FileLock::acquire(&path).unwrap_err();
        assert!(matches!(&error, FileError::InUse { path: named } if *named == path), "{error}");
        assert_eq!((error.exit(), error.code()), (Exit::Locked, "locked"));
        drop(held);
        drop(FileLock::acquire(&path).unwrap());
        assert!(cfg!(windows) || names(dir.path()).is_empty(), "{:?}", names(dir.path()));
    }

    #[test]
    fn a_lock_removes_no_file_of_somebody_elses() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["Cargo.lock", "Cargo.waste-lock"] {
            fs::write(dir.path().join(name), "mine").unwrap();
        }
        drop(FileLock::acquire(&dir.path().join("Cargo")).unwrap());
        for name in ["Cargo.lock", "Cargo.waste-lock"] {
            assert_eq!(fs::read(dir.path().join(name)).unwrap(), b"mine", "{name}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_lock_is_not_made_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), dir.path().join("s.waste-lock")).unwrap();
        assert!(matches!(FileLock::acquire(&path), Err(FileError::NotAFile { .. })));
        assert!(!dir.path().join("elsewhere").exists());
    }

    fn names(dir: &Path) -> Vec<String> {
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn an_abandoned_file_leaves_the_old_one_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        write_atomic(&path, b"old").unwrap();
        let mut file = AtomicFile::create(&path).unwrap();
        file.append(&[7; 3 << 20]).unwrap();
        drop(file);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(dir.path()), ["a.json"]);
    }

    #[test]
    fn a_commit_replaces_the_whole_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        write_atomic(&path, b"a longer old content").unwrap();
        write_atomic(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(dir.path()), ["a.json"]);
    }

    #[test]
    fn a_failed_rename_keeps_what_stands_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("x"), b"x").unwrap();
        assert!(write_atomic(&path, b"new").is_err());
        assert_eq!(names(dir.path()), ["a"]);
        assert!(path.join("x").exists());
    }

    #[cfg(unix)]
    #[test]
    fn a_planted_lock_link_is_refused_and_its_target_kept() {
        let dir = tempfile::tempdir().unwrap();
        let victim = tempfile::NamedTempFile::new().unwrap();
        fs::write(victim.path(), b"precious").unwrap();
        std::os::unix::fs::symlink(victim.path(), dir.path().join(LOCK_NAME)).unwrap();
        let error = DirLock::acquire(dir.path()).unwrap_err();
        assert!(matches!(&error, FileError::NotAFile { path } if path.ends_with(LOCK_NAME)), "{error}");
        assert_eq!(fs::read(victim.path()).unwrap(), b"precious");
    }

    #[cfg(unix)]
    #[test]
    fn a_planted_tmp_link_is_refused_and_its_target_kept() {
        let dir = tempfile::tempdir().unwrap();
        let victim = tempfile::NamedTempFile::new().unwrap();
        fs::write(victim.path(), b"precious").unwrap();
        std::os::unix::fs::symlink(victim.path(), dir.path().join("a.json.tmp")).unwrap();
        let dangling = dir.path().join("b.json.tmp");
        std::os::unix::fs::symlink(dir.path().join("nowhere"), dangling).unwrap();
        for name in ["a.json", "b.json"] {
            let error = write_atomic(&dir.path().join(name), b"new").unwrap_err();
            assert!(matches!(error, FileError::NotAFile { .. }), "{error}");
        }
        assert_eq!(fs::read(victim.path()).unwrap(), b"precious");
        assert!(!dir.path().join("nowhere").exists());
    }

    #[test]
    fn a_leftover_of_an_earlier_run_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        fs::write(dir.path().join("a.json.tmp"), b"a longer leftover").unwrap();
        write_atomic(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(dir.path()), ["a.json"]);
    }

    #[test]
    fn the_second_lock_names_the_holder() {
        let dir = tempfile::tempdir().unwrap();
        let lock = DirLock::acquire(dir.path()).unwrap();
        let error = DirLock::acquire(dir.path()).unwrap_err();
        assert!(matches!(error, FileError::Locked { pid: Some(pid), .. } if pid == std::process::id()));
        assert_eq!(error.exit(), Exit::Locked);
        drop(lock);
        if cfg!(unix) {
            assert!(names(dir.path()).is_empty());
        }
        DirLock::acquire(dir.path()).unwrap();
    }
}
