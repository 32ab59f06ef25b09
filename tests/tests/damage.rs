//! Damaged and hostile models: an error that says where, never an answer from wrong weights, never a panic.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

use serde_json::{Value, json};
use waste_tests::files::Model;
use waste_tests::tool::{Ran, run, tool};

const RECORD: usize = 12288;
const EXPERTS: usize = 18;

fn container() -> Model {
    Model::copy("interop/tiny-k3.waste")
}

/// Runs a text with some further arguments.
fn text(model: &Model, args: &[&str]) -> Ran {
    let ran = Ran::of(tool("waste-run").args([model.arg(), "hello world", "-n", "4", "--json"]).args(args));
    assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
    ran
}

/// Both ways to run refuse it, without a word of an answer, and say `words`.
#[track_caller]
fn refused(model: &Model, words: &[&str]) {
    let answers = [text(model, &[]), run("waste-run", ["eval", model.arg(), "hello world", "--json"])];
    for ran in answers {
        let ran = ran.exits(3);
        let answer: Value = serde_json::from_str(&ran.stdout).unwrap();
        assert_eq!(answer.as_object().unwrap().len(), 2, "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        for word in words {
            assert!(message.contains(word), "{word} is not in: {message}");
        }
    }
}

fn records(model: &Model, bank: &str) -> Vec<Vec<u8>> {
    let bytes = model.read(bank);
    assert_eq!(bytes.len(), EXPERTS * RECORD);
    bytes.chunks(RECORD).map(<[u8]>::to_vec).collect()
}

#[test]
fn the_container_is_sound_before_it_is_damaged() {
    text(&container(), &["--verify"]).done();
}

#[test]
fn a_bank_of_the_wrong_size_is_refused() {
    for change in [-1, -(RECORD as i64), 1, 4096, RECORD as i64] {
        let model = container();
        let mut bytes = model.read("experts-L2.bin");
        bytes.resize((bytes.len() as i64 + change) as usize, 0);
        model.set("experts-L2.bin", &bytes);
        refused(&model, &["experts-L2.bin"]);
    }
    for name in ["trunk.bin", "codebooks.bin"] {
        let model = container();
        let mut bytes = model.read(name);
        bytes.truncate(bytes.len() / 2);
        model.set(name, &bytes);
        refused(&model, &[name]);
    }
}

#[test]
fn a_missing_file_is_named() {
    for name in ["experts-L5.bin", "trunk.bin", "codebooks.bin"] {
        let model = container();
        std::fs::rename(model.path(name), model.path("elsewhere.bin")).unwrap();
        refused(&model, &[name]);
    }
}

#[test]
fn records_in_the_wrong_place_are_refused() {
    // Every record stands where another belongs, so that whichever is read is a wrong one.
    let model = container();
    let mut all = records(&model, "experts-L2.bin");
    all.reverse();
    model.set("experts-L2.bin", &all.concat());
    refused(&model, &["experts-L2.bin", "layer 2", "expert"]);

    // Two only: the run that asks for one of them stops.
    let model = container();
    let mut all = records(&model, "experts-L2.bin");
    all.swap(0, 1);
    model.set("experts-L2.bin", &all.concat());
    let ids = (0..394).map(|id| id.to_string()).collect::<Vec<_>>().join(",");
    let ran = run("waste-run", ["eval", model.arg(), "--ids", &ids, "--json"]).exits(3);
    assert!(ran.stderr.contains("experts-L2.bin") && ran.stderr.contains("layer 2"), "{}", ran.stderr);

    // A bank of another layer.
    let model = container();
    let (first, second) = (model.read("experts-L1.bin"), model.read("experts-L2.bin"));
    model.set("experts-L1.bin", &second);
    model.set("experts-L2.bin", &first);
    refused(&model, &["experts-L1.bin", "layer"]);

    // By the manifest, too.
    let model = container();
    model.edit("manifest.json", |manifest| manifest["layers"]["1"]["file"] = json!("experts-L2.bin"));
    refused(&model, &["experts-L2.bin"]);
}

