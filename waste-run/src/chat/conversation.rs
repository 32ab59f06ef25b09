//! A conversation and the state the model has of it: each turn adds its own tokens, and nothing is read twice.

use std::path::Path;
use std::time::Instant;

use waste_common::cli::Failure;
use waste_engine::chat::{
    self, Answer, ChatFormat, Delta, Effort, Image, Limits, Message, Part, Prompt, Turn,
};
use waste_engine::sampler::{Mask, Sampler, SamplerOptions, SamplerState, StopMatcher};
use waste_engine::saved::{self, ImageSpan, Text};
use waste_engine::tokenizer::Tokenizer;
use waste_engine::{Engine, EngineError, Finish, Saved, Session, Wanted};

use crate::form::Form;

/// Who answers.
#[derive(Clone, Copy)]
pub struct Speaker<'a> {
    /// The model.
    pub engine: &'a Engine,
    /// Its tokens.
    pub tokenizer: &'a Tokenizer,
    /// How it is spoken to.
    pub format: &'a ChatFormat,
}

/// How it answers.
pub struct Settings {
    /// How tokens are chosen.
    pub sampler: SamplerOptions,
    /// Those that may be.
    pub mask: Option<Mask>,
    /// Strings that end an answer.
    pub stop: Vec<String>,
    /// Ids that end an answer, beside those of the format.
    pub stop_ids: Vec<u32>,
    /// Most tokens of an answer.
    pub tokens: Option<usize>,
    /// Most tokens of thinking.
    pub think: Option<usize>,
    /// How much it thinks; `None` for not at all.
    pub effort: Option<Effort>,
    /// What an answer has to be.
    pub form: Form,
    /// What a conversation begins with.
    pub bos: Option<u32>,
}

impl Settings {
    /// Refuses options that cannot be used, before a model is loaded.
    pub fn check(&self) -> Result<(), EngineError> {
        Sampler::new(self.sampler.clone())?;
        StopMatcher::new(&self.stop)?;
        Ok(())
    }
}

/// What became of a message.
pub enum Asked {
    /// It was answered.
    Answered(Answered),
    /// It does not fit.
    TooLong {
        /// Tokens of the message and what is around it.
        wanted: usize,
        /// Tokens of the conversation before.
        used: usize,
        /// The context.
        ctx: usize,
    },
    /// It was stopped before the model had read it: the conversation is as it was.
    Unread,
    /// Likewise, and the conversation cannot be read again, since its images are not known any more: it is empty.
    Lost,
}

/// An answer.
pub struct Answered {
    /// What the model said.
    pub answer: Answer,
    /// Why it ended.
    pub finish: Finish,
    /// As APIs say it.
    pub api_reason: &'static str,
    /// Tokens that had to be read.
    pub prompt_tokens: usize,
    /// Tokens that were known from earlier turns.
    pub reused_tokens: usize,
    /// Tokens written.
    pub tokens: usize,
    /// Those of thinking.
    pub reasoning_tokens: usize,
    /// The seed in use.
    pub seed: u64,
    /// Seconds until the first token.
    pub prefill_seconds: f64,
    /// Seconds from then on.
    pub decode_seconds: f64,
}

impl Answered {
    /// Tokens a second; the first one comes out of the prompt's pass.
    pub fn pace(&self) -> Option<f64> {
        let steps = self.tokens.saturating_sub(1);
        (steps > 0 && self.decode_seconds > 0.0).then(|| steps as f64 / self.decode_seconds)
    }

    /// Why it ended, in a word.
    pub fn reason(&self) -> &'static str {
        match self.finish {
            Finish::Cancelled => self.finish.reason(),
            _ => self.api_reason,
        }
    }
}

/// What one token added, and how long the answer takes.
pub struct Step {
    /// What it added.
    pub deltas: Vec<Delta>,
    /// Tokens so far.
    pub tokens: usize,
    /// Seconds since the first one.
    pub seconds: f64,
}

