//! The tool from outside: what it makes of real checkpoints, and what it refuses.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod util;

use std::fs;
use std::path::Path;

use serde_json::Value;
use util::*;
use waste_common::checkpoint::Checkpoint;
use waste_common::config::ModelConfig;
use waste_common::container::{Container, Kind, TrunkFmt, integrity};
use waste_common::files::DirLock;

const QUICK: [&str; 4] = ["--cb-sample", "2048", "--effort", "fast"];

/// Opens a container and checks every checksum there is.
fn sound(dir: &Path) -> Container {
    let container = Container::open(dir).unwrap();
    let sums = container.manifest().integrity.clone().unwrap();
    container.check_codebook_headers().unwrap();
    assert!(integrity::check_codebooks(container.codebooks().unwrap(), Some(&sums)).unwrap());
    for entry in container.trunk().entries() {
        assert!(integrity::check_trunk_entry(container.trunk(), entry).unwrap());
    }
    let mut buffer = vec![0; container.geometry().unwrap().record_bytes()];
    let mut records = 0;
    for layer in container.manifest().layers.keys() {
        let bank = container.bank(*layer).unwrap();
        assert!(integrity::check_bank(&bank, *layer, Some(&sums)).unwrap());
        for expert in 0..bank.experts() as u16 {
            let record = bank.read(expert, &mut buffer).unwrap();
            let expected = bank.expected(expert);
            record.verify_crc(&expected).unwrap();
            record.verify_padding(&expected).unwrap();
            record.verify_indices(&expected).unwrap();
            records += 1;
        }
    }
    assert!(records > 0);
    for (name, sum) in &sums.files {
        integrity::check_file(dir, name, sum).unwrap();
    }
    assert!(sums.files.contains_key("tokenizer.model") && sums.files.contains_key("generation_config.json"));
    container
}

