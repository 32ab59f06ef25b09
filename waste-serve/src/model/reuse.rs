//! States that are kept so that the next turn of a conversation need not compute the earlier ones again.

use waste_engine::{Sequence, Snapshot};

/// Kept states of one conversation: at its end, at the prompt's, at the answer's.
const STATES: usize = 3;

/// A kept state.
pub struct Kept {
    owner: u64,
    /// The tokens it is the state of.
    pub tokens: Vec<u32>,
    /// What the last of them left, if it is known.
    pub logits: Vec<f32>,
    /// The state.
    pub snapshot: Snapshot,
    bytes: usize,
    used: u64,
}

/// The kept states, within a number and within memory; what was not used longest goes first.
pub struct Reuse {
    states: Vec<Kept>,
    states_max: usize,
    bytes_max: usize,
    clock: u64,
}

impl Reuse {
    /// Keeps up to so many conversations in so many bytes.
    pub fn new(conversations: usize, bytes_max: usize) -> Reuse {
        Reuse { states: Vec::new(), states_max: conversations.saturating_mul(STATES), bytes_max, clock: 0 }
    }

    /// The longest state of this owner whose tokens begin `ids` exactly. A state of all of them counts only with its
    /// logits: something must be sampled from.
    pub fn find(&mut self, owner: u64, ids: &[u32]) -> Option<&Kept> {
        self.clock += 1;
        let fits = |kept: &&mut Kept| {
            let whole = kept.tokens.len() == ids.len();
            kept.owner == owner && ids.starts_with(&kept.tokens) && (!whole || !kept.logits.is_empty())
        };
        let best = self.states.iter_mut().filter(fits).max_by_key(|kept| kept.tokens.len())?;
        best.used = self.clock;
        Some(best)
    }

    /// Keeps a sequence's state.
    pub fn keep(&mut self, owner: u64, tokens: &[u32], logits: &[f32], sequence: &Sequence) {
        self.clock += 1;
        let kept = self.states.iter_mut().find(|kept| kept.owner == owner && kept.tokens == tokens);
        if let Some(kept) = kept.filter(|kept| logits.is_empty() || !kept.logits.is_empty()) {
            kept.used = self.clock;
            return;
        }
        let words = size_of_val(tokens) + size_of_val(logits);
        let bytes = sequence.snapshot_bytes(sequence.position()) + words;
        if bytes > self.bytes_max || self.states_max == 0 {
            return;
        }
        self.states.retain(|kept| kept.owner != owner || kept.tokens != tokens);
        while self.states.len() >= self.states_max || self.bytes() + bytes > self.bytes_max {
            let Some(oldest) = (0..self.states.len()).min_by_key(|at| self.states[*at].used) else { break };
            self.states.swap_remove(oldest);
        }
        // A state that was broken on the way is none to keep.
        if let Ok(snapshot) = sequence.snapshot() {
            let (tokens, logits) = (tokens.to_vec(), logits.to_vec());
            self.states.push(Kept { owner, tokens, logits, snapshot, bytes, used: self.clock });
        }
    }

    /// The memory it takes.
    pub fn bytes(&self) -> usize {
        self.states.iter().map(|kept| kept.bytes).sum()
    }
}
