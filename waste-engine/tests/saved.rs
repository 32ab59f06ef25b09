//! States that are taken and come back, in memory and in files: bit for bit, or not at all.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{argmax, path};
use proptest::prelude::*;
use waste_common::plan::KvType;
use waste_engine::sampler::{SamplerOptions, SamplerState};
use waste_engine::saved::{self, Form, ImageSpan, Manner, Text};
use waste_engine::{
    Arith, Begun, Engine, EngineError, EngineOptions, Event, Finish, Listener, Request, Saved, SavedError,
    Session, SoFar, Wanted, Watch, generate,
};

const K3: &str = "interop/tiny-k3.waste";
const LINEAR: &str = "interop/tiny-linear.waste";

fn options() -> EngineOptions {
    let (arith, kv) = (Arith::Exact, KvType::F32);
    EngineOptions {
        ctx: 96,
        chunk: 16,
        threads: 2,
        cache_slots: 16,
        readers: 0,
        arith,
        kv,
        ..Default::default()
    }
}

fn open(model: &str, options: EngineOptions) -> Engine {
    Engine::open(&path(model), options).unwrap()
}

fn prompt(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 37 + 11) % 500).collect()
}

/// The logits of greedy steps from `token` on, and the last token.
fn decode(engine: &Engine, session: &mut Session, mut token: u32, steps: usize) -> (Vec<u32>, u32) {
    let mut bits = Vec::new();
    for _ in 0..steps {
        let input = [token];
        let sink = &mut |_, logits: &[f32]| {
            bits.extend(logits.iter().map(|x| x.to_bits()));
            token = argmax(logits);
            Ok(())
        };
        engine.forward(session, &input, Wanted::Last, sink).unwrap();
    }
    (bits, token)
}

fn started(engine: &Engine) -> Session {
    let mut session = engine.session().unwrap();
    engine.forward(&mut session, &prompt(40), Wanted::Nothing, &mut |_, _| Ok(())).unwrap();
    session
}

fn text(tokens: Vec<u32>) -> Text {
    let sampler = SamplerState { seed: 7, draws: 3, counts: vec![(1, 2), (9, 1)] };
    let images = vec![ImageSpan { position: 2, tokens: 4, sha256: "0".repeat(64) }];
    let manner = Manner {
        sampler: SamplerOptions { temperature: 0.7, seed: Some(7), ..SamplerOptions::default() },
        stop: vec!["\n".to_owned()],
        masked: false,
        form: Some(Form::Grammar("start: \"a\"".to_owned())),
    };
    Text { answer: 40, left: 5, ended: false, tokens, images, sampler, manner: Some(manner) }
}

#[test]
fn a_snapshot_is_the_state_bit_for_bit() {
    for (model, kv) in
        [(K3, KvType::F32), (K3, KvType::F16), (K3, KvType::Q8), (LINEAR, KvType::F32), (LINEAR, KvType::Q8)]
    {
        let engine = open(model, EngineOptions { kv, ..options() });
        let mut session = started(&engine);
        let (_, token) = decode(&engine, &mut session, 3, 4);
        let snapshot = session.snapshot().unwrap();
        assert_eq!((snapshot.position(), snapshot.bytes()), (44, session.snapshot_bytes(44)));
        assert!(snapshot.bytes() > 44);
        let (expected, _) = decode(&engine, &mut session, token, 6);
        // Back in the same session, and into another one that has other rows beyond the position.
        session.restore(&snapshot).unwrap();
        assert_eq!(session.snapshot().unwrap(), snapshot);
        assert_eq!(decode(&engine, &mut session, token, 6).0, expected, "{model} {kv}");
        let mut other = engine.session().unwrap();
        engine.forward(&mut other, &prompt(80), Wanted::Nothing, &mut |_, _| Ok(())).unwrap();
        other.restore(&snapshot).unwrap();
        assert_eq!(decode(&engine, &mut other, token, 6).0, expected, "{model} {kv}");
    }
}

