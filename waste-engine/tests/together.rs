//! Sequences that decode together: each gets the bits it gets alone, whoever else comes along.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::Ordering;

use common::{argmax, path};
use waste_common::plan::KvType;
use waste_engine::{Arith, Engine, EngineError, EngineOptions, Sequence, Session, Wanted};

const K3: &str = "interop/tiny-k3.waste";
const LINEAR: &str = "interop/tiny-linear.waste";
const DIRECT: &str = "golden/tiny-k3/ckpt";
const SEQUENCES: usize = 5;
const STEPS: usize = 6;

fn options(arith: Arith, kv: KvType) -> EngineOptions {
    EngineOptions {
        ctx: 64,
        chunk: 8,
        threads: 2,
        cache_slots: 8,
        readers: 2,
        parallel: SEQUENCES,
        arith,
        kv,
        ..Default::default()
    }
}

/// A prompt of its own for each sequence, of another length.
fn prompt(i: usize) -> Vec<u32> {
    (0..3 + 4 * i as u32).map(|t| (t * 37 + 11 + 101 * i as u32) % 500).collect()
}

type Logits = Vec<Vec<u32>>;

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

/// Takes the prompt in; the token it ends with.
fn begin(engine: &Engine, session: &mut Session, i: usize) -> u32 {
    let mut token = 0;
    let sink = &mut |_, logits: &[f32]| {
        token = argmax(logits);
        Ok(())
    };
    engine.forward(session, &prompt(i), Wanted::Last, sink).unwrap();
    token
}

fn alone(engine: &Engine, i: usize) -> Logits {
    let mut session = engine.session().unwrap();
    let mut token = begin(engine, &mut session, i);
    let mut found = Vec::new();
    for _ in 0..STEPS {
        let input = [token];
        let sink = &mut |_, logits: &[f32]| {
            found.push(bits(logits));
            token = argmax(logits);
            Ok(())
        };
        engine.forward(&mut session, &input, Wanted::Last, sink).unwrap();
    }
    found
}

/// All of them through one session's buffers. Each joins a step after the one before, and leaves when it is done.
fn together(engine: &Engine) -> Vec<Logits> {
    let mut session = engine.session().unwrap();
    let mut sequences: Vec<Sequence> = (0..SEQUENCES).map(|_| engine.sequence()).collect();
    let mut tokens = [0; SEQUENCES];
    let mut found: Vec<Logits> = vec![Vec::new(); SEQUENCES];
    for step in 0..SEQUENCES + STEPS {
        if let Some(sequence) = sequences.get_mut(step) {
            session.swap(sequence);
            tokens[step] = begin(engine, &mut session, step);
            session.swap(sequence);
        }
        let running = |i: &usize| *i <= step && found[*i].len() < STEPS;
        let places: Vec<usize> = (0..SEQUENCES).filter(running).collect();
        let of: Vec<u32> = places.iter().map(|&i| tokens[i]).collect();
        let mut group: Vec<&mut Sequence> =
            sequences.iter_mut().enumerate().filter(|(i, _)| places.contains(i)).map(|(_, s)| s).collect();
        let sink = &mut |row: usize, logits: Result<&[f32], EngineError>| {
            let logits = logits?;
            found[places[row]].push(bits(logits));
            tokens[places[row]] = argmax(logits);
            Ok(())
        };
        engine.forward_together(&mut session, &mut group, &of, sink).unwrap();
    }
    assert!(found.iter().all(|logits| logits.len() == STEPS));
    for (i, sequence) in sequences.iter().enumerate() {
        assert_eq!(sequence.position(), prompt(i).len() + STEPS);
    }
    found
}

#[test]
fn the_bits_are_those_of_each_alone() {
    for model in [K3, LINEAR] {
        for (arith, kv) in
            [(Arith::Fast, KvType::F16), (Arith::Exact, KvType::F32), (Arith::Fast, KvType::Q8)]
        {
            let engine = Engine::open(&path(model), options(arith, kv)).unwrap();
            let found = together(&engine);
            for (i, found) in found.iter().enumerate() {
                assert!(*found == alone(&engine, i), "{model}, {arith:?}, {kv}: sequence {i}");
            }
        }
    }
}

#[test]
fn neither_threads_nor_cache_nor_reading_ahead_change_them() {
    let of = |options: EngineOptions| together(&Engine::open(&path(K3), options).unwrap());
    let usual = options(Arith::Fast, KvType::F16);
    let expected = of(usual.clone());
    for (threads, cache_slots, readers, lookahead) in [(1, 8, 0, 0), (3, 9, 1, 6), (4, 500, 4, 6)] {
        assert!(of(EngineOptions { threads, cache_slots, readers, lookahead, ..usual.clone() }) == expected);
    }
}

