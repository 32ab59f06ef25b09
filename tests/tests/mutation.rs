//! Thousands of damaged models, opened, planned and run in this process: nothing panics, hangs or takes much memory.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use serde_json::{Map, Value, json};
use waste_common::config::ModelConfig;
use waste_common::machine::{Machine, peak_rss_bytes};
use waste_common::plan::{self, ModelSizes, PlanOptions};
use waste_common::tensors::{self, ExpertKind};
use waste_engine::tokenizer::Tokenizer;
use waste_engine::weights::Source;
use waste_engine::{Engine, EngineOptions, Wanted, open_source};
use waste_tests::files::{Model, data};
use waste_tests::synthetic::{self, Fill};
use waste_tests::tool::emulated;

/// Cases of each file.
const CASES: u64 = 300;

/// SplitMix64: the same cases for ever.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }
}

/// Three layers, both mixers, dense and MoE.
fn config() -> Value {
    json!({
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "bos_token_id": 1,
        "eos_token_id": 2, "first_k_dense_replace": 1, "hidden_size": 32, "hidden_act": "silu",
        "intermediate_size": 48, "kv_lora_rank": 16,
        "linear_attn_config": {"full_attn_layers": [3], "head_dim": 8, "kda_layers": [1, 2], "num_heads": 4,
            "short_conv_kernel_size": 4},
        "mla_use_nope": true, "moe_intermediate_size": 24, "moe_layer_freq": 1, "moe_renormalize": true,
        "moe_router_activation_func": "sigmoid", "num_attention_heads": 4, "num_expert_group": 1,
        "num_experts": 3, "num_experts_per_token": 2, "num_hidden_layers": 3, "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": null, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.0,
        "tie_word_embeddings": false, "topk_group": 1, "use_grouped_topk": true, "v_head_dim": 8,
        "vocab_size": 650,
    })
}

/// Four layers of K3, as narrow: attention residuals, latent experts, gates, padded vectors.
fn k3_config() -> Value {
    let mut config = synthetic::cut(&waste_tests::files::json("configs/kimi-k3.config.json"), 4);
    config.as_object_mut().unwrap().remove("vision_config");
    let text = &mut config["text_config"];
    for (key, value) in [
        ("hidden_size", 32),
        ("vocab_size", 650),
        ("intermediate_size", 48),
        ("num_experts", 3),
        ("num_experts_per_token", 2),
        ("moe_intermediate_size", 24),
        ("routed_expert_hidden_size", 16),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 2),
        ("kv_lora_rank", 16),
        ("q_lora_rank", 24),
        ("qk_nope_head_dim", 8),
        ("qk_rope_head_dim", 8),
        ("v_head_dim", 8),
        ("attn_res_block_size", 2),
    ] {
        text[key] = json!(value);
    }
    text["linear_attn_config"]["num_heads"] = json!(2);
    text["linear_attn_config"]["head_dim"] = json!(8);
    config
}

fn container(config: &Value) -> Model {
    let model = Model::empty("tiny.waste");
    synthetic::container(&model.dir, config, Fill::Random(3)).unwrap();
    for name in ["tokenizer.model", "specials.json"] {
        model.set(name, &std::fs::read(data("interop/tiny-linear.waste").join(name)).unwrap());
    }
    // Checksums would notice everything before the code that is meant.
    model.edit("manifest.json", |manifest| {
        manifest.as_object_mut().unwrap().remove("integrity");
        for entry in manifest["trunk"].as_array_mut().unwrap() {
            entry.as_object_mut().unwrap().remove("crc32");
        }
    });
    model
}

/// A checkpoint of two shards with the same configuration.
fn checkpoint() -> Model {
    let model = Model::empty("tiny");
    let config = config();
    let parsed = ModelConfig::from_checkpoint(&config).unwrap();
    let mut all: Vec<(String, Vec<usize>)> =
        tensors::trunk(&parsed).into_iter().map(|spec| (spec.name, spec.shape)).collect();
    for layer in parsed.moe_layers() {
        for expert in 0..3 {
            for kind in ExpertKind::ALL {
                let shape = if kind == ExpertKind::Down { vec![32, 24] } else { vec![24, 32] };
                all.push((tensors::expert(&parsed, layer, expert, kind) + ".weight", shape));
            }
        }
    }
    let mut random = Random(5);
    let mut map = Map::new();
    let halves = [all.split_off(all.len() / 2), all];
    for (i, half) in halves.iter().enumerate() {
        let shard = format!("model-0000{}-of-00002.safetensors", i + 1);
        let mut bytes = Vec::new();
        let mut header = Map::new();
        for (name, shape) in half {
            let start = bytes.len();
            for _ in 0..shape.iter().product::<usize>() {
                let value = (random.next() >> 40) as f32 / (1 << 25) as f32 - 0.25;
                bytes.extend_from_slice(&value.to_le_bytes());
            }
            let info = json!({"dtype": "F32", "shape": shape, "data_offsets": [start, bytes.len()]});
            header.insert(name.clone(), info);
            map.insert(name.clone(), json!(shard));
        }
        let header = Value::Object(header).to_string();
        let length = (header.len() as u64).to_le_bytes();
        model.set(&shard, &[&length[..], header.as_bytes(), &bytes].concat());
    }
    model.set(
        "model.safetensors.index.json",
        json!({"metadata": {}, "weight_map": map}).to_string().as_bytes(),
    );
    model.set("config.json", config.to_string().as_bytes());
    let tokenizer = data("golden/tiny-linear/ckpt");
    for name in ["tiktoken.model", "tokenizer_config.json"] {
        model.set(name, &std::fs::read(tokenizer.join(name)).unwrap());
    }
    model
}