#[test]
fn a_snapshot_that_does_not_fit_changes_nothing() {
    let engine = open(K3, options());
    let snapshot = started(&engine).snapshot().unwrap();
    for other in [
        open(LINEAR, options()),
        open(K3, EngineOptions { kv: KvType::F16, ..options() }),
        open(K3, EngineOptions { ctx: 39, ..options() }),
    ] {
        let mut session = other.session().unwrap();
        decode(&other, &mut session, 3, 2);
        let before = session.snapshot().unwrap();
        assert!(session.restore(&snapshot).is_err());
        assert_eq!(session.snapshot().unwrap(), before);
    }
}

/// A pass that was stopped within a chunk leaves a state of no position: nothing takes it for one.
#[test]
fn a_broken_state_is_not_saved() {
    let cancelled = Arc::new(AtomicBool::new(false));
    let engine = open(K3, EngineOptions { cancelled: Arc::clone(&cancelled), ..options() });
    let mut session = engine.session().unwrap();
    let bad = engine.forward(&mut session, &prompt(3), Wanted::Last, &mut |_, _| {
        Err(EngineError::Sink("full".to_owned()))
    });
    assert!(bad.is_err() && session.snapshot().is_ok(), "the pass itself was whole");
    // The flag goes up while the chunk is computed.
    let stop = Arc::clone(&cancelled);
    let waiter = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(1));
        stop.store(true, Ordering::Relaxed);
    });
    let _ = engine.forward(&mut session, &prompt(90), Wanted::Nothing, &mut |_, _| Ok(()));
    waiter.join().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("s");
    match session.snapshot() {
        // Stopped between chunks after all.
        Ok(snapshot) => assert_eq!((snapshot.position() - 3) % 16, 0),
        Err(_) => {
            assert!(saved::save(&engine, &session, &text(prompt(93)), &file).is_err());
            assert!(!file.exists());
            session.reset();
            assert!(session.snapshot().is_ok());
        }
    }
}

#[test]
fn a_file_brings_the_state_back_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    for (model, kv, arith) in [
        (K3, KvType::F32, Arith::Exact),
        (K3, KvType::F16, Arith::Fast),
        (K3, KvType::Q8, Arith::Exact),
        (LINEAR, KvType::Q8, Arith::Fast),
    ] {
        let file = dir.path().join("s");
        let options = EngineOptions { kv, arith, ..options() };
        let engine = open(model, options.clone());
        let mut session = started(&engine);
        let written = text([prompt(40), vec![3]].concat());
        saved::save(&engine, &session, &written, &file).unwrap();
        let (expected, _) = decode(&engine, &mut session, 3, 6);
        // Another engine, even with a longer context.
        let engine = open(model, EngineOptions { ctx: 200, ..options });
        let mut session = engine.session().unwrap();
        let mut saved = Saved::open(&file).unwrap().unwrap();
        assert_eq!((saved.text(), saved.position(), saved.pending()), (&written, 40, [3].as_slice()));
        saved.restore(&engine, &mut session).unwrap();
        assert_eq!(session.position(), 40);
        assert_eq!(decode(&engine, &mut session, 3, 6).0, expected, "{model} {kv}");
    }
    assert!(Saved::open(&dir.path().join("none")).unwrap().is_none());
}

#[test]
fn another_model_or_other_options_are_refused_and_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("s");
    let engine = open(K3, options());
    saved::save(&engine, &started(&engine), &text(prompt(41)), &file).unwrap();
    for (other, code) in [
        (open(LINEAR, options()), "session_of_another_model"),
        (open("golden/tiny-k3/ckpt", options()), "session_of_another_model"),
        (open(K3, EngineOptions { kv: KvType::F16, ..options() }), "session_of_other_options"),
        (open(K3, EngineOptions { arith: Arith::Fast, ..options() }), "session_of_other_options"),
        (open(K3, EngineOptions { chunk: 8, ..options() }), "session_of_other_options"),
        (open(K3, EngineOptions { ctx: 39, ..options() }), "context_full"),
    ] {
        let mut session = other.session().unwrap();
        decode(&other, &mut session, 3, 2);
        let before = session.snapshot().unwrap();
        let error = Saved::open(&file).unwrap().unwrap().restore(&other, &mut session).unwrap_err();
        assert_eq!(waste_common::error::Coded::code(&error), code, "{error}");
        assert_eq!(session.snapshot().unwrap(), before);
    }
}

