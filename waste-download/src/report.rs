//! The results. The keys are those of the JSON.

use std::fmt::Write;

use serde::Serialize;
use waste_common::cli::{ByteSize, Failure, Output};

use crate::survey::{Found, Status};

/// A download that is complete.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Done {
    pub checkpoint: String,
    pub repo: String,
    pub commit: String,
    pub files: u64,
    pub bytes: u64,
    /// Received over the network by this run.
    pub fetched_bytes: u64,
    /// Files that were removed after use, and not fetched again.
    pub reclaimed: u64,
    pub seconds: f64,
}

/// What a download would do.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct DryRun {
    pub dest: String,
    pub repo: String,
    pub commit: String,
    pub files: u64,
    pub bytes: u64,
    pub missing_files: u64,
    pub missing_bytes: u64,
    /// With the reserve.
    pub disk_needed_bytes: u64,
    pub disk_free_bytes: Option<u64>,
    /// None where the system does not say what is free.
    pub disk_fits: Option<bool>,
    pub list: Vec<DryRunFile>,
}

/// A file of a dry run.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct DryRunFile {
    pub file: String,
    pub size: u64,
    /// `done`, `reclaimed`, `partial` or `absent`.
    pub status: &'static str,
    pub missing_bytes: u64,
}

impl DryRunFile {
    pub(crate) fn new(found: &Found) -> DryRunFile {
        DryRunFile {
            file: found.entry.name.clone(),
            size: found.entry.size,
            status: match found.status {
                Status::Done => "done",
                Status::Reclaimed => "reclaimed",
                Status::Partial(0) => "absent",
                Status::Partial(_) => "partial",
            },
            missing_bytes: found.missing_bytes(),
        }
    }
}

/// What a check found.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Check {
    pub checkpoint: String,
    pub repo: String,
    pub commit: String,
    /// `local` or `server`.
    pub against: &'static str,
    pub ok: bool,
    pub files: u64,
    pub bytes: u64,
    pub reclaimed: u64,
    pub problems: Vec<Problem>,
    pub seconds: f64,
}

/// Something wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct Problem {
    pub file: String,
    /// `absent`, `short`, `long`, `corrupt`, `unverified` or `not_a_file`.
    pub kind: &'static str,
    pub expected_bytes: u64,
    pub message: String,
}

/// A result for people.
pub(crate) trait Text: Serialize {
    fn text(&self) -> String;
}

/// Prints a result, for programs or for people.
pub(crate) fn print(report: &impl Text, output: &Output) -> Result<(), Failure> {
    if output.json() { output.result(report) } else { output.text().write_all(report.text().as_bytes()) }
}

impl Text for Done {
    fn text(&self) -> String {
        let rate = ByteSize((self.fetched_bytes as f64 / self.seconds.max(1e-3)) as u64);
        format!(
            "{}: {} files of {} at {}, {}; {} fetched in {:.1} s, {rate}/s\n",
            self.checkpoint,
            self.files,
            self.repo,
            short(&self.commit),
            ByteSize(self.bytes),
            ByteSize(self.fetched_bytes),
            self.seconds
        )
    }
}

impl Text for DryRun {
    fn text(&self) -> String {
        let mut text = String::new();
        for file in &self.list {
            // Writing to a string cannot fail.
            let _ =
                writeln!(text, "{:>12}  {:9}  {}", ByteSize(file.size).to_string(), file.status, file.file);
        }
        let disk = match (self.disk_fits, self.disk_free_bytes) {
            (Some(fits), Some(free)) => {
                let verdict = if fits { "it fits" } else { "it does NOT fit" };
                format!(", {} free: {verdict}", ByteSize(free))
            }
            _ => String::new(),
        };
        let _ = writeln!(
            text,
            "{} at {}: {} files, {}; {} files, {} to fetch; {} needed on the disk{disk}",
            self.repo,
            short(&self.commit),
            self.files,
            ByteSize(self.bytes),
            self.missing_files,
            ByteSize(self.missing_bytes),
            ByteSize(self.disk_needed_bytes)
        );
        text
    }
}

impl Text for Check {
    fn text(&self) -> String {
        let mut text = String::new();
        for problem in &self.problems {
            let _ = writeln!(text, "{}: {}: {}", problem.file, problem.kind, problem.message);
        }
        let verdict = match self.problems.len() {
            0 => "all right".to_owned(),
            count => format!("{count} NOT right; run the download again to fetch what is bad"),
        };
        let _ = writeln!(
            text,
            "{}: {} files of {} at {}, {}: {verdict}",
            self.checkpoint,
            self.files,
            self.repo,
            short(&self.commit),
            ByteSize(self.bytes)
        );
        text
    }
}

fn short(commit: &str) -> &str {
    commit.get(..12).unwrap_or(commit)
}
