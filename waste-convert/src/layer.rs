//! The unit of work: one MoE layer of a checkpoint becomes one bank and one part of the codebooks, both durable.
//! The result depends on checkpoint, layer and options only, so any process can make any layer, in any order.

use std::path::Path;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use waste_common::container::record::Kind;
use waste_common::container::writer::{BankWriter, write_codebook_part};
use waste_common::container::{ExpertQuant, Geometry, MatrixData, encode_record};
use waste_common::tensors;

use crate::encode::{self, EncodedMatrix, SquaredError};
use crate::error::ConvertError;
use crate::kmeans::Codebook;
use crate::options::Options;
use crate::random::SplitMix64;
use crate::source::Source;

/// Experts the samples come from, at least.
const SAMPLED_EXPERTS: usize = 12;
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
    let mut books = Vec::new();
    for kind in Kind::ALL {
        books.push(fit(source, job, options, kind, tick)?);
    }
    let bits: Vec<Vec<u16>> = books.iter().flatten().map(Codebook::bits).collect();
    write_codebook_part(dir, job.layer, job.codebook_base, &job.quant, &bits)?;

    let mut bank = BankWriter::create(dir, job.layer, job.codebook_base, &job.geometry)?;
    let mut errors = [SquaredError::default(); 3];
    let ids: Vec<usize> = (0..job.experts).collect();
    for ids in ids.chunks(batch(&job.geometry, rayon::current_num_threads())) {
        let records = ids
            .par_iter()
            .map(|expert| encode_expert(source, job, *expert, &books))
            .collect::<Result<Vec<_>, ConvertError>>()?;
        for (record, error) in &records {
            bank.push_record(record)?;
            errors.iter_mut().zip(error).for_each(|(sum, error)| sum.add(*error));
        }
        tick(ids.len() as u64)?;
    }
    bank.finish()?;
    let [gate, up, down] = errors.map(|error| error.relative());
    Ok(Errors { gate, up, down })
}

/// The codebooks of one kind, fitted to vectors from evenly spaced experts.
fn fit(
    source: &Source,
    job: &LayerJob,
    options: &Options,
    kind: Kind,
    tick: Tick,
) -> Result<Vec<Codebook>, ConvertError> {
    let layout = job.geometry.layout(kind);
    let (vectors, cols) = (layout.rows() * layout.vectors(), layout.cols());
    let experts = sampled_experts(job.experts, vectors, options.cb_sample);
    let stream = |expert: u64| SplitMix64::of(&[SEED, job.layer.into(), kind as u64, expert]);
    let mut samples = Vec::new();
    let numbered: Vec<(usize, usize)> = experts.iter().copied().enumerate().collect();
    for some in numbered.chunks(batch(&job.geometry, rayon::current_num_threads())) {
        let read = |(i, expert): &(usize, usize)| {
            // Shares of the sample that add up to it exactly.
            let edge = |i: usize| (i as u128 * options.cb_sample as u128 / experts.len() as u128) as usize;
            let picked = stream(*expert as u64 + 1).spread(vectors, edge(i + 1) - edge(*i));
            let weights = source.expert(job.layer.into(), *expert, kind)?;
            let mut samples = Vec::with_capacity(picked.len());
            encode::sample(&weights, cols, &picked, &mut samples)
                .map_err(|error| weights_error(source, job, *expert, kind, error))?;
            Ok(samples)
        };
        samples.extend(some.par_iter().map(read).collect::<Result<Vec<_>, ConvertError>>()?);
        tick(0)?;
    }
    let (stages, entries) = (layout.stages(), layout.entries());
    let books = encode::collect(&samples).fit(stages, entries, &mut stream(0));
    tick(0)?;
    Ok(books)
}

/// Evenly spaced experts: twelve, or as many as fill the sample.
fn sampled_experts(experts: usize, vectors: usize, sample: usize) -> Vec<usize> {
    let count = SAMPLED_EXPERTS.max(sample.div_ceil(vectors)).min(experts);
    (0..count).map(|i| i * experts / count).collect()
}

fn encode_expert(
    source: &Source,
    job: &LayerJob,
    expert: usize,
    books: &[Vec<Codebook>],
) -> Result<(Vec<u8>, [SquaredError; 3]), ConvertError> {
    let one = |kind: Kind| -> Result<EncodedMatrix, ConvertError> {
        let weights = source.expert(job.layer.into(), expert, kind)?;
        encode::encode(&weights, job.geometry.layout(kind), &books[kind as usize])
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

#[cfg(test)]
mod tests {
    use super::*;
    use waste_common::container::ExpertFmt;

    #[test]
    fn twelve_experts_or_as_many_as_fill_the_sample() {
        assert_eq!(sampled_experts(896, 1_376_256, 300_000).len(), 12);
        assert_eq!(sampled_experts(896, 1_376_256, 300_000)[..3], [0, 74, 149]);
        assert_eq!(sampled_experts(32, 2048, 300_000), (0..32).collect::<Vec<_>>());
        assert_eq!(sampled_experts(5, 1, 1), [0, 1, 2, 3, 4]);
    }

    /// Whatever the number of threads, experts in work take at most 512 MiB at K3's shapes; the rest of a
    /// conversion is the samples (10 MB), the index (about 250 MB) and slices of the trunk.
    #[test]
    fn memory_is_bounded_at_k3_shapes() {
        let quant = ExpertQuant::new(ExpertFmt::Vq3r, 3, 256);
        let geometry = Geometry::new(&quant, 3072, 3584).unwrap();
        for threads in [1, 2, 8, 64, 512] {
            let held = batch(&geometry, threads) as u64 * expert_bytes(&geometry);
            assert!(held <= BATCH_BYTES, "{threads} threads: {held}");
        }
        assert_eq!(batch(&geometry, 64), 4);
        assert!(batch(&Geometry::new(&quant, 128, 128).unwrap(), 64) == 128);
    }
}
