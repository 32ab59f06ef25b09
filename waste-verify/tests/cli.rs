//! The command line: exits, JSON, chaining, lists of sums, interruption.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod common;

use std::fs;

use assert_cmd::Command;
use common::*;
use predicates::prelude::*;
use serde_json::{Value, json};
use waste_common::cli::{Exit, Interrupt, run_captured};
use waste_common::container::ExpertFmt;
use waste_verify::{Args, Request, TOOL};

fn tool() -> Command {
    waste_tests::tool::tool("waste-verify")
}

fn stdout(assert: assert_cmd::assert::Assert) -> Value {
    let output = assert.get_output().stdout.clone();
    serde_json::from_slice(&output)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output)))
}

#[test]
fn the_shape_of_the_json_is_fixed() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    let mut bank = fixture.read("experts-L2.bin");
    bank[RECORD + 4] ^= 1;
    fixture.set("experts-L2.bin", &bank);
    fixture.set("notes.txt", b"mine");
    let assert = tool().arg(&fixture.dir).args(["--json", "-q"]).assert().code(1);
    let text = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
    assert!(text.ends_with("}\n") && text.lines().count() == 1 && assert.get_output().stderr.is_empty());
    let object: Value = serde_json::from_str(&text).unwrap();
    let keys: Vec<_> = object.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(
        keys,
        [
            "schema",
            "container",
            "ok",
            "mode",
            "files",
            "bytes",
            "file_results",
            "layers",
            "experts",
            "tensors",
            "manifest_sha256",
            "unprotected",
            "problem_count",
            "problems",
            "notes",
            "seconds"
        ]
    );
    let container = fixture.dir.to_str().unwrap();
    assert_eq!((&object["schema"], &object["container"]), (&json!("waste-verify/1"), &json!(container)));
    let bytes: u64 =
        fs::read_dir(&fixture.dir).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    assert_eq!((&object["files"], &object["bytes"]), (&json!(11), &json!(bytes - 4 - lock_bytes(&fixture))));
    assert_eq!(object["manifest_sha256"], fixture.open().manifest_sha256());
    assert_eq!(
        object["problems"][1].to_string(),
        r#"{"file":"experts-L2.bin","kind":"header","layer":2,"expert":1,"offset":4096,"message":"layer is 3, expected 2"}"#
    );
    assert_eq!(
        object["notes"],
        json!([{"file": "notes.txt", "message": "not named by the manifest; readers ignore it"}])
    );
}

/// Elsewhere the lock goes with its holder.
fn lock_bytes(fixture: &Fixture) -> u64 {
    fs::metadata(fixture.path(".waste.lock")).map_or(0, |meta| meta.len())
}

#[test]
fn people_read_the_verdict_last() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    tool().arg(&fixture.dir).assert().code(0).stdout(predicate::str::ends_with(": sound\n"));
    tool()
        .args(["--quick"])
        .arg(&fixture.dir)
        .assert()
        .code(0)
        .stdout(predicate::str::contains("payloads were not read"));
    let mut bank = fixture.read("experts-L1.bin");
    bank[60] ^= 1;
    fixture.set("experts-L1.bin", &bank);
    tool()
        .arg(&fixture.dir)
        .assert()
        .code(1)
        .stdout(predicate::str::contains("experts-L1.bin, layer 1, expert 0, offset 0: crc32 is "))
        .stdout(predicate::str::contains("NOT sound, 1 problem; "));
    tool()
        .arg("--from-disk")
        .arg(&fixture.dir)
        .assert()
        .code(1)
        .stdout(predicate::str::contains("NOT sound, 1 problem; "));
    tool().args(["--from-disk", "--quick"]).arg(&fixture.dir).assert().code(2);
    // What quick does not read, it does not find.
    tool().arg("--quick").arg(&fixture.dir).assert().code(0);
}

