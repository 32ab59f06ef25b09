//! From a prompt to text: prefill, sample, stream, stop.

use std::time::Instant;

use crate::decoding::Decoding;
use crate::error::EngineError;
use crate::model::{Engine, Wanted};
use crate::sampler::{Mask, Sampler, SamplerOptions, SamplerState, StopMatcher, TokenConstraint};
use crate::session::Session;
use crate::tokenizer::Tokenizer;

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
    /// Text that is certain. [`EngineError::Interrupted`] ends the generation as a cancellation does, and no other one of
    /// the engine; any other error ends it as a failure.
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

    pub(crate) fn sampler(&self) -> Result<Sampler, EngineError> {
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
    let mut decoding = Decoding::new(request, tokenizer)?;
    let mut generation = Generation {
        tokens: Vec::new(),
        text: String::new(),
        finish: Finish::Length,
        seed: decoding.so_far().sampler.seed,
        prefill_seconds: 0.0,
        decode_seconds: 0.0,
    };
    if request.max_tokens == 0 {
        return Ok(generation);
    }
    show(&mut decoding, &mut generation.text, listener)?;
    let start = Instant::now();
    let mut next = prefill(engine, session, &request.prompt, &mut decoding, listener)?;
    generation.prefill_seconds = start.elapsed().as_secs_f64();
    let start = Instant::now();
    loop {
        if stopped(show(&mut decoding, &mut generation.text, listener))? {
            decoding.cut(Finish::Cancelled);
            // What was held back belongs to the text too.
            stopped(show(&mut decoding, &mut generation.text, listener))?;
            break;
        }
        let Some(token) = next else { break };
        if session.position() == engine.ctx() {
            decoding.cut(Finish::Context);
            next = None;
            continue;
        }
        listener.pause(session, &decoding.so_far())?;
        next = step(engine, session, &[token], 0..1, &mut decoding)?;
    }
    let so_far = decoding.so_far();
    listener.pause(session, &so_far)?;
    generation.tokens.extend_from_slice(so_far.tokens);
    generation.finish = so_far.finish.unwrap_or(generation.finish);
    if generation.finish == Finish::Stop {
        generation.tokens.pop();
    }
    generation.decode_seconds = start.elapsed().as_secs_f64();
    Ok(generation)
}

/// Whether the listener wants no more.
fn stopped(shown: Result<(), EngineError>) -> Result<bool, EngineError> {
    match shown {
        Err(EngineError::Interrupted) => Ok(true),
        outcome => outcome.map(|()| false),
    }
}

fn show(
    decoding: &mut Decoding<'_>,
    text: &mut String,
    listener: &mut dyn Listener,
) -> Result<(), EngineError> {
    let shown = decoding.take_text();
    if shown.is_empty() {
        return Ok(());
    }
    text.push_str(&shown);
    listener.text(&shown)
}

/// Takes the prompt in, chunk by chunk, and chooses the first token; `None` if that was all, or it was cancelled.
fn prefill(
    engine: &Engine,
    session: &mut Session,
    prompt: &[u32],
    decoding: &mut Decoding<'_>,
    listener: &mut dyn Listener,
) -> Result<Option<u32>, EngineError> {
    EngineError::check_tokens(prompt, session.position(), engine.ctx(), engine.config().vocab)?;
    let last = (prompt.len() - 1) / engine.chunk() * engine.chunk();
    for (i, chunk) in prompt[..last].chunks(engine.chunk()).enumerate() {
        let part = i * engine.chunk()..prompt.len();
        match engine.forward_part(session, chunk, part, Wanted::Nothing, &mut |_, _| Ok(())) {
            Err(EngineError::Interrupted) => {
                decoding.cut(Finish::Cancelled);
                return Ok(None);
            }
            outcome => outcome?,
        }
        listener.pause(session, &decoding.so_far())?;
    }
    step(engine, session, &prompt[last..], last..prompt.len(), decoding)
}

/// Takes tokens in and chooses the next one; `None` if there is none, or it was cancelled.
fn step(
    engine: &Engine,
    session: &mut Session,
    tokens: &[u32],
    part: std::ops::Range<usize>,
    decoding: &mut Decoding<'_>,
) -> Result<Option<u32>, EngineError> {
    let mut next = None;
    let outcome = engine.forward_part(session, tokens, part, Wanted::Last, &mut |_, logits| {
        next = decoding.next(logits)?;
        Ok(())
    });
    match outcome {
        Err(EngineError::Interrupted) => decoding.cut(Finish::Cancelled),
        outcome => outcome?,
    }
    Ok(next)
}
