//! The chat format of Kimi K3: elements between `<|open|>`, `<|sep|>` and `<|close|>`.
//!
//! Only the four markers and media blocks are markup. Names, attributes and bodies are content, each a segment of its
//! own, as the model was trained.

mod header;
mod notes;
pub mod reply;
mod results;

use super::conversation::{Arguments, Call, Image, Message, Part, Prompt, ResponseFormat, ToolChoice};
use super::error::ChatError;
use super::json::{Json, Object, Style};
use super::segment::Segments;
use crate::tokenizer::Tokenizer;

const OPEN: &str = "<|open|>";
const CLOSE: &str = "<|close|>";
const SEP: &str = "<|sep|>";
const END: &str = "<|end_of_msg|>";

/// The markers' ids.
#[derive(Clone, Copy, Debug)]
pub struct Ids {
    open: u32,
    close: u32,
    sep: u32,
    /// Ends a message.
    pub end: u32,
}

impl Ids {
    /// Those of a tokenizer that has them all.
    pub fn of(tokenizer: &Tokenizer) -> Option<Ids> {
        Some(Ids {
            open: tokenizer.special_id(OPEN)?,
            close: tokenizer.special_id(CLOSE)?,
            sep: tokenizer.special_id(SEP)?,
            end: tokenizer.special_id(END)?,
        })
    }
}

/// The prompt of a conversation.
///
/// # Errors
/// A message that cannot be rendered; images that are not those of the messages.
pub fn render(prompt: &Prompt) -> Result<Segments, ChatError> {
    prompt.check_images()?;
    let mut writer = Writer { out: Segments::default(), images: &prompt.images };
    if !prompt.tools.is_empty() {
        writer.note("tool-declare", &notes::tools(&prompt.tools));
    }
    if let Some(effort) = prompt.effort.filter(|_| prompt.thinking) {
        writer.note("thinking-effort", &notes::effort(effort));
    }
    for message in results::resolve(&prompt.messages)? {
        writer.message(&message, prompt.thinking)?;
    }
    writer.out.end_conversation();
    match prompt.tool_choice {
        ToolChoice::Auto => (),
        ToolChoice::Required => writer.note("tool-choice", notes::TOOLS_REQUIRED),
        ToolChoice::None => writer.note("tool-choice", notes::TOOLS_NONE),
    }
    match &prompt.response_format {
        ResponseFormat::Text => (),
        ResponseFormat::JsonObject => writer.note("response-format", notes::JSON_OBJECT),
        ResponseFormat::JsonSchema(schema) => writer.note("response-format", &notes::schema(schema)),
    }
    if prompt.answer {
        writer.open("message", &[("role", "assistant")]);
        writer.open(if prompt.thinking { "think" } else { "response" }, &[]);
    }
    Ok(writer.out)
}

/// What ends the think channel, and begins the answer.
pub fn end_thinking() -> Segments {
    let mut writer = Writer { out: Segments::default(), images: &[] };
    writer.close("think");
    writer.open("response", &[]);
    writer.out
}

struct Writer<'a> {
    out: Segments,
    images: &'a [Image],
}

impl Writer<'_> {
    fn open(&mut self, name: &str, attributes: &[(&str, &str)]) {
        self.out.markup(OPEN);
        self.out.content(name);
        for (key, value) in attributes {
            self.out.content(&format!(" {key}"));
            self.out.content("=\"");
            self.out.content(&value.replace('&', "&amp;").replace('"', "&quot;"));
            self.out.content("\"");
        }
        self.out.markup(SEP);
    }

    fn close(&mut self, name: &str) {
        self.out.markup(CLOSE);
        self.out.content(name);
        self.out.markup(SEP);
    }

    fn element(&mut self, name: &str, attributes: &[(&str, &str)], text: &str) {
        self.open(name, attributes);
        self.out.content(text);
        self.close(name);
    }

    fn end(&mut self) {
        self.close("message");
        self.out.markup(END);
    }

    /// A system message of the format's own.
    fn note(&mut self, kind: &str, text: &str) {
        self.element("message", &[("role", "system"), ("type", kind)], text);
        self.out.markup(END);
    }

    fn message(&mut self, resolved: &results::Resolved<'_>, thinking: bool) -> Result<(), ChatError> {
        let index = resolved.index;
        match resolved.message {
            Message::System { tools, .. } if !tools.is_empty() => {
                self.note("tool-declare", &notes::more_tools(tools));
            }
            Message::System { name, content, .. } => {
                self.open_message("system", name);
                self.parts(content);
                self.end();
            }
            Message::User { name, content } => {
                self.open_message("user", name);
                self.parts(content);
                self.end();
            }
            Message::Assistant { name, reasoning, content, calls } => {
                self.open_message("assistant", name);
                if thinking {
                    let reasoning = if reasoning.trim().is_empty() { "" } else { reasoning };
                    self.element("think", &[], reasoning);
                }
                self.open("response", &[]);
                self.parts(content);
                self.close("response");
                if !calls.is_empty() {
                    self.open("tools", &[]);
                    for (i, call) in calls.iter().enumerate() {
                        self.call(call, i)
                            .map_err(|why| ChatError::message(index, &format!(".tool_calls[{i}]"), why))?;
                    }
                    self.close("tools");
                }
                self.end();
            }
            Message::Tool { content, .. } => {
                let result = resolved.result.as_ref();
                let (name, position) = result.map_or(("", 0), |result| (result.name.as_str(), result.index));
                let attributes = [("role", "tool"), ("tool", name), ("index", &position.to_string())];
                self.open("message", &attributes);
                self.parts(content);
                self.end();
            }
        }
        Ok(())
    }

    fn open_message(&mut self, role: &str, name: &str) {
        let attributes = [("role", role), ("name", name)];
        self.open("message", if name.is_empty() { &attributes[..1] } else { &attributes });
    }

    fn parts(&mut self, parts: &[Part]) {
        for part in parts {
            match part {
                Part::Text(text) => self.out.content(text),
                Part::Image(index) => {
                    if let Some(image) = self.images.get(*index) {
                        self.out.image(*index, image);
                    }
                }
            }
        }
    }

    fn call(&mut self, call: &Call, position: usize) -> Result<(), String> {
        if call.name.is_empty() {
            return Err("the call names no tool".to_owned());
        }
        self.open("call", &[("tool", &call.name), ("index", &(position + 1).to_string())]);
        let parsed;
        let arguments = match &call.arguments {
            Arguments::Object(object) => Some(object),
            Arguments::Text(text) => {
                parsed = parse_arguments(text)?;
                parsed.as_ref()
            }
        };
        match (arguments, &call.arguments) {
            (Some(arguments), _) => {
                for (key, value) in arguments {
                    let text = match value {
                        Json::String(text) => text.clone(),
                        other => other.text(Style::Spaced),
                    };
                    self.element("argument", &[("key", key), ("type", value.kind())], &text);
                }
            }
            (None, Arguments::Text(text)) => self.element("json", &[("type", "object")], text),
            (None, Arguments::Object(_)) => (),
        }
        self.close("call");
        Ok(())
    }
}

/// The arguments in a text: blank is none; `None` if it is not JSON.
fn parse_arguments(text: &str) -> Result<Option<Object>, String> {
    if text.trim().is_empty() {
        return Ok(Some(Object::new()));
    }
    match Json::parse(text) {
        Ok(Json::Object(object)) => Ok(Some(object)),
        Ok(other) => Err(format!("the arguments are no object but of type {}", other.kind())),
        Err(_) => Ok(None),
    }
}
