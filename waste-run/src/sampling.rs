//! How the next token is chosen, and which ones end a text.

use std::path::Path;

use waste_common::cli::Failure;
use waste_common::config::ModelConfig;
use waste_engine::defaults::Defaults;
use waste_engine::sampler::{Mask, SamplerOptions};
use waste_engine::saved::Manner;
use waste_engine::tokenizer::Tokenizer;

use crate::args::{FormArgs, SamplingArgs};
use crate::form;

/// The sampler's options; `otherwise` has those that are not given.
pub fn options(args: &SamplingArgs, otherwise: SamplerOptions) -> SamplerOptions {
    SamplerOptions {
        temperature: args.temp.unwrap_or(otherwise.temperature),
        top_k: args.top_k.unwrap_or(otherwise.top_k),
        top_p: args.top_p.unwrap_or(otherwise.top_p),
        min_p: args.min_p.unwrap_or(otherwise.min_p),
        seed: args.seed.or(otherwise.seed),
        presence_penalty: args.presence_penalty.unwrap_or(otherwise.presence_penalty),
        frequency_penalty: args.frequency_penalty.unwrap_or(otherwise.frequency_penalty),
        ..otherwise
    }
}

/// How an answer is written; `otherwise` has what is not given.
///
/// # Errors
/// A schema or grammar cannot be read.
pub fn manner(args: &SamplingArgs, form: &FormArgs, otherwise: Manner) -> Result<Manner, Failure> {
    Ok(Manner {
        sampler: options(args, otherwise.sampler),
        stop: if args.stop.is_empty() { otherwise.stop } else { args.stop.clone() },
        masked: otherwise.masked && !args.no_mask,
        form: form::given(form)?.or(otherwise.form),
    })
}

/// The tokens that have a place in a text, if it is `masked`.
pub fn mask(masked: bool, config: &ModelConfig, tokenizer: &Tokenizer) -> Option<Mask> {
    masked.then(|| tokenizer.text_mask(config.vocab))
}

/// Every id that ends a text.
pub fn stop_ids(
    config: &ModelConfig,
    tokenizer: Option<&Tokenizer>,
    dir: &Path,
) -> Result<Vec<u32>, Failure> {
    Ok(Defaults::read(dir, config, tokenizer)?.stop_ids)
}
