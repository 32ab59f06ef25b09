//! Whatever is damaged is found and named.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod common;

use std::fs;

use common::*;
use serde_json::{Value, json};
use waste_common::cli::Exit;
use waste_common::container::ExpertFmt;

const FMTS: [ExpertFmt; 3] = [ExpertFmt::Vq3r, ExpertFmt::Vq2r, ExpertFmt::Vq4p];

/// Flips a bit of a file, gives the problems to `check`, and puts the file back.
fn flip(fixture: &Fixture, name: &str, at: usize, bit: usize, check: impl FnOnce(&[Value])) {
    let original = fixture.read(name);
    let mut changed = original.clone();
    changed[at] ^= 1 << bit;
    fixture.set(name, &changed);
    check(&fixture.problems(&[]));
    fixture.set(name, &original);
}

fn must_have(fixture: &Fixture, name: &str, at: usize, bit: usize, wanted: Value) {
    flip(fixture, name, at, bit, |problems| {
        assert!(has(problems, &wanted), "{name} byte {at} bit {bit}: {wanted} not in {problems:?}");
    });
}

#[test]
fn a_container_of_ours_is_sound_and_wholly_protected() {
    for fmt in FMTS {
        let report = Fixture::new(fmt).assert_sound();
        assert_eq!(report["unprotected"], json!([]));
        assert_eq!(report["notes"], json!([]));
        assert_eq!(
            (&report["layers"], &report["experts"], &report["files"]),
            (&json!(2), &json!(6), &json!(11))
        );
    }
}

#[test]
fn containers_of_another_tool_are_sound_as_far_as_v0_allows() {
    for (name, layers) in [("tiny-linear.waste", 4), ("tiny-k3.waste", 6)] {
        let fixture = Fixture::interop(name);
        let report = fixture.assert_sound();
        let unprotected = report["unprotected"].as_array().unwrap();
        for part in ["manifest.json", "trunk.bin", "codebooks.bin", "tokenizer.model", "specials.json"] {
            assert!(unprotected.contains(&part.into()), "{part}");
        }
        let banks = unprotected.iter().filter(|part| part.as_str().unwrap().starts_with("experts-L")).count();
        assert_eq!(banks, layers);
        // What v0 does protect is still checked.
        let mut bank = fixture.read("experts-L2.bin");
        bank[5000] ^= 1;
        fixture.set("experts-L2.bin", &bank);
        let problems = fixture.problems(&[]);
        assert!(has(
            &problems,
            &json!({"file": "experts-L2.bin", "layer": 2, "expert": 0, "offset": 0,
            "kind": "checksum"})
        ));
        fixture.report(&["--quick"], Exit::Done);
    }
}

#[test]
fn a_flipped_bit_of_a_record_is_named() {
    for fmt in FMTS {
        let (fixture, geometry) = (Fixture::new(fmt), geometry(fmt));
        assert_eq!(geometry.record_bytes(), RECORD);
        let mut random = Random(1);
        let header: Vec<usize> = (0..48).collect();
        let end = geometry.payload_end();
        let scales = geometry.scales_offset();
        let mut payload = vec![48, scales - 1, scales, end - 1, end, end + 1, RECORD - 1];
        payload.extend((0..40).map(|_| 48 + random.below(RECORD - 48)));
        for (i, at) in header.iter().chain(&payload).enumerate() {
            let expert = [0, 2, 1][i % 3];
            let layer = LAYERS[i % 2];
            let name = format!("experts-L{layer}.bin");
            let wanted = json!({"file": name, "layer": layer, "expert": expert});
            must_have(&fixture, &name, expert * RECORD + at, i % 8, wanted);
        }
        fixture.assert_sound();
    }
}

