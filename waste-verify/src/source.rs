//! Comparing the decoded weights with the checkpoint they were made from.

use std::collections::BTreeMap;
use std::sync::Mutex;

use serde::Serialize;
use waste_common::checkpoint::{Checkpoint, CheckpointError};
use waste_common::cli::{Failure, Output, Progress, Unit};
use waste_common::config::ModelConfig;
use waste_common::container::{Container, ExpertFmt, Kind, MANIFEST, RowBuffer, TRUNK, TrunkEntry, TrunkFmt};
use waste_common::tensors::{self, TensorSpec};

use crate::crew::Worker;
use crate::job::Job;
use crate::model;
use crate::report::Problem;
use crate::request::{Sampling, SourceRequest};

/// Weights compared at once.
const PIECE: usize = 1 << 20;
const TOKENIZER: &str = "tokenizer.model";

/// How far the weights are from the checkpoint's, as relative Frobenius errors.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SourceReport {
    /// The checkpoint's directory.
    pub checkpoint: String,
    /// Experts compared.
    pub experts: u64,
    /// Over all layers; absent without experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<KindErrors>,
    /// By layer.
    pub layers: Vec<LayerErrors>,
    /// By trunk format.
    pub trunk: BTreeMap<&'static str, TrunkErrors>,
}

/// One error for each matrix of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct KindErrors {
    /// Of `w1`.
    pub gate: f64,
    /// Of `w3`.
    pub up: f64,
    /// Of `w2`.
    pub down: f64,
}

/// The errors of one layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerErrors {
    /// Its number.
    pub layer: u32,
    /// Experts compared.
    pub experts: u64,
    /// Over these experts.
    #[serde(flatten)]
    pub error: KindErrors,
}

/// The errors of the trunk tensors of one format.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrunkErrors {
    /// Tensors compared.
    pub tensors: u64,
    /// Over all of them.
    pub error: f64,
    /// The worst one's.
    pub worst: f64,
    /// Its name.
    pub worst_tensor: String,
}

/// Squares of differences and of source weights.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    difference: f64,
    source: f64,
}

impl Sums {
    fn add(&mut self, decoded: &[f32], source: &[f32]) {
        for (decoded, source) in decoded.iter().zip(source) {
            let difference = f64::from(*decoded) - f64::from(*source);
            self.difference += difference * difference;
            self.source += f64::from(*source) * f64::from(*source);
        }
    }

    fn merge(&mut self, other: Sums) {
        self.difference += other.difference;
        self.source += other.source;
    }

    fn error(self) -> f64 {
        if self.difference == 0.0 { 0.0 } else { (self.difference / self.source).sqrt() }
    }
}

/// The largest error of an expert matrix that passes.
fn expert_limit(fmt: ExpertFmt) -> f64 {
    match fmt {
        ExpertFmt::Vq3r | ExpertFmt::Vq4p => 0.30,
        ExpertFmt::Vq2r => 0.45,
    }
}

/// The largest error of a trunk tensor that passes. Published containers hold the vision tower in 4 bits, at
/// 13–18 %.
fn trunk_limit(fmt: TrunkFmt, tower: bool) -> f64 {
    match fmt {
        TrunkFmt::F32 => 1e-6,
        TrunkFmt::F16 => 1e-3,
        TrunkFmt::Q8g => 0.02,
        TrunkFmt::Q4g if tower => 0.25,
        TrunkFmt::Q4g => 0.15,
        TrunkFmt::Q3g => 0.40,
    }
}

/// Compares; what is too far off becomes a problem.
///
/// # Errors
/// The checkpoint cannot be read (exit 3): that says nothing about the container.
pub(crate) fn compare(
    job: &Job,
    config: &ModelConfig,
    container: &Container,
    request: &SourceRequest,
    output: &Output,
) -> Result<SourceReport, Failure> {
    let source = Checkpoint::open(&request.dir)?;
    let theirs = ModelConfig::from_checkpoint(source.config())?;
    if theirs != *config {
        let message = format!("the config is another than that of {}", request.dir.display());
        job.found.problem(Problem::new(MANIFEST, "config_differs", message));
    }
    compare_tokenizer(job, &source)?;
    let both = Both { job, config, container, source: &source, output };
    let trunk = both.trunk()?;
    let (layers, error, experts) = both.experts(request.sampling)?;
    let checkpoint = request.dir.display().to_string();
    Ok(SourceReport { checkpoint, experts, error, layers, trunk })
}

fn compare_tokenizer(job: &Job, source: &Checkpoint) -> Result<(), Failure> {
    let Some(name) = ["tiktoken.model", TOKENIZER].into_iter().find(|name| source.dir().join(name).exists())
    else {
        job.found.note(TOKENIZER, "the checkpoint has no rank file to compare with");
        return Ok(());
    };
    let read = |path: &std::path::Path| waste_common::json::read_bounded(path, 256 << 20);
    let theirs = read(&source.dir().join(name))?;
    match read(&job.dir.join(TOKENIZER)) {
        Ok(ours) if ours == theirs => {}
        Ok(_) => {
            let message = format!("the bytes are not those of {name} in the checkpoint");
            job.found.problem(Problem::new(TOKENIZER, "tokenizer_differs", message));
        }
        Err(error) => job.found.problem(Problem::new(TOKENIZER, "missing_file", error.to_string())),
    }
    Ok(())
}

