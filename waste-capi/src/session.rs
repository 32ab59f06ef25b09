//! Sessions: a text on its way through a model.
#![allow(unsafe_code)] // the border: see each function

use std::ffi::{c_char, c_void};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use waste_engine::sampler::{Sampler, SamplerOptions, SamplerState};
use waste_engine::saved::{self, ImageSpan, Text as SavedText};
use waste_engine::{Begun, EngineError, Finish, Listener, Saved, Session as State, SoFar, Wanted};

use crate::error::{Fault, Status, guard};
use crate::images::Waiting;
use crate::model::{Model, Opened};
use crate::params::{self, OnText, Outcome, Params};
use crate::raw;

/// A text, its state in the model, and how sampling goes on. Independent of other sessions.
pub struct Session {
    pub(crate) model: Arc<Opened>,
    inner: Mutex<Inner>,
}

/// What of a session one call has at a time.
pub struct Inner {
    pub(crate) state: State,
    /// All tokens, those in the state first.
    pub(crate) tokens: Vec<u32>,
    /// Images among them.
    pub(crate) images: Vec<ImageSpan>,
    /// Images whose tokens are still to come.
    pub(crate) waiting: Vec<Waiting>,
    sampler: Option<SamplerState>,
    /// Where the last answer begins.
    answer: usize,
    /// Tokens that were still to come when it was stopped.
    left: usize,
    /// The model ended it.
    ended: bool,
}

impl Session {
    /// # Errors
    /// Another call uses it.
    pub(crate) fn inner(&self) -> Result<MutexGuard<'_, Inner>, Fault> {
        match self.inner.try_lock() {
            Ok(inner) => Ok(inner),
            // A panic in a pass left a state that its own check refuses.
            Err(TryLockError::Poisoned(inner)) => Ok(inner.into_inner()),
            Err(TryLockError::WouldBlock) => Err(Fault::usage("another call is using this session")),
        }
    }
}

impl Inner {
    fn reset(&mut self) {
        self.state.reset();
        let Inner { tokens, images, waiting, sampler, answer, left, ended, .. } = self;
        tokens.clear();
        images.clear();
        waiting.clear();
        (*sampler, *answer, *left, *ended) = (None, 0, 0, false);
    }

    /// What has not gone through the model yet, and `more`.
    fn pending(&self, more: &[u32]) -> Vec<u32> {
        [self.tokens.get(self.state.position()..).unwrap_or_default(), more].concat()
    }

    fn save(&self, model: &Opened, path: &std::path::Path) -> Result<(), Fault> {
        let sampler = match &self.sampler {
            Some(sampler) => sampler.clone(),
            None => Sampler::new(SamplerOptions::default())?.state().clone(),
        };
        let text = SavedText {
            tokens: self.tokens.clone(),
            images: self.images.clone(),
            sampler,
            answer: self.answer,
            left: self.left,
            ended: self.ended,
            // A caller gives its options with each call.
            manner: None,
        };
        Ok(saved::save(&model.engine, &self.state, &text, path)?)
    }

    fn load(&mut self, model: &Opened, path: &std::path::Path) -> Result<(), Fault> {
        let missing = || Fault::data("unreadable_file", format!("there is no session {}", path.display()));
        let mut saved = Saved::open(path)?.ok_or_else(missing)?;
        saved.restore(&model.engine, &mut self.state)?;
        let SavedText { tokens, images, sampler, answer, left, ended, .. } = saved.text().clone();
        (self.tokens, self.images, self.sampler) = (tokens, images, Some(sampler));
        (self.answer, self.left, self.ended) = (answer, left, ended);
        self.waiting.clear();
        Ok(())
    }
}

/// Hands text to the callback, and keeps what the session needs.
struct Teller {
    on_text: OnText,
    user: *mut c_void,
    tokens: Vec<u32>,
    sampler: Option<SamplerState>,
}

