//! Talking with a model: on a terminal, or one message a line from standard input.

mod album;
mod commands;
mod conversation;
mod history;
mod input;
mod show;

use std::fmt;
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use waste_common::cli::{Exit, Failure, Output, resolve_model};
use waste_common::machine::peak_rss_bytes;
use waste_engine::Finish;
use waste_engine::chat::{AnswerCall, ChatFormat, Effort};
use waste_engine::sampler::SamplerOptions;
use waste_engine::tokenizer::Tokenizer;

use crate::args::{ChatArgs, EffortArg};
use crate::form::Forms;
use crate::open::{self, Opened, size};
use crate::sampling;
use album::Album;
use commands::{Command, HELP, Line};
use conversation::{Answered, Asked, Conversation, Settings, Speaker};
use input::Input;
use show::Show;

/// A context that is filled so far (in percent) is worth a word.
const NEARLY_FULL: usize = 80;

/// One answer, as JSON.
#[derive(Serialize)]
struct Report<'a> {
    turn: usize,
    text: &'a str,
    reasoning: &'a str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call<'a>>,
    finish_reason: &'static str,
    prompt_tokens: usize,
    reused_tokens: usize,
    tokens: usize,
    reasoning_tokens: usize,
    context_tokens: usize,
    ctx: usize,
    seconds: Seconds,
    tokens_per_second: f64,
    seed: u64,
}

#[derive(Serialize)]
struct Call<'a> {
    name: &'a str,
    arguments: &'a str,
    complete: bool,
}

impl<'a> Call<'a> {
    fn of(call: &'a AnswerCall) -> Call<'a> {
        Call { name: &call.name, arguments: &call.arguments, complete: call.complete }
    }
}

#[derive(Serialize)]
struct Seconds {
    prefill: f64,
    decode: f64,
}

/// Opens the model and answers until there are no more messages.
pub fn run(args: ChatArgs, output: &Output) -> Result<Exit, Failure> {
    if args.model == Path::new("-") {
        return Err(Failure::usage("messages come from standard input, so MODEL cannot be `-`; name it"));
    }
    let model = resolve_model(&args.model)?;
    let mut found = open::find(&model, &args.open, output)?;
    let tokenizer = Tokenizer::open(model.path())?;
    let format = match args.raw {
        true => ChatFormat::raw(&tokenizer),
        false => ChatFormat::find(model.path(), &tokenizer, args.chat_format)?,
    };
    let mut album = Album::open(&args, &format, &mut found, model.path())?;
    let given = args.images.images.iter().map(|path| album.look(path));
    let given = given.collect::<Result<Vec<_>, Failure>>()?;
    let settings = Settings {
        sampler: sampling::options(&args.sampling, SamplerOptions::default()),
        mask: sampling::mask(!args.sampling.no_mask, found.config(), &tokenizer),
        stop: args.sampling.stop.clone(),
        stop_ids: sampling::stop_ids(found.config(), Some(&tokenizer), model.path())?,
        tokens: args.tokens,
        think: args.max_think,
        effort: effort(&args, &format)?,
        form: Forms::new(&tokenizer, found.config().vocab).by_options(&args.form)?,
        bos: if args.raw { tokenizer.bos() } else { None },
    };
    settings.check()?;
    let opened = found.plan(&[], output)?.load(output)?;
    let speaker = Speaker { engine: &opened.engine, tokenizer: &tokenizer, format: &format };
    let mut input = Input::open(!args.no_history, output)?;
    let mut conversation = Conversation::new(speaker, settings, args.system)?;
    for seen in &given {
        album.attach(seen, &opened.engine, &mut conversation, output)?;
    }
    let mut chat = Chat {
        conversation,
        album,
        show: Show::new(input.interactive(), output),
        opened: &opened,
        output,
        answers: 0,
        tokens: 0,
        last: None,
    };
    if input.interactive() {
        output.note("Type a message; /help lists the commands.");
    }
    let exit = chat.talk(&mut input);
    opened.learn()?;
    exit
}

/// How much to think; `None` for not at all. What was asked for and cannot be had is refused.
fn effort(args: &ChatArgs, format: &ChatFormat) -> Result<Option<Effort>, Failure> {
    let wanted = match args.effort {
        _ if args.no_thinking => Some(None),
        Some(EffortArg(effort)) => Some(effort),
        None => None,
    };
    let effort = match (format.thinks(), wanted) {
        (false, Some(Some(_))) => {
            return Err(Failure::usage("--effort: the model's chat format has no channel to think in"));
        }
        (false, _) => None,
        (true, wanted) => wanted.unwrap_or(Some(Effort::Low)),
    };
    match effort {
        None if args.max_think.is_some() => Err(Failure::usage("--max-think: the model does not think here")),
        effort => Ok(effort),
    }
}

struct Chat<'a> {
    conversation: Conversation<'a>,
    album: Album,
    show: Show<'a>,
    opened: &'a Opened,
    output: &'a Output,
    answers: usize,
    tokens: usize,
    last: Option<Answered>,
}