/// A conversation.
pub struct Conversation<'a> {
    speaker: Speaker<'a>,
    settings: Settings,
    session: Session,
    system: Option<String>,
    /// The model is told of the system message with the next one.
    untold: bool,
    /// All that has been said, as the model must have read it before the next message. The state holds the first ones.
    ids: Vec<u32>,
    /// The images in `ids`; those of a session file have no rows.
    images: Vec<Placed>,
    /// Images that go with the next message.
    attached: Vec<Attached>,
}

/// An image's place in a text, and the rows that stand there.
struct Placed {
    /// Where it is.
    span: ImageSpan,
    /// [tokens, hidden].
    rows: Vec<f32>,
}

/// An image that is encoded and goes with the next message.
pub struct Attached {
    /// What the prompt says of it.
    pub image: Image,
    /// Of its file.
    pub sha256: String,
    /// [tokens, hidden].
    pub rows: Vec<f32>,
}

impl<'a> Conversation<'a> {
    /// A conversation in which nothing was said.
    ///
    /// # Errors
    /// There is no memory for its state.
    pub fn new(
        speaker: Speaker<'a>,
        settings: Settings,
        system: Option<String>,
    ) -> Result<Conversation<'a>, EngineError> {
        let session = speaker.engine.session()?;
        Ok(Conversation {
            speaker,
            settings,
            session,
            untold: system.is_some(),
            system,
            ids: Vec::new(),
            images: Vec::new(),
            attached: Vec::new(),
        })
    }

    /// Tokens of the conversation; what closes a cut answer may not fit any more.
    pub fn used(&self) -> usize {
        self.ids.len().min(self.ctx())
    }

    /// Most tokens it can have.
    pub fn ctx(&self) -> usize {
        self.speaker.engine.ctx()
    }

    /// What the model is told beside the messages.
    pub fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    /// Tells it something, from the next message on.
    pub fn set_system(&mut self, text: String) {
        self.system = Some(text);
        self.untold = true;
    }

    /// Begins anew, with the same system message.
    pub fn reset(&mut self) {
        self.session.reset();
        self.ids.clear();
        self.images.clear();
        self.attached.clear();
        self.untold = self.system.is_some();
    }

    /// Keeps it in a file, with the model's state.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), EngineError> {
        let text = Text {
            tokens: self.ids.clone(),
            images: self.images.iter().map(|placed| placed.span.clone()).collect(),
            // Each answer begins its own random numbers.
            sampler: SamplerState {
                seed: self.settings.sampler.seed.unwrap_or_default(),
                draws: 0,
                counts: Vec::new(),
            },
            answer: self.ids.len(),
            left: 0,
            ended: true,
            manner: None,
        };
        saved::save(self.speaker.engine, &self.session, &text, path)
    }

    /// Takes its place: the conversation in a file, system message and all.
    ///
    /// # Errors
    /// The file is not there or cannot be used with this model and these options: then nothing has changed. It cannot
    /// be read to its end: then the conversation is empty.
    pub fn load(&mut self, path: &Path) -> Result<(), Failure> {
        let saved = Saved::open(path)?
            .ok_or_else(|| Failure::data("no_session", format!("there is no file {}", path.display())));
        let mut saved = saved?;
        let Text { tokens: ids, images, .. } = saved.text().clone();
        if let Err(error) = saved.restore(self.speaker.engine, &mut self.session) {
            if self.session.check_intact().is_err() {
                self.reset();
            }
            return Err(error.into());
        }
        self.ids = ids;
        self.images = images.into_iter().map(|span| Placed { span, rows: Vec::new() }).collect();
        self.attached.clear();
        self.system = None;
        self.untold = false;
        Ok(())
    }

    /// Images of the conversation, those of the next message included.
    pub fn images(&self) -> usize {
        self.images.len() + self.attached.len()
    }

    /// Adds an image to the next message.
    pub fn attach(&mut self, attached: Attached) {
        self.attached.push(attached);
    }

    /// The rows of an image that is here already, by its file's hash.
    pub fn rows(&self, sha256: &str) -> Option<&[f32]> {
        let placed = self.images.iter().map(|placed| (&placed.span.sha256, &placed.rows));
        let attached = self.attached.iter().map(|attached| (&attached.sha256, &attached.rows));
        let mut known = placed.chain(attached).filter(|(_, rows)| !rows.is_empty());
        known.find(|(known, _)| *known == sha256).map(|(_, rows)| rows.as_slice())
    }

    /// The prompt of the next turn: all of it at the beginning, then what is new.
    fn prompt(&self, message: &str) -> Prompt {
        let system = self.system.iter().filter(|_| self.untold).map(Message::system);
        let images = (0..self.attached.len()).map(Part::Image);
        let content = images.chain([Part::Text(message.to_owned())]).collect();
        Prompt {
            messages: system.chain([Message::User { name: String::new(), content }]).collect(),
            images: self.attached.iter().map(|attached| attached.image).collect(),
            thinking: self.settings.effort.is_some(),
            effort: self.settings.effort.filter(|_| self.ids.is_empty()),
            response_format: self.settings.form.said.clone(),
            ..Prompt::default()
        }
    }

    /// Asks, and hands on what comes.
    ///
    /// # Errors
    /// The model fails, or `on_step` does.
    pub fn ask(
        &mut self,
        message: &str,
        on_step: &mut dyn FnMut(Step) -> Result<(), Failure>,
    ) -> Result<Asked, Failure> {
        let Speaker { tokenizer, format, .. } = self.speaker;
        let ctx = self.ctx();
        let prompt = self.prompt(message);
        let mut new = format.render(&prompt)?.encode(tokenizer).ids;
        if self.ids.is_empty() {
            new.splice(0..0, self.settings.bos);
        }
        let used = self.ids.len();
        if used + new.len() >= ctx {
            return Ok(Asked::TooLong { wanted: new.len(), used, ctx });
        }
        let room = ctx - used - new.len();
        let limits = Limits {
            tokens: self.settings.tokens.unwrap_or(room).min(room),
            think: self.settings.think,
            stop: self.settings.stop.clone(),
            stop_ids: self.settings.stop_ids.clone(),
        };
        let full = limits.tokens == room;
        let vocab = self.speaker.engine.config().vocab;
        let guide = self.settings.form.guide(format, tokenizer, vocab, &limits.stop_ids);
        let turn = Turn::new(format, tokenizer, &prompt, self.settings.sampler.clone(), limits)?;
        let mut turn = turn.guided(guide)?;

        let placeholder = self.speaker.engine.config().media_placeholder;
        let places = chat::places(&prompt.images, &new, placeholder)?;
        let before = self.images.len();
        for (attached, place) in self.attached.drain(..).zip(places) {
            let Attached { image, sha256, rows } = attached;
            let span = ImageSpan { position: used + place, tokens: image.rows, sha256 };
            self.images.push(Placed { span, rows });
        }
        self.ids.extend(new);
        let reused_tokens = self.session.position();
        let unread = self.ids[reused_tokens..].to_vec();
        for placed in self.images.iter().filter(|placed| placed.span.position >= reused_tokens) {
            self.session.queue_image(&placed.rows);
        }
        let start = Instant::now();
        let Some(mut deltas) = self.step(&unread, &mut turn)? else {
            // The state is that of no place in the conversation.
            self.session.reset();
            self.ids.truncate(used);
            let taken_back = self.images.drain(before..).zip(prompt.images);
            self.attached = taken_back
                .map(|(placed, image)| Attached { image, sha256: placed.span.sha256, rows: placed.rows })
                .collect();
            if self.images.iter().any(|placed| placed.rows.is_empty()) {
                self.reset();
                return Ok(Asked::Lost);
            }
            return Ok(Asked::Unread);
        };
        self.untold = false;
        let prefill_seconds = start.elapsed().as_secs_f64();
        let start = Instant::now();
        while turn.finish().is_none() {
            on_step(Step { deltas, tokens: turn.tokens().len(), seconds: start.elapsed().as_secs_f64() })?;
            let last = turn.tokens().last().copied();
            deltas = match self.step(last.as_slice(), &mut turn)? {
                Some(deltas) => deltas,
                None => turn.cut(Finish::Cancelled),
            };
        }
        let decode_seconds = start.elapsed().as_secs_f64();
        on_step(Step { deltas, tokens: turn.tokens().len(), seconds: decode_seconds })?;

        self.ids.extend(turn.tokens());
        self.ids.extend(format.closing(turn.reply()).encode(tokenizer).ids);
        let finish = match turn.finish() {
            Some(Finish::Length) if full => Finish::Context,
            finish => finish.unwrap_or(Finish::Stop),
        };
        Ok(Asked::Answered(Answered {
            answer: turn.reply().answer().clone(),
            finish,
            api_reason: turn.reply().finish_reason(),
            prompt_tokens: unread.len(),
            reused_tokens,
            tokens: turn.tokens().len(),
            reasoning_tokens: turn.reply().counts().reasoning,
            seed: turn.seed(),
            prefill_seconds,
            decode_seconds,
        }))
    }

    /// Takes tokens in and chooses the next one; `None` if it was stopped.
    fn step(&mut self, tokens: &[u32], turn: &mut Turn) -> Result<Option<Vec<Delta>>, EngineError> {
        let Speaker { engine, tokenizer, .. } = self.speaker;
        let mask = self.settings.mask.as_ref();
        let mut deltas = Vec::new();
        let outcome = engine.forward(&mut self.session, tokens, Wanted::Last, &mut |_, logits| {
            deltas = turn.next(logits, mask, tokenizer)?;
            Ok(())
        });
        match outcome {
            Err(EngineError::Interrupted) => Ok(None),
            Err(error) => Err(error),
            Ok(()) => Ok(Some(deltas)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use waste_engine::EngineOptions;
    use waste_engine::chat::Choice;

    use super::*;

    struct Model {
        engine: Engine,
        tokenizer: Tokenizer,
        format: ChatFormat,
        cancelled: Arc<AtomicBool>,
    }

    impl Model {
        fn open() -> Model {
            let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/models/k3-tales");
            let options = EngineOptions { ctx: 600, threads: 2, ..EngineOptions::default() };
            let cancelled = options.cancelled.clone();
            let tokenizer = Tokenizer::open(&dir).unwrap();
            let format = ChatFormat::find(&dir, &tokenizer, Choice::Auto).unwrap();
            Model { engine: Engine::open(&dir, options).unwrap(), tokenizer, format, cancelled }
        }

        fn conversation(&self, tokens: usize, effort: Option<Effort>) -> Conversation<'_> {
            let Model { engine, tokenizer, format, .. } = self;
            let settings = Settings {
                form: Form::default(),
                sampler: SamplerOptions::default(),
                mask: None,
                stop: Vec::new(),
                stop_ids: Vec::new(),
                tokens: Some(tokens),
                think: None,
                effort,
                bos: None,
            };
            Conversation::new(Speaker { engine, tokenizer, format }, settings, None).unwrap()
        }
    }

    fn answered(asked: Asked) -> Answered {
        match asked {
            Asked::Answered(answered) => answered,
            Asked::TooLong { wanted, used, ctx } => panic!("{wanted} {used} {ctx}"),
            Asked::Unread | Asked::Lost => panic!("unread"),
        }
    }

    /// The second turn reads its own message alone, and yet the model knows the first.
    #[test]
    fn a_turn_reads_only_what_is_new() {
        let model = Model::open();
        let mut chat = model.conversation(12, None);
        chat.set_system("Tell tales.".to_owned());
        let ask =
            |chat: &mut Conversation<'_>, text: &str| answered(chat.ask(text, &mut |_| Ok(())).unwrap());
        let first = ask(&mut chat, "Tell me a story.");
        assert_eq!((first.reused_tokens, first.tokens), (0, 12));
        let before = chat.used();
        let second = ask(&mut chat, "Another one.");
        // The last token, what closes the answer, and the new message.
        assert!(second.prompt_tokens < 50 && second.reused_tokens + second.prompt_tokens > before);
        assert_eq!(second.reused_tokens, first.prompt_tokens + first.tokens - 1);

        // All that was said, as the history of one prompt, is the same tokens.
        let prompt = Prompt {
            messages: vec![
                Message::system("Tell tales."),
                Message::user("Tell me a story."),
                Message::Assistant {
                    name: String::new(),
                    reasoning: String::new(),
                    content: vec![Part::Text(first.answer.content)],
                    calls: Vec::new(),
                },
                Message::user("Another one."),
            ],
            thinking: false,
            ..Prompt::default()
        };
        let whole = model.format.render(&prompt).unwrap().encode(&model.tokenizer).ids;
        assert_eq!(chat.ids[..whole.len()], whole);
        // And read at once, they are answered alike.
        let mut session = model.engine.session().unwrap();
        let mut best = 0;
        let mut sink = |_: usize, logits: &[f32]| {
            best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
            Ok(())
        };
        model.engine.forward(&mut session, &whole, Wanted::Last, &mut sink).unwrap();
        assert_eq!(chat.ids[whole.len()], best as u32);

        chat.reset();
        assert_eq!((chat.used(), chat.system()), (0, Some("Tell tales.")));
        let again = ask(&mut chat, "Tell me a story.");
        assert_eq!((again.prompt_tokens, again.reused_tokens), (first.prompt_tokens, 0));
    }

    #[test]
    fn a_stopped_answer_is_closed_and_the_conversation_goes_on() {
        let model = Model::open();
        // Cut while it thinks.
        let mut chat = model.conversation(60, Some(Effort::Low));
        let asked = chat.ask("Tell me a story.", &mut |step| {
            model.cancelled.store(step.tokens >= 5, Ordering::Relaxed);
            Ok(())
        });
        let cut = answered(asked.unwrap());
        assert_eq!((cut.finish, cut.reason(), cut.tokens), (Finish::Cancelled, "cancelled", 5));
        assert!(!cut.answer.reasoning.is_empty() && cut.answer.content.is_empty());
        let text = String::from_utf8(model.tokenizer.decode(&chat.ids).unwrap()).unwrap();
        let end = "<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>";
        assert!(text.ends_with(end), "{text}");

        // Stopped before it is read, a message is taken back, and all is read again for the next one.
        let ids = chat.ids.clone();
        model.cancelled.store(true, Ordering::Relaxed);
        assert!(matches!(chat.ask("Wait.", &mut |_| Ok(())), Ok(Asked::Unread)));
        assert_eq!(chat.ids, ids);
        model.cancelled.store(false, Ordering::Relaxed);
        let next = answered(chat.ask("Tell me a story.", &mut |_| Ok(())).unwrap());
        assert_eq!(next.reused_tokens, 0);
        assert!(next.prompt_tokens > ids.len());
        assert!(!next.answer.content.is_empty());
    }

    #[test]
    fn a_message_that_cannot_fit_leaves_the_conversation_as_it_was() {
        let model = Model::open();
        let mut chat = model.conversation(4, None);
        answered(chat.ask("Hello.", &mut |_| Ok(())).unwrap());
        let ids = chat.ids.clone();
        let asked = chat.ask(&"very ".repeat(700), &mut |_| Ok(())).unwrap();
        assert!(
            matches!(asked, Asked::TooLong { wanted, used, ctx: 600 } if wanted > 600 && used == ids.len())
        );
        assert_eq!(chat.ids, ids);
        answered(chat.ask("Hello.", &mut |_| Ok(())).unwrap());
    }
}
