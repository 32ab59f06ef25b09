//! The two searches, for any sixteen lanes.
//!
//! The source is a macro, so that each instruction set has functions of its own features, which inline into each other.

use super::{Group, Stage};
use crate::quant::vq::STAGES_MAX;

/// Groups of sixteen vectors in flight: while one's products are on their way, the other's begin.
pub const FLIGHT: usize = 2;

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
pub fn products<'a>(stage: &'a Stage, path: &Path, earlier: usize, groups: usize) -> &'a [Group] {
    &stage.products[earlier][usize::from(path.indices[earlier]) * groups..][..groups]
}

/// The searches on lanes of a type whose methods have some features.
macro_rules! kernels {
    ($lanes:ty $(, $features:literal)?) => {
        use super::kernel::{FLIGHT, NOWHERE, Path, products};
        use super::{Codebooks, Group, LANES, Stage, Vector, VEC_DIM, WIDTH_MAX};

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
            for (x, indices) in vectors.iter().zip(indices.chunks_exact_mut(books.stages.len())) {
                let mut paths = [NOWHERE; WIDTH_MAX];
                let mut live = 1;
                for (number, stage) in books.stages.iter().enumerate() {
                    let groups = stage.groups();
                    let lows = continued(stage, x, &paths[..live], number, &mut dots[..groups], &mut scores);
                    let wanted = if number + 1 == books.stages.len() { 1 } else { width };
                    let best = lowest(&scores[..live * groups], lows, wanted);
                    let mut next = [NOWHERE; WIDTH_MAX];
                    let mut found = 0;
                    for (next, (score, place)) in next.iter_mut().zip(best[0].iter().zip(&best[1])).take(wanted) {
                        // Padding is infinitely far away.
                        if *score < f32::INFINITY {
                            let place = *place as usize;
                            let (path, entry) = (place / (groups * LANES), place % (groups * LANES));
                            *next = Path { score: *score, ..paths[path] };
                            next.indices[number] = entry as u8;
                            found += 1;
                        }
                    }
                    (paths, live) = (next, found);
                }
                indices.copy_from_slice(&paths[0].indices[..indices.len()]);
            }
        }

        /// Scores of all continuations of `paths`, `[path][group]`, and the least of each lane.
        #[inline]
        $(#[target_feature(enable = $features)])?
        fn continued(
            stage: &Stage,
            x: &Vector,
            paths: &[Path],
            number: usize,
            dots: &mut [Group],
            scores: &mut [Group],
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
            let mut lows = L::splat(f32::INFINITY);
            for (path, scores) in paths.iter().zip(scores.chunks_exact_mut(groups)) {
                let base = L::splat(path.score);
                // Two stages are written out, so that their sums stay in registers.
                match number {
                    0 => {
                        for group in 0..groups {
                            let score = base.plus(L::load(&dots[group]));
                            lows = lows.lower(score);
                            score.store(&mut scores[group]);
                        }
                    }
                    1 => {
                        let a = products(stage, path, 0, groups);
                        for group in 0..groups {
                            let score = base.plus(L::load(&dots[group]).plus(L::load(&a[group])));
                            lows = lows.lower(score);
                            score.store(&mut scores[group]);
                        }
                    }
                    2 => {
                        let (a, b) = (products(stage, path, 0, groups), products(stage, path, 1, groups));
                        for group in 0..groups {
                            let sum = L::load(&dots[group]).plus(L::load(&a[group])).plus(L::load(&b[group]));
                            let score = base.plus(sum);
                            lows = lows.lower(score);
                            score.store(&mut scores[group]);
                        }
                    }
                    _ => {
                        scores.copy_from_slice(dots);
                        for earlier in 0..number {
                            let a = products(stage, path, earlier, groups);
                            for group in 0..groups {
                                L::load(&scores[group]).plus(L::load(&a[group])).store(&mut scores[group]);
                            }
                        }
                        for group in 0..groups {
                            let score = base.plus(L::load(&scores[group]));
                            lows = lows.lower(score);
                            score.store(&mut scores[group]);
                        }
                    }
                }
            }
            lows
        }

        /// The least scores, ascending, and their places, equal ones in the order of places: the first `wanted` of what
        /// is returned. `lows` holds the least score of each lane.
        #[inline]
        $(#[target_feature(enable = $features)])?
        fn lowest(scores: &[Group], lows: L, wanted: usize) -> [Group; 2] {
            // The wanted-th least of the lanes' minima bounds the wanted-th least score from above.
            let mut minima = [0.0; LANES];
            lows.store(&mut minima);
            let mut bound = f32::INFINITY;
            for low in minima {
                if lows.not_above(L::splat(low)).count_ones() as usize >= wanted && low < bound {
                    bound = low;
                }
            }
            let bound = L::splat(bound);
            // Places are below 16 · 256, exact as f32.
            let (mut best, mut places) = (L::splat(f32::INFINITY), L::splat(0.0));
            // Few groups hold one of the best: most are passed over four at a time.
            for (number, groups) in scores.chunks(4).enumerate() {
                if let [a, b, c, d] = groups {
                    let low = L::load(a).lower(L::load(b)).lower(L::load(c).lower(L::load(d)));
                    if low.not_above(bound) == 0 {
                        continue;
                    }
                }
                for (group, at) in groups.iter().zip((4 * LANES * number..).step_by(LANES)) {
                    let mut lanes = L::load(group).not_above(bound);
                    while lanes != 0 {
                        let lane = lanes.trailing_zeros() as usize % LANES;
                        lanes &= lanes - 1;
                        let place = L::splat((at + lane) as f32);
                        (best, places) = best.inserted(L::splat(group[lane]), places, place);
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
