//! A text on its way, token by token: what is chosen, what is shown, and where it ends. Whoever has the logits drives it.

use crate::error::EngineError;
use crate::generate::{Finish, Request, SoFar};
use crate::sampler::{Sampler, StopMatcher, TokenConstraint};
use crate::tokenizer::{TextStream, Tokenizer};

/// A text being written to a request.
pub struct Decoding<'a> {
    request: &'a Request,
    tokenizer: Option<&'a Tokenizer>,
    sampler: Sampler,
    constraint: Option<Box<dyn TokenConstraint>>,
    stop: StopMatcher,
    stream: TextStream,
    tokens: Vec<u32>,
    /// Certain, and not shown yet.
    text: String,
    finish: Option<Finish>,
}

impl<'a> Decoding<'a> {
    /// The text before its first token, or where it was interrupted. Without a tokenizer there are only ids: the text
    /// stays empty, and stop strings are refused.
    ///
    /// # Errors
    /// Options that cannot be used; an answer that was begun and does not keep to the constraint.
    pub fn new(request: &'a Request, tokenizer: Option<&'a Tokenizer>) -> Result<Decoding<'a>, EngineError> {
        request.check()?;
        if tokenizer.is_none() && !request.stop.is_empty() {
            return Err(EngineError::Option {
                what: "stop strings",
                why: "without a tokenizer there is no text to find them in".to_owned(),
            });
        }
        let mut decoding = Decoding {
            request,
            tokenizer,
            sampler: request.sampler()?,
            constraint: request.constraint.clone(),
            stop: StopMatcher::new(&request.stop)?,
            stream: TextStream::new(),
            tokens: Vec::new(),
            text: String::new(),
            finish: (request.max_tokens == 0).then_some(Finish::Length),
        };
        if decoding.finish.is_none() {
            for &token in request.begun.iter().flat_map(|begun| &begun.tokens) {
                decoding.begun(token)?;
            }
        }
        Ok(decoding)
    }

    fn begun(&mut self, token: u32) -> Result<(), EngineError> {
        self.tokens.push(token);
        if let Some(constraint) = &mut self.constraint {
            constraint.accept(token).map_err(|_| EngineError::Option {
                what: "the grammar",
                why: "the answer that was begun does not keep to it; go on with the one it was begun with"
                    .to_owned(),
            })?;
        }
        self.show(token)
    }

    /// Chooses the next token by the logits that the last one left. It is what the model goes on from; `None` once the
    /// text has ended.
    ///
    /// # Errors
    /// Nothing can be chosen.
    pub fn next(&mut self, logits: &[f32]) -> Result<Option<u32>, EngineError> {
        if self.finish.is_some() {
            return Ok(None);
        }
        let token = self.choose(logits)?;
        self.tokens.push(token);
        if self.request.stop_ids.contains(&token) {
            self.cut(Finish::Stop);
            return Ok(None);
        }
        let complete = self.took(token)?;
        self.show(token)?;
        let ended = match () {
            () if self.stop.stopped().is_some() => Finish::StopString,
            () if complete => Finish::Complete,
            () if self.tokens.len() >= self.request.max_tokens => Finish::Length,
            () => return Ok(Some(token)),
        };
        self.cut(ended);
        Ok(None)
    }

    fn choose(&mut self, logits: &[f32]) -> Result<u32, EngineError> {
        let Some(constraint) = &mut self.constraint else {
            return Ok(self.sampler.sample(logits, self.request.mask.as_ref())?);
        };
        let mut mask = constraint.mask()?;
        if let Some(allowed) = &self.request.mask {
            mask.intersect(allowed);
        }
        if constraint.may_end()? {
            self.request.stop_ids.iter().for_each(|id| mask.allow(*id));
        }
        Ok(self.sampler.sample(logits, Some(&mask))?)
    }

    /// Counts a token of the text; true if nothing can follow it.
    fn took(&mut self, token: u32) -> Result<bool, EngineError> {
        self.sampler.accept(token);
        let Some(constraint) = &mut self.constraint else { return Ok(false) };
        constraint.accept(token)?;
        Ok(constraint.may_end()? && constraint.mask()?.is_empty())
    }

    fn show(&mut self, token: u32) -> Result<(), EngineError> {
        if let Some(tokenizer) = self.tokenizer {
            self.text += &self.stop.push(&self.stream.push(tokenizer.token_bytes(token)?));
        }
        Ok(())
    }

    /// Ends the text, if it has not ended: what was held back is shown.
    pub fn cut(&mut self, why: Finish) {
        if self.finish.is_some() {
            return;
        }
        self.finish = Some(why);
        if why != Finish::StopString {
            self.text += &self.stop.push(&self.stream.flush());
            self.text += &self.stop.flush();
        }
    }

    /// The text that has become certain since this was asked before.
    pub fn take_text(&mut self) -> String {
        std::mem::take(&mut self.text)
    }

    /// How far it is.
    pub fn so_far(&self) -> SoFar<'_> {
        SoFar { tokens: &self.tokens, sampler: self.sampler.state(), finish: self.finish }
    }

    /// Why it ended, if it has.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }
}
