//! Many processes, killed anywhere: the container is the same.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod util;

use std::path::Path;
use std::process::{Command, Stdio};

use util::*;
use waste_tests::tool::{Ran, process};

const OPTIONS: [&str; 5] = ["--cb-sample", "1024", "--effort", "fast", "--json"];

fn command(checkpoint: &Path, container: &Path) -> Command {
    let mut command = process("waste-convert");
    command.arg(checkpoint).arg(container).args(OPTIONS);
    command
}

fn ran(command: &mut Command) -> Ran {
    Ran::from_output(command.output().unwrap())
}

#[test]
fn the_number_of_processes_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let whole = dir.path().join("1");
    ran(command(&golden("tiny-k3"), &whole).args(["--jobs", "1"])).done();
    for (jobs, threads) in [("2", "1"), ("3", "5"), ("6", "2")] {
        let other = dir.path().join(jobs);
        ran(command(&golden("tiny-k3"), &other).args(["--jobs", jobs, "--threads", threads])).done();
        assert_same(&whole, &other);
    }
}

/// Power fails between any two durable steps, of the parent and of its worker: the next run ends with the same bytes.
#[test]
fn a_death_at_any_durable_step_changes_nothing() {
    if waste_tests::tool::emulated() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let whole = dir.path().join("whole");
    ran(&mut command(&golden("tiny-linear"), &whole)).done();
    let mut died = 0;
    for step in 1..=48 {
        let pieces = dir.path().join(format!("{step}"));
        let first = ran(command(&golden("tiny-linear"), &pieces)
            .args(["--jobs", "1"])
            .env("WASTE_ABORT_AT_STEP", step.to_string()));
        died += u32::from(first.exit != Some(0));
        ran(&mut command(&golden("tiny-linear"), &pieces)).done();
        assert_same(&whole, &pieces);
        std::fs::remove_dir_all(&pieces).unwrap();
    }
    assert!(died >= 20, "only {died} runs died");
}

#[test]
fn a_full_disk_at_any_durable_step_is_told_and_survived() {
    if waste_tests::tool::emulated() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (whole, pieces) = (dir.path().join("whole"), dir.path().join("pieces"));
    ran(&mut command(&golden("tiny-linear"), &whole)).done();
    let mut full = 0;
    for step in 1..=24 {
        let first = ran(command(&golden("tiny-linear"), &pieces).env("WASTE_FULL_AT_STEP", step.to_string()));
        if first.exit != Some(0) {
            first.error(4, "disk_full");
            full += 1;
        }
        assert!(first.exit != Some(0) || pieces.join("manifest.json").exists(), "step {step}");
    }
    assert!(full >= 10, "{full}");
    ran(&mut command(&golden("tiny-linear"), &pieces)).done();
    assert_same(&whole, &pieces);
}

#[test]
fn a_worker_that_dies_ends_its_layer_only() {
    if waste_tests::tool::emulated() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (whole, pieces) = (dir.path().join("whole"), dir.path().join("pieces"));
    ran(&mut command(&golden("tiny-linear"), &whole)).done();
    // Its fourth step is in its first layer, always: the layer fails twice.
    let first = ran(command(&golden("tiny-linear"), &pieces)
        .args(["--layers", "1-4", "--jobs", "2"])
        .env("WASTE_ABORT_AT_STEP", "4"));
    first.error(70, "worker_died");
    assert!(first.stderr.contains("tried once more"), "{}", first.stderr);
    let second = ran(&mut command(&golden("tiny-linear"), &pieces)).done();
    assert_eq!(second.json("waste-convert/1")["owed_layers"], serde_json::json!([]));
    assert_same(&whole, &pieces);
}

#[test]
fn layers_may_be_spread_over_runs() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, pieces) = (dir.path().join("whole"), dir.path().join("pieces"));
    let checkpoint = golden("tiny-linear");
    ran(&mut command(&checkpoint, &whole)).done();
    let mut runs: Vec<_> = ["1,3", "2", "1-2"]
        .into_iter()
        .map(|layers| {
            // The first one begins the conversion.
            let mut command = command(&checkpoint, &pieces);
            command.args(["--layers", layers]).stdout(Stdio::null()).stderr(Stdio::null());
            if !pieces.exists() {
                assert!(command.status().unwrap().success());
            }
            command.spawn().unwrap()
        })
        .collect();
    assert!(runs.iter_mut().all(|run| run.wait().unwrap().success()));
    let owed = ran(command(&checkpoint, &pieces).arg("--finish")).error(3, "layers_owed");
    assert_eq!(owed["owed_layers"], serde_json::json!([4]));
    let status = ran(command(&checkpoint, &pieces).arg("--status")).done().json("waste-convert-status/1");
    assert_eq!((&status["done_layers"], &status["owed_layers"]), (&[1, 2, 3].into(), &[4].into()));
    assert_eq!((&status["trunk"], &status["finished"]), (&false.into(), &false.into()));
    ran(command(&checkpoint, &pieces).arg("--skip-trunk")).done();
    assert!(!pieces.join("manifest.json").exists());
    let report = ran(command(&checkpoint, &pieces).arg("--finish")).done().json("waste-convert/1");
    assert_eq!(report["resumed_layers"], 4);
    assert_same(&whole, &pieces);
    ran(command(&checkpoint, &dir.path().join("x")).args(["--layers", "9"])).error(2, "no_such_layer");
    let status = ran(command(&checkpoint, &whole).arg("--status")).done().json("waste-convert-status/1");
    assert_eq!(status["finished"], true);
}

#[test]
fn progress_is_json_lines_with_json() {
    let dir = tempfile::tempdir().unwrap();
    let ran = ran(&mut command(&golden("tiny-linear"), &dir.path().join("c"))).done();
    let mut lines = ran.stderr.lines().rev().filter(|line| line.starts_with("{\"progress\""));
    let last: serde_json::Value = serde_json::from_str(lines.next().unwrap()).unwrap();
    let last = &last["progress"];
    assert_eq!((&last["layers_done"], &last["layers"]), (&4.into(), &4.into()));
    assert_eq!(last["experts_done"], last["experts"]);
    assert_eq!(last["source_bytes_done"], last["source_bytes"]);
}

#[test]
fn a_dry_run_tells_what_it_takes_and_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let container = dir.path().join("c");
    let found = ran(command(&golden("tiny-k3"), &container).arg("--dry-run")).done();
    let found = found.json("waste-convert-dry-run/1");
    assert!(!container.exists());
    assert!(found["eta_seconds"].as_f64().unwrap() > 0.0 && found["fits"] == true, "{found}");
    let report = ran(&mut command(&golden("tiny-k3"), &container)).done().json("waste-convert/1");
    let (said, took) = (found["container_bytes"].as_u64().unwrap(), report["bytes"].as_u64().unwrap());
    assert!(said >= took && said < took + took / 4, "{said} {took}");
}
