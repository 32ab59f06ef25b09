//! Logits to the next token.
//!
//! Order: bias and penalties on the logits; mask; temperature; top-k; top-p; min-p; draw. Every step is O(V):
//! candidates are selected, never sorted as a whole.

mod chacha;
mod constraint;
mod mask;
mod options;
mod stop;

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

pub use chacha::uniform;
pub use constraint::TokenConstraint;
pub use mask::Mask;
pub use options::{SamplerError, SamplerOptions};
pub use stop::{STOP_BYTES_MAX, STOP_STRINGS_MAX, StopError, StopMatcher};

/// Chooses tokens. Same options, seed and logits give the same tokens on any number of threads.
#[derive(Debug, Clone)]
pub struct Sampler {
    options: SamplerOptions,
    state: SamplerState,
    /// Reused, so that sampling allocates nothing after the first token.
    candidates: Vec<Candidate>,
}

/// Everything that changes while sampling; with the same options it continues where it was taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SamplerState {
    /// The seed in use, given or drawn.
    pub seed: u64,
    /// Random numbers used: one for each token.
    pub draws: u64,
    /// How often each generated token was accepted: (id, count), ascending by id.
    pub counts: Vec<(u32, u32)>,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    /// The adjusted logit, then the probability relative to the most probable candidate.
    weight: f64,
}

impl Candidate {
    /// More probable first, then the lower id.
    fn order(&self, other: &Candidate) -> Ordering {
        other.weight.total_cmp(&self.weight).then(self.id.cmp(&other.id))
    }
}

impl Sampler {
    /// A sampler at the start of a generation.
    ///
    /// # Errors
    /// An option outside its range; no seed given and none to be had from the operating system.
    pub fn new(options: SamplerOptions) -> Result<Sampler, SamplerError> {
        let seed = match options.seed {
            Some(seed) => seed,
            None => getrandom::u64().map_err(|error| SamplerError::Seed { reason: error.to_string() })?,
        };
        Sampler::resume(options, SamplerState { seed, draws: 0, counts: Vec::new() })
    }

    /// A sampler that goes on from a saved state; its seed wins over the one in the options.
    ///
    /// # Errors
    /// An option outside its range; counts that are zero or not ascending by id.
    pub fn resume(options: SamplerOptions, state: SamplerState) -> Result<Sampler, SamplerError> {
        options.validate()?;
        if !state.counts.is_sorted_by(|left, right| left.0 < right.0) {
            return Err(SamplerError::State { reason: "its token ids are not ascending" });
        }
        if state.counts.iter().any(|(_, count)| *count == 0) {
            return Err(SamplerError::State { reason: "a token is counted zero times" });
        }
        Ok(Sampler { options, state, candidates: Vec::new() })
    }

    /// The options it was made with.
    pub fn options(&self) -> &SamplerOptions {
        &self.options
    }

    /// What is needed to go on later.
    pub fn state(&self) -> &SamplerState {
        &self.state
    }

    /// The seed in use, given or drawn.
    pub fn seed(&self) -> u64 {
        self.state.seed
    }

    /// Chooses the next token from `logits` (one per id) among those the mask allows, using one random number,
    /// greedy or not. The caller then tells [`accept`](Self::accept).
    ///
    /// # Errors
    /// A logit that is NaN or +inf, a mask or bias that does not fit the vocabulary, no token allowed.
    pub fn sample(&mut self, logits: &[f32], mask: Option<&Mask>) -> Result<u32, SamplerError> {
        let token = self.pick(logits, mask, uniform(self.state.seed, self.state.draws))?;
        self.skip();
        Ok(token)
    }

    /// Uses one random number without sampling: for a token that was forced, not chosen.
    pub fn skip(&mut self) {
        self.state.draws = self.state.draws.wrapping_add(1);
    }

    /// Counts a generated token, chosen or forced, for the penalties.
    pub fn accept(&mut self, token: u32) {
        match self.state.counts.binary_search_by_key(&token, |entry| entry.0) {
            Ok(at) => self.state.counts[at].1 = self.state.counts[at].1.saturating_add(1),
            Err(at) => self.state.counts.insert(at, (token, 1)),
        }
    }

    /// As [`sample`](Self::sample), with `u` in [0, 1) in place of the next random number.
    ///
    /// # Errors
    /// As [`sample`](Self::sample).
    pub fn pick(&mut self, logits: &[f32], mask: Option<&Mask>, u: f64) -> Result<u32, SamplerError> {
        let highest = self.adjust(logits, mask)?;
        if self.options.is_greedy() {
            return Ok(highest.id);
        }
        self.shape(highest.weight);
        // What cannot be drawn must not be reached by rounding either; the most probable stays.
        self.candidates.retain(|candidate| candidate.weight > 0.0);
        let target = u * total(&self.candidates);
        let drawn = crossing(&mut self.candidates, |sum| sum > target);
        Ok(self.candidates[drawn].id)
    }

