//! From a directory to an engine: what it is, its weights, its experts.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use waste_common::checkpoint::Checkpoint;
use waste_common::config::{Mixer, ModelConfig};
use waste_common::container::Container;
use waste_common::plan::scratch::Scratch;
use waste_common::tensors;

use super::{Engine, FfnLayer, Layer, MixerLayer};
use crate::compute::Compute;
use crate::error::EngineError;
use crate::experts::source::{BankSource, CheckpointSource, Codebooks, ExpertFormat};
use crate::experts::{ExpertId, ExpertSource, ExpertStore, StoreOptions, Usage};
use crate::kernels::Kernels;
use crate::layers::embedding::Embedding;
use crate::options::EngineOptions;
use crate::weights::{Loader, Source};

impl Engine {
    pub(super) fn load(
        source: Source,
        config: ModelConfig,
        options: EngineOptions,
        kernels: &'static Kernels,
    ) -> Result<Self, EngineError> {
        options.check()?;
        let loader = Loader::new(&source, &config, &options)?;
        let (format, store) = open_experts(&source, &config, &options)?;
        let scratch = Scratch::thread(&config, &format.storage());
        let compute =
            Compute::new(kernels, options.arith, options.threads, options.cpus.as_deref(), scratch)?;
        let mut number = 0;
        let mut layers = Vec::with_capacity(config.layers());
        for layer in 0..config.layers() {
            let ffn = match config.moe_of(layer) {
                None => FfnLayer::Dense(Box::new(loader.ffn(layer, "mlp")?)),
                Some(moe) => {
                    let mut weights = loader.moe(layer, moe, number)?;
                    if let (Source::Container(container), ExpertFormat::Vq { shapes, .. }) =
                        (&source, &format)
                    {
                        weights.codebooks =
                            Some(Codebooks::new(&container.layer_codebooks(layer as u32)?, shapes));
                    }
                    number += 1;
                    FfnLayer::Moe(Box::new(weights))
                }
            };
            layers.push(Layer {
                input_norm: loader.norm(layer, "input_layernorm")?,
                post_norm: loader.norm(layer, "post_attention_layernorm")?,
                attn_res: loader.attn_res(layer)?,
                mixer: match loader.mixer(layer) {
                    Mixer::Kda => MixerLayer::Kda(Box::new(loader.kda(layer)?)),
                    Mixer::Mla => MixerLayer::Mla(Box::new(loader.mla(layer)?)),
                },
                ffn,
            });
            if options.cancelled.load(Ordering::Relaxed) {
                return Err(EngineError::Interrupted);
            }
        }
        let global = |tail: &str| format!("{}model.{tail}", config.tensor_prefix);
        let output_res = match config.attn_res_block {
            None => None,
            Some(_) => {
                let (norm, projection) = ("output_attn_res_norm.weight", "output_attn_res_proj.weight");
                Some(loader.mix(&global(norm), &global(projection))?)
            }
        };
        let norm = loader.vector(&global("norm.weight"))?;
        let head = if config.tied_embeddings { tensors::embedding(&config) } else { tensors::head(&config) };
        let head = loader.matrix(&head)?;
        let embedding = Embedding::new(&source, &config)?;
        Ok(Engine {
            config,
            options,
            together: compute.together(),
            compute,
            source,
            embedding,
            layers,
            norm,
            output_res,
            head,
            format,
            store,
            turn: Mutex::new(()),
        })
    }
}

/// Opens a directory as what it is.
pub fn open_source(dir: &Path) -> Result<(Source, ModelConfig), EngineError> {
    if dir.join("manifest.json").exists() {
        let container = Container::open(dir)?;
        let config = ModelConfig::from_container(&container.manifest().config)?;
        let found = &container.manifest().tensor_prefix;
        if found != config.tensor_prefix {
            return Err(EngineError::Prefix { found: found.clone(), expected: config.tensor_prefix });
        }
        return Ok((Source::Container(Arc::new(container)), config));
    }
    if Checkpoint::is_checkpoint(dir) {
        let checkpoint = Checkpoint::open(dir)?;
        let config = ModelConfig::from_checkpoint(checkpoint.config())?;
        return Ok((Source::Checkpoint(Arc::new(checkpoint)), config));
    }
    Err(EngineError::NotAModel { path: dir.to_owned() })
}

fn open_experts(
    source: &Source,
    config: &ModelConfig,
    options: &EngineOptions,
) -> Result<(ExpertFormat, Option<ExpertStore>), EngineError> {
    let elements = config.moe.as_ref().map_or(0, |moe| moe.input * moe.intermediate);
    let mut format = ExpertFormat::Dense { elements };
    if config.moe_layers().next().is_none() {
        return Ok((format, None));
    }
    let experts: Box<dyn ExpertSource> = match source {
        Source::Checkpoint(checkpoint) => Box::new(CheckpointSource::new(Arc::clone(checkpoint), config)),
        Source::Container(container) => {
            check_layers(container, config)?;
            let Some(source) = BankSource::open(container, options.bypass, options.verify)? else {
                return Ok((format, None));
            };
            if let Some(geometry) = container.geometry() {
                format = ExpertFormat::of(geometry);
            }
            Box::new(source)
        }
    };
    let store = StoreOptions { slots: options.cache_slots, readers: options.readers };
    let store = ExpertStore::new(experts, store)?;
    let layers: Vec<usize> = config.moe_layers().collect();
    store.warm(&shares(options.usage.as_deref(), &layers, config.moe.as_ref().map_or(0, |moe| moe.experts)));
    Ok((format, Some(store)))
}

/// What was learned of the experts that there are.
fn shares(usage: Option<&Usage>, layers: &[usize], experts: usize) -> Vec<(ExpertId, f32)> {
    let shares = usage.into_iter().flat_map(Usage::shares);
    let id = |(layer, expert): (u16, u16)| {
        let moe = layers.binary_search(&usize::from(layer)).ok()? as u32;
        (usize::from(expert) < experts).then_some(ExpertId { moe, expert: u32::from(expert) })
    };
    shares.filter_map(|(place, share)| Some((id(place)?, share))).collect()
}

/// The manifest's banks must be those of the configuration.
fn check_layers(container: &Container, config: &ModelConfig) -> Result<(), EngineError> {
    let layers: Vec<usize> = config.moe_layers().collect();
    let banks: Vec<usize> = container.manifest().layers.keys().map(|&layer| layer as usize).collect();
    let experts = config.moe.as_ref().map_or(0, |moe| moe.experts);
    let mut counts = container.manifest().layers.values().map(|bank| bank.experts as usize);
    if layers != banks || counts.any(|count| count != experts) {
        return Err(EngineError::Shape {
            name: "the manifest's `layers`".to_owned(),
            found: banks,
            expected: layers,
        });
    }
    Ok(())
}
