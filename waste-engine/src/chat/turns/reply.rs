//! Reading an answer: text, and sections of calls.

use super::{ARGUMENT_BEGIN, CALL_END, END, Ids, SECTION_END};
use crate::chat::reply::{Event, Place};
use crate::chat::segment::Segments;

/// What the next text is.
#[derive(Clone, Debug)]
pub struct Sections {
    ids: Ids,
    state: State,
    /// What closes the turn, once it is over.
    closing: Option<Segments>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Content,
    /// Between calls.
    Section,
    /// The id of a call, so far.
    Id(String),
    /// Arguments; `None` if the call names no tool.
    Arguments {
        named: bool,
        empty: bool,
    },
}

impl Sections {
    pub fn new(ids: Ids) -> Sections {
        Sections { ids, state: State::Content, closing: None }
    }

    pub fn is_marker(&self, id: u32) -> bool {
        let Ids { section_begin, section_end, call_begin, argument_begin, call_end, .. } = self.ids;
        [section_begin, section_end, call_begin, argument_begin, call_end].contains(&Some(id))
    }

    pub fn place(&self) -> Place {
        match self.state {
            _ if self.closing.is_some() => Place::Ended,
            State::Content => Place::Response,
            State::Section | State::Arguments { .. } => Place::Tools,
            State::Id(_) => Place::Header,
        }
    }

    pub fn marker(&mut self, id: u32, events: &mut Vec<Event>) {
        let id = Some(id);
        if id == self.ids.section_begin {
            self.close_call(events);
            self.state = State::Section;
        } else if id == self.ids.section_end {
            self.close_call(events);
            self.state = State::Content;
        } else if id == self.ids.call_begin {
            self.close_call(events);
            self.state = State::Id(String::new());
        } else if id == self.ids.call_end {
            if self.state != State::Content {
                self.close_call(events);
                self.state = State::Section;
            }
        } else if let State::Id(id) = &self.state {
            let name = tool_name(id);
            self.state = State::Arguments { named: !name.is_empty(), empty: true };
            if !name.is_empty() {
                events.push(Event::Call(name));
            }
        }
    }

    pub fn text(&mut self, text: &str, events: &mut Vec<Event>) {
        match &mut self.state {
            State::Content => events.push(Event::Content(text.to_owned())),
            State::Section | State::Arguments { named: false, .. } => (),
            State::Id(id) => id.push_str(text),
            State::Arguments { named: true, empty } => {
                *empty = false;
                events.push(Event::Arguments(text.to_owned()));
            }
        }
    }

    /// The model ended its turn with a stop id.
    pub fn end(&mut self, events: &mut Vec<Event>) {
        self.closing = Some(self.closing());
        self.close_call(events);
        events.push(Event::End);
    }

    fn close_call(&mut self, events: &mut Vec<Event>) {
        if let State::Arguments { named: true, empty } = self.state {
            if empty {
                events.push(Event::Arguments("{}".to_owned()));
            }
            events.push(Event::CallEnd);
        }
    }

    /// What closes all that the model has opened.
    pub fn closing(&self) -> Segments {
        if let Some(closing) = &self.closing {
            return closing.clone();
        }
        let mut out = Segments::default();
        if let State::Id(_) = self.state {
            out.markup(ARGUMENT_BEGIN);
        }
        if let State::Id(_) | State::Arguments { .. } = self.state {
            out.markup(CALL_END);
        }
        if self.state != State::Content {
            out.markup(SECTION_END);
        }
        out.markup(END);
        out
    }
}

/// `f` of `functions.f:0`.
fn tool_name(id: &str) -> String {
    let id = id.trim();
    let path = id.split_once(':').map_or(id, |(path, _)| path);
    path.rsplit_once('.').map_or(path, |(_, name)| name).to_owned()
}
