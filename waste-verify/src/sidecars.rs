//! The small files beside banks, trunk and codebooks, and what else lies in the directory.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;
use waste_common::cli::Failure;
use waste_common::container::writer::TRUNK_INDEX;
use waste_common::container::{
    CODEBOOKS, ContainerError, MANIFEST, MANIFEST_SHA256, Manifest, Source, TRUNK, integrity,
};
use waste_common::files::LOCK_NAME;
use waste_common::json;

use crate::job::Job;
use crate::report::{Findings, Problem};
use crate::sums;

/// The files a reader looks for beside those the manifest names.
pub(crate) const SIDECARS: [&str; 5] =
    ["tokenizer.model", "specials.json", "vision.json", "chat.json", "chat_template.jinja"];
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
    for name in ["specials.json", "vision.json", "chat.json"] {
        if listing.contains_key(name) {
            check_json(job, name);
        }
    }
    if !listing.contains_key("tokenizer.model") && !files.contains_key("tokenizer.model") {
        job.found.note("tokenizer.model", "the container has no tokenizer: only token ids can be run");
    }
    Ok(())
}

fn check_json(job: &Job, name: &str) {
    // What cannot be opened has been reported if a checksum names the file; else this is the place.
    let named = job.manifest.integrity.as_ref().is_some_and(|sums| sums.files.contains_key(name));
    let source = match Source::open(job.dir, name) {
        Ok(source) => source,
        Err(_) if named => return,
        Err(error) => return job.found.error(name, &error),
    };
    let wrong = match json::read(source.path(), JSON_BYTES_MAX) {
        Ok(value) => shape_problem(name, &value),
        Err(error) => Some(error.to_string()),
    };
    if let Some(message) = wrong {
        job.found.problem(Problem::new(name, "bad_json", message));
    }
}

/// What is wrong with the shape of a JSON sidecar.
fn shape_problem(name: &str, value: &Value) -> Option<String> {
    if name != "specials.json" {
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

/// Compares the manifest with its `sha256sum` line. Of ours, the line must be as it was written; a line added by
/// hand may be any that sha256sum writes.
pub(crate) fn check_manifest_sum(dir: &Path, content: &[u8], strict: bool, found: &Findings) {
    let sum = match integrity::check_manifest_sidecar(dir, content) {
        Ok(true) if strict => {
            let exact = integrity::manifest_sidecar(content);
            let is = Source::open(dir, MANIFEST_SHA256).and_then(|source| {
                let mut line = vec![0; source.bytes().min(1024) as usize];
                source.read_at(0, &mut line).map(|()| line)
            });
            if is.is_ok_and(|line| line != exact.as_bytes()) {
                let message = "the line is not as it was written: the file has changed";
                found.problem(Problem::new(MANIFEST_SHA256, "checksum", message));
            }
            return;
        }
        other => other,
    };
    match sum {
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
