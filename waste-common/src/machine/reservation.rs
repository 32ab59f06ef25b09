//! What running engines have reserved, so that two of them do not each take the whole machine.
//!
//! Each engine keeps two files in the user's runtime directory: `PID-N.lock`, locked while the engine lives, and
//! `PID-N.json` with what it reserved (apart, because Windows lets nobody read a locked file). The system drops
//! the lock of a process that dies, however it dies; whoever looks next removes what it left. `lock` makes looking
//! and reserving one step.

use crate::error::{Coded, Exit};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What an engine reserved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReservationInfo {
    /// The process.
    pub pid: u32,
    /// The RAM, in bytes.
    pub bytes: u64,
    /// What for: the tool and the container.
    pub what: String,
}

/// The directory of reservations cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing} {}", path.display())]
pub struct ReservationError {
    doing: &'static str,
    path: PathBuf,
    source: io::Error,
}

impl Coded for ReservationError {
    fn exit(&self) -> Exit {
        Exit::Data
    }

    fn code(&self) -> &'static str {
        "reservation"
    }
}

/// A reservation, held until dropped.
#[derive(Debug)]
pub struct Reservation {
    info: ReservationInfo,
    /// `PID-N`, to which the endings are added.
    stem: PathBuf,
    /// Holds the lock.
    _lock: File,
}

/// The reservations of all running engines of this user, this process's own included.
///
/// # Errors
/// The directory of reservations cannot be used.
pub fn reserved() -> Result<Vec<ReservationInfo>, ReservationError> {
    Reservation::all_in(&directory())
}

impl Reservation {
    /// Reserve `bytes` of RAM.
    ///
    /// # Errors
    /// The directory of reservations cannot be used.
    pub fn take(bytes: u64, what: &str) -> Result<Reservation, ReservationError> {
        Reservation::take_in(&directory(), bytes, what)
    }

    /// [`take`](Self::take) in a directory of the caller's choice.
    ///
    /// # Errors
    /// The directory cannot be used.
    pub fn take_in(dir: &Path, bytes: u64, what: &str) -> Result<Reservation, ReservationError> {
        match Reservation::plan_in(dir, what, |_| Ok::<_, std::convert::Infallible>(bytes))? {
            Ok(reservation) => Ok(reservation),
        }
    }

    /// Look at the reservations of others and reserve what `plan` makes of them, in one step: of two engines that
    /// start together the second sees what the first took. `plan` should be quick. Its refusal is handed back.
    ///
    /// # Errors
    /// The directory of reservations cannot be used.
    pub fn plan<E>(
        what: &str,
        plan: impl FnOnce(&[ReservationInfo]) -> Result<u64, E>,
    ) -> Result<Result<Reservation, E>, ReservationError> {
        Reservation::plan_in(&directory(), what, plan)
    }

    /// [`plan`](Self::plan) in a directory of the caller's choice.
    ///
    /// # Errors
    /// The directory cannot be used.
    pub fn plan_in<E>(
        dir: &Path,
        what: &str,
        plan: impl FnOnce(&[ReservationInfo]) -> Result<u64, E>,
    ) -> Result<Result<Reservation, E>, ReservationError> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let _guard = guard(dir, PATIENCE)?;
        let bytes = match plan(&scan(dir)?) {
            Ok(bytes) => bytes,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let pid = std::process::id();
        let info = ReservationInfo { pid, bytes, what: what.to_owned() };
        let stem = dir.join(format!("{pid}-{}", COUNT.fetch_add(1, Ordering::Relaxed)));
        let path = stem.with_extension("lock");
        let new = |path: &Path| open_own(File::options().write(true).create_new(true), path);
        let lock =
            new(&path).map_err(|source| ReservationError { doing: "create", path: path.clone(), source })?;
        let fault = |source| ReservationError { doing: "lock", path: path.clone(), source };
        lock.try_lock().map_err(|error| fault(error.into()))?;
        let path = stem.with_extension("json");
        let fault = |source| ReservationError { doing: "write", path: path.clone(), source };
        let text = serde_json::to_vec(&info).map_err(|error| fault(error.into()))?;
        // Of a process that had our number and died between its two files.
        let _ = fs::remove_file(&path);
        new(&path).and_then(|mut file| file.write_all(&text)).map_err(fault)?;
        Ok(Ok(Reservation { info, stem, _lock: lock }))
    }

    /// [`reserved`] in a directory of the caller's choice. Removes what dead processes left.
    ///
    /// # Errors
    /// The directory cannot be used.
    pub fn all_in(dir: &Path) -> Result<Vec<ReservationInfo>, ReservationError> {
        let _guard = guard(dir, PATIENCE)?;
        scan(dir)
    }

    /// What is reserved.
    pub fn info(&self) -> &ReservationInfo {
        &self.info
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.stem.with_extension("json"));
        let _ = fs::remove_file(self.stem.with_extension("lock"));
    }
}

