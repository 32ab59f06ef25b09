//! Tools chained by their JSON.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

use serde_json::{Value, json};
use waste_tests::files::{Model, data};
use waste_tests::tool::{Ran, arg, tool};

/// A tool that reads what the previous one wrote.
fn piped(name: &str, args: &[&str], stdin: &str) -> Ran {
    Ran::of(tool(name).args(args).write_stdin(stdin.to_owned()))
}

fn downloaded(checkpoint: &str) -> String {
    json!({"schema": "waste-download/1", "checkpoint": arg(&data(checkpoint))}).to_string()
}

#[test]
fn from_checkpoint_to_text() {
    let home = Model::empty("home");
    let container = home.path("k3.waste");
    let download = downloaded("golden/tiny-k3/ckpt");
    let convert =
        piped("waste-convert", &["-", arg(&container), "--effort", "fast", "--json"], &download).done();
    let report = convert.json("waste-convert/1");
    assert_eq!(report["container"], arg(&container));
    assert!(report["error"]["gate"].is_f64(), "{report}");
    let verify = piped("waste-verify", &["-", "--json"], &convert.stdout).done();
    let report = verify.json("waste-verify/1");
    assert_eq!((&report["ok"], &report["container"]), (&json!(true), &json!(arg(&container))));
    let plan = piped("waste-plan", &["-", "--json", "--ctx", "128"], &verify.stdout).done();
    let planned = plan.json("waste-plan/1");
    assert_eq!((&planned["fits"], &planned["container"]), (&json!(true), &json!(arg(&container))));
    let args = ["-", "hello", "-n", "4"];
    let text = piped("waste-run", &args, &plan.stdout).done();
    let direct = Ran::of(tool("waste-run").args([arg(&container), "hello", "-n", "4"])).done();
    assert_eq!(text.stdout, direct.stdout);
    let ran = piped("waste-run", &["-", "hello", "-n", "4", "--json"], &plan.stdout).done();
    let report = ran.json("waste-run/1");
    assert_eq!(report["budget_bytes"], planned["budget_bytes"]);
    assert_eq!(report["ctx"], 128);
    // Every subcommand takes it too.
    for args in [&["eval", "-", "hello"][..], &["tokenize", "-", "hello"], &["info", "-"]] {
        piped("waste-run", args, &plan.stdout).done();
    }
}

#[test]
fn a_checkpoint_is_run_without_a_container() {
    let download = downloaded("golden/tiny-k3/ckpt");
    piped("waste-run", &["-", "hello", "-n", "2"], &download).done();
    let plan = piped("waste-plan", &["-", "--json"], &download).done();
    assert!(plan.json("waste-plan/1")["checkpoint"].is_string());
}

#[test]
fn a_plan_with_images_is_followed() {
    let model = data("interop/tiny-k3.waste");
    let plan = piped("waste-plan", &[arg(&model), "--vision", "--ctx", "300", "--json"], "").done();
    let planned = plan.json("waste-plan/1");
    assert!(planned["vision_bytes"].as_u64().unwrap() > 0);
    let image = data("golden/tiny-k3/image.png");
    let args = ["-", "It shows", "-n", "2", "--image", arg(&image), "--json"];
    let report = piped("waste-run", &args, &plan.stdout).done().json("waste-run/1");
    assert_eq!((&report["ctx"], &report["budget_bytes"]), (&json!(300), &planned["budget_bytes"]));
}

#[test]
fn with_a_model_from_stdin_the_text_comes_from_elsewhere() {
    let download = downloaded("golden/tiny-k3/ckpt");
    for args in [&["-", "--json"][..], &["-", "-", "--json"], &["eval", "-", "--json"]] {
        piped("waste-run", args, &download).error(2, "usage");
    }
    piped("waste-run", &["detokenize", "-", "--json"], &download).error(2, "usage");
}

/// Each tool with arguments that would do.
fn stages(out: &str) -> Vec<(&'static str, Vec<String>)> {
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    vec![
        ("waste-convert", words(&["-", out, "--effort", "fast", "--json"])),
        ("waste-verify", words(&["-", "--json"])),
        ("waste-plan", words(&["-", "--json"])),
        ("waste-run", words(&["-", "hi", "--json"])),
        ("waste-run", words(&["eval", "-", "hi", "--json"])),
        ("waste-run", words(&["info", "-", "--json"])),
    ]
}

fn every_stage(stdin: &str, check: impl Fn(&Ran)) {
    let home = Model::empty("home");
    let out = home.path("out.waste");
    for (name, args) in stages(arg(&out)) {
        check(&Ran::of(tool(name).args(args).write_stdin(stdin.to_owned())));
        assert!(!out.exists());
    }
}

#[test]
fn an_error_passes_through_with_its_exit_code() {
    for exit in [1, 2, 3, 4, 5, 6, 70, 130] {
        let error = json!({"schema": "waste-download/1",
            "error": {"code": "some_code", "exit": exit, "message": "what went wrong", "file": "f"}});
        every_stage(&error.to_string(), |ran| {
            let ran = ran.clone().exits(exit);
            assert_eq!(serde_json::from_str::<Value>(&ran.stdout).unwrap(), error);
            assert!(ran.stderr.contains("waste-download: what went wrong"), "{}", ran.stderr);
        });
    }
}

#[test]
fn a_no_stops_the_chain() {
    let model = data("golden/tiny-k3/ckpt");
    for key in ["ok", "fits"] {
        let mut answer =
            json!({"schema": "waste-some/1", "checkpoint": arg(&model), "container": arg(&model)});
        answer[key] = json!(false);
        every_stage(&answer.to_string(), |ran| {
            ran.clone().exits(1);
            let error: Value = serde_json::from_str(&ran.stdout).unwrap();
            assert_eq!(error["error"]["exit"], 1, "{error}");
        });
    }
}

#[test]
fn a_real_no_stops_the_chain() {
    let model = Model::copy("interop/tiny-k3.waste");
    let mut bank = model.read("experts-L3.bin");
    bank[100] ^= 1;
    model.set("experts-L3.bin", &bank);
    let verify = Ran::of(tool("waste-verify").args([model.arg(), "--json"])).exits(1);
    assert_eq!(verify.json("waste-verify/1")["ok"], false);
    let plan = piped("waste-plan", &["-", "--json"], &verify.stdout).exits(1);
    piped("waste-run", &["-", "hi", "--json"], &plan.stdout).exits(1);
    // A plan above the cap of the machine, and one below the floor.
    let args = [model.arg(), "--json", "--ram", "14MiB", "--threads", "1", "--ctx", "64"];
    let plan = Ran::of(tool("waste-plan").args(args)).exits(1);
    assert_eq!(plan.json("waste-plan/1")["fits"], false);
    piped("waste-run", &["-", "hi", "--json"], &plan.stdout).exits(1);
    let plan = Ran::of(tool("waste-plan").args([model.arg(), "--json", "--budget", "1MiB"]));
    plan.error(4, "budget_below_floor");
    let run = piped("waste-run", &["-", "hi", "--json"], &plan.stdout).exits(4);
    assert_eq!(run.stdout, plan.stdout);
}

#[test]
fn what_is_no_answer_of_a_tool_is_refused() {
    for stdin in ["", "hello", "[]", "{}", "{\"container\":7}", "{\"container\":\"k\"}{\"container\":\"k\"}"]
    {
        every_stage(stdin, |ran| {
            ran.error(3, "chain");
        });
    }
}
