//! What was found: problems, notes, and the result that is printed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Mutex, PoisonError};

use serde::Serialize;
use waste_common::cli::Failure;
use waste_common::container::ContainerError;
use waste_common::error::{Coded, Exit};
use waste_common::io::ReadError;

use crate::repair::Repaired;
use crate::source::SourceReport;

/// Problems and notes listed at most; more are counted only.
pub const LISTED_MAX: usize = 1000;

/// Something wrong with the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Default)]
pub struct Problem {
    /// The file's name in the container.
    pub file: String,
    /// A stable name for scripts, such as `checksum`.
    pub kind: &'static str,
    /// The layer, where it is one's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<u32>,
    /// The expert, where it is one's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert: Option<u32>,
    /// The trunk tensor, where it is one's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor: Option<String>,
    /// Where in the file the damaged part begins, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// What was expected and found.
    pub message: String,
}

impl Problem {
    /// A problem of a whole file.
    pub fn new(file: &str, kind: &'static str, message: impl Into<String>) -> Self {
        Problem { file: file.to_owned(), kind, message: message.into(), ..Problem::default() }
    }

    /// The same, of a layer.
    #[must_use]
    pub fn layer(mut self, layer: u32) -> Self {
        self.layer = Some(layer);
        self
    }

    /// The same, of an expert.
    #[must_use]
    pub fn expert(mut self, expert: u32) -> Self {
        self.expert = Some(expert);
        self
    }

    /// The same, of a trunk tensor.
    #[must_use]
    pub fn tensor(mut self, tensor: &str) -> Self {
        self.tensor = Some(tensor.to_owned());
        self
    }

    /// The same, from an offset on.
    #[must_use]
    pub fn offset(mut self, offset: u64) -> Self {
        self.offset = Some(offset);
        self
    }

    /// What the container module found, in the words of a report: the place is told by the keys.
    pub fn from_error(file: &str, error: &ContainerError) -> Self {
        match error {
            ContainerError::File(inner) => {
                let missing = matches!(
                    inner,
                    waste_common::files::FileError::Io { source, .. }
                        if source.kind() == std::io::ErrorKind::NotFound
                );
                if missing {
                    return Problem::new(file, "missing_file", "the file is missing");
                }
                Problem::new(file, "unreadable", inner.to_string())
            }
            ContainerError::Unusable { problem, .. } => {
                Problem::new(file, "unusable_file", problem.to_string())
            }
            ContainerError::Size { what, expected, found, .. } => Problem::new(
                file,
                "wrong_size",
                format!("the file has {found} bytes, but {what} needs {expected}"),
            ),
            ContainerError::Record { field, expected, found, .. } => {
                let kind = match *field {
                    "crc32" => "checksum",
                    "padding" => "padding",
                    _ => "header",
                };
                Problem::new(file, kind, format!("{field} is {found}, expected {expected}"))
            }
            ContainerError::Codebook { id, field, expected, found, .. } => {
                let kind = if *field == "padding slot" { "padding" } else { "header" };
                Problem::new(file, kind, format!("codebook {id}: {field} is {found}, expected {expected}"))
            }
            ContainerError::Checksum { what, expected, found, .. } => Problem::new(
                file,
                "checksum",
                format!(
                    "checksum of {what} is {found}, expected {expected}: the content has changed since it was written"
                ),
            ),
            ContainerError::Quant { source, .. } => Problem::new(file, source.code(), source.to_string()),
            other => Problem::new(file, other.code(), other.to_string()),
        }
    }

    /// By layer, file, expert and offset: the same whatever the number of threads.
    fn key(&self) -> impl Ord + '_ {
        (self.layer, &self.file, self.expert, self.offset, &self.tensor, self.kind, &self.message)
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file)?;
        if let Some(layer) = self.layer {
            write!(f, ", layer {layer}")?;
        }
        if let Some(expert) = self.expert {
            write!(f, ", expert {expert}")?;
        }
        if let Some(tensor) = &self.tensor {
            write!(f, ", tensor {tensor}")?;
        }
        if let Some(offset) = self.offset {
            write!(f, ", offset {offset}")?;
        }
        write!(f, ": {}", self.message)
    }
}

/// Something worth knowing that is no problem.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Note {
    /// The file's name in the container.
    pub file: String,
    /// What about it.
    pub message: String,
}

/// Collects what several threads find, in an order of its own and within bounds.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    problems: Vec<Problem>,
    count: u64,
    /// Problems of each file.
    of_file: BTreeMap<String, u64>,
    notes: BTreeSet<Note>,
    unprotected: Vec<String>,
}

