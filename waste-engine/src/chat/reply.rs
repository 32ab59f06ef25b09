//! The answer of a model, read while it is written.

use super::turns::reply::Sections;
use super::xtml::reply::Elements;
use crate::sampler::StopMatcher;
use crate::tokenizer::{TextStream, Tokenizer, TokenizerError};

/// What a token added to the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    /// Thought.
    Reasoning(String),
    /// Said.
    Content(String),
    /// A call began.
    Call {
        /// Its place among the calls, from 0.
        index: usize,
        /// The tool.
        name: String,
    },
    /// A piece of a call's arguments, which together are JSON text.
    Arguments {
        /// The call's place.
        index: usize,
        /// The piece.
        text: String,
    },
}

/// Where the next text goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Into the reasoning.
    Think,
    /// Into the content, inside the channel for it.
    Response,
    /// Into calls, or nowhere.
    Tools,
    /// Into the content, if it is not blank.
    Outside,
    /// Into the name and attributes of an element.
    Header,
    /// Nowhere: the turn is over.
    Ended,
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The model closed its turn.
    Turn,
    /// A stop string came up.
    StopString,
}

/// Tokens read, by what they were for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenCounts {
    /// Text of the think channel.
    pub reasoning: usize,
    /// Text of the answer.
    pub content: usize,
    /// Arguments.
    pub tool: usize,
    /// Special ids, names and attributes.
    pub markup: usize,
}

/// The answer as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// All reasoning.
    pub reasoning: String,
    /// All content.
    pub content: String,
    /// The calls.
    pub calls: Vec<AnswerCall>,
}

/// A call of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnswerCall {
    /// The tool.
    pub name: String,
    /// JSON text; without its end if the answer was cut, so that nobody can act on half of it.
    pub arguments: String,
    /// Whether the call was closed.
    pub complete: bool,
}

/// Reads an answer token by token. Structure is decided by special ids alone: the same characters from ordinary tokens
/// are text. Any sequence of ids and bytes is read without an error.
#[derive(Clone, Debug)]
pub struct Reply {
    structure: Structure,
    stop_ids: Vec<u32>,
    stop: StopMatcher,
    text: TextStream,
    answer: Answer,
    counts: TokenCounts,
    end: Option<End>,
}

/// What a format makes of markers and text.
#[derive(Clone, Debug)]
pub(super) enum Structure {
    Xtml(Elements),
    Turns(Sections),
    /// Text up to a stop id.
    Plain,
}

/// What the structure says about the answer, before stop strings are looked for.
pub(super) enum Event {
    Reasoning(String),
    Content(String),
    Call(String),
    /// Of the last call.
    Arguments(String),
    /// The last call is complete.
    CallEnd,
    /// The turn is.
    End,
}

impl Reply {
    pub(super) fn new(structure: Structure, stop_ids: Vec<u32>, stop: StopMatcher) -> Reply {
        Reply {
            structure,
            stop_ids,
            stop,
            text: TextStream::new(),
            answer: Answer::default(),
            counts: TokenCounts::default(),
            end: None,
        }
    }

    pub(super) fn structure(&self) -> &Structure {
        &self.structure
    }

    /// Takes the next token. After the end nothing more comes out.
    ///
    /// # Errors
    /// The id is outside the vocabulary.
    pub fn push(&mut self, id: u32, tokenizer: &Tokenizer) -> Result<Vec<Delta>, TokenizerError> {
        let bytes = tokenizer.token_bytes(id)?;
        Ok(match tokenizer.is_special(id) {
            true => self.push_special(id),
            false => self.push_text(bytes),
        })
    }

    /// Takes a special id, which has no text.
    pub fn push_special(&mut self, id: u32) -> Vec<Delta> {
        if self.end.is_some() {
            return Vec::new();
        }
        self.counts.markup += 1;
        let mut events = Vec::new();
        if self.stop_ids.contains(&id) {
            self.flush_text(&mut events);
            self.structure.end(&mut events);
        } else if self.structure.is_marker(id) {
            self.flush_text(&mut events);
            self.structure.marker(id, &mut events);
        }
        self.apply(events)
    }

    /// Takes the bytes of an ordinary token.
    pub fn push_text(&mut self, bytes: &[u8]) -> Vec<Delta> {
        if self.end.is_some() {
            return Vec::new();
        }
        let count = match self.structure.place() {
            Place::Think => &mut self.counts.reasoning,
            Place::Response | Place::Outside => &mut self.counts.content,
            Place::Tools => &mut self.counts.tool,
            Place::Header | Place::Ended => &mut self.counts.markup,
        };
        *count += 1;
        let text = self.text.push(bytes);
        let mut events = Vec::new();
        self.structure.text(&text, &mut events);
        self.apply(events)
    }