/// Opens a model in every way there is and takes a few tokens through it. Whether all of it went well.
fn exercise(dir: &Path) -> bool {
    let tokenizer = Tokenizer::open(dir);
    if let Ok(tokenizer) = &tokenizer {
        let ids = tokenizer.encode_markup("hello [BOS] \u{6570}\u{636e}!");
        let _ = tokenizer.decode(&ids);
        let _ = (tokenizer.bos(), tokenizer.eos(), tokenizer.media(), tokenizer.banned_in_text());
    }
    let Ok((source, _)) = open_source(dir) else { return false };
    let sizes = match &source {
        Source::Container(container) => ModelSizes::of_container(container),
        Source::Checkpoint(checkpoint) => ModelSizes::of_checkpoint_run_directly(checkpoint.config()),
    };
    let Ok(sizes) = sizes else { return false };
    let machine =
        Machine { physical_ram_bytes: 1 << 30, usable_ram_bytes: 1 << 30, ..Machine::probe().unwrap() };
    let options = PlanOptions { ctx: 8, chunk: 4, threads: 1, ..PlanOptions::default() };
    // As waste-run does: what does not fit is not opened.
    let Ok(plan) = plan::plan(&sizes, &options, &machine) else { return false };
    let options = EngineOptions {
        ctx: 8,
        chunk: 4,
        threads: 1,
        readers: 0,
        cache_slots: plan.cache_slots as usize,
        ..EngineOptions::default()
    };
    let Ok(engine) = Engine::open(dir, options) else { return false };
    let mut session = engine.session().unwrap();
    let prompt = engine.forward(&mut session, &[1, 2, 3], Wanted::Last, &mut |_, _| Ok(()));
    prompt.is_ok()
        && engine.forward(&mut session, &[4], Wanted::Last, &mut |_, _| Ok(())).is_ok()
        && tokenizer.is_ok()
}

/// Values that have no business where they are put.
fn odd(random: &mut Random) -> Value {
    let long = "x".repeat(5000);
    random
        .pick(&[
            json!(0),
            json!(1),
            json!(-1),
            json!(2),
            json!(7),
            json!(8),
            json!(255),
            json!(256),
            json!(65535),
            json!(65536),
            json!(1u64 << 31),
            json!(1u64 << 32),
            json!(1u64 << 40),
            json!(i64::MAX),
            json!(u64::MAX),
            json!(u64::MAX - 4095),
            json!(1e308),
            json!(0.5),
            json!(-0.0),
            json!(null),
            json!(true),
            json!(false),
            json!(""),
            json!("../x"),
            json!("F32"),
            json!(long),
            json!([]),
            json!({}),
            json!([0, 0]),
            json!([1u64 << 40, 1u64 << 40]),
            json!([u64::MAX, u64::MAX]),
        ])
        .clone()
}

/// Replaces, removes, doubles or exchanges a value somewhere in a tree.
fn mutate_json(value: &mut Value, random: &mut Random) {
    let stop = random.below(4) == 0;
    match value {
        Value::Object(map) if !map.is_empty() && !stop => {
            let key = random.pick(&map.keys().cloned().collect::<Vec<_>>()).clone();
            match random.below(12) {
                0 => drop(map.remove(&key)),
                1 => {
                    let taken = map.remove(&key).unwrap();
                    map.insert(format!("{key}x"), taken);
                }
                2 => {
                    let other = random.pick(&map.keys().cloned().collect::<Vec<_>>()).clone();
                    let taken = map[&other].clone();
                    map.insert(key, taken);
                }
                _ => mutate_json(&mut map[&key], random),
            }
        }
        Value::Array(list) if !list.is_empty() && !stop => {
            let at = random.below(list.len());
            match random.below(12) {
                0 => drop(list.remove(at)),
                1 => list.push(list[at].clone()),
                2 => {
                    let other = random.below(list.len());
                    list.swap(at, other);
                }
                _ => mutate_json(&mut list[at], random),
            }
        }
        Value::Number(number) if random.below(2) == 0 => {
            let number = number.as_i64().unwrap_or(1);
            let step = *random.pick(&[-4096, -128, -1, 1, 128, 4096, number, number.wrapping_mul(-2)]);
            *value = json!(number.wrapping_add(step));
        }
        _ => *value = odd(random),
    }
}

