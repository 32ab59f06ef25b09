//! The two searches, for any sixteen lanes.
//!
//! The source is a macro, so that each instruction set has functions of its own features, which inline into each other.

use super::{Group, Stage};
use crate::quant::vq::STAGES_MAX;

/// Groups of sixteen vectors in flight: while one's products are on their way, the other's begin.
pub const FLIGHT: usize = 2;

/// Groups of sixteen scores whose lanewise minimum is kept, so that most are passed over without a look.
pub const CHUNK: usize = 4;

/// A candidate: some indices, and half the squared distance from their sum to the vector, less half the vector's
/// squared norm.
#[derive(Clone, Copy)]
pub struct Path {
    pub score: f32,
    pub indices: [u8; STAGES_MAX],
}

pub const NOWHERE: Path = Path { score: 0.0, indices: [0; STAGES_MAX] };

/// The dot products of a path's entry of an earlier stage with all entries of this one.
#[inline(always)]
pub fn products_of<'a>(stage: &'a Stage, path: &Path, earlier: usize, groups: usize) -> &'a [Group] {
    &stage.products[earlier][usize::from(path.indices[earlier]) * groups..][..groups]
}

/// The searches on lanes of a type whose methods have some features.
macro_rules! kernels {
    ($lanes:ty $(, $features:literal)?) => {
        use super::kernel::{CHUNK, FLIGHT, NOWHERE, Path, products_of};
        use super::{Codebooks, Group, LANES, STAGES_MAX, Stage, Vector, VEC_DIM, WIDTH_MAX};

        type L = $lanes;

        /// The score of an entry is `|c|²/2 − x·c`, the products subtracted one dimension after the other; the least wins.
        #[inline]
        $(#[target_feature(enable = $features)])?
        pub(super) fn greedy(books: &Codebooks, vectors: &[Vector], indices: &mut [u8]) {
            let stages = books.stages.len();
            for (vectors, indices) in vectors.chunks(FLIGHT * LANES).zip(indices.chunks_mut(FLIGHT * LANES * stages)) {
                let mut x = [[[0.0; LANES]; VEC_DIM]; FLIGHT];
                for (i, vector) in vectors.iter().enumerate() {
                    for (x, value) in x[i / LANES].iter_mut().zip(vector) {
                        x[i % LANES] = *value;
                    }
                }
                for (number, stage) in books.stages.iter().enumerate() {
                    let found = nearest(stage, &x);
                    for (i, indices) in indices.chunks_exact_mut(stages).enumerate() {
                        // Below 256, as there are no more entries.
                        let index = found[i / LANES][i % LANES] as u8;
                        indices[number] = index;
                        for (x, c) in x[i / LANES].iter_mut().zip(&stage.entries[usize::from(index)]) {
                            x[i % LANES] -= c;
                        }
                    }
                }
            }
        }

        /// The numbers of the nearest entries; whole numbers up to 255 are exact as f32.
        #[inline]
        $(#[target_feature(enable = $features)])?
        fn nearest(stage: &Stage, x: &[[Group; VEC_DIM]; FLIGHT]) -> [Group; FLIGHT] {
            let mut lanes = [[L::splat(0.0); VEC_DIM]; FLIGHT];
            for f in 0..FLIGHT {
                for d in 0..VEC_DIM {
                    lanes[f][d] = L::load(&x[f][d]);
                }
            }
            let mut best = [L::splat(f32::INFINITY); FLIGHT];
            let mut index = [L::splat(0.0); FLIGHT];
            let half_norms = stage.half_norms.as_flattened();
            let mut number = 0.0;
            for (entry, half_norm) in stage.entries.iter().zip(half_norms) {
                let mut score = [L::splat(*half_norm); FLIGHT];
                for d in 0..VEC_DIM {
                    let c = L::splat(entry[d]);
                    for f in 0..FLIGHT {
                        score[f] = lanes[f][d].minus_product(c, score[f]);
                    }
                }
                let e = L::splat(number);
                for f in 0..FLIGHT {
                    let better = score[f].below(best[f]);
                    best[f] = best[f].replaced(better, score[f]);
                    index[f] = index[f].replaced(better, e);
                }
                number += 1.0;
            }
            let mut found = [[0.0; LANES]; FLIGHT];
            for f in 0..FLIGHT {
                index[f].store(&mut found[f]);
            }
            found
        }

        /// A candidate is continued by every entry `c` of a stage: its score becomes
        /// `score + (((|c|²/2 − x·c) + c₁·c) + c₂·c + …)`, the products with its earlier entries in the order of stages.
        #[inline]
        $(#[target_feature(enable = $features)])?
        pub(super) fn beam(books: &Codebooks, width: usize, vectors: &[Vector], indices: &mut [u8]) {
            let most = books.stages.iter().map(Stage::groups).max().unwrap_or(0);
            let mut dots = vec![[0.0; LANES]; most];
            let mut scores = vec![[0.0; LANES]; most * width];
            let mut minima = vec![[0.0; LANES]; most * width / CHUNK];
            let (mut paths, mut next) = (&mut [NOWHERE; WIDTH_MAX], &mut [NOWHERE; WIDTH_MAX]);
            for (x, indices) in vectors.iter().zip(indices.chunks_exact_mut(books.stages.len())) {
                *paths = [NOWHERE; WIDTH_MAX];
                let mut live = 1;
                for (number, stage) in books.stages.iter().enumerate() {
                    let groups = stage.groups();
                    let lows = continued(
                        stage,
                        x,
                        &paths[..live],
                        number,
                        &mut dots[..groups],
                        &mut scores,
                        &mut minima,
                    );
                    let wanted = if number + 1 == books.stages.len() { 1 } else { width };
                    let best = lowest(&scores[..live * groups], &minima[..live * groups / CHUNK], lows, wanted);
                    let mut found = 0;
                    // A power of two, see `Stage::groups`.
                    let shift = (groups * LANES).trailing_zeros();
                    for (next, (score, place)) in next.iter_mut().zip(best[0].iter().zip(&best[1])).take(wanted) {
                        // Padding is infinitely far away.
                        if *score < f32::INFINITY {
                            let place = place.to_bits();
                            *next = Path { score: *score, ..paths[(place >> shift) as usize % WIDTH_MAX] };
                            next.indices[number] = (place & ((1 << shift) - 1)) as u8;
                            found += 1;
                        }
                    }
                    std::mem::swap(&mut paths, &mut next);
                    live = found;
                }
                indices.copy_from_slice(&paths[0].indices[..indices.len()]);
            }
        }

        /// Scores of all continuations of `paths`, `[path][group]`; the least of each lane, in chunks of [`CHUNK`]
        /// groups (`minima`) and of all.
        #[inline]
        $(#[target_feature(enable = $features)])?
        fn continued(
            stage: &Stage,
            x: &Vector,
            paths: &[Path],
            number: usize,
            dots: &mut [Group],
            scores: &mut [Group],
            minima: &mut [Group],
        ) -> L {
            let groups = dots.len();
            let (half_norms, columns) = (&stage.half_norms[..groups], &stage.columns[..groups]);
            let mut lanes = [L::splat(0.0); VEC_DIM];
            for d in 0..VEC_DIM {
                lanes[d] = L::splat(x[d]);
            }
            for group in 0..groups {
                let mut sum = L::load(&half_norms[group]);
                for d in 0..VEC_DIM {
                    sum = lanes[d].minus_product(L::load(&columns[group][d]), sum);
                }
                sum.store(&mut dots[group]);
            }
            let dots = &*dots;
            let mut lows = L::splat(f32::INFINITY);
            let outputs = scores.chunks_exact_mut(groups).zip(minima.chunks_exact_mut(groups / CHUNK));
            for (path, (scores, minima)) in paths.iter().zip(outputs) {
                // As many sums as stages are written out, so that they stay in registers.
                lows = match number {
                    0 => scored::<1>(stage, path, dots, scores, minima, lows),
                    1 => scored::<2>(stage, path, dots, scores, minima, lows),
                    2 => scored::<3>(stage, path, dots, scores, minima, lows),
                    3 => scored::<4>(stage, path, dots, scores, minima, lows),
                    4 => scored::<5>(stage, path, dots, scores, minima, lows),
                    5 => scored::<6>(stage, path, dots, scores, minima, lows),
                    6 => scored::<7>(stage, path, dots, scores, minima, lows),
                    _ => scored::<STAGES_MAX>(stage, path, dots, scores, minima, lows),
                };
            }
            lows
        }

        /// The same of one path, for the stage with `TERMS - 1` before it.
        #[inline]
        $(#[target_feature(enable = $features)])?
        fn scored<const TERMS: usize>(
            stage: &Stage,
            path: &Path,
            dots: &[Group],
            scores: &mut [Group],
            minima: &mut [Group],
            mut lows: L,
        ) -> L {
            let groups = dots.len();
            // No closures here: they are not inlined into what has other features.
            let mut terms = [dots.as_chunks::<CHUNK>().0; TERMS];
            for (earlier, term) in terms[1..].iter_mut().enumerate() {
                *term = products_of(stage, path, earlier, groups).as_chunks().0;
            }
            let base = L::splat(path.score);
            let scores = scores.as_chunks_mut::<CHUNK>().0;
            for (chunk, (scores, minimum)) in scores.iter_mut().zip(minima).enumerate() {
                let mut low = L::splat(f32::INFINITY);
                for i in 0..CHUNK {
                    let mut sum = L::load(&terms[0][chunk][i]);
                    for term in &terms[1..] {
                        sum = sum.plus(L::load(&term[chunk][i]));
                    }
                    let score = base.plus(sum);
                    low = low.lower(score);
                    score.store(&mut scores[i]);
                }
                low.store(minimum);
                lows = lows.lower(low);
            }
            lows
        }

        /// Dot products of entries with all of a stage's: `[entry][group]`.
        #[inline]
        $(#[target_feature(enable = $features)])?
        pub(super) fn products(entries: &[Vector], columns: &[[Group; VEC_DIM]]) -> Vec<Group> {
            let mut products = vec![[0.0; LANES]; entries.len() * columns.len()];
            for (entry, products) in entries.iter().zip(products.chunks_exact_mut(columns.len())) {
                for (columns, product) in columns.iter().zip(products) {
                    let mut sum = L::splat(0.0);
                    for d in 0..VEC_DIM {
                        sum = L::splat(-entry[d]).minus_product(L::load(&columns[d]), sum);
                    }
                    sum.store(product);
                }
            }
            products
        }

        /// The least scores, ascending, and their places, equal ones in the order of places: the first `wanted` of what
        /// is returned. `minima` holds the least score of each lane of each chunk, `lows` of all of them.
        #[inline]
        $(#[target_feature(enable = $features)])?
        fn lowest(scores: &[Group], minima: &[Group], lows: L, wanted: usize) -> [Group; 2] {
            // The wanted-th least of the lanes' minima bounds the wanted-th least score from above.
            let mut least = [0.0; LANES];
            lows.store(&mut least);
            if wanted > 1 {
                for low in &mut least {
                    let enough = lows.not_above(L::splat(*low)).count_ones() as usize >= wanted;
                    *low = if enough { *low } else { f32::INFINITY };
                }
            }
            let bound = L::splat(L::load(&least).least());
            // Places go along as the bits of an f32, which are only moved.
            let (mut best, mut places) = (L::splat(f32::INFINITY), L::splat(0.0));
            // Few chunks hold one of the best. Which ones is found without a branch for each.
            'search: for (round, minima) in minima.chunks(u64::BITS as usize).enumerate() {
                let mut hits = 0u64;
                for (bit, minimum) in minima.iter().enumerate() {
                    hits |= u64::from(L::load(minimum).not_above(bound) != 0) << bit;
                }
                while hits != 0 {
                    let chunk = round * u64::BITS as usize + hits.trailing_zeros() as usize;
                    hits &= hits - 1;
                    let Some((groups, _)) = scores[CHUNK * chunk..].split_first_chunk::<CHUNK>() else { break };
                    let mut lanes = 0u64;
                    for i in 0..CHUNK {
                        lanes |= u64::from(L::load(&groups[i]).not_above(bound)) << (i * LANES);
                    }
                    while lanes != 0 {
                        let lane = lanes.trailing_zeros() as usize % (CHUNK * LANES);
                        lanes &= lanes - 1;
                        let value = L::splat(groups.as_flattened()[lane]);
                        let place = L::splat(f32::from_bits((CHUNK * LANES * chunk + lane) as u32));
                        if wanted == 1 {
                            // Nothing is below the bound, and of what is equal the first one counts.
                            (best, places) = (value, place);
                            break 'search;
                        }
                        (best, places) = best.inserted(value, places, place);
                    }
                }
            }
            let mut found = [[0.0; LANES]; 2];
            best.store(&mut found[0]);
            places.store(&mut found[1]);
            found
        }
    };
}

pub(super) use kernels;
