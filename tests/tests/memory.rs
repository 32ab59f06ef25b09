//! A budget is a ceiling: what a run takes stays within it, and the plan counts no more than what is needed.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // helpers of tests are tests too

use serde_json::{Value, json};
use waste_tests::files::{Model, data, json};
use waste_tests::synthetic::{self, Fill};
use waste_tests::tool::{Ran, arg, emulated, run, tool};

const MIB: u64 = 1 << 20;
/// The program itself, its libraries, its threads' stacks and the allocator.
const OVERHEAD: u64 = 64 * MIB;
/// What a plan may count and a run not touch. With the overhead it is less than 100 MB: nobody may take that unseen.
const UNTOUCHED: u64 = 30 * MIB;

/// Eight layers of a model, narrower, with experts of more than a GiB.
fn shape(name: &str) -> Value {
    let mut config = synthetic::cut(&json(&format!("configs/{name}.config.json")), 8);
    let text = if name == "kimi-k3" { &mut config["text_config"] } else { &mut config };
    for (key, value) in [
        ("hidden_size", 768),
        ("vocab_size", 24_576),
        ("intermediate_size", 2048),
        ("num_experts", 192),
        ("num_experts_per_token", 6),
        ("moe_intermediate_size", 1024),
        ("num_attention_heads", 6),
        ("num_key_value_heads", 6),
        ("kv_lora_rank", 128),
    ] {
        text[key] = json!(value);
    }
    if name == "kimi-k3" {
        for (key, value) in
            [("routed_expert_hidden_size", 768), ("q_lora_rank", 256), ("attn_res_block_size", 3)]
        {
            text[key] = json!(value);
        }
    }
    text["linear_attn_config"]["num_heads"] = json!(6);
    if name == "kimi-k3" {
        config["vision_config"]["text_hidden_size"] = json!(768);
        config["vision_config"]["vt_num_hidden_layers"] = json!(1);
    }
    config
}

/// Sparse: every record of zeros, so that every token goes to the same experts.
fn container(name: &str) -> Model {
    let model = Model::empty("large.waste");
    synthetic::container(&model.dir, &shape(name), Fill::Zeros).unwrap();
    for (name, source) in [
        ("tokenizer.model", "tiktoken.model"),
        ("specials.json", "../../../interop/tiny-k3.waste/specials.json"),
    ] {
        model.set(name, &std::fs::read(data("golden/tiny-k3/ckpt").join(source)).unwrap());
    }
    model
}

struct Plan {
    floor: u64,
    working_set: u64,
}

fn plan(model: &str, ctx: &str) -> Plan {
    let plan =
        run("waste-plan", [model, "--json", "--threads", "2", "--ctx", ctx]).done().json("waste-plan/1");
    let number = |key: &str| plan[key].as_u64().unwrap();
    Plan { floor: number("floor_bytes"), working_set: number("working_set_bytes") }
}

/// Runs a command with a budget and compares what it took; returns bytes of the budget that it did not.
fn measure(command: &[&str], budget: u64) -> i64 {
    let mut tool = tool("waste-run");
    tool.args(command).args(["--json", "--threads", "2", "--budget", &budget.to_string()]);
    let ran = Ran::of(&mut tool).done();
    let report: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(report["budget_bytes"], budget);
    let peak = report["peak_rss_bytes"].as_u64().unwrap();
    assert!(peak <= budget + OVERHEAD, "{:?}: {peak} of {budget}", command);
    budget as i64 - peak as i64
}

fn check(name: &str) {
    // The emulator's own memory would be measured.
    if emulated() {
        return;
    }
    let model = container(name);
    let experts = std::fs::metadata(model.path("experts-L1.bin")).unwrap().len();
    assert!(7 * experts > 1 << 30, "{experts}");
    let prompt = |tokens: u32| (0..tokens).map(|id| (id % 300).to_string()).collect::<Vec<_>>().join(",");
    let Plan { floor, working_set } = plan(model.arg(), "1024");
    // A prompt longer than a chunk goes through all buffers: nearly everything planned is used.
    for (budget, tokens) in [(floor, 600), (floor + working_set, 257)] {
        let eval = ["eval", model.arg(), "--ctx", "1024", "--ids"];
        let untouched = measure(&[&eval[..], &[&prompt(tokens)]].concat(), budget);
        assert!(untouched <= UNTOUCHED as i64, "{name}: {untouched} bytes of {budget} were not needed");
        measure(&[&eval[..], &["1,2,3"]].concat(), budget);
        measure(&[model.arg(), "--ctx", "1024", "--ids", "1,2,3", "-n", "8"], budget);
    }
    let Plan { floor, .. } = plan(model.arg(), "32768");
    measure(&[model.arg(), "--ctx", "32768", "--ids", "1,2,3", "-n", "8"], floor);
}

#[test]
fn k3_stays_within_its_budget() {
    check("kimi-k3");
}

#[test]
fn kimi_linear_stays_within_its_budget() {
    check("kimi-linear-48b");
}

#[test]
fn a_checkpoint_stays_within_its_budget() {
    if emulated() {
        return;
    }
    for model in ["models/k3-tales", "golden/tiny-linear/ckpt"] {
        let model = data(model);
        let model = arg(&model);
        // The floor of a checkpoint that is run directly is known to the run alone.
        let refused =
            run("waste-run", ["eval", model, "--ids", "1", "--budget", "1M", "--threads", "2", "--json"]);
        let floor = refused.error(4, "budget_below_floor")["floor_bytes"].as_u64().unwrap();
        measure(&["eval", model, "--ids", "1,2,3"], floor);
        measure(&[model, "--ids", "1,2,3", "-n", "8"], floor);
    }
}
