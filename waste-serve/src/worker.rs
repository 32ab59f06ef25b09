//! The thread that owns the model: takes jobs out of the line, and writes their answers.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use waste_common::cli::Failure;
use waste_engine::EngineError;
use waste_engine::chat::{Place, Reply};
use waste_engine::sampler::{Mask, Sampler};
use waste_engine::tokenizer::Tokenizer;

use crate::error::ApiError;
use crate::guide::{Guide, Next};
use crate::job::{Event, Finished, Job, TokenLogprob};
use crate::metrics::Metrics;
use crate::model::{Model, Piece};
use crate::queue::{Queue, Ticket};

/// Opens the model; once at the start, and once more if it panics.
pub type Open = dyn FnMut() -> Result<Box<dyn Model>, Failure> + Send;

/// What the worker shares with the rest.
pub struct Worker {
    /// The line.
    pub queue: Arc<Queue>,
    /// For the text of tokens.
    pub tokenizer: Arc<Tokenizer>,
    /// Ids that may be chosen.
    pub mask: Mask,
    /// The same without the one that opens elements; `None` if the format has no such id.
    pub closed_mask: Option<Mask>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Told of what clients are not told.
    pub log: Box<dyn Fn(&str) + Send>,
}

/// How an answer ended, if not with an error.
enum Outcome {
    Finished(Box<Finished>),
    /// The client left.
    Cancelled(&'static str),
}

impl Worker {
    /// Works until the line is drained.
    ///
    /// # Errors
    /// The model cannot be opened, or panicked twice.
    pub fn run(self, open: &mut Open) -> Result<(), Failure> {
        let end = End(Arc::clone(&self.queue));
        let mut model = open()?;
        self.queue.open();
        let mut panicked = false;
        while let Some(ticket) = self.queue.next() {
            self.metrics.waited(ticket.queued.elapsed());
            let outcome = catch_unwind(AssertUnwindSafe(|| self.answer(&mut *model, &ticket)));
            let mut failed = false;
            let event = match outcome {
                Ok(Ok(Outcome::Finished(finished))) => Some(Event::Done(finished)),
                Ok(Ok(Outcome::Cancelled(during))) => {
                    self.metrics.cancelled(during);
                    None
                }
                Ok(Err(error)) => {
                    (self.log)(&format!("the engine failed: {error}"));
                    let error = ApiError::from(error);
                    failed = error.status.is_server_error();
                    Some(Event::Failed(error))
                }
                Err(_) => {
                    failed = true;
                    Some(Event::Failed(ApiError::internal()))
                }
            };
            let panic = matches!(&event, Some(Event::Failed(error)) if error.code == "internal_error");
            self.queue.finished(failed);
            if let Some(event) = event {
                let _ = ticket.events.send(event);
            }
            if panic {
                if panicked {
                    return Err(Failure::internal("the engine panicked again after it was opened anew"));
                }
                panicked = true;
                (self.log)("the engine panicked; it is opened anew");
                // Before the new one: both would not fit.
                drop(model);
                model = open()?;
            }
        }
        model.close();
        drop(end);
        Ok(())
    }