impl Listener for Teller {
    fn text(&mut self, text: &str) -> Result<(), EngineError> {
        if let Some(on_text) = self.on_text {
            // SAFETY: a function of this type, with the pointer that goes with it, as the caller promises.
            let stop = unsafe { on_text(self.user, text.as_ptr().cast(), text.len()) };
            // This answer alone: other sessions of the model may be writing too.
            if stop != 0 {
                return Err(EngineError::Interrupted);
            }
        }
        Ok(())
    }

    fn pause(&mut self, _session: &State, so_far: &SoFar<'_>) -> Result<(), EngineError> {
        self.tokens.clear();
        self.tokens.extend(so_far.tokens);
        self.sampler = Some(so_far.sampler.clone());
        Ok(())
    }
}

/// Makes an empty session, with all the memory it will need. On success `*session` is to be ended with
/// waste_session_close. The model's plan has room for one; each further one takes state and scratch once more.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_session_open(model: *const Model, session: *mut *mut Session) -> Status {
    guard(|| {
        // SAFETY: the caller's promise.
        unsafe { raw::put(session, std::ptr::null_mut(), "the place for the session")? };
        // SAFETY: as above.
        let model = Arc::clone(&unsafe { raw::handle(model, "the model")? }.0);
        let inner = Inner {
            state: model.engine.session()?,
            tokens: Vec::new(),
            images: Vec::new(),
            waiting: Vec::new(),
            sampler: None,
            answer: 0,
            left: 0,
            ended: false,
        };
        let opened = Session { model, inner: Mutex::new(inner) };
        // SAFETY: as above.
        unsafe { raw::give(opened, session, "the place for the session") }
    })
}

/// Ends a session; NULL does nothing.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_session_close(session: *mut Session) {
    guard(|| {
        // SAFETY: the caller's promise.
        unsafe { raw::take(session) };
        Ok(())
    });
}

/// Back to the empty session.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_session_reset(session: *mut Session) -> Status {
    guard(|| {
        // SAFETY: the caller's promise.
        unsafe { raw::handle(session, "the session")? }.inner()?.reset();
        Ok(())
    })
}

/// Tells a session's tokens, answers included: up to `capacity` ids go to `ids`, and `*count` says how many there are.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_session_tokens(
    session: *const Session,
    ids: *mut u32,
    capacity: usize,
    count: *mut usize,
) -> Status {
    guard(|| {
        // SAFETY: the caller's promise.
        let inner = unsafe { raw::handle(session, "the session")? }.inner()?;
        // SAFETY: as above.
        unsafe { raw::put_all(&inner.tokens, ids, capacity, count) }
    })
}

/// Writes the session to a file, durably, and whole or not at all. `waste-run --session` goes on from it too.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_session_save(session: *const Session, path: *const c_char) -> Status {
    guard(|| {
        // SAFETY: the caller's promise.
        let session = unsafe { raw::handle(session, "the session")? };
        // SAFETY: as above.
        let path = unsafe { raw::path(path, "the path of the session")? };
        session.inner()?.save(&session.model, &path)
    })
}

/// Takes a session from a file, which must be of the same model and options. What is damaged, foreign or not there is
/// refused, and the session stays as it was; only if the file cannot be read to its end a reset is needed.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_session_load(session: *mut Session, path: *const c_char) -> Status {
    guard(|| {
        // SAFETY: the caller's promise.
        let session = unsafe { raw::handle(session, "the session")? };
        // SAFETY: as above.
        let path = unsafe { raw::path(path, "the path of the session")? };
        session.inner()?.load(&session.model, &path)
    })
}