#[test]
fn the_kind_and_the_offset_of_a_records_damage_are_told() {
    let (fixture, geometry) = (Fixture::new(ExpertFmt::Vq4p), geometry(ExpertFmt::Vq4p));
    let end = geometry.payload_end();
    let of = |kind: &str, offset: usize| json!({"kind": kind, "layer": 1, "expert": 1, "offset": offset});
    must_have(&fixture, "experts-L1.bin", RECORD + 4, 0, of("header", RECORD));
    must_have(&fixture, "experts-L1.bin", RECORD + 9, 0, of("header", RECORD));
    must_have(&fixture, "experts-L1.bin", RECORD + 36, 0, of("checksum", RECORD));
    must_have(&fixture, "experts-L1.bin", RECORD + 48, 0, of("checksum", RECORD));
    must_have(&fixture, "experts-L1.bin", RECORD + end + 5, 7, of("padding", RECORD + end + 5));
    // The checksum of the headers tells a damaged header from a damaged payload.
    let of_bank = json!({"kind": "checksum", "file": "experts-L1.bin", "expert": Value::Null});
    must_have(&fixture, "experts-L1.bin", 36, 0, of_bank.clone());
    flip(&fixture, "experts-L1.bin", 48, 0, |problems| assert!(!has(problems, &of_bank)));
}

/// Damage that a right checksum covers: what a broken writer would make.
#[test]
fn bad_numbers_are_found_under_a_right_checksum() {
    let fixture = Fixture::new(ExpertFmt::Vq2r);
    let geometry = geometry(ExpertFmt::Vq2r);
    let original = fixture.read("experts-L2.bin");
    let with = |at: usize, value: [u8; 2]| {
        let mut bank = original.clone();
        bank[at..at + 2].copy_from_slice(&value);
        let crc = crc32fast::hash(&bank[48..geometry.payload_end()]);
        bank[36..40].copy_from_slice(&crc.to_le_bytes());
        fixture.set("experts-L2.bin", &bank);
        fixture.problems(&[])
    };
    for bits in [0x7c00u16, 0xfc00, 0x7e01] {
        let at = geometry.scales_offset() + 2 * 24;
        let problems = with(at, bits.to_le_bytes());
        let wanted = json!({"kind": "not_finite", "layer": 2, "expert": 0, "offset": at,
            "message": "up: the scale of row 0 is not finite"});
        assert!(has(&problems, &wanted), "{problems:?}");
        assert!(!has(&problems, &json!({"kind": "checksum", "expert": 0})));
    }
    let problems = with(48, [16, 0]);
    assert!(has(&problems, &json!({"kind": "index_out_of_range", "layer": 2, "expert": 0})), "{problems:?}");
    // Row 24 of 24: the first padding row of the first block.
    let problems = with(48 + 24 * 2, [1, 0]);
    assert!(
        has(&problems, &json!({"kind": "index_padding_not_zero", "layer": 2, "expert": 0})),
        "{problems:?}"
    );
}

#[test]
fn a_flipped_bit_of_the_trunk_names_the_tensor() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    let container = fixture.open();
    let mut random = Random(2);
    let mut fmts = std::collections::BTreeSet::new();
    for entry in container.trunk().entries() {
        fmts.insert(entry.fmt.name());
        let (start, bytes) = (entry.off as usize, entry.bytes as usize);
        for at in [0, bytes - 1, random.below(bytes)] {
            let wanted =
                json!({"file": "trunk.bin", "kind": "checksum", "tensor": entry.name, "offset": entry.off});
            flip(&fixture, "trunk.bin", start + at, random.below(8), |problems| {
                assert!(has(problems, &wanted), "{problems:?}");
                assert!(problems.iter().all(|problem| problem["tensor"] == *entry.name));
            });
        }
    }
    assert_eq!(fmts.len(), 5);
    fixture.assert_sound();
}

#[test]
fn a_flipped_bit_of_the_codebooks_is_found() {
    for fmt in FMTS {
        let fixture = Fixture::new(fmt);
        let bytes = fixture.read("codebooks.bin").len();
        let record = 16 + quant(fmt).entries as usize * 16;
        assert_eq!(bytes / record, 2 * (quant(fmt).codebooks_per_layer() as usize + 1));
        let mut random = Random(3);
        for id in 0..bytes / record {
            for at in [id % 16, 16 + random.below(record - 16), record - 1] {
                let sum = json!({"file": "codebooks.bin", "kind": "checksum"});
                must_have(&fixture, "codebooks.bin", id * record + at, random.below(8), sum);
            }
        }
        for at in (0..16).filter(|at| *at != 6) {
            let place = json!({"file": "codebooks.bin", "kind": "header", "layer": 1, "offset": record});
            must_have(&fixture, "codebooks.bin", record + at, random.below(8), place);
        }
        let padding = json!({"file": "codebooks.bin", "kind": "padding", "offset": 0});
        must_have(&fixture, "codebooks.bin", 20, 3, padding);
        fixture.assert_sound();
    }
}

