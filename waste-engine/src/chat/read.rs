//! Messages as the OpenAI API writes them.

use super::conversation::{Arguments, Call, Message, Part, ResponseFormat};
use super::error::ChatError;
use super::json::{Json, Object};

/// Messages, and the images in them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Messages {
    /// The messages.
    pub list: Vec<Message>,
    /// The content parts that are images; [`Part::Image`] says which.
    pub images: Vec<ImagePart>,
}

/// A content part that is an image.
#[derive(Clone, Debug, PartialEq)]
pub struct ImagePart {
    /// Where it stands, such as `messages[3].content[0]`.
    pub param: String,
    /// The part, such as `{"type":"image_url","image_url":{"url":…}}`.
    pub json: Json,
}

impl ImagePart {
    /// What it says of where the image is: `image_url` or `image`, a string or an object with an `url`.
    pub fn url(&self) -> Option<&str> {
        let given = self.json.get("image_url").or_else(|| self.json.get("image"))?;
        given.as_str().or_else(|| given.get("url")?.as_str())
    }
}

/// Reads a list of messages: roles system, developer (= system), user, assistant and tool.
///
/// # Errors
/// The first message that is none, with its place, such as `messages[3].content[0].type`.
pub fn messages(json: &Json) -> Result<Messages, ChatError> {
    let wrong = |why: &str| ChatError::Message { param: "messages".to_owned(), why: why.to_owned() };
    let mut messages = Messages::default();
    for (index, json) in json.as_array().ok_or_else(|| wrong("expected a list"))?.iter().enumerate() {
        let object = json.as_object().ok_or_else(|| ChatError::message(index, "", "expected an object"))?;
        let message = Reader { index, object, images: &mut messages.images }.message()?;
        messages.list.push(message);
    }
    Ok(messages)
}

/// Reads `response_format`; of an unknown type it says nothing to the model.
pub fn response_format(json: &Json) -> ResponseFormat {
    let schema = || {
        let outer = json.get("json_schema")?;
        Some(outer.get("schema").or_else(|| outer.get("json_schema")).unwrap_or(outer).clone())
    };
    match json.get("type").and_then(Json::as_str) {
        Some("json_object") => ResponseFormat::JsonObject,
        Some("json_schema") => ResponseFormat::JsonSchema(schema().unwrap_or(Json::Null)),
        _ => ResponseFormat::Text,
    }
}

struct Reader<'a> {
    index: usize,
    object: &'a Object,
    images: &'a mut Vec<ImagePart>,
}

impl Reader<'_> {
    fn error(&self, field: &str, why: impl Into<String>) -> ChatError {
        ChatError::message(self.index, field, why)
    }

    fn message(&mut self) -> Result<Message, ChatError> {
        let name = self.text("name")?;
        match self.object.get("role").and_then(Json::as_str) {
            Some("system" | "developer") => {
                let tools = match self.object.get("tools") {
                    None | Some(Json::Null) => Vec::new(),
                    Some(Json::Array(tools)) => tools.clone(),
                    Some(other) => return Err(self.expected(".tools", "a list", other)),
                };
                // Beside tools it is not rendered.
                let content = if tools.is_empty() { self.content()? } else { Vec::new() };
                Ok(Message::System { name, content, tools })
            }
            Some("user") => Ok(Message::User { name, content: self.content()? }),
            Some("assistant") => {
                let reasoning = match self.text("reasoning_content")? {
                    text if text.trim().is_empty() => self.text("reasoning")?,
                    text => text,
                };
                let mut content = self.content()?;
                let refusal = self.text("refusal")?;
                if content.is_empty() && !refusal.is_empty() {
                    content.push(Part::Text(refusal));
                }
                Ok(Message::Assistant { name, reasoning, content, calls: self.calls()? })
            }
            Some("tool") => {
                let id = self.object.get("tool_call_id").or_else(|| self.object.get("id"));
                let id = id.and_then(Json::as_str).map(str::to_owned);
                let tool = self.text("tool")?;
                let name = if tool.is_empty() { name } else { tool };
                Ok(Message::Tool { id, name, content: self.content()? })
            }
            _ => Err(self.error(".role", "expected system, developer, user, assistant or tool")),
        }
    }

    fn expected(&self, field: &str, what: &str, found: &Json) -> ChatError {
        self.error(field, format!("expected {what}, found one of type {}", found.kind()))
    }

    /// A string, or nothing.
    fn text(&self, key: &str) -> Result<String, ChatError> {
        match self.object.get(key) {
            None | Some(Json::Null) => Ok(String::new()),
            Some(Json::String(text)) => Ok(text.clone()),
            Some(other) => Err(self.expected(&format!(".{key}"), "a string", other)),
        }
    }

    fn content(&mut self) -> Result<Vec<Part>, ChatError> {
        match self.object.get("content") {
            None | Some(Json::Null) => Ok(Vec::new()),
            Some(Json::String(text)) => Ok(vec![Part::Text(text.clone())]),
            Some(Json::Array(parts)) => {
                parts.iter().enumerate().map(|(i, part)| self.part(i, part)).collect()
            }
            Some(other) => Err(self.expected(".content", "a string or a list of parts", other)),
        }
    }

    fn part(&mut self, i: usize, part: &Json) -> Result<Part, ChatError> {
        let text = |key: &str| match part.get(key).and_then(Json::as_str) {
            Some(text) => Ok(Part::Text(text.to_owned())),
            None => Err(self.error(&format!(".content[{i}].{key}"), "expected a string")),
        };
        match part.get("type").and_then(Json::as_str) {
            Some("text" | "input_text") => text("text"),
            Some("refusal") => text("refusal"),
            Some("image_url" | "image" | "input_image") => {
                let param = format!("messages[{}].content[{i}]", self.index);
                self.images.push(ImagePart { param, json: part.clone() });
                Ok(Part::Image(self.images.len() - 1))
            }
            _ => {
                Err(self.error(&format!(".content[{i}].type"), "expected text, image_url, image or refusal"))
            }
        }
    }

    fn calls(&self) -> Result<Vec<Call>, ChatError> {
        match self.object.get("tool_calls") {
            None | Some(Json::Null) => Ok(Vec::new()),
            Some(Json::Array(calls)) => {
                calls.iter().enumerate().map(|(i, call)| self.call(i, call)).collect()
            }
            Some(other) => Err(self.expected(".tool_calls", "a list", other)),
        }
    }

    /// A call, nested in `function` or flat.
    fn call(&self, i: usize, call: &Json) -> Result<Call, ChatError> {
        let function = call.get("function").unwrap_or(call);
        let place = format!(".tool_calls[{i}]");
        let name = function.get("name").and_then(Json::as_str).filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| self.error(&place, "the call names no tool"))?.to_owned();
        let arguments = match function.get("arguments") {
            None | Some(Json::Null) => Arguments::Object(Object::new()),
            Some(Json::Object(object)) => Arguments::Object(object.clone()),
            Some(Json::String(text)) => Arguments::Text(text.clone()),
            Some(other) => {
                return Err(self.expected(&format!("{place}.arguments"), "an object or a string", other));
            }
        };
        Ok(Call { id: call.get("id").and_then(Json::as_str).map(str::to_owned), name, arguments })
    }
}
