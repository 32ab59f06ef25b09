//! Comparing with the checkpoint.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod common;

use std::fs;

use common::*;
use serde_json::{Value, json};
use waste_common::cli::Exit;
use waste_common::container::{ExpertFmt, Kind, TrunkFmt};

/// Adds noise of this relative size.
fn disturb(weights: &mut [f32], error: f64, random: &mut Random) {
    let noise = random.units(weights.len());
    let norm = |values: &[f32]| values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    let factor = error * norm(weights) / norm(&noise);
    weights.iter_mut().zip(&noise).for_each(|(weight, noise)| *weight += (f64::from(*noise) * factor) as f32);
}

fn with_source(
    fmt: ExpertFmt,
    change: impl FnMut(u32, u16, Kind, &mut Vec<f32>),
    trunk: impl FnMut(&str, &mut Vec<f32>),
) -> (Fixture, String) {
    let fixture = Fixture::new(fmt);
    let source = fixture.beside("checkpoint");
    write_source(&source, &fixture.open(), change, trunk);
    (fixture, source.to_str().unwrap().to_owned())
}

#[test]
fn the_same_weights_have_no_error() {
    let (fixture, source) = with_source(ExpertFmt::Vq4p, |_, _, _, _| (), |_, _| ());
    let report = fixture.report(&["--source", &source], Exit::Done);
    let found = &report["source"];
    assert_eq!(found["checkpoint"], source);
    assert_eq!(
        (&found["experts"], &found["error"]),
        (&json!(6), &json!({"gate": 0.0, "up": 0.0, "down": 0.0}))
    );
    assert_eq!(found["layers"][1], json!({"layer": 2, "experts": 3, "gate": 0.0, "up": 0.0, "down": 0.0}));
    let formats: Vec<_> = found["trunk"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(formats, ["F16", "F32", "Q3G", "Q4G", "Q8G"]);
    let tensors: u64 =
        found["trunk"].as_object().unwrap().values().map(|t| t["tensors"].as_u64().unwrap()).sum();
    assert_eq!(json!(tensors), report["tensors"]);
    // Nothing of this in a plain run, and no key of a failure.
    assert!(fixture.report(&[], Exit::Done).get("source").is_none() && report.get("error").is_none());
}

#[test]
fn errors_are_measured_and_the_sampling_is_honoured() {
    let mut random = Random(1);
    let (fixture, source) = with_source(
        ExpertFmt::Vq3r,
        |layer, _, kind, weights| {
            disturb(weights, [0.1, 0.2, 0.25][kind as usize] / f64::from(layer), &mut random)
        },
        |_, _| (),
    );
    for (experts, count) in [("1", 2), ("2", 4), ("all", 6), ("99", 6)] {
        let report = fixture.report(&["--source", &source, "--experts", experts], Exit::Done);
        assert_eq!(report["source"]["experts"], count);
        for (i, layer) in [1.0, 2.0].into_iter().enumerate() {
            for (kind, error) in [("gate", 0.1), ("up", 0.2), ("down", 0.25)] {
                let found = report["source"]["layers"][i][kind].as_f64().unwrap();
                // Relative to the disturbed weights, which are a little larger.
                assert!((found * layer / error - 1.0).abs() < 0.05, "{kind}: {found}");
            }
        }
    }
}

#[test]
fn an_expert_too_far_off_is_named_and_the_limit_is_the_formats() {
    for (fmt, error, passes) in [
        (ExpertFmt::Vq3r, 0.28, true),
        (ExpertFmt::Vq3r, 0.35, false),
        (ExpertFmt::Vq4p, 0.35, false),
        (ExpertFmt::Vq2r, 0.40, true),
        (ExpertFmt::Vq2r, 0.60, false),
    ] {
        let mut random = Random(2);
        let (fixture, source) = with_source(
            fmt,
            |layer, expert, kind, weights| {
                if (layer, expert, kind) == (2, 1, Kind::Up) {
                    disturb(weights, error, &mut random);
                }
            },
            |_, _| (),
        );
        let args = ["--source", &source, "--experts", "all"];
        if passes {
            fixture.report(&args, Exit::Done);
            continue;
        }
        let problems = fixture.problems(&args);
        let wanted = json!({"kind": "error_too_large", "file": "experts-L2.bin", "layer": 2, "expert": 1, "offset": RECORD});
        assert!(problems.len() == 1 && has(&problems, &wanted), "{problems:?}");
        assert!(problems[0]["message"].as_str().unwrap().starts_with("up: "), "{problems:?}");
        // Not among the sample.
        fixture.report(&["--source", &source, "--experts", "1"], Exit::Done);
    }
}

#[test]
fn a_trunk_tensor_too_far_off_is_named() {
    for (fmt, passes, fails) in [
        (TrunkFmt::F32, 1e-8, 1e-5),
        (TrunkFmt::F16, 1e-4, 1e-2),
        (TrunkFmt::Q8g, 0.015, 0.03),
        (TrunkFmt::Q4g, 0.13, 0.18),
    ] {
        for (error, exit) in [(passes, Exit::Done), (fails, Exit::No)] {
            let probe = Fixture::new(ExpertFmt::Vq2r);
            let container = probe.open();
            let mut entry =
                container.trunk().entries().iter().filter(|entry| entry.fmt == fmt && entry.shape.len() == 2);
            let name = entry.next_back().unwrap().name.clone();
            let mut random = Random(3);
            let (fixture, source) = with_source(
                ExpertFmt::Vq2r,
                |_, _, _, _| (),
                |tensor, weights| {
                    if tensor == name {
                        disturb(weights, error, &mut random);
                    }
                },
            );
            let report = fixture.report(&["--source", &source], exit);
            assert_eq!(report["source"]["trunk"][fmt.name()]["worst_tensor"], *name);
            if exit == Exit::No {
                let wanted = json!({"kind": "error_too_large", "tensor": name, "file": "trunk.bin"});
                assert_eq!(report["problem_count"], 1);
                assert!(has(report["problems"].as_array().unwrap(), &wanted), "{report}");
            }
        }
    }
}

#[test]
fn what_one_side_lacks_or_has_otherwise_is_named() {
    let (fixture, source) = with_source(ExpertFmt::Vq2r, |_, _, _, _| (), |_, _| ());
    let model = std::path::Path::new(&source).join("model.safetensors");
    let original = fs::read(&model).unwrap();
    let length = u64::from_le_bytes(original[..8].try_into().unwrap()) as usize;
    // Renames a tensor of the source, or turns its shape around; the header keeps its length.
    let edit = |from: &str, to: &str| {
        let header = std::str::from_utf8(&original[8..8 + length]).unwrap();
        assert!(header.contains(from) && from.len() == to.len(), "{from}");
        let mut changed = original.clone();
        changed[8..8 + length].copy_from_slice(header.replace(from, to).as_bytes());
        fs::write(&model, changed).unwrap();
        fixture.problems(&["--source", &source])
    };
    let problems =
        edit("\"model.layers.0.self_attn.o_proj.weight\"", "\"model.layers.0.self_attn.o_proj.weighs\"");
    for wanted in [
        json!({"kind": "not_in_source", "tensor": "model.layers.0.self_attn.o_proj.weight"}),
        json!({"kind": "missing_tensor", "tensor": "model.layers.0.self_attn.o_proj.weighs"}),
    ] {
        assert!(has(&problems, &wanted), "{wanted}: {problems:?}");
    }
    let problems = edit("experts.1.w2.weight\"", "experts.7.w2.weight\"");
    assert!(has(&problems, &json!({"kind": "not_in_source", "layer": 1, "expert": 1})), "{problems:?}");
    let problems = edit("[40,32]", "[32,40]");
    let wanted = json!({"kind": "wrong_shape", "tensor": "lm_head.weight"});
    assert!(has(&problems, &wanted), "{problems:?}");
    fs::write(&model, &original).unwrap();

    let ranks = std::path::Path::new(&source).join("tiktoken.model");
    fs::write(&ranks, b"AA== 0\n").unwrap();
    let problems = fixture.problems(&["--source", &source]);
    assert!(has(&problems, &json!({"kind": "tokenizer_differs", "file": "tokenizer.model"})), "{problems:?}");
    fs::remove_file(&ranks).unwrap();
    assert!(fixture.report(&["--source", &source], Exit::Done)["notes"].to_string().contains("rank file"));

    let config = std::path::Path::new(&source).join("config.json");
    let mut changed: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    changed["routed_scaling_factor"] = 3.0.into();
    fs::write(&config, changed.to_string()).unwrap();
    let problems = fixture.problems(&["--source", &source]);
    assert!(has(&problems, &json!({"kind": "config_differs", "file": "manifest.json"})), "{problems:?}");
}

#[test]
fn a_checkpoint_that_cannot_be_read_is_bad_input() {
    let (fixture, source) = with_source(ExpertFmt::Vq2r, |_, _, _, _| (), |_, _| ());
    let model = std::path::Path::new(&source).join("model.safetensors");
    let content = fs::read(&model).unwrap();
    fs::write(&model, &content[..content.len() - 1]).unwrap();
    let object = fixture.report(&["--source", &source], Exit::Data);
    assert!(object["error"]["message"].as_str().unwrap().contains("model.safetensors"), "{object}");
    fixture.report(&["--source", fixture.beside("nowhere").to_str().unwrap()], Exit::Data);
}

#[test]
fn a_container_that_cannot_be_opened_is_not_compared() {
    let (fixture, source) = with_source(ExpertFmt::Vq2r, |_, _, _, _| (), |_, _| ());
    fs::remove_file(fixture.path("experts-L1.bin")).unwrap();
    let report = fixture.report(&["--source", &source], Exit::No);
    assert!(
        report.get("source").is_none() && report["notes"].to_string().contains("not compared"),
        "{report}"
    );
}