#[test]
fn stages_are_chained() {
    let fixture = Fixture::new(ExpertFmt::Vq4p);
    let converted = json!({"schema": "waste-convert/1", "container": fixture.dir.to_str().unwrap(), "layers": 2,
        "bytes": 1, "seconds": 0.5, "error": {"gate": 0.19, "up": 0.19, "down": 0.2}});
    let object = stdout(tool().args(["-", "--json"]).write_stdin(converted.to_string()).assert().code(0));
    // What waste-plan takes.
    assert_eq!((&object["ok"], &object["container"]), (&json!(true), &converted["container"]));
    tool().args(["-", "--json"]).write_stdin(object.to_string()).assert().code(0);

    let error = r#"{"schema":"waste-convert/1","error":{"code":"disk_full","exit":4,"message":"no room"}}"#;
    tool()
        .args(["-", "--json"])
        .write_stdin(error)
        .assert()
        .code(4)
        .stdout(format!("{error}\n"))
        .stderr(predicate::str::contains("waste-convert: no room"));
    let downloaded = json!({"schema": "waste-download/1", "checkpoint": "k3"}).to_string();
    tool().args(["-", "--json"]).write_stdin(downloaded).assert().code(3);
    let no = json!({"schema": "waste-verify/1", "container": "x", "ok": false}).to_string();
    tool().args(["-", "--json"]).write_stdin(no).assert().code(1);
    tool().args(["-", "--json"]).write_stdin("hello").assert().code(3);
}

#[test]
fn wrong_usage_and_what_is_no_container_are_told_apart() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    let dir = fixture.dir.to_str().unwrap();
    for args in [
        &["--json"][..],
        &["--json", dir, "--experts", "4"],
        &["--json", dir, "--source", dir, "--experts", "0"],
        &["--json", dir, "--source", dir, "--experts", "some"],
        &["--json", dir, "--threads", "0"],
        &["--json", dir, "--expect-manifest", "abc"],
        &["--json", dir, "--nonsense"],
    ] {
        let object = stdout(tool().args(args).assert().code(2));
        assert_eq!(object["error"]["code"], "usage", "{object}");
    }
    let no_container = |dir: &std::path::Path, words: &str| {
        let object = stdout(tool().arg(dir).arg("--json").assert().code(3));
        assert_eq!(object["error"]["code"], "no_container");
        assert!(object["error"]["message"].as_str().unwrap().contains(words), "{object}");
    };
    no_container(&fixture.beside("nowhere"), "does not exist");
    no_container(&fixture.path("trunk.bin"), "is no directory");
    fs::rename(fixture.path("manifest.json"), fixture.beside("manifest.json")).unwrap();
    no_container(&fixture.dir, "run waste-convert again");
    let checkpoint = fixture.beside("checkpoint");
    fs::create_dir(&checkpoint).unwrap();
    no_container(&checkpoint, "no manifest.json");
    fs::write(checkpoint.join("config.json"), "{}").unwrap();
    fs::write(checkpoint.join("model.safetensors"), "").unwrap();
    no_container(&checkpoint, "is a checkpoint");
}

#[test]
fn the_manifest_that_is_expected_is_checked() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    let sha256 = fixture.open().manifest_sha256().to_owned();
    fixture.report(&["--expect-manifest", &sha256.to_uppercase()], Exit::Done);
    let problems = fixture.problems(&["--expect-manifest", &"0".repeat(64)]);
    assert!(has(&problems, &json!({"file": "manifest.json", "kind": "unexpected_manifest"})), "{problems:?}");
    // The problem is seen also where the container was changed with all its checksums.
    fixture.edit_manifest(|manifest| manifest["arch"] = "another".into());
    fixture.assert_sound();
    fixture.problems(&["--expect-manifest", &sha256]);
}

