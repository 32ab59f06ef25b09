//! The checkpoint, checked before anything is written.

use std::path::Path;

use waste_common::checkpoint::{Checkpoint, CheckpointError};
use waste_common::config::ModelConfig;
use waste_common::container::integrity::sha256_hex;
use waste_common::json::{self, INDEX_BYTES_MAX, MANIFEST_BYTES_MAX};
use waste_common::tensors::{self, ExpertKind};

use crate::error::ConvertError;

/// A checkpoint that has everything its configuration asks for.
pub struct Source {
    /// The files.
    pub checkpoint: Checkpoint,
    /// The model.
    pub config: ModelConfig,
    /// SHA-256 over configuration, index, and the shards' names and sizes.
    pub fingerprint: String,
    /// Names of the tensors of the trunk, sorted.
    pub trunk: Vec<String>,
    /// Tensors that are not carried over, as a reader may want to know.
    pub ignored: Vec<String>,
}

impl Source {
    /// Opens a checkpoint and compares names, types and shapes of all its tensors with what the model needs.
    ///
    /// # Errors
    /// The architecture is unknown, tensors are missing (all are named) or have another shape.
    pub fn open(dir: &Path) -> Result<Self, ConvertError> {
        let checkpoint = Checkpoint::open(dir)?;
        let config = ModelConfig::from_checkpoint(checkpoint.config())
            .map_err(|source| ConvertError::Config { file: dir.join("config.json"), source })?;
        check_trunk(&checkpoint, &config)?;
        check_experts(&checkpoint, &config)?;
        let (trunk, ignored) = trunk_names(&checkpoint, &config)?;
        let fingerprint = fingerprint(&checkpoint)?;
        Ok(Source { checkpoint, config, fingerprint, trunk, ignored })
    }

    /// One matrix of an expert, `[rows, cols]`.
    pub fn expert(&self, layer: usize, expert: usize, kind: ExpertKind) -> Result<Vec<f32>, ConvertError> {
        Ok(self.checkpoint.read_expert(&self.config, layer, expert, kind)?)
    }

    /// Bytes of the tensors of one expert of a layer.
    pub fn expert_bytes(&self, layer: usize) -> u64 {
        let bytes = |kind| {
            let base = tensors::expert(&self.config, layer, 0, kind);
            let parts = ["weight", "weight_packed", "weight_scale"].map(|part| format!("{base}.{part}"));
            parts.iter().filter_map(|name| self.checkpoint.info(name).ok()).map(|info| info.bytes).sum::<u64>()
        };
        ExpertKind::ALL.into_iter().map(bytes).sum()
    }

    /// One row of it.
    pub fn expert_row(
        &self,
        layer: usize,
        expert: usize,
        kind: ExpertKind,
        row: usize,
    ) -> Result<Vec<f32>, ConvertError> {
        Ok(self.checkpoint.read_expert_rows(&self.config, layer, expert, kind, row, 1)?)
    }
}

fn check_trunk(checkpoint: &Checkpoint, config: &ModelConfig) -> Result<(), ConvertError> {
    let specs: Vec<_> = tensors::trunk(config).into_iter().chain(tensors::vision(config)).collect();
    let names = specs.iter().filter(|spec| !checkpoint.contains(&spec.name)).map(|spec| spec.name.clone());
    let names: Vec<String> = names.collect();
    if !names.is_empty() {
        return Err(ConvertError::Missing { dir: checkpoint.dir().to_owned(), names });
    }
    for spec in specs {
        let found = checkpoint.info(&spec.name)?.shape;
        if !spec.accepts(&found) {
            let problem = format!("its shape is {found:?}; the configuration asks for {:?}", spec.shape);
            return Err(ConvertError::Tensor { name: spec.name, problem });
        }
    }
    Ok(())
}

fn check_experts(checkpoint: &Checkpoint, config: &ModelConfig) -> Result<(), ConvertError> {
    let mut names = Vec::new();
    for layer in config.moe_layers() {
        for expert in 0..config.moe_of(layer).map_or(0, |moe| moe.experts) {
            for kind in ExpertKind::ALL {
                match checkpoint.check_expert(config, layer, expert, kind) {
                    Err(CheckpointError::MissingTensor { name }) => names.push(name),
                    other => other?,
                }
            }
        }
    }
    if names.is_empty() {
        return Ok(());
    }
    Err(ConvertError::Missing { dir: checkpoint.dir().to_owned(), names })
}

/// Every tensor that is no routed expert's goes into the trunk, known to us or not; what has no floating-point type
/// or no storable shape is left out, if the model does not need it.
fn trunk_names(
    checkpoint: &Checkpoint,
    config: &ModelConfig,
) -> Result<(Vec<String>, Vec<String>), ConvertError> {
    let routed = |name: &str| {
        tensors::expert_of(name).map(|(layer, expert)| {
            config.moe_of(layer).is_some_and(|moe| layer < config.layers() && expert < moe.experts)
        })
    };
    let (mut trunk, mut ignored) = (Vec::new(), Vec::new());
    for name in checkpoint.names() {
        match routed(name) {
            Some(true) => {}
            Some(false) => ignored.push(name.to_owned()),
            None => {
                let info = checkpoint.info(name)?;
                let fits = info.is_float() && info.shape.len() <= 4 && !info.shape.contains(&0);
                (if fits { &mut trunk } else { &mut ignored }).push(name.to_owned());
            }
        }
    }
    trunk.sort_unstable();
    ignored.sort_unstable();
    let needed = tensors::trunk(config).into_iter().chain(tensors::vision(config));
    for spec in needed {
        if trunk.binary_search(&spec.name).is_err() {
            let info = checkpoint.info(&spec.name)?;
            let problem = format!("it is {:?} {:?}; BF16, F16 or F32 is expected", info.dtype, info.shape);
            return Err(ConvertError::Tensor { name: spec.name, problem });
        }
    }
    Ok((trunk, ignored))
}

fn fingerprint(checkpoint: &Checkpoint) -> Result<String, ConvertError> {
    let mut text = String::new();
    let index = "model.safetensors.index.json";
    for (name, limit) in [("config.json", MANIFEST_BYTES_MAX), (index, INDEX_BYTES_MAX)] {
        let path = checkpoint.dir().join(name);
        if name == index && !path.exists() {
            continue;
        }
        text.push_str(&format!("{name} {}\n", sha256_hex(&json::read_bounded(&path, limit)?)));
    }
    let mut shards = checkpoint.shard_names().to_vec();
    shards.sort_unstable();
    for name in shards {
        let bytes = std::fs::metadata(checkpoint.dir().join(&name)).map_or(0, |meta| meta.len());
        text.push_str(&format!("{name} {bytes}\n"));
    }
    Ok(sha256_hex(text.as_bytes()))
}