    /// Ends an answer that was cut (by a limit, or from outside): what was certain comes out, nothing is repaired.
    pub fn cut(&mut self) -> Vec<Delta> {
        let mut events = Vec::new();
        if self.end.is_none() {
            self.flush_text(&mut events);
        }
        let mut deltas = self.apply(events);
        if self.end.is_none() {
            let held = self.stop.flush();
            self.content(held, &mut deltas);
        }
        deltas
    }

    /// Ends an answer that has all it may have, as the model's own end would.
    pub fn complete(&mut self) -> Vec<Delta> {
        let mut events = Vec::new();
        if self.end.is_none() {
            self.flush_text(&mut events);
            self.structure.end(&mut events);
        }
        self.apply(events)
    }

    /// Half a character can no longer become a whole one.
    fn flush_text(&mut self, events: &mut Vec<Event>) {
        let text = self.text.flush();
        self.structure.text(&text, events);
    }

    fn apply(&mut self, events: Vec<Event>) -> Vec<Delta> {
        let mut deltas = Vec::new();
        for event in events {
            let last = self.answer.calls.len().saturating_sub(1);
            match event {
                Event::Reasoning(text) if text.is_empty() => (),
                Event::Reasoning(text) => {
                    self.answer.reasoning.push_str(&text);
                    deltas.push(Delta::Reasoning(text));
                }
                Event::Content(text) => {
                    let shown = self.stop.push(&text);
                    self.content(shown, &mut deltas);
                    if self.stop.stopped().is_some() {
                        self.end = Some(End::StopString);
                        return deltas;
                    }
                }
                Event::Call(name) => {
                    let index = self.answer.calls.len();
                    self.answer.calls.push(AnswerCall { name: name.clone(), ..AnswerCall::default() });
                    deltas.push(Delta::Call { index, name });
                }
                Event::Arguments(text) if text.is_empty() => (),
                Event::Arguments(text) => {
                    if let Some(call) = self.answer.calls.last_mut() {
                        call.arguments.push_str(&text);
                        deltas.push(Delta::Arguments { index: last, text });
                    }
                }
                Event::CallEnd => {
                    if let Some(call) = self.answer.calls.last_mut() {
                        call.complete = true;
                    }
                }
                Event::End => {
                    let held = self.stop.flush();
                    self.content(held, &mut deltas);
                    self.end = Some(End::Turn);
                }
            }
        }
        deltas
    }

    fn content(&mut self, text: String, deltas: &mut Vec<Delta>) {
        if !text.is_empty() {
            self.answer.content.push_str(&text);
            deltas.push(Delta::Content(text));
        }
    }

    /// Whether an id ends answers.
    pub fn is_stop_id(&self, id: u32) -> bool {
        self.stop_ids.contains(&id)
    }

    /// How it ended, if it did.
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// `stop`, `tool_calls` or `length`, as APIs say it; a reply that did not end was cut by a limit.
    pub fn finish_reason(&self) -> &'static str {
        match self.end {
            Some(End::Turn) if !self.answer.calls.is_empty() => "tool_calls",
            Some(_) => "stop",
            None => "length",
        }
    }

    /// The answer so far.
    pub fn answer(&self) -> &Answer {
        &self.answer
    }

    /// Where the next text goes.
    pub fn place(&self) -> Place {
        if self.end.is_some() { Place::Ended } else { self.structure.place() }
    }

    /// The tokens read.
    pub fn counts(&self) -> TokenCounts {
        self.counts
    }
}

impl Structure {
    fn is_marker(&self, id: u32) -> bool {
        match self {
            Structure::Xtml(elements) => elements.is_marker(id),
            Structure::Turns(sections) => sections.is_marker(id),
            Structure::Plain => false,
        }
    }

    fn marker(&mut self, id: u32, events: &mut Vec<Event>) {
        match self {
            Structure::Xtml(elements) => elements.marker(id, events),
            Structure::Turns(sections) => sections.marker(id, events),
            Structure::Plain => (),
        }
    }

    fn text(&mut self, text: &str, events: &mut Vec<Event>) {
        match self {
            _ if text.is_empty() => (),
            Structure::Xtml(elements) => elements.text(text, events),
            Structure::Turns(sections) => sections.text(text, events),
            Structure::Plain => events.push(Event::Content(text.to_owned())),
        }
    }

    /// A stop id came: the model ended its turn.
    fn end(&mut self, events: &mut Vec<Event>) {
        match self {
            Structure::Xtml(elements) => elements.end(events),
            Structure::Turns(sections) => sections.end(events),
            Structure::Plain => events.push(Event::End),
        }
    }

    fn place(&self) -> Place {
        match self {
            Structure::Xtml(elements) => elements.place(),
            Structure::Turns(sections) => sections.place(),
            Structure::Plain => Place::Response,
        }
    }
}
