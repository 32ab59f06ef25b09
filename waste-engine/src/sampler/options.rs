//! What the caller may choose, and the errors of the sampler.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use waste_common::error::{Coded, Exit};

/// How tokens are chosen. The default is greedy: the highest logit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplerOptions {
    /// 0 to 2; below 1e-6 greedy, where truncation has no effect.
    pub temperature: f64,
    /// Keep this many candidates; 0 keeps all.
    pub top_k: u32,
    /// Keep the shortest prefix of candidates with this probability, 0 to 1; 1 keeps all, 0 keeps one.
    pub top_p: f64,
    /// Drop candidates below this part of the highest probability, 0 to 1; 0 keeps all.
    pub min_p: f64,
    /// The seed; from the operating system if missing.
    pub seed: Option<u64>,
    /// Taken from the logit of a token that was generated before, -2 to 2.
    pub presence_penalty: f64,
    /// Taken from a token's logit once for each time it was generated, -2 to 2.
    pub frequency_penalty: f64,
    /// Added to logits, by token id; -100 to 100.
    pub logit_bias: BTreeMap<u32, f64>,
}

impl Default for SamplerOptions {
    fn default() -> SamplerOptions {
        SamplerOptions {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: None,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
        }
    }
}

impl SamplerOptions {
    /// Checks every value against its range.
    ///
    /// # Errors
    /// [`SamplerError::Option`] names the first one outside, [`SamplerError::Bias`] the first such bias.
    pub fn validate(&self) -> Result<(), SamplerError> {
        for (name, value, low, high) in [
            ("temperature", self.temperature, 0.0, 2.0),
            ("top_p", self.top_p, 0.0, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
        ] {
            if !(low..=high).contains(&value) {
                return Err(SamplerError::Option { name, value, low, high });
            }
        }
        match self.logit_bias.iter().find(|(_, bias)| !(-100.0..=100.0).contains(*bias)) {
            Some((&id, &bias)) => Err(SamplerError::Bias { id, bias }),
            None => Ok(()),
        }
    }

    /// Whether the highest logit is taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature < 1e-6
    }
}

/// Why no token could be chosen.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum SamplerError {
    #[error("{name} is {value}; expected {low} to {high}")]
    Option { name: &'static str, value: f64, low: f64, high: f64 },
    #[error("logit_bias of token {id} is {bias}; expected -100 to 100")]
    Bias { id: u32, bias: f64 },
    #[error("logit_bias names token {id}, but the vocabulary has {vocab} tokens")]
    BiasId { id: u32, vocab: usize },
    #[error("cannot draw a seed from the operating system: {reason}; give one")]
    Seed { reason: String },
    #[error("the saved sampler state is damaged: {reason}")]
    State { reason: &'static str },
    #[error("the logit of token {id} is {value}: the model's output is broken, the weights may be damaged")]
    Logit { id: u32, value: f32 },
    #[error("the token mask is for {mask} tokens, but there are {logits} logits")]
    MaskLength { mask: usize, logits: usize },
    #[error("no token of {logits} is allowed here: every one is masked or has a logit of -inf")]
    NothingAllowed { logits: usize },
    #[error("the text cannot go on as its grammar wants it: {why}")]
    Constraint { why: String },
}

impl Coded for SamplerError {
    fn exit(&self) -> Exit {
        use SamplerError::*;
        match self {
            Option { .. } | Bias { .. } | BiasId { .. } => Exit::Usage,
            State { .. } | Logit { .. } | Constraint { .. } => Exit::Data,
            Seed { .. } | MaskLength { .. } | NothingAllowed { .. } => Exit::Internal,
        }
    }

    fn code(&self) -> &'static str {
        use SamplerError::*;
        match self {
            Option { .. } | Bias { .. } | BiasId { .. } => "invalid_sampling_option",
            Seed { .. } => "no_random_seed",
            State { .. } => "invalid_sampler_state",
            Logit { .. } => "logit_not_finite",
            MaskLength { .. } => "mask_length",
            NothingAllowed { .. } => "no_token_allowed",
            Constraint { .. } => "grammar_stuck",
        }
    }
}
