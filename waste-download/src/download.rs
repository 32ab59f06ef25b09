//! The download itself: a few threads, each with a file of its own.

use std::collections::HashSet;
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use waste_common::checkpoint::Checkpoint;
use waste_common::cli::{ByteSize, Interrupt, Output};
use waste_common::files::{DirLock, FileError};
use waste_common::io::{existing, filesystem};
use waste_common::staging::{RECLAIMED, State, read_names};

use crate::error::DownloadError;
use crate::fetch::{Fetch, Shared};
use crate::http::{Hub, Line, Lines};
use crate::paths::{self, Places};
use crate::report::{Done, DryRun, DryRunFile};
use crate::request::{OrderFile, Request, Token};
use crate::space::Space;
use crate::survey::{Found, Status, Survey};
use crate::talk::{Talk, say};
use crate::wait::{Rate, Retries, Stop};

impl Request {
    pub(crate) fn hub(&self) -> Result<Hub, DownloadError> {
        Hub::new(self.endpoint.clone(), self.token.as_ref().map(Token::reveal), self.stall)
    }

    pub(crate) fn patience(&self) -> Retries {
        Retries::new(self.retries, self.retry_wait)
    }
}

/// Says what a download would do.
pub(crate) fn dry_run(
    request: &Request,
    output: &Output,
    interrupt: &Interrupt,
) -> Result<DryRun, DownloadError> {
    let (hub, retries, stop) = (request.hub()?, request.patience(), Stop::new(interrupt));
    let survey = Survey::new(request, &hub, &retries, &stop, output)?;
    let free = existing(&request.dest).and_then(|path| filesystem(&path)).ok().and_then(|fs| fs.free_bytes);
    let missing = survey.missing_bytes();
    let needed = if missing == 0 { 0 } else { missing.saturating_add(request.reserve) };
    Ok(DryRun {
        dest: request.dest.display().to_string(),
        repo: request.repo.clone(),
        commit: survey.state.commit.clone(),
        files: survey.files.len() as u64,
        bytes: survey.bytes(),
        missing_files: survey.missing().count() as u64,
        missing_bytes: missing,
        disk_needed_bytes: needed,
        disk_free_bytes: free,
        disk_fits: free.map(|free| needed <= free),
        list: survey.files.iter().map(DryRunFile::new).collect(),
    })
}

/// Fetches what is missing.
pub(crate) fn fetch(
    request: &Request,
    output: &Output,
    interrupt: &Interrupt,
) -> Result<Done, DownloadError> {
    let start = Instant::now();
    let dest = &request.dest;
    fs::create_dir_all(dest).map_err(FileError::io("create", dest))?;
    let lock = DirLock::acquire(dest)?;
    order(&request.order)?;
    let (hub, retries, stop) = (request.hub()?, request.patience(), Stop::new(interrupt));
    let survey = Survey::new(request, &hub, &retries, &stop, output)?;
    let walked = survey.missing().map(|found| found.entry.size).fold(0, u64::saturating_add);
    let talk = Talk::new(output, "downloading", walked);
    let shared = Shared {
        hub: &hub,
        repo: &request.repo,
        commit: &survey.state.commit,
        retries: &retries,
        rate: request.limit_rate.map(Rate::new),
        space: Space::new(dest, request.reserve, request.wait_for_space, &stop, &talk),
        stop: &stop,
        received: AtomicU64::new(0),
    };
    shared.space.demand(survey.missing_bytes())?;
    survey.state.write(dest)?;
    let work = Work {
        request,
        shared: &shared,
        talk: &talk,
        lines: Lines::new(request.jobs.min(survey.missing().count()), &hub, &stop)?,
        queue: Mutex::new(survey.missing().collect()),
        state: Mutex::new(survey.state.clone()),
        failures: Mutex::default(),
    };
    work.all(survey.missing().count())?;
    let received = shared.received.load(Ordering::Relaxed);
    drop(work);
    drop(shared);
    talk.finish();
    paths::tidy(dest);
    check_tensors(&survey, request, output)?;
    drop(lock);
    Ok(Done {
        checkpoint: dest.display().to_string(),
        repo: request.repo.clone(),
        commit: survey.state.commit.clone(),
        files: survey.files.len() as u64,
        bytes: survey.bytes(),
        fetched_bytes: received,
        reclaimed: survey.files.iter().filter(|found| found.status == Status::Reclaimed).count() as u64,
        seconds: (start.elapsed().as_secs_f64() * 1e3).round() / 1e3,
    })
}

/// What the threads share.
struct Work<'a> {
    request: &'a Request,
    shared: &'a Shared<'a>,
    talk: &'a Talk,
    lines: Lines<'a>,
    queue: Mutex<Vec<&'a Found>>,
    state: Mutex<State>,
    failures: Mutex<Vec<DownloadError>>,
}

