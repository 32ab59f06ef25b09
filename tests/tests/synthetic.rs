//! The made-up containers are sound, and the engine runs them.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

use serde_json::{Value, json};
use waste_common::container::{Container, RecordView};
use waste_engine::{Engine, EngineOptions, Wanted};
use waste_tests::synthetic::{self, Fill};

fn config(name: &str) -> Value {
    let path = format!("{}/configs/{name}.config.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Five layers of K3 (both mixers, dense and MoE, latent experts), narrow.
fn small() -> Value {
    let mut config = synthetic::cut(&config("kimi-k3"), 5);
    let text = &mut config["text_config"];
    for (key, value) in [
        ("hidden_size", 256),
        ("vocab_size", 512),
        ("intermediate_size", 512),
        ("num_experts", 16),
        ("num_experts_per_token", 4),
        ("moe_intermediate_size", 72),
        ("routed_expert_hidden_size", 136),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 2),
        ("kv_lora_rank", 64),
        ("q_lora_rank", 64),
        ("attn_res_block_size", 2),
    ] {
        text[key] = json!(value);
    }
    text["linear_attn_config"]["num_heads"] = json!(2);
    config["vision_config"]["text_hidden_size"] = json!(256);
    config["vision_config"]["vt_num_hidden_layers"] = json!(1);
    config
}

fn check_all_records(container: &Container) {
    for (&layer, bank) in &container.manifest().layers {
        let file = container.bank(layer).unwrap();
        let mut buffer = vec![0; container.geometry().unwrap().record_bytes()];
        for expert in 0..bank.experts as u16 {
            file.read(expert, &mut buffer).unwrap();
            let expected = file.expected(expert);
            let record = RecordView::check(&buffer, &expected).unwrap();
            record.verify_crc(&expected).unwrap();
            record.verify_padding(&expected).unwrap();
            record.verify_indices(&expected).unwrap();
        }
        container.layer_codebooks(layer).unwrap();
    }
    container.check_codebook_headers().unwrap();
}

#[test]
fn every_fill_makes_a_sound_container_that_runs() {
    for fill in [Fill::Zeros, Fill::Random(7)] {
        let dir = tempfile::tempdir().unwrap();
        let manifest = synthetic::container(dir.path(), &small(), fill).unwrap();
        let container = Container::open(dir.path()).unwrap();
        assert_eq!(container.manifest(), &manifest);
        check_all_records(&container);
        let options =
            EngineOptions { ctx: 16, chunk: 8, threads: 2, verify: true, ..EngineOptions::default() };
        let engine = Engine::open(dir.path(), options).unwrap();
        let mut session = engine.session().unwrap();
        let mut largest = 0f32;
        let sink = &mut |_: usize, logits: &[f32]| {
            largest = logits.iter().fold(largest, |most, logit| most.max(logit.abs()));
            Ok(())
        };
        engine.forward(&mut session, &[1, 2, 3, 500, 4, 5, 6, 7, 8, 9], Wanted::Last, sink).unwrap();
        assert_eq!(largest > 0.01 && largest < 1e3, fill != Fill::Zeros, "{fill:?}: {largest}");
    }
}

#[test]
fn the_same_seed_gives_the_same_container() {
    let bytes = |seed| {
        let dir = tempfile::tempdir().unwrap();
        synthetic::container(dir.path(), &small(), Fill::Random(seed)).unwrap();
        ["manifest.json", "trunk.bin", "experts-L3.bin", "codebooks.bin"]
            .map(|name| std::fs::read(dir.path().join(name)).unwrap())
    };
    let first = bytes(1);
    assert!(first == bytes(1) && first != bytes(2));
}
