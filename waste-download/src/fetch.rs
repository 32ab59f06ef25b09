//! One file, from whatever is there of it to its finished, checked, durable content.
//!
//! It is walked from its beginning once: what the journal says is there is read back, what is missing is fetched, and
//! both go through the checksum in order. Nothing is read a second time.

use std::sync::atomic::{AtomicU64, Ordering};

use reqwest::StatusCode;
use reqwest::header::{CONTENT_RANGE, ETAG, HeaderMap};
use waste_common::cli::ByteSize;
use waste_common::files::FileError;

use crate::error::DownloadError;
use crate::http::{Connection, Fault, Hub, Line, Reply};
use crate::hub::{Digest, Entry};
use crate::part::Part;
use crate::paths::{Places, length};
use crate::space::{Room, Space};
use crate::sums::{Hashing, of_file};
use crate::talk::FileTalk;
use crate::wait::{Rate, Retries, Stop};

/// Downloads of one file before its content is given up.
const CONTENT_TRIES: u32 = 3;
/// Times one file may change on the server while it is fetched.
const CHANGES_MAX: u32 = 3;

/// What the files of a run share.
pub(crate) struct Shared<'a> {
    pub hub: &'a Hub,
    pub repo: &'a str,
    pub commit: &'a str,
    pub retries: &'a Retries,
    pub rate: Option<Rate>,
    pub space: Space<'a>,
    pub stop: &'a Stop,
    /// Bytes that have been received.
    pub received: AtomicU64,
}

/// The way to one file.
pub(crate) struct Fetch<'a> {
    pub shared: &'a Shared<'a>,
    pub entry: &'a Entry,
    pub places: &'a Places,
    pub talk: FileTalk<'a>,
}

/// How far the walk through a file has come.
struct Walk {
    position: u64,
    hashing: Hashing,
    /// How far it was at its last failure. Only what is beyond counts as progress.
    furthest: u64,
}

/// What a server says about the bytes that follow.
struct Body {
    /// Where they begin and end in the file.
    start: u64,
    end: u64,
    etag: Option<String>,
}

