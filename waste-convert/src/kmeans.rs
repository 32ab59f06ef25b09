//! Residual k-means over vectors of eight weights: the codebooks of one matrix kind, stage after stage.
//!
//! Everything here is plain f32 multiplication, addition and comparison in a fixed order (sums over samples in f64,
//! by chunks of a fixed size), so codebooks and indices are the same whatever the threads and the machine.

use rayon::prelude::*;
use waste_common::quant::half::{f16_to_f32, f32_to_f16};
use waste_common::quant::vq::VEC_DIM;

use crate::random::SplitMix64;

/// Vectors that are compared with a codebook at once.
pub const LANES: usize = 16;
/// Blocks of samples whose sums are formed in one go; part of the definition of the result.
const CHUNK_BLOCKS: usize = 256;
/// Largest f16.
const F16_MAX: f32 = 65504.0;
/// Rounds of Lloyd's algorithm per stage.
const ROUNDS: usize = 10;

/// Sixteen vectors, transposed: `[dimension][lane]`.
pub type Block = [[f32; LANES]; VEC_DIM];

/// A codebook, ready to be searched.
#[derive(Debug, Clone)]
pub struct Codebook {
    entries: Vec<[f32; VEC_DIM]>,
    /// Half the squared norm of each entry.
    half_norms: Vec<f32>,
}

impl Codebook {
    fn new(entries: Vec<[f32; VEC_DIM]>) -> Self {
        let half_norm = |entry: &[f32; VEC_DIM]| entry.iter().fold(0.0, |sum, c| sum + c * c) * 0.5;
        let half_norms = entries.iter().map(half_norm).collect();
        Codebook { entries, half_norms }
    }

    /// The entries; every value is exactly an f16.
    pub fn entries(&self) -> &[[f32; VEC_DIM]] {
        &self.entries
    }

    /// The entries as f16 bits, `[entries * 8]`.
    pub fn bits(&self) -> Vec<u16> {
        self.entries.as_flattened().iter().map(|value| f32_to_f16(*value)).collect()
    }

    /// The nearest entry to each vector; of equally near ones the first. Near means least `|c|²/2 − x·c`, the
    /// products subtracted one dimension after the other.
    #[inline]
    pub fn nearest(&self, block: &Block) -> [u32; LANES] {
        let mut best = [f32::INFINITY; LANES];
        let mut index = [0u32; LANES];
        for (e, (entry, half_norm)) in (0u32..).zip(self.entries.iter().zip(&self.half_norms)) {
            let mut score = [*half_norm; LANES];
            for (x, c) in block.iter().zip(entry) {
                for (score, x) in score.iter_mut().zip(x) {
                    *score -= x * c;
                }
            }
            for lane in 0..LANES {
                let better = score[lane] < best[lane];
                best[lane] = if better { score[lane] } else { best[lane] };
                index[lane] = if better { e } else { index[lane] };
            }
        }
        index
    }

    /// Subtracts from each vector its entry.
    #[inline]
    pub fn subtract(&self, block: &mut Block, index: &[u32; LANES]) {
        for (lane, index) in index.iter().enumerate() {
            let entry = &self.entries[*index as usize];
            for (x, c) in block.iter_mut().zip(entry) {
                x[lane] -= c;
            }
        }
    }
}

/// Vectors to fit codebooks to, in blocks of sixteen.
#[derive(Debug, Default)]
pub struct Samples {
    blocks: Vec<Block>,
    count: usize,
}

impl Samples {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds one.
    pub fn push(&mut self, vector: &[f32; VEC_DIM]) {
        let lane = self.count % LANES;
        if lane == 0 {
            self.blocks.push([[0.0; LANES]; VEC_DIM]);
        }
        if let Some(block) = self.blocks.last_mut() {
            for (x, value) in block.iter_mut().zip(vector) {
                x[lane] = *value;
            }
        }
        self.count += 1;
    }

    fn get(&self, i: usize) -> [f32; VEC_DIM] {
        let block = &self.blocks[i / LANES];
        std::array::from_fn(|d| block[d][i % LANES])
    }

    /// Fits `stages` codebooks of `entries` entries, each to what the ones before leave over.
    pub fn fit(mut self, stages: usize, entries: usize, random: &mut SplitMix64) -> Vec<Codebook> {
        (0..stages)
            .map(|_| {
                let book = self.fit_stage(entries, random);
                self.blocks.par_iter_mut().for_each(|block| {
                    let index = book.nearest(block);
                    book.subtract(block, &index);
                });
                book
            })
            .collect()
    }

    /// One codebook: it starts from samples and ends rounded to f16, as it will be stored.
    fn fit_stage(&self, entries: usize, random: &mut SplitMix64) -> Codebook {
        let start = random.spread(self.count, entries);
        let mut book: Vec<[f32; VEC_DIM]> = start.iter().map(|i| self.get(*i)).collect();
        book.resize(entries, [0.0; VEC_DIM]);
        let mut book = Codebook::new(book);
        for _ in 0..ROUNDS {
            let Some(next) = self.means(&book) else { break };
            book = Codebook::new(next);
        }
        // Rounded before anything is assigned to it for good.
        for value in book.entries.as_flattened_mut() {
            *value = f16_to_f32(f32_to_f16(value.clamp(-F16_MAX, F16_MAX)));
        }
        Codebook::new(book.entries)
    }

