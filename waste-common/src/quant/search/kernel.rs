//! The two searches, for any sixteen lanes.
//!
//! The source is a macro, so that each instruction set has functions of its own features, which inline into each other.

use super::{Group, Stage, WIDTH_MAX};
use crate::quant::vq::STAGES_MAX;

/// Groups of sixteen vectors in flight: while one's products are on their way, the other's begin.
pub const FLIGHT: usize = 2;

/// Groups of sixteen scores whose lanewise minimum is kept, so that most are passed over without a look.
pub const CHUNK: usize = 4;

/// Vectors that go through a stage of the beam search together: codebooks are loaded once for all of them, and what is
/// read of the products for the scores of one is still in L1 when its best ones are looked at.
pub const BLOCK: usize = 4;

/// Groups of candidates that are sorted together.
pub const ROOM: usize = 8;

/// A candidate: some indices, and half the squared distance from their sum to the vector, less half the vector's
/// squared norm.
#[derive(Clone, Copy)]
pub struct Path {
    pub score: f32,
    pub indices: [u8; STAGES_MAX],
}

pub const NOWHERE: Path = Path { score: 0.0, indices: [0; STAGES_MAX] };

/// What a beam search holds of a vector.
#[derive(Clone, Copy)]
pub struct Beam {
    pub paths: [Path; WIDTH_MAX],
    /// How many there are.
    pub live: usize,
}

impl Beam {
    pub const NONE: Beam = Beam { paths: [NOWHERE; WIDTH_MAX], live: 0 };
}

/// What a beam search works with.
pub struct Room {
    /// `|c|²/2 − x·c`: `[vector][group]`.
    pub dots: Vec<Group>,
    /// The least scores of a chunk: `[vector][path][chunk]`.
    pub minima: Vec<Group>,
    /// Scores and places.
    pub candidates: [[Group; ROOM]; 2],
}

impl Stage {
    /// What is summed for the continuations of a path, chunk by chunk: `dots`, and the dot products with its entries of
    /// the `TERMS - 1` stages before.
    #[inline(always)]
    pub fn terms<'a, const TERMS: usize>(
        &'a self,
        path: &Path,
        dots: &'a [[Group; CHUNK]],
    ) -> [&'a [[Group; CHUNK]]; TERMS] {
        let mut terms = [dots; TERMS];
        for (earlier, term) in terms[1..].iter_mut().enumerate() {
            let entry = usize::from(path.indices[earlier]);
            *term = &self.products[earlier].as_chunks::<CHUNK>().0[entry * dots.len()..][..dots.len()];
        }
        terms
    }
}

