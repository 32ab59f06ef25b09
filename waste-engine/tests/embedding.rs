//! The engine inside another program: the example does what it says, and engines in one process do not meet.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "../examples/embed.rs"]
#[allow(dead_code)]
mod embed;

use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};

use waste_engine::tokenizer::Tokenizer;
use waste_engine::{Engine, EngineError, EngineOptions, Finish, Request, Session, Wanted, generate};

#[test]
fn the_example_runs() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tale.session");
    let tell = || {
        let mut out = Vec::new();
        embed::run(&common::path("models/k3-tales"), "Once upon a time", &file, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    };
    let text = tell();
    let line = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_else(|| panic!("{name}: {text}")).to_owned()
    };
    assert!(line("plan: ").contains("GiB") || line("plan: ").contains("MiB"), "{text}");
    assert!(line("text: ").len() > 20, "{text}");
    assert!(line("and on: ").len() > 20, "{text}");
    assert_eq!(text.matches("stopped because the token limit").count(), 2, "{text}");
    assert!(line("experts: ").contains("misses"), "{text}");
    // The seed decides, and closing leaves nothing behind that the next one would meet.
    assert_eq!(
        tell().lines().skip(1).take(6).collect::<Vec<_>>(),
        text.lines().skip(1).take(6).collect::<Vec<_>>()
    );
}

#[test]
fn a_listener_stops_its_own_answer_alone() {
    let options = EngineOptions { ctx: 64, threads: 1, ..EngineOptions::default() };
    let cancelled = Arc::clone(&options.cancelled);
    let engine = Engine::open(&common::path("models/k3-tales"), options).unwrap();
    let tokenizer = Tokenizer::open(&common::path("models/k3-tales")).unwrap();
    let write = |session: &mut Session, prompt: Vec<u32>, max_tokens, stop: bool| {
        let request = Request { prompt, max_tokens, ..Request::default() };
        let mut listener = |_: &str| if stop { Err(EngineError::Interrupted) } else { Ok(()) };
        generate(&engine, session, Some(&tokenizer), &request, &mut listener).unwrap()
    };
    let prompt = tokenizer.encode("The king");
    let whole = write(&mut engine.session().unwrap(), prompt.clone(), 8, false);

    let mut session = engine.session().unwrap();
    let first = write(&mut session, prompt.clone(), 8, true);
    assert_eq!((first.finish, cancelled.load(Ordering::Relaxed)), (Finish::Cancelled, false));
    assert!(!first.tokens.is_empty() && first.tokens.len() < 8);
    // Its state is that of its text: what has not gone through the model yet comes first.
    let all = [prompt, first.tokens.clone()].concat();
    let left = all[session.position()..].to_vec();
    let rest = write(&mut session, left, 8 - first.tokens.len(), false);
    assert_eq!([first.tokens, rest.tokens].concat(), whole.tokens);
}

/// The logits of a text, token by token.
struct Reader {
    engine: Engine,
    session: Session,
    logits: Vec<u32>,
}

impl Reader {
    fn open(model: &str, threads: usize, slots: usize) -> Reader {
        let options = EngineOptions { ctx: 64, threads, cache_slots: slots, ..EngineOptions::default() };
        let engine = Engine::open(&common::path(model), options).unwrap();
        let session = engine.session().unwrap();
        Reader { engine, session, logits: Vec::new() }
    }

    fn step(&mut self, token: u32) {
        let logits = &mut self.logits;
        let mut sink = |_: usize, row: &[f32]| {
            logits.extend(row.iter().map(|x| x.to_bits()));
            Ok(())
        };
        self.engine.forward(&mut self.session, &[token], Wanted::Last, &mut sink).unwrap();
    }
}

const MODELS: [&str; 2] = ["interop/tiny-k3.waste", "interop/tiny-linear.waste"];
const TOKENS: [u32; 6] = [5, 17, 3, 90, 41, 8];

fn alone(model: &str) -> Vec<u32> {
    let mut reader = Reader::open(model, 1, 64);
    TOKENS.into_iter().for_each(|token| reader.step(token));
    reader.logits
}

#[test]
fn engines_in_one_process_do_not_meet() {
    let expected = MODELS.map(alone);
    assert_ne!(expected[0], expected[1]);
    // In turns, the same model twice too, with threads and caches of their own.
    let mut readers: Vec<Reader> = [(0, 2, 12), (1, 1, 32), (0, 1, 64)]
        .map(|(i, threads, slots)| Reader::open(MODELS[i], threads, slots))
        .into();
    for token in TOKENS {
        readers.iter_mut().for_each(|reader| reader.step(token));
    }
    for (reader, model) in readers.iter().zip([0, 1, 0]) {
        assert_eq!(reader.logits, expected[model]);
    }
    // One goes, the others go on.
    readers.remove(0);
    readers[1].session.reset();
    readers[1].logits.clear();
    TOKENS.into_iter().for_each(|token| readers[1].step(token));
    assert_eq!(readers[1].logits, expected[0]);
}

#[test]
fn engines_in_threads_of_their_own() {
    let expected = MODELS.map(alone);
    let start = Barrier::new(MODELS.len());
    std::thread::scope(|scope| {
        for (model, expected) in MODELS.iter().zip(&expected) {
            let start = &start;
            scope.spawn(move || {
                let mut reader = Reader::open(model, 2, 16);
                start.wait();
                for _ in 0..3 {
                    reader.session.reset();
                    reader.logits.clear();
                    TOKENS.into_iter().for_each(|token| reader.step(token));
                    assert_eq!(&reader.logits, expected);
                }
            });
        }
    });
}

#[test]
fn one_engine_computes_sessions_of_several_threads() {
    let engine = Reader::open(MODELS[0], 2, 12).engine;
    let expected = alone(MODELS[0]);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut session = engine.session().unwrap();
                let mut logits = Vec::new();
                for token in TOKENS {
                    let mut sink = |_: usize, row: &[f32]| {
                        logits.extend(row.iter().map(|x| x.to_bits()));
                        Ok(())
                    };
                    engine.forward(&mut session, &[token], Wanted::Last, &mut sink).unwrap();
                }
                assert_eq!(logits, expected);
            });
        }
    });
}

/// Nothing in the library writes to the terminal or ends the process: whoever embeds it decides that.
#[test]
fn the_libraries_neither_print_nor_exit() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut looked = 0;
    for dir in ["waste-engine/src", "waste-common/src", "waste-capi/src"] {
        let mut dirs = vec![root.join(dir)];
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(&dir).into_iter().flatten() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    // The manners of a command line are what the tools have.
                    if path.file_name().unwrap() != "cli" {
                        dirs.push(path);
                    }
                    continue;
                }
                let text = std::fs::read_to_string(&path).unwrap();
                // Tests may.
                let code = text.split("#[cfg(test)]").next().unwrap();
                if path.file_name().unwrap().to_str().unwrap().starts_with("tests") {
                    continue;
                }
                looked += 1;
                for word in ["println!", "print!(", "process::exit", "static mut "] {
                    assert!(!code.contains(word), "{}: {word}", path.display());
                }
            }
        }
    }
    assert!(looked > 80, "{looked}");
}
