//! Beside a downloader, on one disk.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod util;

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use util::*;
use waste_common::container::integrity::sha256_hex;
use waste_common::staging::{FileState, ORDER, RECLAIMED, State, read_names};
use waste_tests::tool::{Ran, process};

const OPTIONS: [&str; 5] = ["--cb-sample", "1024", "--effort", "fast", "--json"];

/// What a downloader knows of a checkpoint before it has fetched anything.
fn begin(dir: &Path, from: &Path) -> State {
    let mut state = State::new("owner/name", Some("main"), "0123456789abcdef");
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let size = entry.metadata().unwrap().len();
        state.files.insert(name, FileState { size, sha256: None, done: false });
    }
    state.write(dir).unwrap();
    state
}

/// Fetches one file.
fn fetch(dir: &Path, from: &Path, state: &mut State, name: &str) {
    let content = fs::read(from.join(name)).unwrap();
    fs::write(dir.join(name), &content).unwrap();
    let file = state.files.get_mut(name).unwrap();
    (file.sha256, file.done) = (Some(sha256_hex(&content)), true);
    state.write(dir).unwrap();
}

fn fetch_small(dir: &Path, state: &mut State) {
    let names: Vec<String> =
        state.files.keys().filter(|name| !name.ends_with(".safetensors")).cloned().collect();
    names.iter().for_each(|name| fetch(dir, &tales(), state, name));
}

/// Fetches a whole checkpoint.
fn fetched(dir: &Path, from: &Path) {
    fs::create_dir(dir).unwrap();
    let mut state = begin(dir, from);
    let names: Vec<String> = state.files.keys().cloned().collect();
    names.iter().for_each(|name| fetch(dir, from, &mut state, name));
}

