//! One conversion: what is there, what is missing, and the order in which it becomes a container.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde_json::{Map, Value};
use waste_common::cli::{Interrupt, Output, Progress, Unit};
use waste_common::container::writer::{ContainerWriter, bank_entry};
use waste_common::container::{
    Container, ExpertQuant, Geometry, MANIFEST, Manifest, TrunkEntry, codebook_bytes,
};
use waste_common::io::filesystem;
use waste_common::{machine, tensors};

use crate::convert::{PAUSE, Report, Request, Work, comes_and_goes};
use crate::error::ConvertError;
use crate::layer::{Errors, LayerJob, mean};
use crate::parts;
use crate::run::{self, Layers};
use crate::sidecars::{self, Sidecar};
use crate::source::Source;
use crate::state::{self, STATE};
use crate::supply::{Reclaim, Shards, Supply};
use crate::trunk;

/// Key of the manifest that says where the weights are from and what made them.
const PROVENANCE: &str = "provenance";
/// Key of the manifest that says how the container was made. Readers don't need it.
const CONVERSION: &str = "conversion";

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

pub(crate) enum Begun {
    Finished(Layers),
    Unfinished,
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

    /// Bytes of the finished container, a little more for the work files of the merge.
    pub fn bytes(&self) -> Result<u64, ConvertError> {
        let trunk = trunk::trunk_bytes(self.source, &self.request.options)?;
        let sidecars: usize = self.sidecars.iter().map(|(_, content)| content.len()).sum();
        let manifest = (1 << 16) + 1024 * (self.source.trunk.len() + self.jobs.len()) as u64;
        // Codebooks are there twice while they are merged.
        let layers: u64 = self.jobs.iter().map(|job| self.bank_bytes(job) + 2 * self.book_bytes()).sum();
        Ok(trunk + layers + sidecars as u64 + 2 * manifest)
    }

    fn bank_bytes(&self, job: &LayerJob) -> u64 {
        job.experts as u64 * job.geometry.record_bytes() as u64
    }

    /// Bytes of a layer's codebooks.
    fn book_bytes(&self) -> u64 {
        u64::from(self.quant.codebooks_per_layer()) * codebook_bytes(self.quant.entries)
    }

    /// Bytes still to be written by what was asked for.
    pub fn needed(&self) -> Result<u64, ConvertError> {
        if let Work::Layers(Some(layers)) = &self.request.work {
            let owed = self.jobs.iter().filter(|job| layers.contains(&job.layer));
            let owed = owed.filter(|job| !state::looks_finished(self.dir(), job));
            return Ok(owed.map(|job| self.bank_bytes(job) + self.book_bytes()).sum());
        }
        let written = if self.dir().is_dir() { state::written_files(self.dir())? } else { Vec::new() };
        Ok(self.bytes()?.saturating_sub(state::bytes_of(self.dir(), written)))
    }

    /// Compares the bytes still to be written with what is free.
    pub fn check_space(&self, free: Option<u64>) -> Result<(), ConvertError> {
        // Where room is made on the way, it is looked at layer by layer.
        if self.request.reclaim == Reclaim::On {
            return Ok(());
        }
        let needed = self.needed()?;
        match free {
            Some(free) if free < needed => {
                Err(ConvertError::NoSpace { dir: self.dir().to_owned(), needed, free })
            }
            _ => Ok(()),
        }
    }

    /// Looks at what stands in the directory: a finished container, a begun one, nothing, or a reason to stop.
    pub fn begin(&self) -> Result<Begun, ConvertError> {
        let dir = self.dir();
        if self.request.force {
            if let Some(shards) = &self.shards {
                // What is here may be all that is left of them.
                let missing = shards.gone(&self.request.checkpoint, self.request.follow)?;
                if !missing.is_empty() {
                    return Err(ConvertError::Shards { dir: self.request.checkpoint.clone(), missing });
                }
            }
            // The manifest first: from here on there is no container. Then the state, so that what is left of the
            // old one is vouched for by nothing.
            state::remove(dir, &[MANIFEST.to_owned()])?;
            state::remove(dir, &[STATE.to_owned()])?;
            state::remove(dir, &state::written_files(dir)?)?;
            parts::remove(dir)?;
            return self.begin_anew();
        }
        let begun = state::begun(dir, &self.fingerprint)?;
        if dir.join(MANIFEST).exists() {
            return match (self.finished()?, begun) {
                (Ok(layers), _) => {
                    // Killed between the commit and the tidying up.
                    let work = state::written_files(dir)?.into_iter();
                    let work = work.filter(|name| self.is_work_file(name)).collect::<Vec<_>>();
                    state::remove(dir, &work)?;
                    state::remove(dir, &[STATE.to_owned()])?;
                    Ok(Begun::Finished(layers))
                }
                (Err(reason), false) => Err(ConvertError::Exists { dir: dir.to_owned(), reason }),
                // Ours, but damaged: what is missing is made again.
                (Err(_), true) => {
                    state::remove(dir, &[MANIFEST.to_owned()])?;
                    Ok(Begun::Unfinished)
                }
            };
        }
        // Killed before the state was there.
        let unborn = format!("{STATE}.tmp");
        let others = state::written_files(dir)?.into_iter().filter(|name| *name != unborn);
        match (begun, { others }.next()) {
            (true, _) => Ok(Begun::Unfinished),
            (false, None) => self.begin_anew(),
            (false, Some(file)) => Err(ConvertError::Foreign { dir: dir.to_owned(), file }),
        }
    }

