//! `tool_choice`: makes an answer call a tool, by leaving the model no other token where a call has to begin.

use std::collections::VecDeque;

use waste_engine::chat::{ChatFormat, Place};
use waste_engine::sampler::Mask;
use waste_engine::tokenizer::Tokenizer;

/// Most tokens of thinking and text, each, before the call.
const TEXT_MAX: usize = 2048;

/// What may come next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// What the model likes, but no end of the turn, and no element.
    Free,
    /// This token.
    Token(u32),
    /// One of these.
    OneOf(Vec<u32>),
}

#[derive(Clone, Debug)]
enum Step {
    Tokens(VecDeque<u32>),
    /// A tool's name: what is left of those that are still possible.
    Name(Vec<Vec<u32>>),
}

/// An answer that has to call one of some tools.
#[derive(Clone, Debug)]
pub struct Forcing {
    /// Opens the response; empty where there are no channels.
    respond: Vec<u32>,
    /// Closes the think channel, and the response.
    close: [Vec<u32>; 2],
    /// What comes before the name, the names, and what comes after them.
    before: Vec<u32>,
    names: Vec<Vec<u32>>,
    after: Vec<u32>,
    text_max: usize,
    /// Tokens in the channel so far.
    text: usize,
    responded: bool,
    /// Where the answer was when it was last asked.
    place: Place,
    steps: VecDeque<Step>,
    /// The steps are those of the call.
    calling: bool,
    /// The call has begun: from here on the model is free.
    done: bool,
}

impl Forcing {
    /// For a chat format that has calls. Half of `max_tokens` is left for the call.
    pub fn new(
        format: &ChatFormat,
        tokenizer: &Tokenizer,
        names: &[String],
        max_tokens: usize,
    ) -> Option<Forcing> {
        // Each part on its own, as prompts are encoded.
        let ids = |parts: &[&str]| -> Vec<u32> {
            let encode = |part: &&str| match tokenizer.special_id(part) {
                Some(id) => vec![id],
                None => tokenizer.encode(part),
            };
            parts.iter().flat_map(encode).collect()
        };
        let names = |prefix: &str, suffix: &str| {
            let id = |name: &String| tokenizer.encode(&format!("{prefix}{name}{suffix}"));
            names.iter().map(id).collect::<Vec<_>>()
        };
        let (open, close, sep) = ("<|open|>", "<|close|>", "<|sep|>");
        let (respond, closes, before, names, after) = match format.name() {
            "xtml" => (
                ids(&[open, "response", sep]),
                [ids(&[close, "think", sep]), ids(&[close, "response", sep])],
                ids(&[open, "tools", sep, open, "call", " tool", "=\""]),
                names("", ""),
                ids(&["\"", " index", "=\"", "1", "\"", sep]),
            ),
            "turns" => (
                Vec::new(),
                [Vec::new(), Vec::new()],
                ids(&["<|tool_calls_section_begin|>", "<|tool_call_begin|>"]),
                names("functions.", ":0"),
                ids(&["<|tool_call_argument_begin|>"]),
            ),
            _ => return None,
        };
        Some(Forcing {
            respond,
            close: closes,
            before,
            names,
            after,
            text_max: TEXT_MAX.min(max_tokens / 4),
            text: 0,
            responded: false,
            place: Place::Outside,
            steps: VecDeque::new(),
            calling: false,
            done: false,
        })
    }

    /// What may come where the answer is now.
    pub fn next(&mut self, place: Place) -> Option<Next> {
        if self.done {
            return None;
        }
        self.place = place;
        if self.steps.is_empty() {
            self.plan(place);
        }
        Some(match self.steps.front() {
            None => Next::Free,
            Some(Step::Tokens(tokens)) => tokens.front().map_or(Next::Free, |token| Next::Token(*token)),
            Some(Step::Name(names)) => {
                let mut ids: Vec<u32> = names.iter().filter_map(|name| name.first().copied()).collect();
                // A name that is complete may also be another one's beginning.
                if names.iter().any(Vec::is_empty) {
                    ids.extend(self.after.first());
                }
                ids.sort_unstable();
                ids.dedup();
                Next::OneOf(ids)
            }
        })
    }

    fn plan(&mut self, place: Place) {
        let channels = !self.respond.is_empty();
        let over = self.text >= self.text_max;
        match place {
            Place::Think if over => self.steps.push_back(Step::Tokens(self.close[0].clone().into())),
            Place::Response if channels && over => {
                self.responded = true;
                self.steps.push_back(Step::Tokens(self.close[1].clone().into()));
            }
            Place::Response if channels => self.responded = true,
            Place::Outside if channels && !self.responded => {
                self.text = 0;
                self.steps.push_back(Step::Tokens(self.respond.clone().into()));
            }
            Place::Outside if channels => self.call(),
            Place::Response | Place::Outside if over => self.call(),
            _ => (),
        }
    }

    fn call(&mut self) {
        self.calling = true;
        self.steps.push_back(Step::Tokens(self.before.clone().into()));
        self.steps.push_back(Step::Name(self.names.clone()));
        self.steps.push_back(Step::Tokens(self.after.clone().into()));
    }

    /// The model would end its turn here: it begins the call instead. Only where there are no channels; elsewhere the
    /// end cannot be chosen.
    pub fn refuse_end(&mut self) -> Option<u32> {
        if self.done || !self.steps.is_empty() || !self.respond.is_empty() {
            return None;
        }
        self.call();
        self.before.first().copied()
    }