/// The user's runtime directory, or a directory of the user's own among the temporary files.
fn directory() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from) {
        Some(dir) if dir.is_absolute() && dir.is_dir() => dir.join("waste"),
        _ => std::env::temp_dir().join(own_name()),
    }
}

#[cfg(unix)]
fn own_name() -> String {
    format!("waste-{}", rustix::process::getuid().as_raw())
}

/// Temporary files are per user elsewhere.
#[cfg(not(unix))]
fn own_name() -> String {
    "waste".to_owned()
}

/// How long another process may hold the directory's lock: it needs milliseconds, but could be stopped meanwhile.
const PATIENCE: Duration = Duration::from_secs(10);

/// Make the directory if need be, and hold its lock for the short while of looking and reserving.
fn guard(dir: &Path, patience: Duration) -> Result<File, ReservationError> {
    let fault = |doing, path: &Path| {
        let path = path.to_owned();
        move |source| ReservationError { doing, path, source }
    };
    create_private(dir).map_err(fault("make the directory of reservations", dir))?;
    let path = dir.join("lock");
    let file = open_own(File::options().write(true).create(true).truncate(false), &path)
        .map_err(fault("open", &path))?;
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if begun.elapsed() < patience => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => return Err(fault("lock", &path)(error.into())),
        }
    }
}

/// Opens a file of the directory. A link that somebody planted there is not followed, a pipe not waited for.
fn open_own(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    #[cfg(unix)]
    {
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        std::os::unix::fs::OpenOptionsExt::custom_flags(options, flags.bits() as i32);
    }
    #[cfg(not(unix))]
    if fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink()) {
        return Err(io::Error::other("it is a link"));
    }
    let file = options.open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is not a regular file")) }
}

/// A directory only this user may use; one that somebody else made among the temporary files is refused.
#[cfg(unix)]
fn create_private(dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt};
    match fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => (),
    }
    let found = fs::symlink_metadata(dir)?;
    if !found.is_dir() || found.uid() != rustix::process::getuid().as_raw() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it belongs to another user"));
    }
    if found.mode() & 0o022 != 0 {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "other users may write there"));
    }
    Ok(())
}

#[cfg(not(unix))]
fn create_private(dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir)
}

/// The reservations whose locks are held. The caller holds the directory's lock.
fn scan(dir: &Path) -> Result<Vec<ReservationInfo>, ReservationError> {
    let fault = |source| ReservationError { doing: "list", path: dir.to_owned(), source };
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(fault)? {
        let path = entry.map_err(fault)?.path();
        if path.extension().is_none_or(|ending| ending != "lock") {
            continue;
        }
        let content = path.with_extension("json");
        match open_own(File::options().read(true), &path).map(|file| file.try_lock()) {
            Ok(Ok(())) => {
                // Nobody holds it: its process has died.
                let _ = fs::remove_file(&content);
                let _ = fs::remove_file(&path);
            }
            Ok(Err(TryLockError::WouldBlock)) => found.extend(read(&content)),
            // Gone meanwhile, or nothing that can be locked.
            Ok(Err(TryLockError::Error(_))) | Err(_) => (),
        }
    }
    found.sort_by(|a, b| (a.pid, a.bytes, &a.what).cmp(&(b.pid, b.bytes, &b.what)));
    Ok(found)
}