/// Takes tokens in and gives the logits of the last one: up to `capacity` of them go to `logits`, the model's vocabulary
/// is how many there are, and fewer are refused before anything is done. The session holds the tokens then.
/// After an error in the middle the session needs a reset; after WASTE_STATUS_INTERRUPTED the same call without new
/// tokens goes on.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_eval(
    session: *mut Session,
    ids: *const u32,
    count: usize,
    logits: *mut f32,
    capacity: usize,
) -> Status {
    guard(|| {
        // SAFETY: the caller's promise.
        let session = unsafe { raw::handle(session, "the session")? };
        // SAFETY: as above.
        let ids = unsafe { raw::slice(ids, count, "the ids")? };
        let (engine, mut inner) = (&session.model.engine, session.inner()?);
        let vocab = engine.config().vocab;
        if logits.is_null() || capacity < vocab {
            return Err(Fault::usage(format!("there are {vocab} logits, and room for {capacity}")));
        }
        let inner = &mut *inner;
        let pending = inner.pending(ids);
        if pending.is_empty() {
            return Err(Fault::usage("there is no token to evaluate"));
        }
        EngineError::check_tokens(&pending, inner.state.position(), engine.ctx(), vocab)?;
        inner.state.check_intact()?;
        let places = inner.places(ids, &session.model)?;
        inner.take_images(places);
        inner.tokens.extend(ids);
        let mut last = Vec::new();
        let outcome = engine.forward(&mut inner.state, &pending, Wanted::Last, &mut |_, row| {
            last.extend(row);
            Ok(())
        });
        if matches!(outcome, Err(EngineError::Interrupted)) {
            session.model.cancelled.store(false, Ordering::Relaxed);
        }
        outcome?;
        let mut put = 0;
        // SAFETY: as above.
        unsafe { raw::put_all(&last, logits, capacity, &mut put) }
    })
}

/// Takes tokens in and writes an answer, from wherever the session is. Text is handed to `on_text` (or NULL) with `user`
/// as it becomes certain; `outcome` (or NULL) says what came of it, and waste_session_tokens what was written.
/// Without new tokens it goes on from what was written before. After an error in the middle the session needs a
/// reset.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_generate(
    session: *mut Session,
    ids: *const u32,
    count: usize,
    params: *const Params,
    on_text: OnText,
    user: *mut c_void,
    outcome: *mut Outcome,
) -> Status {
    guard(|| {
        // SAFETY: the caller's promise.
        let session = unsafe { raw::handle(session, "the session")? };
        // SAFETY: as above.
        let ids = unsafe { raw::slice(ids, count, "the ids")? };
        let (model, mut inner) = (&*session.model, session.inner()?);
        let inner = &mut *inner;
        // SAFETY: as above.
        let (mut request, seeded) = unsafe { params::request(params, model)? };
        request.prompt = inner.pending(ids);
        if let Some(sampler) = inner.sampler.clone().filter(|_| !seeded) {
            request.begun = Some(Begun { tokens: Vec::new(), sampler });
        }
        request.check()?;
        let (position, engine) = (inner.state.position(), &model.engine);
        EngineError::check_tokens(&request.prompt, position, engine.ctx(), engine.config().vocab)?;
        inner.state.check_intact()?;
        let places = inner.places(ids, model)?;
        inner.take_images(places);

        let mut teller = Teller { on_text, user, tokens: Vec::new(), sampler: None };
        inner.tokens.extend(ids);
        // Without new tokens an answer that was stopped goes on.
        if !ids.is_empty() || inner.left == 0 {
            inner.answer = inner.tokens.len();
        }
        let tokenizer = model.tokenizer.as_ref();
        let written = waste_engine::generate(engine, &mut inner.state, tokenizer, &request, &mut teller);
        inner.tokens.extend(&teller.tokens);
        inner.sampler = teller.sampler.or_else(|| inner.sampler.take());
        let written = written?;
        inner.left = match written.finish {
            Finish::Cancelled => request.max_tokens.saturating_sub(written.tokens.len()),
            _ => 0,
        };
        inner.ended = matches!(written.finish, Finish::Stop | Finish::StopString | Finish::Complete);
        // What stopped this one is not meant for the next one; and one that has ended needs no stopping.
        model.cancelled.store(false, Ordering::Relaxed);
        if outcome.is_null() {
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { raw::fill(outcome, &Outcome::of(&written, request.prompt.len()), "the outcome") }
    })
}
