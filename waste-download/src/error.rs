//! Why a download ends without its result.

use std::path::PathBuf;

use serde_json::{Map, Value};
use waste_common::error::{Coded, Exit};
use waste_common::files::FileError;
use waste_common::staging::StagingError;

/// Why a download ends without its result.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum DownloadError {
    #[error("interrupted")]
    Interrupted,
    #[error(
        "{what}: the hub wants to know who asks (401): the repository is private, or its name is misspelt; \
         give a token with --token-file or HF_TOKEN"
    )]
    Unauthorized { what: String },
    #[error(
        "{what}: access is refused (403): the repository is gated; accept its licence on the hub's page with the \
         account of your token, and give the token with --token-file or HF_TOKEN"
    )]
    Forbidden { what: String },
    #[error("{what}: there is no such repository, revision or file on the hub (404)")]
    NotFound { what: String },
    #[error("{what}: {problem}")]
    Refused { what: String, problem: String },
    #[error(
        "{what}: gave up after {tries} failures in a row, the last one: {last}; run the same command to go on"
    )]
    Network { what: String, tries: u32, last: String },
    #[error("the hub's answer for {what} cannot be used: {problem}")]
    Answer { what: String, problem: String },
    #[error(
        "{name}: its content is wrong ({found}, the hub says {expected}) after {tries} downloads; the last one is kept \
         as {}",
        kept.display()
    )]
    Corrupt { name: String, expected: String, found: String, tries: u32, kept: PathBuf },
    #[error("{name} keeps changing on the server; try again later")]
    Changing { name: String },
    #[error(
        "not enough room in {}: {needed_bytes} bytes and a reserve of {reserve_bytes} are needed, {free_bytes} are \
         free; what is there is kept: make room and run the same command, or use --wait-for-space",
        dir.display()
    )]
    Space { dir: PathBuf, needed_bytes: u64, reserve_bytes: u64, free_bytes: u64 },
    #[error("{}: {problem}", dir.display())]
    Dest { dir: PathBuf, code: &'static str, problem: String },
    #[error("the checkpoint is not whole: {problem}")]
    Incomplete { problem: String },
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Staging(#[from] StagingError),
    #[error("{0}")]
    Internal(String),
}

impl Coded for DownloadError {
    fn exit(&self) -> Exit {
        match self {
            DownloadError::Interrupted => Exit::Interrupted,
            DownloadError::Unauthorized { .. }
            | DownloadError::Forbidden { .. }
            | DownloadError::NotFound { .. }
            | DownloadError::Refused { .. }
            | DownloadError::Network { .. }
            | DownloadError::Changing { .. } => Exit::Network,
            DownloadError::Answer { .. }
            | DownloadError::Corrupt { .. }
            | DownloadError::Dest { .. }
            | DownloadError::Incomplete { .. } => Exit::Data,
            DownloadError::Space { .. } => Exit::Space,
            DownloadError::File(error) => error.exit(),
            DownloadError::Staging(error) => error.exit(),
            DownloadError::Internal(_) => Exit::Internal,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            DownloadError::Interrupted => "interrupted",
            DownloadError::Unauthorized { .. } => "unauthorized",
            DownloadError::Forbidden { .. } => "forbidden",
            DownloadError::NotFound { .. } => "not_found",
            DownloadError::Refused { .. } => "refused",
            DownloadError::Network { .. } => "network",
            DownloadError::Answer { .. } => "bad_answer",
            DownloadError::Corrupt { .. } => "corrupt",
            DownloadError::Changing { .. } => "changing",
            DownloadError::Space { .. } => "disk_full",
            DownloadError::Dest { code, .. } => code,
            DownloadError::Incomplete { .. } => "incomplete_checkpoint",
            DownloadError::File(error) => error.code(),
            DownloadError::Staging(error) => error.code(),
            DownloadError::Internal(_) => "internal",
        }
    }

    fn fields(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        let mut put = |key: &str, value: Value| {
            fields.insert(key.to_owned(), value);
        };
        match self {
            DownloadError::Corrupt { name, kept, .. } => {
                put("file", name.as_str().into());
                put("kept", kept.display().to_string().into());
            }
            DownloadError::Changing { name } => put("file", name.as_str().into()),
            DownloadError::Space { needed_bytes, reserve_bytes, free_bytes, .. } => {
                put("needed_bytes", (*needed_bytes).into());
                put("reserve_bytes", (*reserve_bytes).into());
                put("free_bytes", (*free_bytes).into());
            }
            DownloadError::Network { tries, .. } => put("tries", (*tries).into()),
            DownloadError::File(error) => return error.fields(),
            DownloadError::Staging(error) => return error.fields(),
            _ => {}
        }
        fields
    }
}

impl DownloadError {
    /// Whether the disk is full: by our own count, or by the system's.
    pub(crate) fn is_full(&self) -> bool {
        self.exit() == Exit::Space
    }

    /// Whether the other files cannot fare better.
    pub(crate) fn stops_all(&self) -> bool {
        !matches!(
            self,
            DownloadError::NotFound { .. } | DownloadError::Corrupt { .. } | DownloadError::Changing { .. }
        )
    }
}
