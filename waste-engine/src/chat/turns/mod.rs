//! The chat format of Kimi-Linear and the K2 family: turns between `<|im_…|>` markers.

pub mod reply;

use std::collections::HashMap;

use super::conversation::{Arguments, Call, Message, Part, Prompt};
use super::error::ChatError;
use super::json::{Json, Style};
use super::segment::Segments;
use crate::tokenizer::Tokenizer;

const USER: &str = "<|im_user|>";
const ASSISTANT: &str = "<|im_assistant|>";
const SYSTEM: &str = "<|im_system|>";
const MIDDLE: &str = "<|im_middle|>";
const END: &str = "<|im_end|>";
const SECTION_BEGIN: &str = "<|tool_calls_section_begin|>";
const SECTION_END: &str = "<|tool_calls_section_end|>";
const CALL_BEGIN: &str = "<|tool_call_begin|>";
const ARGUMENT_BEGIN: &str = "<|tool_call_argument_begin|>";
const CALL_END: &str = "<|tool_call_end|>";

/// The ids of the markers in an answer.
#[derive(Clone, Copy, Debug)]
pub struct Ids {
    /// Ends a turn.
    pub end: u32,
    section_begin: Option<u32>,
    section_end: Option<u32>,
    call_begin: Option<u32>,
    argument_begin: Option<u32>,
    call_end: Option<u32>,
}

impl Ids {
    /// Those of a tokenizer that has all the markers of turns.
    pub fn of(tokenizer: &Tokenizer) -> Option<Ids> {
        let id = |name| tokenizer.special_id(name);
        [USER, ASSISTANT, SYSTEM, MIDDLE].into_iter().try_for_each(|name| id(name).map(|_| ()))?;
        Some(Ids {
            end: id(END)?,
            section_begin: id(SECTION_BEGIN),
            section_end: id(SECTION_END),
            call_begin: id(CALL_BEGIN),
            argument_begin: id(ARGUMENT_BEGIN),
            call_end: id(CALL_END),
        })
    }
}

/// The prompt of a conversation.
///
/// # Errors
/// Thinking, an effort, an image or reasoning, for which the format has no place; a tool's answer to no call.
pub fn render(prompt: &Prompt) -> Result<Segments, ChatError> {
    if prompt.thinking {
        return Err(ChatError::Unsupported { field: "thinking" });
    }
    if prompt.effort.is_some() {
        return Err(ChatError::Unsupported { field: "reasoning_effort" });
    }
    let mut out = Segments::default();
    if !prompt.tools.is_empty() {
        begin(&mut out, SYSTEM, "tool_declare");
        out.content(&Json::Array(prompt.tools.clone()).text(Style::Compact));
        out.markup(END);
    }
    // The ids of calls as they stand in the prompt, by those the client gave.
    let mut ids: HashMap<&str, String> = HashMap::new();
    for (index, message) in prompt.messages.iter().enumerate() {
        let mut body = String::new();
        match message {
            Message::System { tools, .. } if !tools.is_empty() => {
                return Err(ChatError::Unsupported { field: "messages.tools" });
            }
            Message::System { name, .. } => begin(&mut out, SYSTEM, label(name, "system")),
            Message::User { name, .. } => begin(&mut out, USER, label(name, "user")),
            Message::Assistant { name, reasoning, calls, .. } => {
                if !reasoning.trim().is_empty() {
                    return Err(ChatError::Unsupported { field: "messages.reasoning_content" });
                }
                begin(&mut out, ASSISTANT, label(name, "assistant"));
                for (n, call) in calls.iter().enumerate() {
                    if let Some(id) = &call.id {
                        ids.insert(id, call_id(call, n));
                    }
                }
            }
            Message::Tool { id, name, .. } => {
                let id = id.as_deref().and_then(|id| ids.get(id)).ok_or_else(|| {
                    ChatError::message(index, ".tool_call_id", "no earlier assistant message has such a call")
                })?;
                begin(&mut out, SYSTEM, label(name, "tool"));
                body = format!("## Return of {id}\n");
            }
        }
        for part in message.content() {
            match part {
                Part::Text(text) => body.push_str(text),
                Part::Image(_) => return Err(ChatError::Unsupported { field: "messages.content.image_url" }),
            }
        }
        out.content(&body);
        if let Message::Assistant { calls, .. } = message
            && !calls.is_empty()
        {
            out.markup(SECTION_BEGIN);
            for (n, call) in calls.iter().enumerate() {
                out.markup(CALL_BEGIN);
                out.content(&call_id(call, n));
                out.markup(ARGUMENT_BEGIN);
                match &call.arguments {
                    Arguments::Object(object) => {
                        out.content(&Json::Object(object.clone()).text(Style::Spaced))
                    }
                    Arguments::Text(text) if text.trim().is_empty() => out.content("{}"),
                    Arguments::Text(text) => out.content(text),
                }
                out.markup(CALL_END);
            }
            out.markup(SECTION_END);
        }
        out.markup(END);
    }
    out.end_conversation();
    if prompt.answer {
        begin(&mut out, ASSISTANT, "assistant");
    }
    Ok(out)
}

/// The label may come from a client, so it is content; around it the ids are those of one markup segment.
fn begin(out: &mut Segments, marker: &str, label: &str) {
    out.markup(marker);
    out.content(label);
    out.markup(MIDDLE);
}

fn label<'a>(name: &'a str, role: &'a str) -> &'a str {
    if name.is_empty() { role } else { name }
}

fn call_id(call: &Call, n: usize) -> String {
    format!("functions.{}:{n}", call.name)
}
