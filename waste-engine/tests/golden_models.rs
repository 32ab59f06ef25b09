//! Whole models against the f64 oracle: checkpoints in reference mode, containers of another v0 tool.
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, Mutex};

mod common;

use common::{Golden, argmax, assert_rows, path};
use waste_common::plan::KvType;
use waste_engine::{Arith, Engine, EngineOptions, Event, LayerState, Session, Trace, Wanted, Watch};

const RELATIVE_L2: f64 = 3e-5;
const LOGIT_ABS: f64 = 5e-4;

fn options() -> EngineOptions {
    let (arith, kv) = (Arith::Exact, KvType::F32);
    EngineOptions { ctx: 256, threads: 2, cache_slots: 16, readers: 2, arith, kv, ..EngineOptions::default() }
}

fn run(
    engine: &Engine,
    session: &mut Session,
    ids: &[u32],
    split: &[usize],
    mut trace: Option<&mut Trace>,
) -> Vec<f32> {
    let mut logits = Vec::new();
    let mut rest = ids;
    for &n in split.iter().cycle() {
        let (part, tail) = rest.split_at(n.min(rest.len()));
        rest = tail;
        engine
            .forward_traced(
                session,
                part,
                Wanted::All,
                &mut |_, row| {
                    logits.extend_from_slice(row);
                    Ok(())
                },
                trace.as_deref_mut(),
            )
            .unwrap();
        if rest.is_empty() {
            return logits;
        }
    }
    unreachable!()
}

fn greedy(engine: &Engine, ids: &[u32], count: usize) -> Vec<u32> {
    let mut session = engine.session().unwrap();
    let mut found = Vec::new();
    let mut input = ids.to_vec();
    while found.len() < count {
        let mut next = 0;
        engine
            .forward(&mut session, &input, Wanted::Last, &mut |_, logits| {
                next = argmax(logits);
                Ok(())
            })
            .unwrap();
        found.push(next);
        input = vec![next];
    }
    found
}

