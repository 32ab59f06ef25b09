//! From a prompt to text: prefill, sample, stream, stop.

use std::time::Instant;

use crate::error::EngineError;
use crate::model::{Engine, Wanted};
use crate::sampler::{Mask, Sampler, SamplerOptions, SamplerState, StopMatcher, TokenConstraint};
use crate::session::Session;
use crate::tokenizer::{TextStream, Tokenizer};

/// What is to be generated.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Tokens to go on from; at least one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampler: SamplerOptions,
    /// Strings that end the text; they are not part of it.
    pub stop: Vec<String>,
    /// Ids that end the text; they are not part of it.
    pub stop_ids: Vec<u32>,
    /// Ids that may be chosen; `None` for all.
    pub mask: Option<Mask>,
    /// What the text has to keep to, from its beginning; it ends when nothing else can follow.
    pub constraint: Option<Box<dyn TokenConstraint>>,
    /// An answer that was begun before; the prompt is what of it, or of what it answers, is not in the state yet.
    pub begun: Option<Begun>,
}

/// An answer that was interrupted.
#[derive(Clone, Debug)]
pub struct Begun {
    /// Its tokens so far; their text is shown again.
    pub tokens: Vec<u32>,
    /// How sampling goes on.
    pub sampler: SamplerState,
}

/// Who is told what a generation does.
pub trait Listener {
    /// Text that is certain. An error ends the generation.
    fn text(&mut self, text: &str) -> Result<(), EngineError>;

    /// A place to save the session at: between chunks of the prompt, after each token, and at the end. The session's
    /// state is that of its position; `so_far.tokens` may be one ahead of it.
    fn pause(&mut self, _session: &Session, _so_far: &SoFar<'_>) -> Result<(), EngineError> {
        Ok(())
    }
}

impl<F: FnMut(&str) -> Result<(), EngineError>> Listener for F {
    fn text(&mut self, text: &str) -> Result<(), EngineError> {
        self(text)
    }
}

/// An answer on its way.
#[derive(Clone, Copy, Debug)]
pub struct SoFar<'a> {
    /// Its tokens, one that ended it included.
    pub tokens: &'a [u32],
    /// How sampling goes on.
    pub sampler: &'a SamplerState,
    /// Why it ended, if it has.
    pub finish: Option<Finish>,
}

impl Request {
    /// Checks everything that can be checked before a model is loaded.
    pub fn check(&self) -> Result<(), EngineError> {
        if self.prompt.is_empty() {
            return Err(EngineError::Option {
                what: "prompt",
                why: "it holds no token to go on from".to_owned(),
            });
        }
        self.sampler()?;
        StopMatcher::new(&self.stop)?;
        Ok(())
    }

    fn sampler(&self) -> Result<Sampler, EngineError> {
        let options = self.sampler.clone();
        Ok(match &self.begun {
            None => Sampler::new(options)?,
            Some(begun) => Sampler::resume(options, begun.sampler.clone())?,
        })
    }
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended its text.
    Stop,
    /// A stop string came up.
    StopString,
    /// What the text has to keep to allows no more.
    Complete,
    /// The token limit was reached.
    Length,
    /// The context is full.
    Context,
    /// It was cancelled from outside.
    Cancelled,
}

impl Finish {
    /// `stop`, `length` or `cancelled`, as APIs say it.
    pub fn reason(self) -> &'static str {
        match self {
            Finish::Stop | Finish::StopString | Finish::Complete => "stop",
            Finish::Length | Finish::Context => "length",
            Finish::Cancelled => "cancelled",
        }
    }

    /// The same for people.
    pub fn explain(self) -> &'static str {
        match self {
            Finish::Stop => "the model ended its text",
            Finish::StopString => "a stop string came up",
            Finish::Complete => "the text is complete by its grammar",
            Finish::Length => "the token limit (-n) was reached",
            Finish::Context => "the context (--ctx) is full",
            Finish::Cancelled => "interrupted",
        }
    }
}

/// What was generated.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// The tokens, without one that ended the text.
    pub tokens: Vec<u32>,
    /// The text, as it was streamed.
    pub text: String,
    /// Why it ended.
    pub finish: Finish,
    /// The seed in use.
    pub seed: u64,
    /// Seconds until the first token was known.
    pub prefill_seconds: f64,
    /// Seconds from then on.
    pub decode_seconds: f64,
}

