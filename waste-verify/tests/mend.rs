//! What the tool writes: repairs, checksums for a container that has none, and the state of an interrupted run.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use common::*;
use serde_json::{Value, json};
use waste_common::cli::{Exit, Interrupt, run_captured};
use waste_common::container::{Container, ExpertFmt};
use waste_verify::{Args, Request, TOOL};

fn tree(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let files =
        entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()));
    files.filter(|(name, _)| !name.starts_with(".waste.lock")).collect()
}

/// Two equal containers.
fn copies() -> (Fixture, Fixture) {
    (Fixture::new(ExpertFmt::Vq3r), Fixture::new(ExpertFmt::Vq3r))
}

fn repair(broken: &Fixture, from: &Fixture, exit: Exit) -> Value {
    broken.report(&["--repair", "--from", from.dir.to_str().unwrap()], exit)
}

#[test]
fn what_is_bad_is_copied_and_nothing_else() {
    let flip = |fixture: &Fixture, name: &str, at: usize| {
        let mut content = fixture.read(name);
        content[at] ^= 4;
        fixture.set(name, &content);
    };
    type Case<'a> = (&'a str, &'a dyn Fn(&Fixture), Value);
    let cases: [Case; 9] = [
        ("a sound one", &|_| {}, Value::Null),
        (
            "records",
            &|f| {
                flip(f, "experts-L1.bin", 100);
                flip(f, "experts-L2.bin", 2 * RECORD + 4090);
            },
            json!([{"file": "experts-L1.bin", "parts": 1, "bytes": RECORD},
                   {"file": "experts-L2.bin", "parts": 1, "bytes": RECORD}]),
        ),
        (
            "a header field that only the sum of headers covers",
            &|f| flip(f, "experts-L1.bin", RECORD + 40),
            json!([{"file": "experts-L1.bin", "parts": 1, "bytes": RECORD}]),
        ),
        (
            "a short bank",
            &|f| f.set("experts-L1.bin", &f.read("experts-L1.bin")[..RECORD + 5]),
            json!([{"file": "experts-L1.bin", "parts": 2, "bytes": 2 * RECORD}]),
        ),
        (
            "a long bank",
            &|f| f.set("experts-L1.bin", &[f.read("experts-L1.bin"), vec![1; 77]].concat()),
            json!([{"file": "experts-L1.bin", "parts": 0, "bytes": 0}]),
        ),
        ("a missing bank", &|f| fs::remove_file(f.path("experts-L2.bin")).unwrap(), Value::Null),
        ("a tensor", &|f| flip(f, "trunk.bin", 9), Value::Null),
        (
            "small files",
            &|f| {
                flip(f, "tokenizer.model", 0);
                flip(f, "codebooks.bin", 300);
                fs::remove_file(f.path("chat.json")).unwrap();
                f.set("trunk.bin", b"");
            },
            Value::Null,
        ),
        ("the manifest", &|f| f.set("manifest.json", &f.read("manifest.json")[1..]), Value::Null),
    ];
    for (what, damage, expected) in cases {
        let (broken, good) = copies();
        let whole = tree(&broken.dir);
        damage(&broken);
        let report = repair(&broken, &good, Exit::Done);
        assert_eq!(report["ok"], true, "{what}");
        if !expected.is_null() {
            assert_eq!(report["repaired"], expected, "{what}");
        }
        assert!(tree(&broken.dir) == whole && tree(&good.dir) == whole, "{what}");
    }
}

#[test]
fn what_is_bad_in_both_copies_stays_and_is_named() {
    let (broken, other) = copies();
    for fixture in [&broken, &other] {
        let mut bank = fixture.read("experts-L1.bin");
        bank[100] ^= 4;
        fixture.set("experts-L1.bin", &bank);
    }
    let mut bank = broken.read("experts-L1.bin");
    bank[RECORD + 100] ^= 4;
    broken.set("experts-L1.bin", &bank);
    let before = tree(&other.dir);
    let report = repair(&broken, &other, Exit::No);
    assert_eq!(report["problem_count"], 1);
    assert_eq!((&report["problems"][0]["expert"], &report["repaired"][0]["parts"]), (&json!(0), &json!(1)));
    assert!(tree(&other.dir) == before);
}

/// A copy that ends early still helps with what it has, and with the other files.
#[test]
fn a_copy_that_is_short_itself_mends_what_it_can() {
    let (broken, other) = copies();
    let whole = tree(&broken.dir);
    let mut bank = broken.read("experts-L1.bin");
    bank[RECORD + 40] ^= 4;
    broken.set("experts-L1.bin", &bank);
    fs::remove_file(broken.path("tokenizer.model")).unwrap();
    other.set("experts-L1.bin", &other.read("experts-L1.bin")[..2 * RECORD]);
    repair(&broken, &other, Exit::Done);
    assert!(tree(&broken.dir) == whole);
}

