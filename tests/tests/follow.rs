//! The downloader and the converter side by side on one disk.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use waste_tests::hub::{Hub, k3_tales};
use waste_tests::tool::{Ran, arg, emulated, process, run};

const REPO: &str = "owner/k3-tales";
const OPTIONS: [&str; 5] = ["--cb-sample", "1024", "--effort", "fast", "--json"];

fn download(hub: &Hub, checkpoint: &Path) -> Child {
    let mut command = process("waste-download");
    command.args([
        REPO,
        "--dest",
        arg(checkpoint),
        "--endpoint",
        &hub.url(),
        "--jobs",
        "1",
        "--reserve",
        "0",
        "--json",
    ]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn wait(until: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(300);
    while !until() {
        assert!(Instant::now() < end, "it did not happen");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Killed on the way and started again, the downloader fetches nothing that was used up already.
#[test]
fn a_model_is_converted_while_it_comes() {
    if emulated() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [source, whole, checkpoint, container] =
        ["source", "whole", "checkpoint", "pieces"].map(|name| dir.path().join(name));
    let hub = Hub::start(REPO);
    hub.commit(k3_tales());
    Ran::from_output(download(&hub, &source).wait_with_output().unwrap()).done();
    run("waste-convert", [arg(&source), arg(&whole)].into_iter().chain(OPTIONS)).done();

    hub.limit(Some(3 << 20));
    let mut first = download(&hub, &checkpoint);
    wait(|| checkpoint.join(".waste-download.json").exists());
    let mut follow = process("waste-convert");
    follow.args([arg(&checkpoint), arg(&container), "--follow", "--reclaim", "on"]).args(OPTIONS);
    let follow = follow.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait(|| checkpoint.join(".waste-reclaimed").exists());
    first.kill().unwrap();
    first.wait().unwrap();
    hub.settle();
    let before = hub.requests().len();
    let used = std::fs::read_to_string(checkpoint.join(".waste-reclaimed")).unwrap();
    let second = Ran::from_output(download(&hub, &checkpoint).wait_with_output().unwrap()).done();
    let result = second.json("waste-download/1");
    assert!(result["reclaimed"].as_u64() >= Some(1), "{result}");
    let fetched = hub.requests().split_off(before);
    for name in used.lines() {
        assert!(
            fetched.iter().all(|request| request.file.as_deref() != Some(name)),
            "{name} was fetched again"
        );
    }

    Ran::from_output(follow.wait_with_output().unwrap()).done();
    let digest = |container: &Path| {
        let report = run("waste-verify", [arg(container), "--json"]).done().json("waste-verify/1");
        report["manifest_sha256"].clone()
    };
    assert_eq!(digest(&container), digest(&whole));
    let left = std::fs::read_dir(&checkpoint).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(!left.into_iter().any(|name| name.to_string_lossy().ends_with(".safetensors")));
}