    fn begin_anew(&self) -> Result<Begun, ConvertError> {
        state::begin(self.dir(), &self.fingerprint)?;
        Ok(Begun::Unfinished)
    }

    fn is_work_file(&self, name: &str) -> bool {
        ["codebooks-L", "convert-L"].iter().any(|prefix| name.starts_with(prefix))
            || name.ends_with(".tmp")
            || name == "trunk-index.json"
    }

    /// The layers' errors of the container that stands here if it is what this conversion would make; else why not.
    fn finished(&self) -> Result<Result<Layers, String>, ConvertError> {
        let container = match Container::open(self.dir()) {
            Ok(container) => container,
            Err(error) => return Ok(Err(format!(" that does not open ({error})"))),
        };
        let Some(made) = container.manifest().extra.get(CONVERSION).and_then(Value::as_object) else {
            return Ok(Err(" of another tool".to_owned()));
        };
        for (key, wanted) in &self.fingerprint {
            let found = made.get(key).unwrap_or(&Value::Null);
            if found != wanted {
                return Ok(Err(format!(" with {key} {found}, this run says {wanted}")));
            }
        }
        let errors = made.get("layers").cloned().unwrap_or_default();
        Ok(serde_json::from_value(errors).map_err(|_| " of another version".to_owned()))
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
        let trunk = match (&alone, &self.shards) {
            (None, _) => None,
            (Some(_), None) => Some(self.trunk(output, interrupt)?),
            (Some(_), Some(_)) => self.whole_trunk()?,
        };
        let stop = AtomicBool::new(false);
        let trunk = match &self.shards {
            None => {
                layers.extend(run::layers(self, &owed, None, &stop, output, interrupt)?);
                trunk
            }
            Some(shards) => {
                let mut used = Vec::new();
                for shard in shards.trunk.keys() {
                    if trunk.is_some() || parts::is_finished(self.dir(), shard)? {
                        used.push(shard.clone());
                    }
                }
                let request = self.request;
                let done = layers.keys().copied();
                let supply = Supply::begin(
                    &request.checkpoint,
                    shards,
                    request.follow,
                    request.reclaim,
                    output,
                    done,
                    used.clone(),
                )?;
                let made = std::thread::scope(|scope| {
                    let parts = scope.spawn(|| match alone {
                        Some(_) => self.parts(&supply, shards, &used, &stop, interrupt),
                        None => Ok(()),
                    });
                    let made = run::layers(self, &owed, Some(&supply), &stop, output, interrupt);
                    if made.is_err() {
                        stop.store(true, Ordering::Relaxed);
                    }
                    let parts = parts.join().unwrap_or(Err(ConvertError::Interrupted));
                    // What stopped the other is the reason.
                    match (made, parts) {
                        (Err(error), Err(ConvertError::Interrupted)) => Err(error),
                        (made, parts) => parts.and(made),
                    }
                })?;
                layers.extend(made);
                let tick = |_| if interrupt.requested() { Err(ConvertError::Interrupted) } else { Ok(()) };
                match (&alone, trunk) {
                    (Some(_), None) => Some(parts::merge(self.source, shards, self.dir(), &tick)?),
                    (_, trunk) => trunk,
                }
            }
        };
        if let (Some(writer), Some(trunk)) = (alone, trunk) {
            parts::remove(self.dir())?;
            self.commit(writer, trunk, &layers)?;
        }
        Ok(Done { layers, resumed })
    }

    /// The trunk's parts that are still to be made, each as its shard arrives.
    fn parts(
        &self,
        supply: &Supply,
        shards: &Shards,
        finished: &[String],
        stop: &AtomicBool,
        interrupt: &Interrupt,
    ) -> Result<(), ConvertError> {
        let stopped = || stop.load(Ordering::Relaxed) || interrupt.requested();
        let tick = |_| if stopped() { Err(ConvertError::Interrupted) } else { Ok(()) };
        let work = || {
            let mut owed: Vec<&String> =
                shards.trunk.keys().filter(|shard| !finished.contains(shard)).collect();
            while !owed.is_empty() {
                tick(0)?;
                let state = supply.state()?;
                let Some(at) = owed.iter().position(|shard| supply.there(state.as_ref(), [*shard])) else {
                    std::thread::sleep(PAUSE);
                    continue;
                };
                let shard = owed.remove(at);
                let request = self.request;
                parts::write(&request.checkpoint, shards, &request.options, self.dir(), shard, &tick)?;
                supply.trunk_used(shard)?;
            }
            Ok(())
        };
        let result = work();
        if result.is_err() {
            stop.store(true, Ordering::Relaxed);
        }
        result
    }

