//! Lists of SHA-256 sums in the format of sha256sum, for every file of a container.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use waste_common::cli::Failure;
use waste_common::container::{Source, check_file_name};
use waste_common::files::write_atomic;
use waste_common::json;

use crate::crew::Worker;
use crate::job::Job;
use crate::report::Problem;
use crate::sidecars::{Listing, USAGE, is_lock};

/// File name → lower-case hex SHA-256.
pub(crate) type Sums = BTreeMap<String, String>;

/// A SHA-256 in hex, in lower case.
pub(crate) fn parse_digest(text: &str) -> Option<String> {
    let hex = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    hex.then(|| text.to_ascii_lowercase())
}

/// Reads a list.
///
/// # Errors
/// It cannot be read, or a line is not one of sha256sum (exit 3).
pub(crate) fn read(path: &Path) -> Result<Sums, Failure> {
    let content = json::read_bounded(path, json::MANIFEST_BYTES_MAX)?;
    parse(&String::from_utf8_lossy(&content)).map_err(|(line, problem)| {
        Failure::data("bad_sums", format!("{}, line {line}: {problem}", path.display()))
            .with("file", path.display().to_string())
    })
}

fn parse(text: &str) -> Result<Sums, (usize, String)> {
    let mut sums = Sums::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let fail = |problem: String| (number + 1, problem);
        let (line, escaped) = line.strip_prefix('\\').map_or((line, false), |line| (line, true));
        let parts = line.split_at_checked(64).and_then(|(sum, rest)| {
            let name = rest.strip_prefix("  ").or_else(|| rest.strip_prefix(" *"))?;
            Some((parse_digest(sum)?, name))
        });
        let Some((sum, name)) = parts else {
            return Err(fail("64 hex digits, two spaces and a file name are expected".to_owned()));
        };
        let name = name.strip_prefix("./").unwrap_or(name);
        if escaped {
            return Err(fail(format!("the file name {name:?} holds a line break or a backslash")));
        }
        check_file_name(name).map_err(|problem| fail(format!("the file name {name:?} {problem}")))?;
        if sums.insert(name.to_owned(), sum).is_some() {
            return Err(fail(format!("{name} is listed twice")));
        }
    }
    if sums.is_empty() { Err((1, "it lists no file".to_owned())) } else { Ok(sums) }
}

/// SHA-256 of a file of the container; `None` if it cannot be read, which then is a problem.
pub(crate) fn digest(
    job: &Job,
    source: &Source,
    worker: &mut Worker,
    place: &Problem,
) -> Result<Option<String>, Failure> {
    if let Some(known) = job.resume.sha256(&place.file) {
        job.progress.skip(source.bytes());
        return Ok(Some(known));
    }
    let Some(reader) = job.reader(source, place)? else { return Ok(None) };
    let mut sha = Sha256::new();
    let streamed = worker.stream(&reader, 0, source.bytes(), |piece| sha.update(piece));
    if job.settle(streamed, place)?.is_none() {
        return Ok(None);
    }
    let found: String = sha.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    job.resume.digest(&place.file, &found)?;
    Ok(Some(found))
}

/// The files that a list of sums covers: all but locks, what learns, and the lists themselves.
fn covered(job: &Job, listing: &Listing, lists: &[PathBuf]) -> BTreeSet<String> {
    let same = |name: &str, list: &PathBuf| {
        let canonical = |path: &Path| std::fs::canonicalize(path).ok();
        canonical(&job.dir.join(name)).is_some_and(|path| canonical(list) == Some(path))
    };
    let regular = listing.iter().filter(|(_, size)| size.is_some()).map(|(name, _)| name);
    regular
        .filter(|name| !is_lock(name) && *name != USAGE && *name != crate::sidecars::SUMS)
        .filter(|name| !lists.iter().any(|list| same(name, list)))
        .cloned()
        .collect()
}

/// Compares every file with a list.
pub(crate) fn check(job: &Job, listing: &Listing, sums: &Sums, lists: &[PathBuf]) -> Result<(), Failure> {
    for name in covered(job, listing, lists) {
        if !sums.contains_key(&name) {
            let message = "the file is not in the list of checksums";
            job.found.problem(Problem::new(&name, "extra_file", message));
        }
    }
    let listed: Vec<_> = sums.iter().collect();
    job.crew.each(listed.len(), job.progress, |at, worker| {
        let (name, expected) = listed[at];
        let place = Problem::new(name, "", "");
        let Some(source) = job.open(&place) else { return Ok(()) };
        if let Some(found) = digest(job, &source, worker, &place)?.filter(|found| found != expected) {
            let message = format!("sha256 is {found}, the list of checksums says {expected}");
            job.found.problem(Problem { kind: "sums_mismatch", message, ..place });
        }
        Ok(())
    })
}

/// Writes the list of every file.
pub(crate) fn write(job: &Job, listing: &Listing, path: &Path, lists: &[PathBuf]) -> Result<(), Failure> {
    let names: Vec<_> =
        covered(job, listing, lists).into_iter().filter(|name| !name.ends_with(".tmp")).collect();
    let sums = std::sync::Mutex::new(Sums::new());
    job.crew.each(names.len(), job.progress, |at, worker| {
        let place = Problem::new(&names[at], "", "");
        let Some(source) = job.open(&place) else { return Ok(()) };
        if let Some(sum) = digest(job, &source, worker, &place)? {
            let mut sums = sums.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            sums.insert(names[at].clone(), sum);
        }
        Ok(())
    })?;
    let sums = sums.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    if sums.len() < names.len() {
        return Ok(());
    }
    let lines: String = sums.iter().map(|(name, sum)| format!("{sum}  {name}\n")).collect();
    Ok(write_atomic(path, lines.as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_sha256sum_are_understood() {
        let (a, b) = ("A".repeat(64), "0".repeat(64));
        let sums = parse(&format!("{a}  trunk.bin\r\n\n{b} *a b\n{b}  ./c")).unwrap();
        assert_eq!(sums["trunk.bin"], "a".repeat(64));
        assert_eq!(sums.keys().collect::<Vec<_>>(), ["a b", "c", "trunk.bin"]);
    }

    #[test]
    fn other_lines_are_refused_by_number() {
        let sum = "0".repeat(64);
        for text in [
            String::new(),
            format!("{sum} trunk.bin"),
            format!("{}  trunk.bin", &sum[1..]),
            format!("{}g  trunk.bin", &sum[1..]),
            format!("{sum}  ../trunk.bin"),
            format!("{sum}  /etc/passwd"),
            format!("\\{sum}  a\\nb"),
            "é".repeat(80),
        ] {
            assert_eq!(parse(&text).unwrap_err().0, 1, "{text}");
        }
        let twice = format!("{sum}  a\n{sum}  a\n");
        assert_eq!(parse(&twice).unwrap_err(), (2, "a is listed twice".to_owned()));
    }
}