#[test]
fn another_container_repairs_nothing() {
    let broken = Fixture::new(ExpertFmt::Vq3r);
    let other = Fixture::new(ExpertFmt::Vq2r);
    let before = tree(&broken.dir);
    let report = repair(&broken, &other, Exit::Data);
    assert_eq!(report["error"]["code"], "other_container");
    assert!(tree(&broken.dir) == before);
    broken.report(&["--repair"], Exit::Usage);
    broken.report(&["--from", "x"], Exit::Usage);
}

/// Without any of our checksums.
fn unsealed() -> Fixture {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    let mut manifest: Value = serde_json::from_slice(&fixture.read("manifest.json")).unwrap();
    manifest.as_object_mut().unwrap().remove("integrity");
    manifest["note"] = json!("kept");
    for entry in manifest["trunk"].as_array_mut().unwrap() {
        entry.as_object_mut().unwrap().remove("crc32");
    }
    fixture.set("manifest.json", manifest.to_string().as_bytes());
    fs::remove_file(fixture.path("manifest.sha256")).unwrap();
    fixture
}

#[test]
fn a_container_without_checksums_gets_the_ones_we_would_have_written() {
    let fixture = unsealed();
    let banks = fixture.read("experts-L1.bin");
    assert!(!fixture.assert_sound()["unprotected"].as_array().unwrap().is_empty());
    let report = fixture.report(&["--seal"], Exit::Done);
    assert_eq!((&report["sealed"], &report["unprotected"]), (&json!(true), &json!([])));
    assert!(fixture.read("experts-L1.bin") == banks);
    let ours = Fixture::new(ExpertFmt::Vq3r).open().manifest().clone();
    let sealed = fixture.open();
    assert_eq!(sealed.manifest().extra["note"], "kept");
    assert_eq!((&sealed.manifest().integrity, &sealed.manifest().trunk), (&ours.integrity, &ours.trunk));
    assert_eq!(report["manifest_sha256"], sealed.manifest_sha256());
    assert_eq!(fixture.assert_sound()["unprotected"], json!([]));
    // Once is enough.
    let before = tree(&fixture.dir);
    assert_eq!(fixture.report(&["--seal"], Exit::Done)["sealed"], false);
    assert!(tree(&fixture.dir) == before);
    // Now a wrong bit anywhere is found.
    let mut trunk = fixture.read("trunk.bin");
    trunk[5] ^= 1;
    fixture.set("trunk.bin", &trunk);
    fixture.problems(&[]);
}

#[test]
fn a_sealing_that_was_killed_between_its_two_files_is_finished_by_the_next() {
    let fixture = unsealed();
    let manifest = fixture.read("manifest.json");
    fixture.report(&["--seal"], Exit::Done);
    let sealed = tree(&fixture.dir);
    fixture.set("manifest.json", &manifest);
    fixture.report(&["--seal"], Exit::Done);
    assert!(tree(&fixture.dir) == sealed);
    // But another checksum of the manifest says that it is damaged.
    fixture.set("manifest.json", &manifest);
    fixture.set("manifest.sha256", format!("{}  manifest.json\n", "0".repeat(64)).as_bytes());
    assert_eq!(fixture.report(&["--seal"], Exit::No)["sealed"], false);
    assert!(fixture.read("manifest.json") == manifest);
}

#[test]
fn what_is_not_sound_is_not_sealed() {
    for (name, at) in [("experts-L1.bin", 100), ("experts-L1.bin", 4095), ("codebooks.bin", 0)] {
        let fixture = unsealed();
        let manifest = fixture.read("manifest.json");
        let mut content = fixture.read(name);
        content[at] ^= 1;
        fixture.set(name, &content);
        assert_eq!(fixture.report(&["--seal"], Exit::No)["sealed"], false, "{name} {at}");
        assert!(fixture.read("manifest.json") == manifest && !fixture.path("manifest.sha256").exists());
    }
    let fixture = unsealed();
    fs::remove_file(fixture.path("trunk.bin")).unwrap();
    assert_eq!(fixture.report(&["--seal"], Exit::No)["sealed"], false);
}

