//! Conversions that weigh errors by what the experts were given.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod util;

use std::path::Path;

use util::*;

const OPTIONS: [&str; 4] = ["--cb-sample", "1024", "--effort", "fast"];

#[test]
fn the_result_is_the_same_whatever_the_workers_and_only_the_same_file_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = golden("tiny-linear");
    let (one, other, model) = (dir.path().join("one"), dir.path().join("other"), dir.path().join("model"));
    importance(&one, &checkpoint, 5.0);
    importance(&other, &checkpoint, 6.0);
    importance(&model, &tales(), 5.0);
    let with = |file: &Path| [&OPTIONS[..], &["--importance", file.to_str().unwrap()]].concat().join("\n");
    let words = |line: &str| line.split('\n').map(str::to_owned).collect::<Vec<_>>();
    let run = |container: &str, file: &Path, more: &[&str]| {
        let (line, container) = (with(file), dir.path().join(container));
        let words = words(&line);
        let mut options: Vec<&str> = words.iter().map(String::as_str).collect();
        options.extend(more);
        convert(&checkpoint, &container, &options)
    };
    run("whole", &one, &["--jobs", "1"]);
    run("pieces", &one, &["--jobs", "2", "--layers", "1,3"]);
    // Another file, or none, is another conversion.
    let pieces = dir.path().join("pieces");
    let line = with(&other);
    let others = words(&line);
    let others: Vec<&str> = others.iter().map(String::as_str).collect();
    let error = refused(&checkpoint, &pieces, &others, 3, "other_options");
    assert_eq!(error["option"], "importance_sha256");
    refused(&checkpoint, &pieces, &OPTIONS, 3, "other_options");
    let report = run("pieces", &one, &["--jobs", "2"]);
    assert_eq!(report["resumed_layers"], 2);
    assert_same(&dir.path().join("whole"), &pieces);
    // It matters, and it is said.
    convert(&checkpoint, &dir.path().join("plain"), &OPTIONS);
    let bank = |name: &str| std::fs::read(dir.path().join(name).join("experts-L1.bin")).unwrap();
    assert!(bank("plain") != bank("whole"));
    let manifest: serde_json::Value =
        serde_json::from_slice(&std::fs::read(pieces.join("manifest.json")).unwrap()).unwrap();
    assert_eq!(manifest["conversion"]["importance_sha256"].as_str().unwrap().len(), 64);
    // What is of another model, and what is no such file.
    let line = with(&model);
    let wrong = words(&line);
    let wrong: Vec<&str> = wrong.iter().map(String::as_str).collect();
    let new = dir.path().join("new");
    refused(&checkpoint, &new, &wrong, 3, "invalid_importance");
    let shard = tales().join("model-00001-of-000004.safetensors");
    let line = with(&shard);
    let wrong = words(&line);
    let wrong: Vec<&str> = wrong.iter().map(String::as_str).collect();
    refused(&checkpoint, &new, &wrong, 3, "invalid_importance");
    assert!(!new.exists());
}
