//! How an answer is written, and what comes of it.
#![allow(unsafe_code)] // the border: see each function

use std::ffi::c_char;

use waste_engine::grammar::Grammars;
use waste_engine::sampler::{SamplerOptions, TokenConstraint};
use waste_engine::{Finish, Generation, Request};

use crate::error::Fault;
use crate::model::Opened;
use crate::raw::{self, Text};

/// Tokens of an answer, if nobody says.
const TOKENS: usize = 256;

/// How an answer is written. All zeros: at most 256 tokens, each the most probable one, until the model ends its text.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// sizeof(waste_params).
    pub size: usize,
    /// Most tokens; 0 for 256.
    pub max_tokens: u64,
    /// 0 to 2; 0 takes the most probable token.
    pub temperature: f64,
    /// Keep the shortest prefix of candidates with this probability; 0 and 1 keep all.
    pub top_p: f64,
    /// Drop candidates below this part of the highest probability; 0 keeps all.
    pub min_p: f64,
    /// Taken from the logit of a token that was generated before, -2 to 2.
    pub presence_penalty: f64,
    /// Taken from it once for each time it was, -2 to 2.
    pub frequency_penalty: f64,
    /// The seed, if `seeded`.
    pub seed: u64,
    /// Texts that end the answer, `stop_count` of them; they are no part of it.
    pub stops: *const Text,
    /// How many they are.
    pub stop_count: usize,
    /// Ids that end the answer beside the model's own, `stop_id_count` of them.
    pub stop_ids: *const u32,
    /// How many they are.
    pub stop_id_count: usize,
    /// A JSON schema that the answer keeps to, or no text.
    pub json_schema: Text,
    /// A grammar (Lark) that it keeps to, or no text.
    pub grammar: Text,
    /// Keep this many candidates; 0 keeps all.
    pub top_k: u32,
    /// Not 0: random numbers begin with `seed`. 0: they go on with the session's, which begin with a seed of the
    /// system's.
    pub seeded: u32,
    /// Not 0: the model's own ends of a text are tokens like others.
    pub ignore_end: u32,
    /// Not 0: control tokens may be chosen too.
    pub any_token: u32,
}

/// Why an answer ended.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The model ended its text.
    Stop = 0,
    /// A stop text came up.
    StopText = 1,
    /// What it keeps to allows no more.
    Complete = 2,
    /// It has as many tokens as it may.
    Length = 3,
    /// The context is full.
    Context = 4,
    /// waste_cancel, or the callback, stopped it. waste_generate without new tokens goes on from there.
    Cancelled = 5,
}

/// What came of a generation.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// sizeof(waste_outcome).
    pub size: usize,
    /// Tokens of the answer, without one that ended it.
    pub tokens: u64,
    /// Tokens that went through the model before the first one.
    pub prompt_tokens: u64,
    /// The seed in use.
    pub seed: u64,
    /// Seconds until the first token was known.
    pub prefill_seconds: f64,
    /// Seconds from then on.
    pub decode_seconds: f64,
    /// A waste_finish.
    pub finish: u64,
}

raw::sized!(Params, Outcome);

/// Takes text as it becomes certain: `length` bytes of UTF-8, not ended by a zero, which belong to the library and last
/// for the call. What it returns ends the answer if it is not 0. It may use the model, but not this session.
pub type OnText =
    Option<unsafe extern "C" fn(user: *mut std::ffi::c_void, text: *const c_char, length: usize) -> i32>;

/// Reads parameters into a request, whose prompt comes from elsewhere.
///
/// # Errors
/// One is out of its range.
///
/// # Safety
/// As [`raw::read`]; pointers within are null or what the header says.
pub unsafe fn request(params: *const Params, model: &Opened) -> Result<(Request, bool), Fault> {
    // SAFETY: the caller's promise.
    let params = unsafe { raw::read(params, "the parameters")? };
    // SAFETY: as above.
    let stops = unsafe { raw::slice(params.stops, params.stop_count, "the stop texts")? };
    let stops = stops.iter().map(|stop| {
        // SAFETY: as above.
        unsafe { raw::text(stop.bytes, stop.length, "a stop text") }.map(str::to_owned)
    });
    let stop = stops.collect::<Result<_, _>>()?;
    // SAFETY: as above.
    let mut stop_ids = unsafe { raw::slice(params.stop_ids, params.stop_id_count, "the stop ids")? }.to_vec();
    if params.ignore_end == 0 {
        stop_ids.extend(&model.stop_ids);
    }
    // SAFETY: as above.
    let schema = unsafe { raw::optional_text(params.json_schema, "the JSON schema")? };
    // SAFETY: as above.
    let grammar = unsafe { raw::optional_text(params.grammar, "the grammar")? };
    let vocab = model.engine.config().vocab;
    let request = Request {
        max_tokens: match params.max_tokens {
            0 => TOKENS,
            tokens => usize::try_from(tokens).unwrap_or(usize::MAX),
        },
        sampler: SamplerOptions {
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: if params.top_p == 0.0 { 1.0 } else { params.top_p },
            min_p: params.min_p,
            seed: (params.seeded != 0).then_some(params.seed),
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            ..SamplerOptions::default()
        },
        stop,
        stop_ids,
        mask: model.tokenizer.as_ref().filter(|_| params.any_token == 0).map(|known| known.text_mask(vocab)),
        constraint: constraint(schema, grammar, model)?,
        ..Request::default()
    };
    Ok((request, params.seeded != 0))
}

fn constraint(
    schema: Option<&str>,
    grammar: Option<&str>,
    model: &Opened,
) -> Result<Option<Box<dyn TokenConstraint>>, Fault> {
    let grammars = || Ok::<_, Fault>(Grammars::new(model.tokenizer()?, model.engine.config().vocab)?);
    Ok(match (schema, grammar) {
        (None, None) => None,
        (Some(_), Some(_)) => return Err(Fault::usage("a JSON schema and a grammar exclude each other")),
        (Some(schema), None) => Some(Box::new(grammars()?.json_schema_text(schema)?)),
        (None, Some(grammar)) => Some(Box::new(grammars()?.lark(grammar)?)),
    })
}

impl Outcome {
    /// Of a generation from a prompt.
    pub fn of(generation: &Generation, prompt_tokens: usize) -> Outcome {
        let finish = match generation.finish {
            Finish::Stop => Ending::Stop,
            Finish::StopString => Ending::StopText,
            Finish::Complete => Ending::Complete,
            Finish::Length => Ending::Length,
            Finish::Context => Ending::Context,
            Finish::Cancelled => Ending::Cancelled,
        };
        Outcome {
            size: size_of::<Outcome>(),
            tokens: generation.tokens.len() as u64,
            prompt_tokens: prompt_tokens as u64,
            seed: generation.seed,
            prefill_seconds: generation.prefill_seconds,
            decode_seconds: generation.decode_seconds,
            finish: finish as u64,
        }
    }
}