impl<'a> Work<'a> {
    /// Fetches everything in the queue.
    fn all(&self, files: usize) -> Result<(), DownloadError> {
        std::thread::scope(|scope| {
            // Twice as many as receive at once: the others finish what has been received.
            for _ in 0..self.request.jobs.saturating_mul(2).min(files) {
                scope.spawn(|| {
                    if let Err(error) = self.some() {
                        self.failed(error);
                    }
                });
            }
        });
        let mut failures = std::mem::take(&mut *lock(&self.failures));
        // The others were only interrupted by the one that stopped all.
        failures.sort_by_key(|error| (matches!(error, DownloadError::Interrupted), !error.stops_all()));
        for error in failures.iter().skip(1).filter(|error| !matches!(error, DownloadError::Interrupted)) {
            self.talk.event("failed", None, &error.to_string());
        }
        failures.into_iter().next().map_or(Ok(()), Err)
    }

    fn failed(&self, error: DownloadError) {
        if error.stops_all() {
            self.shared.stop.all();
        }
        lock(&self.failures).push(error);
    }

    /// What one thread does: file after file.
    fn some(&self) -> Result<(), DownloadError> {
        loop {
            let line = self.lines.take()?;
            let Some(found) = self.next() else { return Ok(()) };
            self.shared.stop.check()?;
            match self.one(line, found) {
                Err(error) if !error.stops_all() => self.failed(error),
                done => done?,
            }
        }
    }

    fn one(&self, line: Line, found: &Found) -> Result<(), DownloadError> {
        let entry = &found.entry;
        let places = Places::new(&self.request.dest, &entry.name);
        let talk = self.talk.file(&entry.name, entry.size);
        let sha256 = Fetch { shared: self.shared, entry, places: &places, talk }.run(line)?;
        // First: nobody looks at the parts of what is recorded. Killed in between, the next run finds the file whole.
        places.tidy()?;
        {
            let mut state = lock(&self.state);
            if let Some(file) = state.files.get_mut(&entry.name) {
                file.sha256 = Some(sha256);
                file.done = true;
            }
            state.write(&self.request.dest)?;
        }
        self.talk.detail("done", &entry.name, &format!("{}, checked", ByteSize(entry.size)));
        Ok(())
    }

    /// The next file: the first one the order file names, which may have changed meanwhile.
    fn next(&self) -> Option<&'a Found> {
        let wanted = order(&self.request.order).unwrap_or_else(|error| {
            self.talk.event("order", None, &format!("the order of the files is ignored: {error}"));
            Vec::new()
        });
        let mut queue = lock(&self.queue);
        let at = wanted.iter().find_map(|name| queue.iter().position(|found| found.entry.name == *name));
        (!queue.is_empty()).then(|| queue.remove(at.unwrap_or(0)))
    }
}

fn order(order: &OrderFile) -> Result<Vec<String>, DownloadError> {
    match read_names(&order.path)? {
        None if order.named => Err(DownloadError::Refused {
            what: order.path.display().to_string(),
            problem: "there is no such order file".to_owned(),
        }),
        names => Ok(names.unwrap_or_default()),
    }
}

/// Whether every tensor the index names is in the header of its file. Files that are not wanted, or were used up, are
/// passed over.
fn check_tensors(survey: &Survey, request: &Request, output: &Output) -> Result<(), DownloadError> {
    if !Checkpoint::is_checkpoint(&request.dest) {
        return Ok(());
    }
    let incomplete = |problem: String| DownloadError::Incomplete { problem };
    let checkpoint = Checkpoint::open(&request.dest).map_err(|error| incomplete(error.to_string()))?;
    // By now, or at any moment: waste-convert --follow may be at work beside us, and names a file before it goes.
    let used = || -> Result<HashSet<String>, DownloadError> {
        Ok(read_names(&request.dest.join(RECLAIMED))?.unwrap_or_default().into_iter().collect())
    };
    let gone = used()?;
    let here = |name: &str| !gone.contains(name) && survey.files.iter().any(|found| found.entry.name == name);
    let shards: HashSet<&str> =
        checkpoint.shard_names().iter().map(String::as_str).filter(|name| here(name)).collect();
    let mut tensors = 0;
    for name in checkpoint.names() {
        let Some(shard) = checkpoint.shard_of(name).filter(|shard| shards.contains(shard)) else { continue };
        match checkpoint.info(name) {
            Ok(_) => tensors += 1,
            Err(_) if used()?.contains(shard) => {}
            Err(error) => return Err(incomplete(error.to_string())),
        }
    }
    let text = format!("{tensors} tensors of the index are in their {} files", shards.len());
    if output.verbose() {
        say(output, "tensors", None, &text);
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
