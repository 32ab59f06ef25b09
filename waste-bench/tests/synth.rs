//! Synthetic containers and checkpoints are valid, the same for the same seed, and run.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;
use waste_bench::{TOOL, run};
use waste_common::cli::{Captured, Exit, run_captured};
use waste_common::container::{Container, RecordView, integrity};
use waste_engine::{Engine, EngineOptions, Trace, Wanted};

fn synth(args: &[&str], out: &Path) -> Captured {
    let args = [&["synth"], args, &[out.to_str().unwrap(), "--json"]].concat();
    run_captured(TOOL, args, run)
}

fn written(args: &[&str], out: &Path) -> Value {
    let captured = synth(args, out);
    assert_eq!(captured.exit, Exit::Done, "{}", captured.stderr);
    serde_json::from_str(&captured.stdout).unwrap()
}

fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(Result::unwrap);
    entries
        .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()))
        .filter(|(name, _)| !name.starts_with('.'))
        .collect()
}

fn logits(dir: &Path) -> (Vec<f32>, Trace) {
    let options = EngineOptions { ctx: 64, cache_slots: 64, threads: 2, ..EngineOptions::default() };
    let engine = Engine::open(dir, options).unwrap();
    let mut session = engine.session().unwrap();
    let (mut last, mut trace) = (Vec::new(), Trace::default());
    let tokens: Vec<u32> = (0..40).map(|i| i * 37 % 256).collect();
    let mut sink = |_, logits: &[f32]| {
        last = logits.to_vec();
        Ok(())
    };
    engine.forward_traced(&mut session, &tokens, Wanted::Last, &mut sink, Some(&mut trace)).unwrap();
    (last, trace)
}

#[test]
fn every_format_is_sound_and_runs() {
    for (shape, format) in
        [("tiny-k3", "vq3r"), ("tiny-k3", "vq4p"), ("tiny-linear", "vq2r"), ("tiny-linear", "vq3r")]
    {
        let dir = tempfile::tempdir().unwrap();
        let report = written(&[shape, "--format", format], dir.path());
        assert_eq!(report["schema"], "waste-bench-synth/1");
        assert_eq!(report["container"], dir.path().to_str().unwrap());
        let container = Container::open(dir.path()).unwrap();
        let sums = container.manifest().integrity.as_ref();
        let mut records = 0;
        for (&layer, bank) in &container.manifest().layers {
            let file = container.bank(layer).unwrap();
            assert!(integrity::check_bank(&file, layer, sums).unwrap());
            let mut buffer = vec![0; container.geometry().unwrap().record_bytes()];
            for expert in 0..bank.experts as u16 {
                file.read(expert, &mut buffer).unwrap();
                let expected = file.expected(expert);
                let record = RecordView::check(&buffer, &expected).unwrap();
                record.verify_crc(&expected).unwrap();
                record.verify_padding(&expected).unwrap();
                record.verify_indices(&expected).unwrap();
                records += 1;
            }
        }
        assert!(records > 0);
        for entry in container.trunk().entries() {
            assert!(integrity::check_trunk_entry(container.trunk(), entry).unwrap());
        }
        let (last, trace) = logits(dir.path());
        let variance = last.iter().map(|x| x * x).sum::<f32>() / last.len() as f32;
        assert!((0.05..20.0).contains(&variance), "{shape} {format}: logits of variance {variance}");
        let largest = trace.hidden.iter().flatten().fold(0f32, |most, x| most.max(x.abs()));
        assert!(largest.is_finite() && largest < 1e3, "{shape} {format}: activations up to {largest}");
    }
}

#[test]
fn the_seed_alone_decides() {
    let [a, b, c] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    written(&["tiny-linear", "--seed", "5"], a.path());
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    pool.install(|| written(&["tiny-linear", "--seed", "5"], b.path()));
    written(&["tiny-linear", "--seed", "6"], c.path());
    assert_eq!(files(a.path()), files(b.path()));
    assert_ne!(files(a.path())["experts-L1.bin"], files(c.path())["experts-L1.bin"]);
}

#[test]
fn shapes_can_be_cut_and_what_exists_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let args = &["tiny-k3", "--layers", "4", "--experts", "6", "--no-checksums"];
    let report = written(args, dir.path());
    assert_eq!((&report["layers"], &report["experts"]), (&Value::from(4), &Value::from(6)));
    let container = Container::open(dir.path()).unwrap();
    assert!(container.manifest().integrity.is_none() && !dir.path().join("manifest.sha256").exists());
    assert!(container.manifest().trunk.iter().all(|entry| entry.crc32.is_none()));
    // Windows replaces no file that is open.
    drop(container);
    logits(dir.path());
    let again = synth(args, dir.path());
    assert_eq!(again.exit, Exit::Usage);
    assert!(again.stdout.contains("--force"));
    written(&["tiny-k3", "--layers", "4", "--force"], dir.path());
    assert_eq!(synth(&["tiny-k3", "--layers", "99"], &dir.path().join("x")).exit, Exit::Usage);
    assert_eq!(synth(&["no-such"], &dir.path().join("x")).exit, Exit::Usage);
}

/// Routing is skewed like that of the real model: about a third of the experts are used again by the next token.
#[test]
fn routing_is_as_skewed_as_in_the_traces() {
    let dir = tempfile::tempdir().unwrap();
    written(&["tiny-linear", "--reuse", "0.6"], dir.path());
    let (_, trace) = logits(dir.path());
    let (mut reused, mut all) = (0, 0);
    for ids in trace.routes.values() {
        let tokens: Vec<&[u32]> = ids.chunks(4).collect();
        for pair in tokens.windows(2) {
            all += pair[1].len();
            reused += pair[1].iter().filter(|id| pair[0].contains(id)).count();
        }
    }
    let reuse = reused as f64 / all as f64;
    assert!(all > 0 && (0.4..0.85).contains(&reuse), "{reuse}");
}

#[test]
fn checkpoints_are_read_like_published_ones() {
    for shape in ["tiny-k3", "tiny-linear"] {
        let dir = tempfile::tempdir().unwrap();
        let report = written(&[shape, "--checkpoint"], dir.path());
        assert_eq!(report["checkpoint"], dir.path().to_str().unwrap());
        assert_eq!(dir.path().join("preprocessor_config.json").exists(), shape == "tiny-k3");
        let shards = files(dir.path()).keys().filter(|name| name.ends_with(".safetensors")).count();
        assert!(shards > 2);
        let (last, _) = logits(dir.path());
        assert!(last.iter().any(|x| *x != 0.0));
        waste_engine::tokenizer::Tokenizer::open(dir.path()).unwrap();
    }
}
