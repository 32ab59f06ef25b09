//! The tool as a script sees it.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

use assert_cmd::Command;
use serde_json::{Value, json};
use waste_common::machine::Reservation;
use waste_tests::synthetic::{self, Fill};

fn tool() -> Command {
    let mut command = waste_tests::tool::tool("waste-plan");
    command.env_remove("WASTE_BUDGET").env_remove("WASTE_THREADS");
    command
}

struct Ran {
    exit: i32,
    stdout: String,
    stderr: String,
}

impl Ran {
    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|_| panic!("{} {}", self.stdout, self.stderr))
    }

    #[track_caller]
    fn error(&self, exit: i32, code: &str) -> Value {
        let error = self.json()["error"].clone();
        assert_eq!(
            (self.exit, &error["exit"], &error["code"]),
            (exit, &json!(exit), &json!(code)),
            "{error}"
        );
        assert!(!self.stderr.is_empty());
        error
    }
}

fn run(command: &mut Command) -> Ran {
    let output = command.output().unwrap();
    Ran {
        exit: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// With `--json` and two threads.
fn plan(args: &[&str]) -> Ran {
    run(tool().args(args).args(["--json", "--threads", "2"]))
}

fn piped(stdin: &str, args: &[&str]) -> Ran {
    run(tool().arg("-").args(args).args(["--json", "--threads", "2"]).write_stdin(stdin))
}

fn config(name: &str) -> Value {
    let path = format!("{}/../tests/configs/{name}.config.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

const GIB: u64 = 1 << 30;

#[test]
fn a_known_model_is_planned_without_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let ran =
        run(tool().current_dir(dir.path()).args(["kimi-k3", "--ram", "64GiB", "--json", "--threads=2"]));
    assert_eq!((ran.exit, ran.stderr.as_str()), (0, ""));
    let plan = ran.json();
    let keys: Vec<&String> = plan.as_object().unwrap().keys().collect();
    assert_eq!(keys[..3], ["schema", "config", "arch"]);
    for key in [
        "ctx",
        "trunk_bytes",
        "state_bytes",
        "scratch_bytes",
        "min_expert_cache_bytes",
        "floor_bytes",
        "vision_bytes",
        "record_bytes",
        "working_set_bytes",
        "experts_bytes",
        "container_bytes",
        "physical_ram_bytes",
        "usable_ram_bytes",
        "cap_bytes",
        "budget_bytes",
        "expert_cache_bytes",
        "cache_slots",
        "working_sets",
        "checkpoint_bytes",
    ] {
        assert!(plan[key].is_u64(), "{key}: {}", plan[key]);
    }
    assert_eq!(plan["schema"], "waste-plan/1");
    assert_eq!(
        (&plan["config"], &plan["arch"], &plan["kv"]),
        (&json!("kimi-k3"), &json!("kimi-k3"), &json!("f16"))
    );
    assert_eq!(
        (&plan["fits"], &plan["vision"], &plan["working_sets"]),
        (&json!(true), &json!(false), &json!(1))
    );
    assert_eq!(plan["checkpoint_bytes"], 1_560_860_324_864u64);
    assert_eq!(plan["usable_ram_bytes"], 64 * GIB);
    assert!(plan["verdict"].as_str().unwrap().starts_with("Fits"));
    assert!(plan.get("bytes_per_token").is_none() && plan.get("disk_fits").is_none());
}

#[test]
fn people_get_a_table_and_a_verdict() {
    let ran = run(tool().args(["kimi-k3", "--ram=64G", "--threads=2"]));
    assert_eq!(ran.exit, 0);
    for part in [
        "27.28 GiB",
        "17.01 GiB",
        "981.30 GiB",
        "working set",
        "\nFits: 45.42 GiB of 64.00 GiB",
        "--budget max",
    ] {
        assert!(ran.stdout.contains(part), "{part}: {}", ran.stdout);
    }
    let paging = run(tool().args(["kimi-k3", "--ram=32GiB", "--threads=2"]));
    assert_eq!(paging.exit, 1);
    assert!(paging.stderr.contains("warning:") && paging.stderr.contains("will page"), "{}", paging.stderr);
    assert!(paging.stdout.contains("Does not fit"), "{}", paging.stdout);
    let quiet = run(tool().args(["kimi-k3", "--ram=32GiB", "-q"]));
    assert_eq!((quiet.exit, quiet.stderr.as_str()), (1, ""));
}

#[test]
fn sequences_together_are_planned() {
    let args = ["kimi-linear-48b", "--ram=64G", "--threads=2"];
    let of = |more: &str| run(tool().args(args).args([more, "--json"])).json();
    let (one, four) = (of("--parallel=1"), of("--parallel=4"));
    assert_eq!((&one["parallel"], &four["parallel"]), (&json!(1), &json!(4)));
    assert_eq!(four["state_bytes"].as_u64().unwrap(), 4 * one["state_bytes"].as_u64().unwrap());
    let people = run(tool().args(args).arg("--parallel=4"));
    assert!(people.stdout.contains("each for 4 sequences together"), "{}", people.stdout);
    for wrong in ["--parallel=0", "--parallel=17"] {
        assert_eq!(run(tool().args(args).arg(wrong)).exit, 2, "{wrong}");
    }
}

#[test]
fn more_is_said_of_the_machine_when_asked_for() {
    let (assumed, more) = (&["kimi-k3", "--ram=64G", "--threads=2"][..], &["-v"][..]);
    let (plain, verbose) = (run(tool().args(assumed)), run(tool().args(assumed).args(more)));
    assert_eq!((&plain.stdout, plain.stderr.as_str()), (&verbose.stdout, ""));
    assert!(verbose.stderr.starts_with("machine: 64.00 GiB of RAM as --ram says"), "{}", verbose.stderr);
    if cfg!(target_os = "linux") {
        let directory = tempfile::tempdir().unwrap();
        let of_this = || {
            let mut command = tool();
            command.env("XDG_RUNTIME_DIR", directory.path()).args(["kimi-linear-48b", "-v"]);
            run(&mut command).stderr
        };
        assert!(of_this().starts_with("machine: ") && !of_this().contains("reserved:"), "{}", of_this());
        let reservations = directory.path().join("waste");
        let held = Reservation::take_in(&reservations, 5 << 20, "waste-run \u{1b}[31mk3.waste").unwrap();
        let said = format!("reserved: 5.00 MiB by process {}, \"waste-run \\u{{1b}}", held.info().pid);
        assert!(of_this().contains(&said), "{}", of_this());
    }
}

#[test]
fn every_exit_code_has_its_case() {
    let below = plan(&["kimi-k3", "--ram=64GiB", "--budget=20GiB"]);
    let error = below.error(4, "budget_below_floor");
    let floor = error["floor_bytes"].as_u64().unwrap();
    assert_eq!(error["shortfall_bytes"], floor - 20 * GIB);
    plan(&["kimi-k3", "--ram=16GiB"]).error(4, "not_enough_ram");
    let swapping = plan(&["kimi-k3", "--ram=16GiB", "--allow-swap"]);
    assert_eq!((swapping.exit, swapping.json()["fits"].clone()), (1, json!(false)));
    let above = plan(&["kimi-k3", "--ram=64GiB", "--budget=60GiB"]);
    assert_eq!((above.exit, above.json()["fits"].clone()), (1, json!(false)));
    assert!(above.stderr.contains("recommended budget is 45.42 GiB"), "{}", above.stderr);
    assert_eq!(plan(&["kimi-k3", "--ram=128GiB"]).json()["working_sets"], 3);
    for wrong in [
        &["kimi-k3", "--kv=bf16"][..],
        &["kimi-k3", "--ram-share=9/8"],
        &["kimi-k3", "--budget=lots"],
        &["kimi-k3", "--hit-rate=0.5"],
        &["kimi-k3", "--disk-gbps=-1"],
        &["kimi-k3", "--disk-gbps=1", "--hit-rate=2"],
        &["kimi-k3", "--disk-gbps=1", "--bench=x"],
        &[],
    ] {
        plan(wrong).error(2, "usage");
    }
    plan(&["kimi-k3", "--ctx=0"]).error(2, "invalid_option");
    plan(&["kimi-linear-48b", "--vision", "--ram=64G"]).error(2, "no_vision");
}

#[test]
fn options_change_the_plan() {
    let state = |args: &[&str]| {
        let mut all = vec!["kimi-k3", "--ram=1T"];
        all.extend(args);
        plan(&all).json()
    };
    let (f32, f16, q8) = (state(&["--kv=f32"]), state(&[]), state(&["--kv=q8"]));
    assert!(f16["state_bytes"].as_u64() < f32["state_bytes"].as_u64());
    assert!(q8["state_bytes"].as_u64() < f16["state_bytes"].as_u64());
    assert!(state(&["--vision"])["vision_bytes"].as_u64().unwrap() > 0);
    assert!(state(&["--prefill-chunk=1024"])["scratch_bytes"].as_u64() > f16["scratch_bytes"].as_u64());
    assert_eq!(state(&["--ram-share=3/4"])["cap_bytes"], 768 * GIB);
    assert_eq!(plan(&["kimi-linear-48b", "--ram=24G", "--budget=max"]).json()["cache_slots"], 26 * 256);
    let by_environment =
        run(tool().env("WASTE_BUDGET", "max").args(["kimi-linear-48b", "--ram=24G", "--json"]));
    assert_eq!(by_environment.json()["cache_slots"], 26 * 256);
}

/// The published shape of K3, in files that hold nothing: the manifest gives the very figures of the configuration.
#[cfg(not(windows))]
#[test]
fn a_container_of_k3_is_planned_from_its_manifest() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("k3.waste");
    synthetic::container(&path, &config("kimi-k3"), Fill::Holes).unwrap();
    let path = path.to_str().unwrap();
    for vision in [&[][..], &["--vision"]] {
        let mut found = plan(&[&[path, "--ram=64GiB"], vision].concat()).json();
        let mut expected = plan(&[&["kimi-k3", "--ram=64GiB"], vision].concat()).json();
        assert_eq!(found["container"], path);
        assert_eq!(found["checkpoint_bytes"], Value::Null);
        for key in ["container", "config", "checkpoint_bytes"] {
            found.as_object_mut().unwrap().remove(key);
            expected.as_object_mut().unwrap().remove(key);
        }
        assert_eq!(found, expected);
    }
}

fn small() -> Value {
    let mut config = synthetic::cut(&config("kimi-linear-48b"), 4);
    for (key, value) in [
        ("hidden_size", 256),
        ("vocab_size", 512),
        ("intermediate_size", 512),
        ("num_experts", 16),
        ("num_experts_per_token", 4),
        ("moe_intermediate_size", 64),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 2),
        ("kv_lora_rank", 64),
    ] {
        config[key] = json!(value);
    }
    config["linear_attn_config"]["num_heads"] = json!(2);
    config
}

#[test]
fn a_small_container_is_planned_and_chained() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("small.waste");
    synthetic::container(&path, &small(), Fill::Random(1)).unwrap();
    let path = path.to_str().unwrap();
    let first = plan(&[path, "--ram=1GiB"]);
    assert_eq!(first.exit, 0, "{}", first.stderr);
    let object = first.json();
    // Twice the chosen experts of a layer is the least cache; all experts are the most slots.
    assert_eq!(object["working_set_bytes"], 3 * 4 * object["record_bytes"].as_u64().unwrap());
    assert_eq!(object["cache_slots"], 44);
    let chained = piped(&first.stdout, &["--ram=1GiB"]);
    assert_eq!((chained.exit, chained.json()), (0, object));
    // This machine: whatever it is, it has room for that.
    assert_eq!(plan(&[path]).exit, 0);
    let max = plan(&[path, "--ram=1GiB", "--budget=512MiB"]).json();
    assert_eq!(max["cache_slots"], 48);
}