fn wait(until: &dyn Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(120);
    while !until() {
        assert!(Instant::now() < end, "it did not happen");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn shards(dir: &Path) -> usize {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(".safetensors")).count()
}

/// The container of a checkpoint that was fetched as a whole.
fn whole(dir: &Path) -> std::path::PathBuf {
    let (checkpoint, container) = (dir.join("whole-checkpoint"), dir.join("whole"));
    fetched(&checkpoint, &tales());
    convert(&checkpoint, &container, &OPTIONS[..4]);
    container
}

#[test]
fn shards_are_used_as_they_arrive_and_removed() {
    if waste_tests::tool::emulated() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let whole = whole(dir.path());
    let (checkpoint, container) = (dir.path().join("checkpoint"), dir.path().join("pieces"));
    fs::create_dir(&checkpoint).unwrap();
    let mut state = begin(&checkpoint, &tales());
    let start = || {
        let mut command = process("waste-convert");
        command.arg(&checkpoint).arg(&container).args(OPTIONS).args(["--follow", "--reclaim", "on"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut run = start();
    std::thread::sleep(Duration::from_millis(300));
    assert!(!checkpoint.join(ORDER).exists(), "it does not know the shards yet");
    fetch_small(&checkpoint, &mut state);
    wait(&|| checkpoint.join(ORDER).exists());
    let order = read_names(&checkpoint.join(ORDER)).unwrap().unwrap();
    assert_eq!(order.len(), 4);
    let mut peak = 0;
    for (number, shard) in order.iter().enumerate() {
        fetch(&checkpoint, &tales(), &mut state, shard);
        peak = peak.max(shards(&checkpoint));
        // What two shards share needs both.
        let before = number;
        wait(&|| run_has_caught_up(&checkpoint, before));
        if number == 1 {
            // The power fails.
            run.kill().unwrap();
            run.wait().unwrap();
            run = start();
        }
    }
    let ran = Ran::from_output(run.wait_with_output().unwrap()).done();
    assert!(ran.stderr.contains("used up and removed"), "{}", ran.stderr);
    assert!(peak <= 3, "{peak} shards at once");
    assert_eq!(shards(&checkpoint), 0);
    assert_eq!(read_names(&checkpoint.join(RECLAIMED)).unwrap().unwrap().len(), 4);
    assert_same(&whole, &container);
    let manifest: serde_json::Value =
        serde_json::from_slice(&fs::read(container.join("manifest.json")).unwrap()).unwrap();
    assert_eq!(manifest["provenance"]["repository"], "owner/name");
    assert_eq!(manifest["provenance"]["commit"], "0123456789abcdef");
    // Nothing is left to do, and no shard is missed.
    convert(&checkpoint, &container, &OPTIONS[..4]);
}

/// After shard `number` at most two may still be needed.
fn run_has_caught_up(checkpoint: &Path, number: usize) -> bool {
    let removed = read_names(&checkpoint.join(RECLAIMED)).unwrap().map_or(0, |names| names.len());
    removed + 2 > number
}

#[test]
fn what_would_be_removed_is_named_and_kept() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = dir.path().join("checkpoint");
    fetched(&checkpoint, &tales());
    let mut command = process("waste-convert");
    command.arg(&checkpoint).arg(dir.path().join("c")).args(OPTIONS).args(["--reclaim", "dry"]);
    let ran = Ran::from_output(command.output().unwrap()).done();
    assert_eq!(ran.stderr.matches("would be removed").count(), 4, "{}", ran.stderr);
    assert_eq!(shards(&checkpoint), 4);
    assert!(!checkpoint.join(RECLAIMED).exists());
}

#[test]
fn nothing_is_removed_where_it_could_be_missed() {
    let dir = copy(&tales());
    let on = ["--reclaim", "on"];
    let inside = dir.path().join("c.waste");
    refused(dir.path(), &inside, &on, 2, "unsafe_reclaim");
    let beside = tempfile::tempdir().unwrap();
    let beside = beside.path().join("c.waste");
    // Not verified by a download.
    refused(dir.path(), &beside, &on, 2, "unsafe_reclaim");
    begin(dir.path(), &tales());
    refused(dir.path(), &beside, &["--reclaim", "on", "--layers", "1"], 2, "unsafe_reclaim");
    // Verified, but for one shard, which stays.
    let mut state = begin(dir.path(), &tales());
    let names: Vec<String> = state.files.keys().cloned().collect();
    for name in names.iter().filter(|name| !name.contains("00002")) {
        fetch(dir.path(), &tales(), &mut state, name);
    }
    convert(dir.path(), &beside, &["--cb-sample", "1024", "--effort", "fast", "--reclaim", "on"]);
    assert_eq!(shards(dir.path()), 1);
    assert!(dir.path().join("model-00002-of-000004.safetensors").exists());
    // What is gone is missed by name.
    let other = beside.parent().unwrap().join("other.waste");
    let error = refused(dir.path(), &other, &["--cb-sample", "1024"], 3, "missing_shards");
    assert_eq!(error["shards"].as_array().unwrap().len(), 3);

    // The container may be all that is left of them: nothing is written over it.
    let before = files(&beside);
    let again = ["--cb-sample", "1024", "--effort", "fast", "--force"];
    let error = refused(dir.path(), &beside, &again, 3, "missing_shards");
    assert_eq!(error["shards"].as_array().unwrap().len(), 3);
    assert!(files(&beside) == before);
}

/// A run that died after it had removed shards, and then a layer rots: it is not thrown away, for it cannot be made
/// again.
#[test]
fn a_damaged_layer_whose_shards_are_gone_is_kept() {
    if waste_tests::tool::emulated() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let layer_of = |container: &Path| {
        let made = |layer: &u32| container.join(format!("convert-L{layer}.json")).exists();
        (1..12).find(made)
    };
    let mut died = None;
    for step in 8..60 {
        // Others than before: what an orphaned worker holds cannot be removed on Windows.
        let (checkpoint, container) =
            (dir.path().join(format!("checkpoint-{step}")), dir.path().join(format!("c-{step}")));
        fetched(&checkpoint, &tales());
        let mut command = process("waste-convert");
        command.arg(&checkpoint).arg(&container).args(OPTIONS).args(["--reclaim", "on", "--jobs", "1"]);
        // No pipe to wait for: under Wine a worker whose parent dies while it is started may stay, and hold it.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let status = command.env("WASTE_ABORT_AT_STEP", step.to_string()).status().unwrap();
        let removed = read_names(&checkpoint.join(RECLAIMED)).unwrap().is_some_and(|names| !names.is_empty());
        if let Some(layer) = layer_of(&container).filter(|_| !status.success() && removed) {
            died = Some((checkpoint, container, layer));
            break;
        }
    }
    let (checkpoint, container, layer) = died.expect("some run dies between a removal and the end");
    let bank = container.join(format!("experts-L{layer}.bin"));
    let mut bytes = fs::read(&bank).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&bank, &bytes).unwrap();
    // Its shards may be among those that are left; then it is made again, else it is missed by name and kept.
    for shard in fs::read_dir(&checkpoint).unwrap().map(|entry| entry.unwrap().path()) {
        if shard.extension().is_some_and(|extension| extension == "safetensors") {
            fs::remove_file(shard).unwrap();
        }
    }
    refused(&checkpoint, &container, &OPTIONS[..4], 3, "missing_shards");
    assert!(fs::read(&bank).unwrap() == bytes);
}

/// Power fails between any two durable steps, removals of shards among them: the next run ends with the same bytes.
#[test]
fn a_death_at_any_durable_step_costs_no_shard_that_is_needed() {
    if waste_tests::tool::emulated() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (linear, weights) = (golden("tiny-linear"), dir.path().join("importance"));
    importance(&weights, &linear, 5.0);
    let options = [&OPTIONS[..4], &["--jobs", "1", "--importance", weights.to_str().unwrap()]].concat();
    let (checkpoint, whole) = (dir.path().join("whole-checkpoint"), dir.path().join("whole"));
    fetched(&checkpoint, &linear);
    convert(&checkpoint, &whole, &options);
    let reclaim = [&options[..], &["--reclaim", "on"]].concat();
    let (mut died, mut with_shards_gone) = (0, 0);
    for step in 1..=80 {
        let (checkpoint, pieces) =
            (dir.path().join(format!("checkpoint-{step}")), dir.path().join(format!("{step}")));
        fetched(&checkpoint, &linear);
        let mut command = process("waste-convert");
        command.arg(&checkpoint).arg(&pieces).args(&reclaim);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let status = command.env("WASTE_ABORT_AT_STEP", step.to_string()).status().unwrap();
        died += u32::from(!status.success());
        with_shards_gone += u32::from(!status.success() && shards(&checkpoint) < 4);
        convert(&checkpoint, &pieces, &reclaim);
        assert_same(&whole, &pieces);
        assert_eq!(shards(&checkpoint), 0, "step {step}");
        if status.success() {
            break;
        }
    }
    assert!(died >= 20 && with_shards_gone >= 4, "{died} runs died, {with_shards_gone} with shards gone");
}