fn read(path: &Path) -> Option<ReservationInfo> {
    let mut text = Vec::new();
    open_own(File::options().read(true), path).ok()?.take(64 << 10).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(dir: &Path) -> usize {
        fs::read_dir(dir).unwrap().count()
    }

    #[test]
    fn a_process_that_is_stopped_within_the_lock_stops_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let held = guard(dir.path(), PATIENCE).unwrap();
        let error = guard(dir.path(), Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.doing, "lock");
        drop(held);
        drop(guard(dir.path(), Duration::ZERO).unwrap());
    }

    #[test]
    fn a_reservation_is_seen_while_held_and_gone_afterwards() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("waste");
        let first = Reservation::take_in(&dir, 46 << 30, "waste-run k3.waste").unwrap();
        let second = Reservation::take_in(&dir, 5, "waste-serve").unwrap();
        let mut expected = [first.info().clone(), second.info().clone()];
        expected.sort_by_key(|info| info.bytes);
        assert_eq!(Reservation::all_in(&dir).unwrap(), expected);
        drop(first);
        assert_eq!(Reservation::all_in(&dir).unwrap(), [second.info().clone()]);
        drop(second);
        assert_eq!(Reservation::all_in(&dir).unwrap(), []);
        assert_eq!(files(&dir), 1); // the directory's own lock
    }

    #[test]
    fn what_a_dead_process_left_is_removed_and_rubbish_is_not_counted() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("7-0.lock"), "").unwrap();
        fs::write(dir.path().join("7-0.json"), r#"{"pid":7,"bytes":99,"what":"x"}"#).unwrap();
        fs::write(dir.path().join("notes.txt"), "x").unwrap();
        fs::create_dir(dir.path().join("d.lock")).unwrap();
        let held = Reservation::take_in(dir.path(), 1, "held").unwrap();
        fs::write(held.stem.with_extension("json"), r#"{"pid":7,"bytes":-1}"#).unwrap();
        assert_eq!(Reservation::all_in(dir.path()).unwrap(), []);
        assert!(!dir.path().join("7-0.json").exists() && !dir.path().join("7-0.lock").exists());
        assert!(dir.path().join("notes.txt").exists());
    }

    /// The bug behind it: two engines each planned with the whole machine, and it hung in swap.
    #[test]
    fn of_engines_that_start_together_each_sees_what_the_others_took() {
        let dir = tempfile::tempdir().unwrap();
        let half_of_the_rest = |others: &[ReservationInfo]| {
            let taken: u64 = others.iter().map(|info| info.bytes).sum();
            Ok::<_, ()>(((1 << 40) - taken) / 2)
        };
        let held: Vec<Reservation> = std::thread::scope(|scope| {
            let start = || Reservation::plan_in(dir.path(), "engine", half_of_the_rest).unwrap().unwrap();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(start)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let mut bytes: Vec<u64> = held.iter().map(|reservation| reservation.info().bytes).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, [1 << 36, 1 << 37, 1 << 38, 1 << 39]);
        let refusal = Reservation::plan_in(dir.path(), "engine", |_| Err("nothing left")).unwrap().err();
        assert_eq!(refusal, Some("nothing left"));
        assert_eq!(Reservation::all_in(dir.path()).unwrap().len(), 4);
    }

    /// Runs this test binary again as a child that reserves and then dies without cleaning up.
    #[test]
    fn another_process_is_seen_until_it_dies() {
        const KEY: &str = "WASTE_TEST_RESERVATION";
        if let Some(dir) = std::env::var_os(KEY) {
            let reservation = Reservation::take_in(Path::new(&dir), 42, "child").unwrap();
            println!("reserved");
            io::stdin().read_line(&mut String::new()).unwrap();
            std::mem::forget(reservation);
            std::process::exit(0);
        }
        let dir = tempfile::tempdir().unwrap();
        let name = "machine::reservation::tests::another_process_is_seen_until_it_dies";
        let mut child = crate::testing::this_program()
            .args(["--exact", name, "--nocapture", "--test-threads=1"])
            .env(KEY, dir.path())
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = io::BufRead::lines(io::BufReader::new(child.stdout.take().unwrap()));
        assert!(lines.any(|line| line.unwrap().contains("reserved")));
        let seen = Reservation::all_in(dir.path()).unwrap();
        assert_eq!(seen, [ReservationInfo { pid: child.id(), bytes: 42, what: "child".into() }]);
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        assert!(child.wait().unwrap().success());
        assert_eq!(files(dir.path()), 3);
        assert_eq!(Reservation::all_in(dir.path()).unwrap(), []);
        assert_eq!(files(dir.path()), 1);
    }

    #[cfg(unix)]
    #[test]
    fn a_directory_that_is_a_link_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("waste");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        assert!(Reservation::take_in(&link, 1, "x").is_err());
    }

    #[cfg(unix)]
    #[test]
    fn planted_links_lead_nowhere() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let (ours, victim) = (dir.path().join("waste"), dir.path().join("victim"));
        let spared = || assert_eq!(fs::read_to_string(&victim).unwrap(), "dear");
        fs::write(&victim, "dear").unwrap();
        drop(Reservation::take_in(&ours, 1, "x").unwrap());
        // What a later reservation would write to, whatever its number.
        let pid = std::process::id();
        for count in 0..500 {
            symlink(&victim, ours.join(format!("{pid}-{count}.json"))).unwrap();
        }
        let held = Reservation::take_in(&ours, 1, "x").unwrap();
        assert_eq!(Reservation::all_in(&ours).unwrap(), [held.info().clone()]);
        spared();
        drop(held);
        for count in 0..500 {
            symlink(&victim, ours.join(format!("{pid}-{count}.lock"))).unwrap();
        }
        assert!(Reservation::take_in(&ours, 1, "x").is_err());
        assert_eq!(Reservation::all_in(&ours).unwrap(), []);
        spared();
        // A new file would come to be behind this one.
        let nowhere = dir.path().join("nowhere");
        fs::remove_file(ours.join("lock")).unwrap();
        symlink(&nowhere, ours.join("lock")).unwrap();
        assert!(Reservation::all_in(&ours).is_err() && !nowhere.exists());
    }

    #[cfg(unix)]
    #[test]
    fn a_directory_others_may_write_to_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o770)).unwrap();
        let error = Reservation::take_in(dir.path(), 1, "x").unwrap_err();
        assert!(error.source.to_string().contains("other users"), "{error:?}");
    }

    #[test]
    fn the_usual_directory_is_absolute() {
        assert!(directory().is_absolute());
    }
}
