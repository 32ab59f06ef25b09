//! What goes from a request to the worker, and what comes back.

use waste_engine::chat::{Delta, Guide, Reply, TokenCounts};
use waste_engine::sampler::SamplerOptions;

use crate::error::ApiError;
use crate::images::Seen;
use crate::model::Reads;

/// A checked request: everything the worker needs to know.
#[derive(Debug)]
pub struct Job {
    /// The prompt.
    pub ids: Vec<u32>,
    /// The images in it, in their order.
    pub images: Vec<Seen>,
    /// How many of them a longer conversation shares: where a state is worth keeping.
    pub conversation: usize,
    /// Reads the answer.
    pub reply: Reply,
    /// How tokens are chosen.
    pub sampler: SamplerOptions,
    /// Most tokens of the answer.
    pub max_tokens: usize,
    /// Whether log probabilities are wanted, and of how many alternatives.
    pub logprobs: Option<usize>,
    /// Whether the answer ends with its first call.
    pub one_call: bool,
    /// Whether calls are kept from being written.
    pub no_calls: bool,
    /// What the answer has to keep to.
    pub guide: Option<Guide>,
    /// Whose kept states it may go on from: one number for each key.
    pub owner: u64,
}

/// What the worker says on the way.
#[derive(Debug)]
pub enum Event {
    /// The job has the engine.
    Started,
    /// So many tokens of the prompt are done.
    Prefill {
        /// Tokens done.
        done: usize,
        /// Tokens of the prompt.
        of: usize,
    },
    /// A token's part of the answer.
    Deltas(Vec<Delta>, Option<TokenLogprob>),
    /// The end.
    Done(Box<Finished>),
    /// The end, for a reason that is an error.
    Failed(ApiError),
}

/// A content token's log probability, and the most likely ones in its place.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub id: u32,
    /// Its log probability at temperature 1, before anything is cut off.
    pub logprob: f64,
    /// The most likely tokens with theirs, best first.
    pub top: Vec<(u32, f64)>,
}

/// An answer in numbers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Finished {
    /// `stop`, `length` or `tool_calls`.
    pub reason: &'static str,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those whose state was still there.
    pub cached_tokens: usize,
    /// Tokens generated, markup too.
    pub completion_tokens: usize,
    /// Them, by what they were for.
    pub counts: TokenCounts,
    /// The seed in use.
    pub seed: u64,
    /// Milliseconds in the queue, in the prompt, in the answer.
    pub queue_ms: f64,
    /// See there.
    pub prefill_ms: f64,
    /// See there.
    pub decode_ms: f64,
    /// What was read for it.
    pub reads: Reads,
}

impl Finished {
    /// Tokens a second while decoding; the first token comes out of the prompt.
    pub fn tokens_per_second(&self) -> f64 {
        let decoded = self.completion_tokens.saturating_sub(1) as f64;
        if self.decode_ms > 0.0 { 1e3 * decoded / self.decode_ms } else { 0.0 }
    }
}