/// Generates from a session's state. Text is handed on as soon as it is certain; a token is shown before the model
/// goes on from it, and no step follows the last one. Without a tokenizer there are only ids: the text stays empty,
/// and stop strings are refused.
pub fn generate(
    engine: &Engine,
    session: &mut Session,
    tokenizer: Option<&Tokenizer>,
    request: &Request,
    listener: &mut dyn Listener,
) -> Result<Generation, EngineError> {
    if request.prompt.is_empty() {
        return Err(EngineError::Option {
            what: "prompt",
            why: "it holds no token to go on from".to_owned(),
        });
    }
    if tokenizer.is_none() && !request.stop.is_empty() {
        return Err(EngineError::Option {
            what: "stop strings",
            why: "without a tokenizer there is no text to find them in".to_owned(),
        });
    }
    let mut choice = Choice { sampler: request.sampler()?, constraint: request.constraint.clone(), request };
    let mut writer = Writer { tokenizer, stop: StopMatcher::new(&request.stop)?, stream: TextStream::new() };
    let mut generation = Generation {
        tokens: Vec::new(),
        text: String::new(),
        finish: Finish::Length,
        seed: choice.sampler.seed(),
        prefill_seconds: 0.0,
        decode_seconds: 0.0,
    };
    if request.max_tokens == 0 {
        return Ok(generation);
    }
    for &token in request.begun.iter().flat_map(|begun| &begun.tokens) {
        generation.tokens.push(token);
        if let Some(constraint) = &mut choice.constraint {
            constraint.accept(token).map_err(|_| EngineError::Option {
                what: "the grammar",
                why: "the answer that was begun does not keep to it; go on with the one it was begun with"
                    .to_owned(),
            })?;
        }
        writer.token(token, &mut generation.text, listener)?;
    }

    let start = Instant::now();
    let mut next = prefill(engine, session, &mut choice, &generation.tokens, listener)?;
    generation.prefill_seconds = start.elapsed().as_secs_f64();
    let start = Instant::now();
    generation.finish = loop {
        let Some(token) = next else { break Finish::Cancelled };
        generation.tokens.push(token);
        if request.stop_ids.contains(&token) {
            break Finish::Stop;
        }
        let ended = choice.took(token)?;
        writer.token(token, &mut generation.text, listener)?;
        if writer.stop.stopped().is_some() {
            break Finish::StopString;
        }
        if ended {
            break Finish::Complete;
        }
        if generation.tokens.len() >= request.max_tokens {
            break Finish::Length;
        }
        if session.position() == engine.ctx() {
            break Finish::Context;
        }
        pause(session, &generation.tokens, &choice.sampler, None, listener)?;
        next = step(engine, session, &[token], 0..1, &mut choice)?;
    };
    pause(session, &generation.tokens, &choice.sampler, Some(generation.finish), listener)?;
    if generation.finish == Finish::Stop {
        generation.tokens.pop();
    }
    if generation.finish != Finish::StopString {
        writer.end(&mut generation.text, listener)?;
    }
    generation.decode_seconds = start.elapsed().as_secs_f64();
    Ok(generation)
}

/// Tokens to visible text.
struct Writer<'a> {
    tokenizer: Option<&'a Tokenizer>,
    stop: StopMatcher,
    stream: TextStream,
}

impl Writer<'_> {
    fn token(
        &mut self,
        token: u32,
        text: &mut String,
        listener: &mut dyn Listener,
    ) -> Result<(), EngineError> {
        let Some(tokenizer) = self.tokenizer else { return Ok(()) };
        let shown = self.stop.push(&self.stream.push(tokenizer.token_bytes(token)?));
        show(shown, text, listener)
    }

    fn end(&mut self, text: &mut String, listener: &mut dyn Listener) -> Result<(), EngineError> {
        let mut rest = self.stop.push(&self.stream.flush());
        rest.push_str(&self.stop.flush());
        show(rest, text, listener)
    }
}

fn show(shown: String, text: &mut String, listener: &mut dyn Listener) -> Result<(), EngineError> {
    if shown.is_empty() {
        return Ok(());
    }
    text.push_str(&shown);
    listener.text(&shown)
}

fn pause(
    session: &Session,
    tokens: &[u32],
    sampler: &Sampler,
    finish: Option<Finish>,
    listener: &mut dyn Listener,
) -> Result<(), EngineError> {
    listener.pause(session, &SoFar { tokens, sampler: sampler.state(), finish })
}

/// How the next token is chosen.
struct Choice<'a> {
    sampler: Sampler,
    constraint: Option<Box<dyn TokenConstraint>>,
    request: &'a Request,
}

impl Choice<'_> {
    fn next(&mut self, logits: &[f32]) -> Result<u32, EngineError> {
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
}

/// Takes the prompt in, chunk by chunk, and chooses the first token; `None` if it was cancelled.
fn prefill(
    engine: &Engine,
    session: &mut Session,
    choice: &mut Choice<'_>,
    begun: &[u32],
    listener: &mut dyn Listener,
) -> Result<Option<u32>, EngineError> {
    let prompt = &choice.request.prompt;
    EngineError::check_tokens(prompt, session.position(), engine.ctx(), engine.config().vocab)?;
    let last = (prompt.len() - 1) / engine.chunk() * engine.chunk();
    for (i, chunk) in prompt[..last].chunks(engine.chunk()).enumerate() {
        let part = i * engine.chunk()..prompt.len();
        match engine.forward_part(session, chunk, part, Wanted::Nothing, &mut |_, _| Ok(())) {
            Err(EngineError::Interrupted) => return Ok(None),
            outcome => outcome?,
        }
        pause(session, begun, &choice.sampler, None, listener)?;
    }
    step(engine, session, &prompt[last..], last..prompt.len(), choice)
}

/// Takes tokens in and chooses the next one; `None` if it was cancelled.
fn step(
    engine: &Engine,
    session: &mut Session,
    tokens: &[u32],
    part: std::ops::Range<usize>,
    choice: &mut Choice<'_>,
) -> Result<Option<u32>, EngineError> {
    let mut next = None;
    let outcome = engine.forward_part(session, tokens, part, Wanted::Last, &mut |_, logits| {
        next = Some(choice.next(logits)?);
        Ok(())
    });
    match outcome {
        Err(EngineError::Interrupted) => Ok(None),
        Err(error) => Err(error),
        Ok(()) => Ok(next),
    }
}