fn relative(decoded: &[f32], source: &[f32]) -> (f64, f64) {
    assert_eq!(decoded.len(), source.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    decoded.iter().zip(source).fold((0.0, 0.0), |(d, s), (a, b)| (d + square(a - b), s + square(*b)))
}

/// Decodes everything and compares it with the checkpoint. Returns the experts' relative errors.
fn compare_with_source(container: &Container, checkpoint: &Path) -> [f64; 3] {
    let source = Checkpoint::open(checkpoint).unwrap();
    let config = ModelConfig::from_checkpoint(source.config()).unwrap();
    for entry in container.trunk().entries() {
        let (d, s) =
            relative(&container.trunk().decode(entry).unwrap(), &source.read_f32(&entry.name).unwrap());
        let bound = match entry.fmt {
            TrunkFmt::F32 => 0.0,
            TrunkFmt::Q8g => 0.012,
            _ => 0.16,
        };
        assert!((d / s.max(1e-30)).sqrt() <= bound, "{}: {}", entry.name, (d / s).sqrt());
    }
    let mut buffer = vec![0; container.geometry().unwrap().record_bytes()];
    let mut sums = [(0.0, 0.0); 3];
    for layer in container.manifest().layers.keys() {
        let (bank, books) = (container.bank(*layer).unwrap(), container.layer_codebooks(*layer).unwrap());
        for expert in 0..bank.experts() as u16 {
            let record = bank.read(expert, &mut buffer).unwrap();
            for kind in Kind::ALL {
                let matrix = record.matrix(kind);
                let mut decoded = vec![0.0; matrix.layout().rows() * matrix.layout().cols()];
                matrix.decode(&books.tables(kind), &mut decoded).unwrap();
                let weights = source.read_expert(&config, *layer as usize, expert.into(), kind).unwrap();
                let (d, s) = relative(&decoded, &weights);
                sums[kind as usize].0 += d;
                sums[kind as usize].1 += s;
            }
        }
    }
    sums.map(|(d, s)| (d / s).sqrt())
}

fn json(file: &Path) -> Value {
    serde_json::from_slice(&fs::read(file).unwrap()).unwrap()
}

/// What another v0 tool made of the same checkpoint differs in nothing a reader looks at but the numbers learned,
/// and the vision tower, which we keep at 8 bits.
#[test]
fn golden_checkpoints_become_what_another_tool_makes_of_them() {
    for name in ["tiny-k3", "tiny-linear"] {
        let dir = tempfile::tempdir().unwrap();
        let ours = dir.path().join("c.waste");
        let report = convert(&golden(name), &ours, &["--cb-sample", "8192"]);
        assert_eq!(report["schema"], "waste-convert/1");
        assert_eq!(report["container"], ours.display().to_string());
        let container = sound(&ours);
        assert_eq!(report["manifest_sha256"], container.manifest_sha256());
        let bytes: usize = files(&ours).values().map(Vec::len).sum();
        assert_eq!(report["bytes"], bytes);

        let errors = compare_with_source(&container, &golden(name));
        for (error, kind) in errors.into_iter().zip(["gate", "up", "down"]) {
            let said = report["error"][kind].as_f64().unwrap();
            assert!((0.15..0.2).contains(&error) && (error - said).abs() < 1e-3, "{error} {said}");
        }

        let theirs = shared(&format!("interop/{name}.waste"));
        let (a, b) = (json(&ours.join("manifest.json")), json(&theirs.join("manifest.json")));
        for key in ["format_version", "arch", "tensor_prefix", "expert_quant", "layers"] {
            assert_eq!(a[key], b[key], "{key}");
        }
        // Verbatim: in order, too.
        assert_eq!(a["config"].to_string(), b["config"].to_string());
        let (a, b) = (a["trunk"].as_array().unwrap(), b["trunk"].as_array().unwrap());
        assert_eq!(a.len(), b.len());
        for (a, b) in a.iter().zip(b) {
            let mut keys: Vec<&String> = a.as_object().unwrap().keys().collect();
            assert_eq!(keys.pop().unwrap(), "crc32");
            assert_eq!(keys, b.as_object().unwrap().keys().collect::<Vec<_>>());
            assert_eq!((&a["name"], &a["shape"]), (&b["name"], &b["shape"]));
            let vision = a["name"].as_str().unwrap().starts_with("mm_projector.proj");
            assert_eq!(a["fmt"], if vision { 2.into() } else { b["fmt"].clone() });
        }
        for file in ["specials.json", "vision.json"] {
            if theirs.join(file).exists() {
                assert_eq!(json(&ours.join(file)), json(&theirs.join(file)), "{name} {file}");
            }
        }
        assert_eq!(ours.join("vision.json").exists(), name == "tiny-k3");
        assert_eq!(
            fs::read(ours.join("tokenizer.model")).unwrap(),
            fs::read(theirs.join("tokenizer.model")).unwrap()
        );
    }
}

#[test]
fn a_trained_model_keeps_its_weights_in_every_format() {
    if waste_tests::tool::emulated() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for (format, effort, lowest, highest) in [
        ("vq3r", "fast", 0.185, 0.205),
        ("vq4p", "fast", 0.2, 0.225),
        ("vq2r", "fast", 0.31, 0.345),
        ("vq4p", "normal", 0.17, 0.195),
    ] {
        let container = dir.path().join(format!("{format}-{effort}"));
        let options = ["--format", format, "--effort", effort, "--cb-sample", "12000", "--trunk-bits", "8"];
        let report = convert(&tales(), &container, &options);
        let container = sound(&container);
        let errors = compare_with_source(&container, &tales());
        for (error, kind) in errors.into_iter().zip(["gate", "up", "down"]) {
            assert!((lowest..highest).contains(&error), "{format} {kind}: {error}");
            assert!((error - report["error"][kind].as_f64().unwrap()).abs() < 1e-3);
        }
        assert!(container.trunk().entries().iter().all(|entry| entry.fmt != TrunkFmt::Q4g));
        assert!(container.trunk().entries().iter().any(|entry| entry.fmt == TrunkFmt::F32));
    }
}

#[test]
fn threads_change_no_byte() {
    if waste_tests::tool::emulated() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let at = |threads: &str| dir.path().join(threads);
    for threads in ["1", "2", "3"] {
        convert(&tales(), &at(threads), &["--threads", threads, "--cb-sample", "2000", "--format", "vq4p"]);
    }
    assert_same(&at("1"), &at("2"));
    assert_same(&at("1"), &at("3"));
}

/// The bytes are the same on every machine: these sums hold on x86-64, aarch64, Linux, macOS and Windows.
#[test]
fn the_container_of_a_checkpoint_is_known() {
    let dir = tempfile::tempdir().unwrap();
    let container = dir.path().join("c.waste");
    let report = convert(&golden("tiny-linear"), &container, &QUICK);
    assert_eq!(report["manifest_sha256"], FAST);
    let container = dir.path().join("n.waste");
    let report = convert(&golden("tiny-linear"), &container, &["--cb-sample", "512"]);
    assert_eq!(report["manifest_sha256"], NORMAL);
}

const FAST: &str = "cf89104bc818eef244d0d34d8e9988dc38660e2e1cd84dda2ac1fab41d4ed5ed";
const NORMAL: &str = "c6801144d43fcf02a77c69f4a103f199a11eb4474f6b4570a78d5545c5d41387";

#[test]
fn a_previous_tool_names_the_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let container = dir.path().join("c.waste");
    let chained = |object: Value| {
        let mut command = tool();
        command.arg("-").arg(&container).args(QUICK).arg("--json").write_stdin(object.to_string());
        command.output().unwrap()
    };
    let downloaded = serde_json::json!({"schema": "waste-download/1", "checkpoint": golden("tiny-linear").display().to_string()});
    let output = chained(downloaded);
    assert!(output.status.success());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["layers"], 4);
    let failed = serde_json::json!({"schema": "waste-download/1", "error": {"code": "network", "exit": 5, "message": "x"}});
    let output = chained(failed.clone());
    assert_eq!(output.status.code(), Some(5));
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap(), failed);
    let output = chained(serde_json::json!({"schema": "waste-plan/1", "container": "x"}));
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn a_finished_container_is_replaced_by_force_only() {
    let dir = tempfile::tempdir().unwrap();
    let container = dir.path().join("c.waste");
    let first = convert(&golden("tiny-linear"), &container, &QUICK);
    let before = files(&container);
    let other = ["--cb-sample", "2048", "--effort", "fast", "--trunk-bits", "8"];
    let error = refused(&golden("tiny-linear"), &container, &other, 3, "container_exists");
    assert!(error["message"].as_str().unwrap().contains("trunk_bits"), "{error}");
    refused(&golden("tiny-k3"), &container, &QUICK, 3, "container_exists");
    // The same again is done already.
    let again = convert(&golden("tiny-linear"), &container, &QUICK);
    assert_eq!((&again["error"], &again["bytes"]), (&first["error"], &first["bytes"]));
    assert_eq!(again["manifest_sha256"], first["manifest_sha256"]);
    assert!(files(&container) == before);

    fs::write(container.join("usage.waste"), b"learned").unwrap();
    fs::write(container.join("experts-L77.bin"), b"of an old model").unwrap();
    convert(
        &golden("tiny-linear"),
        &container,
        &["--cb-sample", "2048", "--effort", "fast", "--trunk-bits", "8", "--force"],
    );
    sound(&container);
    assert!(container.join("usage.waste").exists() && !container.join("experts-L77.bin").exists());
    fs::remove_file(container.join("usage.waste")).unwrap();
    convert(&golden("tiny-linear"), &container, &["--cb-sample", "2048", "--effort", "fast", "--force"]);
    assert!(files(&container) == before);

    // Another tool's container.
    let theirs = copy(&shared("interop/tiny-linear.waste"));
    refused(&golden("tiny-linear"), theirs.path(), &QUICK, 3, "container_exists");
    // Files of nobody knows what.
    fs::remove_file(theirs.path().join("manifest.json")).unwrap();
    refused(&golden("tiny-linear"), theirs.path(), &QUICK, 3, "foreign_files");
}

