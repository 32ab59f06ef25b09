//! From a prompt to text: prefill, sample, stream, stop.

use std::time::Instant;

use crate::error::EngineError;
use crate::model::{Engine, Wanted};
use crate::sampler::{Mask, Sampler, SamplerOptions, StopMatcher};
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
        self.sampler.validate()?;
        StopMatcher::new(&self.stop)?;
        Ok(())
    }
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended its text.
    Stop,
    /// A stop string came up.
    StopString,
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
            Finish::Stop | Finish::StopString => "stop",
            Finish::Length | Finish::Context => "length",
            Finish::Cancelled => "cancelled",
        }
    }

    /// The same for people.
    pub fn explain(self) -> &'static str {
        match self {
            Finish::Stop => "the model ended its text",
            Finish::StopString => "a stop string came up",
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
    on_text: &mut dyn FnMut(&str) -> Result<(), EngineError>,
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
    let mut sampler = Sampler::new(request.sampler.clone())?;
    let mut stop = StopMatcher::new(&request.stop)?;
    let mut stream = TextStream::new();
    let mut generation = Generation {
        tokens: Vec::new(),
        text: String::new(),
        finish: Finish::Length,
        seed: sampler.seed(),
        prefill_seconds: 0.0,
        decode_seconds: 0.0,
    };
    if request.max_tokens == 0 {
        return Ok(generation);
    }
    let mut show = |generation: &mut Generation, text: String| {
        if text.is_empty() {
            return Ok(());
        }
        generation.text.push_str(&text);
        on_text(&text)
    };

    let start = Instant::now();
    let mut next = step(engine, session, &request.prompt, &mut sampler, request.mask.as_ref())?;
    generation.prefill_seconds = start.elapsed().as_secs_f64();
    let start = Instant::now();
    generation.finish = loop {
        let Some(token) = next else { break Finish::Cancelled };
        if request.stop_ids.contains(&token) {
            break Finish::Stop;
        }
        generation.tokens.push(token);
        sampler.accept(token);
        if let Some(tokenizer) = tokenizer {
            let text = stop.push(&stream.push(tokenizer.token_bytes(token)?));
            show(&mut generation, text)?;
        }
        if stop.stopped().is_some() {
            break Finish::StopString;
        }
        if generation.tokens.len() == request.max_tokens {
            break Finish::Length;
        }
        if session.position() == engine.ctx() {
            break Finish::Context;
        }
        next = step(engine, session, &[token], &mut sampler, request.mask.as_ref())?;
    };
    if generation.finish != Finish::StopString {
        let mut rest = stop.push(&stream.flush());
        rest.push_str(&stop.flush());
        show(&mut generation, rest)?;
    }
    generation.decode_seconds = start.elapsed().as_secs_f64();
    Ok(generation)
}

/// Takes tokens in and chooses the next one; `None` if it was cancelled.
fn step(
    engine: &Engine,
    session: &mut Session,
    tokens: &[u32],
    sampler: &mut Sampler,
    mask: Option<&Mask>,
) -> Result<Option<u32>, EngineError> {
    let mut next = None;
    let outcome = engine.forward(session, tokens, Wanted::Last, &mut |_, logits| {
        next = Some(sampler.sample(logits, mask)?);
        Ok(())
    });
    match outcome {
        Err(EngineError::Interrupted) => Ok(None),
        Err(error) => Err(error),
        Ok(()) => Ok(next),
    }
}
