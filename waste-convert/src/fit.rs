//! The codebooks of one matrix kind: residual k-means, stage after stage, then least squares over all stages at once.
//!
//! Searches are f32 in a fixed order; sums over samples are f64, by chunks of a fixed size. So codebooks are the same
//! whatever the threads and the machine.

use rayon::prelude::*;
use waste_common::quant::half::{f16_to_f32, f32_to_f16};
use waste_common::quant::search::{Codebooks, Vector};
use waste_common::quant::vq::VEC_DIM;

use crate::linear;
use crate::options::Recipe;
use crate::random::SplitMix64;

/// Samples whose sums are formed in one go; part of the definition of the result.
const CHUNK: usize = 4096;
/// Largest f16.
const F16_MAX: f32 = 65504.0;
/// Rounds of Lloyd's algorithm per stage.
const ROUNDS: usize = 10;
/// What holds an entry where it is, in samples of mean weight: entries that few samples name, and the direction in
/// which stages can be shifted against each other, stay put.
const HOLD: f64 = 0.1;

/// Vectors to fit codebooks to, and how much each counts.
#[derive(Debug, Default, Clone)]
pub struct Samples {
    /// The vectors.
    pub vectors: Vec<Vector>,
    /// As many weights, none negative.
    pub weights: Vec<f32>,
}

impl Samples {
    /// Adds other samples behind these.
    pub fn append(&mut self, other: Samples) {
        self.vectors.extend(other.vectors);
        self.weights.extend(other.weights);
    }

    /// Fits `stages` codebooks of `entries` entries; every value is exactly an f16.
    pub fn fit(&self, stages: usize, entries: usize, recipe: &Recipe, random: &mut SplitMix64) -> Codebooks {
        let mut books = self.residual(stages, entries, random);
        for _ in 0..recipe.refinements {
            books = self.refined(books, recipe.fit_width);
        }
        let rounded = |value: f32| f16_to_f32(f32_to_f16(value.clamp(-F16_MAX, F16_MAX)));
        // Rounded before anything is assigned to them for good.
        Codebooks::new(
            unpacked(&books).into_iter().map(|b| b.iter().map(|c| c.map(rounded)).collect()).collect(),
        )
    }

    /// Each codebook by k-means on what the ones before leave over.
    fn residual(&self, stages: usize, entries: usize, random: &mut SplitMix64) -> Codebooks {
        let mut rest = self.clone();
        let mut books = Vec::with_capacity(stages);
        for _ in 0..stages {
            let book = rest.means(entries, random);
            let indices = search(&book, 1, &rest.vectors);
            for (vector, index) in rest.vectors.iter_mut().zip(indices) {
                let entry = &book.entries(0)[usize::from(index)];
                vector.iter_mut().zip(entry).for_each(|(x, c)| *x -= c);
            }
            books.push(book.entries(0).to_vec());
        }
        Codebooks::new(books)
    }

    /// One codebook by Lloyd's algorithm, from samples.
    fn means(&self, entries: usize, random: &mut SplitMix64) -> Codebooks {
        let start = random.spread(self.vectors.len(), entries);
        let mut book: Vec<Vector> = start.iter().map(|i| self.vectors[*i]).collect();
        book.resize(entries, [0.0; VEC_DIM]);
        let mut book = Codebooks::new(vec![book]);
        for _ in 0..ROUNDS {
            let Some(next) = self.moved(&book) else { break };
            book = Codebooks::new(vec![next]);
        }
        book
    }