#[test]
fn configurations_are_found_in_files_and_directories() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.json");
    std::fs::write(&file, config("kimi-linear-48b").to_string()).unwrap();
    let by_file = plan(&[file.to_str().unwrap(), "--ram=8G"]).json();
    let by_directory = plan(&[dir.path().to_str().unwrap(), "--ram=8G"]).json();
    assert_eq!(by_file, by_directory);
    assert_eq!(by_file["config"], file.to_str().unwrap());
    std::fs::write(dir.path().join("model.safetensors.index.json"), "{}").unwrap();
    let mut checkpoint = plan(&[dir.path().to_str().unwrap(), "--ram=8G"]).json();
    assert_eq!(checkpoint["checkpoint"], dir.path().to_str().unwrap());
    let chained = piped(&checkpoint.to_string(), &["--ram=8G"]).json();
    assert_eq!(chained, checkpoint);
    for object in [&mut checkpoint, &mut by_file.clone()] {
        object.as_object_mut().unwrap().shift_remove("checkpoint");
        object.as_object_mut().unwrap().shift_remove("config");
    }
    assert_eq!(checkpoint["container_bytes"], by_file["container_bytes"]);
    // A name goes down the chain too.
    let named = plan(&["kimi-k3", "--ram=64G"]);
    assert_eq!(piped(&named.stdout, &["--ram=64G"]).stdout, named.stdout);
}