#[test]
fn a_locked_directory_names_its_holder() {
    let dir = tempfile::tempdir().unwrap();
    let _lock = DirLock::acquire(dir.path()).unwrap();
    let error = refused(&golden("tiny-linear"), dir.path(), &QUICK, 6, "locked");
    assert_eq!(error["pid"], std::process::id());
}

#[test]
fn bad_checkpoints_are_refused_by_name() {
    let out = tempfile::tempdir().unwrap();
    let container = out.path().join("c.waste");
    let expert = "model.layers.2.block_sparse_moe.experts.5.w3.weight";
    let trunk = "model.layers.0.self_attn.q_proj.weight";

    let bad = copy(&golden("tiny-linear"));
    edit(&bad.path().join("model.safetensors.index.json"), |index| {
        let map = index["weight_map"].as_object_mut().unwrap();
        map.remove(trunk).unwrap();
    });
    let error = refused(bad.path(), &container, &QUICK, 3, "missing_tensor");
    assert_eq!(error["tensors"], serde_json::json!([trunk]));
    edit(&bad.path().join("model.safetensors.index.json"), |index| {
        let map = index["weight_map"].as_object_mut().unwrap();
        map.insert(trunk.into(), map["model.layers.0.self_attn.k_proj.weight"].clone());
        map.remove(expert).unwrap();
    });
    let error = refused(bad.path(), &container, &QUICK, 3, "missing_tensor");
    assert_eq!(error["tensors"], serde_json::json!([expert]));

    for tensor in [expert, trunk, "model.layers.0.self_attn.A_log"] {
        let bad = copy(&golden("tiny-linear"));
        poke(bad.path(), tensor, 8, &[0xff, 0x7f, 0xff, 0x7f]);
        let error = refused(bad.path(), &container, &QUICK, 3, "weight_not_finite");
        assert!(error["tensor"].as_str().unwrap().starts_with(tensor.trim_end_matches(".weight")), "{error}");
        assert!(!container.join("manifest.json").exists());
        fs::remove_dir_all(&container).unwrap();
    }
    // MXFP4: a scale byte of 255 is NaN.
    let bad = copy(&golden("tiny-k3"));
    let scale = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_scale";
    poke(bad.path(), scale, 3, &[255]);
    let error = refused(bad.path(), &container, &QUICK, 3, "invalid_checkpoint");
    assert!(error["message"].as_str().unwrap().contains(scale), "{error}");
    fs::remove_dir_all(&container).unwrap();

    let change = |file: &str, code: &str, words: &str, change: &dyn Fn(&mut Value)| {
        let bad = copy(&golden("tiny-k3"));
        edit(&bad.path().join(file), change);
        let error = refused(bad.path(), &container, &QUICK, 3, code);
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
        assert!(!container.exists(), "nothing is written for what is refused");
    };
    change("config.json", "unsupported_model", "LlamaForCausalLM", &|config| {
        config["text_config"]["architectures"][0] = "LlamaForCausalLM".into();
    });
    change("config.json", "bad_tensor", "shape", &|config| config["text_config"]["vocab_size"] = 640.into());
    change("config.json", "bad_tensor", "experts", &|config| {
        config["text_config"]["moe_intermediate_size"] = 72.into();
    });
    change("preprocessor_config.json", "bad_sidecar", "image_mean", &|config| {
        config["media_proc_cfg"]["image_mean"] = "none".into();
    });
    change("tokenizer_config.json", "bad_sidecar", "added_tokens_decoder", &|config| {
        config["added_tokens_decoder"]["x"] = 1.into();
    });
    let bad = copy(&golden("tiny-k3"));
    fs::remove_file(bad.path().join("preprocessor_config.json")).unwrap();
    refused(bad.path(), &container, &QUICK, 3, "bad_sidecar");

    refused(&out.path().join("nowhere"), &container, &QUICK, 3, "unreadable_file");
    let same = copy(&golden("tiny-linear"));
    refused(same.path(), same.path(), &QUICK, 3, "same_directory");
}

