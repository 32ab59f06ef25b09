//! Why a conversation cannot be made into a prompt.

use std::path::PathBuf;

use waste_common::error::{Coded, Exit};
use waste_common::json::JsonError;

/// Why a chat format cannot be used, or a conversation not be rendered.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ChatError {
    #[error(
        "no chat format is known for {}: its tokenizer has neither the XTML markers nor the Kimi turn markers, and \
         there is no chat.json; raw completion works", dir.display()
    )]
    NoFormat { dir: PathBuf },
    #[error("cannot read the chat format: {0}")]
    Read(#[from] JsonError),
    #[error("the chat format {} cannot be used: {why}", path.display())]
    File { path: PathBuf, why: String },
    /// A field of the request that this chat format has no place for.
    #[error("{field}: this model's chat format has none")]
    Unsupported { field: &'static str },
    /// A message, such as `messages[3].tool_calls[0]`, that cannot be rendered.
    #[error("{param}: {why}")]
    Message { param: String, why: String },
    #[error("the model's tokenizer has no `<|media_pad|>` where images could stand")]
    NoPlaceholder,
    #[error("the messages have {parts} images, but {given} are given")]
    Images { parts: usize, given: usize },
}

impl ChatError {
    pub(super) fn message(index: usize, field: &str, why: impl Into<String>) -> ChatError {
        ChatError::Message { param: format!("messages[{index}]{field}"), why: why.into() }
    }

    /// The field of the request it is about.
    pub fn param(&self) -> Option<&str> {
        match self {
            ChatError::Unsupported { field } => Some(field),
            ChatError::Message { param, .. } => Some(param),
            ChatError::Images { .. } => Some("messages"),
            _ => None,
        }
    }
}

impl Coded for ChatError {
    fn exit(&self) -> Exit {
        match self {
            ChatError::Unsupported { .. } => Exit::Usage,
            _ => Exit::Data,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            ChatError::NoFormat { .. } => "unsupported_chat_format",
            ChatError::Read(error) => error.code(),
            ChatError::File { .. } => "invalid_chat_format",
            ChatError::Unsupported { .. } => "unsupported_parameter",
            ChatError::NoPlaceholder => "no_placeholder",
            ChatError::Message { .. } | ChatError::Images { .. } => "invalid_messages",
        }
    }
}
