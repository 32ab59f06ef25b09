//! The measurements from outside, on the smallest shapes. Nothing here depends on time.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

#[cfg(target_os = "linux")]
use std::path::Path;
use std::path::PathBuf;

use assert_cmd::Command;
use serde_json::Value;

fn bench(args: &[&str]) -> Command {
    let mut command = waste_tests::tool::tool("waste-bench");
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("WASTE_")) {
        command.env_remove(name);
    }
    command.args(args);
    command
}

/// The one JSON object of a run that ends with `code`.
fn json(args: &[&str], code: i32) -> Value {
    let output = bench(args).arg("--json").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
    serde_json::from_slice(&output.stdout).unwrap()
}

struct Model {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

impl Model {
    fn new(shape: &str) -> Model {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.waste");
        bench(&["synth", shape, path.to_str().unwrap(), "-q"]).assert().success();
        Model { _dir: dir, path }
    }

    fn path(&self) -> &str {
        self.path.to_str().unwrap()
    }
}

const SMALL: [&str; 8] = ["--prompt-tokens", "12", "--tokens", "6", "--ctx", "64", "--runs", "2"];

fn trace() -> String {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/traces/kimi-linear-48b-300tok.jsonl").to_owned()
}

#[test]
fn sequences_decode_together() {
    let model = Model::new("tiny-linear");
    let record = json(&[&[model.path(), "--compare", "parallel=1,3"], &SMALL[..]].concat(), 0);
    let rows = record["rows"].as_array().unwrap();
    for (arm, tokens) in [("parallel=1", [12, 6]), ("parallel=3", [36, 18])] {
        for (phase, tokens) in ["prefill", "decode"].into_iter().zip(tokens) {
            let mut of = rows.iter().filter(|row| row["arm"] == arm && row["phase"] == phase);
            assert!(of.clone().count() == 2 && of.all(|row| row["tokens"] == tokens), "{arm} {phase}");
        }
    }
    assert_eq!(record["arms"][1]["settings"]["parallel"], 3);
    for wrong in ["0", "17"] {
        bench(&[&[model.path(), "--parallel", wrong], &SMALL[..]].concat()).assert().code(2);
    }
}

#[test]
fn a_model_is_measured_cold_and_warm() {
    let model = Model::new("tiny-k3");
    let record = json(&[&[model.path()], &SMALL[..]].concat(), 0);
    assert_eq!(record["schema"], "waste-bench/1");
    assert_eq!(record["container"], model.path());
    assert_eq!(record["manifest_sha256"].as_str().unwrap().len(), 64);
    assert!(record["machine"]["cpus"].as_u64().unwrap() > 0);
    assert!(record["machine"]["ram_bytes"].as_u64().unwrap() > 0);
    assert!(!record["arms"][0]["kernel"].as_str().unwrap().is_empty());
    let rows = record["rows"].as_array().unwrap();
    let place =
        |row: &Value| format!("{} {}", row["phase"].as_str().unwrap(), row["cache"].as_str().unwrap());
    let places: Vec<String> = rows.iter().map(place).collect();
    assert_eq!(places, ["prefill cold", "decode cold", "prefill warm", "decode warm"]);
    for row in rows {
        assert!(row["tokens_per_second"]["mean"].as_f64().unwrap() > 0.0);
        assert!(row["demands"].as_u64().unwrap() > 0);
    }
    // A cold run that reads nothing has measured nothing.
    assert!(rows[0]["bytes_read"].as_u64().unwrap() > 0);
    assert_eq!(rows[2]["tokens_per_second"]["n"], 2);
}

#[test]
fn arms_are_compared() {
    let model = Model::new("tiny-linear");
    let args = [&[model.path(), "--compare", "threads=1,2"], &SMALL[..]].concat();
    let record = json(&args, 0);
    assert_eq!(record["rows"].as_array().unwrap().len(), 8);
    assert_eq!(record["arms"][1]["settings"]["threads"], 2);
    let ratios = record["ratios"].as_array().unwrap();
    assert_eq!(ratios.len(), 2);
    assert_eq!(ratios[0]["arm"], "threads=2");
    assert_eq!(ratios[0]["ratio"]["n"], 2);
}

#[test]
fn every_form_of_output_has_the_rows() {
    let model = Model::new("tiny-linear");
    let run = |form: &[&str]| {
        let args = [&[model.path(), "-q"], &SMALL[..], form].concat();
        let output = bench(&args).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    let csv = run(&["--csv"]);
    assert!(csv.starts_with("arm,phase,cache,tokens,runs,tokens_per_second_mean"), "{csv}");
    assert_eq!(csv.lines().count(), 5);
    let columns = csv.lines().next().unwrap().split(',').count();
    assert!(csv.lines().all(|line| line.split(',').count() == columns));
    let markdown = run(&["--markdown"]);
    assert!(markdown.contains("| arm | phase |") && markdown.contains("manifest"), "{markdown}");
    assert!(run(&[]).contains("tok/s"));
    bench(&[model.path(), "--csv", "--json"]).assert().code(2);
}

/// A recorded trace is one that the simulation reads.
#[test]
fn routing_can_be_recorded_and_simulated() {
    let model = Model::new("tiny-k3");
    let file = model.path.with_extension("jsonl");
    let file = file.to_str().unwrap();
    json(&[&[model.path(), "--record", file], &SMALL[..]].concat(), 0);
    let record = json(&["cache", "--trace", file, "--percent", "50,100"], 0);
    assert_eq!((&record["tokens"], &record["layers"], &record["top_k"]), (&18.into(), &6.into(), &4.into()));
    assert_eq!(record["rows"].as_array().unwrap().len(), 8);
}

#[test]
fn the_cache_is_simulated_on_the_real_trace() {
    let record = json(&["cache", "--trace", &trace(), "--percent", "6.25,50"], 0);
    assert_eq!(record["schema"], "waste-bench-cache/1");
    let rate = |row: usize| record["rows"][row]["hit_rate"].as_f64().unwrap();
    let (engine, lru, lfru, optimum) = (rate(0), rate(1), rate(2), rate(3));
    assert!(
        0.0 < lru.min(lfru) && lru.max(lfru) < engine && engine < optimum,
        "{engine} {lru} {lfru} {optimum}"
    );
    assert!(rate(4) > engine);
    assert_eq!(json(&["cache", "--trace", &trace(), "--slots", "3"], 2)["error"]["exit"], 2);
    json(&["cache", "--trace", "no-such-file"], 3);
}

/// A figure is given if and only if the page cache was bypassed.
#[test]
fn a_disk_is_measured_past_the_page_cache_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let args =
        ["disk", path, "--size", "8MiB", "--record", "64KiB,1MiB", "--depth", "1,2", "--seconds", "0.02"];
    let output = bench(&args).arg("--json").output().unwrap();
    let record: Value = serde_json::from_slice(&output.stdout).unwrap();
    let bypass = record["bypass"].as_bool().unwrap();
    assert_eq!(output.status.code(), Some(if bypass { 0 } else { 1 }));
    assert_eq!(record["gbps"].is_null(), !bypass);
    assert_eq!(record["reason"].is_null(), bypass);
    let rows = record["rows"].as_array().unwrap();
    assert_eq!(rows.len(), if bypass { 8 } else { 0 });
    assert!(rows.iter().all(|row| row["reads"].as_u64().unwrap() > 0 && row["gbps"].as_f64().unwrap() > 0.0));
    assert_eq!(std::fs::read_dir(path).unwrap().count(), 0, "the file is removed");
    for wrong in [["--record", "1000"], ["--depth", "0"], ["--seconds", "0"], ["--record", "1GiB"]] {
        bench(&["disk", path]).args(wrong).assert().code(2);
    }
}

/// A memory file system takes direct reads and serves them from RAM: only the storage layer's count tells.
#[cfg(target_os = "linux")]
#[test]
fn ram_is_not_reported_as_a_disk() {
    let shm = Path::new("/dev/shm");
    let memory = waste_common::io::filesystem(shm).is_ok_and(|found| found.kind == "tmpfs");
    let Some(dir) = memory.then(|| tempfile::tempdir_in(shm).ok()).flatten() else {
        eprintln!("SKIP: /dev/shm is not a tmpfs that can be written");
        return;
    };
    let record = json(
        &["disk", dir.path().to_str().unwrap(), "--size", "8MiB", "--record", "1MiB", "--seconds", "0.02"],
        1,
    );
    assert_eq!(record["bypass"], false);
    assert!(record["gbps"].is_null() && record["rows"].as_array().unwrap().is_empty());
}

#[test]
fn budgets_are_swept() {
    let model = Model::new("tiny-linear");
    let args = [&["sweep", model.path(), "--budget", "16MiB..24MiB", "--steps", "2"], &SMALL[..]].concat();
    let record = json(&args, 0);
    assert_eq!(record["schema"], "waste-bench-sweep/1");
    assert!(record["budget_bytes"].as_u64().unwrap() >= 16 << 20);
    let rows = record["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    assert!(rows.iter().all(|row| row["demands"].as_u64().unwrap() > 0 && row["paging"] == false));
    bench(&["sweep", model.path(), "--budget", "2GiB..1GiB"]).assert().code(2);
    json(&["sweep", model.path(), "--budget", "1KiB..2KiB"], 4);
}

#[test]
fn wrong_usage_is_told_from_bad_data() {
    let model = Model::new("tiny-linear");
    for wrong in [
        &[model.path(), "--compare", "nothing=1,2"][..],
        &[model.path(), "--runs", "0"],
        &[model.path(), "--prompt-tokens", "0", "--tokens", "0"],
        &[model.path(), "--prompt-tokens", "5000"],
        &[model.path(), "--kernels", "abacus"],
        &[],
    ] {
        assert_eq!(json(wrong, 2)["error"]["exit"], 2, "{wrong:?}");
    }
    json(&["/no/such/model"], 3);
}

#[test]
fn a_vision_tower_is_measured_beside_a_product_of_its_size() {
    let model = Model::new("tiny-k3");
    let record = json(&["vision", model.path(), "--runs", "1", "--max-patches", "64"], 0);
    assert_eq!((&record["patches"], &record["tokens"]), (&64.into(), &16.into()), "{record}");
    let number = |key: &str| record[key].as_f64().unwrap();
    assert!(number("seconds") > 0.0 && number("gemm_gflops") > 0.0, "{record}");
    assert!((number("tower_gflops") / number("gemm_gflops") / number("of_gemm") - 1.0).abs() < 1e-9);
    let without = Model::new("tiny-linear");
    let error = json(&["vision", without.path()], 3);
    assert_eq!(error["error"]["code"], "no_vision", "{error}");
}