#[test]
fn a_previous_no_or_error_goes_through() {
    let no = piped(r#"{"schema":"waste-verify/1","container":"k3.waste","ok":false}"#, &[]);
    no.error(1, "previous_said_no");
    let misfit = plan(&["kimi-k3", "--ram=32GiB"]);
    assert_eq!(misfit.exit, 1);
    piped(&misfit.stdout, &[]).error(1, "previous_said_no");
    let failed = plan(&["kimi-k3", "--ram=16GiB"]);
    let passed = piped(&failed.stdout, &[]);
    assert_eq!((passed.exit, passed.stdout), (4, failed.stdout));
    for broken in ["", "nonsense", "{}", "[]", r#"{"container":7}"#] {
        piped(broken, &[]).error(3, "chain");
    }
    assert_eq!(piped(r#"{"container":"/no/such.waste"}"#, &[]).exit, 3);
    piped(r#"{"config":"kimi-k9"}"#, &[]).error(3, "no_model");
}

#[test]
fn broken_inputs_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    plan(&["no-such-model"]).error(3, "no_model");
    plan(&[path]).error(3, "no_model");
    let file = |name: &str, content: &str| {
        let file = dir.path().join(name);
        std::fs::write(&file, content).unwrap();
        file.to_str().unwrap().to_owned()
    };
    for (content, word) in [
        ("", "broken.json"),
        ("{\"a\":", "broken.json"),
        ("[]", "object"),
        ("{}", "mla_use_nope"),
        ("{\"architectures\":[\"LlamaForCausalLM\"]}", "Llama"),
    ] {
        let file = file("broken.json", content);
        let ran = plan(&[&file]);
        assert_eq!(ran.exit, 3, "{content}: {}", ran.stderr);
        assert!(ran.stderr.contains("broken.json"), "{content}: {}", ran.stderr);
        assert!(ran.stderr.contains(word), "{content}: {}", ran.stderr);
    }
    let mut odd = small();
    odd["moe_intermediate_size"] = json!(63);
    let odd = file("odd.json", &odd.to_string());
    plan(&[&odd, "--ram=1G"]).error(3, "invalid_config");
    file("manifest.json", r#"{"format_version":7}"#);
    plan(&[path]).error(3, "unknown_format_version");
}

#[test]
fn the_disk_is_planned_too() {
    let dir = tempfile::tempdir().unwrap();
    let dest = dir.path().join("not/yet");
    let dest = dest.to_str().unwrap();
    let ran = plan(&["kimi-k3", "--ram=64G", "--dest", dest]);
    let object = ran.json();
    let needed = object["container_bytes"].as_u64().unwrap() + object["checkpoint_bytes"].as_u64().unwrap();
    assert_eq!(object["disk_needed_bytes"], needed);
    assert!(object["disk_kind"].is_string());
    // Two and a half terabytes: few machines that test have them, but they may.
    let free = waste_common::io::filesystem(dir.path()).unwrap().free_bytes.unwrap();
    let fits = free >= needed;
    assert_eq!((ran.exit, &object["disk_fits"]), (i32::from(!fits), &json!(fits)));
    let config = dir.path().join("small.json");
    std::fs::write(&config, small().to_string()).unwrap();
    let ran = run(tool().args([config.to_str().unwrap(), "--ram=1G", "--dest", dest]));
    assert_eq!(ran.exit, 0, "{}", ran.stdout);
    assert!(ran.stdout.contains("disk needed"), "{}", ran.stdout);
}

#[test]
fn the_disk_bounds_the_speed() {
    let object = plan(&["kimi-k3", "--ram=64G", "--disk-gbps=5"]).json();
    let bytes = 18_262_786_048u64;
    assert_eq!((&object["bytes_per_token"], &object["hit_rate"]), (&json!(bytes), &json!(0.0)));
    let near = |key: &str, expected: f64| {
        let found = object[key].as_f64().unwrap();
        assert!((found / expected - 1.0).abs() < 1e-9, "{key}: {found}");
    };
    near("disk_seconds_per_token", bytes as f64 / 5e9);
    near("tokens_per_second_max", 5e9 / bytes as f64);
    let half = plan(&["kimi-k3", "--ram=64G", "--disk-gbps=5", "--hit-rate=0.5"]).json();
    assert_eq!(half["bytes_per_token"], bytes / 2);
    let held = plan(&["kimi-linear-48b", "--ram=64G", "--budget=max", "--disk-gbps=5"]).json();
    assert_eq!((&held["bytes_per_token"], &held["tokens_per_second_max"]), (&json!(0), &Value::Null));

    let dir = tempfile::tempdir().unwrap();
    let bench = dir.path().join("bench.json");
    for content in [r#"{"gbps":5.0}"#, r#"{"bytes_per_second":5e9}"#] {
        std::fs::write(&bench, content).unwrap();
        let measured = plan(&["kimi-k3", "--ram=64G", "--bench", bench.to_str().unwrap()]).json();
        assert_eq!(measured, object);
    }
    std::fs::write(&bench, "{}").unwrap();
    plan(&["kimi-k3", "--bench", bench.to_str().unwrap()]).error(3, "bench");
}

#[test]
fn help_shows_examples_and_exit_codes() {
    let help = run(tool().arg("--help")).stdout;
    assert!(help.contains("waste-plan kimi-k3 --ram 64GiB") && help.contains("Exit codes:"), "{help}");
}
