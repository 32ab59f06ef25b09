//! What the hub knows of a repository: its commit, its files, their lengths and checksums.

use std::collections::HashSet;

use serde::Deserialize;
use serde_json::Value;
use waste_common::staging::{check_relative_name, is_sha256};

use crate::error::DownloadError;
use crate::http::{Connection, Fault, Hub};

/// Largest listing that is read.
const LISTING_BYTES_MAX: usize = 64 << 20;

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its relative name, with `/` between the parts.
    pub name: String,
    /// Its length.
    pub size: u64,
    /// What its content must have.
    pub digest: Digest,
}

/// The checksum of a file's content, lower-case hex.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Digest {
    /// Of a large file: SHA-256.
    Sha256(String),
    /// Of a small one: SHA-1 of git's blob.
    GitBlob(String),
}

/// A repository at one commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// The commit.
    pub commit: String,
    /// Its files.
    pub entries: Vec<Entry>,
}

/// Asks the hub once.
pub(crate) fn list(connection: &Connection, hub: &Hub, repo: &str, revision: &str) -> Result<Listing, Fault> {
    let what = format!("{repo} at {revision}");
    let mut parts = vec!["api", "models"];
    parts.extend(repo.split('/'));
    parts.extend(["revision", revision]);
    let mut url = hub.url(&parts);
    url.set_query(Some("blobs=true"));
    let mut reply = connection.get(url, None, &what)?;
    let body = connection.body(&mut reply, LISTING_BYTES_MAX, &what)?;
    let listing = parse(&body).map_err(|problem| Fault::Fatal(DownloadError::Answer { what, problem }))?;
    if is_commit(revision) && listing.commit != revision {
        return Err(Fault::Fatal(DownloadError::Answer {
            what: format!("{repo} at {revision}"),
            problem: format!("it is of commit {}", listing.commit),
        }));
    }
    Ok(listing)
}

/// Whether a revision is a commit, not a name that may move.
pub(crate) fn is_commit(revision: &str) -> bool {
    is_hex(revision, 40)
}

