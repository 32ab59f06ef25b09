//! The small files beside banks, trunk and codebooks, and what else lies in the directory.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;
use waste_common::cli::Failure;
use waste_common::container::writer::TRUNK_INDEX;
use waste_common::container::{
    CODEBOOKS, ContainerError, MANIFEST, MANIFEST_SHA256, Manifest, Source, TRUNK, integrity,
};
use waste_common::error::Coded;
use waste_common::files::LOCK_NAME;
use waste_common::json;
use waste_common::tokens::{RANK_FILE_BYTES_MAX, Ranks, SPECIALS_FILE_BYTES_MAX, Specials};

use crate::job::Job;
use crate::report::{Findings, Problem};
use crate::sums;

const TOKENIZER: &str = "tokenizer.model";
const SPECIALS: &str = "specials.json";
/// The files a reader looks for beside those the manifest names.
pub(crate) const SIDECARS: [&str; 5] =
    [TOKENIZER, SPECIALS, "vision.json", "chat.json", "chat_template.jinja"];
/// Learned expert usage: changes with every run that learns, so it has no checksum.
pub(crate) const USAGE: &str = "usage.waste";
/// The usual name of a list of checksums.
pub(crate) const SUMS: &str = "SHA256SUMS";
const JSON_BYTES_MAX: u64 = json::MANIFEST_BYTES_MAX;

/// Regular files of the directory and their sizes; `None` for what is no regular file.
pub(crate) type Listing = BTreeMap<String, Option<u64>>;

/// Lists the directory.
pub(crate) fn list(dir: &Path) -> Result<Listing, Failure> {
    let fail = |error| Failure::data("unreadable_file", format!("cannot list {}: {error}", dir.display()));
    let mut files = Listing::new();
    for entry in std::fs::read_dir(dir).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        let meta = std::fs::metadata(entry.path()).ok().filter(std::fs::Metadata::is_file);
        files.insert(entry.file_name().to_string_lossy().into_owned(), meta.map(|meta| meta.len()));
    }
    Ok(files)
}

/// The names of all files that belong to the container, present or not, but for optional ones.
pub(crate) fn members(manifest: &Manifest, listing: &Listing) -> BTreeSet<String> {
    let mut names: BTreeSet<String> = [MANIFEST, TRUNK].map(str::to_owned).into();
    if !manifest.layers.is_empty() {
        names.insert(CODEBOOKS.to_owned());
    }
    names.extend(manifest.layers.values().map(|bank| bank.file.clone()));
    if let Some(sums) = &manifest.integrity {
        names.extend(sums.files.keys().cloned());
    }
    let optional = SIDECARS.iter().chain(&[MANIFEST_SHA256, USAGE]);
    names.extend(optional.filter(|name| listing.contains_key(**name)).map(|name| (*name).to_owned()));
    names
}

/// Checks size, checksum and content of the small files.
pub(crate) fn check(job: &Job, listing: &Listing) -> Result<(), Failure> {
    let none = BTreeMap::new();
    let files = job.manifest.integrity.as_ref().map_or(&none, |sums| &sums.files);
    let named: Vec<_> = files.iter().collect();
    job.crew.each(named.len(), job.progress, |at, worker| {
        let (name, expected) = named[at];
        let place = Problem::new(name, "", "");
        let Some(source) = job.open(&place) else { return Ok(()) };
        if source.bytes() != expected.bytes {
            let message = format!("the file has {} bytes, expected {}", source.bytes(), expected.bytes);
            job.found.problem(Problem { kind: "wrong_size", message, ..place });
        } else if !job.quick {
            let Some(found) = sums::digest(job, &source, worker, &place)? else { return Ok(()) };
            if found != expected.sha256 {
                let message = format!(
                    "sha256 is {found}, expected {}: the content has changed since it was written",
                    expected.sha256
                );
                job.found.problem(Problem { kind: "checksum", message, ..place });
            }
        }
        Ok(())
    })?;
    for name in SIDECARS.iter().chain(&[USAGE]) {
        if listing.contains_key(*name) && !files.contains_key(*name) {
            job.found.unprotected(*name);
        }
    }
    let ranks = match listing.contains_key(TOKENIZER) {
        true => read(job, TOKENIZER, RANK_FILE_BYTES_MAX).and_then(|content| check_ranks(job, &content)),
        false => None,
    };
    for name in [SPECIALS, "vision.json", "chat.json"] {
        if listing.contains_key(name) {
            check_json(job, name, ranks);
        }
    }
    if !listing.contains_key(TOKENIZER) && !files.contains_key(TOKENIZER) {
        job.found.note(TOKENIZER, "the container has no tokenizer: only token ids can be run");
    }
    Ok(())
}

