//! What can go wrong in the engine.

use std::path::PathBuf;

use serde_json::{Map, Value};
use waste_common::checkpoint::CheckpointError;
use waste_common::config::ConfigError;
use waste_common::container::ContainerError;
use waste_common::error::{Coded, Exit};
use waste_common::io::{OutOfMemory, ReadError};
use waste_common::json::JsonError;

use crate::chat::ChatError;
use crate::sampler::{SamplerError, StopError};
use crate::saved::SavedError;
use crate::tokenizer::TokenizerError;

/// An engine error.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum EngineError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Container(#[from] ContainerError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    #[error(transparent)]
    Stop(#[from] StopError),
    #[error(transparent)]
    Chat(#[from] ChatError),
    #[error(transparent)]
    Json(#[from] JsonError),
    #[cfg(feature = "vision")]
    #[error(transparent)]
    Image(#[from] crate::vision::ImageError),
    #[error("this model has no vision tower: it takes no images")]
    NoVision,
    #[cfg(feature = "grammar")]
    #[error(transparent)]
    Grammar(#[from] crate::grammar::GrammarError),
    #[error(transparent)]
    Saved(#[from] SavedError),
    #[error("cannot write the text: {0}")]
    Sink(String),
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error(transparent)]
    Memory(#[from] OutOfMemory),
    #[error("{} is neither a container (manifest.json, which waste-convert writes last) nor a checkpoint (config.json and safetensors)", path.display())]
    NotAModel { path: PathBuf },
    #[error("the kernel set `{name}` cannot be used: {why}")]
    Kernels { name: String, why: String },
    #[error("tensor `{name}` has shape {found:?}; the configuration needs {expected:?}")]
    Shape { name: String, found: Vec<usize>, expected: Vec<usize> },
    #[error(
        "the manifest's tensor_prefix is {found:?}, but its configuration means {expected:?}: it is damaged (see waste-verify)"
    )]
    Prefix { found: String, expected: &'static str },
    #[error("{what}: {why}")]
    Option { what: &'static str, why: String },
    #[error("cannot start {what}: {source}")]
    Thread { what: &'static str, source: std::io::Error },
    #[error("none of the {slots} expert cache slots could be freed")]
    NoSlot { slots: usize },
    #[error("the reader of expert {expert} in the MoE layer of index {moe} panicked: a bug of the engine")]
    ReadPanicked { moe: u32, expert: u32 },
    #[error("layer {layer}, expert {expert}: {source}")]
    Expert { layer: usize, expert: usize, source: Box<EngineError> },
    #[error(
        "the context is full: {position} tokens are in it, {wanted} more do not fit into {ctx} (see --ctx)"
    )]
    ContextFull { position: usize, wanted: usize, ctx: usize },
    #[error("token {position} has id {id}; the model's vocabulary has {vocab}")]
    TokenOutOfRange { position: usize, id: u32, vocab: usize },
    #[error(
        "the model computed a value that is not finite at position {position}: the weights are damaged (see waste-verify)"
    )]
    NotFinite { position: usize },
    #[error("interrupted")]
    Interrupted,
}

impl EngineError {
    /// Refuses tokens that do not fit behind `position` into the context, or that the model does not have.
    pub fn check_tokens(
        tokens: &[u32],
        position: usize,
        ctx: usize,
        vocab: usize,
    ) -> Result<(), EngineError> {
        if tokens.len() > ctx.saturating_sub(position) {
            return Err(EngineError::ContextFull { position, wanted: tokens.len(), ctx });
        }
        match tokens.iter().position(|&id| id as usize >= vocab) {
            Some(at) => Err(EngineError::TokenOutOfRange { position: position + at, id: tokens[at], vocab }),
            None => Ok(()),
        }
    }
}

impl Coded for EngineError {
    fn exit(&self) -> Exit {
        match self {
            EngineError::Config(error) => error.exit(),
            EngineError::Container(error) => error.exit(),
            EngineError::Checkpoint(error) => error.exit(),
            EngineError::Tokenizer(error) => error.exit(),
            EngineError::Sampler(error) => error.exit(),
            EngineError::Stop(error) => error.exit(),
            EngineError::Chat(error) => error.exit(),
            EngineError::Json(error) => error.exit(),
            EngineError::Saved(error) => error.exit(),
            #[cfg(feature = "vision")]
            EngineError::Image(error) => error.exit(),
            #[cfg(feature = "grammar")]
            EngineError::Grammar(error) => error.exit(),
            EngineError::Read(error) => error.exit(),
            EngineError::Memory(error) => error.exit(),
            EngineError::Expert { source, .. } => source.exit(),
            EngineError::Kernels { .. } | EngineError::Option { .. } => Exit::Usage,
            EngineError::ContextFull { .. } | EngineError::TokenOutOfRange { .. } => Exit::Data,
            EngineError::NoVision
            | EngineError::NotAModel { .. }
            | EngineError::Prefix { .. }
            | EngineError::Shape { .. }
            | EngineError::NotFinite { .. } => Exit::Data,
            EngineError::Thread { .. }
            | EngineError::NoSlot { .. }
            | EngineError::ReadPanicked { .. }
            | EngineError::Sink(_) => Exit::Internal,
            EngineError::Interrupted => Exit::Interrupted,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            EngineError::Config(error) => error.code(),
            EngineError::Container(error) => error.code(),
            EngineError::Checkpoint(error) => error.code(),
            EngineError::Tokenizer(error) => error.code(),
            EngineError::Sampler(error) => error.code(),
            EngineError::Stop(error) => error.code(),
            EngineError::Chat(error) => error.code(),
            EngineError::Json(error) => error.code(),
            EngineError::Saved(error) => error.code(),
            #[cfg(feature = "vision")]
            EngineError::Image(error) => error.code(),
            #[cfg(feature = "grammar")]
            EngineError::Grammar(error) => error.code(),
            EngineError::Sink(_) => "output_failed",
            EngineError::Read(error) => error.code(),
            EngineError::Memory(error) => error.code(),
            EngineError::Expert { source, .. } => source.code(),
            EngineError::NoVision => "no_vision",
            EngineError::NotAModel { .. } => "not_a_model",
            EngineError::Kernels { .. } => "kernels_unavailable",
            EngineError::Shape { .. } => "wrong_shape",
            EngineError::Prefix { .. } => "wrong_prefix",
            EngineError::Option { .. } => "invalid_option",
            EngineError::Thread { .. } => "thread_failed",
            EngineError::NoSlot { .. } => "no_cache_slot",
            EngineError::ReadPanicked { .. } => "read_panicked",
            EngineError::ContextFull { .. } => "context_full",
            EngineError::TokenOutOfRange { .. } => "token_out_of_range",
            EngineError::NotFinite { .. } => "not_finite",
            EngineError::Interrupted => "interrupted",
        }
    }

    fn fields(&self) -> Map<String, Value> {
        match self {
            EngineError::Container(error) => error.fields(),
            EngineError::Saved(error) => error.fields(),
            EngineError::Expert { layer, expert, source } => {
                let mut fields = source.fields();
                fields.insert("layer".to_owned(), (*layer).into());
                fields.insert("expert".to_owned(), (*expert).into());
                fields
            }
            _ => Map::new(),
        }
    }
}
