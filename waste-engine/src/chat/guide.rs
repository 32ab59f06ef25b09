//! What an answer has to keep to: a call that must be made (`tool_choice`), JSON that must follow a schema
//! (`response_format`). The model is left no other token where it matters, and is free elsewhere.

use std::collections::VecDeque;

use super::format::ChatFormat;
use super::reply::{Place, Reply};
use crate::sampler::{Mask, Sampler, SamplerError, TokenConstraint};
use crate::tokenizer::Tokenizer;

/// Most tokens of thinking and text, each, before the call.
const TEXT_MAX: usize = 2048;

/// What may come next.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Next {
    /// What the model likes, but no end of the turn, and no element.
    Free,
    /// This token.
    Token(u32),
    /// One of these.
    OneOf(Mask),
    /// Nothing: the answer is complete.
    End,
}

#[derive(Clone, Debug)]
enum Step {
    Tokens(VecDeque<u32>),
    /// A tool's name: what is left of those that are still possible.
    Name(Vec<Vec<u32>>),
}

/// What is asked of an answer.
#[derive(Clone, Debug, Default)]
pub struct Demand {
    /// The tools there are.
    pub tools: Vec<String>,
    /// Those of which one must be called; empty if none must.
    pub must_call: Vec<String>,
    /// What the text has to be.
    pub text: Option<Box<dyn TokenConstraint>>,
}

/// An answer on its way to what is asked of it.
#[derive(Clone, Debug)]
pub struct Guide {
    demand: Demand,
    vocab: usize,
    /// What may be chosen where the model is free: no element, and no end. None where a format has no elements.
    free: Option<Mask>,
    /// What may come now, as far as it was looked at.
    ahead: Option<Next>,
    /// Opens the response; empty where there are no channels.
    respond: Vec<u32>,
    /// Closes the think channel, and the response.
    close: [Vec<u32>; 2],
    /// What comes before a tool's name.
    before: Vec<u32>,
    /// The names of tools that may be called.
    names: Vec<Vec<u32>>,
    /// What comes after a name.
    after: Vec<u32>,
    /// What ends the text: the first token that closes its channel, or what ends the turn.
    ends: Vec<u32>,
    text_max: usize,
    /// Tokens in the channel so far.
    text: usize,
    /// Whether the text that has to be something has begun.
    begun: bool,
    responded: bool,
    /// Where the answer was when it was last looked at.
    place: Place,
    steps: VecDeque<Step>,
    /// The steps are those of the call.
    calling: bool,
    /// The call has begun: from here on the model is free, but for a text that has to be something.
    done: bool,
}

impl Guide {
    /// For a chat format that has channels or calls; `None` if nothing is asked. Half of `max_tokens` is left for the
    /// call.
    pub fn new(
        format: &ChatFormat,
        tokenizer: &Tokenizer,
        vocab: usize,
        stop_ids: &[u32],
        demand: Demand,
        max_tokens: usize,
    ) -> Option<Guide> {
        if demand.must_call.is_empty() && demand.text.is_none() {
            return None;
        }
        // Each part on its own, as prompts are encoded.
        let ids = |parts: &[&str]| -> Vec<u32> {
            let encode = |part: &&str| match tokenizer.special_id(part) {
                Some(id) => vec![id],
                None => tokenizer.encode(part),
            };
            parts.iter().flat_map(encode).collect()
        };
        let named = if demand.must_call.is_empty() { &demand.tools } else { &demand.must_call };
        let names = |prefix: &str, suffix: &str| {
            let id = |name: &String| tokenizer.encode(&format!("{prefix}{name}{suffix}"));
            named.iter().map(id).collect::<Vec<_>>()
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
            _ => (Vec::new(), [Vec::new(), Vec::new()], Vec::new(), Vec::new(), Vec::new()),
        };
        let stops = stop_ids.iter().chain(format.stop_ids()).copied();
        let free = tokenizer.special_id(open).map(|open| {
            let mut mask = tokenizer.text_mask(vocab);
            stops.clone().chain([open]).for_each(|id| mask.ban(id));
            mask
        });
        let ends = match closes[1].first() {
            Some(close) => vec![*close],
            None => stops.collect(),
        };
        Some(Guide {
            demand,
            vocab,
            free,
            ahead: None,
            respond,
            close: closes,
            before,
            names,
            after,
            ends,
            text_max: TEXT_MAX.min(max_tokens / 4),
            text: 0,
            begun: false,
            responded: false,
            place: Place::Outside,
            steps: VecDeque::new(),
            calling: false,
            done: false,
        })
    }

    fn channels(&self) -> bool {
        !self.respond.is_empty()
    }

