//! Several answers at a time: prompts go in chunk by chunk, and those whose prompt is in get a token each, together.

use arrayvec::ArrayVec;

use crate::error::EngineError;
use crate::model::{Engine, Wanted};
use crate::options::PARALLEL_MAX;
use crate::session::{Sequence, Session};

/// Chooses the next token of a lane by the logits its last one left, if there are any; none ends its answer.
pub type ChooseIn<'a> = dyn FnMut(usize, Result<&[f32], EngineError>) -> Option<u32> + Send + 'a;

/// A sequence each for as many answers as an engine writes at a time, and the buffers in which all are computed. Each
/// answer is the one it would be alone.
pub struct Lanes {
    session: Session,
    lanes: Vec<Lane>,
}

struct Lane {
    sequence: Sequence,
    /// What the last token of the prompt left, until something is chosen by it.
    logits: Vec<f32>,
    /// Chosen, and not gone through the model yet.
    pending: Option<u32>,
}

impl Lanes {
    /// As many empty ones as [`EngineOptions::parallel`](crate::EngineOptions::parallel) says.
    ///
    /// # Errors
    /// There is no memory for them.
    pub fn new(engine: &Engine) -> Result<Lanes, EngineError> {
        // The session's own sequence is never touched, and takes no memory.
        let session = engine.session()?;
        let lane = || Lane {
            sequence: engine.sequence(),
            logits: Vec::with_capacity(engine.config().vocab),
            pending: None,
        };
        Ok(Lanes { session, lanes: (0..engine.options().parallel).map(|_| lane()).collect() })
    }

    /// How many there are.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.lanes.len()
    }

    /// A lane's sequence.
    pub fn sequence(&self, lane: usize) -> &Sequence {
        &self.lanes[lane].sequence
    }

    /// What the last token of a lane's prompt left; empty before, and once something was chosen by it.
    pub fn logits(&self, lane: usize) -> &[f32] {
        &self.lanes[lane].logits
    }

    /// Empties a lane, for another answer.
    pub fn reset(&mut self, lane: usize) {
        let lane = &mut self.lanes[lane];
        lane.sequence.reset();
        lane.logits.clear();
        lane.pending = None;
    }

    /// Puts a lane into a state that was kept, with what its last token left if that is known.
    ///
    /// # Errors
    /// The state is not of this engine; then nothing has changed.
    pub fn restore(
        &mut self,
        lane: usize,
        snapshot: &crate::session::Snapshot,
        logits: &[f32],
    ) -> Result<(), EngineError> {
        let lane = &mut self.lanes[lane];
        lane.sequence.restore(snapshot)?;
        lane.logits.clear();
        lane.logits.extend_from_slice(logits);
        lane.pending = None;
        Ok(())
    }

    /// Queues the rows of an image in a lane; see [`Sequence::queue_image`].
    pub fn queue_image(&mut self, lane: usize, rows: &[f32]) {
        self.lanes[lane].sequence.queue_image(rows);
    }

    /// Takes tokens of a prompt into a lane, a chunk or less: `part` of it, as in [`Engine::forward_part`]. Those that
    /// end the prompt leave their logits.
    ///
    /// # Errors
    /// As there.
    pub fn prefill(
        &mut self,
        engine: &Engine,
        lane: usize,
        tokens: &[u32],
        part: std::ops::Range<usize>,
    ) -> Result<(), EngineError> {
        let Lane { sequence, logits, .. } = &mut self.lanes[lane];
        logits.clear();
        let last = part.start + tokens.len() == part.end;
        let wanted = if last { Wanted::Last } else { Wanted::Nothing };
        self.session.swap(sequence);
        let outcome = engine.forward_part(&mut self.session, tokens, part, wanted, &mut |_, row| {
            logits.extend_from_slice(row);
            Ok(())
        });
        self.session.swap(sequence);
        outcome
    }

    /// Chooses the next token in each of these lanes, after the last ones have gone through the model together.
    ///
    /// # Errors
    /// As [`Engine::forward_together`]: unless it is an interruption, all these answers are lost.
    pub fn next(
        &mut self,
        engine: &Engine,
        lanes: &[usize],
        choose: &mut ChooseIn<'_>,
    ) -> Result<(), EngineError> {
        let (mut decoding, mut tokens) =
            (ArrayVec::<_, PARALLEL_MAX>::new(), ArrayVec::<_, PARALLEL_MAX>::new());
        let (mut sequences, mut begun) =
            (ArrayVec::<_, PARALLEL_MAX>::new(), ArrayVec::<_, PARALLEL_MAX>::new());
        for (i, lane) in self.lanes.iter_mut().enumerate().filter(|(i, _)| lanes.contains(i)) {
            let Lane { sequence, logits, pending } = lane;
            match *pending {
                Some(token) => {
                    tokens.push(token);
                    decoding.push((i, pending));
                    sequences.push(sequence);
                }
                None => begun.push((i, logits, pending)),
            }
        }
        engine.forward_together(&mut self.session, &mut sequences, &tokens, &mut |row, logits| {
            let (lane, pending) = &mut decoding[row];
            **pending = choose(*lane, logits);
            Ok(())
        })?;
        for (lane, logits, pending) in begun {
            *pending = choose(lane, Ok(logits));
            logits.clear();
        }
        Ok(())
    }
}

/// Whose turn it is: everybody's in order, over and over.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rota(usize);

impl Rota {
    /// The first of `lanes` after the one whose turn it was before; the first of all after the last.
    pub fn next(&mut self, lanes: impl Iterator<Item = usize>) -> Option<usize> {
        let last = self.0;
        let next = lanes.min_by_key(|lane| (*lane < last, *lane))?;
        self.0 = next + 1;
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_has_a_turn() {
        let mut rota = Rota::default();
        let mut turns = |lanes: &[usize]| rota.next(lanes.iter().copied());
        assert_eq!(turns(&[]), None);
        assert_eq!([turns(&[0, 1, 3]), turns(&[0, 1, 3]), turns(&[3, 1, 0])], [Some(0), Some(1), Some(3)]);
        assert_eq!([turns(&[2, 3]), turns(&[3, 0]), turns(&[0])], [Some(2), Some(3), Some(0)]);
        assert_eq!([turns(&[1, 0]), turns(&[0])], [Some(1), Some(0)]);
    }
}