    /// The means of the samples nearest to each entry; an entry without samples stays. `None` if nothing moves.
    fn moved(&self, book: &Codebooks) -> Option<Vec<Vector>> {
        let entries = book.entries(0);
        let partial: Vec<Vec<[f64; VEC_DIM + 1]>> = self
            .vectors
            .par_chunks(CHUNK)
            .zip(self.weights.par_chunks(CHUNK))
            .map(|(vectors, weights)| {
                let mut indices = vec![0; vectors.len()];
                book.greedy(vectors, &mut indices);
                let mut sums = vec![[0.0; VEC_DIM + 1]; entries.len()];
                for ((vector, weight), index) in vectors.iter().zip(weights).zip(indices) {
                    let (sum, weight) = (&mut sums[usize::from(index)], f64::from(*weight));
                    sum.iter_mut().zip(vector).for_each(|(sum, x)| *sum += weight * f64::from(*x));
                    sum[VEC_DIM] += weight;
                }
                sums
            })
            .collect();
        let mut total = vec![[0.0; VEC_DIM + 1]; entries.len()];
        for sums in &partial {
            total.as_flattened_mut().iter_mut().zip(sums.as_flattened()).for_each(|(t, s)| *t += s);
        }
        let mean = |(entry, sum): (&Vector, &[f64; VEC_DIM + 1])| {
            let weight = sum[VEC_DIM];
            if weight > 0.0 { std::array::from_fn(|d| (sum[d] / weight) as f32) } else { *entry }
        };
        let next: Vec<Vector> = entries.iter().zip(&total).map(mean).collect();
        (next != entries).then_some(next)
    }

    /// The codebooks that fit best to where a beam search puts the samples now.
    fn refined(&self, books: Codebooks, width: usize) -> Codebooks {
        let stages = books.stages();
        let indices = search(&books, width, &self.vectors);
        // Unknowns are all entries of all stages; a sample says that the sum of those it names is itself.
        let first: Vec<usize> = (0..stages)
            .scan(0, |next, stage| {
                let first = *next;
                *next += books.entries(stage).len();
                Some(first)
            })
            .collect();
        let n: usize = (0..stages).map(|stage| books.entries(stage).len()).sum();
        let mut matrix = vec![0.0; n * n];
        let mut right = vec![[0.0; VEC_DIM]; n];
        let samples = self.vectors.iter().zip(&self.weights).zip(indices.chunks_exact(stages));
        for ((vector, weight), indices) in samples {
            let weight = f64::from(*weight);
            let sum = books.sum(indices);
            // What is left, so that the solution is a step from the present entries.
            let rest: [f64; VEC_DIM] = std::array::from_fn(|d| weight * f64::from(vector[d] - sum[d]));
            for (s, index) in indices.iter().enumerate() {
                let i = first[s] + usize::from(*index);
                right[i].iter_mut().zip(&rest).for_each(|(right, rest)| *right += rest);
                // The upper triangle.
                for (first, index) in first[s..].iter().zip(&indices[s..]) {
                    matrix[i * n + first + usize::from(*index)] += weight;
                }
            }
        }
        let mean = self.weights.iter().map(|weight| f64::from(*weight)).sum::<f64>()
            / self.weights.len().max(1) as f64;
        for i in 0..n {
            matrix[i * n + i] += HOLD * mean;
        }
        if !linear::solve(&mut matrix, &mut right) {
            return books;
        }
        let mut next = unpacked(&books);
        for (entry, step) in next.iter_mut().flatten().zip(&right) {
            entry.iter_mut().zip(step).for_each(|(value, step)| *value += *step as f32);
        }
        if next.iter().flatten().flatten().any(|value| !value.is_finite()) {
            return books;
        }
        Codebooks::new(next)
    }
}

fn unpacked(books: &Codebooks) -> Vec<Vec<Vector>> {
    (0..books.stages()).map(|stage| books.entries(stage).to_vec()).collect()
}

