//! The two searches, for any sixteen lanes.

use super::lanes::Lanes;
use super::{Codebooks, Group, LANES, Stage, Vector, WIDTH_MAX};
use crate::quant::vq::{STAGES_MAX, VEC_DIM};

/// Groups of sixteen vectors in flight: while one's products are on their way, the other's begin.
const FLIGHT: usize = 2;

/// The score of an entry is `|c|²/2 − x·c`, the products subtracted one dimension after the other; the least wins.
#[inline(always)]
pub fn greedy<L: Lanes>(books: &Codebooks, vectors: &[Vector], indices: &mut [u8]) {
    let stages = books.stages.len();
    for (vectors, indices) in vectors.chunks(FLIGHT * LANES).zip(indices.chunks_mut(FLIGHT * LANES * stages)) {
        let mut x = [[[0.0; LANES]; VEC_DIM]; FLIGHT];
        for (i, vector) in vectors.iter().enumerate() {
            for (x, value) in x[i / LANES].iter_mut().zip(vector) {
                x[i % LANES] = *value;
            }
        }
        for (number, stage) in books.stages.iter().enumerate() {
            let found = nearest::<L>(stage, &x);
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
#[inline(always)]
fn nearest<L: Lanes>(stage: &Stage, x: &[[Group; VEC_DIM]; FLIGHT]) -> [Group; FLIGHT] {
    let x = x.each_ref().map(|x| x.each_ref().map(L::load));
    let mut best = [L::splat(f32::INFINITY); FLIGHT];
    let mut index = [L::splat(0.0); FLIGHT];
    let half_norms = stage.half_norms.as_flattened();
    let mut number = 0.0;
    for (entry, half_norm) in stage.entries.iter().zip(half_norms) {
        let mut score = [L::splat(*half_norm); FLIGHT];
        for d in 0..VEC_DIM {
            let c = L::splat(entry[d]);
            for f in 0..FLIGHT {
                score[f] = x[f][d].minus_product(c, score[f]);
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
    index.map(L::store)
}

/// A candidate: some indices, and half the squared distance from their sum to the vector, less half the vector's
/// squared norm.
#[derive(Clone, Copy)]
struct Path {
    score: f32,
    indices: [u8; STAGES_MAX],
}

const NOWHERE: Path = Path { score: 0.0, indices: [0; STAGES_MAX] };

/// A candidate is continued by every entry `c` of a stage: its score becomes
/// `score + (((|c|²/2 − x·c) + c₁·c) + c₂·c + …)`, the products with its earlier entries in the order of stages.
#[inline(always)]
pub fn beam<L: Lanes>(books: &Codebooks, width: usize, vectors: &[Vector], indices: &mut [u8]) {
    let most = books.stages.iter().map(Stage::groups).max().unwrap_or(0);
    let mut dots = vec![[0.0; LANES]; most];
    let mut scores = vec![[0.0; LANES]; most * width];
    for (x, indices) in vectors.iter().zip(indices.chunks_exact_mut(books.stages.len())) {
        let mut paths = [NOWHERE; WIDTH_MAX];
        let mut live = 1;
        for (number, stage) in books.stages.iter().enumerate() {
            let groups = stage.groups();
            let lows = continued::<L>(stage, x, &paths[..live], number, &mut dots[..groups], &mut scores);
            let wanted = if number + 1 == books.stages.len() { 1 } else { width };
            let mut best = [(0.0f32, 0u32); WIDTH_MAX];
            let found = lowest::<L>(&scores[..live * groups], &lows, wanted, &mut best);
            let mut next = [NOWHERE; WIDTH_MAX];
            for (next, (score, at)) in next.iter_mut().zip(&best[..found]) {
                let (path, entry) = (*at as usize / (groups * LANES), *at as usize % (groups * LANES));
                *next = Path { score: *score, ..paths[path] };
                next.indices[number] = entry as u8;
            }
            (paths, live) = (next, found);
        }
        indices.copy_from_slice(&paths[0].indices[..indices.len()]);
    }
}

/// Scores of all continuations of `paths`, `[path][group]`, and the least of each lane.
#[inline(always)]
fn continued<L: Lanes>(
    stage: &Stage,
    x: &Vector,
    paths: &[Path],
    number: usize,
    dots: &mut [Group],
    scores: &mut [Group],
) -> L {
    let x = x.map(L::splat);
    for ((dot, half_norm), columns) in dots.iter_mut().zip(&stage.half_norms).zip(&stage.columns) {
        let mut sum = L::load(half_norm);
        for (x, column) in x.into_iter().zip(columns) {
            sum = x.minus_product(L::load(column), sum);
        }
        *dot = sum.store();
    }
    let groups = dots.len();
    let mut lows = L::splat(f32::INFINITY);
    for (path, scores) in paths.iter().zip(scores.chunks_exact_mut(groups)) {
        let base = L::splat(path.score);
        let row = |earlier: usize| {
            &stage.products[earlier][usize::from(path.indices[earlier]) * groups..][..groups]
        };
        let mut last = |scores: &mut Group, sum: L| {
            let score = base.plus(sum);
            lows = lows.replaced(score.below(lows), score);
            *scores = score.store();
        };
        // Written out for few stages, so that sums stay in registers.
        match number {
            0 => scores.iter_mut().zip(&*dots).for_each(|(score, dot)| last(score, L::load(dot))),
            1 => {
                for ((score, dot), a) in scores.iter_mut().zip(&*dots).zip(row(0)) {
                    last(score, L::load(dot).plus(L::load(a)));
                }
            }
            2 => {
                for (((score, dot), a), b) in scores.iter_mut().zip(&*dots).zip(row(0)).zip(row(1)) {
                    last(score, L::load(dot).plus(L::load(a)).plus(L::load(b)));
                }
            }
            _ => {
                for (group, (score, dot)) in scores.iter_mut().zip(&*dots).enumerate() {
                    let mut sum = L::load(dot);
                    for earlier in 0..number {
                        sum = sum.plus(L::load(&row(earlier)[group]));
                    }
                    last(score, sum);
                }
            }
        }
    }
    lows
}

/// The `wanted` least scores with their places, ascending, equal ones in the order of places; how many there are.
/// `lows` holds the least score of each lane.
#[inline(always)]
fn lowest<L: Lanes>(
    scores: &[Group],
    lows: &L,
    wanted: usize,
    best: &mut [(f32, u32); WIDTH_MAX],
) -> usize {
    // The wanted-th least of the lanes' minima bounds the wanted-th least score from above.
    let mut minima = lows.store();
    minima.sort_unstable_by(f32::total_cmp);
    let bound = L::splat(minima[wanted - 1]);
    let mut found = 0;
    for (at, group) in (0u32..).step_by(LANES).zip(scores) {
        let mut lanes = L::load(group).not_above(bound);
        while lanes != 0 {
            let lane = lanes.trailing_zeros();
            lanes &= lanes - 1;
            let score = group[lane as usize];
            // Padding is infinitely far away.
            if score == f32::INFINITY || (found == wanted && score >= best[wanted - 1].0) {
                continue;
            }
            found = (found + 1).min(wanted);
            let mut place = found - 1;
            while place > 0 && best[place - 1].0 > score {
                best[place] = best[place - 1];
                place -= 1;
            }
            best[place] = (score, at + lane);
        }
    }
    found
}