impl Findings {
    fn with<T>(&self, act: impl FnOnce(&mut Inner) -> T) -> T {
        act(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds a problem.
    pub fn problem(&self, problem: Problem) {
        self.with(|inner| {
            inner.count += 1;
            *inner.of_file.entry(problem.file.clone()).or_default() += 1;
            inner.problems.push(problem);
            if inner.problems.len() >= 2 * LISTED_MAX {
                inner.trim();
            }
        });
    }

    /// Adds what the container module found.
    pub fn error(&self, file: &str, error: &ContainerError) {
        self.problem(Problem::from_error(file, error));
    }

    /// Adds a note.
    pub fn note(&self, file: &str, message: impl Into<String>) {
        self.with(|inner| {
            inner.notes.insert(Note { file: file.to_owned(), message: message.into() });
            if inner.notes.len() > LISTED_MAX {
                inner.notes.pop_last();
            }
        });
    }

    /// Adds a part that has no checksum.
    pub fn unprotected(&self, part: impl Into<String>) {
        self.with(|inner| inner.unprotected.push(part.into()));
    }

    /// How many problems a file has so far.
    pub fn problems_of(&self, file: &str) -> u64 {
        self.with(|inner| inner.of_file.get(file).copied().unwrap_or(0))
    }

    /// Whether there is no problem so far.
    pub fn sound(&self) -> bool {
        self.with(|inner| inner.count == 0)
    }

    /// What was found: the problems listed, how many there are, the notes, the parts without a checksum.
    pub fn take(self) -> (Vec<Problem>, u64, Vec<Note>, Vec<String>) {
        let mut inner = self.inner.into_inner().unwrap_or_else(PoisonError::into_inner);
        inner.trim();
        (inner.problems, inner.count, inner.notes.into_iter().collect(), inner.unprotected)
    }
}

impl Inner {
    fn trim(&mut self) {
        self.problems.sort_by(|a, b| a.key().cmp(&b.key()));
        self.problems.truncate(LISTED_MAX);
    }
}

/// Why a read was given up.
#[derive(Debug)]
pub(crate) enum Halt {
    /// The file cannot be read there: a finding.
    Read(ReadError),
    /// The work ends: interrupted, or out of memory.
    Stop(Failure),
}

impl From<ReadError> for Halt {
    fn from(error: ReadError) -> Self {
        Halt::Read(error)
    }
}

impl From<Failure> for Halt {
    fn from(failure: Failure) -> Self {
        Halt::Stop(failure)
    }
}

impl Halt {
    /// A read error becomes a problem made of `place`; what ends the work stays an error.
    pub fn into_problem(self, place: Problem) -> Result<Problem, Failure> {
        match self {
            Halt::Stop(failure) => Err(failure),
            Halt::Read(error) if error.exit() == Exit::Internal => Err(error.into()),
            Halt::Read(error) => {
                let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
                let message = format!("{error}{}", cause.unwrap_or_default());
                Ok(Problem { kind: "unreadable", message, ..place })
            }
        }
    }
}

/// What was found in one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FileResult {
    /// Its name in the container.
    pub file: String,
    /// Its length; none if it is missing.
    pub bytes: Option<u64>,
    /// Whether nothing is wrong with it.
    pub ok: bool,
    /// How many problems it has.
    pub problem_count: u64,
}

/// The result.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The directory, as it was given.
    pub container: String,
    /// Whether nothing is wrong.
    pub ok: bool,
    /// `full`, or `quick`: headers and sizes only.
    pub mode: &'static str,
    /// Files of the container.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Each of them.
    pub file_results: Vec<FileResult>,
    /// MoE layers.
    pub layers: u64,
    /// Expert records.
    pub experts: u64,
    /// Trunk tensors.
    pub tensors: u64,
    /// SHA-256 of `manifest.json`.
    pub manifest_sha256: String,
    /// The parts that have no checksum.
    pub unprotected: Vec<String>,
    /// How many problems there are.
    pub problem_count: u64,
    /// The first thousand of them, by layer, file, expert and offset.
    pub problems: Vec<Problem>,
    /// What is no problem, such as files the manifest does not know.
    pub notes: Vec<Note>,
    /// What --repair copied.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub repaired: Vec<Repaired>,
    /// Whether --seal has written checksums.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sealed: Option<bool>,
    /// The comparison with the checkpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<SourceReport>,
    /// Time taken.
    pub seconds: f64,
}
