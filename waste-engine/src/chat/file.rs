//! The chat format of other models: what stands around messages, in the container's `chat.json`.

use std::path::Path;

use serde::Deserialize;
use waste_common::json;

use super::conversation::{Message, Part, Prompt};
use super::error::ChatError;
use super::segment::Segments;
use crate::tokenizer::Tokenizer;

/// The file's name.
pub const CHAT_FILE: &str = "chat.json";
const BYTES_MAX: u64 = 1 << 16;

/// What stands around the messages of each role.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ChatFile {
    system: Option<(String, String)>,
    user: (String, String),
    assistant: (String, String),
    open: String,
}

impl ChatFile {
    /// Reads the file and checks it against the tokenizer: every `<|…|>` in it must be one special id, and one must
    /// end the assistant's messages.
    ///
    /// # Errors
    /// The file cannot be read, or not be used.
    pub fn load(path: &Path, tokenizer: &Tokenizer) -> Result<ChatFile, ChatError> {
        let refused = |why: String| ChatError::File { path: path.to_owned(), why };
        let file: ChatFile = serde_json::from_slice(&json::read_bounded(path, BYTES_MAX)?)
            .map_err(|error| refused(error.to_string()))?;
        let texts = [&file.user, &file.assistant].into_iter().chain(&file.system);
        for text in texts.flat_map(|(prefix, suffix)| [prefix, suffix]).chain([&file.open]) {
            if let Some(marker) = unknown_marker(text, tokenizer) {
                return Err(refused(format!("its marker {marker} is no special token of the tokenizer")));
            }
        }
        match file.end(tokenizer) {
            Some(_) => Ok(file),
            None => Err(refused("no special token ends the assistant's messages".to_owned())),
        }
    }

    /// The special id that ends an answer.
    pub fn end(&self, tokenizer: &Tokenizer) -> Option<u32> {
        let suffix = tokenizer.encode_markup(&self.assistant.1);
        suffix.into_iter().find(|id| tokenizer.is_special(*id))
    }

    /// What follows the end of an answer, up to the next message.
    pub(super) fn closing(&self) -> Segments {
        let mut out = Segments::default();
        out.markup(&self.assistant.1);
        out
    }
}

/// The prompt of a conversation; without a format, the bare texts.
///
/// # Errors
/// Anything but text of the roles the file names.
pub fn render(file: Option<&ChatFile>, prompt: &Prompt) -> Result<Segments, ChatError> {
    for (given, field) in [
        (prompt.thinking, "thinking"),
        (prompt.effort.is_some(), "reasoning_effort"),
        (!prompt.tools.is_empty(), "tools"),
    ] {
        if given {
            return Err(ChatError::Unsupported { field });
        }
    }
    let mut out = Segments::default();
    for (index, message) in prompt.messages.iter().enumerate() {
        let around = match message {
            Message::System { tools, .. } if !tools.is_empty() => {
                return Err(ChatError::Unsupported { field: "messages.tools" });
            }
            Message::Assistant { calls, .. } if !calls.is_empty() => {
                return Err(ChatError::Unsupported { field: "messages.tool_calls" });
            }
            Message::Assistant { reasoning, .. } if !reasoning.trim().is_empty() => {
                return Err(ChatError::Unsupported { field: "messages.reasoning_content" });
            }
            Message::Tool { .. } => return Err(ChatError::Unsupported { field: "messages.tool_call_id" }),
            Message::System { .. } => file.map(|file| {
                file.system.as_ref().ok_or_else(|| {
                    ChatError::message(index, ".role", "this model's chat format has no system messages")
                })
            }),
            Message::User { .. } => file.map(|file| Ok(&file.user)),
            Message::Assistant { .. } => file.map(|file| Ok(&file.assistant)),
        };
        let around = around.transpose()?;
        out.markup(around.map_or("", |(prefix, _)| prefix));
        for part in message.content() {
            match part {
                Part::Text(text) => out.content(text),
                Part::Image(_) => {
                    return Err(ChatError::Unsupported { field: "messages.content.image_url" });
                }
            }
        }
        out.markup(around.map_or("", |(_, suffix)| suffix));
    }
    out.end_conversation();
    if prompt.answer {
        out.markup(file.map_or("", |file| &file.open));
    }
    Ok(out)
}

/// The first `<|…|>` that is not a special token.
fn unknown_marker<'a>(text: &'a str, tokenizer: &Tokenizer) -> Option<&'a str> {
    let mut rest = text;
    while let Some(start) = rest.find("<|") {
        let end = rest[start..].find("|>").map_or(rest.len(), |length| start + length + 2);
        let marker = &rest[start..end];
        if tokenizer.special_id(marker).is_none() {
            return Some(marker);
        }
        rest = &rest[end..];
    }
    None
}
