//! How much an error in each input column of an expert matters to the encoder, from what was measured.

use waste_common::container::record::Kind;
use waste_common::importance::LayerImportance;

/// Tokens that the layer's mean stands for beside what an expert saw itself: few tokens say little.
const PRIOR: f32 = 32.0;
/// The least a column counts for, of a mean of 1: what one text leaves untouched another one may need.
const FLOOR: f32 = 0.05;

/// The weights of a layer.
pub struct Weights {
    measured: LayerImportance,
    /// Over all experts, weighted by their tokens.
    mean: Vec<f32>,
}

impl Weights {
    /// From what was measured of a layer.
    pub fn new(measured: LayerImportance) -> Self {
        let mut mean = Vec::new();
        let mut total = 0.0;
        for (expert, tokens) in measured.tokens.iter().enumerate() {
            let columns = measured.columns(expert, Kind::Gate);
            mean.resize(columns.len(), 0.0f64);
            mean.iter_mut().zip(columns).for_each(|(mean, x)| *mean += f64::from(*tokens) * f64::from(*x));
            total += f64::from(*tokens);
        }
        let mean = mean.into_iter().map(|sum| if total > 0.0 { (sum / total) as f32 } else { 0.0 }).collect();
        Weights { measured, mean }
    }

    /// Of an expert's input columns, of the input of one of its matrices: their mean is about 1.
    pub fn columns(&self, expert: usize, kind: Kind) -> Vec<f32> {
        let found = self.measured.columns(expert, kind);
        let tokens = self.measured.tokens[expert] as f32;
        // The inner columns of different experts have nothing to do with each other: there the prior is even.
        let even = mean(found);
        let prior = |column: usize| match kind {
            Kind::Gate | Kind::Up => self.mean[column],
            Kind::Down => even,
        };
        let blend = |(column, x): (usize, &f32)| (tokens * x + PRIOR * prior(column)) / (tokens + PRIOR);
        let blended: Vec<f32> = found.iter().enumerate().map(blend).collect();
        let mean = mean(&blended);
        if !(mean > 0.0 && mean.is_finite()) {
            return vec![1.0; blended.len()];
        }
        blended.into_iter().map(|x| (x / mean).max(FLOOR)).collect()
    }
}

fn mean(values: &[f32]) -> f32 {
    (values.iter().map(|x| f64::from(*x)).sum::<f64>() / values.len().max(1) as f64) as f32
}
