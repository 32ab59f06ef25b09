//! The unit of work: one MoE layer of a checkpoint becomes one bank and one part of the codebooks, both durable.
//! The result depends on checkpoint, layer and options only, so any process can make any layer, in any order.

use std::path::Path;
use std::time::Instant;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use waste_common::container::record::Kind;
use waste_common::container::writer::{BankWriter, write_codebook_part};
use waste_common::container::{ExpertQuant, Geometry, MatrixData, encode_record};
use waste_common::quant::half::f32_to_f16;
use waste_common::quant::search::Codebooks;
use waste_common::tensors;

use crate::encode::{self, EncodedMatrix, SquaredError};
use crate::error::ConvertError;
use crate::fit::Samples;
use crate::importance::Weights;
use crate::options::{Options, Recipe};
use crate::random::SplitMix64;
use crate::source::Source;

/// Bytes of source weights, indices and records that are held at a time.
const BATCH_BYTES: u64 = 512 << 20;
/// Start of every random stream of a conversion.
const SEED: u64 = 0x7761_7374_6500_0001;

/// Relative Frobenius errors of a layer's experts, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Errors {
    pub gate: f64,
    pub up: f64,
    pub down: f64,
}

/// What a layer's bank is made of.
#[derive(Debug, Clone)]
pub struct LayerJob {
    /// Layer number.
    pub layer: u16,
    /// The first of its codebooks.
    pub codebook_base: u16,
    /// Experts of the layer.
    pub experts: usize,
    /// How they are stored.
    pub quant: ExpertQuant,
    /// Where everything lies in a record.
    pub geometry: Geometry,
}

/// Called with the number of experts just finished; an error ends the layer, leaving nothing.
pub type Tick<'a> = &'a (dyn Fn(u64) -> Result<(), ConvertError> + Sync);

/// Bytes one expert needs while it is encoded: the source of its largest matrix as stored and widened, its
/// indices, and the record twice (whole, and in the parts it is made from).
pub fn expert_bytes(geometry: &Geometry) -> u64 {
    let weights = |kind| (geometry.layout(kind).rows() * geometry.layout(kind).cols()) as u64;
    let largest = Kind::ALL.into_iter().map(weights).max().unwrap_or(0);
    8 * largest + 3 * geometry.record_bytes() as u64
}

/// Experts that are worked on at a time: enough for all threads, within [`BATCH_BYTES`].
pub fn batch(geometry: &Geometry, threads: usize) -> usize {
    let most = BATCH_BYTES / expert_bytes(geometry).max(1);
    (2 * threads).min(most as usize).max(1)
}

/// Converts one layer: fits its codebooks, encodes every expert, writes codebooks and bank into `dir`. Runs on the
/// current rayon pool.
///
/// # Errors
/// A tensor cannot be read or has weights that are not finite (it is named); the disk refuses; `tick` says so.
pub fn convert_layer(
    source: &Source,
    job: &LayerJob,
    options: &Options,
    dir: &Path,
    tick: Tick,
) -> Result<Errors, ConvertError> {
    let weights = weights(source, job)?;
    let mut books = Vec::new();
    for kind in Kind::ALL {
        books.push(fit(source, job, options, kind, weights.as_ref(), tick)?);
    }
    let bits: Vec<Vec<u16>> = books.iter().flat_map(bits).collect();
    write_codebook_part(dir, job.layer, job.codebook_base, &job.quant, &bits)?;

    let mut bank = BankWriter::create(dir, job.layer, job.codebook_base, &job.geometry)?;
    let mut errors = [SquaredError::default(); 3];
    let recipe = options.effort.recipe();
    let ids: Vec<usize> = (0..job.experts).collect();
    let mut made: Vec<(Vec<u8>, [SquaredError; 3])> = Vec::new();
    // The last turn only writes.
    for ids in ids.chunks(batch(&job.geometry, rayon::current_num_threads())).chain([&[][..]]) {
        let ready = std::mem::take(&mut made);
        let write = || {
            for (record, error) in &ready {
                bank.push_record(record)?;
                errors.iter_mut().zip(error).for_each(|(sum, error)| sum.add(*error));
            }
            tick(ready.len() as u64)
        };
        let encode = || {
            let one = |expert: &usize| encode_expert(source, job, *expert, &books, weights.as_ref(), &recipe);
            ids.par_iter().map(one).collect::<Result<Vec<_>, ConvertError>>()
        };
        let (written, encoded) = rayon::join(write, encode);
        written?;
        made = encoded?;
    }
    bank.finish()?;
    let [gate, up, down] = errors.map(|error| error.relative());
    Ok(Errors { gate, up, down })
}

