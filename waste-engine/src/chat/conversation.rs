//! What is said: messages, and what goes with them into a prompt.

use super::error::ChatError;
use super::json::{Json, Object};

/// One message.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// Instructions, or tools that come in later.
    System {
        /// Who speaks; empty is nobody in particular.
        name: String,
        /// What is said; not rendered if there are tools.
        content: Vec<Part>,
        /// Whole tool entries, declared at this point of the conversation.
        tools: Vec<Json>,
    },
    /// The person.
    User {
        /// Who speaks.
        name: String,
        /// What is said.
        content: Vec<Part>,
    },
    /// The model.
    Assistant {
        /// Who speaks.
        name: String,
        /// What it thought; blank is nothing.
        reasoning: String,
        /// What it answered.
        content: Vec<Part>,
        /// The tools it called.
        calls: Vec<Call>,
    },
    /// What a tool answered.
    Tool {
        /// The id of the call.
        id: Option<String>,
        /// The tool's name, if no call tells it.
        name: String,
        /// What it answered.
        content: Vec<Part>,
    },
}

impl Message {
    /// A system message of plain text.
    pub fn system(text: impl Into<String>) -> Message {
        Message::System { name: String::new(), content: vec![Part::Text(text.into())], tools: Vec::new() }
    }

    /// A user message of plain text.
    pub fn user(text: impl Into<String>) -> Message {
        Message::User { name: String::new(), content: vec![Part::Text(text.into())] }
    }

    /// What is said, as far as it stands in a prompt.
    pub fn content(&self) -> &[Part] {
        match self {
            Message::System { tools, .. } if !tools.is_empty() => &[],
            Message::System { content, .. }
            | Message::User { content, .. }
            | Message::Assistant { content, .. }
            | Message::Tool { content, .. } => content,
        }
    }
}

/// A part of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Text. Parts are tokenized one by one, never joined.
    Text(String),
    /// The one of [`Prompt::images`] at this place.
    Image(usize),
}

/// A tool call of an earlier answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// What results refer to.
    pub id: Option<String>,
    /// The tool; not empty.
    pub name: String,
    /// With what.
    pub arguments: Arguments,
}

/// The arguments of a call, in one of the two ways APIs write them.
#[derive(Clone, Debug, PartialEq)]
pub enum Arguments {
    /// An object.
    Object(Object),
    /// JSON text, or what was meant to be.
    Text(String),
}

/// An image, as far as the prompt is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Image {
    /// Pixels of the source image.
    pub width: u32,
    /// Pixels of the source image.
    pub height: u32,
    /// Embeddings the vision tower makes of it; the placeholder is repeated so often.
    pub rows: usize,
}

/// How much the model is to think.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Effort {
    Low,
    High,
    Max,
}

impl Effort {
    /// All of them.
    pub const ALL: [Effort; 3] = [Effort::Low, Effort::High, Effort::Max];

    /// As the model reads it.
    pub fn name(self) -> &'static str {
        match self {
            Effort::Low => "low",
            Effort::High => "high",
            Effort::Max => "max",
        }
    }
}

impl std::str::FromStr for Effort {
    type Err = String;

    fn from_str(text: &str) -> Result<Effort, String> {
        let found = Effort::ALL.into_iter().find(|effort| effort.name() == text);
        found.ok_or_else(|| "expected low, high or max".to_owned())
    }
}

/// Whether the prompt says that tools must or must not be called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// It says nothing.
    #[default]
    Auto,
    /// They must not.
    None,
    /// They must.
    Required,
}

/// What the prompt says about the form of the answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ResponseFormat {
    /// Nothing.
    #[default]
    Text,
    /// It is JSON.
    JsonObject,
    /// It is JSON of this schema.
    JsonSchema(Json),
}

/// Everything a prompt is made of. The default is an empty conversation, thinking, that opens an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    /// The conversation.
    pub messages: Vec<Message>,
    /// Whole tool entries (`{"type":"function","function":{…}}`).
    pub tools: Vec<Json>,
    /// Whether to call them.
    pub tool_choice: ToolChoice,
    /// The form of the answer.
    pub response_format: ResponseFormat,
    /// Whether the model thinks before it answers.
    pub thinking: bool,
    /// How much; `None` says nothing about it. Ignored without thinking.
    pub effort: Option<Effort>,
    /// The images of all messages; each is in exactly one of them.
    pub images: Vec<Image>,
    /// Whether the prompt ends with an answer to be written.
    pub answer: bool,
}

impl Default for Prompt {
    fn default() -> Prompt {
        Prompt {
            messages: Vec::new(),
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            response_format: ResponseFormat::Text,
            thinking: true,
            effort: None,
            images: Vec::new(),
            answer: true,
        }
    }
}

impl Prompt {
    /// Refuses images that are not each in exactly one message.
    pub(super) fn check_images(&self) -> Result<(), ChatError> {
        let parts = self.messages.iter().flat_map(Message::content);
        let mut found: Vec<usize> = parts
            .filter_map(|part| match part {
                Part::Image(index) => Some(*index),
                Part::Text(_) => None,
            })
            .collect();
        found.sort_unstable();
        match found.iter().copied().eq(0..self.images.len()) {
            true => Ok(()),
            false => Err(ChatError::Images { parts: found.len(), given: self.images.len() }),
        }
    }
}
