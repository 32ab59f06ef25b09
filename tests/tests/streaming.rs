//! Experts come and go as the cache and the disk will have it: numbers never depend on it, a disk that goes bad is an
//! error with a name, and a long run ends as small as it began.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

use std::sync::Arc;

use waste_engine::experts::{ReadStats, Usage};
use waste_engine::{Arith, Engine, EngineError, EngineOptions, Session, Wanted};
use waste_tests::files::Model;
use waste_tests::tool::emulated;

const TALES: &str = "models/k3-tales";
/// Its shape.
const MOE_LAYERS: u64 = 6;
const TOP_K: u64 = 4;
const EXPERTS: usize = 6 * 32;

fn options() -> EngineOptions {
    EngineOptions { ctx: 1024, threads: 2, chunk: 32, ..EngineOptions::default() }
}

/// One step: the bits of the last token's logits, and the most likely token.
fn step(engine: &Engine, session: &mut Session, tokens: &[u32]) -> Result<(Vec<u32>, u32), EngineError> {
    let mut found = (Vec::new(), 0);
    engine.forward(session, tokens, Wanted::Last, &mut |_, logits| {
        let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
        found = (logits.iter().map(|logit| logit.to_bits()).collect(), best as u32);
        Ok(())
    })?;
    Ok(found)
}

/// A prompt and some tokens after it: the logits' bits of each step.
fn write(engine: &Engine, tokens: usize) -> Result<Vec<Vec<u32>>, EngineError> {
    let mut session = engine.session()?;
    let prompt: Vec<u32> = (300..340).collect();
    let mut all = Vec::new();
    let (mut logits, mut next) = step(engine, &mut session, &prompt)?;
    for _ in 0..tokens {
        all.push(std::mem::take(&mut logits));
        (logits, next) = step(engine, &mut session, &[next])?;
    }
    Ok(all)
}

/// Every demand was met in one of three ways, and nothing was used that was not read.
fn check(stats: &ReadStats) {
    for rank in &stats.ranks {
        assert!(rank.right <= rank.guessed && rank.used <= rank.read, "{stats:?}");
    }
    assert_eq!(stats.ranks.iter().map(|rank| rank.read).sum::<u64>(), stats.ahead_reads, "{stats:?}");
    assert_eq!(stats.ranks.iter().map(|rank| rank.used).sum::<u64>(), stats.ahead_hits, "{stats:?}");
}

#[test]
fn cache_lookahead_reads_and_usage_change_no_bit() {
    // Dozens of runs.
    if emulated() {
        return;
    }
    let model = Model::converted(TALES);
    for arith in [Arith::Exact, Arith::Fast] {
        let open = |slots, lookahead, readers, usage| {
            let cache_slots = slots;
            Engine::open(
                &model.dir,
                EngineOptions { arith, cache_slots, lookahead, readers, usage, ..options() },
            )
            .unwrap()
        };
        let engine = open(2 * TOP_K as usize, 0, 0, None);
        let expected = write(&engine, 12).unwrap();
        let mut usage = Usage::default();
        engine.learn(&mut usage);
        let usage = Arc::new(usage);
        for slots in [2 * TOP_K as usize, 13, 24, 60, EXPERTS - 1, EXPERTS] {
            for (lookahead, readers) in [(0, 1), (1, 4), (6, 1), (6, 4), (64, 8)] {
                let usage = (lookahead == 6).then(|| Arc::clone(&usage));
                let engine = open(slots, lookahead, readers, usage);
                let found = write(&engine, 12).unwrap();
                assert!(found == expected, "{slots} slots, lookahead {lookahead}, {readers} readers");
                check(&engine.read_stats());
            }
        }
    }
}

/// A bank that shrinks, or whose records turn to rubbish, while the engine runs.
#[test]
fn a_disk_that_goes_bad_is_an_error_that_names_the_expert() {
    if cfg!(windows) {
        // An open file cannot be cut short there.
        return;
    }
    let model = Model::copy("interop/tiny-k3.waste");
    let bank = model.path("experts-L3.bin");
    let sound = std::fs::read(&bank).unwrap();
    for readers in [0, 4] {
        for damage in ["short", "rubbish"] {
            std::fs::write(&bank, &sound).unwrap();
            let engine =
                Engine::open(&model.dir, EngineOptions { cache_slots: 12, readers, ..options() }).unwrap();
            let expected = write(&engine, 4).unwrap();
            let file = std::fs::OpenOptions::new().write(true).open(&bank).unwrap();
            match damage {
                "short" => file.set_len(4096).unwrap(),
                _ => {
                    file.set_len(0).unwrap();
                    file.set_len(sound.len() as u64).unwrap();
                }
            }
            let error = write(&engine, 4).unwrap_err();
            let text = format!("{error}: {:?}", std::error::Error::source(&error).map(ToString::to_string));
            assert!(text.contains("layer 3") || text.contains("experts-L3.bin"), "{damage}: {text}");
            assert!(text.contains("expert"), "{damage}: {text}");
            // Well again, the same engine goes on as if nothing had been.
            std::fs::write(&bank, &sound).unwrap();
            assert!(write(&engine, 4).unwrap() == expected, "{damage}");
        }
    }
}

#[cfg(target_os = "linux")]
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[cfg(not(target_os = "linux"))]
fn resident() -> u64 {
    0
}

/// Writes many tokens with the least cache, beginning anew whenever the context is full.
fn soak(tokens: u64) {
    let model = Model::converted(TALES);
    let engine =
        Engine::open(&model.dir, EngineOptions { cache_slots: 2 * TOP_K as usize, ..options() }).unwrap();
    let mut session = engine.session().unwrap();
    let (mut next, mut settled) = (300, None);
    for token in 0..tokens {
        if session.position() == engine.ctx() {
            session.reset();
            next = 300 + token as u32 % 1000;
        }
        next = step(&engine, &mut session, &[next]).unwrap().1;
        if token == tokens / 5 {
            settled = Some(resident());
        }
    }
    let stats = engine.read_stats();
    check(&stats);
    assert_eq!(stats.hits + stats.ahead_hits + stats.misses, tokens * MOE_LAYERS * TOP_K, "{stats:?}");
    let grown = resident().saturating_sub(settled.unwrap());
    println!("{tokens} tokens: {grown} bytes grown, {stats:?}");
    assert!(grown <= 2 << 20, "{grown} bytes more than after a fifth of {tokens} tokens");
}

#[test]
fn five_hundred_tokens_with_the_least_cache() {
    soak(if emulated() { 50 } else { 500 });
}

#[test]
#[ignore = "minutes: cargo test -p waste-tests --test streaming -- --ignored --nocapture"]
fn ten_thousand_tokens_with_the_least_cache() {
    soak(10_000);
}
