//! States that are kept so that the next turn of a conversation need not compute the earlier ones again.

use waste_engine::saved::ImageSpan;
use waste_engine::{Sequence, Snapshot};

/// Kept states of one conversation: at its end, at the prompt's, at the answer's.
const STATES: usize = 3;

/// A kept state.
pub struct Kept {
    owner: u64,
    /// The tokens it is the state of.
    pub tokens: Vec<u32>,
    /// The images whose rows stand for some of them.
    images: Vec<ImageSpan>,
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

    /// The longest state of this owner whose tokens begin `ids` exactly, with the same images. A state of all of them
    /// counts only with its logits: something must be sampled from.
    pub fn find(&mut self, owner: u64, ids: &[u32], images: &[ImageSpan]) -> Option<&Kept> {
        self.clock += 1;
        let fits = |kept: &&mut Kept| {
            let whole = kept.tokens.len() == ids.len();
            kept.owner == owner
                && ids.starts_with(&kept.tokens)
                && within(images, kept.tokens.len()) == kept.images
                && (!whole || !kept.logits.is_empty())
        };
        let best = self.states.iter_mut().filter(fits).max_by_key(|kept| kept.tokens.len())?;
        best.used = self.clock;
        Some(best)
    }

    /// Keeps a sequence's state. `images` are those of its text, which may go on.
    pub fn keep(
        &mut self,
        owner: u64,
        tokens: &[u32],
        images: &[ImageSpan],
        logits: &[f32],
        sequence: &Sequence,
    ) {
        self.clock += 1;
        let images = within(images, tokens.len());
        let same = |kept: &Kept| kept.owner == owner && kept.tokens == tokens && kept.images == images;
        let kept = self.states.iter_mut().find(|kept| same(kept));
        if let Some(kept) = kept.filter(|kept| logits.is_empty() || !kept.logits.is_empty()) {
            kept.used = self.clock;
            return;
        }
        let words = size_of_val(tokens) + size_of_val(logits);
        let bytes = sequence.snapshot_bytes(sequence.position()) + words;
        if bytes > self.bytes_max || self.states_max == 0 {
            return;
        }
        self.states.retain(|kept| !same(kept));
        while self.states.len() >= self.states_max || self.bytes() + bytes > self.bytes_max {
            let Some(oldest) = (0..self.states.len()).min_by_key(|at| self.states[*at].used) else { break };
            self.states.swap_remove(oldest);
        }
        // A state that was broken on the way is none to keep.
        if let Ok(snapshot) = sequence.snapshot() {
            let (tokens, images, logits) = (tokens.to_vec(), images.to_vec(), logits.to_vec());
            self.states.push(Kept { owner, tokens, images, logits, snapshot, bytes, used: self.clock });
        }
    }

    /// The memory it takes.
    pub fn bytes(&self) -> usize {
        self.states.iter().map(|kept| kept.bytes).sum()
    }
}

/// The images that begin among so many tokens. States end where a message or an answer does, never within an image.
fn within(images: &[ImageSpan], tokens: usize) -> &[ImageSpan] {
    &images[..images.partition_point(|image| image.position < tokens)]
}
