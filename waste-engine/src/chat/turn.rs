//! One answer, from logits to its end.

use std::collections::VecDeque;

use super::conversation::Prompt;
use super::format::ChatFormat;
use super::guide::Guide;
use super::reply::{Delta, End, Place, Reply};
use crate::error::EngineError;
use crate::generate::Finish;
use crate::sampler::{Mask, Sampler, SamplerOptions, StopMatcher};
use crate::tokenizer::Tokenizer;

/// How long an answer may be, and where it ends.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Most tokens, thinking and markup included.
    pub tokens: usize,
    /// Most tokens of thinking; then the channel is closed for the model.
    pub think: Option<usize>,
    /// Strings that end the content.
    pub stop: Vec<String>,
    /// Ids that end the answer beside those of the format.
    pub stop_ids: Vec<u32>,
}

/// An answer being written: the sampler chooses a token, the reply reads it.
#[derive(Clone, Debug)]
pub struct Turn {
    sampler: Sampler,
    reply: Reply,
    guide: Option<Guide>,
    limits: Limits,
    /// What closes the think channel.
    end_thinking: Vec<u32>,
    /// Tokens that come next whatever the model thinks.
    forced: VecDeque<u32>,
    tokens: Vec<u32>,
    finish: Option<Finish>,
}

impl Turn {
    /// The answer to a prompt, before its first token.
    ///
    /// # Errors
    /// Options of the sampler or stop strings that cannot be used.
    pub fn new(
        format: &ChatFormat,
        tokenizer: &Tokenizer,
        prompt: &Prompt,
        sampler: SamplerOptions,
        limits: Limits,
    ) -> Result<Turn, EngineError> {
        let stop = StopMatcher::new(&limits.stop)?;
        let end_thinking = match limits.think {
            Some(_) => {
                format.end_thinking().map(|segments| segments.encode(tokenizer).ids).unwrap_or_default()
            }
            None => Vec::new(),
        };
        let mut turn = Turn {
            sampler: Sampler::new(sampler)?,
            reply: format.reply(prompt, &limits.stop_ids, stop),
            guide: None,
            finish: (limits.tokens == 0).then_some(Finish::Length),
            limits,
            end_thinking,
            forced: VecDeque::new(),
            tokens: Vec::new(),
        };
        turn.limit_thinking();
        Ok(turn)
    }

    /// Keeps the answer to something, before its first token.
    ///
    /// # Errors
    /// What it may begin with cannot be found out.
    pub fn guided(mut self, guide: Option<Guide>) -> Result<Turn, EngineError> {
        self.guide = guide;
        self.look()?;
        Ok(self)
    }

    /// Chooses the next token by the logits that the last one left, and returns what it adds to the answer. It is the
    /// last of [`Turn::tokens`], for the model to go on from, unless it ended the answer.
    ///
    /// # Errors
    /// Nothing can be sampled.
    pub fn next(
        &mut self,
        logits: &[f32],
        mask: Option<&Mask>,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<Delta>, EngineError> {
        if self.finish.is_some() {
            return Ok(Vec::new());
        }
        let token = match (self.forced.pop_front(), &mut self.guide) {
            (Some(token), guide) => {
                guide.as_mut().map_or(Ok(()), |guide| guide.took(token))?;
                token
            }
            (None, Some(guide)) => guide.choose(&mut self.sampler, &self.reply, logits, mask)?,
            (None, None) => self.sampler.sample(logits, mask)?,
        };
        let mut deltas = self.reply.push(token, tokenizer)?;
        if self.reply.is_stop_id(token) {
            self.finish = Some(Finish::Stop);
            return Ok(deltas);
        }
        self.sampler.accept(token);
        self.tokens.push(token);
        self.finish = match self.reply.end() {
            Some(End::Turn) => Some(Finish::Stop),
            Some(End::StopString) => Some(Finish::StopString),
            None if self.tokens.len() >= self.limits.tokens => Some(Finish::Length),
            None => None,
        };
        if self.finish == Some(Finish::Length) {
            deltas.extend(self.reply.cut());
        }
        self.limit_thinking();
        deltas.extend(self.look()?);
        Ok(deltas)
    }

    /// Finds out what may come next, if anything may.
    fn look(&mut self) -> Result<Vec<Delta>, EngineError> {
        let place = self.reply.place();
        if self.finish.is_none()
            && let Some(guide) = &mut self.guide
            && !guide.look(place)?
        {
            self.finish = Some(Finish::Stop);
            return Ok(self.reply.complete());
        }
        Ok(Vec::new())
    }

    fn limit_thinking(&mut self) {
        if let Some(most) = self.limits.think
            && self.reply.place() == Place::Think
            && self.reply.counts().reasoning >= most
            && self.forced.is_empty()
        {
            self.forced.extend(&self.end_thinking);
        }
    }

    /// Ends the answer from outside.
    pub fn cut(&mut self, why: Finish) -> Vec<Delta> {
        if self.finish.is_some() {
            return Vec::new();
        }
        self.finish = Some(why);
        self.reply.cut()
    }

    /// Why it ended, if it did.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// The answer, as far as it was read.
    pub fn reply(&self) -> &Reply {
        &self.reply
    }

    /// The tokens, without a stop id that ended them.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The seed in use.
    pub fn seed(&self) -> u64 {
        self.sampler.seed()
    }
}