/// What was found by encoding one expert.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Probe {
    /// Fitting the codebooks of a layer.
    pub fit_seconds: f64,
    /// Reading and encoding an expert, on all threads.
    pub expert_seconds: f64,
    /// Of that expert.
    pub error: Errors,
}

/// Fits codebooks to a tenth of the samples, encodes the first expert, and keeps nothing of it.
///
/// # Errors
/// As for [`convert_layer`].
pub fn probe(source: &Source, job: &LayerJob, options: &Options, tick: Tick) -> Result<Probe, ConvertError> {
    const PART: usize = 10;
    let start = Instant::now();
    let layout = job.geometry.layout(Kind::Gate);
    let whole = options.cb_sample.min(job.experts * layout.rows() * layout.vectors());
    let few = Options { cb_sample: whole.div_ceil(PART), ..*options };
    let weights = weights(source, job)?;
    let mut books = Vec::new();
    for kind in Kind::ALL {
        books.push(fit(source, job, &few, kind, weights.as_ref(), tick)?);
    }
    let fit_seconds = start.elapsed().as_secs_f64() * PART as f64;
    let start = Instant::now();
    let (_, errors) = encode_expert(source, job, 0, &books, weights.as_ref(), &options.effort.recipe())?;
    let [gate, up, down] = errors.map(|error| error.relative());
    Ok(Probe { fit_seconds, expert_seconds: start.elapsed().as_secs_f64(), error: Errors { gate, up, down } })
}

/// How much the layer's input columns matter, if that is known.
fn weights(source: &Source, job: &LayerJob) -> Result<Option<Weights>, ConvertError> {
    let Some(importance) = &source.importance else { return Ok(None) };
    Ok(Some(Weights::new(importance.layer(&source.config, job.layer.into())?)))
}

/// The f16 bits of each codebook.
fn bits(books: &Codebooks) -> Vec<Vec<u16>> {
    let stage = |stage| books.entries(stage).as_flattened().iter().map(|value| f32_to_f16(*value)).collect();
    (0..books.stages()).map(stage).collect()
}

/// The codebooks of one kind, fitted to rows spread evenly over all experts: a few are read of each.
fn fit(
    source: &Source,
    job: &LayerJob,
    options: &Options,
    kind: Kind,
    weights: Option<&Weights>,
    tick: Tick,
) -> Result<Codebooks, ConvertError> {
    let layout = job.geometry.layout(kind);
    let rows = job.experts * layout.rows();
    let stream = |number: u64| SplitMix64::of(&[SEED ^ options.seed, job.layer.into(), kind as u64, number]);
    let picked = stream(1).spread(rows, options.cb_sample.div_ceil(layout.vectors()));
    let mut samples = Samples::default();
    // In pieces, so that an interruption is heeded.
    for picked in picked.chunks(1024) {
        let read = |row: &usize| {
            let (expert, row) = (row / layout.rows(), row % layout.rows());
            let columns = weights.map(|weights| weights.columns(expert, kind));
            let weights = source.expert_row(job.layer.into(), expert, kind, row)?;
            encode::sample(row, &weights, columns.as_deref())
                .map_err(|error| weights_error(source, job, expert, kind, error))
        };
        let read = picked.par_iter().map(read).collect::<Result<Vec<_>, ConvertError>>()?;
        read.into_iter().for_each(|more| samples.append(more));
        tick(0)?;
    }
    let (stages, entries) = (layout.stages(), layout.entries());
    let books = samples.fit(stages, entries, &options.effort.recipe(), &mut stream(0));
    tick(0)?;
    Ok(books)
}

