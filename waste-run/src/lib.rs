//! Runs a model: text, evaluation, perplexity, tokens.
#![forbid(unsafe_code)]
