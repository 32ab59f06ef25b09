//! The last step: from here on the directory is a container.

use serde_json::{Map, Value};
use waste_common::container::writer::{ContainerWriter, bank_entry};
use waste_common::container::{Manifest, TrunkEntry};

use super::Conversion;
use crate::error::ConvertError;
use crate::layer::{Errors, LayerJob};
use crate::run::Layers;
use crate::state::{self, STATE};

/// Key of the manifest that says where the weights are from and what made them.
const PROVENANCE: &str = "provenance";
/// Key of the manifest that says how the container was made. Readers don't need it.
pub(super) const CONVERSION: &str = "conversion";

impl Conversion<'_> {
    /// Writes what goes beside the weights, then the manifest, and removes the work files.
    pub(super) fn commit(
        &self,
        writer: ContainerWriter,
        trunk: Vec<TrunkEntry>,
        layers: &Layers,
    ) -> Result<(), ConvertError> {
        for (name, content) in &self.sidecars {
            writer.sidecar(name, content)?;
        }
        let names: Vec<&str> = self.sidecars.iter().map(|(name, _)| *name).collect();
        writer.commit(self.manifest(trunk, layers), &names)?;
        let work = state::written_files(self.dir())?.into_iter();
        state::remove(self.dir(), &work.filter(|name| self.is_work_file(name)).collect::<Vec<_>>())?;
        state::remove(self.dir(), &[STATE.to_owned()])
    }

    fn manifest(&self, trunk: Vec<TrunkEntry>, layers: &Layers) -> Manifest {
        let config = &self.source.config;
        let bank = |job: &LayerJob| {
            let bank = bank_entry(job.layer, job.experts as u32, job.codebook_base, &job.geometry);
            (u32::from(job.layer), bank)
        };
        let mut conversion = self.fingerprint.clone();
        let layers: Map<String, Value> =
            layers.iter().map(|(layer, errors)| (layer.to_string(), errors_value(errors))).collect();
        conversion.insert("layers".into(), layers.into());
        Manifest {
            arch: config.arch.to_owned(),
            tensor_prefix: config.tensor_prefix.to_owned(),
            config: inner_config(self.source.checkpoint.config()),
            expert_quant: self.quant.clone(),
            layers: self.jobs.iter().map(bank).collect(),
            trunk,
            integrity: None,
            extra: Map::from_iter([
                (CONVERSION.to_owned(), conversion.into()),
                (PROVENANCE.to_owned(), self.source.provenance()),
            ]),
        }
    }
}

/// The text model's object, verbatim; what is left of the outer one stands under `_outer`.
fn inner_config(config: &Value) -> Value {
    let Some(outer) = config.as_object() else { return config.clone() };
    let mut outer = outer.clone();
    match outer.shift_remove("text_config") {
        Some(Value::Object(mut text)) => {
            text.insert("_outer".to_owned(), outer.into());
            text.into()
        }
        _ => config.clone(),
    }
}

fn errors_value(errors: &Errors) -> Value {
    serde_json::json!({"gate": errors.gate, "up": errors.up, "down": errors.down})
}