#[test]
fn a_checkpoint_run_directly_does_too() {
    let engine = Engine::open(&path(DIRECT), options(Arith::Fast, KvType::F16)).unwrap();
    let found = together(&engine);
    for (i, found) in found.iter().enumerate() {
        assert!(*found == alone(&engine, i), "sequence {i}");
    }
}

#[test]
fn what_does_not_go_is_refused_and_changes_nothing() {
    let engine = Engine::open(&path(K3), EngineOptions { parallel: 2, ..options(Arith::Fast, KvType::F16) });
    let engine = engine.unwrap();
    let mut session = engine.session().unwrap();
    let mut sequences: Vec<Sequence> = (0..3).map(|_| engine.sequence()).collect();
    let mut step = |sequences: &mut [Sequence], tokens: &[u32]| {
        let mut group: Vec<&mut Sequence> = sequences.iter_mut().collect();
        engine.forward_together(&mut session, &mut group, tokens, &mut |_, logits| logits.map(|_| ()))
    };
    assert!(step(&mut sequences, &[1, 2, 3]).is_err(), "more than planned");
    assert!(step(&mut sequences[..2], &[1]).is_err(), "a token is missing");
    assert!(step(&mut sequences[..2], &[1, u32::MAX]).is_err(), "no such token");
    assert!(step(&mut [], &[]).is_ok());
    assert!(sequences.iter().all(|sequence| sequence.position() == 0));
    for _ in 0..64 {
        step(&mut sequences[..1], &[1]).unwrap();
    }
    assert!(step(&mut sequences[..2], &[1, 1]).is_err(), "the first one's context is full");
    assert_eq!(sequences[1].position(), 0);
    step(&mut sequences[1..], &[1, 1]).unwrap();
}

#[test]
fn what_is_no_number_is_told_of_its_own_sequence_at_its_place() {
    let engine = Engine::open(&path(K3), options(Arith::Fast, KvType::F16)).unwrap();
    let config = engine.config();
    let (placeholder, hidden) = (config.media_placeholder.unwrap(), config.hidden);
    let image = vec![f32::NAN; hidden];
    let expected = alone(&engine, 0);

    let mut session = engine.session().unwrap();
    let mut sequences: Vec<Sequence> = (0..2).map(|_| engine.sequence()).collect();
    let mut tokens = [0; 2];
    for (i, sequence) in sequences.iter_mut().enumerate() {
        session.swap(sequence);
        tokens[i] = begin(&engine, &mut session, i);
        session.swap(sequence);
    }
    tokens[1] = placeholder;
    sequences[1].queue_image(&image);
    let mut found = Vec::new();
    let mut group: Vec<&mut Sequence> = sequences.iter_mut().collect();
    let sink = &mut |row: usize, logits: Result<&[f32], EngineError>| {
        match (row, logits) {
            (0, Ok(logits)) => found.push(bits(logits)),
            (1, Err(EngineError::NotFinite { position })) => assert_eq!(position, prompt(1).len()),
            (row, logits) => panic!("{row}: {:?}", logits.map(<[f32]>::len)),
        }
        Ok(())
    };
    engine.forward_together(&mut session, &mut group, &tokens, sink).unwrap();
    assert_eq!(found, expected[..1]);

    // The same alone, in the middle of a prompt.
    let mut session = engine.session().unwrap();
    session.queue_image(&image);
    let mut tokens = prompt(2);
    tokens[9] = placeholder;
    let error = engine.forward(&mut session, &tokens, Wanted::All, &mut |_, _| Ok(())).unwrap_err();
    assert!(matches!(error, EngineError::NotFinite { position: 9 }), "{error}");
}

#[test]
fn an_interruption_changes_nothing() {
    let engine = Engine::open(&path(LINEAR), options(Arith::Fast, KvType::F16)).unwrap();
    let mut session = engine.session().unwrap();
    let mut sequences: Vec<Sequence> = (0..2).map(|_| engine.sequence()).collect();
    let mut step = || {
        let mut group: Vec<&mut Sequence> = sequences.iter_mut().collect();
        let outcome =
            engine.forward_together(&mut session, &mut group, &[1, 2], &mut |_, logits| logits.map(|_| ()));
        (outcome, sequences[0].position())
    };
    engine.options().cancelled.store(true, Ordering::Relaxed);
    assert!(matches!(step(), (Err(EngineError::Interrupted), 0)));
    engine.options().cancelled.store(false, Ordering::Relaxed);
    assert!(matches!(step(), (Ok(()), 1)));
}
