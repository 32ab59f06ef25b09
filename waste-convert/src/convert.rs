//! The whole conversion: what is there, what is missing, and the order in which it becomes a container.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Map, Value};
use waste_common::cli::{ByteSize, Interrupt, Output, Progress, Unit};
use waste_common::container::writer::{ContainerWriter, bank_entry};
use waste_common::container::{
    Container, ExpertQuant, Geometry, MANIFEST, Manifest, TrunkEntry, codebook_bytes,
};
use waste_common::files::FileError;
use waste_common::io::filesystem;
use waste_common::machine;

use crate::error::ConvertError;
use crate::layer::{Errors, LayerJob, convert_layer};
use crate::options::Options;
use crate::sidecars::{self, Sidecar};
use crate::source::Source;
use crate::state::{self, STATE, State};
use crate::trunk;

/// Key of the manifest that says how the container was made. Readers don't need it.
pub const CONVERSION: &str = "conversion";

/// What to convert, and how.
#[derive(Debug, Clone)]
pub struct Request {
    /// The checkpoint's directory.
    pub checkpoint: PathBuf,
    /// The container's directory.
    pub container: PathBuf,
    /// What decides the container's bytes.
    pub options: Options,
    /// Worker threads.
    pub threads: usize,
    /// Replace what stands in the container's directory.
    pub force: bool,
}

/// What came of it: the tool's JSON.
#[derive(Debug, Clone, serde::Serialize)]
#[allow(missing_docs)]
pub struct Report {
    pub container: String,
    pub checkpoint: String,
    pub arch: String,
    pub format: &'static str,
    pub trunk_bits: u8,
    pub layers: usize,
    pub experts: usize,
    /// Of all files.
    pub bytes: u64,
    pub seconds: f64,
    /// Root mean square over the layers of the relative Frobenius errors; `None` without routed experts.
    pub error: Option<Errors>,
    /// Layers that an earlier run had finished.
    pub resumed_layers: usize,
    pub manifest_sha256: String,
    pub peak_rss_bytes: Option<u64>,
}

/// Converts a checkpoint. What an interrupted run has finished is taken over, after a check, if its options were
/// the same; a finished container of the same checkpoint and options is left as it is.
///
/// # Errors
/// See [`ConvertError`].
pub fn convert(request: &Request, output: &Output, interrupt: &Interrupt) -> Result<Report, ConvertError> {
    let start = Instant::now();
    let threads = request.threads;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|source| ConvertError::Threads { threads, source })?;
    if same_directory(&request.checkpoint, &request.container) {
        return Err(ConvertError::SameDirectory { dir: request.container.clone() });
    }
    refuse_checkpoint(&request.container)?;
    let source = Source::open(&request.checkpoint)?;
    for name in source.ignored.iter().take(8) {
        output.warn(format_args!("tensor `{name}` is not carried over: the model has no use for it"));
    }
    let conversion = Conversion::new(request, &source)?;
    conversion.check_space(free_bytes(&request.container))?;
    let writer = ContainerWriter::create(&request.container)?;
    if let Some(warning) = filesystem(&request.container).ok().and_then(|system| system.warning) {
        output.warn(format_args!("{}: {warning}", request.container.display()));
    }
    conversion.warnings.iter().for_each(|warning| output.warn(warning));
    let (state, resumed) = match conversion.begin()? {
        Begun::Finished(state) => {
            output.note(format_args!("{} is finished already", request.container.display()));
            let resumed = state.layers.len();
            (state, resumed)
        }
        Begun::Unfinished(state) => pool.install(|| conversion.work(writer, state, output, interrupt))?,
    };
    conversion.report(&state, resumed, start)
}

/// Refuses a target that holds files of a checkpoint, forced or not: some have the names of a container's.
fn refuse_checkpoint(dir: &Path) -> Result<(), ConvertError> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(FileError::io("list", dir))?,
    };
    for entry in entries {
        let name = entry.map_err(FileError::io("list", dir))?.file_name();
        let file = name.to_string_lossy();
        let lower = file.to_lowercase();
        if ["config.json", "model.safetensors.index.json"].contains(&lower.as_str())
            || lower.ends_with(".safetensors")
        {
            return Err(ConvertError::InCheckpoint { dir: dir.to_owned(), file: file.into_owned() });
        }
    }
    Ok(())
}

