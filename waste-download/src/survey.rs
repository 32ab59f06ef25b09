//! What is wanted, and how much of it is there already.

use std::collections::HashSet;

use waste_common::cli::Output;
use waste_common::staging::{FileState, RECLAIMED, State, read_names};

use crate::error::DownloadError;
use crate::http::{Connection, Fault, Hub};
use crate::hub::{self, Digest, Entry, Listing};
use crate::journal;
use crate::paths::{Places, length};
use crate::request::{MAIN, Request};
use crate::talk::say;
use crate::wait::{Retries, Stop};

/// The files of a request, and how far they are.
pub(crate) struct Survey {
    /// What will be written down.
    pub state: State,
    pub files: Vec<Found>,
}

/// A wanted file.
pub(crate) struct Found {
    pub entry: Entry,
    pub status: Status,
}

/// How far a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// There for good.
    Done,
    /// It was, until it had been used.
    Reclaimed,
    /// So many bytes of it seem to be there.
    Partial(u64),
}

impl Survey {
    /// Asks the hub, and looks at the directory.
    pub fn new(
        request: &Request,
        hub: &Hub,
        retries: &Retries,
        stop: &Stop,
        output: &Output,
    ) -> Result<Survey, DownloadError> {
        let old = read_state(request)?;
        let asked = request.revision.as_deref();
        let pinned = old.as_ref().filter(|old| {
            !request.update
                && asked.is_none_or(|asked| old.revision.as_deref() == Some(asked) || old.commit == asked)
        });
        let named = asked.or(old.as_ref().and_then(|old| old.revision.as_deref())).unwrap_or(MAIN);
        let listing = list(request, hub, retries, stop, output, pinned.map_or(named, |old| &old.commit))?;
        if let Some(old) = old.as_ref().filter(|old| old.commit != listing.commit) {
            let text = format!("{named} is now commit {}, it was {}", listing.commit, old.commit);
            say(output, "commit", None, &text);
        }
        let revision = pinned.map_or(Some(named), |old| old.revision.as_deref());
        let mut state = State::new(&request.repo, revision, &listing.commit);
        let old = old.as_ref();
        let reclaimed: HashSet<String> =
            read_names(&request.dest.join(RECLAIMED))?.unwrap_or_default().into_iter().collect();
        let mut files = Vec::new();
        for entry in listing.entries {
            let wanted = request.wanted.matches(&entry.name);
            let known = old.and_then(|old| carried_over(old, &listing.commit, &entry));
            if !wanted {
                state.files.extend(known.map(|known| (entry.name, known)));
                continue;
            }
            let done = known.as_ref().is_some_and(|known| known.done);
            let status = status(request, &entry, done, &reclaimed)?;
            let sha256 = match &entry.digest {
                Digest::Sha256(sum) => Some(sum.clone()),
                Digest::GitBlob(_) => known.and_then(|known| known.sha256),
            };
            let done = !matches!(status, Status::Partial(_));
            state.files.insert(entry.name.clone(), FileState { size: entry.size, sha256, done });
            files.push(Found { entry, status });
        }
        if files.is_empty() {
            let problem = "no file of it is wanted: look at --include and --exclude".to_owned();
            return Err(DownloadError::Refused { what: request.repo.clone(), problem });
        }
        // Small files first: they tell what the large ones are.
        files.sort_by_key(|found| matches!(found.entry.digest, Digest::Sha256(_)));
        Ok(Survey { state, files })
    }

    /// The files that are not there for good.
    pub fn missing(&self) -> impl Iterator<Item = &Found> {
        self.files.iter().filter(|found| matches!(found.status, Status::Partial(_)))
    }

    /// Bytes to be fetched still.
    pub fn missing_bytes(&self) -> u64 {
        self.missing().map(Found::missing_bytes).fold(0, u64::saturating_add)
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|found| found.entry.size).fold(0, u64::saturating_add)
    }
}

impl Found {
    /// Bytes to be fetched still.
    pub fn missing_bytes(&self) -> u64 {
        match self.status {
            Status::Done | Status::Reclaimed => 0,
            Status::Partial(there) => self.entry.size.saturating_sub(there),
        }
    }
}

/// What an earlier run wrote down.
pub(crate) fn read_state(request: &Request) -> Result<Option<State>, DownloadError> {
    let state = State::read(&request.dest)?;
    match &state {
        Some(state) if state.repo != request.repo => Err(DownloadError::Dest {
            dir: request.dest.clone(),
            code: "other_repository",
            problem: format!("it holds {}, not {}; choose another --dest", state.repo, request.repo),
        }),
        _ => Ok(state),
    }
}

fn list(
    request: &Request,
    hub: &Hub,
    retries: &Retries,
    stop: &Stop,
    output: &Output,
    revision: &str,
) -> Result<Listing, DownloadError> {
    let connection = Connection::new(hub, stop)?;
    let mut failures = 0;
    loop {
        let (reason, after) = match hub::list(&connection, hub, &request.repo, revision) {
            Ok(listing) => return Ok(listing),
            Err(Fault::Fatal(error)) => return Err(error),
            Err(Fault::Changed { reason }) => (reason, None),
            Err(Fault::Retry { reason, after }) => (reason, after),
        };
        failures += 1;
        let wait = retries.after(failures, &reason, after, &request.repo)?;
        say(output, "retry", None, &format!("{}: {}", request.repo, wait.text));
        wait.pass(stop)?;
    }
}

/// What an earlier run knows of a file that still has the same content.
fn carried_over(old: &State, commit: &str, entry: &Entry) -> Option<FileState> {
    let known = old.files.get(&entry.name).filter(|known| known.size == entry.size)?;
    let same = match &entry.digest {
        Digest::Sha256(sum) => known.sha256.as_ref() == Some(sum),
        // git's checksum was not written down: only of the same commit it is the same.
        Digest::GitBlob(_) => old.commit == commit,
    };
    same.then(|| known.clone())
}

fn status(
    request: &Request,
    entry: &Entry,
    done: bool,
    reclaimed: &HashSet<String>,
) -> Result<Status, DownloadError> {
    let places = Places::new(&request.dest, &entry.name);
    Ok(match length(&places.whole())? {
        Some(bytes) if bytes == entry.size && done => Status::Done,
        // Only to be checked.
        Some(bytes) if bytes == entry.size => Status::Partial(bytes),
        None if done && reclaimed.contains(&entry.name) => Status::Reclaimed,
        _ => Status::Partial(partial_bytes(&places, entry)?),
    })
}

/// Bytes of an unfinished file that seem to be there.
pub(crate) fn partial_bytes(places: &Places, entry: &Entry) -> Result<u64, DownloadError> {
    let there = length(&places.part())?.unwrap_or(0);
    Ok(journal::claimed(&places.journal(), entry).min(there))
}
