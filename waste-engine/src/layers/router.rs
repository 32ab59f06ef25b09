//! The router: which experts a token goes to, and with which weights (architecture.md §6).

use waste_common::config::{Moe, RouterScore};

use crate::compute::Compute;
use crate::kernels::Kernels;
use crate::matrix::Matrix;

/// The weights of a router.
pub struct Router {
    /// `gate.weight` [experts, hidden].
    pub gate: Matrix,
    /// `e_score_correction_bias` [experts]: for the choice only, never for the weights.
    pub bias: Vec<f32>,
}

/// How scores become a choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Routing {
    /// Experts a token is routed to.
    pub top_k: usize,
    /// Score function.
    pub score: RouterScore,
    /// Whether the chosen weights are divided by their sum.
    pub renormalize: bool,
    /// Factor on the chosen weights.
    pub scaling: f32,
    /// (groups, groups kept), if group-limited routing is active.
    pub groups: Option<(usize, usize)>,
}

impl From<&Moe> for Routing {
    fn from(moe: &Moe) -> Self {
        Routing {
            top_k: moe.top_k,
            score: moe.score,
            renormalize: moe.renormalize,
            scaling: moe.scaling,
            groups: moe.groups,
        }
    }
}

impl Router {
    /// Scores of [tokens, hidden] for every expert, [tokens, experts].
    pub fn scores(&self, compute: &Compute, routing: &Routing, x: &[f32], scores: &mut [f32]) {
        self.gate.apply(compute, x, scores);
        for row in scores.chunks_exact_mut(self.gate.rows) {
            score(compute.kernels, routing.score, row);
        }
    }

    /// The chosen experts of one token, best first, with their weights. `selection` is working space like `scores`.
    pub fn choose(
        &self,
        routing: &Routing,
        scores: &[f32],
        selection: &mut [f32],
        ids: &mut [u32],
        weights: &mut [f32],
    ) {
        for ((selection, score), bias) in selection.iter_mut().zip(scores).zip(&self.bias) {
            *selection = score + bias;
        }
        if let Some((groups, kept)) = routing.groups {
            keep_best_groups(selection, groups, kept);
        }
        top_k(selection, ids);
        for (weight, &id) in weights.iter_mut().zip(&*ids) {
            *weight = scores[id as usize];
        }
        if routing.renormalize && routing.top_k > 1 {
            let sum = weights.iter().sum::<f32>() + 1e-20;
            for weight in weights.iter_mut() {
                *weight /= sum;
            }
        }
        for weight in weights.iter_mut() {
            *weight *= routing.scaling;
        }
    }
}

/// Router logits to scores, in place.
pub fn score(kernels: &Kernels, function: RouterScore, logits: &mut [f32]) {
    match function {
        RouterScore::Sigmoid => (kernels.sigmoid)(logits),
        RouterScore::Softmax => (kernels.softmax)(logits),
    }
}

/// The ids of the largest values, best first; the smaller id wins ties. A NaN is never chosen before a number.
pub fn top_k(values: &[f32], ids: &mut [u32]) {
    let k = ids.len();
    let better = |a: u32, b: u32| {
        let (x, y) = (values[a as usize], values[b as usize]);
        x > y || (x == y || (x.is_nan() && y.is_nan())) && a < b || !x.is_nan() && y.is_nan()
    };
    let mut found = 0;
    for id in 0..values.len() as u32 {
        if found == k && !better(id, ids[k - 1]) {
            continue;
        }
        let mut at = if found < k { found } else { k - 1 };
        while at > 0 && better(id, ids[at - 1]) {
            ids[at] = ids[at - 1];
            at -= 1;
        }
        ids[at] = id;
        found = (found + 1).min(k);
    }
}

/// Group-limited routing: a group counts by the sum of its two best; the others are out.
fn keep_best_groups(selection: &mut [f32], groups: usize, kept: usize) {
    let size = selection.len() / groups;
    let score = |group: &[f32]| {
        let mut best = [f32::NEG_INFINITY; 2];
        for &value in group {
            if value > best[0] {
                best = [value, best[0]];
            } else if value > best[1] {
                best[1] = value;
            }
        }
        best[0] + best[1]
    };
    let scores: Vec<f32> = selection.chunks_exact(size).map(score).collect();
    let mut best = vec![0; kept];
    top_k(&scores, &mut best);
    for (g, group) in selection.chunks_exact_mut(size).enumerate() {
        if !best.contains(&(g as u32)) {
            group.fill(f32::NEG_INFINITY);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_smaller_id_wins_ties_and_nan_loses() {
        let mut ids = [0; 3];
        top_k(&[1.0, 2.0, f32::NAN, 2.0, 1.0], &mut ids);
        assert_eq!(ids, [1, 3, 0]);
        top_k(&[f32::NAN, f32::NAN, f32::NAN], &mut ids);
        assert_eq!(ids, [0, 1, 2]);
    }

    proptest! {
        #[test]
        fn top_k_equals_a_sort(values in proptest::collection::vec(-3i8..3, 1..60), k in 1usize..12) {
            let values: Vec<f32> = values.into_iter().map(f32::from).collect();
            let k = k.min(values.len());
            let mut sorted: Vec<u32> = (0..values.len() as u32).collect();
            sorted.sort_by(|&a, &b| values[b as usize].total_cmp(&values[a as usize]).then(a.cmp(&b)));
            let mut ids = vec![0; k];
            top_k(&values, &mut ids);
            prop_assert_eq!(&ids[..], &sorted[..k]);
        }
    }
}