    /// The `count` most probable candidates that survive truncation, most probable first, with their
    /// probabilities after the last renormalization (greedy: the one token).
    ///
    /// # Errors
    /// As [`sample`](Self::sample).
    pub fn survivors(
        &mut self,
        logits: &[f32],
        mask: Option<&Mask>,
        count: usize,
    ) -> Result<Vec<(u32, f64)>, SamplerError> {
        let highest = self.adjust(logits, mask)?;
        if self.options.is_greedy() {
            return Ok(vec![(highest.id, 1.0)]);
        }
        self.shape(highest.weight);
        let total = total(&self.candidates);
        keep_first(&mut self.candidates, count);
        self.candidates.sort_unstable_by(Candidate::order);
        Ok(self.candidates.iter().map(|candidate| (candidate.id, candidate.weight / total)).collect())
    }

    /// Fills the candidates with the allowed ids and their logits after bias and penalties. Returns the highest.
    fn adjust(&mut self, logits: &[f32], mask: Option<&Mask>) -> Result<Candidate, SamplerError> {
        let vocab = logits.len();
        if let Some(mask) = mask.filter(|mask| mask.vocab() != vocab) {
            return Err(SamplerError::MaskLength { mask: mask.vocab(), logits: vocab });
        }
        if let Some((&id, _)) = self.options.logit_bias.last_key_value()
            && id as usize >= vocab
        {
            return Err(SamplerError::BiasId { id, vocab });
        }
        if let Some((id, &value)) =
            (0..).zip(logits).find(|(_, logit)| logit.is_nan() || **logit == f32::INFINITY)
        {
            return Err(SamplerError::Logit { id, value });
        }

        let candidates = &mut self.candidates;
        candidates.clear();
        candidates.extend((0..).zip(logits).map(|(id, logit)| Candidate { id, weight: f64::from(*logit) }));
        for (&id, bias) in &self.options.logit_bias {
            candidates[id as usize].weight += bias;
        }
        let SamplerOptions { presence_penalty, frequency_penalty, .. } = self.options;
        if presence_penalty != 0.0 || frequency_penalty != 0.0 {
            for &(id, count) in &self.state.counts {
                if let Some(candidate) = candidates.get_mut(id as usize) {
                    candidate.weight -= presence_penalty + frequency_penalty * f64::from(count);
                }
            }
        }
        candidates.retain(|candidate| {
            candidate.weight > f64::NEG_INFINITY && mask.is_none_or(|mask| mask.allows(candidate.id))
        });
        // Of equal logits the first is the lowest id.
        let highest = candidates
            .iter()
            .copied()
            .reduce(|highest, candidate| if candidate.weight > highest.weight { candidate } else { highest });
        highest.ok_or(SamplerError::NothingAllowed { logits: vocab })
    }

    /// Turns logits into weights and truncates: temperature, top-k, top-p, min-p.
    fn shape(&mut self, highest: f64) {
        let SamplerOptions { temperature, top_k, top_p, min_p, .. } = self.options;
        let candidates = &mut self.candidates;
        for candidate in candidates.iter_mut() {
            candidate.weight = ((candidate.weight - highest) / temperature).exp();
        }
        if top_k > 0 {
            keep_first(candidates, top_k as usize);
        }
        if top_p < 1.0 {
            let target = top_p * total(candidates);
            let last = crossing(candidates, |sum| sum >= target);
            candidates.truncate(last + 1);
        }
        if min_p > 0.0 {
            // The most probable has weight 1.
            candidates.retain(|candidate| candidate.weight >= min_p);
        }
    }
}

fn total(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|candidate| candidate.weight).sum()
}

/// Drops all but the first `count` in order; what is left is in no order.
fn keep_first(candidates: &mut Vec<Candidate>, count: usize) {
    if count < candidates.len() {
        candidates.select_nth_unstable_by(count, Candidate::order);
        candidates.truncate(count);
    }
}

/// The index in order of the first candidate whose cumulative weight `crosses`, else of the last one. Afterwards
/// that candidate is there and all before it in order are before it. O(V): each step halves the part that holds
/// the answer.
fn crossing(candidates: &mut [Candidate], crosses: impl Fn(f64) -> bool) -> usize {
    let (mut low, mut high, mut before) = (0, candidates.len(), 0.0);
    while high - low > 1 {
        let half = (high - low) / 2;
        candidates[low..high].select_nth_unstable_by(half, Candidate::order);
        let sum = before + total(&candidates[low..low + half]);
        if crosses(sum) {
            high = low + half;
        } else {
            (before, low) = (sum, low + half);
        }
    }
    low
}

#[cfg(test)]
mod tests;
