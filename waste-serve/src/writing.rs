//! One answer, from its job to its last word. Whoever has the model drives it, piece by piece.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::mpsc::UnboundedSender;
use waste_engine::EngineError;
use waste_engine::chat::{Delta, Guide, Place, Reply};
use waste_engine::sampler::{Mask, Sampler};
use waste_engine::tokenizer::Tokenizer;

use crate::error::ApiError;
use crate::job::{Event, Finished, Job, TokenLogprob};
use crate::metrics::Metrics;
use crate::model::{Given, Reads};
use crate::queue::Ticket;

/// What all answers are written with.
pub struct Kit {
    /// For the text of tokens.
    pub tokenizer: Arc<Tokenizer>,
    /// Ids that may be chosen.
    pub mask: Mask,
    /// The same without the one that opens elements; `None` if the format has no such id.
    pub closed_mask: Option<Mask>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Told of what clients are not told.
    pub log: Arc<dyn Fn(&str) + Send + Sync>,
}

/// How far an answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It has a slot, and nothing else.
    New,
    /// Some of its prompt is still to come.
    Prompt,
    /// It is being written.
    Answer,
    /// It has ended.
    Over,
}

/// How an answer ended.
#[derive(Debug)]
enum End {
    /// The model ended it, or what it has to keep to.
    Whole,
    /// There was no more room, or no more time.
    Cut,
    /// The client left.
    Left,
    /// The engine failed.
    Failed(ApiError),
}

/// An answer being written.
pub struct Writing {
    ticket: Ticket,
    sampler: Sampler,
    reply: Reply,
    guide: Option<Guide>,
    stage: Stage,
    finished: Finished,
    start: Instant,
    /// When the first piece was there, and the last one.
    pieces: Option<(Instant, Instant)>,
    /// What the last piece adds goes out with the end.
    last: (Vec<Delta>, Option<TokenLogprob>),
    end: End,
    /// The model has a state of it that is worth keeping.
    has_state: bool,
}

impl Writing {
    /// An answer before its prompt.
    pub fn new(ticket: Ticket, sampler: Sampler) -> Writing {
        let finished = Finished {
            prompt_tokens: ticket.job.ids.len(),
            seed: sampler.seed(),
            queue_ms: millis(ticket.queued),
            ..Finished::default()
        };
        let (reply, guide) = (ticket.job.reply.clone(), ticket.job.guide.clone());
        Writing {
            ticket,
            sampler,
            reply,
            guide,
            stage: Stage::New,
            finished,
            start: Instant::now(),
            pieces: None,
            last: (Vec::new(), None),
            end: End::Whole,
            has_state: false,
        }
    }

    /// What is to be done.
    pub fn job(&self) -> &Job {
        &self.ticket.job
    }

    /// The same to work on, and who waits for it.
    pub fn work(&mut self) -> (&mut Job, &UnboundedSender<Event>) {
        (&mut self.ticket.job, &self.ticket.events)
    }