/// A conversion whose input has been checked.
struct Conversion<'a> {
    request: &'a Request,
    source: &'a Source,
    fingerprint: Map<String, Value>,
    quant: ExpertQuant,
    jobs: Vec<LayerJob>,
    sidecars: Vec<Sidecar>,
    warnings: Vec<String>,
}

enum Begun {
    Finished(State),
    Unfinished(State),
}

impl<'a> Conversion<'a> {
    fn new(request: &'a Request, source: &'a Source) -> Result<Self, ConvertError> {
        let quant = request.options.quant();
        let jobs = jobs(source, &quant)?;
        let (sidecars, warnings) = sidecars::collect(source)?;
        let fingerprint = request.options.fingerprint(&source.fingerprint);
        Ok(Conversion { request, source, fingerprint, quant, jobs, sidecars, warnings })
    }

    fn dir(&self) -> &Path {
        &self.request.container
    }

    /// Bytes of the finished container, a little more for the work files of the merge.
    fn bytes(&self) -> Result<u64, ConvertError> {
        let trunk = trunk::trunk_bytes(self.source, &self.request.options)?;
        let bank = |job: &LayerJob| job.experts as u64 * job.geometry.record_bytes() as u64;
        let banks: u64 = self.jobs.iter().map(bank).sum();
        let books = self.jobs.len() as u64 * u64::from(self.quant.codebooks_per_layer());
        let sidecars: usize = self.sidecars.iter().map(|(_, content)| content.len()).sum();
        let manifest = (1 << 16) + 1024 * (self.source.trunk.len() + self.jobs.len()) as u64;
        Ok(trunk + banks + 2 * books * codebook_bytes(self.quant.entries) + sidecars as u64 + 2 * manifest)
    }

    /// Compares the bytes still to be written with what is free.
    fn check_space(&self, free: Option<u64>) -> Result<(), ConvertError> {
        let written = if self.dir().is_dir() { state::written_files(self.dir())? } else { Vec::new() };
        let needed = self.bytes()?.saturating_sub(state::bytes_of(self.dir(), written));
        match free {
            Some(free) if free < needed => {
                Err(ConvertError::NoSpace { dir: self.dir().to_owned(), needed, free })
            }
            _ => Ok(()),
        }
    }

    /// Looks at what stands in the directory: a finished container, a begun one, nothing, or a reason to stop.
    fn begin(&self) -> Result<Begun, ConvertError> {
        let dir = self.dir();
        if self.request.force {
            // The manifest first: from here on there is no container. Then the state, so that what is left of the
            // old one is vouched for by nothing.
            state::remove(dir, &[MANIFEST.to_owned()])?;
            state::remove(dir, &[STATE.to_owned()])?;
            state::remove(dir, &state::written_files(dir)?)?;
            return self.begin_anew();
        }
        let state = State::load(dir, &self.fingerprint)?;
        if dir.join(MANIFEST).exists() {
            let made = self.finished()?;
            return match (made, state) {
                (Ok(errors), _) => {
                    // Killed between the commit and the tidying up.
                    let work = state::written_files(dir)?.into_iter();
                    let work = work.filter(|name| self.is_work_file(name)).collect::<Vec<_>>();
                    state::remove(dir, &work)?;
                    state::remove(dir, &[STATE.to_owned()])?;
                    let mut state = State::new(self.fingerprint.clone());
                    state.layers = errors;
                    Ok(Begun::Finished(state))
                }
                (Err(reason), None) => Err(ConvertError::Exists { dir: dir.to_owned(), reason }),
                // Ours, but damaged: what is missing is made again.
                (Err(_), Some(state)) => {
                    state::remove(dir, &[MANIFEST.to_owned()])?;
                    Ok(Begun::Unfinished(state))
                }
            };
        }
        match (state, state::written_files(dir)?.into_iter().next()) {
            (Some(state), _) => Ok(Begun::Unfinished(state)),
            (None, None) => self.begin_anew(),
            (None, Some(file)) => Err(ConvertError::Foreign { dir: dir.to_owned(), file }),
        }
    }