#[test]
fn a_flipped_payload_bit_is_named_on_request_and_survived_otherwise() {
    let model = container();
    let mut all = records(&model, "experts-L3.bin");
    all.iter_mut().for_each(|record| record[48 + 100] ^= 4);
    model.set("experts-L3.bin", &all.concat());
    let error = text(&model, &["--verify"]).exits(3);
    let error = serde_json::from_str::<Value>(&error.stdout).unwrap()["error"].clone();
    assert_eq!(error["layer"], 3, "{error}");
    assert!(
        error["expert"].is_u64() && error["message"].as_str().unwrap().contains("experts-L3.bin"),
        "{error}"
    );
    text(&model, &[]).done();

    // Scales that are no numbers.
    let model = container();
    let mut all = records(&model, "experts-L3.bin");
    for record in &mut all {
        let scales = u32::from_le_bytes(record[32..36].try_into().unwrap()) as usize;
        record[scales..scales + 2].copy_from_slice(&0x7e00u16.to_le_bytes());
    }
    model.set("experts-L3.bin", &all.concat());
    text(&model, &[]).error(3, "not_finite");
    text(&model, &["--verify"]).exits(3);
}

/// Runs within half a GiB of address space, where the system can limit it.
fn confined(model: &Model) -> Ran {
    let command = waste_tests::tool::process("waste-run");
    let direct = command.get_args().next().is_none(); // no emulator in between
    if !cfg!(target_os = "linux") || !direct {
        return run("waste-run", ["eval", model.arg(), "--ids", "1", "--json"]);
    }
    let script = "ulimit -v 524288; exec \"$0\" eval \"$1\" --ids 1 --json --threads 1";
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", script]).arg(command.get_program()).arg(model.arg());
    Ran::from_output(shell.output().unwrap())
}

#[track_caller]
fn hostile(what: &str, change: impl FnOnce(&Model)) {
    let model = container();
    change(&model);
    let ran = confined(&model);
    assert_eq!(ran.exit, Some(3), "{what}: {} {}", ran.stdout, ran.stderr);
    let error: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(error["error"]["exit"], 3, "{what}: {error}");
}

#[test]
fn a_confined_run_is_possible() {
    let model = container();
    model.edit("manifest.json", |_| ());
    confined(&model).done();
}

#[test]
fn hostile_manifests_are_refused_in_little_memory() {
    for file in ["../experts-L1.bin", "/etc/passwd", "..", "", "a/b", "a\\b", "C:x", "experts-L1.bin\0"] {
        hostile(file, |model| {
            std::fs::write(model.beside("experts-L1.bin"), model.read("experts-L1.bin")).unwrap();
            model.edit("manifest.json", |manifest| manifest["layers"]["1"]["file"] = json!(file));
        });
    }
    for value in
        [json!(0), json!(-1), json!(1u64 << 40), json!(u64::MAX), json!(1e300), json!("256"), json!(null)]
    {
        for key in [
            "hidden_size",
            "vocab_size",
            "num_experts",
            "num_experts_per_token",
            "moe_intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "kv_lora_rank",
        ] {
            hostile(&format!("{key} {value}"), |model| {
                model.edit("manifest.json", |manifest| manifest["config"][key] = value.clone());
            });
        }
        for key in ["off", "bytes", "fmt"] {
            if value == 0 && key != "bytes" {
                continue; // Offset 0 and format F32 exist.
            }
            hostile(&format!("trunk {key} {value}"), |model| {
                model.edit("manifest.json", |manifest| manifest["trunk"][5][key] = value.clone());
            });
        }
        for key in ["stages", "entries", "vec_dim", "index_block"] {
            hostile(&format!("expert_quant {key} {value}"), |model| {
                model.edit("manifest.json", |manifest| manifest["expert_quant"][key] = value.clone());
            });
        }
        if value != 0 {
            hostile(&format!("format_version {value}"), |model| {
                model.edit("manifest.json", |manifest| manifest["format_version"] = value.clone());
            });
        }
        hostile(&format!("shape {value}"), |model| {
            model.edit("manifest.json", |manifest| {
                manifest["trunk"][5]["shape"] = json!([value, value, value])
            });
        });
    }
    hostile("a group of 0", |model| {
        model.edit("manifest.json", |manifest| {
            let grouped =
                manifest["trunk"].as_array_mut().unwrap().iter_mut().find(|e| !e["group"].is_null());
            grouped.unwrap()["group"] = json!(0);
        });
    });
}

