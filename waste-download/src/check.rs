//! Checking the files that are there: absent, short, long and corrupt ones told apart.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use waste_common::cli::{ByteSize, Interrupt, Output};
use waste_common::files::{DirLock, FileError};
use waste_common::staging::{RECLAIMED, State, read_names};

use crate::args::Against;
use crate::error::DownloadError;
use crate::hub::{Digest, Entry};
use crate::paths::{Places, length};
use crate::report::{Check, Problem};
use crate::request::Request;
use crate::sums::of_file;
use crate::survey::{Survey, partial_bytes, read_state};
use crate::talk::Talk;
use crate::wait::Stop;

/// What a file shall be.
struct Expected {
    /// With its checksum, unless that is not known yet.
    entry: Entry,
    known: bool,
    reclaimed: bool,
}

/// Checks every byte.
pub(crate) fn check(
    request: &Request,
    against: Against,
    output: &Output,
    interrupt: &Interrupt,
) -> Result<Check, DownloadError> {
    let start = Instant::now();
    let stop = Stop::new(interrupt);
    let (state, expected) = match against {
        Against::Local => local(request)?,
        Against::Server => server(request, &stop, output)?,
    };
    let total = expected.iter().map(|file| file.entry.size).fold(0, u64::saturating_add);
    let talk = Talk::new(output, "checking", total);
    let (next, failure) = (AtomicUsize::new(0), Mutex::new(None));
    let problems = Mutex::<Vec<Problem>>::default();
    std::thread::scope(|scope| {
        for _ in 0..request.jobs.min(expected.len()) {
            scope.spawn(|| {
                while let Some(file) = expected.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match look(request, file, &stop, &talk) {
                        Ok(problem) => lock(&problems).extend(problem),
                        Err(error) => {
                            stop.all();
                            lock(&failure).get_or_insert(error);
                        }
                    }
                }
            });
        }
    });
    if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    talk.finish();
    let mut problems = problems.into_inner().unwrap_or_else(PoisonError::into_inner);
    problems.sort_by(|a, b| a.file.cmp(&b.file));
    forget(request, &problems, output)?;
    Ok(Check {
        checkpoint: request.dest.display().to_string(),
        repo: state.repo,
        commit: state.commit,
        against: match against {
            Against::Local => "local",
            Against::Server => "server",
        },
        ok: problems.is_empty(),
        files: expected.len() as u64,
        bytes: total,
        reclaimed: expected.iter().filter(|file| file.reclaimed).count() as u64,
        problems,
        seconds: (start.elapsed().as_secs_f64() * 1e3).round() / 1e3,
    })
}

/// The files an earlier run knows.
fn local(request: &Request) -> Result<(State, Vec<Expected>), DownloadError> {
    let state = read_state(request)?.ok_or_else(|| DownloadError::Dest {
        dir: request.dest.clone(),
        code: "no_state",
        problem: "nothing was ever downloaded into it; --check=server compares it with the hub".to_owned(),
    })?;
    let used = reclaimed(request)?;
    let expected = |(name, file): (&String, &waste_common::staging::FileState)| Expected {
        known: file.sha256.is_some(),
        reclaimed: file.done && used.contains(name),
        entry: Entry {
            name: name.clone(),
            size: file.size,
            digest: Digest::Sha256(file.sha256.clone().unwrap_or_default()),
        },
    };
    let files = state.files.iter().filter(|(name, _)| request.wanted.matches(name)).map(expected).collect();
    Ok((state, files))
}

/// The files the hub has.
fn server(request: &Request, stop: &Stop, output: &Output) -> Result<(State, Vec<Expected>), DownloadError> {
    let survey = Survey::new(request, &request.hub()?, &request.patience(), stop, output)?;
    let used = reclaimed(request)?;
    let done = |name: &str| survey.state.is_done(name);
    let files = survey.files.iter().map(|found| Expected {
        known: true,
        reclaimed: done(&found.entry.name) && used.contains(&found.entry.name),
        entry: found.entry.clone(),
    });
    let files = files.collect();
    Ok((survey.state, files))
}

fn reclaimed(request: &Request) -> Result<HashSet<String>, DownloadError> {
    Ok(read_names(&request.dest.join(RECLAIMED))?.unwrap_or_default().into_iter().collect())
}

/// What is wrong with a file.
fn look(
    request: &Request,
    file: &Expected,
    stop: &Stop,
    talk: &Talk,
) -> Result<Option<Problem>, DownloadError> {
    let entry = &file.entry;
    let places = Places::new(&request.dest, &entry.name);
    let size = ByteSize(entry.size);
    let problem = |kind, message: String| {
        Ok(Some(Problem { file: entry.name.clone(), kind, expected_bytes: entry.size, message }))
    };
    let bytes = match length(&places.whole()) {
        Ok(bytes) => bytes,
        Err(FileError::NotAFile { .. }) => return problem("not_a_file", "it is no regular file".to_owned()),
        Err(error) => return Err(error.into()),
    };
    match bytes {
        None if file.reclaimed => Ok(None),
        None => {
            let there = partial_bytes(&places, entry)?;
            problem("absent", format!("it is not there; {} of {size} have been fetched", ByteSize(there)))
        }
        Some(bytes) if bytes < entry.size => {
            problem("short", format!("it has {bytes} bytes of {}", entry.size))
        }
        Some(bytes) if bytes > entry.size => {
            problem("long", format!("it has {bytes} bytes, {} were expected", entry.size))
        }
        Some(_) if !file.known => {
            problem("unverified", "its checksum is not known yet; the next download finds out".to_owned())
        }
        Some(_) => {
            let line = talk.file(&entry.name, entry.size);
            let sums = of_file(&places.whole(), entry, stop, |bytes| line.add(bytes))?;
            if sums.fit(entry) {
                return Ok(None);
            }
            let (Digest::Sha256(expected) | Digest::GitBlob(expected)) = &entry.digest;
            problem("corrupt", format!("its checksum is {}, expected {expected}", sums.found(entry)))
        }
    }
}

/// What was found bad is not done any more, so that the next download fetches it again.
fn forget(request: &Request, problems: &[Problem], output: &Output) -> Result<(), DownloadError> {
    if problems.is_empty() {
        return Ok(());
    }
    let Ok(_lock) = DirLock::acquire(&request.dest) else {
        output.warn("the directory is in use, so that what was found is not written down");
        return Ok(());
    };
    let Some(mut state) = read_state(request)? else { return Ok(()) };
    let mut changed = false;
    for problem in problems {
        if let Some(file) = state.files.get_mut(&problem.file) {
            changed |= std::mem::take(&mut file.done);
        }
    }
    if changed {
        state.write(&request.dest)?;
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
