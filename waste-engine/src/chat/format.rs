//! Which chat format a model speaks.

use std::path::Path;

use super::conversation::Prompt;
use super::error::ChatError;
use super::file::{CHAT_FILE, ChatFile};
use super::reply::{Place, Reply, Structure};
use super::segment::Segments;
use super::{file, turns, xtml};
use crate::sampler::StopMatcher;
use crate::tokenizer::Tokenizer;

/// A chat format, with the special ids it has in a model's tokenizer.
#[derive(Clone, Debug)]
pub struct ChatFormat {
    syntax: Syntax,
    stop_ids: Vec<u32>,
}

#[derive(Clone, Debug)]
enum Syntax {
    Xtml(xtml::Ids),
    Turns(turns::Ids),
    File(ChatFile),
    Raw,
}

/// How a chat format is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// By the markers of the tokenizer, then by `chat.json`.
    #[default]
    Auto,
    /// By `chat.json` alone.
    File,
}

impl std::str::FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Choice, String> {
        match text {
            "auto" => Ok(Choice::Auto),
            "file" => Ok(Choice::File),
            _ => Err("expected auto or file".to_owned()),
        }
    }
}

impl ChatFormat {
    /// The format of the model in `dir`.
    ///
    /// # Errors
    /// It has none, or its `chat.json` cannot be used.
    pub fn find(dir: &Path, tokenizer: &Tokenizer, choice: Choice) -> Result<ChatFormat, ChatError> {
        let path = dir.join(CHAT_FILE);
        let (syntax, end) = if choice == Choice::Auto
            && let Some(ids) = xtml::Ids::of(tokenizer)
        {
            (Syntax::Xtml(ids), Some(ids.end))
        } else if choice == Choice::Auto
            && let Some(ids) = turns::Ids::of(tokenizer)
        {
            (Syntax::Turns(ids), Some(ids.end))
        // A link to nowhere is no absent file.
        } else if choice == Choice::File || path.symlink_metadata().is_ok() {
            let file = ChatFile::load(&path, tokenizer)?;
            let end = file.end(tokenizer);
            (Syntax::File(file), end)
        } else {
            return Err(ChatError::NoFormat { dir: dir.to_owned() });
        };
        let eot = if matches!(syntax, Syntax::Turns(_)) { tokenizer.special_id("[EOT]") } else { None };
        let mut stop_ids: Vec<u32> = end.into_iter().chain(tokenizer.eos()).chain(eot).collect();
        stop_ids.sort_unstable();
        stop_ids.dedup();
        Ok(ChatFormat { syntax, stop_ids })
    }

    /// No format: messages are continued as they stand.
    pub fn raw(tokenizer: &Tokenizer) -> ChatFormat {
        ChatFormat { syntax: Syntax::Raw, stop_ids: tokenizer.eos().into_iter().collect() }
    }

    /// `xtml`, `turns`, `file` or `raw`.
    pub fn name(&self) -> &'static str {
        match self.syntax {
            Syntax::Xtml(_) => "xtml",
            Syntax::Turns(_) => "turns",
            Syntax::File(_) => "file",
            Syntax::Raw => "raw",
        }
    }

    /// Whether answers may begin with thinking.
    pub fn thinks(&self) -> bool {
        matches!(self.syntax, Syntax::Xtml(_))
    }

    /// Whether tools can be declared and called.
    pub fn calls_tools(&self) -> bool {
        matches!(self.syntax, Syntax::Xtml(_) | Syntax::Turns(_))
    }

    /// Whether a message can have images.
    pub fn takes_images(&self) -> bool {
        matches!(self.syntax, Syntax::Xtml(_))
    }

    /// The ids that end an answer in this format, ascending; a model's configurations may name more.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// The prompt of a conversation.
    ///
    /// # Errors
    /// The format has no place for something, or a message cannot be rendered.
    pub fn render(&self, prompt: &Prompt) -> Result<Segments, ChatError> {
        match &self.syntax {
            Syntax::Xtml(_) => xtml::render(prompt),
            Syntax::Turns(_) => turns::render(prompt),
            Syntax::File(file) => file::render(Some(file), prompt),
            Syntax::Raw => file::render(None, prompt),
        }
    }

    /// A reader for the answer to a prompt. `stop_ids` end it beside the format's own; `stop` matches its content.
    pub fn reply(&self, prompt: &Prompt, stop_ids: &[u32], stop: StopMatcher) -> Reply {
        let structure = match &self.syntax {
            Syntax::Xtml(ids) => {
                let place = if prompt.thinking { Place::Think } else { Place::Response };
                Structure::Xtml(xtml::reply::Elements::new(*ids, place))
            }
            Syntax::Turns(ids) => Structure::Turns(turns::reply::Sections::new(*ids)),
            Syntax::File(_) | Syntax::Raw => Structure::Plain,
        };
        Reply::new(structure, [&self.stop_ids, stop_ids].concat(), stop)
    }

    /// What makes the model stop thinking and begin its answer, where it thinks; the [`Reply`] must read it too.
    pub fn end_thinking(&self) -> Option<Segments> {
        self.thinks().then(xtml::end_thinking)
    }

    /// What must follow the tokens that `reply` has read, so that the next message can follow: all that is still open
    /// is closed. The stop id that ended the reply, if one did, is not among those tokens: it is part of this.
    pub fn closing(&self, reply: &Reply) -> Segments {
        match (&self.syntax, reply.structure()) {
            (Syntax::File(file), _) => file.closing(),
            (_, Structure::Xtml(elements)) => elements.closing(),
            (_, Structure::Turns(sections)) => sections.closing(),
            (_, Structure::Plain) => Segments::default(),
        }
    }
}