#[test]
fn lists_of_sums_are_written_and_compared() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    for list in [fixture.path("SHA256SUMS"), fixture.path("mine.sha256"), fixture.beside("SUMS")] {
        let path = list.to_str().unwrap();
        fixture.report(&[&format!("--sums={path}")], Exit::Done);
        let text = fs::read_to_string(&list).unwrap();
        assert_eq!(text.lines().count(), 11, "{text}");
        assert!(text.lines().any(|line| line.ends_with("  manifest.sha256")));
        let report = fixture.report(&["--check-sums", path], Exit::Done);
        assert_eq!(report["problem_count"], 0);
        fixture.report(&["--check-sums", path, "--quick"], Exit::Done);
        fs::remove_file(&list).unwrap();
    }
    let list = fixture.beside("SUMS");
    let path = list.to_str().unwrap();
    fixture.report(&[&format!("--sums={path}")], Exit::Done);
    // As another program would write them.
    let text = fs::read_to_string(&list).unwrap();
    let names: Vec<_> = text.lines().map(|line| line[66..].to_owned()).collect();
    let others: String =
        text.lines().rev().map(|line| format!("{} *./{}\r\n", &line[..64], &line[66..])).collect();
    fs::write(&list, others).unwrap();
    fixture.report(&["--check-sums", path], Exit::Done);

    // A bit of any file, a file more, a file less; what the container's own checksums cover or not.
    for name in &names {
        let original = fixture.read(name);
        let mut changed = original.clone();
        *changed.last_mut().unwrap() ^= 1;
        fixture.set(name, &changed);
        let captured = fixture.run(&["--json", "--check-sums", path]);
        if name != "manifest.json" {
            assert!(captured.stdout.contains(r#""kind":"sums_mismatch""#), "{name}: {}", captured.stdout);
        }
        assert_ne!(captured.exit, Exit::Done, "{name}");
        fixture.set(name, &original);
    }
    fixture.set("extra.bin", b"x");
    fixture.set("usage.waste", b"WUSG");
    let problems = fixture.problems(&["--check-sums", path]);
    assert!(problems.len() == 1 && has(&problems, &json!({"file": "extra.bin", "kind": "extra_file"})));
    fs::remove_file(fixture.path("extra.bin")).unwrap();
    fs::write(&list, format!("{}{}  gone.bin\n", fs::read_to_string(&list).unwrap(), "0".repeat(64)))
        .unwrap();
    let problems = fixture.problems(&["--check-sums", path]);
    assert!(problems.len() == 1 && has(&problems, &json!({"file": "gone.bin", "kind": "missing_file"})));
    fs::write(&list, "no sums").unwrap();
    assert_eq!(fixture.report(&["--check-sums", path], Exit::Data)["error"]["code"], "bad_sums");
    fixture.report(&["--check-sums", fixture.beside("nowhere").to_str().unwrap()], Exit::Data);

    // A container that is not sound gets no list.
    fs::remove_file(&list).unwrap();
    fixture.set("trunk.bin", b"");
    fixture.problems(&[&format!("--sums={path}")]);
    assert!(!list.exists());
}

#[test]
fn leftovers_are_noted_and_no_problem() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    for name in ["trunk.bin.tmp", "codebooks-L1.bin", "trunk-index.json", "README", "usage.waste"] {
        fixture.set(name, b"x");
    }
    fs::create_dir(fixture.path("folder")).unwrap();
    let report = fixture.assert_sound();
    let notes: Vec<_> = report["notes"].as_array().unwrap().iter().map(|note| note["file"].clone()).collect();
    assert_eq!(notes, ["README", "codebooks-L1.bin", "folder", "trunk-index.json", "trunk.bin.tmp"]);
    assert_eq!(report["unprotected"], json!(["usage.waste"]));
}

#[test]
fn an_interruption_ends_with_130() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    let interrupt = Interrupt::new();
    interrupt.request();
    let dir = fixture.dir.to_str().unwrap();
    let captured = run_captured(TOOL, ["--json", dir], |args: Args, output| {
        waste_verify::verify(&Request::from_args(args)?, output, &interrupt).map(|_| Exit::Done)
    });
    assert_eq!(captured.exit, Exit::Interrupted);
    let object: Value = serde_json::from_str(&captured.stdout).unwrap();
    assert_eq!(object["error"]["exit"], 130);
}

#[test]
fn help_has_examples_and_the_exit_codes() {
    let text = |args: &[&str]| {
        String::from_utf8(tool().args(args).assert().code(0).get_output().stdout.clone()).unwrap()
    };
    let help = text(&["--help"]);
    for part in ["Examples:", "--source Kimi-K3", "Exit codes:", "130", "--check-sums", "WASTE_THREADS"] {
        assert!(help.contains(part), "{part}: {help}");
    }
    assert!(text(&["man"]).contains(".TH") && text(&["completions", "bash"]).contains("waste-verify"));
}
