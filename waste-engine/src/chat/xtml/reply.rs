//! Reading an answer: elements as the model opens and closes them, whatever it does.

use super::header::Header;
use super::{END, Ids, Writer};
use crate::chat::json::{Json, push_escaped, quoted};
use crate::chat::reply::{Event, Place};
use crate::chat::segment::Segments;

/// The elements that are open, and what they mean for the next text.
#[derive(Clone, Debug)]
pub struct Elements {
    ids: Ids,
    region: Region,
    /// The region has an element of its own (a call opens the tools region without one).
    framed: bool,
    call: Option<OpenCall>,
    child: Option<Child>,
    /// Elements the format does not know, with what they are in.
    unknown: Vec<(String, Level)>,
    header: Option<Header>,
    /// White space outside, which counts only if text follows.
    held: String,
    /// Text came outside since the last header.
    spoken: bool,
    responded: bool,
    /// What closes the turn in the model's own terms, once the turn is over.
    closing: Option<Segments>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Region {
    Think,
    Response,
    Tools,
    Outside,
}

impl Region {
    fn name(self) -> &'static str {
        match self {
            Region::Think => "think",
            Region::Response => "response",
            Region::Tools => "tools",
            Region::Outside => "",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Region,
    Call,
    Child,
}

#[derive(Clone, Debug)]
struct OpenCall {
    /// It names no tool.
    skipped: bool,
    arguments: usize,
    json: bool,
}

#[derive(Clone, Debug)]
struct Child {
    name: &'static str,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
    /// A string, streamed as it comes.
    String,
    /// Anything else waits for its end.
    Literal {
        kind: String,
        text: String,
    },
    /// All the arguments at once, as the model writes them.
    Json,
    Skipped,
}

impl Elements {
    /// What the prompt left open.
    pub fn new(ids: Ids, place: Place) -> Elements {
        let region = if place == Place::Think { Region::Think } else { Region::Response };
        Elements {
            ids,
            region,
            framed: true,
            call: None,
            child: None,
            unknown: Vec::new(),
            header: None,
            held: String::new(),
            spoken: false,
            responded: region == Region::Response,
            closing: None,
        }
    }

    /// Whether an id has a meaning beside ending the turn.
    pub fn is_marker(&self, id: u32) -> bool {
        [self.ids.open, self.ids.close, self.ids.sep].contains(&id)
    }

    pub fn place(&self) -> Place {
        match self.region {
            _ if self.closing.is_some() => Place::Ended,
            _ if self.header.is_some() => Place::Header,
            _ if self.child.is_some() || self.call.is_some() => Place::Tools,
            Region::Think => Place::Think,
            Region::Response => Place::Response,
            Region::Tools => Place::Tools,
            Region::Outside => Place::Outside,
        }
    }

    pub fn marker(&mut self, id: u32, events: &mut Vec<Event>) {
        if id != self.ids.sep {
            self.header = Some(Header::new(id == self.ids.close));
            self.held.clear();
            self.spoken = false;
        } else if let Some(header) = self.header.take() {
            match header.closes {
                false => self.open(&header, events),
                true => self.close(header.name(), events),
            }
        }
    }

    pub fn text(&mut self, text: &str, events: &mut Vec<Event>) {
        if let Some(header) = &mut self.header {
            if !header.push(text) {
                self.header = None;
            }
            return;
        }
        match (&mut self.child, self.region) {
            (Some(child), _) => match &mut child.what {
                What::String => {
                    let mut escaped = String::with_capacity(text.len());
                    push_escaped(&mut escaped, text);
                    events.push(Event::Arguments(escaped));
                }
                What::Literal { text: literal, .. } => literal.push_str(text),
                What::Json => events.push(Event::Arguments(text.to_owned())),
                What::Skipped => (),
            },
            (None, Region::Tools) => (),
            (None, Region::Think) => events.push(Event::Reasoning(text.to_owned())),
            (None, Region::Response) => events.push(Event::Content(text.to_owned())),
            (None, Region::Outside) => {
                self.held.push_str(text);
                self.spoken |= !text.trim().is_empty();
                if self.spoken {
                    events.push(Event::Content(std::mem::take(&mut self.held)));
                }
            }
        }
    }

    /// The model ended its turn with a stop id.
    pub fn end(&mut self, events: &mut Vec<Event>) {
        let closing = self.closing();
        self.end_turn(closing, events);
    }

    fn end_turn(&mut self, closing: Segments, events: &mut Vec<Event>) {
        self.header = None;
        self.held.clear();
        self.close_call(events);
        self.closing = Some(closing);
        events.push(Event::End);
    }