fn check_checkpoint(name: &str) {
    let golden = Golden::open(&format!("golden/{name}/text.safetensors"));
    let meta: serde_json::Value =
        serde_json::from_slice(&std::fs::read(path(&format!("golden/{name}/meta.json"))).unwrap()).unwrap();
    let engine = Engine::open(&path(&format!("golden/{name}/ckpt")), options()).unwrap();
    let config = engine.config().clone();
    let ids = golden.u32("ids");
    let expected = golden.f64("logits_f64");
    let n = ids.len();

    let mut whole = None;
    for split in [&[64usize] as &[usize], &[1], &[2], &[3], &[1, 2, 3], &[17, 5]] {
        let mut trace = Trace::default();
        let mut session = engine.session().unwrap();
        let logits = run(&engine, &mut session, &ids, split, Some(&mut trace));
        assert_rows(
            &format!("{name} {split:?} logits"),
            &logits,
            &expected,
            config.vocab,
            RELATIVE_L2,
            LOGIT_ABS,
        );
        let hidden = golden.f64("hidden_f64");
        for (layer, (found, expected)) in
            trace.hidden.iter().zip(hidden.chunks_exact(n * config.hidden)).enumerate()
        {
            let what = format!("{name} {split:?} hidden {layer}");
            assert_rows(&what, found, expected, config.hidden, RELATIVE_L2, f64::INFINITY);
        }
        assert_eq!(trace.hidden.len(), config.layers() + 1);
        assert_rows("last", &trace.last, &golden.f64("final_f64"), config.hidden, RELATIVE_L2, f64::INFINITY);
        assert_eq!(trace.routes.len(), config.moe_layers().count());
        for (layer, found) in &trace.routes {
            assert_eq!(found, &golden.u32(&format!("route.{layer}.ids")), "{name} {split:?} layer {layer}");
        }
        check_state(name, &session);
        // In reference mode every sum is the same whatever the split: not only close, but equal.
        assert_eq!(whole.get_or_insert_with(|| logits.clone()), &logits, "{split:?}");
    }
    let expected: Vec<u32> =
        meta["greedy"]["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    assert_eq!(greedy(&engine, &ids, expected.len()), expected, "{name} greedy");
}

fn check_state(name: &str, session: &Session) {
    let golden = Golden::open(&format!("golden/{name}/state_after_text.safetensors"));
    let mut seen = 0;
    for (layer, state) in session.state().iter().enumerate() {
        match state {
            LayerState::Kda(state) => {
                let what = format!("{name} S.{layer}");
                let expected = golden.f64(&format!("S.{layer}"));
                assert_rows(&what, &state.recurrent, &expected, expected.len(), RELATIVE_L2, f64::INFINITY);
                for (part, history) in ["q", "k", "v"].iter().zip(&state.conv) {
                    let name = format!("conv.{layer}.{part}");
                    let shape = golden.shape(&name);
                    let found: Vec<f32> =
                        (0..history.len()).map(|i| history[i % shape[1] * shape[0] + i / shape[1]]).collect();
                    let expected = golden.f64(&name);
                    assert_rows(&name, &found, &expected, expected.len(), RELATIVE_L2, f64::INFINITY);
                }
                seen += 4;
            }
            LayerState::Mla(cache) => {
                let expected = golden.f64(&format!("latent.{layer}"));
                let mut buffer = vec![0.0; expected.len()];
                let kernels = waste_engine::kernels::Kernels::detect();
                let found = cache.rows(kernels, 0, session.position(), &mut buffer);
                assert_rows("latent", found, &expected, expected.len(), RELATIVE_L2, f64::INFINITY);
                seen += 1;
            }
        }
    }
    assert!(seen > 10);
}

#[test]
fn tiny_linear_checkpoint() {
    check_checkpoint("tiny-linear");
}

#[test]
fn tiny_k3_checkpoint() {
    check_checkpoint("tiny-k3");
}

/// The decoder's part of an image prompt: the tower's rows stand in for the placeholders, in chunks and token by
/// token.
#[test]
fn tiny_k3_image_prompt() {
    let golden = Golden::open("golden/tiny-k3/image.safetensors");
    let engine = Engine::open(&path("golden/tiny-k3/ckpt"), options()).unwrap();
    let config = engine.config().clone();
    let (ids, rows) = (golden.u32("ids"), golden.f32("image_rows_f64"));
    let expected = golden.f64("logits_f64");
    let placeholders = ids.iter().filter(|&&id| Some(id) == config.media_placeholder).count();
    assert_eq!(placeholders * config.hidden, rows.len());
    for split in [&[64usize] as &[usize], &[1], &[2, 3]] {
        let mut session = engine.session().unwrap();
        session.queue_image(&rows);
        let mut trace = Trace::default();
        let logits = run(&engine, &mut session, &ids, split, Some(&mut trace));
        assert_rows(&format!("image {split:?}"), &logits, &expected, config.vocab, RELATIVE_L2, LOGIT_ABS);
        for (layer, found) in &trace.routes {
            assert_eq!(found, &golden.u32(&format!("route.{layer}.ids")), "{split:?} layer {layer}");
        }
    }
}

fn check_interop(name: &str) {
    let golden = Golden::open(&format!("interop/{name}.logits.safetensors"));
    let meta: serde_json::Value =
        serde_json::from_slice(&std::fs::read(path("interop/meta.json")).unwrap()).unwrap();
    let ids = golden.u32("ids");
    let expected = golden.f64("logits_f64");
    let greedy_ids: Vec<u32> =
        meta[name]["greedy"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    for verify in [false, true] {
        let engine =
            Engine::open(&path(&format!("interop/{name}.waste")), EngineOptions { verify, ..options() })
                .unwrap();
        let vocab = engine.config().vocab;
        for split in [&[64usize] as &[usize], &[1], &[3, 1]] {
            let logits = run(&engine, &mut engine.session().unwrap(), &ids, split, None);
            let what = format!("{name} {split:?}");
            assert_rows(&what, &logits, &expected, vocab, RELATIVE_L2, LOGIT_ABS);
        }
        assert_eq!(greedy(&engine, &ids, greedy_ids.len()), greedy_ids, "{name} greedy");
    }
}

#[test]
fn tiny_linear_container_of_another_tool() {
    check_interop("tiny-linear");
}

#[test]
fn tiny_k3_container_of_another_tool() {
    check_interop("tiny-k3");
}

#[test]
fn the_load_is_told_to_its_end_and_only_grows() {
    for model in [
        "interop/tiny-k3.waste",
        "interop/tiny-linear.waste",
        "golden/tiny-k3/ckpt",
        "golden/tiny-linear/ckpt",
    ] {
        let told = Arc::new(Mutex::new(Vec::new()));
        let into = Arc::clone(&told);
        let watch = Watch(Some(Arc::new(move |event| {
            if let Event::Loaded { bytes, of } = event {
                into.lock().unwrap().push((bytes, of));
            }
        })));
        Engine::open(&path(model), EngineOptions { watch, readers: 4, ..options() }).unwrap();
        let told = told.lock().unwrap();
        assert!(told.is_sorted_by(|a, b| a.0 < b.0), "{model}: {told:?}");
        assert!(told.last().is_some_and(|(bytes, of)| bytes == of), "{model}: {told:?}");
    }
}