    /// A token was chosen.
    pub fn took(&mut self, token: u32) {
        if self.done {
            return;
        }
        match self.steps.front_mut() {
            None => self.took_freely(token),
            Some(Step::Tokens(tokens)) => {
                tokens.pop_front();
                if tokens.is_empty() {
                    self.steps.pop_front();
                }
            }
            Some(Step::Name(names)) => {
                let goes_on = names.iter().any(|name| name.first() == Some(&token));
                names.retain(|name| name.first() == Some(&token));
                for name in names.iter_mut() {
                    name.remove(0);
                }
                let complete = names.iter().all(Vec::is_empty);
                if complete {
                    self.steps.pop_front();
                }
                // A complete name was not gone on with: what comes after it has begun.
                if let Some(Step::Tokens(tokens)) = self.steps.front_mut().filter(|_| !goes_on) {
                    tokens.pop_front();
                    if tokens.is_empty() {
                        self.steps.pop_front();
                    }
                }
            }
        }
        if self.steps.is_empty() {
            self.done = self.calling;
        }
    }

    fn took_freely(&mut self, token: u32) {
        self.text += 1;
        // What closes a channel closes no more than that.
        let close = match self.place {
            Place::Think => &self.close[0],
            Place::Response => &self.close[1],
            _ => return,
        };
        if close.first() == Some(&token) {
            self.steps.push_back(Step::Tokens(close[1..].iter().copied().collect()));
        }
    }
}

/// A mask that allows these alone.
pub fn only(vocab: usize, ids: &[u32]) -> Mask {
    let mut mask = Mask::none(vocab);
    ids.iter().for_each(|id| mask.allow(*id));
    mask
}

#[cfg(test)]
mod tests {
    use super::*;
    use waste_engine::chat::Choice;

    fn forcing(tools: &[&str], max_tokens: usize) -> (Tokenizer, Forcing) {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/models/k3-tales");
        let tokenizer = Tokenizer::open(&dir).unwrap();
        let format = ChatFormat::find(&dir, &tokenizer, Choice::Auto).unwrap();
        let names: Vec<String> = tools.iter().map(|name| (*name).to_owned()).collect();
        let forcing = Forcing::new(&format, &tokenizer, &names, max_tokens).unwrap();
        (tokenizer, forcing)
    }

    /// What is written by someone who takes the last possible token, and `free` where all are.
    fn written(tokenizer: &Tokenizer, mut forcing: Forcing, places: &[(usize, Place)], free: &str) -> String {
        let free = tokenizer.encode_markup(free)[0];
        let mut text = Vec::new();
        for (count, place) in places {
            for _ in 0..*count {
                let Some(next) = forcing.next(*place) else { break };
                // A header is read as long as tokens of it come.
                if (*place, &next) == (Place::Header, &Next::Free) {
                    break;
                }
                let token = match next {
                    Next::Free => free,
                    Next::Token(token) => token,
                    Next::OneOf(ids) => *ids.last().unwrap(),
                };
                forcing.took(token);
                text.extend(tokenizer.token_bytes(token).unwrap());
            }
        }
        String::from_utf8(text).unwrap()
    }

    const CALL: &str = "<|open|>tools<|sep|><|open|>call tool=\"tide_table\" index=\"1\"<|sep|>";

    #[test]
    fn a_call_follows_the_response() {
        let (tokenizer, forcing) = forcing(&["tide_table"], 1000);
        let places = [(1, Place::Response), (10, Place::Header), (100, Place::Outside)];
        let text = written(&tokenizer, forcing, &places, "<|close|>");
        assert_eq!(text.replace("<|close|>response<|sep|>", ""), CALL, "{text}");
    }

    #[test]
    fn who_does_not_come_to_an_end_is_brought_to_it() {
        let (tokenizer, forcing) = forcing(&["tide_table"], 20);
        let places = [
            (6, Place::Think),
            (9, Place::Header),
            (1, Place::Outside),
            (9, Place::Header),
            (6, Place::Response),
            (9, Place::Header),
            (99, Place::Outside),
        ];
        let text = written(&tokenizer, forcing, &places, "a");
        assert!(text.starts_with("aaaaa<|close|>think<|sep|>"), "{text}");
        assert!(text.ends_with(CALL), "{text}");
    }

    #[test]
    fn only_the_tools_that_there_are_can_be_named() {
        for names in [&["tide", "tide_table"][..], &["tide_table", "tide"], &["a", "tide_table", "b"]] {
            let (tokenizer, mut forcing) = forcing(names, 1000);
            let mut found = std::collections::BTreeSet::new();
            forcing.responded = true;
            // Every path there is.
            let mut paths = vec![(forcing, Vec::new())];
            while let Some((mut forcing, text)) = paths.pop() {
                let ids = match forcing.next(Place::Outside) {
                    None => {
                        found.insert(String::from_utf8(tokenizer.decode(&text).unwrap()).unwrap());
                        continue;
                    }
                    Some(Next::Token(token)) => vec![token],
                    Some(Next::OneOf(ids)) => ids,
                    Some(Next::Free) => panic!("free"),
                };
                for id in ids {
                    let mut forcing = forcing.clone();
                    forcing.took(id);
                    paths.push((forcing, [&text[..], &[id]].concat()));
                }
            }
            let expected = names.iter().map(|name| CALL.replace("tide_table", name)).collect();
            assert_eq!(found, expected);
        }
    }
}