fn session_file(dir: &Path) -> Vec<u8> {
    let file = dir.join("whole");
    let engine = open(LINEAR, options());
    let mut session = engine.session().unwrap();
    decode(&engine, &mut session, 3, 2);
    saved::save(&engine, &session, &text(prompt(40)), &file).unwrap();
    fs::read(file).unwrap()
}

#[test]
fn truncated_or_flipped_at_any_byte_it_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let whole = session_file(dir.path());
    let file = dir.path().join("damaged");
    let refused = |content: &[u8]| {
        fs::write(&file, content).unwrap();
        matches!(
            Saved::open(&file),
            Err(SavedError::NotASession { .. } | SavedError::Version { .. } | SavedError::Damaged { .. })
        )
    };
    let header = 12 + u32::from_le_bytes(whole[8..12].try_into().unwrap()) as usize;
    // Every byte of the header, its neighbours and the end.
    for at in (0..header + 8).chain(whole.len() - 8..whole.len()) {
        assert!(refused(&whole[..at]), "cut at {at}");
        let mut flipped = whole.clone();
        flipped[at] ^= 1 << (at % 8);
        assert!(refused(&flipped), "flipped at {at}");
    }
    assert!(refused(&[&whole[..], b"x"].concat()));
    proptest!(ProptestConfig::with_cases(64), |(at in 0..whole.len(), bit in 0..8u8)| {
        prop_assert!(refused(&whole[..at]));
        let mut flipped = whole.clone();
        flipped[at] ^= 1 << bit;
        prop_assert!(refused(&flipped));
    });
    fs::write(&file, &whole).unwrap();
    assert!(Saved::open(&file).unwrap().is_some());
}

/// What a run does with a session file, in short.
struct Saver<'a> {
    engine: &'a Engine,
    file: &'a Path,
    before: Vec<u32>,
    shown: String,
}

impl Listener for Saver<'_> {
    fn text(&mut self, text: &str) -> Result<(), EngineError> {
        self.shown.push_str(text);
        Ok(())
    }

    fn pause(&mut self, session: &Session, so_far: &SoFar<'_>) -> Result<(), EngineError> {
        if so_far.finish.is_some() {
            let tokens = [&self.before, so_far.tokens].concat();
            let text = Text {
                tokens,
                images: Vec::new(),
                sampler: so_far.sampler.clone(),
                answer: 70,
                left: 1,
                ended: false,
                manner: None,
            };
            saved::save(self.engine, session, &text, self.file)?;
        }
        Ok(())
    }
}

/// An interrupt in the middle of a prompt: the rest goes through later, and the text is the same.
#[test]
fn a_prompt_that_was_interrupted_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("s");
    let request = Request {
        prompt: prompt(70),
        max_tokens: 12,
        sampler: SamplerOptions { temperature: 0.8, seed: Some(5), ..SamplerOptions::default() },
        ..Request::default()
    };
    let whole = open(K3, options());
    let expected =
        generate(&whole, &mut whole.session().unwrap(), None, &request, &mut |_: &str| Ok(())).unwrap();

    let cancelled = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&cancelled);
    // Raised when two of the five chunks are done.
    let watch = Watch(Some(Arc::new(move |event| {
        if event == (Event::Prefilled { tokens: 32, of: 70 }) {
            flag.store(true, Ordering::Relaxed);
        }
    })));
    let engine = open(K3, EngineOptions { cancelled, watch, ..options() });
    let mut session = engine.session().unwrap();
    session.finish_chunks();
    let mut saver = Saver { engine: &engine, file: &file, before: prompt(70), shown: String::new() };
    let stopped = generate(&engine, &mut session, None, &request, &mut saver).unwrap();
    assert_eq!((stopped.finish, session.position()), (Finish::Cancelled, 32));

    let mut session = whole.session().unwrap();
    let mut saved = Saved::open(&file).unwrap().unwrap();
    saved.restore(&whole, &mut session).unwrap();
    assert_eq!(saved.pending(), &prompt(70)[32..]);
    let begun = Some(Begun { tokens: Vec::new(), sampler: saved.text().sampler.clone() });
    let request = Request { prompt: saved.pending().to_vec(), begun, ..request };
    let found = generate(&whole, &mut session, None, &request, &mut |_: &str| Ok(())).unwrap();
    assert_eq!((found.tokens, found.seed), (expected.tokens, 5));
}
