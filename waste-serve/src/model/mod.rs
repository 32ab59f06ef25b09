//! What stands behind the queue: the engine, or a script in its place.

mod engine;
mod gallery;
mod reuse;
mod script;

pub use engine::{EngineModel, Sight};
pub use gallery::Gallery;
pub use reuse::Reuse;
pub use script::ScriptModel;

use waste_engine::EngineError;

use crate::job::Job;

/// Takes what is given for the next piece of a slot's answer, and says what to go on from.
pub type Write<'a> = dyn FnMut(usize, Result<Given<'_>, EngineError>) -> Option<u32> + Send + 'a;

/// Writes answers, each in a slot of its own.
pub trait Model: Send {
    /// Begins an answer in a free slot, and says how many tokens of its prompt need not be computed.
    ///
    /// # Errors
    /// The engine fails. The next answer may succeed all the same.
    fn begin(&mut self, slot: usize, job: &mut Job) -> Result<usize, EngineError>;

    /// Takes the next chunk of a slot's prompt in, or looks at an image that stands there, and says how many of its tokens
    /// are in now. What takes long asks on the way whether it is still `wanted`.
    ///
    /// # Errors
    /// As there; [`EngineError::Interrupted`] if it is not wanted any more.
    fn prefill(
        &mut self,
        slot: usize,
        job: &mut Job,
        wanted: &dyn Fn() -> bool,
    ) -> Result<usize, EngineError>;

    /// Goes on with each of these slots, whose prompts are in: `write` is asked once for each.
    ///
    /// # Errors
    /// All these answers are lost.
    fn next(&mut self, slots: &[usize], write: &mut Write<'_>) -> Result<(), EngineError>;

    /// An answer has ended: its state may be kept.
    fn done(&mut self, _slot: usize, _job: &Job) {}

    /// What was read since the start.
    fn reads(&self) -> Reads {
        Reads::default()
    }

    /// The end of the process is near: what is to be kept is written.
    fn close(&mut self) {}
}

/// What a model gives for the next piece of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Given<'a> {
    /// What a token is to be chosen by.
    Logits(&'a [f32]),
    /// A special token, of a script.
    Special(u32),
    /// Text without a token, of a script.
    Text(String),
}

/// What was read and seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// Experts that were in memory.
    pub hits: u64,
    /// Experts that were not.
    pub misses: u64,
    /// Bytes read from the disk.
    pub bytes: u64,
    /// Images that went through the tower.
    pub images: u64,
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
            images: self.images.saturating_sub(before.images),
            direct_io: self.direct_io,
        }
    }

    /// Both.
    #[must_use]
    pub fn and(self, other: Reads) -> Reads {
        Reads {
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
            bytes: self.bytes + other.bytes,
            images: self.images + other.images,
            direct_io: self.direct_io || other.direct_io,
        }
    }

    /// The `i`th of so many parts as equal as can be; together they are the whole.
    #[must_use]
    pub fn part(self, i: u64, of: u64) -> Reads {
        let part = |whole: u64| whole / of + u64::from(i < whole % of);
        Reads {
            hits: part(self.hits),
            misses: part(self.misses),
            bytes: part(self.bytes),
            images: part(self.images),
            direct_io: self.direct_io,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_a_whole() {
        let whole = Reads { hits: 7, misses: 2, bytes: 1_000_001, images: 3, direct_io: true };
        for of in 1..9 {
            let parts = (0..of).map(|i| whole.part(i, of)).reduce(Reads::and);
            assert_eq!(parts, Some(whole));
        }
    }
}
