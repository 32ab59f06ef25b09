//! Whether what the model needs is there: names and shapes of trunk tensors, banks and their experts.

use waste_common::cli::Failure;
use waste_common::config::{ConfigError, ModelConfig};
use waste_common::container::{MANIFEST, TRUNK, TrunkEntry};
use waste_common::tensors::{self, TensorSpec};

use crate::job::Job;
use crate::report::Problem;
use crate::sidecars::Listing;

/// Checks the manifest against its own config; returns the config if it can be read.
pub(crate) fn check(job: &Job, listing: &Listing) -> Result<Option<ModelConfig>, Failure> {
    let config = match ModelConfig::from_container(&job.manifest.config) {
        Ok(config) => config,
        Err(error @ ConfigError::Unsupported { .. }) => {
            job.found.note(MANIFEST, format!("{error}; names and shapes of its tensors were not checked"));
            return Ok(None);
        }
        Err(error) => {
            job.found.problem(Problem::new(MANIFEST, "bad_config", error.to_string()));
            return Ok(None);
        }
    };
    if config.tensor_prefix != job.manifest.tensor_prefix {
        let message = format!(
            "tensor_prefix is {:?}, but the config means {:?}",
            job.manifest.tensor_prefix, config.tensor_prefix
        );
        job.found.problem(Problem::new(MANIFEST, "bad_config", message));
    }
    // A container of a multimodal model may leave the tower out: then it has no vision.json.
    let tower = if listing.contains_key("vision.json") { tensors::vision(&config) } else { Vec::new() };
    let entries: std::collections::HashMap<&str, &TrunkEntry> =
        job.manifest.trunk.iter().map(|entry| (entry.name.as_str(), entry)).collect();
    for spec in tensors::trunk(&config).iter().chain(&tower) {
        match entries.get(spec.name.as_str()) {
            None => {
                let message = format!("the model needs the tensor, {:?}, but the trunk has none", spec.shape);
                job.found.problem(Problem::new(TRUNK, "missing_tensor", message).tensor(&spec.name));
            }
            Some(entry) if !accepts(spec, &entry.shape) => {
                let message = format!("shape is {:?}, expected {:?}", entry.shape, spec.shape);
                job.found.problem(Problem::new(TRUNK, "wrong_shape", message).tensor(&spec.name));
            }
            Some(_) => {}
        }
    }
    check_layers(job, &config);
    Ok(Some(config))
}

/// Whether a stored shape can serve.
pub(crate) fn accepts(spec: &TensorSpec, shape: &[u64]) -> bool {
    let shape: Option<Vec<usize>> = shape.iter().map(|dim| usize::try_from(*dim).ok()).collect();
    shape.is_some_and(|shape| spec.accepts(&shape))
}

fn check_layers(job: &Job, config: &ModelConfig) {
    let experts = config.moe.as_ref().map_or(0, |moe| moe.experts);
    for layer in config.moe_layers() {
        let layer = layer as u32;
        let message = match job.manifest.layers.get(&layer) {
            None => "the layer has experts, but the manifest names no bank for it".to_owned(),
            Some(bank) if bank.experts as usize != experts => {
                format!("the bank has {} experts, the model {experts}", bank.experts)
            }
            Some(_) => continue,
        };
        job.found.problem(Problem::new(MANIFEST, "wrong_experts", message).layer(layer));
    }
    for layer in job.manifest.layers.keys().filter(|layer| config.moe_of(**layer as usize).is_none()) {
        let message = "the manifest names a bank, but the layer has no experts";
        job.found.problem(Problem::new(MANIFEST, "wrong_experts", message).layer(*layer));
    }
}