/// Changes a few bytes, cuts, inserts or doubles a piece.
fn mutate_bytes(bytes: &mut Vec<u8>, random: &mut Random) {
    let at = random.below(bytes.len());
    match random.below(8) {
        0 => bytes.truncate(at),
        1 => {
            let piece = bytes[at..(at + 16).min(bytes.len())].to_vec();
            bytes.splice(at..at, piece);
        }
        2 => drop(bytes.drain(at..(at + 1 + random.below(16)).min(bytes.len()))),
        3 => bytes.extend((0..random.below(64)).map(|i| i as u8)),
        _ => {
            for _ in 0..1 + random.below(4) {
                let at = random.below(bytes.len());
                bytes[at] = if random.below(2) == 0 {
                    bytes[at] ^ (1 << random.below(8))
                } else {
                    random.next() as u8
                };
            }
        }
    }
}

/// Damages the header of some records, or of a codebook: an aligned field at a time.
fn mutate_headers(bytes: &mut [u8], stride: usize, header: usize, random: &mut Random) {
    let width = *random.pick(&[1, 2, 4]);
    let field = random.below(header / width) * width;
    let values = [0, 1, 2, 0x7f, 0xff, 0xffff, 0x7fff_ffff, 0xffff_ffff, random.next() as u32];
    let value = random.pick(&values).to_le_bytes();
    // All records: whichever is read is damaged.
    for record in bytes.chunks_exact_mut(stride) {
        record[field..field + width].copy_from_slice(&value[..width]);
    }
}

/// The JSON header of a safetensors file, or its length.
fn mutate_safetensors(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let (header, data) = bytes[8..].split_at(length);
    if random.below(8) == 0 {
        let wrong =
            *random.pick(&[0, 1, length as u64 - 1, length as u64 + 1, u64::MAX, 1 << 40, 100_000_000]);
        return [&wrong.to_le_bytes(), header, data].concat();
    }
    let mut header: Value = serde_json::from_slice(header).unwrap();
    mutate_json(&mut header, random);
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// Damages a file in many ways; half of the changes to JSON are to its values, half to its bytes.
fn damaged(name: &str, bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if name.ends_with(".json") && random.below(4) > 0 {
        let mut value: Value = serde_json::from_slice(&bytes).unwrap();
        for _ in 0..1 + random.below(2) {
            mutate_json(&mut value, random);
        }
        return value.to_string().into_bytes();
    }
    match name {
        _ if name.starts_with("experts") && random.below(4) > 0 => {
            mutate_headers(&mut bytes, 4096, 48, random)
        }
        "codebooks.bin" if random.below(4) > 0 => mutate_headers(&mut bytes, 16 + 256 * 16, 16, random),
        _ if name.ends_with(".safetensors") && random.below(4) > 0 => {
            return mutate_safetensors(&bytes, random);
        }
        _ => mutate_bytes(&mut bytes, random),
    }
    bytes
}

/// Runs the cases of some files of a model; returns how many were refused and how many were not.
fn cases(model: &Model, files: &[&str], seed: u64) -> [usize; 2] {
    assert!(exercise(&model.dir), "the model does not run undamaged");
    let mut random = Random(seed);
    let mut outcomes = [0; 2];
    for name in files {
        let original = model.read(name);
        for case in 0..CASES {
            let bytes = damaged(name, &original, &mut random);
            model.set(name, &bytes);
            match catch_unwind(AssertUnwindSafe(|| exercise(&model.dir))) {
                Ok(ran) => outcomes[usize::from(ran)] += 1,
                Err(_) => {
                    let kept = std::env::temp_dir().join(format!("waste-mutation-{name}"));
                    std::fs::write(&kept, bytes).unwrap();
                    panic!("{name}, case {case}: a panic; the file is kept as {}", kept.display());
                }
            }
        }
        model.set(name, &original);
    }
    assert!(exercise(&model.dir), "the model was not restored");
    outcomes
}

fn check(outcomes: [usize; 2]) {
    let [refused, ran] = outcomes;
    assert!(refused > 200 && ran > 50, "{refused} refused, {ran} ran: the cases are not what they should be");
    // An emulator's own memory would be counted too.
    if let Some(peak) = peak_rss_bytes().filter(|_| !emulated()) {
        assert!(peak < 400 << 20, "{peak}");
    }
}

#[test]
fn damaged_containers_are_refused_or_run() {
    let files =
        ["manifest.json", "experts-L1.bin", "codebooks.bin", "trunk.bin", "tokenizer.model", "specials.json"];
    check(cases(&container(&config()), &files, 11));
}

#[test]
fn damaged_k3_containers_are_refused_or_run() {
    check(cases(&container(&k3_config()), &["manifest.json", "manifest.json", "experts-L2.bin"], 13));
}

#[test]
fn damaged_checkpoints_are_refused_or_run() {
    let files = [
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "tiktoken.model",
        "tokenizer_config.json",
    ];
    check(cases(&checkpoint(), &files, 12));
}