fn encode_expert(
    source: &Source,
    job: &LayerJob,
    expert: usize,
    books: &[Codebooks],
    weights: Option<&Weights>,
    recipe: &Recipe,
) -> Result<(Vec<u8>, [SquaredError; 3]), ConvertError> {
    let one = |kind: Kind| -> Result<EncodedMatrix, ConvertError> {
        let columns = weights.map(|weights| weights.columns(expert, kind));
        let weights = source.expert(job.layer.into(), expert, kind)?;
        encode::encode(&weights, job.geometry.layout(kind), &books[kind as usize], columns.as_deref(), recipe)
            .map_err(|error| weights_error(source, job, expert, kind, error))
    };
    // One after the other, so that one matrix is held at a time; rows within it are spread over the threads.
    let matrices = [one(Kind::Gate)?, one(Kind::Up)?, one(Kind::Down)?];
    let data =
        matrices.each_ref().map(|matrix| MatrixData { indices: &matrix.indices, scales: &matrix.scales });
    let record = encode_record(job.layer, expert as u16, job.codebook_base, &job.geometry, data);
    Ok((record, matrices.map(|matrix| matrix.error)))
}

fn weights_error(
    source: &Source,
    job: &LayerJob,
    expert: usize,
    kind: Kind,
    error: waste_common::quant::QuantError,
) -> ConvertError {
    let name = tensors::expert(&source.config, job.layer.into(), expert, kind);
    ConvertError::Weights { name, source: error }
}

/// Root mean square of the errors of some layers, rounded; `None` of none.
pub(crate) fn mean<'a>(layers: impl ExactSizeIterator<Item = &'a Errors> + Clone) -> Option<Errors> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::CB_SAMPLE;

    #[test]
    fn the_mean_over_layers() {
        let layer = |gate| Errors { gate, up: 0.2, down: 0.0 };
        let found = mean([layer(0.3), layer(0.4)].iter());
        assert_eq!(found, Some(Errors { gate: 0.353553, up: 0.2, down: 0.0 }));
        assert_eq!(mean([].iter()), None);
    }
    use waste_common::container::ExpertFmt;

    /// Whatever the number of threads, experts in work take at most 512 MiB at K3's shapes, and all of a worker 1.5 GiB,
    /// at any effort: a wider beam holds a few KiB more a thread, more rounds and passes nothing.
    #[test]
    fn memory_is_bounded_at_k3_shapes() {
        let quant = ExpertQuant::new(ExpertFmt::Vq3r, 3, 256);
        let geometry = Geometry::new(&quant, 3072, 3584).unwrap();
        // The samples, what the stages before leave over of them, their weights, and indices; the system of all entries.
        let samples = CB_SAMPLE as u64 * (2 * (32 + 4) + 3) + 8 * (3 * 256 * 3 * 256);
        // Codebooks with their tables of products, of each kind and, with importance, of each thread.
        let books = |threads: u64| (3 + threads) * 3 * 256 * (4 * 256 + 200);
        let index = 250 << 20;
        assert!(BATCH_BYTES + samples + books(256) + index < 3 << 29);
        for threads in [1, 2, 8, 64, 512] {
            let held = batch(&geometry, threads) as u64 * expert_bytes(&geometry);
            assert!(held <= BATCH_BYTES, "{threads} threads: {held}");
        }
        assert_eq!(batch(&geometry, 64), 4);
        assert!(batch(&Geometry::new(&quant, 128, 128).unwrap(), 64) == 128);
    }
}
