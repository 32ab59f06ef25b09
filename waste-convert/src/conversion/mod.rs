//! One conversion: what is there, what is missing, and the order in which it becomes a container.

mod commit;
mod space;
mod staged;
mod standing;

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use serde_json::{Map, Value};
use waste_common::cli::{Interrupt, Output, Progress, Unit};
use waste_common::container::writer::ContainerWriter;
use waste_common::container::{Container, ExpertQuant, Geometry, MANIFEST, TrunkEntry};
use waste_common::machine;

use crate::convert::{Report, Request, Work, comes_and_goes};
use crate::error::ConvertError;
use crate::layer::{LayerJob, mean};
use crate::run::{self, Layers};
use crate::sidecars::{self, Sidecar};
use crate::source::Source;
use crate::supply::Shards;
use crate::{parts, state, trunk};

pub(crate) use space::free_bytes;
pub(crate) use standing::Begun;

/// A conversion whose input has been checked.
pub(crate) struct Conversion<'a> {
    pub request: &'a Request,
    pub source: &'a Source,
    pub fingerprint: Map<String, Value>,
    pub quant: ExpertQuant,
    pub jobs: Vec<LayerJob>,
    sidecars: Vec<Sidecar>,
    pub warnings: Vec<String>,
    /// Of a checkpoint whose shards come and go.
    shards: Option<Shards>,
}

/// What a run leaves.
pub(crate) struct Done {
    /// Finished layers.
    pub layers: Layers,
    /// How many of them were there before.
    pub resumed: usize,
}

impl<'a> Conversion<'a> {
    pub fn new(request: &'a Request, source: &'a Source) -> Result<Self, ConvertError> {
        let quant = request.options.quant();
        let jobs = jobs(source, &quant)?;
        if let Work::Layers(Some(layers)) = &request.work
            && let Some(layer) = layers.iter().find(|layer| jobs.iter().all(|job| job.layer != **layer))
        {
            return Err(ConvertError::NoSuchLayer { layer: *layer });
        }
        let (sidecars, warnings) = sidecars::collect(source)?;
        let fingerprint = request.options.fingerprint(&source.fingerprint);
        let shards = comes_and_goes(request).then(|| Shards::of(&source.checkpoint, &source.config));
        Ok(Conversion { request, source, fingerprint, quant, jobs, sidecars, warnings, shards })
    }

    pub fn dir(&self) -> &Path {
        &self.request.container
    }

    /// Makes what is missing, then the container of it.
    pub fn work(
        &self,
        writer: ContainerWriter,
        output: &Output,
        interrupt: &Interrupt,
    ) -> Result<Done, ConvertError> {
        // Other processes may work on other layers beside this one; what is for all layers needs the lock.
        let alone = match &self.request.work {
            Work::Layers(_) => {
                drop(writer);
                None
            }
            _ => Some(writer),
        };
        let mut layers = self.sweep(alone.is_some(), output)?;
        let resumed = layers.len();
        let wanted = |job: &&LayerJob| match &self.request.work {
            Work::All | Work::Layers(None) => true,
            Work::Layers(Some(some)) => some.contains(&job.layer),
            Work::Finish => false,
        };
        let owed: Vec<&LayerJob> = self.jobs.iter().filter(wanted).collect();
        let owed = owed.into_iter().filter(|job| !layers.contains_key(&job.layer)).collect::<Vec<_>>();
        if let Work::Finish = self.request.work {
            let missing = self.owed(&layers);
            if !missing.is_empty() {
                return Err(ConvertError::Owed { dir: self.dir().to_owned(), layers: missing });
            }
        }
        let trunk = match &self.shards {
            Some(shards) => self.staged(shards, &owed, &mut layers, alone.is_some(), output, interrupt)?,
            None => {
                let trunk = alone.as_ref().map(|_| self.trunk(output, interrupt)).transpose()?;
                layers.extend(run::layers(self, &owed, None, &AtomicBool::new(false), output, interrupt)?);
                trunk
            }
        };
        if let (Some(writer), Some(trunk)) = (alone, trunk) {
            parts::remove(self.dir())?;
            self.commit(writer, trunk, &layers)?;
        }
        Ok(Done { layers, resumed })
    }