/// The searches on lanes of a type whose methods have some features.
macro_rules! kernels {
    ($lanes:ty $(, $features:literal)?) => {
        use super::kernel::{BLOCK, Beam, CHUNK, FLIGHT, NOWHERE, Path, ROOM, Room};
        use super::{Codebooks, Group, LANES, STAGES_MAX, Stage, Vector, VEC_DIM, WIDTH_MAX};

        type L = $lanes;

        /// The score of an entry is `|c|²/2 − x·c`, the products subtracted one dimension after the other; the least wins.
        #[inline]
        $(#[target_feature(enable = $features)])?
        pub(super) fn greedy(books: &Codebooks, vectors: &[Vector], indices: &mut [u8]) {
            let stages = books.stages.len();
            for (vectors, indices) in vectors.chunks(FLIGHT * LANES).zip(indices.chunks_mut(FLIGHT * LANES * stages)) {
                let mut x = [[Group([0.0; LANES]); VEC_DIM]; FLIGHT];
                for (i, vector) in vectors.iter().enumerate() {
                    for (x, value) in x[i / LANES].iter_mut().zip(vector) {
                        x.0[i % LANES] = *value;
                    }
                }
                for (number, stage) in books.stages.iter().enumerate() {
                    let found = nearest(stage, &x);
                    for (i, indices) in indices.chunks_exact_mut(stages).enumerate() {
                        // Below 256, as there are no more entries.
                        let index = found[i / LANES].0[i % LANES] as u8;
                        indices[number] = index;
                        for (x, c) in x[i / LANES].iter_mut().zip(&stage.entries[usize::from(index)]) {
                            x.0[i % LANES] -= c;
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
            let mut number = 0.0;
            for (entries, half_norms) in stage.entries.chunks(LANES).zip(&stage.half_norms) {
                for (entry, half_norm) in entries.iter().zip(&half_norms.0) {
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
            }
            let mut found = [Group([0.0; LANES]); FLIGHT];
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
            let stages = books.stages.len();
            let most = books.stages.iter().map(Stage::groups).max().unwrap_or(0);
            let mut room = Room {
                dots: vec![Group([0.0; LANES]); BLOCK * most],
                minima: vec![Group([0.0; LANES]); BLOCK * width * most / CHUNK],
                candidates: [[Group([0.0; LANES]); ROOM]; 2],
            };
            let (mut beams, mut next) = ([Beam::NONE; BLOCK], [Beam::NONE; BLOCK]);
            for (x, indices) in vectors.chunks(BLOCK).zip(indices.chunks_mut(BLOCK * stages)) {
                let (mut beams, mut next) = (&mut beams[..x.len()], &mut next[..x.len()]);
                for beam in &mut *beams {
                    (beam.live, beam.paths[0]) = (1, NOWHERE);
                }
                for (number, stage) in books.stages.iter().enumerate() {
                    let wanted = if number + 1 == stages { 1 } else { width };
                    distances(stage, x, &mut room.dots);
                    // As many sums as stages are written out, so that they stay in registers.
                    match number {
                        0 => continued::<1>(stage, beams, wanted, &mut room, next),
                        1 => continued::<2>(stage, beams, wanted, &mut room, next),
                        2 => continued::<3>(stage, beams, wanted, &mut room, next),
                        3 => continued::<4>(stage, beams, wanted, &mut room, next),
                        4 => continued::<5>(stage, beams, wanted, &mut room, next),
                        5 => continued::<6>(stage, beams, wanted, &mut room, next),
                        6 => continued::<7>(stage, beams, wanted, &mut room, next),
                        _ => continued::<STAGES_MAX>(stage, beams, wanted, &mut room, next),
                    }
                    std::mem::swap(&mut beams, &mut next);
                }
                for (indices, beam) in indices.chunks_exact_mut(stages).zip(&*beams) {
                    indices.copy_from_slice(&beam.paths[0].indices[..stages]);
                }
            }
        }

        /// `|c|²/2 − x·c` of all entries, for each vector: `[vector][group]`.
        #[inline]
        $(#[target_feature(enable = $features)])?
        fn distances(stage: &Stage, vectors: &[Vector], dots: &mut [Group]) {
            let groups = stage.groups();
            let mut lanes = [[L::splat(0.0); VEC_DIM]; BLOCK];
            for (lanes, x) in lanes.iter_mut().zip(vectors) {
                for d in 0..VEC_DIM {
                    lanes[d] = L::splat(x[d]);
                }
            }
            for (group, (half_norm, columns)) in stage.half_norms.iter().zip(&stage.columns).enumerate() {
                let mut sums = [L::load(half_norm); BLOCK];
                for d in 0..VEC_DIM {
                    let column = L::load(&columns[d]);
                    for v in 0..BLOCK {
                        sums[v] = lanes[v][d].minus_product(column, sums[v]);
                    }
                }
                for v in 0..BLOCK {
                    sums[v].store(&mut dots[v * groups + group]);
                }
            }
        }

        /// The `wanted` best continuations of each beam by a stage with `TERMS - 1` before it. Those of all beams are
        /// scored before the first ones are chosen: only the latter takes branches that cannot be foreseen.
        #[inline]
        $(#[target_feature(enable = $features)])?
        fn continued<const TERMS: usize>(
            stage: &Stage,
            beams: &[Beam],
            wanted: usize,
            room: &mut Room,
            next: &mut [Beam],
        ) {
            let chunks = stage.groups() / CHUNK;
            let dots = room.dots.as_chunks::<CHUNK>().0;
            let most = room.minima.len() / BLOCK;
            let mut bounds = [L::splat(f32::INFINITY); BLOCK];
            let parts = dots.chunks_exact(chunks).zip(room.minima.chunks_exact_mut(most));
            for ((beam, bound), (dots, minima)) in beams.iter().zip(&mut bounds).zip(parts) {
                let mut low = L::splat(f32::INFINITY);
                for (path, minima) in beam.paths[..beam.live].iter().zip(minima.chunks_exact_mut(chunks)) {
                    low = low.lower(scored::<TERMS>(stage, path, dots, minima));
                }
                *bound = low.bound(wanted);
            }
            let parts = dots.chunks_exact(chunks).zip(room.minima.chunks_exact(most));
            for (((beam, bound), (dots, minima)), next) in beams.iter().zip(&bounds).zip(parts).zip(next) {
                let minima = &minima[..beam.live * chunks];
                let best = lowest::<TERMS>(stage, beam, dots, minima, *bound, wanted, &mut room.candidates);
                next.live = 0;
                // Powers of two, see `Stage::groups`.
                let shift = (chunks * CHUNK * LANES).trailing_zeros();
                let best = best[0].0.iter().zip(&best[1].0);
                for (path, (score, place)) in next.paths.iter_mut().zip(best).take(wanted) {
                    // Padding is infinitely far away.
                    if *score < f32::INFINITY {
                        let place = place.to_bits();
                        *path = Path { score: *score, ..beam.paths[(place >> shift) as usize % WIDTH_MAX] };
                        path.indices[TERMS - 1] = (place & ((1 << shift) - 1)) as u8;
                        next.live += 1;
                    }
                }
            }
        }

        /// The least scores of a path's continuations, lane by lane: in chunks of [`CHUNK`] groups and of all.
        #[inline]
        $(#[target_feature(enable = $features)])?
        fn scored<const TERMS: usize>(
            stage: &Stage,
            path: &Path,
            dots: &[[Group; CHUNK]],
            minima: &mut [Group],
        ) -> L {
            let mut lows = L::splat(f32::INFINITY);
            let terms = stage.terms::<TERMS>(path, dots);
            let base = L::splat(path.score);
            for (chunk, minimum) in minima.iter_mut().enumerate() {
                let sums = summed::<TERMS>(&terms, chunk);
                // The least sum has the least score, as rounding keeps the order.
                let low = base.plus(sums[0].lower(sums[1]).lower(sums[2].lower(sums[3])));
                low.store(minimum);
                lows = lows.lower(low);
            }
            lows
        }

        /// A chunk of sums, to which a path's score is still to be added.
        #[inline]
        $(#[target_feature(enable = $features)])?
        fn summed<const TERMS: usize>(terms: &[&[[Group; CHUNK]]; TERMS], chunk: usize) -> [L; CHUNK] {
            let mut sums = [L::splat(0.0); CHUNK];
            for i in 0..CHUNK {
                sums[i] = L::load(&terms[0][chunk][i]);
                for term in &terms[1..] {
                    sums[i] = sums[i].plus(L::load(&term[chunk][i]));
                }
            }
            sums
        }

        /// Dot products of entries with all of a stage's: `[entry][group]`.
        #[inline]
        $(#[target_feature(enable = $features)])?
        pub(super) fn products(entries: &[Vector], columns: &[[Group; VEC_DIM]]) -> Vec<Group> {
            let mut products = vec![Group([0.0; LANES]); entries.len() * columns.len()];
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
        /// is returned. `minima` holds the least score of each lane of each chunk; the wanted scores are not above `bound`.
        #[inline]
        $(#[target_feature(enable = $features)])?
        fn lowest<const TERMS: usize>(
            stage: &Stage,
            beam: &Beam,
            dots: &[[Group; CHUNK]],
            minima: &[Group],
            bound: L,
            wanted: usize,
            candidates: &mut [[Group; ROOM]; 2],
        ) -> [Group; 2] {
            // Places go along as the bits of an f32, which are only moved.
            let (mut best, mut places) = (L::splat(f32::INFINITY), L::splat(0.0));
            let mut count = 0;
            let shift = dots.len().trailing_zeros();
            // Few chunks hold one of the best. Which ones is found without a branch for each.
            'search: for (round, minima) in minima.chunks(u64::BITS as usize).enumerate() {
                let mut hits = 0u64;
                for (bit, minimum) in minima.iter().enumerate() {
                    hits |= u64::from(L::load(minimum).not_above(bound) != 0) << bit;
                }
                while hits != 0 {
                    let chunk = round * u64::BITS as usize + hits.trailing_zeros() as usize;
                    hits &= hits - 1;
                    let path = &beam.paths[(chunk >> shift) % WIDTH_MAX];
                    // The scores once more, which takes less than keeping all of them.
                    let sums = summed::<TERMS>(&stage.terms::<TERMS>(path, dots), chunk & (dots.len() - 1));
                    let base = L::splat(path.score);
                    for i in 0..CHUNK {
                        let place = (CHUNK * chunk + i) * LANES;
                        count = base.plus(sums[i]).appended(bound, place as u32, candidates, count);
                    }
                    if wanted == 1 {
                        // Nothing is below the bound, and of what is equal the first one counts.
                        break 'search;
                    }
                    if count > (ROOM - CHUNK) * LANES {
                        (best, places) = merged(best, places, candidates, count);
                        count = 0;
                    }
                }
            }
            (best, places) = merged(best, places, candidates, count);
            let mut found = [Group([0.0; LANES]); 2];
            best.store(&mut found[0]);
            places.store(&mut found[1]);
            found
        }

        /// The first `count` candidates among the best so far.
        #[inline]
        $(#[target_feature(enable = $features)])?
        fn merged(mut best: L, mut places: L, candidates: &[[Group; ROOM]; 2], count: usize) -> (L, L) {
            for i in 0..count {
                let (group, lane) = (i / LANES % ROOM, i % LANES);
                let (score, place) = (candidates[0][group].0[lane], candidates[1][group].0[lane]);
                (best, places) = best.inserted(L::splat(score), places, L::splat(place));
            }
            (best, places)
        }
    };
}

pub(super) use kernels;