    fn must_call(&self) -> bool {
        !self.demand.must_call.is_empty()
    }

    /// Looks where the answer is before its next token; false if it is complete, and nothing may follow.
    ///
    /// # Errors
    /// What the text may go on with cannot be found out.
    pub fn look(&mut self, place: Place) -> Result<bool, SamplerError> {
        self.ahead = self.next(place)?;
        Ok(self.ahead != Some(Next::End))
    }

    /// Chooses the next token; `mask` holds where anything goes. The reply that will read it says what would end the turn.
    ///
    /// # Errors
    /// Nothing is left to choose, or it cannot be taken into the text.
    pub fn choose(
        &mut self,
        sampler: &mut Sampler,
        reply: &Reply,
        logits: &[f32],
        mask: Option<&Mask>,
    ) -> Result<u32, SamplerError> {
        let mask = match &self.ahead {
            Some(Next::Token(id)) => {
                let id = *id;
                sampler.skip();
                self.took(id)?;
                return Ok(id);
            }
            Some(Next::OneOf(allowed)) => Some(allowed),
            Some(_) => self.free.as_ref().or(mask),
            None => mask,
        };
        let id = sampler.sample(logits, mask)?;
        let id = if reply.is_stop_id(id) { self.refuse_end().unwrap_or(id) } else { id };
        self.took(id)?;
        Ok(id)
    }

    /// What may come where the answer is now; `None` for anything.
    fn next(&mut self, place: Place) -> Result<Option<Next>, SamplerError> {
        if self.done {
            // What comes after calls would be a text that nobody holds to anything.
            let text = matches!(place, Place::Response | Place::Outside);
            return Ok((text && self.demand.text.is_some()).then_some(Next::End));
        }
        self.place = place;
        if self.steps.is_empty() {
            self.plan(place);
        }
        Ok(Some(match self.steps.front() {
            Some(Step::Tokens(tokens)) => tokens.front().map_or(Next::Free, |token| Next::Token(*token)),
            Some(Step::Name(names)) => {
                let mut ids: Vec<u32> = names.iter().filter_map(|name| name.first().copied()).collect();
                // A name that is complete may also be another one's beginning.
                if names.iter().any(Vec::is_empty) {
                    ids.extend(self.after.first());
                }
                Next::OneOf(Mask::only(self.vocab, &ids))
            }
            None => match place {
                Place::Response | Place::Outside => self.text()?,
                _ => Next::Free,
            },
        }))
    }

    /// What the text may go on with.
    fn text(&mut self) -> Result<Next, SamplerError> {
        let over = self.channels() && self.place == Place::Outside;
        let Some(text) = &mut self.demand.text else { return Ok(Next::Free) };
        if over {
            return Ok(Next::End);
        }
        let mut mask = text.mask()?;
        if text.may_end()? {
            if mask.is_empty() && !self.respond.is_empty() {
                // All of what closes the channel follows.
                return Ok(Next::OneOf(Mask::only(self.vocab, &self.ends)));
            }
            if mask.is_empty() && self.demand.must_call.is_empty() {
                return Ok(Next::End);
            }
            self.ends.iter().for_each(|id| mask.allow(*id));
        }
        // A call instead of a text: the text is empty, and one of the tools is called.
        if !self.begun && !self.names.is_empty() {
            match self.close[1].first() {
                Some(close) => mask.allow(*close),
                None => self.before.iter().take(1).for_each(|id| mask.allow(*id)),
            }
        }
        Ok(Next::OneOf(mask))
    }