#[test]
fn a_flipped_bit_of_any_small_file_is_found() {
    let fixture = Fixture::new(ExpertFmt::Vq2r);
    for name in ["tokenizer.model", "specials.json", "vision.json", "chat.json", "chat_template.jinja"] {
        let length = fixture.read(name).len();
        for at in (0..length).step_by(1 + length / 40) {
            must_have(&fixture, name, at, at % 8, json!({"file": name, "kind": "checksum"}));
        }
    }
    let line = fixture.read("manifest.sha256");
    for (at, bit) in (0..line.len()).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
        flip(&fixture, "manifest.sha256", at, bit, |problems| {
            let named =
                ["manifest.json", "manifest.sha256"].iter().any(|name| has(problems, &json!({"file": name})));
            assert!(named, "{at} {bit}: {problems:?}");
        });
    }
    fixture.assert_sound();
}

/// No checksum tells: this is how a careless converter would have written it.
#[test]
fn a_tokenizer_that_no_engine_can_use_is_found() {
    let fixture = Fixture::interop("tiny-linear.waste");
    let (ranks, specials) = (fixture.read("tokenizer.model"), fixture.read("specials.json"));
    let twice = [ranks.as_slice(), ranks.split_inclusive(|byte| *byte == b'\n').next().unwrap()].concat();
    for content in [b"garbage".as_slice(), b"", &twice] {
        fixture.set("tokenizer.model", content);
        for args in [&[][..], &["--quick"]] {
            let problems = fixture.problems(args);
            assert!(
                has(&problems, &json!({"file": "tokenizer.model", "kind": "invalid_rank_file"})),
                "{problems:?}"
            );
        }
    }
    fixture.set("tokenizer.model", &ranks);
    for content in [
        r#"[{"id":394,"text":"a"},{"id":394,"text":"b"}]"#,
        r#"[{"id":394,"text":"a"},{"id":395,"text":"a"}]"#,
        r#"[{"id":393,"text":"a"}]"#,
        r#"[{"id":650,"text":"a"}]"#,
        r#"[{"id":394,"text":""}]"#,
    ] {
        fixture.set("specials.json", content.as_bytes());
        let problems = fixture.problems(&[]);
        let wanted = json!({"file": "specials.json", "kind": "invalid_specials"});
        assert!(has(&problems, &wanted), "{content}: {problems:?}");
    }
    fixture.set("specials.json", &specials);
    fixture.assert_sound();
    // Without names the special tokens have their reserved ones.
    fs::remove_file(fixture.path("specials.json")).unwrap();
    fixture.assert_sound();
}

#[cfg(unix)]
#[test]
fn named_pipes_are_refused_and_do_not_hang() {
    let fixture = Fixture::interop("tiny-linear.waste");
    let pipe = |path: &std::path::Path| {
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    };
    for name in ["tokenizer.model", "specials.json", "chat.json"] {
        let _ = fs::remove_file(fixture.path(name));
        pipe(&fixture.path(name));
    }
    let problems = fixture.problems(&[]);
    for name in ["tokenizer.model", "specials.json", "chat.json"] {
        assert!(has(&problems, &json!({"file": name, "kind": "unusable_file"})), "{problems:?}");
    }
    pipe(&fixture.beside("SUMS"));
    let sums = fixture.beside("SUMS");
    assert_eq!(fixture.run(&["--check-sums", sums.to_str().unwrap()]).exit, Exit::Data);
}