/// Reads a small file.
fn read(job: &Job, name: &str, max: u64) -> Option<Vec<u8>> {
    // What cannot be opened has been reported if a checksum names the file; else this is the place.
    let named = job.manifest.integrity.as_ref().is_some_and(|sums| sums.files.contains_key(name));
    let source = match Source::open(job.dir, name) {
        Ok(source) => source,
        Err(_) if named => return None,
        Err(error) => {
            job.found.error(name, &error);
            return None;
        }
    };
    let content = json::read_bounded(source.path(), max);
    content.map_err(|error| job.found.problem(Problem::new(name, "unreadable", error.to_string()))).ok()
}

/// How many tokens the rank file has, if the engine can use it.
fn check_ranks(job: &Job, content: &[u8]) -> Option<usize> {
    match Ranks::parse(content) {
        Ok(ranks) => Some(ranks.len()),
        Err(error) => {
            let message = format!("the rank file is damaged: {error}");
            job.found.problem(Problem::new(TOKENIZER, error.code(), message));
            None
        }
    }
}

/// Checks a JSON file's shape; of special tokens, that they follow the `ranks`.
fn check_json(job: &Job, name: &str, ranks: Option<usize>) {
    let max = if name == SPECIALS { SPECIALS_FILE_BYTES_MAX } else { JSON_BYTES_MAX };
    let Some(content) = read(job, name, max) else { return };
    let wrong = match json::parse(&job.dir.join(name), &content) {
        Ok(value) => shape_problem(name, &value),
        Err(error) => Some(error.to_string()),
    };
    if let Some(message) = wrong {
        job.found.problem(Problem::new(name, "bad_json", message));
    } else if name == SPECIALS
        && let Some(Err(error)) = ranks.map(|ranks| Specials::from_container(ranks, &content))
    {
        let message = format!("the special tokens cannot be used: {error}");
        job.found.problem(Problem::new(name, error.code(), message));
    }
}

/// What is wrong with the shape of a JSON sidecar.
fn shape_problem(name: &str, value: &Value) -> Option<String> {
    if name != SPECIALS {
        return (!value.is_object()).then(|| "a JSON object is expected".to_owned());
    }
    let Some(list) = value.as_array() else { return Some("a JSON array is expected".to_owned()) };
    let fits = |entry: &Value| {
        let id = entry.get("id").and_then(Value::as_u64);
        id.is_some_and(|id| id <= u64::from(u32::MAX)) && entry.get("text").is_some_and(Value::is_string)
    };
    let at = list.iter().position(|entry| !fits(entry))?;
    Some(format!("entry {at}: {{\"id\": integer, \"text\": string}} is expected"))
}

/// Compares the manifest with its `sha256sum` line.
pub(crate) fn check_manifest_sum(dir: &Path, content: &[u8], found: &Findings) {
    match integrity::check_manifest_sidecar(dir, content) {
        Ok(true) => {}
        Ok(false) => found.unprotected(MANIFEST),
        Err(error @ ContainerError::Checksum { .. }) => found.error(MANIFEST, &error),
        Err(error) => found.error(MANIFEST_SHA256, &error),
    }
}

/// Notes what lies in the directory and is no part of the container.
pub(crate) fn note_strangers(listing: &Listing, members: &BTreeSet<String>, found: &Findings) {
    for (name, size) in listing {
        if members.contains(name) || name == SUMS {
            continue;
        }
        let part = name.strip_prefix("codebooks-L").and_then(|rest| rest.strip_suffix(".bin"));
        let message = if size.is_none() {
            "no regular file; readers ignore it"
        } else if name.ends_with(".tmp") || name == TRUNK_INDEX || part.is_some() {
            "a work file of a conversion that did not end, or goes on; readers ignore it, it can be removed after"
        } else if is_lock(name) {
            continue;
        } else {
            "not named by the manifest; readers ignore it"
        };
        found.note(name, message);
    }
}

/// The lock of a container in use, or its leftover.
pub(crate) fn is_lock(name: &str) -> bool {
    name.starts_with(LOCK_NAME)
}