    /// How far it is.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    fn send(&self, event: Event) {
        // A closed channel is looked at between pieces.
        let _ = self.ticket.events.send(event);
    }

    /// It has begun: so many tokens of its prompt need not be computed.
    pub fn begun(&mut self, kit: &Kit, reused: usize) {
        self.finished.cached_tokens = reused;
        self.stage = Stage::Prompt;
        self.in_prompt(kit, reused);
    }

    /// So many tokens of its prompt are in.
    pub fn prefilled(&mut self, kit: &Kit, done: usize) {
        self.finished.prefill_ms = millis(self.start);
        self.send(Event::Prefill { done, of: self.finished.prompt_tokens });
        self.in_prompt(kit, done);
    }

    fn in_prompt(&mut self, kit: &Kit, done: usize) {
        let Finished { prompt_tokens, cached_tokens, .. } = self.finished;
        if done >= prompt_tokens {
            self.stage = Stage::Answer;
            kit.metrics.prompt(prompt_tokens, cached_tokens);
        }
    }

    /// Whether the model has a state of it that is worth keeping.
    pub fn has_state(&self) -> bool {
        self.has_state
    }

    /// Something was read for it.
    pub fn read(&mut self, reads: Reads) {
        self.finished.reads = self.finished.reads.and(reads);
    }

    /// Looks whether it has to end: its client left, or it is `overdue`.
    pub fn look(&mut self, kit: &Kit, overdue: bool) {
        let during = if self.stage == Stage::Answer { "decode" } else { "prefill" };
        if self.stage != Stage::Over && self.ticket.events.is_closed() {
            kit.metrics.cancelled(during);
            self.over(End::Left);
        } else if self.stage != Stage::Over && overdue {
            self.over(End::Cut);
        }
    }

    fn over(&mut self, end: End) {
        self.has_state = self.stage == Stage::Answer && !matches!(end, End::Failed(_));
        self.stage = Stage::Over;
        self.end = end;
    }

    /// Ends it: the engine failed.
    pub fn fail(&mut self, error: ApiError) {
        self.over(End::Failed(error));
    }

    /// Finds out what may come next, if another piece is to be written.
    pub fn plan(&mut self, kit: &Kit) {
        if self.stage != Stage::Answer {
            return;
        }
        let place = self.reply.place();
        match self.guide.as_mut().map_or(Ok(true), |guide| guide.look(place)) {
            Ok(true) => (),
            Ok(false) => {
                self.last.0 = self.reply.complete();
                self.over(End::Whole);
            }
            Err(error) => self.fail(kit.failure(error.into())),
        }
    }

    /// Writes the next piece. What is chosen is what the model goes on from.
    pub fn write(&mut self, kit: &Kit, given: Result<Given<'_>, EngineError>) -> Option<u32> {
        match given.and_then(|given| self.piece(kit, given)) {
            Ok(token) => token,
            Err(error) => {
                self.fail(kit.failure(error));
                None
            }
        }
    }

    fn piece(&mut self, kit: &Kit, given: Given<'_>) -> Result<Option<u32>, EngineError> {
        let mut token = None;
        let (mut deltas, logprob) = match given {
            Given::Logits(logits) => {
                let wanted = self.wants_logprobs();
                let id = self.choose(kit, logits)?;
                let wanted = wanted.filter(|_| !kit.tokenizer.is_special(id));
                token = Some(id);
                let logprob = wanted.map(|count| log_probability(logits, id, count));
                (self.reply.push(id, &kit.tokenizer)?, logprob)
            }
            Given::Special(id) => (self.reply.push_special(id), None),
            Given::Text(text) => (self.reply.push_text(text.as_bytes()), None),
        };
        let now = Instant::now();
        let (first, before) = *self.pieces.get_or_insert((now, now));
        if self.finished.completion_tokens == 0 {
            self.finished.prefill_ms = millis(self.start);
            kit.metrics.first_token(self.ticket.queued.elapsed());
        } else {
            kit.metrics.token(now - before);
        }
        self.pieces = Some((first, now));
        self.finished.decode_ms = (now - first).as_secs_f64() * 1e3;
        self.finished.completion_tokens += 1;
        let job = &self.ticket.job;
        if self.reply.end().is_some() {
            self.over(End::Whole);
        } else if self.finished.completion_tokens >= job.max_tokens {
            self.over(End::Cut);
        } else if job.one_call && self.reply.answer().calls.first().is_some_and(|call| call.complete) {
            self.finished.reason = "tool_calls";
            self.over(End::Whole);
        } else if !deltas.is_empty() || logprob.is_some() {
            self.send(Event::Deltas(std::mem::take(&mut deltas), logprob));
            return Ok(token);
        }
        self.last = (deltas, logprob);
        Ok(token)
    }

    fn wants_logprobs(&self) -> Option<usize> {
        let visible = matches!(self.reply.place(), Place::Response | Place::Outside);
        self.ticket.job.logprobs.filter(|_| visible)
    }

    /// Chooses a token.
    fn choose(&mut self, kit: &Kit, logits: &[f32]) -> Result<u32, EngineError> {
        let Writing { ticket: Ticket { job, .. }, sampler, reply, guide, .. } = self;
        let mask = match &kit.closed_mask {
            // What would open a call, where nothing else can be opened.
            Some(mask) if job.no_calls && matches!(reply.place(), Place::Outside | Place::Tools) => mask,
            _ => &kit.mask,
        };
        let id = match guide {
            Some(guide) => guide.choose(sampler, reply, logits, Some(mask))?,
            None => sampler.sample(logits, Some(mask))?,
        };
        if !reply.is_stop_id(id) {
            sampler.accept(id);
        }
        Ok(id)
    }

    /// Ends: sends what is left of the answer. What is to be told comes back, for when the slot is free; nothing to a
    /// client that left.
    pub fn close(mut self, kit: &Kit) -> (Ticket, Option<Event>) {
        let cut = match self.end {
            End::Left => return (self.ticket, None),
            End::Failed(error) => return (self.ticket, Some(Event::Failed(error))),
            End::Whole => false,
            End::Cut => true,
        };
        let (mut deltas, logprob) = std::mem::take(&mut self.last);
        if cut {
            deltas.extend(self.reply.cut());
        }
        if !deltas.is_empty() || logprob.is_some() {
            self.send(Event::Deltas(deltas, logprob));
        }
        let Writing { ticket, reply, mut finished, .. } = self;
        if finished.reason.is_empty() {
            finished.reason = if cut { "length" } else { reply.finish_reason() };
        }
        finished.counts = reply.counts();
        kit.metrics.answer(&finished);
        (ticket, Some(Event::Done(Box::new(finished))))
    }
}

impl Kit {
    /// A failure of the engine, as clients are told of it.
    pub fn failure(&self, error: EngineError) -> ApiError {
        (self.log)(&format!("the engine failed: {error}"));
        ApiError::from(error)
    }
}

fn millis(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// The log probability of `id` and of the `count` most likely ids, the lower id first on ties.
fn log_probability(logits: &[f32], id: u32, count: usize) -> TokenLogprob {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    let of = |x: f32| f64::from(x - max) - sum.ln();
    let mut top: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if count > 0 && count < top.len() {
        top.select_nth_unstable_by(count - 1, order);
    }
    top.truncate(count);
    top.sort_unstable_by(order);
    TokenLogprob {
        id,
        logprob: logits.get(id as usize).copied().map_or(f64::NEG_INFINITY, of),
        top: top.into_iter().map(|(id, x)| (id, of(x))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_probabilities_are_those_of_a_softmax() {
        let found = log_probability(&[0.0, 2.0, 1.0, 2.0], 2, 2);
        let sum = 1.0 + 2.0 * 2f64.exp() + 1f64.exp();
        assert!((found.logprob - (1f64.exp() / sum).ln()).abs() < 1e-9);
        assert_eq!(found.top.iter().map(|entry| entry.0).collect::<Vec<_>>(), [1, 3]);
        assert!((found.top[0].1 - (2f64.exp() / sum).ln()).abs() < 1e-9);
        assert!(log_probability(&[1.0], 0, 20).top.len() == 1);
        assert!(log_probability(&[1.0, 2.0], 0, 0).top.is_empty());
    }
}
