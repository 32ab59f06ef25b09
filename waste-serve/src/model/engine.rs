//! The engine as a [`Model`], with the states it keeps.

use waste_engine::{Engine, EngineError, Session, Wanted};

use super::{Choose, Model, Piece, Reads, Reuse};
use crate::job::Job;

/// Called when the server ends, to leave what was learned.
pub type Farewell = Box<dyn FnMut(&Engine) + Send>;

/// An engine and the one session it computes in.
pub struct EngineModel {
    engine: Engine,
    session: Session,
    /// The tokens in the session's state.
    tokens: Vec<u32>,
    /// What the last pass left.
    logits: Vec<f32>,
    /// Chosen, and not gone through the model yet.
    pending: Option<u32>,
    reuse: Reuse,
    farewell: Option<Farewell>,
}

impl EngineModel {
    /// A model on an engine.
    ///
    /// # Errors
    /// There is no memory for a session.
    pub fn new(engine: Engine, reuse: Reuse, farewell: Option<Farewell>) -> Result<EngineModel, EngineError> {
        let session = engine.session()?;
        let (tokens, logits) = (Vec::new(), Vec::with_capacity(engine.config().vocab));
        Ok(EngineModel { engine, session, tokens, logits, pending: None, reuse, farewell })
    }

    /// Takes tokens in; the last one's logits stay if it is the last of `of`.
    fn forward(&mut self, tokens: &[u32], wanted: Wanted) -> Result<(), EngineError> {
        let logits = &mut self.logits;
        self.engine.forward(&mut self.session, tokens, wanted, &mut |_, row| {
            logits.clear();
            logits.extend_from_slice(row);
            Ok(())
        })?;
        self.tokens.extend_from_slice(tokens);
        Ok(())
    }

    fn keep(&mut self, owner: u64, with_logits: bool) {
        let logits = if with_logits { self.logits.as_slice() } else { &[] };
        self.reuse.keep(owner, &self.tokens, logits, &self.session);
    }

    /// The best state to go on from: the longest kept one, or none.
    fn begin(&mut self, job: &Job) -> Result<usize, EngineError> {
        self.pending = None;
        self.tokens.clear();
        self.logits.clear();
        match self.reuse.find(job.owner, &job.ids) {
            None => self.session.reset(),
            Some(kept) => {
                self.session.restore(&kept.snapshot)?;
                self.tokens.extend_from_slice(&kept.tokens);
                self.logits.extend_from_slice(&kept.logits);
            }
        }
        Ok(self.tokens.len())
    }
}

impl Model for EngineModel {
    fn prefill(
        &mut self,
        job: &Job,
        tell: &mut dyn FnMut(usize) -> bool,
    ) -> Result<Option<usize>, EngineError> {
        EngineError::check_tokens(&job.ids, 0, self.engine.ctx(), self.engine.config().vocab)?;
        let reused = self.begin(job)?;
        for end in [job.conversation.min(job.ids.len()), job.ids.len()] {
            while self.tokens.len() < end {
                let part = self.tokens.len()..end.min(self.tokens.len() + self.engine.chunk());
                let wanted = if part.end == job.ids.len() { Wanted::Last } else { Wanted::Nothing };
                let done = part.end;
                self.forward(&job.ids[part], wanted)?;
                if !tell(done) {
                    return Ok(None);
                }
                if done == end {
                    self.keep(job.owner, wanted == Wanted::Last);
                }
            }
        }
        Ok(Some(reused))
    }

    fn next(&mut self, choose: &mut Choose<'_>) -> Result<Piece, EngineError> {
        if let Some(token) = self.pending.take() {
            self.forward(&[token], Wanted::Last)?;
        }
        let token = choose(&self.logits)?;
        self.pending = Some(token);
        Ok(Piece::Token(token))
    }

    fn done(&mut self, job: &Job) {
        self.keep(job.owner, false);
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
