//! What stands behind the queue: the engine, or a script in its place.

mod engine;
mod reuse;
mod script;

pub use engine::EngineModel;
pub use reuse::Reuse;
pub use script::ScriptModel;

use waste_engine::EngineError;

use crate::job::Job;

/// Chooses a token by its logits.
pub type Choose<'a> = dyn FnMut(&[f32]) -> Result<u32, EngineError> + 'a;

/// Writes answers, one at a time.
pub trait Model: Send {
    /// Takes a prompt in and says how many of its tokens need not be computed. `tell` is told the tokens done after each
    /// chunk; when it says false, the prompt is given up, and the answer is `None`.
    ///
    /// # Errors
    /// The engine fails. The next prompt may succeed all the same.
    fn prefill(
        &mut self,
        job: &Job,
        tell: &mut dyn FnMut(usize) -> bool,
    ) -> Result<Option<usize>, EngineError>;

    /// The next piece of the answer.
    ///
    /// # Errors
    /// As there.
    fn next(&mut self, choose: &mut Choose<'_>) -> Result<Piece, EngineError>;

    /// The answer has ended: its state may be kept.
    fn done(&mut self, _job: &Job) {}

    /// What was read since the start.
    fn reads(&self) -> Reads {
        Reads::default()
    }

    /// The end of the process is near: what is to be kept is written.
    fn close(&mut self) {}
}

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// A token.
    Token(u32),
    /// A special token, of a script.
    Special(u32),
    /// Text without a token, of a script.
    Text(String),
}

/// What the expert store did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// Experts that were in memory.
    pub hits: u64,
    /// Experts that were not.
    pub misses: u64,
    /// Bytes read from the disk.
    pub bytes: u64,
    /// Whether past the page cache.
    pub direct_io: bool,
}

impl Reads {
    /// What was read since `before`.
    #[must_use]
    pub fn since(self, before: Reads) -> Reads {
        Reads {
            hits: self.hits.saturating_sub(before.hits),
            misses: self.misses.saturating_sub(before.misses),
            bytes: self.bytes.saturating_sub(before.bytes),
            direct_io: self.direct_io,
        }
    }
}