/// The engine would refuse it, so no layer is converted.
#[test]
fn a_broken_tokenizer_is_refused_before_any_layer() {
    let bad = copy(&golden("tiny-k3"));
    let out = tempfile::tempdir().unwrap();
    let container = out.path().join("c.waste");
    let must_name = |file: &str, words: &str| {
        let error = refused(bad.path(), &container, &QUICK, 3, "bad_sidecar");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(file) && message.contains(words), "{message}");
        assert!(!container.exists(), "nothing is written for what is refused");
    };
    let ranks = fs::read_to_string(bad.path().join("tiktoken.model")).unwrap();
    let twice = format!("{ranks}{}\n", ranks.lines().next().unwrap());
    for (content, words) in [("garbage", "line 1"), ("", "0x00"), (twice.as_str(), "a second time")] {
        fs::write(bad.path().join("tiktoken.model"), content).unwrap();
        must_name("tiktoken.model", words);
    }
    fs::write(bad.path().join("tiktoken.model"), &ranks).unwrap();
    let specials = |list: &str| {
        let config = format!(r#"{{"added_tokens_decoder":{{{list}}}}}"#);
        fs::write(bad.path().join("tokenizer_config.json"), config).unwrap();
    };
    for (list, words) in [
        (r#""394":{"content":"a"},"394":{"content":"b"}"#, "named twice"),
        (r#""394":{"content":"a"},"395":{"content":"a"}"#, "same name"),
        (r#""393":{"content":"a"}"#, "393"),
        (r#""650":{"content":"a"}"#, "650"),
        (r#""4294967690":{"content":"a"}"#, "4294967690"),
        (r#""0394":{"content":"a"}"#, "0394"),
    ] {
        specials(list);
        must_name("tokenizer_config.json", words);
    }
}

#[cfg(unix)]
#[test]
fn named_pipes_in_a_checkpoint_are_refused_and_do_not_hang() {
    let out = tempfile::tempdir().unwrap();
    for name in ["config.json", "tiktoken.model", "tokenizer_config.json", "generation_config.json"] {
        let bad = copy(&golden("tiny-linear"));
        let pipe = bad.path().join(name);
        let _ = fs::remove_file(&pipe);
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let error = refused(bad.path(), &out.path().join("c.waste"), &QUICK, 3, "not_a_file");
        assert!(error["message"].as_str().unwrap().contains(name), "{error}");
    }
}

#[test]
fn a_checkpoint_is_never_written_into_nor_deleted_from() {
    for options in [&["--force"][..], &[]] {
        let other = copy(&golden("tiny-k3"));
        let before = files(other.path());
        let all = [&QUICK, options].concat();
        refused(&golden("tiny-linear"), other.path(), &all, 3, "target_is_checkpoint");
        assert!(files(other.path()) == before);
        for name in ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"] {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join(name), b"x").unwrap();
            fs::write(dir.path().join("tokenizer.model"), b"precious").unwrap();
            let error = refused(&golden("tiny-linear"), dir.path(), &all, 3, "target_is_checkpoint");
            assert!(error["message"].as_str().unwrap().contains(name), "{error}");
            assert_eq!(fs::read(dir.path().join("tokenizer.model")).unwrap(), b"precious");
            assert!(!dir.path().join(".waste.lock").exists());
        }
    }
}

#[test]
fn a_missing_tokenizer_is_a_warning() {
    let bare = copy(&golden("tiny-linear"));
    fs::remove_file(bare.path().join("tiktoken.model")).unwrap();
    fs::remove_file(bare.path().join("tokenizer_config.json")).unwrap();
    let container = bare.path().join("c.waste");
    let output = tool().arg(bare.path()).arg(&container).args(QUICK).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.success() && said.contains("tiktoken.model") && said.contains("tokenizer_config.json"),
        "{said}"
    );
    assert!(said.contains("layer 1: error gate"), "{said}");
    assert!(String::from_utf8(output.stdout).unwrap().contains("4 layers, VQ3R error"));
    Container::open(&container).unwrap();
}

#[test]
fn usage() {
    let help = String::from_utf8(tool().arg("--help").output().unwrap().stdout).unwrap();
    for word in ["--trunk-bits", "--cb-sample", "--format", "--force", "WASTE_THREADS", "Exit codes", "130"] {
        assert!(help.contains(word), "{word}");
    }
    for wrong in [
        &["a"][..],
        &["a", "b", "--trunk-bits", "3"],
        &["a", "b", "--threads", "0"],
        &["a", "b", "--cb-sample", "0"],
    ] {
        assert_eq!(tool().args(wrong).output().unwrap().status.code(), Some(2), "{wrong:?}");
    }
}
