//! Why a conversion cannot go on.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use waste_common::checkpoint::CheckpointError;
use waste_common::cli::ByteSize;
use waste_common::config::ConfigError;
use waste_common::container::ContainerError;
use waste_common::error::{Coded, Exit};
use waste_common::files::FileError;
use waste_common::importance::ImportanceError;
use waste_common::json::JsonError;
use waste_common::quant::QuantError;
use waste_common::staging::StagingError;

/// Why a checkpoint could not be converted.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ConvertError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("{}: {source}", file.display())]
    Config { file: PathBuf, source: ConfigError },
    #[error(transparent)]
    Container(#[from] ContainerError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Json(#[from] JsonError),
    #[error(transparent)]
    Staging(#[from] StagingError),
    #[error(transparent)]
    Importance(#[from] ImportanceError),
    #[error("{} has changed since the conversion was begun", file.display())]
    Changed { file: PathBuf },
    #[error("{} lacks {} shard(s) that are still needed: {}; fetch them (waste-download), or go on with --follow",
        dir.display(), missing.len(), list(missing))]
    Shards { dir: PathBuf, missing: Vec<String> },
    #[error("{} is not what was written when it is read back: check the disk; nothing was removed", file.display())]
    ReadBack { file: PathBuf },
    #[error("--reclaim removes what is used up, so {problem}")]
    Reclaim { problem: String },
    #[error("{} lacks {} tensor(s) the model needs: {}; download it again", dir.display(), names.len(), list(names))]
    Missing { dir: PathBuf, names: Vec<String> },
    #[error("tensor `{name}`: {problem}")]
    Tensor { name: String, problem: String },
    #[error("tensor `{name}`: {source}")]
    Weights { name: String, source: QuantError },
    #[error("the experts of this model cannot be stored as {format}: {source}")]
    Experts { format: &'static str, source: QuantError },
    #[error("{layers} MoE layers need {codebooks} codebooks; a container holds at most 65536")]
    Codebooks { layers: usize, codebooks: u64 },
    #[error("{}: {problem}", file.display())]
    Sidecar { file: PathBuf, problem: String },
    #[error("{} is a finished container{}; --force replaces it", dir.display(), reason)]
    Exists { dir: PathBuf, reason: String },
    #[error(
        "{} holds {file} of an unknown conversion; choose another directory, or --force to replace what is there",
        dir.display()
    )]
    Foreign { dir: PathBuf, file: String },
    #[error("{} holds {file}: it is a checkpoint, and no container is made in one; choose another directory", dir.display())]
    InCheckpoint { dir: PathBuf, file: String },
    #[error(
        "{} was begun with {key} {begun}, this run says {wanted}; give the same options again, or --force to begin anew",
        dir.display()
    )]
    Options { dir: PathBuf, key: String, begun: Box<Value>, wanted: Box<Value> },
    #[error("{}: {problem}; --force begins the conversion anew", file.display())]
    State { file: PathBuf, problem: String },
    #[error("{} cannot be both checkpoint and container", dir.display())]
    SameDirectory { dir: PathBuf },
    #[error("{}: the container needs {} more, {} are free: free {} or choose another disk",
        dir.display(), ByteSize(*needed), ByteSize(*free), ByteSize(needed - free))]
    NoSpace { dir: PathBuf, needed: u64, free: u64 },
    #[error("the model has no MoE layer {layer}")]
    NoSuchLayer { layer: u16 },
    #[error("{} lacks layer(s) {}: convert them first, with the same options", dir.display(), layer_list(layers))]
    Owed { dir: PathBuf, layers: Vec<u16> },
    #[error("layer {layer}: {}", report.message)]
    Worker { layer: u16, report: Box<crate::worker::Report> },
    #[error(
        "the worker of layer {layer} {how}, twice; what is finished is kept, the same command tries again"
    )]
    WorkerDied { layer: u16, how: String },
    #[error("cannot start {threads} threads: {source}")]
    Threads { threads: usize, source: rayon::ThreadPoolBuildError },
    #[error("interrupted; the same command goes on where this one stopped")]
    Interrupted,
}

/// The first names of many.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let mut text = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN {
        text.push_str(", …");
    }
    text
}

/// `1-10,40`
pub fn layer_list(layers: &[u16]) -> String {
    let mut parts: Vec<(u16, u16)> = Vec::new();
    for layer in layers {
        match parts.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(*layer) => *last = *layer,
            _ => parts.push((*layer, *layer)),
        }
    }
    let show = |(first, last): &(u16, u16)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    parts.iter().map(show).collect::<Vec<_>>().join(",")
}

impl ConvertError {
    /// For `map_err`: names the sidecar.
    pub(crate) fn sidecar(file: &Path, problem: impl Into<String>) -> Self {
        ConvertError::Sidecar { file: file.to_owned(), problem: problem.into() }
    }
}