#[test]
fn a_flipped_bit_of_the_manifest_is_found() {
    let fixture = Fixture::new(ExpertFmt::Vq2r);
    let original = fixture.read("manifest.json");
    let (mut invalid, mut found) = (0, 0);
    for at in (0..original.len()).step_by(11) {
        let mut changed = original.clone();
        changed[at] ^= 1 << (at % 8);
        fixture.set("manifest.json", &changed);
        let captured = fixture.run(&["--json"]);
        let object: Value = serde_json::from_str(&captured.stdout).unwrap();
        match captured.exit {
            Exit::No => {
                let problems = object["problems"].as_array().unwrap();
                assert!(
                    has(problems, &json!({"file": "manifest.json", "kind": "checksum"})),
                    "{at}: {object}"
                );
                found += 1;
            }
            Exit::Data => {
                assert!(object["error"]["message"].as_str().unwrap().contains("manifest.json"), "{object}");
                invalid += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(invalid > 20 && found > 100, "{invalid} {found}");
}

#[test]
fn all_problems_are_collected() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    for (name, at) in [
        ("experts-L1.bin", 60),
        ("experts-L2.bin", 2 * RECORD + 60),
        ("codebooks.bin", 4200),
        ("trunk.bin", 0),
    ] {
        let mut content = fixture.read(name);
        content[at] ^= 4;
        fixture.set(name, &content);
    }
    fs::remove_file(fixture.path("chat.json")).unwrap();
    fixture.set("specials.json", b"[{\"id\":3,\"text\":\"[EOS]\"");
    let problems = fixture.problems(&[]);
    for wanted in [
        json!({"file": "experts-L1.bin", "expert": 0}),
        json!({"file": "experts-L2.bin", "expert": 2}),
        json!({"file": "codebooks.bin", "kind": "checksum"}),
        json!({"file": "trunk.bin", "tensor": "model.embed_tokens.weight"}),
        json!({"file": "chat.json", "kind": "missing_file"}),
        json!({"file": "specials.json", "kind": "wrong_size"}),
        json!({"file": "specials.json", "kind": "bad_json"}),
    ] {
        assert!(has(&problems, &wanted), "{wanted}: {problems:?}");
    }
    assert_eq!(problems.len(), 7);
    // The same whatever the threads.
    for threads in ["1", "7"] {
        assert_eq!(fixture.problems(&["--threads", threads]), problems);
    }
}

#[test]
fn truncated_and_extended_files_are_found_and_the_rest_is_checked() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    let names = ["experts-L1.bin", "codebooks.bin", "trunk.bin", "tokenizer.model", "chat.json"];
    for name in names {
        let original = fixture.read(name);
        for bytes in [0, 1, original.len() / 2, original.len() - 1, original.len() + 1, original.len() + 5000]
        {
            let mut changed = original.clone();
            changed.resize(bytes, 0);
            fixture.set(name, &changed);
            for args in [&[][..], &["--quick"]] {
                let problems = fixture.problems(args);
                let kind = if name == "trunk.bin" && bytes > original.len() { "gap" } else { "wrong_size" };
                assert!(has(&problems, &json!({"file": name, "kind": kind})), "{name} {bytes}: {problems:?}");
                assert!(problems.iter().all(|problem| problem["file"] == name), "{problems:?}");
            }
        }
        fixture.set(name, &original);
    }
    let mut bank = fixture.read("experts-L2.bin");
    bank[RECORD + 100] ^= 1;
    bank.truncate(2 * RECORD + 7);
    fixture.set("experts-L2.bin", &bank);
    let problems = fixture.problems(&[]);
    assert!(has(&problems, &json!({"layer": 2, "expert": 1, "kind": "checksum"})), "{problems:?}");
}

#[test]
fn swapped_renamed_doubled_and_missing_banks_are_found() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    let (one, two) = (fixture.read("experts-L1.bin"), fixture.read("experts-L2.bin"));
    fixture.set("experts-L1.bin", &two);
    fixture.set("experts-L2.bin", &one);
    for args in [&[][..], &["--quick"]] {
        let problems = fixture.problems(args);
        for (layer, expert) in [(1, 0), (1, 2), (2, 1)] {
            assert!(
                has(&problems, &json!({"layer": layer, "expert": expert, "kind": "header"})),
                "{problems:?}"
            );
        }
    }
    fixture.set("experts-L2.bin", &two);
    let mut doubled = one.clone();
    doubled.copy_within(RECORD..2 * RECORD, 2 * RECORD);
    fixture.set("experts-L1.bin", &doubled);
    let wanted = json!({"layer": 1, "expert": 2, "kind": "header", "message": "expert_id is 1, expected 2"});
    assert!(has(&fixture.problems(&["--quick"]), &wanted));
    fixture.set("experts-L1.bin", &one);
    fs::rename(fixture.path("experts-L2.bin"), fixture.path("experts-L9.bin")).unwrap();
    let report = fixture.report(&[], Exit::No);
    let problems = report["problems"].as_array().unwrap();
    assert!(has(problems, &json!({"file": "experts-L2.bin", "layer": 2, "kind": "missing_file"})));
    assert!(report["notes"].to_string().contains("experts-L9.bin"), "{report}");
}

