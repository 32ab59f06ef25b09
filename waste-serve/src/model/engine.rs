//! The engine as a [`Model`], with the states it keeps.

use waste_engine::{Engine, EngineError, Lanes};

use super::{Given, Model, Reads, Reuse, Write};
use crate::job::Job;

/// Called when the server ends, to leave what was learned.
pub type Farewell = Box<dyn FnMut(&Engine) + Send>;

/// An engine, and the lanes it computes in.
pub struct EngineModel {
    engine: Engine,
    lanes: Lanes,
    texts: Vec<Text>,
    reuse: Reuse,
    farewell: Option<Farewell>,
}

#[derive(Default)]
struct Text {
    /// The tokens in the lane's state.
    tokens: Vec<u32>,
    /// Chosen, and not gone through the model yet.
    pending: Option<u32>,
}

impl EngineModel {
    /// A model on an engine.
    ///
    /// # Errors
    /// There is no memory for its lanes.
    pub fn new(engine: Engine, reuse: Reuse, farewell: Option<Farewell>) -> Result<EngineModel, EngineError> {
        let lanes = Lanes::new(&engine)?;
        let texts = (0..lanes.len()).map(|_| Text::default()).collect();
        Ok(EngineModel { engine, lanes, texts, reuse, farewell })
    }

    fn keep(&mut self, slot: usize, owner: u64) {
        let (tokens, logits) = (&self.texts[slot].tokens, self.lanes.logits(slot));
        self.reuse.keep(owner, tokens, logits, self.lanes.sequence(slot));
    }
}

impl Model for EngineModel {
    /// From the best state there is: the longest kept one, or none.
    fn begin(&mut self, slot: usize, job: &Job) -> Result<usize, EngineError> {
        EngineError::check_tokens(&job.ids, 0, self.engine.ctx(), self.engine.config().vocab)?;
        let text = &mut self.texts[slot];
        text.pending = None;
        text.tokens.clear();
        match self.reuse.find(job.owner, &job.ids) {
            None => self.lanes.reset(slot),
            Some(kept) => {
                self.lanes.restore(slot, &kept.snapshot, &kept.logits)?;
                text.tokens.extend_from_slice(&kept.tokens);
            }
        }
        Ok(text.tokens.len())
    }

    fn prefill(&mut self, slot: usize, job: &Job) -> Result<usize, EngineError> {
        let (at, of) = (self.texts[slot].tokens.len(), job.ids.len());
        let stops = [job.conversation.min(of), of];
        let stop = stops.into_iter().find(|stop| *stop > at).unwrap_or(of);
        let done = stop.min(at + self.engine.chunk());
        let chunk = &job.ids[at..done];
        self.lanes.prefill(&self.engine, slot, chunk, at..of)?;
        self.texts[slot].tokens.extend_from_slice(chunk);
        if done == stop {
            self.keep(slot, job.owner);
        }
        Ok(done)
    }

    fn next(&mut self, slots: &[usize], write: &mut Write<'_>) -> Result<(), EngineError> {
        let texts = &mut self.texts;
        self.lanes.next(&self.engine, slots, &mut |slot, logits| {
            let text = &mut texts[slot];
            // The last one has gone through the model.
            text.tokens.extend(text.pending.take());
            text.pending = write(slot, logits.map(Given::Logits));
            text.pending
        })
    }

    fn done(&mut self, slot: usize, job: &Job) {
        self.keep(slot, job.owner);
    }

    fn reads(&self) -> Reads {
        let stats = self.engine.read_stats();
        Reads {
            hits: stats.hits + stats.ahead_hits,
            misses: stats.misses,
            bytes: stats.bytes_read,
            direct_io: self.engine.direct_io(),
        }
    }

    fn close(&mut self) {
        if let Some(farewell) = &mut self.farewell {
            farewell(&self.engine);
        }
    }
}