#[test]
fn hostile_files_are_refused_in_little_memory() {
    let deep = "[".repeat(100_000);
    hostile("a deep manifest", |model| model.set("manifest.json", deep.as_bytes()));
    hostile("a deep configuration", |model| {
        let text = String::from_utf8(model.read("manifest.json")).unwrap();
        let text = text.replacen(
            "\"config\":",
            &format!("\"config_\":{deep}{},\"config\":", "]".repeat(100_000)),
            1,
        );
        model.set("manifest.json", text.as_bytes());
    });
    hostile("a manifest of 1 GB", |model| {
        let file = std::fs::File::options().write(true).open(model.path("manifest.json")).unwrap();
        file.set_len(1_000_000_000).unwrap();
    });
    hostile("an empty manifest", |model| model.set("manifest.json", b""));
    hostile("a manifest of nothing", |model| model.set("manifest.json", b"{}"));
}

#[test]
fn hostile_tokenizers_are_refused() {
    let deep = "[".repeat(100_000);
    for (name, content) in [
        ("specials.json", deep.as_bytes()),
        ("specials.json", b"{}"),
        ("specials.json", br#"[{"id":4294967296,"text":"x"}]"#),
        ("tokenizer.model", b"AA== 0\nAA== 1\n"),
        ("tokenizer.model", b"AA== 99999999999\n"),
        ("tokenizer.model", b"\xff\xfe"),
        ("tokenizer.model", b""),
    ] {
        let model = container();
        model.set(name, content);
        let ran = text(&model, &[]);
        assert_eq!(
            ran.exit,
            Some(3),
            "{name} {}: {}",
            String::from_utf8_lossy(&content[..content.len().min(40)]),
            ran.stderr
        );
    }
}

#[test]
fn a_directory_in_place_of_a_file_is_refused() {
    for name in ["manifest.json", "trunk.bin", "experts-L1.bin", "codebooks.bin", "tokenizer.model"] {
        let model = container();
        std::fs::remove_file(model.path(name)).unwrap();
        std::fs::create_dir(model.path(name)).unwrap();
        let ran = text(&model, &[]);
        assert_eq!(ran.exit, Some(3), "{name}: {}", ran.stderr);
    }
}

#[test]
fn a_damaged_checkpoint_is_refused() {
    const SHARD: &str = "model-00002-of-00004.safetensors";
    type Damage = (&'static str, fn(&Model));
    let damage: [Damage; 5] = [
        ("truncated", |model| model.set(SHARD, &model.read(SHARD)[..100_000])),
        ("header of 2^60 bytes", |model| {
            let mut bytes = model.read(SHARD);
            bytes[..8].copy_from_slice(&(1u64 << 60).to_le_bytes());
            model.set(SHARD, &bytes);
        }),
        ("missing", |model| std::fs::remove_file(model.path(SHARD)).unwrap()),
        ("outside", |model| {
            model.edit("model.safetensors.index.json", |index| {
                for file in index["weight_map"].as_object_mut().unwrap().values_mut() {
                    *file = json!(format!("../{}", file.as_str().unwrap()));
                }
            });
        }),
        ("deep", |model| model.set("config.json", "[".repeat(100_000).as_bytes())),
    ];
    for (what, change) in damage {
        let model = Model::copy("golden/tiny-linear/ckpt");
        change(&model);
        let ran = text(&model, &[]);
        assert_eq!(ran.exit, Some(3), "{what}: {}", ran.stderr);
    }
}

/// Same bytes, other rows: groups of a quantised matrix would be read across its rows' ends.
#[test]
fn a_reshaped_matrix_is_refused() {
    let model = container();
    model.edit("manifest.json", |manifest| {
        let trunk = manifest["trunk"].as_array_mut().unwrap();
        let embedding =
            trunk.iter_mut().find(|entry| entry["name"].as_str().unwrap().ends_with("embed_tokens.weight"));
        embedding.unwrap()["shape"] = json!([650, 2, 128]);
    });
    refused(&model, &["embed_tokens", "[650, 2, 128]"]);
}

/// Planner and engine must mean the same tensors.
#[test]
fn a_foreign_tensor_prefix_is_refused() {
    let model = container();
    model.edit("manifest.json", |manifest| manifest["tensor_prefix"] = json!("x"));
    refused(&model, &["tensor_prefix"]);
}