impl Fetch<'_> {
    /// Makes the file whole, and says its SHA-256. `line` is given back as soon as it is not needed any more.
    ///
    /// # Errors
    /// The network, the disk or the content fails for good, or a signal asked for the end; what is there is kept.
    pub fn run(self, mut line: Line) -> Result<String, DownloadError> {
        self.places.prepare()?;
        if let Some(sha256) = self.adopt()? {
            return Ok(sha256);
        }
        let mut tries = 0;
        loop {
            tries += 1;
            let mut part = Part::open(self.places, self.entry)?;
            let mut room =
                self.shared.space.admit(self.entry.size.saturating_sub(part.kept.journal.bytes()))?;
            let filled = self.fill(line.connection()?, &mut part, &mut room);
            if filled.is_err() {
                // Best effort: a full disk may refuse it.
                let _ = part.note();
            }
            let hashing = filled?;
            line.give_back();
            let sums = hashing.finish()?;
            if sums.fit(self.entry) {
                part.finish()?;
                self.places.publish()?;
                return Ok(sums.sha256);
            }
            let kept = part.quarantine(self.places)?;
            let (Digest::Sha256(expected) | Digest::GitBlob(expected)) = &self.entry.digest;
            let found = sums.found(self.entry);
            if tries == CONTENT_TRIES {
                return Err(DownloadError::Corrupt {
                    name: self.entry.name.clone(),
                    expected: expected.clone(),
                    found: found.to_owned(),
                    tries,
                    kept,
                });
            }
            let text = format!("its content is wrong: {found}, the hub says {expected}; it is fetched again");
            self.talk.event("corrupt", &text);
            self.talk.again(self.entry.size);
        }
    }

    /// A file of the right name may be the right one: fetched by other means, or finished when we were killed.
    fn adopt(&self) -> Result<Option<String>, DownloadError> {
        let whole = self.places.whole();
        let Some(bytes) = length(&whole)? else { return Ok(None) };
        if bytes == self.entry.size {
            let sums = of_file(&whole, self.entry, self.shared.stop, |bytes| self.talk.skip(bytes))?;
            if sums.fit(self.entry) {
                self.talk.detail("found", "it is there already, and right");
                let file = std::fs::OpenOptions::new().write(true).open(&whole);
                file.and_then(|file| file.sync_all()).map_err(FileError::io("sync", &whole))?;
                self.places.settle()?;
                return Ok(Some(sums.sha256));
            }
            self.talk.again(bytes);
        }
        let kept = self.places.quarantine(&whole)?;
        let text = format!("what is there is not the hub's; it is kept as {} meanwhile", kept.display());
        self.talk.event("quarantined", &text);
        Ok(None)
    }

    /// Walks through the file until it is whole. Its last bytes may still be waiting to be hashed then.
    fn fill(
        &self,
        connection: &Connection,
        part: &mut Part,
        room: &mut Room,
    ) -> Result<Hashing, DownloadError> {
        let (mut failures, mut changes) = (0, 0);
        let mut walk = self.begin();
        loop {
            let fault = match self.advance(connection, part, &mut walk, room) {
                Ok(()) => return Ok(walk.hashing),
                Err(fault) => fault,
            };
            // What is not noted would only be fetched again after a kill.
            match part.note().map_err(DownloadError::from) {
                Err(error) if error.is_full() => room.exhausted()?,
                noted => noted?,
            }
            match fault {
                Fault::Fatal(error) if error.is_full() => room.exhausted()?,
                Fault::Fatal(error) => return Err(error),
                Fault::Changed { reason } => {
                    changes += 1;
                    if changes > CHANGES_MAX {
                        return Err(DownloadError::Changing { name: self.entry.name.clone() });
                    }
                    self.talk.event("changed", &format!("{reason}; it is fetched from its beginning again"));
                    self.restart(part, &mut walk, None)?;
                    self.shared
                        .retries
                        .after(changes, &reason, None, &self.entry.name)?
                        .pass(self.shared.stop)?;
                }
                Fault::Retry { reason, after } => {
                    failures = if walk.position > walk.furthest { 1 } else { failures + 1 };
                    walk.furthest = walk.furthest.max(walk.position);
                    let shared = self.shared;
                    let wait = shared.retries.after(failures, &reason, after, &self.entry.name)?;
                    self.talk.event("retry", &wait.text);
                    wait.pass(shared.stop)?;
                }
            }
        }
    }

    fn begin(&self) -> Walk {
        Walk { position: 0, hashing: Hashing::start(self.entry), furthest: 0 }
    }

    fn restart(&self, part: &mut Part, walk: &mut Walk, etag: Option<&str>) -> Result<(), DownloadError> {
        self.talk.again(walk.position);
        *walk = Walk { furthest: walk.furthest, ..self.begin() };
        Ok(part.reset(etag)?)
    }

    /// Goes on to the end of the file, or to the next failure.
    fn advance(
        &self,
        connection: &Connection,
        part: &mut Part,
        walk: &mut Walk,
        room: &mut Room,
    ) -> Result<(), Fault> {
        while walk.position < self.entry.size {
            self.shared.stop.check()?;
            let Some(written) = part.kept.journal.at(walk.position) else {
                let end = part.kept.journal.next_after(walk.position).unwrap_or(self.entry.size);
                self.stream(connection, part, walk, end, room)?;
                continue;
            };
            match part.read(walk.position, written).map_err(DownloadError::from)? {
                Some(bytes) => {
                    walk.hashing.update(bytes);
                    walk.position += u64::from(written.bytes);
                    self.talk.skip(written.bytes.into());
                }
                None => {
                    self.talk.detail("damaged", "a part is not what was written; it is fetched again");
                    part.kept.journal.forget(walk.position);
                }
            }
        }
        Ok(part.note().map_err(DownloadError::from)?)
    }

    /// Fetches the bytes up to `end`.
    fn stream(
        &self,
        connection: &Connection,
        part: &mut Part,
        walk: &mut Walk,
        end: u64,
        room: &mut Room,
    ) -> Result<(), Fault> {
        let shared = self.shared;
        // What a full disk has kept back: it must not be forgotten.
        part.note().map_err(DownloadError::from)?;
        shared.retries.quiet.pass(shared.stop)?;
        let (start, size) = (walk.position, self.entry.size);
        let range = (start > 0 || end < size).then(|| (start, end - 1));
        let mut parts: Vec<&str> = shared.repo.split('/').collect();
        parts.extend(["resolve", shared.commit]);
        parts.extend(self.entry.name.split('/'));
        let mut reply = connection.get(shared.hub.url(&parts), range, &self.entry.name)?;
        let body = self.examine(&reply, range, part)?;
        if body.start < start || body.end > end {
            let text = "the server does not send parts of files; it is fetched from its beginning";
            self.talk.event("no_ranges", text);
            self.restart(part, walk, body.etag.as_deref())?;
        } else if part.kept.journal.bytes() == 0 {
            part.reset(body.etag.as_deref()).map_err(DownloadError::from)?;
        }
        part.seek(walk.position);
        while walk.position < body.end {
            shared.stop.check()?;
            let Some(mut piece) = connection.piece(&mut reply)? else {
                let missing = ByteSize(body.end - walk.position);
                return Err(Fault::retry(format!("the answer ended {missing} early")));
            };
            // More than was promised is not wanted; whether the rest is right, the checksum says.
            piece.truncate(usize::try_from(body.end - walk.position).unwrap_or(usize::MAX));
            let bytes = piece.len() as u64;
            if let Some(rate) = &shared.rate {
                rate.take(piece.len(), shared.stop)?;
            }
            part.write(&piece).map_err(DownloadError::from)?;
            walk.hashing.update(piece);
            walk.position += bytes;
            shared.received.fetch_add(bytes, Ordering::Relaxed);
            self.talk.add(bytes);
            room.spend(bytes)?;
        }
        Ok(())
    }

    /// Whether an answer is of the file we have a part of, and which bytes of it follow.
    fn examine(&self, reply: &Reply, range: Option<(u64, u64)>, part: &Part) -> Result<Body, Fault> {
        let text = |headers: &HeaderMap, name: &str| {
            headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
        };
        let changed = |reason: String| Err(Fault::Changed { reason });
        let (hub, size) = (&reply.hub_headers, self.entry.size);
        if let Some(commit) = text(hub, "x-repo-commit").filter(|commit| commit != self.shared.commit) {
            return changed(format!("the server sends commit {commit}, not {}", self.shared.commit));
        }
        if let Some(linked) = text(hub, "x-linked-size").filter(|linked| *linked != size.to_string()) {
            return changed(format!("the server's file has {linked} bytes, not {size}"));
        }
        let linked = text(hub, "x-linked-etag");
        if let (Digest::Sha256(expected), Some(linked)) = (&self.entry.digest, &linked) {
            let found = linked.trim_start_matches("W/").trim_matches('"');
            if found.len() == 64 && found != expected {
                return changed(format!("the server's file has SHA-256 {found}, not {expected}"));
            }
        }
        let etag = linked.or_else(|| text(reply.headers(), ETAG.as_str()));
        if let (Some(old), Some(new)) = (part.kept.journal.etag(), &etag)
            && part.kept.journal.bytes() > 0
            && old != new
        {
            return changed(format!("it has changed on the server (ETag {new}, was {old})"));
        }
        let (start, end) = match (reply.status(), range) {
            (StatusCode::PARTIAL_CONTENT, Some((first, last))) => {
                let answer = text(reply.headers(), CONTENT_RANGE.as_str());
                let Some((from, to, whole)) = answer.as_deref().and_then(content_range) else {
                    return Err(Fault::retry("the answer does not say which part it is"));
                };
                if whole.is_some_and(|whole| whole != size) {
                    return changed(format!(
                        "the server's file has {} bytes, not {size}",
                        whole.unwrap_or(0)
                    ));
                }
                if from != first || to > last {
                    return Err(Fault::retry(format!(
                        "bytes {first} to {last} were asked for, {from} to {to} are sent"
                    )));
                }
                (first, to + 1)
            }
            (StatusCode::OK, _) => (0, size),
            (status, _) => return Err(Fault::retry(format!("the server answered {status} to no range"))),
        };
        match reply.length() {
            Some(length) if length != end - start => {
                Err(Fault::retry(format!("the answer has {length} bytes, {} were expected", end - start)))
            }
            _ => Ok(Body { start, end, etag }),
        }
    }
}

/// `bytes 0-99/1000`; the whole length may be unknown.
fn content_range(text: &str) -> Option<(u64, u64, Option<u64>)> {
    let (range, whole) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let number = |text: &str| text.parse::<u64>().ok();
    let (first, last) = (number(first)?, number(last).filter(|last| *last < u64::MAX)?);
    let whole = if whole == "*" { None } else { Some(number(whole)?) };
    (first <= last).then_some((first, last, whole))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges_are_read_strictly() {
        assert_eq!(content_range("bytes 5-9/10"), Some((5, 9, Some(10))));
        assert_eq!(content_range("bytes 0-0/*"), Some((0, 0, None)));
        for bad in
            ["", "bytes */10", "bytes 9-5/10", "5-9/10", "bytes -5/10", "bytes 0-18446744073709551615/*"]
        {
            assert_eq!(content_range(bad), None, "{bad}");
        }
    }
}