fn is_hex(text: &str, len: usize) -> bool {
    text.len() == len && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn parse(body: &[u8]) -> Result<Listing, String> {
    #[derive(Deserialize)]
    struct Raw {
        sha: String,
        siblings: Vec<Sibling>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Sibling {
        rfilename: String,
        size: Option<u64>,
        blob_id: Option<String>,
        lfs: Option<Lfs>,
    }
    #[derive(Deserialize)]
    struct Lfs {
        #[serde(alias = "oid")]
        sha256: String,
        size: u64,
    }
    // Through a value: its nesting is bounded, and a doubled key is no error of ours.
    let value: Value = serde_json::from_slice(body).map_err(|error| error.to_string())?;
    let raw = Raw::deserialize(value).map_err(|error| error.to_string())?;
    if !is_commit(&raw.sha) {
        return Err(format!("its commit is {:?}", raw.sha));
    }
    let mut entries = Vec::new();
    for sibling in raw.siblings {
        let name = sibling.rfilename;
        let fail = |problem: &str| Err(format!("the file {name:?} {problem}"));
        if let Err(problem) = check_relative_name(&name) {
            return fail(problem);
        }
        if name.to_ascii_lowercase().starts_with(".waste") {
            return fail("has a name that is reserved for what the download itself keeps");
        }
        // git itself has no such file; who later asks git about the directory would run what its configuration says.
        if name.split('/').any(|part| [".git", "git~1"].iter().any(|git| part.eq_ignore_ascii_case(git))) {
            return fail("lies where git keeps its own");
        }
        let (size, digest) = match (sibling.lfs, sibling.size, sibling.blob_id) {
            (Some(lfs), _, _) if is_sha256(&lfs.sha256) => (lfs.size, Digest::Sha256(lfs.sha256)),
            (Some(_), _, _) => return fail("has a bad SHA-256"),
            (None, Some(size), Some(blob)) if is_hex(&blob, 40) => (size, Digest::GitBlob(blob)),
            _ => return fail("has no length or no checksum"),
        };
        if size > i64::MAX as u64 {
            return fail("is larger than a file can be");
        }
        entries.push(Entry { name, size, digest });
    }
    entries.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    let mut seen = HashSet::new();
    if let Some(entry) = entries.iter().find(|entry| !seen.insert(file_here(&entry.name))) {
        return Err(format!("two files are called {:?}, or would be here", entry.name));
    }
    let is_file = |at: (usize, &str), name: &str| seen.contains(&file_here(&name[..at.0]));
    let inside = |entry: &&Entry| entry.name.match_indices('/').any(|at| is_file(at, &entry.name));
    if let Some(entry) = entries.iter().find(inside) {
        return Err(format!("the file {:?} lies within a file", entry.name));
    }
    Ok(Listing { commit: raw.sha, entries })
}

/// What makes two names one file on this system.
fn file_here(name: &str) -> String {
    if cfg!(any(windows, target_os = "macos")) { name.to_lowercase() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn listing(files: Value) -> Result<Listing, String> {
        parse(json!({"sha": "a".repeat(40), "siblings": files, "other": 1}).to_string().as_bytes())
    }

    #[test]
    fn large_and_small_files_are_told_apart() {
        let files = json!([
            {"rfilename": "m/x.safetensors", "size": 7, "blobId": "b".repeat(40),
             "lfs": {"sha256": "c".repeat(64), "size": 7, "pointerSize": 134}},
            {"rfilename": "config.json", "size": 2, "blobId": "d".repeat(40)},
            {"rfilename": "m/.gitattributes", "size": 3, "blobId": "e".repeat(40)},
        ]);
        let entry = |name: &str, size, digest| Entry { name: name.to_owned(), size, digest };
        assert_eq!(
            listing(files).unwrap(),
            Listing {
                commit: "a".repeat(40),
                entries: vec![
                    entry("config.json", 2, Digest::GitBlob("d".repeat(40))),
                    entry("m/.gitattributes", 3, Digest::GitBlob("e".repeat(40))),
                    entry("m/x.safetensors", 7, Digest::Sha256("c".repeat(64))),
                ],
            }
        );
    }

    #[test]
    fn what_is_no_listing_is_refused() {
        let small = |name: &str| json!({"rfilename": name, "size": 1, "blobId": "d".repeat(40)});
        for (files, words) in [
            (json!([small("../x")]), "`..`"),
            (json!([small("/etc/passwd")]), "1 to 255 bytes"),
            (json!([small("a/../../b")]), "`..`"),
            (json!([small("c:\\x")]), "colon"),
            (json!([small(".waste-download.json")]), "reserved"),
            (json!([small(".WASTE-parts/x")]), "reserved"),
            (json!([small(".git/config")]), "git"),
            (json!([small("a/.GIT")]), "git"),
            (json!([small("a/git~1/hooks/post-checkout")]), "git"),
            (json!([small("a"), small("a")]), "two files"),
            (json!([small("a/b/c"), small("a.b"), small("a/b")]), "within a file"),
            (json!([{"rfilename": "a", "size": 1}]), "no checksum"),
            (json!([{"rfilename": "a", "blobId": "d".repeat(40)}]), "no length"),
            (json!([{"rfilename": "a", "size": -1, "blobId": "d".repeat(40)}]), "-1"),
            (json!([{"rfilename": "a", "lfs": {"sha256": "x", "size": 1}}]), "SHA-256"),
            (json!([{"rfilename": "a", "lfs": {"sha256": "c".repeat(64), "size": u64::MAX}}]), "larger"),
            (json!({}), "invalid type"),
        ] {
            let problem = listing(files.clone()).unwrap_err();
            assert!(problem.contains(words), "{files}: {problem}");
        }
        assert!(parse(b"<html>").is_err());
        assert!(parse("[".repeat(100_000).as_bytes()).is_err());
        assert!(parse(br#"{"sha":"main","siblings":[]}"#).unwrap_err().contains("main"));
    }
}