    /// The trunk that an earlier run finished, or a new one.
    fn trunk(&self, output: &Output, interrupt: &Interrupt) -> Result<Vec<TrunkEntry>, ConvertError> {
        if let Some(entries) = state::sound_trunk(self.dir())? {
            let planned = |(entry, name): (&TrunkEntry, &String)| {
                let info = self.source.checkpoint.info(name)?;
                let plan = trunk::plan(&self.source.config, &self.request.options, name, &info)?;
                Ok(entry.name == *name && entry.fmt == plan.fmt && entry.shape == plan.shape)
            };
            let fits = entries.iter().zip(&self.source.trunk).map(planned);
            let fits = fits.collect::<Result<Vec<bool>, ConvertError>>()?;
            if entries.len() == self.source.trunk.len() && fits.iter().all(|fits| *fits) {
                return Ok(entries);
            }
        }
        let bytes = trunk::trunk_bytes(self.source, &self.request.options)?;
        let progress = Progress::new(output, "trunk", bytes, Unit::Bytes);
        let tick = |bytes| {
            progress.add(bytes);
            if interrupt.requested() { Err(ConvertError::Interrupted) } else { Ok(()) }
        };
        let names = &self.source.trunk;
        let entries = trunk::convert_trunk(self.source, &self.request.options, names, self.dir(), &tick)?;
        progress.finish();
        Ok(entries)
    }

    fn owed(&self, layers: &Layers) -> Vec<u16> {
        self.jobs.iter().map(|job| job.layer).filter(|layer| !layers.contains_key(layer)).collect()
    }

    pub fn report(&self, done: &Done, start: Instant) -> Result<Report, ConvertError> {
        let finished = self.dir().join(MANIFEST).exists();
        let container = if finished { Some(Container::open(self.dir())?) } else { None };
        let written = state::written_files(self.dir())?;
        let bytes = state::bytes_of(self.dir(), written.iter().map(String::as_str).chain([MANIFEST]));
        let layers = &done.layers;
        Ok(Report {
            container: self.dir().display().to_string(),
            checkpoint: self.request.checkpoint.display().to_string(),
            arch: self.source.config.arch.to_owned(),
            format: self.quant.fmt.name(),
            effort: self.request.options.effort.name(),
            trunk_bits: self.request.options.trunk_bits,
            layers: layers.len(),
            experts: self
                .jobs
                .iter()
                .filter(|job| layers.contains_key(&job.layer))
                .map(|job| job.experts)
                .sum(),
            owed_layers: self.owed(layers),
            bytes,
            seconds: (start.elapsed().as_secs_f64() * 1e3).round() / 1e3,
            error: mean(layers.values()),
            resumed_layers: done.resumed,
            manifest_sha256: container.map(|container| container.manifest_sha256().to_owned()),
            peak_rss_bytes: machine::peak_rss_bytes(),
        })
    }
}

/// One job per MoE layer; codebooks are numbered by the layer's place, so that nothing is ever renumbered.
pub(crate) fn jobs(source: &Source, quant: &ExpertQuant) -> Result<Vec<LayerJob>, ConvertError> {
    let layers: Vec<usize> = source.config.moe_layers().collect();
    let owned = quant.codebooks_per_layer();
    let codebooks = layers.len() as u64 * u64::from(owned);
    if codebooks > 1 << 16 {
        return Err(ConvertError::Codebooks { layers: layers.len(), codebooks });
    }
    let job = |(i, layer): (usize, &usize)| {
        let moe = source.config.moe_of(*layer);
        let (experts, inter, input) =
            moe.map_or((0, 0, 0), |moe| (moe.experts, moe.intermediate as u64, moe.input as u64));
        let geometry = Geometry::new(quant, inter, input)
            .map_err(|source| ConvertError::Experts { format: quant.fmt.name(), source })?;
        let codebook_base = (i * owned as usize) as u16;
        Ok(LayerJob { layer: *layer as u16, codebook_base, experts, quant: quant.clone(), geometry })
    };
    layers.iter().enumerate().map(job).collect()
}
