//! What can be wrong with a container.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::{Coded, Exit};
use crate::files::FileError;
use crate::json::JsonError;
use crate::quant::QuantError;

/// Why a container could not be read or written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ContainerError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Json(#[from] JsonError),
    #[error(
        "{}: format_version is {found}; only 0 is understood: convert the model again, or use a newer version",
        file.display()
    )]
    FormatVersion { file: PathBuf, found: String },
    #[error("{}: {at}: {problem}", file.display())]
    Manifest { file: PathBuf, at: String, problem: String },
    #[error("{}: {problem}", file.display())]
    Unusable { file: PathBuf, problem: String },
    #[error(
        "{} has {found} bytes, but {what} needs {expected}: the file is damaged or of another container",
        file.display()
    )]
    Size { file: PathBuf, what: String, expected: u64, found: u64 },
    #[error(
        "{}, layer {layer}, expert {expert}: {field} is {found}, expected {expected}; run waste-verify, then fetch \
         or convert this layer again",
        file.display()
    )]
    Record { file: PathBuf, layer: u32, expert: u32, field: &'static str, expected: String, found: String },
    #[error("{}, codebook {id}: {field} is {found}, expected {expected}", file.display())]
    Codebook { file: PathBuf, id: u32, field: &'static str, expected: String, found: String },
    #[error(
        "{}, {what}: checksum is {found}, expected {expected}: the content has changed since it was written",
        file.display()
    )]
    Checksum { file: PathBuf, what: String, offset: Option<u64>, expected: String, found: String },
    #[error("{}, tensor {tensor}: {problem}", file.display())]
    Tensor { file: PathBuf, tensor: String, problem: String },
    #[error("{what}: {source}")]
    Quant { what: String, source: QuantError },
}

impl ContainerError {
    pub(super) fn manifest(file: &Path, at: impl Into<String>, problem: impl Into<String>) -> Self {
        ContainerError::Manifest { file: file.to_owned(), at: at.into(), problem: problem.into() }
    }

    pub(super) fn unusable(file: &Path, problem: impl Into<String>) -> Self {
        ContainerError::Unusable { file: file.to_owned(), problem: problem.into() }
    }
}

impl Coded for ContainerError {
    fn exit(&self) -> Exit {
        match self {
            ContainerError::File(error) => error.exit(),
            ContainerError::Json(error) => error.exit(),
            ContainerError::Quant { source, .. } => source.exit(),
            _ => Exit::Data,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            ContainerError::File(error) => error.code(),
            ContainerError::Json(error) => error.code(),
            ContainerError::FormatVersion { .. } => "unknown_format_version",
            ContainerError::Manifest { .. } => "bad_manifest",
            ContainerError::Unusable { .. } => "unusable_file",
            ContainerError::Size { .. } => "wrong_size",
            ContainerError::Record { .. } => "bad_record",
            ContainerError::Codebook { .. } => "bad_codebook",
            ContainerError::Checksum { .. } => "checksum_mismatch",
            ContainerError::Tensor { .. } => "bad_tensor",
            ContainerError::Quant { source, .. } => source.code(),
        }
    }

    fn fields(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        let mut put = |key: &str, value: Value| {
            fields.insert(key.to_owned(), value);
        };
        match self {
            ContainerError::File(error) => return error.fields(),
            ContainerError::Json(error) => return error.fields(),
            ContainerError::Quant { .. } => {}
            ContainerError::FormatVersion { file, found } => {
                put("file", file.display().to_string().into());
                put("found", found.clone().into());
            }
            ContainerError::Manifest { file, at, .. } => {
                put("file", file.display().to_string().into());
                put("at", at.clone().into());
            }
            ContainerError::Unusable { file, .. } => put("file", file.display().to_string().into()),
            ContainerError::Size { file, expected, found, .. } => {
                put("file", file.display().to_string().into());
                put("expected", (*expected).into());
                put("found", (*found).into());
            }
            ContainerError::Record { file, layer, expert, field, .. } => {
                put("file", file.display().to_string().into());
                put("layer", (*layer).into());
                put("expert", (*expert).into());
                put("field", (*field).into());
            }
            ContainerError::Codebook { file, id, field, .. } => {
                put("file", file.display().to_string().into());
                put("codebook", (*id).into());
                put("field", (*field).into());
            }
            ContainerError::Checksum { file, what, offset, .. } => {
                put("file", file.display().to_string().into());
                put("what", what.clone().into());
                if let Some(offset) = offset {
                    put("offset", (*offset).into());
                }
            }
            ContainerError::Tensor { file, tensor, .. } => {
                put("file", file.display().to_string().into());
                put("tensor", tensor.clone().into());
            }
        }
        fields
    }
}