    fn open(&mut self, header: &Header, events: &mut Vec<Event>) {
        match header.name() {
            "think" => self.enter(Region::Think, true, events),
            "response" => {
                self.enter(Region::Response, true, events);
                self.responded = true;
            }
            "tools" => self.enter(Region::Tools, true, events),
            "call" => {
                self.close_call(events);
                if self.region != Region::Tools {
                    self.enter(Region::Tools, false, events);
                }
                let name = header.attribute("tool").unwrap_or_default();
                self.call = Some(OpenCall { skipped: name.is_empty(), arguments: 0, json: false });
                if !name.is_empty() {
                    events.push(Event::Call(name));
                }
            }
            "argument" => {
                self.close_child(events);
                let what = match (&mut self.call, header.attribute("key")) {
                    (Some(call), Some(key)) if !call.skipped && !call.json => {
                        let kind = header.attribute("type").unwrap_or_else(|| "string".to_owned());
                        let lead = if call.arguments == 0 { "{" } else { ", " };
                        let (quote, what) = match kind.as_str() {
                            "string" => ("\"", What::String),
                            _ => ("", What::Literal { kind, text: String::new() }),
                        };
                        call.arguments += 1;
                        events.push(Event::Arguments(format!("{lead}{}: {quote}", quoted(&key))));
                        what
                    }
                    _ => What::Skipped,
                };
                self.child = Some(Child { name: "argument", what });
            }
            "json" => {
                self.close_child(events);
                let what = match &mut self.call {
                    Some(call) if !call.skipped && !call.json && call.arguments == 0 => {
                        call.json = true;
                        What::Json
                    }
                    _ => What::Skipped,
                };
                self.child = Some(Child { name: "json", what });
            }
            "message" => {
                // Another turn: this one ended without saying so.
                let closing = self.closing();
                self.end_turn(closing, events);
            }
            other => self.unknown.push((other.to_owned(), self.level())),
        }
    }

    fn close(&mut self, name: &str, events: &mut Vec<Event>) {
        match name {
            "message" => self.close_message(events),
            "call" if self.call.is_some() => self.close_call(events),
            "think" | "response" | "tools" if self.region.name() == name => self.leave(events),
            "" => self.close_innermost(events),
            name if self.child.as_ref().is_some_and(|child| child.name == name) => self.close_child(events),
            name if self.unknown.last().is_some_and(|(unknown, _)| unknown == name) => {
                self.unknown.pop();
            }
            _ => (),
        }
    }

    fn close_innermost(&mut self, events: &mut Vec<Event>) {
        if self.unknown.last().is_some_and(|(_, level)| *level >= self.level()) {
            self.unknown.pop();
        } else if self.child.is_some() {
            self.close_child(events);
        } else if self.call.is_some() {
            self.close_call(events);
        } else if self.region != Region::Outside {
            self.leave(events);
        } else {
            self.close_message(events);
        }
    }

    fn close_message(&mut self, events: &mut Vec<Event>) {
        let mut closing = Segments::default();
        closing.markup(END);
        self.end_turn(closing, events);
    }

    fn level(&self) -> Level {
        match (&self.child, &self.call) {
            (Some(_), _) => Level::Child,
            (None, Some(_)) => Level::Call,
            (None, None) => Level::Region,
        }
    }

    fn enter(&mut self, region: Region, framed: bool, events: &mut Vec<Event>) {
        self.close_call(events);
        self.unknown.clear();
        (self.region, self.framed) = (region, framed);
    }

    fn leave(&mut self, events: &mut Vec<Event>) {
        self.enter(Region::Outside, false, events);
    }

    fn close_child(&mut self, events: &mut Vec<Event>) {
        self.unknown.retain(|(_, level)| *level < Level::Child);
        match self.child.take().map(|child| child.what) {
            Some(What::String) => events.push(Event::Arguments("\"".to_owned())),
            Some(What::Literal { kind, text }) => events.push(Event::Arguments(literal(&kind, &text))),
            Some(What::Json | What::Skipped) | None => (),
        }
    }

    fn close_call(&mut self, events: &mut Vec<Event>) {
        self.close_child(events);
        self.unknown.retain(|(_, level)| *level < Level::Call);
        if let Some(call) = self.call.take().filter(|call| !call.skipped) {
            if !call.json {
                events.push(Event::Arguments(if call.arguments == 0 { "{}" } else { "}" }.to_owned()));
            }
            events.push(Event::CallEnd);
        }
    }

    /// What closes all that the model has opened, and the message.
    pub fn closing(&self) -> Segments {
        if let Some(closing) = &self.closing {
            return closing.clone();
        }
        let mut writer = Writer { out: Segments::default(), images: &[] };
        let unknown = |writer: &mut Writer<'_>, wanted: Level| {
            for (name, _) in self.unknown.iter().rev().filter(|(_, level)| *level == wanted) {
                writer.close(name);
            }
        };
        unknown(&mut writer, Level::Child);
        if let Some(child) = &self.child {
            writer.close(child.name);
        }
        unknown(&mut writer, Level::Call);
        if self.call.is_some() {
            writer.close("call");
        }
        unknown(&mut writer, Level::Region);
        if self.framed {
            writer.close(self.region.name());
        }
        if !self.responded {
            writer.element("response", &[], "");
        }
        writer.end();
        writer.out
    }
}

/// The JSON of an argument that is not a string; its declared type is a hint.
fn literal(kind: &str, text: &str) -> String {
    let trimmed = text.trim();
    let lower = trimmed.to_ascii_lowercase();
    match kind {
        "null" => "null".to_owned(),
        "boolean" if lower == "true" || lower == "false" => lower,
        _ if Json::parse(trimmed).is_ok() => trimmed.to_owned(),
        _ => quoted(text),
    }
}