    fn plan(&mut self, place: Place) {
        let (channels, calls) = (self.channels(), self.must_call());
        let over = calls && self.text >= self.text_max && (self.demand.text.is_none() || !self.begun);
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
            Place::Outside if channels && (calls || !self.begun && !self.names.is_empty()) => self.call(),
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
    fn refuse_end(&mut self) -> Option<u32> {
        if self.done || !self.must_call() || !self.steps.is_empty() || self.channels() {
            return None;
        }
        self.call();
        self.before.first().copied()
    }

    /// A token was chosen, here or by someone else.
    ///
    /// # Errors
    /// It cannot be taken into the text.
    pub fn took(&mut self, token: u32) -> Result<(), SamplerError> {
        if self.done {
            return Ok(());
        }
        match self.steps.front_mut() {
            None => self.took_freely(token)?,
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
        Ok(())
    }

    fn took_freely(&mut self, token: u32) -> Result<(), SamplerError> {
        self.text += 1;
        // What closes a channel closes no more than that.
        let close = match self.place {
            Place::Think => &self.close[0],
            Place::Response => &self.close[1],
            _ => return Ok(()),
        };
        if close.first() == Some(&token) {
            self.steps.push_back(Step::Tokens(close[1..].iter().copied().collect()));
        } else if self.place == Place::Response && !self.ends.contains(&token) {
            return self.took_text(token);
        }
        Ok(())
    }

    fn took_text(&mut self, token: u32) -> Result<(), SamplerError> {
        if self.demand.text.is_none() {
            return Ok(());
        }
        if !self.begun && self.before.first() == Some(&token) && !self.channels() {
            self.call();
            if let Some(Step::Tokens(tokens)) = self.steps.front_mut() {
                tokens.pop_front();
            }
            return Ok(());
        }
        self.begun = true;
        self.demand.text.as_mut().map_or(Ok(()), |text| text.accept(token))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::Choice;

    fn guide(must_call: &[&str], max_tokens: usize) -> (Tokenizer, Guide) {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/models/k3-tales");
        let tokenizer = Tokenizer::open(&dir).unwrap();
        let format = ChatFormat::find(&dir, &tokenizer, Choice::Auto).unwrap();
        let must_call = must_call.iter().map(|name| (*name).to_owned()).collect();
        let demand = Demand { must_call, ..Demand::default() };
        let vocab = tokenizer.vocab_size() as usize;
        let guide = Guide::new(&format, &tokenizer, vocab, &[], demand, max_tokens).unwrap();
        (tokenizer, guide)
    }

    fn allowed(mask: &Mask) -> Vec<u32> {
        (0..mask.vocab() as u32).filter(|id| mask.allows(*id)).collect()
    }

    /// What is written by someone who takes the last possible token, and `free` where all are.
    fn written(tokenizer: &Tokenizer, mut guide: Guide, places: &[(usize, Place)], free: &str) -> String {
        let free = tokenizer.encode_markup(free)[0];
        let mut text = Vec::new();
        for (count, place) in places {
            for _ in 0..*count {
                let Some(next) = guide.next(*place).unwrap() else { break };
                // A header is read as long as tokens of it come.
                if (*place, &next) == (Place::Header, &Next::Free) {
                    break;
                }
                let token = match next {
                    Next::Free => free,
                    Next::Token(token) => token,
                    Next::OneOf(mask) => allowed(&mask).last().copied().unwrap(),
                    Next::End => break,
                };
                guide.took(token).unwrap();
                text.extend(tokenizer.token_bytes(token).unwrap());
            }
        }
        String::from_utf8(text).unwrap()
    }

    const CALL: &str = "<|open|>tools<|sep|><|open|>call tool=\"tide_table\" index=\"1\"<|sep|>";

    #[test]
    fn a_call_follows_the_response() {
        let (tokenizer, guide) = guide(&["tide_table"], 1000);
        let places = [(1, Place::Response), (10, Place::Header), (100, Place::Outside)];
        let text = written(&tokenizer, guide, &places, "<|close|>");
        assert_eq!(text.replace("<|close|>response<|sep|>", ""), CALL, "{text}");
    }

    #[test]
    fn who_does_not_come_to_an_end_is_brought_to_it() {
        let (tokenizer, guide) = guide(&["tide_table"], 20);
        let places = [
            (6, Place::Think),
            (9, Place::Header),
            (1, Place::Outside),
            (9, Place::Header),
            (6, Place::Response),
            (9, Place::Header),
            (99, Place::Outside),
        ];
        let text = written(&tokenizer, guide, &places, "a");
        assert!(text.starts_with("aaaaa<|close|>think<|sep|>"), "{text}");
        assert!(text.ends_with(CALL), "{text}");
    }

    #[test]
    fn only_the_tools_that_there_are_can_be_named() {
        for names in [&["tide", "tide_table"][..], &["tide_table", "tide"], &["a", "tide_table", "b"]] {
            let (tokenizer, mut guide) = guide(names, 1000);
            let mut found = std::collections::BTreeSet::new();
            guide.responded = true;
            // Every path there is.
            let mut paths = vec![(guide, Vec::new())];
            while let Some((mut guide, text)) = paths.pop() {
                let ids = match guide.next(Place::Outside).unwrap() {
                    None => {
                        found.insert(String::from_utf8(tokenizer.decode(&text).unwrap()).unwrap());
                        continue;
                    }
                    Some(Next::Token(token)) => vec![token],
                    Some(Next::OneOf(mask)) => allowed(&mask),
                    Some(next) => panic!("{next:?}"),
                };
                for id in ids {
                    let mut guide = guide.clone();
                    guide.took(id).unwrap();
                    paths.push((guide, [&text[..], &[id]].concat()));
                }
            }
            let expected = names.iter().map(|name| CALL.replace("tide_table", name)).collect();
            assert_eq!(found, expected);
        }
    }
}