struct Both<'a> {
    job: &'a Job<'a>,
    config: &'a ModelConfig,
    container: &'a Container,
    source: &'a Checkpoint,
    output: &'a Output,
}

impl Both<'_> {
    /// Compares every trunk tensor.
    fn trunk(&self) -> Result<BTreeMap<&'static str, TrunkErrors>, Failure> {
        self.note_missing();
        let entries = self.container.trunk().entries();
        let weights = |entry: &TrunkEntry| entry.shape.iter().fold(4u64, |n, dim| n.saturating_mul(*dim));
        let total = entries.iter().map(weights).fold(0, u64::saturating_add);
        let progress = Progress::new(self.output, "comparing the trunk", total, Unit::Bytes);
        // By tensor number, so that sums do not depend on the threads.
        let sums: Vec<Mutex<Option<Sums>>> = entries.iter().map(|_| Mutex::new(None)).collect();
        self.job.crew.each(entries.len(), &progress, |at, worker| {
            let found = self.tensor(&entries[at], worker)?;
            *sums[at].lock().unwrap_or_else(std::sync::PoisonError::into_inner) = found;
            Ok(())
        })?;
        let mut by_fmt: BTreeMap<&'static str, (TrunkErrors, Sums)> = BTreeMap::new();
        for (entry, sums) in entries.iter().zip(sums) {
            let Some(sums) = sums.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) else {
                continue;
            };
            let error = sums.error();
            let (report, all) = by_fmt.entry(entry.fmt.name()).or_insert_with(|| {
                let report = TrunkErrors { tensors: 0, error: 0.0, worst: -1.0, worst_tensor: String::new() };
                (report, Sums::default())
            });
            report.tensors += 1;
            all.merge(sums);
            // Also for a NaN.
            if error.partial_cmp(&report.worst) != Some(std::cmp::Ordering::Less) && !report.worst.is_nan() {
                (report.worst, report.worst_tensor) = (error, entry.name.clone());
            }
        }
        Ok(by_fmt
            .into_iter()
            .map(|(fmt, (report, all))| (fmt, TrunkErrors { error: all.error(), ..report }))
            .collect())
    }

    /// Tensors that one side has and the other has not.
    fn note_missing(&self) {
        let trunk = self.container.trunk();
        let tower = trunk.entries().iter().any(|entry| is_tower(&entry.name));
        for name in self.source.names().filter(|name| tensors::expert_of(name).is_none()) {
            if trunk.get(name).is_some() {
                continue;
            }
            if is_tower(name) && !tower {
                let message = "the checkpoint has a vision tower, the container has none";
                self.job.found.note(TRUNK, message);
            } else {
                let message = "the checkpoint has the tensor, the trunk has not";
                self.job.found.problem(Problem::new(TRUNK, "missing_tensor", message).tensor(name));
            }
        }
    }

    /// The errors of one tensor; `None` if it cannot be compared, which then is a problem.
    fn tensor(&self, entry: &TrunkEntry, worker: &mut Worker) -> Result<Option<Sums>, Failure> {
        let problem = |kind, message: String| {
            let problem = Problem::new(TRUNK, kind, message).tensor(&entry.name).offset(entry.off);
            self.job.found.problem(problem);
        };
        let info = match self.source.info(&entry.name) {
            Ok(info) => info,
            Err(CheckpointError::MissingTensor { .. }) => {
                problem("not_in_source", "the checkpoint has no such tensor".to_owned());
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        let trunk = self.container.trunk();
        let sizes = trunk.sizes(entry)?;
        let (rows, cols) = (info.rows(), info.cols());
        let padded = entry.name.ends_with("A_log");
        let spec = TensorSpec { name: String::new(), shape: info.shape.clone(), padded: false };
        // Padding may have been cut off, or not; the model check has seen to it that enough is left.
        if !padded && !model::accepts(&spec, &entry.shape) {
            problem(
                "wrong_shape",
                format!("shape is {:?}, that of the checkpoint {:?}", entry.shape, info.shape),
            );
            return Ok(None);
        }
        let mut sums = Sums::default();
        if (sizes.rows, sizes.cols) == (rows as u64, cols as u64) {
            let step = PIECE.div_ceil(cols.max(1));
            let (mut ours, mut buffer) = (Vec::new(), RowBuffer::default());
            for first in (0..rows).step_by(step) {
                worker.check()?;
                let count = step.min(rows - first);
                let theirs = self.source.read_rows_f32(&entry.name, first, count)?;
                ours.resize(theirs.len(), 0.0);
                trunk.decode_rows(entry, first as u64, count as u64, &mut ours, &mut buffer)?;
                sums.add(&ours, &theirs);
                worker.advance(4 * theirs.len() as u64);
            }
        } else {
            // Flattened or padded: small ones.
            let (ours, theirs) = (trunk.decode(entry)?, self.source.read_f32(&entry.name)?);
            sums.add(&ours, &theirs);
            worker.advance(4 * ours.len() as u64);
        }
        let (error, limit) = (sums.error(), trunk_limit(entry.fmt, is_tower(&entry.name)));
        if error.is_nan() || error > limit {
            problem(
                "error_too_large",
                format!("the {} error is {error:.3e}, at most {limit} passes", entry.fmt.name()),
            );
        }
        Ok(Some(sums))
    }

    /// Compares some experts of every layer.
    #[allow(clippy::type_complexity)]
    fn experts(&self, sampling: Sampling) -> Result<(Vec<LayerErrors>, Option<KindErrors>, u64), Failure> {
        let layers = &self.container.manifest().layers;
        let total = layers.values().map(|bank| sampling.of(bank.experts).count() as u64).sum();
        let progress = Progress::new(self.output, "comparing experts", total, Unit::Count);
        let mut reports = Vec::new();
        let (mut all, mut compared) = ([Sums::default(); 3], 0);
        for (layer, bank) in layers {
            let ids: Vec<u16> = sampling.of(bank.experts).collect();
            let sums: Vec<Mutex<Option<[Sums; 3]>>> = ids.iter().map(|_| Mutex::new(None)).collect();
            // Codebooks or a bank that cannot be read have been reported.
            let Ok(books) = self.container.layer_codebooks(*layer) else { continue };
            let Ok(file) = self.container.bank(*layer) else { continue };
            self.job.crew.each(ids.len(), &progress, |at, worker| {
                let found = self.expert(*layer, ids[at], &file, &books)?;
                *sums[at].lock().unwrap_or_else(std::sync::PoisonError::into_inner) = found;
                worker.advance(1);
                Ok(())
            })?;
            let mut of_layer = [Sums::default(); 3];
            let mut experts = 0;
            for sums in sums {
                let found = sums.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
                for (kind, sums) in found.iter().flatten().enumerate() {
                    of_layer[kind].merge(*sums);
                }
                experts += u64::from(found.is_some());
            }
            compared += experts;
            if experts > 0 {
                all.iter_mut().zip(of_layer).for_each(|(all, sums)| all.merge(sums));
                reports.push(LayerErrors { layer: *layer, experts, error: kinds(of_layer) });
            }
        }
        Ok((reports, (compared > 0).then(|| kinds(all)), compared))
    }

    /// The errors of one expert; `None` if it cannot be compared, which then is a problem.
    fn expert(
        &self,
        layer: u32,
        expert: u16,
        file: &waste_common::container::BankFile,
        books: &waste_common::container::LayerCodebooks,
    ) -> Result<Option<[Sums; 3]>, Failure> {
        let Some(geometry) = self.container.geometry() else { return Ok(None) };
        let bank = &self.container.manifest().layers[&layer].file;
        let place = Problem::new(bank, "", "").layer(layer).expert(expert.into()).offset(file.offset(expert));
        let mut buffer = vec![0; geometry.record_bytes()];
        // A bad record has been reported.
        let Ok(record) = file.read(expert, &mut buffer) else { return Ok(None) };
        let limit = expert_limit(geometry.fmt());
        let mut result = [Sums::default(); 3];
        for kind in Kind::ALL {
            let theirs = match self.source.read_expert(self.config, layer as usize, expert.into(), kind) {
                Ok(theirs) => theirs,
                Err(error @ CheckpointError::MissingTensor { .. }) => {
                    let message = format!("{}: {error}", kind.name());
                    self.job.found.problem(Problem { kind: "not_in_source", message, ..place });
                    return Ok(None);
                }
                Err(error) => return Err(error.into()),
            };
            let layout = geometry.layout(kind);
            if theirs.len() != layout.rows() * layout.cols() {
                let message = format!(
                    "{}: {} weights, the checkpoint has {}",
                    kind.name(),
                    layout.rows() * layout.cols(),
                    theirs.len()
                );
                self.job.found.problem(Problem { kind: "wrong_shape", message, ..place });
                return Ok(None);
            }
            let mut ours = vec![0.0; theirs.len()];
            if record.matrix(kind).decode(&books.tables(kind), &mut ours).is_err() {
                return Ok(None);
            }
            let sums = &mut result[kind as usize];
            sums.add(&ours, &theirs);
            let error = sums.error();
            if error.is_nan() || error > limit {
                let message = format!("{}: the error is {error:.4}, at most {limit} passes", kind.name());
                self.job.found.problem(Problem { kind: "error_too_large", message, ..place.clone() });
            }
        }
        Ok(Some(result))
    }
}

fn kinds([gate, up, down]: [Sums; 3]) -> KindErrors {
    KindErrors { gate: gate.error(), up: up.error(), down: down.error() }
}

fn is_tower(name: &str) -> bool {
    name.starts_with("vision_tower.") || name.starts_with("mm_projector.")
}