#[test]
fn every_missing_file_is_named() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    for name in [
        "experts-L1.bin",
        "codebooks.bin",
        "trunk.bin",
        "tokenizer.model",
        "specials.json",
        "chat_template.jinja",
    ] {
        let original = fixture.read(name);
        fs::remove_file(fixture.path(name)).unwrap();
        assert!(has(&fixture.problems(&[]), &json!({"file": name, "kind": "missing_file"})), "{name}");
        fixture.set(name, &original);
    }
    fs::remove_file(fixture.path("manifest.sha256")).unwrap();
    assert_eq!(fixture.assert_sound()["unprotected"], json!(["manifest.json"]));
}

/// The bug behind it: a bank's name with a parent-directory step was opened.
#[test]
fn names_that_leave_the_directory_are_refused() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    for name in ["../experts-L1.bin", "/etc/passwd", "a/b", "..", "C:x"] {
        fixture.edit_manifest(|manifest| manifest["layers"]["1"]["file"] = name.into());
        let error = fixture.report(&[], Exit::Data)["error"].clone();
        assert_eq!(
            (&error["code"], &error["at"]),
            (&json!("bad_manifest"), &json!("layers.1.file")),
            "{error}"
        );
    }
}

#[test]
#[cfg(unix)]
fn links_out_of_the_directory_and_odd_files_are_refused() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    for name in ["experts-L1.bin", "trunk.bin", "tokenizer.model", "codebooks.bin"] {
        let outside = fixture.beside(name);
        fs::rename(fixture.path(name), &outside).unwrap();
        std::os::unix::fs::symlink(&outside, fixture.path(name)).unwrap();
        assert!(has(&fixture.problems(&[]), &json!({"file": name, "kind": "unusable_file"})), "{name}");
        fs::remove_file(fixture.path(name)).unwrap();
        fs::create_dir(fixture.path(name)).unwrap();
        assert!(has(&fixture.problems(&[]), &json!({"file": name, "kind": "unusable_file"})), "{name}");
        fs::remove_dir(fixture.path(name)).unwrap();
        fs::rename(&outside, fixture.path(name)).unwrap();
    }
    fixture.assert_sound();
}

#[test]
fn absurd_manifests_are_refused_without_panic_or_memory() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    let original: Value = serde_json::from_slice(&fixture.read("manifest.json")).unwrap();
    let grouped = original["trunk"].as_array().unwrap().iter().position(|entry| entry["fmt"] == 2).unwrap();
    let grouped = format!("/trunk/{grouped}");
    for (pointer, value) in [
        (format!("{grouped}/group"), json!(0)),
        (format!("{grouped}/shape"), json!([1u64 << 40, 1u64 << 40])),
        (format!("{grouped}/off"), json!(u64::MAX)),
        (format!("{grouped}/shape"), json!([])),
        ("/expert_quant/entries".into(), json!(0)),
        ("/expert_quant/stages".into(), json!(u32::MAX)),
        ("/expert_quant/index_block".into(), json!(1)),
        ("/layers/1/experts".into(), json!(u32::MAX)),
        ("/config/moe_intermediate_size".into(), json!(1u64 << 60)),
        ("/format_version".into(), json!(1)),
        ("/config".into(), json!(3)),
        ("/trunk".into(), json!({})),
    ] {
        let mut changed = original.clone();
        *changed.pointer_mut(&pointer).unwrap() = value;
        fixture.set_manifest(changed.to_string().as_bytes());
        let object = fixture.report(&[], Exit::Data);
        assert!(object["error"]["message"].as_str().unwrap().contains("manifest.json"), "{object}");
    }
    // These can be understood, but not be true.
    for (pointer, value) in [
        ("/config/moe_intermediate_size", json!(1 << 20)),
        ("/config/hidden_size", json!(1 << 20)),
        ("/layers/1/experts", json!(65_536)),
        ("/layers/1/bytes", json!(u64::MAX)),
        ("/expert_quant/entries", json!(255)),
        ("/trunk/0/off", json!(1u64 << 62)),
        ("/config/num_experts", json!(4)),
        ("/config/rms_norm_eps", json!("x")),
    ] {
        let mut changed = original.clone();
        // The sums of banks must go along, or the manifest contradicts itself.
        changed.as_object_mut().unwrap().remove("integrity");
        *changed.pointer_mut(pointer).unwrap() = value;
        fixture.set_manifest(changed.to_string().as_bytes());
        fixture.problems(&[]);
    }
    let mut deep = br#"{"format_version":"#.to_vec();
    deep.extend([b'['].repeat(100_000));
    for content in [&deep[..], b"", b"null", b"[]", b"{}", b"\xff\xfe", b"{\"format_version\":0}"] {
        fixture.set_manifest(content);
        fixture.report(&[], Exit::Data);
    }
    let sparse = fs::File::create(fixture.path("manifest.json")).unwrap();
    sparse.set_len(1 << 30).unwrap();
    assert_eq!(fixture.report(&[], Exit::Data)["error"]["code"], "json_too_large");
}

