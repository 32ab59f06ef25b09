//! How the next token is chosen, and which ones end a text.

use std::path::Path;

use waste_common::cli::Failure;
use waste_common::config::ModelConfig;
use waste_engine::defaults::Defaults;
use waste_engine::sampler::{Mask, SamplerOptions};
use waste_engine::tokenizer::Tokenizer;

use crate::args::SamplingArgs;

/// The sampler's options.
pub fn options(args: &SamplingArgs) -> SamplerOptions {
    SamplerOptions {
        temperature: args.temp,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        seed: args.seed,
        presence_penalty: args.presence_penalty,
        frequency_penalty: args.frequency_penalty,
        ..SamplerOptions::default()
    }
}

/// The tokens that have a place in a text.
pub fn mask(args: &SamplingArgs, config: &ModelConfig, tokenizer: &Tokenizer) -> Option<Mask> {
    (!args.no_mask).then(|| tokenizer.text_mask(config.vocab))
}

/// Every id that ends a text.
pub fn stop_ids(
    config: &ModelConfig,
    tokenizer: Option<&Tokenizer>,
    dir: &Path,
) -> Result<Vec<u32>, Failure> {
    Ok(Defaults::read(dir, config, tokenizer)?.stop_ids)
}