impl Chat<'_> {
    fn talk(&mut self, input: &mut Input) -> Result<Exit, Failure> {
        while let Some(line) = input.next(&self.opened.interrupt, self.output)? {
            match commands::parse(&line) {
                Line::Nothing => (),
                Line::Message(text) => self.answer(&text, input.interactive())?,
                Line::Command(Command::Quit) => break,
                Line::Command(command) => self.command(command, input.interactive())?,
                Line::Unknown(word) => {
                    let what = format!(
                        "there is no command {word}; /help lists them, //… sends a message with one /"
                    );
                    match input.interactive() {
                        true => self.output.note(what),
                        false => return Err(Failure::usage(what)),
                    }
                }
            }
        }
        Ok(Exit::Done)
    }

    fn answer(&mut self, text: &str, interactive: bool) -> Result<(), Failure> {
        if let Some(seconds) = self.show.slow() {
            self.output.note(format_args!("about {seconds:.0} s per 100 tokens, by the last answer"));
        }
        let show = &mut self.show;
        let asked = self.conversation.ask(text, &mut |step| show.step(step))?;
        let answered = match asked {
            Asked::Answered(answered) => answered,
            Asked::TooLong { wanted, used, ctx } => {
                let why = format!(
                    "the message needs {wanted} tokens, and the context has room for {} (of {ctx}, with one for the \
                     answer): shorten it, /reset, or start with a larger --ctx",
                    ctx.saturating_sub(used + 1)
                );
                return match interactive {
                    true => {
                        self.output.warn(why);
                        Ok(())
                    }
                    false => Err(Failure::data("context_full", why)),
                };
            }
            Asked::Unread => {
                self.output.note(
                    "stopped while the message was read: it is taken back, and the conversation will be read again",
                );
                return self.go_on();
            }
            Asked::Lost => {
                self.output.warn(
                    "stopped while the message was read; the conversation, whose images came with a file, is gone: \
                     /load it again",
                );
                return self.go_on();
            }
        };
        self.show.finish(&answered)?;
        self.answers += 1;
        self.tokens += answered.tokens;
        self.report(&answered)?;
        self.last = Some(answered);
        self.go_on()
    }

    /// What there is to say after an answer.
    fn report(&self, answered: &Answered) -> Result<(), Failure> {
        let Answered { answer, finish, .. } = answered;
        if self.output.json() {
            self.output.event(&Report {
                turn: self.answers,
                text: &answer.content,
                reasoning: &answer.reasoning,
                tool_calls: answer.calls.iter().map(Call::of).collect(),
                finish_reason: answered.reason(),
                prompt_tokens: answered.prompt_tokens,
                reused_tokens: answered.reused_tokens,
                tokens: answered.tokens,
                reasoning_tokens: answered.reasoning_tokens,
                context_tokens: self.conversation.used(),
                ctx: self.conversation.ctx(),
                seconds: Seconds { prefill: answered.prefill_seconds, decode: answered.decode_seconds },
                tokens_per_second: answered.pace().unwrap_or(0.0),
                seed: answered.seed,
            })?;
        }
        for AnswerCall { name, arguments, .. } in &answer.calls {
            self.output.note(format_args!("the model called {name}({arguments}); there are no tools here"));
        }
        if *finish != Finish::Stop {
            self.output.note(format_args!("stopped because {}", finish.explain()));
        }
        self.output.detail(self.speeds(answered));
        let (used, ctx) = (self.conversation.used(), self.conversation.ctx());
        if used * 100 >= ctx * NEARLY_FULL {
            self.output.warn(format_args!(
                "the context is {} % full ({used} of {ctx} tokens); /reset begins anew, a larger --ctx holds more",
                (used * 100 / ctx).min(100)
            ));
        }
        Ok(())
    }

    fn speeds(&self, answered: &Answered) -> String {
        format!(
            "{} tokens in {:.2} s ({:.2} tok/s), {} read in {:.2} s, {} kept from before",
            answered.tokens,
            answered.decode_seconds,
            answered.pace().unwrap_or(0.0),
            answered.prompt_tokens,
            answered.prefill_seconds,
            answered.reused_tokens,
        )
    }

    /// A Ctrl-C has stopped an answer and no more; a SIGTERM means the program.
    fn go_on(&self) -> Result<(), Failure> {
        if self.opened.interrupt.forgive() { Ok(()) } else { Err(Failure::interrupted()) }
    }

    fn command(&mut self, command: Command, interactive: bool) -> Result<(), Failure> {
        match command {
            Command::Save(path) => {
                let outcome = self.conversation.save(&path).map_err(Failure::from);
                let kept = self.conversation.used();
                self.say(outcome, format_args!("{kept} tokens kept in {}", path.display()), interactive)?;
            }
            Command::Load(path) => {
                let outcome = self.conversation.load(&path);
                let known = self.conversation.used();
                self.say(outcome, format_args!("{known} tokens from {}", path.display()), interactive)?;
            }
            Command::Image(path) => {
                let Chat { album, conversation, opened, output, .. } = self;
                let outcome = album.look(&path).and_then(|seen| {
                    album.attach(&seen, &opened.engine, conversation, output)?;
                    Ok(seen.image())
                });
                // A Ctrl-C has stopped the encoding.
                if outcome.as_ref().is_err_and(|failure| failure.exit == Exit::Interrupted) {
                    self.output.note("stopped; the image was not added");
                    return self.go_on();
                }
                let (image, outcome) = match outcome {
                    Ok(image) => (Some(image), Ok(())),
                    Err(failure) => (None, Err(failure)),
                };
                let tokens = image.map_or(0, |image| image.rows);
                let done = format_args!("{} goes with the next message, as {tokens} tokens", path.display())
                    .to_string();
                self.say(outcome, format_args!("{done}"), interactive)?;
            }
            Command::Think => {
                let shown = self.show.toggle_thinking();
                self.output.note(if shown { "thinking is shown" } else { "thinking is hidden" });
            }
            Command::Reset => {
                self.conversation.reset();
                self.output.note("a new conversation");
            }
            Command::System(None) => match self.conversation.system() {
                Some(text) => self.output.note(format_args!("the system message is: {text}")),
                None => self.output.note("there is no system message; /system TEXT gives one"),
            },
            Command::System(Some(text)) => {
                self.conversation.set_system(text);
                self.output.note("the model is told before the next message");
            }
            Command::Stats => self.stats(),
            Command::Help => self.output.note(HELP),
            Command::Quit => (),
        }
        Ok(())
    }

    /// Says what was done, or why not: at a terminal the conversation goes on.
    fn say(
        &self,
        outcome: Result<(), Failure>,
        done: fmt::Arguments<'_>,
        interactive: bool,
    ) -> Result<(), Failure> {
        match outcome {
            Ok(()) => self.output.note(done),
            Err(failure) if interactive => self.output.warn(failure),
            Err(failure) => return Err(failure),
        }
        Ok(())
    }

    fn stats(&self) {
        let reads = self.opened.engine.read_stats();
        let (used, ctx) = (self.conversation.used(), self.conversation.ctx());
        self.output.note(format_args!("context: {used} of {ctx} tokens ({} %)", used * 100 / ctx));
        self.output.note(format_args!("answers: {}, {} tokens", self.answers, self.tokens));
        if let Some(last) = &self.last {
            self.output.note(format_args!("last: {}", self.speeds(last)));
        }
        let demands = reads.hits + reads.ahead_hits + reads.misses;
        self.output.note(format_args!(
            "experts: {demands} used, {:.1} % from the cache, {} read ahead in time; {} read from disk",
            if demands > 0 { 100.0 * reads.hits as f64 / demands as f64 } else { 0.0 },
            reads.ahead_hits,
            size(reads.bytes_read),
        ));
        if let Some(bytes) = peak_rss_bytes() {
            self.output.note(format_args!("memory: {} at most", size(bytes)));
        }
    }
}

/// How long to wait before looking at the signal again.
const WATCH: Duration = Duration::from_millis(50);