    /// Writes one answer.
    fn answer(&self, model: &mut dyn Model, ticket: &Ticket) -> Result<Outcome, EngineError> {
        let Ticket { job, events, queued, .. } = ticket;
        let send = |event| {
            // A closed channel is looked at between tokens.
            let _ = events.send(event);
        };
        let queue_ms = millis(*queued);
        send(Event::Started);
        let before = model.reads();
        let mut counted = before;
        let start = Instant::now();
        let of = job.ids.len();
        let reused = model.prefill(job, &mut |done| {
            send(Event::Prefill { done, of });
            !events.is_closed() && !self.queue.overdue()
        })?;
        let mut sampler = Sampler::new(job.sampler.clone())?;
        let mut reply = job.reply.clone();
        let mut guide = job.guide.clone();
        let mut finished = Finished {
            prompt_tokens: of,
            seed: sampler.seed(),
            queue_ms,
            prefill_ms: millis(start),
            ..Finished::default()
        };
        // What the last token adds goes out with the end.
        let (mut deltas, mut last_logprob) = (Vec::new(), None);
        let cut = match reused {
            None if events.is_closed() => return Ok(Outcome::Cancelled("prefill")),
            None => true,
            Some(reused) => {
                finished.cached_tokens = reused;
                self.metrics.prompt(of, reused);
                let first = Instant::now();
                let mut last = first;
                loop {
                    if events.is_closed() {
                        model.done(job);
                        return Ok(Outcome::Cancelled("decode"));
                    }
                    if self.queue.overdue() {
                        break true;
                    }
                    let next = guide.as_mut().map(|guide| guide.next(reply.place())).transpose()?.flatten();
                    if next == Some(Next::End) {
                        let calls = !reply.answer().calls.is_empty();
                        finished.reason = if calls { "tool_calls" } else { "stop" };
                        break false;
                    }
                    let (piece, logprob) =
                        self.next(model, job, &reply, &mut sampler, guide.as_mut(), next)?;
                    if finished.completion_tokens == 0 {
                        finished.prefill_ms = millis(start);
                        self.metrics.first_token(queued.elapsed());
                    } else {
                        self.metrics.token(last.elapsed());
                    }
                    last = Instant::now();
                    // While it is written, so that it can be watched.
                    let reads = model.reads();
                    self.metrics.reads(reads.since(counted));
                    counted = reads;
                    finished.completion_tokens += 1;
                    deltas = match &piece {
                        Piece::Token(id) => reply.push(*id, &self.tokenizer)?,
                        Piece::Special(id) => reply.push_special(*id),
                        Piece::Text(text) => reply.push_text(text.as_bytes()),
                    };
                    let over = reply.end().is_some();
                    last_logprob = logprob;
                    if over || finished.completion_tokens >= job.max_tokens {
                        finished.decode_ms = millis(first);
                        break !over;
                    }
                    if job.one_call && reply.answer().calls.first().is_some_and(|call| call.complete) {
                        finished.reason = "tool_calls";
                        break false;
                    }
                    if !deltas.is_empty() || last_logprob.is_some() {
                        send(Event::Deltas(std::mem::take(&mut deltas), last_logprob.take()));
                    }
                    finished.decode_ms = millis(first);
                }
            }
        };
        if cut {
            deltas.extend(reply.cut());
        }
        model.done(job);
        if !deltas.is_empty() || last_logprob.is_some() {
            send(Event::Deltas(deltas, last_logprob));
        }
        if finished.reason.is_empty() {
            finished.reason = if cut { "length" } else { reply.finish_reason() };
        }
        finished.counts = reply.counts();
        let reads = model.reads();
        self.metrics.reads(reads.since(counted));
        finished.reads = reads.since(before);
        self.metrics.answer(&finished);
        Ok(Outcome::Finished(Box::new(finished)))
    }

    /// A mask without what ends a turn.
    fn without_stop(&self, mask: &Mask, job: &Job) -> Mask {
        let mut mask = mask.clone();
        let vocab = mask.vocab() as u32;
        let specials = self.tokenizer.specials().map(|(id, _)| id);
        specials.filter(|id| *id < vocab && job.reply.is_stop_id(*id)).for_each(|id| mask.ban(id));
        mask
    }

    /// The next piece, and its log probability if that is wanted here.
    fn next(
        &self,
        model: &mut dyn Model,
        job: &Job,
        reply: &Reply,
        sampler: &mut Sampler,
        mut guide: Option<&mut Guide>,
        next: Option<Next>,
    ) -> Result<(Piece, Option<TokenLogprob>), EngineError> {
        let place = reply.place();
        let own;
        let mask = match (&next, &self.closed_mask) {
            (Some(Next::OneOf(allowed)), _) => allowed,
            (Some(_), Some(mask)) => {
                own = self.without_stop(mask, job);
                &own
            }
            // What would open a call, where nothing else can be opened.
            (None, Some(mask)) if job.no_calls && matches!(place, Place::Outside | Place::Tools) => mask,
            _ => &self.mask,
        };
        let wanted = job.logprobs.filter(|_| matches!(place, Place::Response | Place::Outside));
        let mut logprob = None;
        let piece = model.next(&mut |logits| {
            let id = match (&next, &mut guide) {
                (Some(Next::Token(id)), _) => {
                    sampler.skip();
                    *id
                }
                (_, Some(guide)) => {
                    let id = sampler.sample(logits, Some(mask))?;
                    let end = reply.is_stop_id(id);
                    if end { guide.refuse_end().unwrap_or(id) } else { id }
                }
                _ => sampler.sample(logits, Some(mask))?,
            };
            if let Some(guide) = &mut guide {
                guide.took(id)?;
            }
            logprob = wanted.map(|count| log_probability(logits, id, count));
            if !reply.is_stop_id(id) {
                sampler.accept(id);
            }
            Ok(id)
        })?;
        let visible = matches!(&piece, Piece::Token(id) if !self.tokenizer.is_special(*id));
        Ok((piece, logprob.filter(|_| visible)))
    }
}

/// Says that the worker has ended, however that came.
struct End(Arc<Queue>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.end();
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