    fn begin_anew(&self) -> Result<Begun, ConvertError> {
        let state = State::new(self.fingerprint.clone());
        state.save(self.dir())?;
        Ok(Begun::Unfinished(state))
    }

    fn is_work_file(&self, name: &str) -> bool {
        name.ends_with(".tmp") || name.starts_with("codebooks-L") || name == "trunk-index.json"
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

    /// Makes what is missing, then the container of it. Returns how many layers were there before.
    fn work(
        &self,
        writer: ContainerWriter,
        mut state: State,
        output: &Output,
        interrupt: &Interrupt,
    ) -> Result<(State, usize), ConvertError> {
        self.sweep(&mut state, output)?;
        let trunk = self.trunk(output, interrupt)?;
        let total: usize = self.jobs.iter().map(|job| job.experts).sum();
        // Codebooks first, then encoding: experts are counted as they are encoded.
        let progress = Progress::new(output, "experts", total as u64, Unit::Count);
        let tick = |experts| {
            progress.add(experts);
            if interrupt.requested() { Err(ConvertError::Interrupted) } else { Ok(()) }
        };
        let resumed = state.layers.len();
        for job in &self.jobs {
            if state.layers.contains_key(&job.layer) {
                progress.skip(job.experts as u64);
                continue;
            }
            tick(0)?;
            let errors = convert_layer(self.source, job, &self.request.options, self.dir(), &tick)?;
            output.note(format_args!("layer {}: error {}", job.layer, show(&errors)));
            state.layers.insert(job.layer, errors);
            state.save(self.dir())?;
        }
        progress.finish();
        for (name, content) in &self.sidecars {
            writer.sidecar(name, content)?;
        }
        let names: Vec<&str> = self.sidecars.iter().map(|(name, _)| *name).collect();
        writer.commit(self.manifest(trunk, &state), &names)?;
        state::remove(self.dir(), &[STATE.to_owned()])?;
        Ok((state, resumed))
    }

    /// Forgets layers whose files are not sound, and removes what an interruption left half-made.
    fn sweep(&self, state: &mut State, output: &Output) -> Result<(), ConvertError> {
        let mut sound = state.clone();
        sound.layers.clear();
        let progress = Progress::new(output, "layers checked", state.layers.len() as u64, Unit::Count);
        for job in &self.jobs {
            if state.has(self.dir(), job)? {
                sound.layers.extend(state.layers.get(&job.layer).map(|errors| (job.layer, *errors)));
            } else if state.layers.contains_key(&job.layer) {
                output.warn(format_args!("layer {} is damaged on disk and is made again", job.layer));
            }
            progress.add(state.layers.contains_key(&job.layer).into());
        }
        progress.finish();
        let kept: Vec<String> = sound.layers.keys().flat_map(|layer| state::layer_files(*layer)).collect();
        let layer_file = |name: &String| name.starts_with("experts-L") || name.starts_with("codebooks-L");
        let left = state::written_files(self.dir())?.into_iter();
        let left = left.filter(|name| name.ends_with(".tmp") || (layer_file(name) && !kept.contains(name)));
        state::remove(self.dir(), &left.collect::<Vec<_>>())?;
        *state = sound;
        state.save(self.dir())
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
        let entries = trunk::convert_trunk(self.source, &self.request.options, self.dir(), &tick)?;
        progress.finish();
        Ok(entries)
    }

    fn manifest(&self, trunk: Vec<TrunkEntry>, state: &State) -> Manifest {
        let config = &self.source.config;
        let bank = |job: &LayerJob| {
            let bank = bank_entry(job.layer, job.experts as u32, job.codebook_base, &job.geometry);
            (u32::from(job.layer), bank)
        };
        let mut conversion = self.fingerprint.clone();
        let layers = state.layers.iter();
        let layers: Map<String, Value> =
            layers.map(|(layer, errors)| (layer.to_string(), errors_value(errors))).collect();
        conversion.insert("layers".into(), layers.into());
        Manifest {
            arch: config.arch.to_owned(),
            tensor_prefix: config.tensor_prefix.to_owned(),
            config: inner_config(self.source.checkpoint.config()),
            expert_quant: self.quant.clone(),
            layers: self.jobs.iter().map(bank).collect(),
            trunk,
            integrity: None,
            extra: Map::from_iter([(CONVERSION.to_owned(), conversion.into())]),
        }
    }

    fn report(&self, state: &State, resumed: usize, start: Instant) -> Result<Report, ConvertError> {
        let container = Container::open(self.dir())?;
        let written = state::written_files(self.dir())?;
        let bytes = state::bytes_of(self.dir(), written.iter().map(String::as_str).chain([MANIFEST]));
        Ok(Report {
            container: self.dir().display().to_string(),
            checkpoint: self.request.checkpoint.display().to_string(),
            arch: self.source.config.arch.to_owned(),
            format: self.quant.fmt.name(),
            trunk_bits: self.request.options.trunk_bits,
            layers: self.jobs.len(),
            experts: self.jobs.iter().map(|job| job.experts).sum(),
            bytes,
            seconds: (start.elapsed().as_secs_f64() * 1e3).round() / 1e3,
            error: mean(state.layers.values()),
            resumed_layers: resumed,
            manifest_sha256: container.manifest_sha256().to_owned(),
            peak_rss_bytes: machine::peak_rss_bytes(),
        })
    }
}

type Layers = std::collections::BTreeMap<u16, Errors>;

/// One job per MoE layer; codebooks are numbered by the layer's place, so that nothing is ever renumbered.
fn jobs(source: &Source, quant: &ExpertQuant) -> Result<Vec<LayerJob>, ConvertError> {
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

fn mean<'a>(layers: impl ExactSizeIterator<Item = &'a Errors> + Clone) -> Option<Errors> {
    if layers.len() == 0 {
        return None;
    }
    let count = layers.len() as f64;
    let mean = |of: fn(&Errors) -> f64| {
        let square = layers.clone().map(|errors| of(errors) * of(errors)).sum::<f64>() / count;
        (square.sqrt() * 1e6).round() / 1e6
    };
    Some(Errors { gate: mean(|e| e.gate), up: mean(|e| e.up), down: mean(|e| e.down) })
}

/// `gate 19.42 %, up 19.40 %, down 19.51 %`
pub fn show(errors: &Errors) -> String {
    let percent = |value: f64| format!("{:.2} %", 100.0 * value);
    format!("gate {}, up {}, down {}", percent(errors.gate), percent(errors.up), percent(errors.down))
}

/// Free bytes where `dir` is or will be.
fn free_bytes(dir: &Path) -> Option<u64> {
    let absolute = std::path::absolute(dir).ok()?;
    let existing = absolute.ancestors().find(|path| path.exists())?;
    filesystem(existing).ok()?.free_bytes
}

fn same_directory(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| fs::canonicalize(path).map_err(FileError::io("open", path));
    matches!((real(one), real(other)), (Ok(one), Ok(other)) if one == other)
}

/// One line for people.
impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}, {} layers", self.container, ByteSize(self.bytes), self.layers)?;
        if let Some(error) = &self.error {
            write!(f, ", {} error {}", self.format, show(error))?;
        }
        write!(f, ", {:.1} s", self.seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
            threads: 1,
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
    }

    #[test]
    fn the_mean_over_layers() {
        let layer = |gate| Errors { gate, up: 0.2, down: 0.0 };
        let found = mean([layer(0.3), layer(0.4)].iter());
        assert_eq!(found, Some(Errors { gate: 0.353553, up: 0.2, down: 0.0 }));
        assert_eq!(mean([].iter()), None);
    }
}