    /// The mean of the samples nearest to each entry; an entry without samples stays. `None` if nothing moves.
    fn means(&self, book: &Codebook) -> Option<Vec<[f32; VEC_DIM]>> {
        let partial: Vec<Sums> = self
            .blocks
            .par_chunks(CHUNK_BLOCKS)
            .enumerate()
            .map(|(chunk, blocks)| {
                let mut sums = Sums::new(book.entries.len());
                let first = chunk * CHUNK_BLOCKS * LANES;
                for (i, block) in blocks.iter().enumerate() {
                    let live = (self.count - first - i * LANES).min(LANES);
                    sums.add(block, &book.nearest(block)[..live]);
                }
                sums
            })
            .collect();
        let mut total = Sums::new(book.entries.len());
        partial.iter().for_each(|sums| total.merge(sums));
        let mean = |((entry, sum), count): ((&[f32; VEC_DIM], &[f64; VEC_DIM]), &u64)| match count {
            0 => *entry,
            count => sum.map(|sum| (sum / *count as f64) as f32),
        };
        let next: Vec<_> = book.entries.iter().zip(&total.sums).zip(&total.counts).map(mean).collect();
        (next != book.entries).then_some(next)
    }
}

/// Sum and number of the samples of each entry.
struct Sums {
    sums: Vec<[f64; VEC_DIM]>,
    counts: Vec<u64>,
}

impl Sums {
    fn new(entries: usize) -> Self {
        Sums { sums: vec![[0.0; VEC_DIM]; entries], counts: vec![0; entries] }
    }

    fn add(&mut self, block: &Block, index: &[u32]) {
        for (lane, index) in index.iter().enumerate() {
            self.counts[*index as usize] += 1;
            for (sum, x) in self.sums[*index as usize].iter_mut().zip(block) {
                *sum += f64::from(x[lane]);
            }
        }
    }

    fn merge(&mut self, other: &Sums) {
        for (sum, other) in self.sums.as_flattened_mut().iter_mut().zip(other.sums.as_flattened()) {
            *sum += other;
        }
        for (count, other) in self.counts.iter_mut().zip(&other.counts) {
            *count += other;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn samples(vectors: &[[f32; VEC_DIM]]) -> Samples {
        let mut samples = Samples::default();
        vectors.iter().for_each(|vector| samples.push(vector));
        samples
    }

    fn noise(count: usize, seed: u64) -> Vec<[f32; VEC_DIM]> {
        let mut random = SplitMix64::of(&[seed]);
        let mut value = || (random.draw() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        (0..count).map(|_| std::array::from_fn(|_| value())).collect()
    }

    /// The definition, without lanes.
    fn plain(book: &Codebook, x: &[f32; VEC_DIM]) -> u32 {
        let mut best = (f32::INFINITY, 0);
        for (e, c) in book.entries.iter().enumerate() {
            let mut score = book.half_norms[e];
            for d in 0..VEC_DIM {
                score -= x[d] * c[d];
            }
            if score < best.0 {
                best = (score, e as u32);
            }
        }
        best.1
    }

    #[test]
    fn lanes_find_what_the_plain_loop_finds_and_ties_go_to_the_first() {
        let mut entries = noise(200, 1);
        entries.extend_from_within(..50);
        let book = Codebook::new(entries);
        let vectors = noise(160, 2);
        let samples = samples(&vectors);
        for (block, vectors) in samples.blocks.iter().zip(vectors.chunks(LANES)) {
            let found = book.nearest(block);
            for (found, vector) in found.iter().zip(vectors) {
                assert_eq!(*found, plain(&book, vector));
                assert!(*found < 200);
            }
        }
    }

    #[test]
    fn separate_clusters_are_found() {
        let centres = noise(8, 3);
        let vectors: Vec<_> = noise(4000, 4)
            .iter()
            .enumerate()
            .map(|(i, noise)| std::array::from_fn(|d| 4.0 * centres[i * 8 / 4000][d] + 0.01 * noise[d]))
            .collect();
        let book = &samples(&vectors).fit(1, 8, &mut SplitMix64::of(&[5]))[0];
        for centre in &centres {
            let near = |entry: &&[f32; 8]| entry.iter().zip(centre).all(|(a, b)| (a - 4.0 * b).abs() < 0.02);
            assert_eq!(book.entries.iter().filter(near).count(), 1, "{centre:?}");
        }
    }

    #[test]
    fn the_number_of_threads_changes_nothing() {
        let vectors = noise(3 * CHUNK_BLOCKS * LANES + 7, 6);
        let fit = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let books = pool.install(|| samples(&vectors).fit(2, 32, &mut SplitMix64::of(&[7])));
            books.iter().map(Codebook::bits).collect::<Vec<_>>()
        };
        let one = fit(1);
        assert_eq!(one, fit(2));
        assert_eq!(one, fit(3));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        /// Zeros, constants, fewer samples than entries, huge and tiny values: always finite, exactly f16 entries.
        #[test]
        fn degenerate_samples_never_panic(
            count in 0usize..70,
            entries in 1usize..=256,
            stages in 1usize..=4,
            scale in prop_oneof![Just(0.0f32), Just(1.0), Just(1e-30), Just(6e4), Just(1e-8)],
            constant: bool,
            seed: u64,
        ) {
            let mut vectors = noise(count, seed);
            if constant && count > 0 {
                let first = vectors[0];
                vectors.fill(first);
            }
            for value in vectors.as_flattened_mut() {
                *value *= scale;
            }
            let books = samples(&vectors).fit(stages, entries, &mut SplitMix64::of(&[seed]));
            prop_assert_eq!(books.len(), stages);
            for book in books {
                prop_assert_eq!(book.entries.len(), entries);
                for value in book.entries.as_flattened() {
                    prop_assert!(value.is_finite());
                    prop_assert_eq!(f16_to_f32(f32_to_f16(*value)).to_bits(), value.to_bits());
                }
            }
        }
    }
}
