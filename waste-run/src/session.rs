//! `--session`: a text that goes on over several runs, and over their deaths.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use waste_common::cli::{Failure, Output};
use waste_common::files::FileLock;
use waste_engine::saved::{self, ImageSpan, Manner, Text};
use waste_engine::{Begun, Engine, EngineError, Finish, Saved, Session, SoFar};

use crate::args::RunArgs;
use crate::sampling;

/// Most tokens of an answer, if nobody says.
const TOKENS: usize = 128;

/// The text so far, and how it goes on.
pub struct Going {
    saved: Option<Saved>,
    /// All tokens: what was saved, and the new prompt.
    pub tokens: Vec<u32>,
    /// Those that have not gone through the model.
    pub pending: Vec<u32>,
    /// An answer that was begun, or at least the sampler's state.
    pub begun: Option<Begun>,
    /// Most tokens of the answer, begun or not.
    pub max_tokens: usize,
    /// Images in the text.
    pub images: Vec<ImageSpan>,
    /// How the answer is written.
    pub manner: Manner,
    answer: usize,
}

/// Takes the session file of a run, if it has one, for itself: another run would write its own text over this one's.
///
/// # Errors
/// Another process has it.
pub fn lock(args: &RunArgs) -> Result<Option<FileLock>, Failure> {
    match &args.session {
        Some(_) if args.tokens == Some(0) => {
            Err(Failure::usage("-n 0 writes nothing, so there would be nothing to save to --session"))
        }
        Some(path) => Ok(Some(FileLock::acquire(path)?)),
        None => Ok(None),
    }
}

/// Opens the session file of a run, if it has one that exists.
///
/// # Errors
/// The file cannot be used, or not with this model.
pub fn open(args: &RunArgs, fingerprint: &str) -> Result<Option<Saved>, Failure> {
    let saved = args.session.as_deref().map(Saved::open).transpose()?.flatten();
    saved.iter().try_for_each(|saved| saved.check_model(fingerprint))?;
    Ok(saved)
}

impl Going {
    /// `prompt` comes after what was saved.
    ///
    /// # Errors
    /// The options do not go with the session.
    pub fn new(args: &RunArgs, saved: Option<Saved>, prompt: Vec<u32>) -> Result<Going, Failure> {
        let limit = args.tokens.unwrap_or(TOKENS);
        let manner =
            |before: Option<Manner>| sampling::manner(&args.sampling, &args.form, before.unwrap_or_default());
        let Some(saved) = saved else {
            let (answer, pending) = (prompt.len(), prompt.clone());
            let images = Vec::new();
            return Ok(Going {
                saved: None,
                tokens: prompt,
                pending,
                begun: None,
                max_tokens: limit,
                images,
                manner: manner(None)?,
                answer,
            });
        };
        let text = saved.text();
        if let Some(seed) = args.sampling.seed.filter(|seed| *seed != text.sampler.seed) {
            return Err(Failure::usage(format!(
                "the session goes on with its own random numbers, of seed {}; --seed {seed} would change them: leave it \
                 out, or use another file",
                text.sampler.seed
            )));
        }
        if prompt.is_empty() && text.ended {
            return Err(Failure::usage("the text of the session has ended; give a prompt to go on from it"));
        }
        let interrupted = prompt.is_empty() && text.left > 0;
        let answer = if interrupted { text.answer } else { text.tokens.len() + prompt.len() };
        let tokens = [text.tokens.as_slice(), &prompt].concat();
        let begun = Begun { tokens: tokens[answer..].to_vec(), sampler: text.sampler.clone() };
        let max_tokens = match args.tokens {
            None if interrupted => begun.tokens.len().saturating_add(text.left),
            _ => limit,
        };
        if begun.tokens.len() >= max_tokens {
            return Err(Failure::usage(format!(
                "the interrupted answer has {} tokens already; -n counts them too: leave it out to finish the answer",
                begun.tokens.len()
            )));
        }
        let pending = tokens[saved.position()..].to_vec();
        let images = text.images.clone();
        let manner = manner(text.manner.clone().filter(|_| interrupted))?;
        let begun = Some(begun);
        Ok(Going { saved: Some(saved), tokens, pending, begun, max_tokens, images, manner, answer })
    }

    /// Tokens of the answer that earlier runs have written.
    pub fn begun_tokens(&self) -> usize {
        self.begun.as_ref().map_or(0, |begun| begun.tokens.len())
    }

    /// The session to run in, with the saved state in it.
    ///
    /// # Errors
    /// The saved state is of another model or of other options.
    pub fn start(&mut self, engine: &Engine, keep: bool) -> Result<Session, Failure> {
        let mut session = engine.session()?;
        if keep {
            session.finish_chunks();
        }
        if let Some(mut saved) = self.saved.take() {
            saved.restore(engine, &mut session)?;
        }
        Ok(session)
    }
}

/// Saves a run's session when it is time to.
pub struct Keeper<'a> {
    path: PathBuf,
    every: Option<Duration>,
    last: Instant,
    engine: &'a Engine,
    going: Going,
    output: Output,
}

impl<'a> Keeper<'a> {
    /// Keeps a session in a file.
    pub fn new(
        path: &Path,
        every: Option<Duration>,
        engine: &'a Engine,
        going: Going,
        output: &Output,
    ) -> Keeper<'a> {
        Keeper { path: path.to_owned(), every, last: Instant::now(), engine, going, output: output.clone() }
    }

    /// What [`Listener::pause`](waste_engine::Listener::pause) does.
    ///
    /// # Errors
    /// The state at the end cannot be saved. On the way that is a warning: the answer may still be finished.
    pub fn pause(&mut self, session: &Session, so_far: &SoFar<'_>) -> Result<(), EngineError> {
        let due = self.every.is_some_and(|every| self.last.elapsed() >= every);
        if so_far.finish.is_none() && !due {
            return Ok(());
        }
        let outcome = saved::save(self.engine, session, &self.text(so_far), &self.path);
        self.last = Instant::now();
        match outcome {
            Err(error) if so_far.finish.is_none() => {
                self.output.warn(format_args!("the session was not saved: {error}"));
                Ok(())
            }
            outcome => outcome,
        }
    }

    fn text(&self, so_far: &SoFar<'_>) -> Text {
        let Going { tokens, max_tokens, images, manner, answer, .. } = &self.going;
        let new = so_far.tokens.iter().skip(self.going.begun_tokens());
        Text {
            tokens: tokens.iter().chain(new).copied().collect(),
            images: images.clone(),
            sampler: so_far.sampler.clone(),
            answer: *answer,
            left: match so_far.finish {
                None | Some(Finish::Cancelled) => max_tokens.saturating_sub(so_far.tokens.len()),
                Some(_) => 0,
            },
            ended: matches!(so_far.finish, Some(Finish::Stop | Finish::StopString | Finish::Complete)),
            manner: Some(manner.clone()),
        }
    }
}