/// Indices of all vectors, `[vectors][stages]`: greedy for a width of 1.
fn search(books: &Codebooks, width: usize, vectors: &[Vector]) -> Vec<u8> {
    let stages = books.stages();
    let mut indices = vec![0; vectors.len() * stages];
    vectors.par_chunks(CHUNK).zip(indices.par_chunks_mut(CHUNK * stages)).for_each(|(vectors, indices)| {
        if width == 1 { books.greedy(vectors, indices) } else { books.beam(width, vectors, indices) }
    });
    indices
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Effort;
    use proptest::prelude::*;

    fn samples(vectors: Vec<Vector>) -> Samples {
        let weights = (0..vectors.len()).map(|i| 0.5 + (i % 3) as f32).collect();
        Samples { vectors, weights }
    }

    fn noise(count: usize, seed: u64) -> Vec<Vector> {
        let mut random = SplitMix64::of(&[seed]);
        let mut value = || (random.draw() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        (0..count).map(|_| std::array::from_fn(|_| value())).collect()
    }

    fn error(samples: &Samples, books: &Codebooks, width: usize) -> f64 {
        let indices = search(books, width, &samples.vectors);
        let rows = samples.vectors.iter().zip(indices.chunks(books.stages())).zip(&samples.weights);
        rows.map(|((x, indices), weight)| {
            let sum = books.sum(indices);
            f64::from(*weight) * x.iter().zip(&sum).map(|(x, c)| f64::from(x - c).powi(2)).sum::<f64>()
        })
        .sum()
    }

    #[test]
    fn separate_clusters_are_found() {
        let centres = noise(8, 3);
        let vectors: Vec<_> = noise(4000, 4)
            .iter()
            .enumerate()
            .map(|(i, noise)| std::array::from_fn(|d| 4.0 * centres[i * 8 / 4000][d] + 0.01 * noise[d]))
            .collect();
        let books = samples(vectors).fit(1, 8, &Effort::Fast.recipe(), &mut SplitMix64::of(&[5]));
        for centre in &centres {
            let near = |entry: &&Vector| entry.iter().zip(centre).all(|(a, b)| (a - 4.0 * b).abs() < 0.02);
            assert_eq!(books.entries(0).iter().filter(near).count(), 1, "{centre:?}");
        }
    }

    #[test]
    fn every_refinement_comes_nearer() {
        let samples = samples(noise(5000, 1));
        let mut books = samples.residual(3, 16, &mut SplitMix64::of(&[2]));
        let mut last = error(&samples, &books, 4);
        for _ in 0..4 {
            books = samples.refined(books, 4);
            let next = error(&samples, &books, 4);
            assert!(next < 0.999 * last, "{next} {last}");
            last = next;
        }
    }

    #[test]
    fn the_number_of_threads_changes_nothing() {
        let samples = samples(noise(3 * CHUNK + 7, 6));
        let fit = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let recipe = Recipe { refinements: 2, ..Effort::Normal.recipe() };
            unpacked(&pool.install(|| samples.fit(2, 32, &recipe, &mut SplitMix64::of(&[7]))))
        };
        let one = fit(1);
        assert_eq!(one, fit(2));
        assert_eq!(one, fit(3));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        /// Zeros, constants, fewer samples than entries, huge and tiny values: always finite, exactly f16 entries.
        #[test]
        fn degenerate_samples_never_panic(
            count in 0usize..70,
            entries in 1usize..=64,
            stages in 1usize..=4,
            scale in prop_oneof![Just(0.0f32), Just(1.0), Just(1e-30), Just(6e4), Just(1e-8)],
            weight in prop_oneof![Just(0.0f32), Just(1.0), Just(1e-12)],
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
            let mut samples = samples(vectors);
            samples.weights.iter_mut().for_each(|w| *w *= weight);
            let books = samples.fit(stages, entries, &Effort::Normal.recipe(), &mut SplitMix64::of(&[seed]));
            prop_assert_eq!(books.stages(), stages);
            for book in unpacked(&books) {
                prop_assert_eq!(book.len(), entries);
                for value in book.as_flattened() {
                    prop_assert!(value.is_finite());
                    prop_assert_eq!(f16_to_f32(f32_to_f16(*value)).to_bits(), value.to_bits());
                }
            }
        }
    }
}
