//! How far a model's predictions are from those of another, as a rule the checkpoint it was made from.

use std::path::Path;

use serde::Serialize;
use waste_common::cli::{Failure, Output, resolve_model};
use waste_common::plan::KvType;
use waste_engine::{Arith, Session, Wanted};

use crate::args::ModelArgs;
use crate::eval::log_sum_exp;
use crate::open::{self, Opened};

/// The other model, and what was found so far.
pub struct Against {
    opened: Opened,
    session: Session,
    /// Of the last chunk, [positions, vocab].
    logits: Vec<f32>,
    vocab: usize,
    sum: f64,
    squares: f64,
    same_top: usize,
    tokens: usize,
}

/// The Kullback–Leibler divergence per token, in nats: `Σ p (ln p − ln q)` with p of the other model and q of the one
/// that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Divergence {
    /// Its mean.
    pub kl: f64,
    /// The standard error of the mean, the tokens taken as independent.
    pub kl_standard_error: f64,
    /// Share of positions at which both find the same token most likely.
    pub same_top: f64,
}

impl Against {
    /// Opens the other model as a reference: the options of the first, but exact arithmetic and an f32 KV cache, and
    /// none that only a container has.
    pub fn open(path: &Path, args: &ModelArgs, vocab: usize, output: &Output) -> Result<Self, Failure> {
        let model = resolve_model(path)?;
        let args = ModelArgs {
            verify: false,
            plan: None,
            arith: Arith::Exact,
            kv: Some(KvType::F32),
            ..args.clone()
        };
        let found = open::find(&model, &args, output)?;
        if found.config().vocab != vocab {
            return Err(Failure::data(
                "other_vocabulary",
                format!(
                    "{} has {} tokens, the model {vocab}: their predictions cannot be compared",
                    path.display(),
                    found.config().vocab
                ),
            ));
        }
        let opened = found.plan(&[], output)?.load(output)?;
        let session = opened.engine.session()?;
        let (sum, squares, same_top, tokens) = (0.0, 0.0, 0, 0);
        Ok(Against { opened, session, logits: Vec::new(), vocab, sum, squares, same_top, tokens })
    }

    /// Back to the empty sequence.
    pub fn reset(&mut self) {
        self.session.reset();
    }

    /// Takes the next chunk of a run through the other model.
    pub fn forward(&mut self, input: &[u32]) -> Result<(), Failure> {
        self.logits.clear();
        let logits = &mut self.logits;
        self.opened.engine.forward(&mut self.session, input, Wanted::All, &mut |_, found| {
            logits.extend_from_slice(found);
            Ok(())
        })?;
        Ok(())
    }

    /// Compares the logits of a position of that chunk.
    pub fn compare(&mut self, position: usize, logits: &[f32]) {
        let reference = &self.logits[position * self.vocab..][..self.vocab];
        let kl = divergence(reference, logits);
        self.sum += kl;
        self.squares += kl * kl;
        self.same_top += usize::from(top(reference) == top(logits));
        self.tokens += 1;
    }

    /// What was found.
    pub fn divergence(&self) -> Divergence {
        let n = self.tokens.max(1) as f64;
        let mean = self.sum / n;
        let variance = (self.squares / n - mean * mean).max(0.0);
        Divergence {
            kl: mean,
            kl_standard_error: (variance / (n - 1.0).max(1.0)).sqrt(),
            same_top: self.same_top as f64 / n,
        }
    }
}

/// `Σ p (ln p − ln q)` of two rows of logits.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let (p_sum, q_sum) = (log_sum_exp(p), log_sum_exp(q));
    let term = |(p, q): (&f32, &f32)| {
        let (p, q) = (f64::from(*p) - p_sum, f64::from(*q) - q_sum);
        // A token that cannot come adds nothing.
        if p == f64::NEG_INFINITY { 0.0 } else { p.exp() * (p - q) }
    };
    p.iter().zip(q).map(term).sum()
}

fn top(logits: &[f32]) -> usize {
    let mut best = 0;
    for (i, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_divergence_of_two_distributions() {
        // p = (1/2, 1/2), q = (1/4, 3/4): 1/2 ln 2 + 1/2 ln 2/3. Logits may be shifted.
        let q = [1f32.ln() + 5.0, 3f32.ln() + 5.0];
        let expected = 0.5 * 2f64.ln() + 0.5 * (2.0f64 / 3.0).ln();
        assert!((divergence(&[1.0, 1.0], &q) - expected).abs() < 1e-6);
        assert_eq!(divergence(&[1.0, 2.0, 3.0], &[1.0, 2.0, 3.0]), 0.0);
        assert!(divergence(&[0.0, f32::NEG_INFINITY], &[0.0, 0.0]).is_finite());
        assert_eq!((top(&[1.0, 3.0, 3.0]), top(&[2.0])), (1, 0));
    }
}