impl Coded for ConvertError {
    fn exit(&self) -> Exit {
        match self {
            ConvertError::Checkpoint(error) => error.exit(),
            ConvertError::Config { source, .. } => source.exit(),
            ConvertError::Container(error) => error.exit(),
            ConvertError::File(error) => error.exit(),
            ConvertError::Json(error) => error.exit(),
            ConvertError::Staging(error) => error.exit(),
            ConvertError::Importance(error) => error.exit(),
            ConvertError::Reclaim { .. } => Exit::Usage,
            ConvertError::NoSpace { .. } => Exit::Space,
            ConvertError::Threads { .. } => Exit::Space,
            ConvertError::NoSuchLayer { .. } => Exit::Usage,
            ConvertError::WorkerDied { .. } => Exit::Internal,
            ConvertError::Worker { report, .. } => {
                let all = Exit::TABLE.iter().map(|(exit, _)| *exit);
                all.into_iter().find(|exit| exit.code() == report.exit).unwrap_or(Exit::Internal)
            }
            ConvertError::Interrupted => Exit::Interrupted,
            _ => Exit::Data,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            ConvertError::Checkpoint(error) => error.code(),
            ConvertError::Config { source, .. } => source.code(),
            ConvertError::Container(error) => error.code(),
            ConvertError::File(error) => error.code(),
            ConvertError::Json(error) => error.code(),
            ConvertError::Staging(error) => error.code(),
            ConvertError::Importance(error) => error.code(),
            ConvertError::Changed { .. } => "changed_file",
            ConvertError::Shards { .. } => "missing_shards",
            ConvertError::ReadBack { .. } => "read_back",
            ConvertError::Reclaim { .. } => "unsafe_reclaim",
            ConvertError::Missing { .. } => "missing_tensor",
            ConvertError::Tensor { .. } => "bad_tensor",
            ConvertError::Weights { source, .. } | ConvertError::Experts { source, .. } => source.code(),
            ConvertError::Codebooks { .. } => "too_many_codebooks",
            ConvertError::Sidecar { .. } => "bad_sidecar",
            ConvertError::Exists { .. } => "container_exists",
            ConvertError::Foreign { .. } => "foreign_files",
            ConvertError::InCheckpoint { .. } => "target_is_checkpoint",
            ConvertError::Options { .. } => "other_options",
            ConvertError::State { .. } => "bad_state",
            ConvertError::SameDirectory { .. } => "same_directory",
            ConvertError::NoSpace { .. } => "disk_full",
            ConvertError::Threads { .. } => "no_threads",
            ConvertError::NoSuchLayer { .. } => "no_such_layer",
            ConvertError::Owed { .. } => "layers_owed",
            ConvertError::WorkerDied { .. } => "worker_died",
            // One string, at the end of a run.
            ConvertError::Worker { report, .. } => report.code.clone().leak(),
            ConvertError::Interrupted => "interrupted",
        }
    }

    fn fields(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        match self {
            ConvertError::Checkpoint(error) => return error.fields(),
            ConvertError::Container(error) => return error.fields(),
            ConvertError::File(error) => return error.fields(),
            ConvertError::Json(error) => return error.fields(),
            ConvertError::Staging(error) => return error.fields(),
            ConvertError::Shards { missing, .. } => {
                fields.insert("shards".into(), missing.clone().into());
            }
            ConvertError::Missing { names, .. } => {
                fields.insert("missing".into(), names.len().into());
                let first: Vec<String> = names.iter().take(100).cloned().collect();
                fields.insert("tensors".into(), first.into());
            }
            ConvertError::Tensor { name, .. } | ConvertError::Weights { name, .. } => {
                fields.insert("tensor".into(), name.clone().into());
            }
            ConvertError::Worker { layer, report } => {
                fields.clone_from(&report.fields);
                fields.insert("layer".into(), (*layer).into());
            }
            ConvertError::WorkerDied { layer, .. } | ConvertError::NoSuchLayer { layer } => {
                fields.insert("layer".into(), (*layer).into());
            }
            ConvertError::Owed { layers, .. } => {
                fields.insert("owed_layers".into(), layers.clone().into());
            }
            ConvertError::Exists { dir, .. } => {
                fields.insert("container".into(), dir.display().to_string().into());
            }
            ConvertError::Options { key, begun, wanted, .. } => {
                fields.insert("option".into(), key.clone().into());
                fields.insert("begun".into(), Value::clone(begun));
                fields.insert("wanted".into(), Value::clone(wanted));
            }
            ConvertError::NoSpace { needed, free, .. } => {
                fields.insert("needed_bytes".into(), (*needed).into());
                fields.insert("free_bytes".into(), (*free).into());
                fields.insert("shortfall_bytes".into(), (needed - free).into());
            }
            _ => {}
        }
        fields
    }
}
