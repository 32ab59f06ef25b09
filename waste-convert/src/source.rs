//! The checkpoint, checked before anything is written.

use std::path::Path;

use serde_json::{Value, json};
use waste_common::checkpoint::{Checkpoint, CheckpointError};
use waste_common::config::ModelConfig;
use waste_common::container::integrity::sha256_hex;
use waste_common::importance::Importance;
use waste_common::json::{INDEX_BYTES_MAX, MANIFEST_BYTES_MAX, read_bounded};
use waste_common::staging::State;
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
    /// Repository and commit, if waste-download fetched it.
    pub downloaded: Option<(String, String)>,
    /// Names of the tensors of the trunk, sorted.
    pub trunk: Vec<String>,
    /// Tensors that are not carried over, as a reader may want to know.
    pub ignored: Vec<String>,
    /// How much the experts' input columns matter, if that is known.
    pub importance: Option<Importance>,
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
        check_experts(&checkpoint, &config, 0..config.layers())?;
        let (trunk, ignored) = trunk_names(&checkpoint, &config)?;
        let fingerprint = fingerprint(&checkpoint)?;
        let downloaded = downloaded(&checkpoint)?;
        Ok(Source { checkpoint, config, fingerprint, downloaded, trunk, ignored, importance: None })
    }

    /// Opens a checkpoint whose shards come and go: only the names of its tensors are checked. Types and shapes are when
    /// a layer ([`Source::check_layer`]) or a tensor of the trunk ([`Source::carries`]) is about to be read.
    ///
    /// # Errors
    /// The architecture is unknown, or the index lacks tensors.
    pub fn open_some(dir: &Path) -> Result<Self, ConvertError> {
        let checkpoint = Checkpoint::open(dir)?;
        let config = ModelConfig::from_checkpoint(checkpoint.config())
            .map_err(|source| ConvertError::Config { file: dir.join("config.json"), source })?;
        let specs = tensors::trunk(&config).into_iter().chain(tensors::vision(&config));
        let names = specs.map(|spec| spec.name).filter(|name| !checkpoint.contains(name)).collect::<Vec<_>>();
        if !names.is_empty() {
            return Err(ConvertError::Missing { dir: dir.to_owned(), names });
        }
        let fingerprint = fingerprint(&checkpoint)?;
        let downloaded = downloaded(&checkpoint)?;
        Ok(Source {
            checkpoint,
            config,
            fingerprint,
            downloaded,
            trunk: Vec::new(),
            ignored: Vec::new(),
            importance: None,
        })
    }

    /// Takes the importance of the experts' input columns from a file, which must be the one that was meant.
    ///
    /// # Errors
    /// It is another one, or of another model.
    pub fn weigh(mut self, file: Option<&Path>, sha256: Option<[u8; 32]>) -> Result<Self, ConvertError> {
        let Some(file) = file else { return Ok(self) };
        let importance = Importance::open(file)?;
        importance.check(&self.config)?;
        if Some(importance.sha256()?) != sha256 {
            return Err(ConvertError::Changed { file: file.to_owned() });
        }
        self.importance = Some(importance);
        Ok(self)
    }

    /// Checks types and shapes of a layer's experts.
    ///
    /// # Errors
    /// Tensors are missing or have another shape.
    pub fn check_layer(&self, layer: usize) -> Result<(), ConvertError> {
        check_experts(&self.checkpoint, &self.config, layer..layer + 1)
    }

    /// Whether a tensor that is no expert's goes into the trunk: what has no floating-point type or no storable shape
    /// does not.
    ///
    /// # Errors
    /// The model needs it, but it has another type or shape.
    pub fn carries(&self, name: &str) -> Result<bool, ConvertError> {
        let info = self.checkpoint.info(name)?;
        let fits = info.is_float() && info.shape.len() <= 4 && !info.shape.contains(&0);
        let mut specs = tensors::trunk(&self.config).into_iter().chain(tensors::vision(&self.config));
        match specs.find(|spec| spec.name == name) {
            Some(spec) if !fits || !spec.accepts(&info.shape) => {
                let problem = format!(
                    "it is {:?} {:?}; the configuration asks for BF16, F16 or F32 {:?}",
                    info.dtype, info.shape, spec.shape
                );
                Err(ConvertError::Tensor { name: name.to_owned(), problem })
            }
            _ => Ok(fits),
        }
    }

    /// One matrix of an expert, `[rows, cols]`.
    pub fn expert(&self, layer: usize, expert: usize, kind: ExpertKind) -> Result<Vec<f32>, ConvertError> {
        Ok(self.checkpoint.read_expert(&self.config, layer, expert, kind)?)
    }

    /// Where the weights are from, as the downloader knows it, and what makes the container.
    pub fn provenance(&self) -> Value {
        let (repository, commit) = match &self.downloaded {
            Some((repository, commit)) => (Some(repository), Some(commit)),
            None => (None, None),
        };
        json!({
            "repository": repository,
            "commit": commit,
            "tool": env!("CARGO_PKG_NAME"),
            "version": env!("CARGO_PKG_VERSION"),
        })
    }

    /// Bytes of the tensors of one expert of a layer; no shard is looked at.
    pub fn expert_bytes(&self, layer: usize) -> u64 {
        let Some(moe) = self.config.moe_of(layer) else { return 0 };
        let weights = 3 * (moe.input * moe.intermediate) as u64;
        let base = tensors::expert(&self.config, layer, 0, ExpertKind::Gate);
        if self.checkpoint.contains(&format!("{base}.weight_packed")) {
            // A nibble each, and a scale for 32.
            weights * 17 / 32
        } else {
            2 * weights
        }
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

fn check_experts(
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    layers: std::ops::Range<usize>,
) -> Result<(), ConvertError> {
    let mut names = Vec::new();
    for layer in config.moe_layers().filter(|layer| layers.contains(layer)) {
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

fn downloaded(checkpoint: &Checkpoint) -> Result<Option<(String, String)>, ConvertError> {
    Ok(State::read(checkpoint.dir())?.map(|state| (state.repo, state.commit)))
}

fn fingerprint(checkpoint: &Checkpoint) -> Result<String, ConvertError> {
    let mut text = String::new();
    let index = "model.safetensors.index.json";
    for (name, limit) in [("config.json", MANIFEST_BYTES_MAX), (index, INDEX_BYTES_MAX)] {
        let path = checkpoint.dir().join(name);
        if name == index && !path.exists() {
            continue;
        }
        text.push_str(&format!("{name} {}\n", sha256_hex(&read_bounded(&path, limit)?)));
    }
    let mut shards = checkpoint.shard_names().to_vec();
    shards.sort_unstable();
    // A shard that is not there has the size that the downloader knows of.
    let state = State::read(checkpoint.dir())?;
    for name in shards {
        let known = state.as_ref().and_then(|state| state.files.get(&name)).map(|file| file.size);
        let found = || std::fs::metadata(checkpoint.dir().join(&name)).map_or(0, |meta| meta.len());
        let bytes = known.unwrap_or_else(found);
        text.push_str(&format!("{name} {bytes}\n"));
    }
    Ok(sha256_hex(text.as_bytes()))
}