    /// The finished trunk of a checkpoint whose shards come and go.
    fn whole_trunk(&self) -> Result<Option<Vec<TrunkEntry>>, ConvertError> {
        let Some(entries) = state::sound_trunk(self.dir())? else { return Ok(None) };
        let config = &self.source.config;
        let mut needed = tensors::trunk(config).into_iter().chain(tensors::vision(config));
        let whole = needed.all(|spec| entries.iter().any(|entry| entry.name == spec.name));
        Ok(whole.then_some(entries))
    }

    fn owed(&self, layers: &Layers) -> Vec<u16> {
        self.jobs.iter().map(|job| job.layer).filter(|layer| !layers.contains_key(layer)).collect()
    }

    fn commit(
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

    /// The layers that are finished and sound. Alone, it also removes what an interruption left half-made.
    fn sweep(&self, alone: bool, output: &Output) -> Result<Layers, ConvertError> {
        let mut sound = Layers::new();
        let recorded = |job: &LayerJob| state::is_recorded(self.dir(), job.layer);
        let total = self.jobs.iter().filter(|job| recorded(job)).count();
        let progress = Progress::new(output, "layers checked", total as u64, Unit::Count);
        for job in self.jobs.iter().filter(|job| recorded(job)) {
            match state::finished(self.dir(), job, &self.fingerprint)? {
                Some(errors) => {
                    sound.insert(job.layer, errors);
                }
                None => output.warn(format_args!("layer {} is damaged on disk and is made again", job.layer)),
            }
            progress.add(1);
        }
        progress.finish();
        if alone {
            // A damaged layer whose shards may be gone is not thrown away before it has been made again.
            let kept = |job: &&LayerJob| self.shards.is_some() || sound.contains_key(&job.layer);
            let kept = self.jobs.iter().filter(kept).flat_map(|job| state::layer_files(job.layer));
            let kept: Vec<String> = kept.collect();
            let prefixes = ["experts-L", "codebooks-L", "convert-L"];
            let of_a_layer = |name: &String| prefixes.iter().any(|prefix| name.starts_with(prefix));
            let left = state::written_files(self.dir())?.into_iter().filter(|name| !name.ends_with(".lock"));
            let left =
                left.filter(|name| name.ends_with(".tmp") || (of_a_layer(name) && !kept.contains(name)));
            state::remove(self.dir(), &left.collect::<Vec<_>>())?;
        }
        Ok(sound)
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
/// Free bytes where `dir` is or will be.
pub(crate) fn free_bytes(dir: &Path) -> Option<u64> {
    let absolute = std::path::absolute(dir).ok()?;
    let existing = absolute.ancestors().find(|path| path.exists())?;
    filesystem(existing).ok()?.free_bytes
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::Options;
    use waste_common::error::{Coded, Exit};

    #[test]
    fn what_does_not_fit_the_disk_is_refused_and_what_is_there_counts() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny-linear/ckpt");
        let source = Source::open(&checkpoint).unwrap();
        let request = Request {
            checkpoint,
            container: dir.path().join("not yet"),
            options: Options::default(),
            importance: None,
            work: Work::All,
            threads: 1,
            jobs: 1,
            follow: false,
            reclaim: Reclaim::Off,
            reserve: 0,
            program: None,
            force: false,
        };
        let conversion = Conversion::new(&request, &source).unwrap();
        let bytes = conversion.bytes().unwrap();
        // The finished container has 6,162,165; the rest is work files.
        assert!((6_162_165..7_000_000).contains(&bytes), "{bytes}");
        conversion.check_space(Some(bytes)).unwrap();
        conversion.check_space(None).unwrap();
        let error = conversion.check_space(Some(bytes - 1)).unwrap_err();
        assert_eq!((error.exit(), error.code()), (Exit::Space, "disk_full"));
        assert_eq!(error.fields()["shortfall_bytes"], 1);
        fs::create_dir(&request.container).unwrap();
        fs::write(request.container.join("experts-L1.bin"), [0; 1000]).unwrap();
        conversion.check_space(Some(bytes - 1000)).unwrap();

        // Of some layers no more than they take.
        let first = conversion.jobs[0].layer;
        let some = Request { work: Work::Layers(Some([first].into())), ..request };
        let conversion = Conversion::new(&some, &source).unwrap();
        let needed = conversion.needed().unwrap();
        let bank = conversion.bank_bytes(&conversion.jobs[0]);
        assert!(needed > bank && needed < bytes / conversion.jobs.len() as u64, "{needed} of {bytes}");
        conversion.check_space(Some(needed)).unwrap();
        assert!(conversion.check_space(Some(needed - 1)).is_err());
    }
}