#[test]
fn containers_of_another_converter_can_be_sealed() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/interop");
    for entry in fs::read_dir(source).unwrap().map(|entry| entry.unwrap()) {
        let name = entry.file_name().into_string().unwrap();
        if !entry.path().join("manifest.json").exists() {
            continue;
        }
        let fixture = Fixture::interop(&name);
        assert_eq!(fixture.report(&["--seal"], Exit::Done)["sealed"], true, "{name}");
        Container::open(&fixture.dir).unwrap();
        fixture.assert_sound();
    }
}

#[test]
fn an_interrupted_run_goes_on_where_it_stopped() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    let state = fixture.beside("state.json");
    let path = state.to_str().unwrap();
    fixture.report(&["--resume", path], Exit::Done);
    assert!(!state.exists());
    // A state that knows one bank: what has changed there since it was seen is not looked for, by size and time only.
    let interrupt = Interrupt::new();
    interrupt.request();
    run_captured(TOOL, ["--json", "--resume", path, fixture.dir.to_str().unwrap()], |args: Args, output| {
        waste_verify::verify(&Request::from_args(args)?, output, &interrupt).map(|_| Exit::Done)
    });
    let meta = fs::metadata(fixture.path("experts-L1.bin")).unwrap();
    let modified = meta.modified().unwrap();
    let known = |bytes: u64| {
        json!({"version": 1, "manifest_sha256": fixture.open().manifest_sha256(), "files": {"experts-L1.bin": {
            "bytes": bytes,
            "modified_ns": modified.duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64,
            "sound": true,
            "sha256": null,
        }}})
    };
    let mut bank = fixture.read("experts-L1.bin");
    bank[100] ^= 1;
    fixture.set("experts-L1.bin", &bank);
    let file = fs::OpenOptions::new().write(true).open(fixture.path("experts-L1.bin")).unwrap();
    file.set_modified(modified).unwrap();
    fs::write(&state, known(meta.len()).to_string()).unwrap();
    fixture.report(&["--resume", path], Exit::Done);
    assert!(!state.exists());
    // What was seen in memory does not count for the disk; what was seen on the disk counts for either.
    fs::write(&state, known(meta.len()).to_string()).unwrap();
    fixture.report(&["--resume", path, "--from-disk"], Exit::No);
    let mut on_disk = known(meta.len());
    on_disk["from_disk"] = true.into();
    for more in [&["--from-disk"][..], &[]] {
        fs::write(&state, on_disk.to_string()).unwrap();
        fixture.report(&[&["--resume", path], more].concat(), Exit::Done);
    }
    // Another time, another size, another manifest: it is looked at.
    for state_text in
        [known(1).to_string(), known(meta.len()).to_string().replace("_sha256\":\"", "_sha256\":\"0")]
    {
        fs::write(&state, state_text).unwrap();
        fixture.report(&["--resume", path], Exit::No);
    }
    fs::write(&state, known(meta.len()).to_string()).unwrap();
    file.set_modified(modified + std::time::Duration::from_secs(1)).unwrap();
    fixture.report(&["--resume", path], Exit::No);
    for bad in ["{}", "[", r#"{"version":9,"manifest_sha256":"","files":{}}"#] {
        fs::write(&state, bad).unwrap();
        fixture.report(&["--resume", path], Exit::Data);
    }
}

#[test]
fn every_file_has_a_result_of_its_own() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    let mut bank = fixture.read("experts-L1.bin");
    bank[100] ^= 1;
    fixture.set("experts-L1.bin", &bank);
    fs::remove_file(fixture.path("chat.json")).unwrap();
    let report = fixture.report(&[], Exit::No);
    let results = report["file_results"].as_array().unwrap();
    assert_eq!(results.len(), 11);
    let bad: Vec<_> = results.iter().filter(|result| result["ok"] == false).cloned().collect();
    assert_eq!(
        bad,
        [
            json!({"file": "chat.json", "bytes": null, "ok": false, "problem_count": 1}),
            json!({"file": "experts-L1.bin", "bytes": 3 * RECORD, "ok": false, "problem_count": 1}),
        ]
    );
}

#[cfg(unix)]
#[test]
fn sha256sum_agrees_with_the_list() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    fixture.report(&["--sums"], Exit::Done);
    let check = || {
        let mut command = std::process::Command::new("sha256sum");
        command.args(["--check", "--quiet", "--strict", "SHA256SUMS"]).current_dir(&fixture.dir).status()
    };
    assert!(check().unwrap().success());
    fixture.report(&["--check-sums", fixture.path("SHA256SUMS").to_str().unwrap()], Exit::Done);
    fixture.set("chat.json", b"{}");
    assert!(!check().unwrap().success());
}