#[test]
fn a_sparse_bank_is_not_taken_into_memory() {
    let fixture = Fixture::interop("tiny-linear.waste");
    let file = fs::OpenOptions::new().write(true).open(fixture.path("experts-L1.bin")).unwrap();
    // A file system without sparse files has no room for it.
    if file.set_len(1 << 40).is_err() {
        return;
    }
    assert!(has(&fixture.problems(&[]), &json!({"file": "experts-L1.bin", "kind": "wrong_size"})));
}

#[test]
fn missing_tensors_wrong_shapes_and_bytes_of_no_tensor_are_found() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    let mut removed = Value::Null;
    fixture.edit_manifest(|manifest| {
        let trunk = manifest["trunk"].as_array_mut().unwrap();
        removed = trunk.remove(7);
        let entry =
            trunk.iter_mut().find(|entry| entry["fmt"] == 0 && entry["shape"].as_array().unwrap().len() == 2);
        let entry = entry.unwrap();
        let shape = entry["shape"].as_array_mut().unwrap();
        shape.reverse();
        removed["reversed"] = entry["name"].clone();
    });
    let problems = fixture.problems(&[]);
    for wanted in [
        json!({"kind": "missing_tensor", "tensor": removed["name"]}),
        json!({"kind": "wrong_shape", "tensor": removed["reversed"]}),
        json!({"kind": "gap", "file": "trunk.bin", "offset": removed["off"]}),
    ] {
        assert!(has(&problems, &wanted), "{wanted}: {problems:?}");
    }
}

#[test]
fn a_missing_layer_is_found() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    fixture.edit_manifest(|manifest| {
        manifest["layers"].as_object_mut().unwrap().remove("2");
        manifest["integrity"]["banks"].as_object_mut().unwrap().remove("2");
    });
    assert!(has(
        &fixture.problems(&[]),
        &json!({"file": "manifest.json", "layer": 2, "kind": "wrong_experts"})
    ));
}

#[test]
fn more_problems_than_are_listed_are_counted() {
    let fixture = Fixture::new(ExpertFmt::Vq3r);
    // Each layer's 65536 records of the manifest are not there; those that are, are wrong.
    let wrong = vec![1; 1500 * RECORD];
    fixture.set("experts-L1.bin", &wrong);
    fixture.edit_manifest(|manifest| {
        manifest["layers"]["1"]["experts"] = 1500.into();
        manifest["layers"]["1"]["bytes"] = (1500 * RECORD).into();
        manifest["integrity"]["banks"]["1"]["bytes"] = (1500 * RECORD).into();
    });
    let report = fixture.report(&[], Exit::No);
    assert_eq!(report["problems"].as_array().unwrap().len(), 1000);
    // A header, a checksum and padding each, the headers' sum, the experts' count.
    assert_eq!(report["problem_count"], 3 * 1500 + 2);
}
