//! Summaries of repeated measurements.

use serde::Serialize;

/// A few numbers for many.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Measurements.
    pub n: usize,
    /// Their mean.
    pub mean: f64,
    /// Their standard deviation, with n - 1; 0 for a single one.
    pub sd: f64,
    /// The least.
    pub min: f64,
    /// The one in the middle, or the mean of the two there.
    pub median: f64,
    /// The greatest.
    pub max: f64,
}

impl Summary {
    /// Of finite numbers; `None` if there are none.
    pub fn of(values: &[f64]) -> Option<Summary> {
        let mut sorted: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        let n = sorted.len();
        let mean = sorted.iter().sum::<f64>() / n as f64;
        let squares: f64 = sorted.iter().map(|value| (value - mean).powi(2)).sum();
        let sd = if n > 1 { (squares / (n - 1) as f64).sqrt() } else { 0.0 };
        let median = (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0;
        Some(Summary { n, mean, sd, min, median, max })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_summarised() {
        let summary = Summary::of(&[4.0, 1.0, 3.0, 2.0, f64::NAN]).unwrap();
        assert_eq!(
            (summary.n, summary.mean, summary.min, summary.median, summary.max),
            (4, 2.5, 1.0, 2.5, 4.0)
        );
        assert!((summary.sd - 1.290_994).abs() < 1e-5);
        assert_eq!(Summary::of(&[7.0]).unwrap().sd, 0.0);
        assert_eq!(Summary::of(&[]), None);
    }
}
