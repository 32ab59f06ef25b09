//! Options, plans and the environment, and what is refused.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod util;

use util::*;

use serde_json::{Value, json};
use waste_tests::files::{Model, data};
use waste_tests::tool::{Ran, arg, run, tool};

#[test]
fn options_out_of_range_are_refused() {
    for wrong in [
        &["--temp=-1"][..],
        &["--temp", "nan"],
        &["--temp", "9"],
        &["--top-p=-0.5"],
        &["--top-p", "1.5"],
        &["--min-p", "2"],
        &["--top-k=-1"],
        &["--presence-penalty", "99"],
        &["--frequency-penalty", "inf"],
        &["-n=-1"],
        &["-n", "x"],
        &["--threads", "0"],
        &["--threads", "99999"],
        &["--kv", "bf16"],
        &["--prefill-chunk", "0"],
        &["--prefill-chunk", "1025"],
        &["--kv", "f64"],
        &["--budget", "lots"],
        &["--budget=-1"],
        &["--ram-share", "9/8"],
        &["--arith", "wrong"],
        &["--cpus", "9-1"],
        &["--cpus", "x"],
        &["--cpus", ""],
        &["--cpus", "60000"],
        &["--nonsense"],
    ] {
        let args = [&["hi", "--json"], wrong].concat();
        let ran = with("", CONTAINER, &args);
        assert_eq!(ran.exit, Some(2), "{wrong:?}: {} {}", ran.stdout, ran.stderr);
        assert_eq!(ran.json("waste-run/1")["error"]["exit"], 2, "{wrong:?}");
    }
    for (key, wrong) in [
        ("WASTE_KERNELS", "nope"),
        ("WASTE_LOOKAHEAD", "x"),
        ("WASTE_LOOKAHEAD", "-1"),
        ("WASTE_IO_DEPTH", "1e3"),
        ("WASTE_BUDGET", "lots"),
        ("WASTE_THREADS", "many"),
        ("WASTE_THREADS", "0"),
    ] {
        let model = data(CONTAINER);
        let ran = Ran::of(tool("waste-run").args([arg(&model), "hi", "--json"]).env(key, wrong));
        assert_eq!(ran.exit, Some(2), "{key}: {} {}", ran.stdout, ran.stderr);
    }
}

#[test]
fn a_negative_number_is_told_its_range() {
    let options = ["-n", "--temp", "--top-p", "--top-k", "--min-p", "--seed", "--ctx", "--threads"];
    for option in options.into_iter().chain(["--prefill-chunk", "--budget", "--ids"]) {
        let prompt = if option == "--ids" { None } else { Some("hi") };
        let args: Vec<&str> = prompt.into_iter().chain([option, "-5", "--json"]).collect();
        let ran = with("", CONTAINER, &args).exits(2);
        let message = ran.json("waste-run/1")["error"]["message"].as_str().unwrap().to_owned();
        assert!(!message.contains("-- -5") && message.contains("expected"), "{option}: {message}");
    }
    for (command, option) in [("eval", "--top"), ("perplexity", "--run")] {
        let ran = with(command, CONTAINER, &[option, "-5"]).exits(2);
        assert!(ran.stderr.contains("whole number from 0"), "{}", ran.stderr);
    }
}

#[test]
fn the_environment_is_listed_and_may_be_empty() {
    let help = run("waste-run", ["--help"]).done().stdout;
    let model = data(CONTAINER);
    let with_env = |key: &str, value: &str, args: &[&str]| {
        let args = [&[arg(&model), "hi", "-n", "2", "--json"], args].concat();
        Ran::of(tool("waste-run").args(args).env(key, value)).done().json("waste-run/1")
    };
    for key in ["WASTE_BUDGET", "WASTE_THREADS", "WASTE_KERNELS", "WASTE_IO_DEPTH", "WASTE_LOOKAHEAD"] {
        assert!(help.contains(&format!("  {key}  ")), "{key}: {help}");
        with_env(key, "", &[]);
    }
    assert_eq!(with_env("WASTE_THREADS", "2", &[])["threads"], 2);
    assert_eq!(with_env("WASTE_THREADS", "2", &["--threads", "1"])["threads"], 1);
    assert_eq!(with_env("WASTE_BUDGET", "41MiB", &[])["budget_bytes"], 41 << 20);
}

// Memory

#[test]
fn a_budget_below_the_floor_is_refused() {
    for command in ["", "eval"] {
        let run = |budget: &str| with(command, CONTAINER, &["hi", "--budget", budget, "--json"]);
        let error = run("1MiB").error(4, "budget_below_floor");
        let number = |key: &str| error[key].as_u64().unwrap();
        assert_eq!(number("shortfall_bytes"), number("floor_bytes") - number("budget_bytes"));
        assert!(error["message"].as_str().unwrap().contains("waste-plan"));
        // The floor is enough, and one byte less is not.
        let floor = number("floor_bytes");
        run(&floor.to_string()).done();
        run(&(floor - 1).to_string()).error(4, "budget_below_floor");
    }
}

#[test]
fn a_plan_is_followed_and_options_override_it() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("plan.json");
    let plan = json!({"schema": "waste-plan/1", "container": "elsewhere", "ctx": 64, "kv": "f32", "vision": false,
        "budget_bytes": 40 << 20, "fits": true});
    std::fs::write(&file, plan.to_string()).unwrap();
    let report = |args: &[&str]| {
        let args = [&["hi", "-n", "2", "--json", "--plan", arg(&file)], args].concat();
        let report = with("", CONTAINER, &args).done().json("waste-run/1");
        (report["ctx"].as_u64().unwrap(), report["budget_bytes"].as_u64().unwrap())
    };
    assert_eq!(report(&[]), (64, 40 << 20));
    assert_eq!(report(&["--ctx", "32", "--budget", "41MiB"]), (32, 41 << 20));
    // Memory for images is of the budget, whether they come or not.
    let images = json!({"container": "elsewhere", "vision": true, "budget_bytes": 1 << 20});
    std::fs::write(&file, images.to_string()).unwrap();
    let error = with("", CONTAINER, &["hi", "--plan", arg(&file), "--json"]).error(4, "budget_below_floor");
    assert!(error["floor_bytes"].as_u64().unwrap() > 64 << 20, "{error}");
    let refused = |plan: Value, exit| {
        std::fs::write(&file, plan.to_string()).unwrap();
        with("", CONTAINER, &["hi", "--plan", arg(&file), "--json"]).exits(exit);
    };
    refused(json!({"container": "k", "fits": false}), 1);
    refused(json!({"container": "k", "ctx": "many"}), 3);
    refused(json!({"container": "k", "kv": "bf16"}), 3);
    refused(json!([]), 3);
    with("", CONTAINER, &["hi", "--plan", arg(&home.path().join("none")), "--json"]).exits(3);
}

#[test]
fn a_plan_for_another_model_is_noted() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("plan.json");
    let stderr = |path: &str| {
        let plan = json!({"schema": "waste-plan/1", "container": path, "ctx": 64});
        std::fs::write(&file, plan.to_string()).unwrap();
        with("", CONTAINER, &["hi", "-n", "1", "--plan", arg(&file)]).done().stderr
    };
    assert!(stderr("elsewhere.waste").contains("elsewhere.waste"));
    let same = data(CONTAINER).join("..").join("tiny-k3.waste");
    assert!(!stderr(arg(&same)).contains("was made for"));
}

/// The plan of a checkpoint is for its container; a direct run needs another budget.
#[test]
fn a_checkpoint_runs_directly_after_its_plan() {
    let model = data(GOLDEN);
    let plan = |key: &str| {
        json!({"schema": "waste-plan/1", key: arg(&model), "ctx": 64, "kv": "f16", "budget_bytes": 1 << 20})
            .to_string()
    };
    let chained = |key: &str, args: &[&str]| {
        let args = [&["-", "hi", "-n", "1", "--json"], args].concat();
        Ran::of(tool("waste-run").args(args).write_stdin(plan(key)))
    };
    let ran = chained("checkpoint", &[]).done();
    assert!(ran.stderr.contains("budget of the plan is not followed"), "{}", ran.stderr);
    let report = ran.json("waste-run/1");
    assert_eq!((&report["ctx"], &report["kv"]), (&json!(64), &json!("f16")));
    chained("checkpoint", &["--budget", "1MiB"]).error(4, "budget_below_floor");
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("plan.json");
    std::fs::write(&file, plan("checkpoint")).unwrap();
    with("", GOLDEN, &["hi", "-n", "1", "--plan", arg(&file)]).done();
    with("", CONTAINER, &["hi", "-n", "1", "--plan", arg(&file), "--json"]).error(4, "budget_below_floor");
}

#[test]
fn a_checkpoint_has_no_checksums_to_verify() {
    for command in ["", "eval"] {
        let error = with(command, GOLDEN, &["hi", "--verify", "--json"]).error(2, "usage");
        assert!(error["message"].as_str().unwrap().contains("--verify"), "{error}");
    }
    with("", CONTAINER, &["hi", "-n", "1", "--verify"]).done();
}

/// The bugs behind it: a boundless budget took all RAM from others, and the sum of reservations overflowed.
#[test]
#[cfg(target_os = "linux")]
fn what_others_have_reserved_is_summed_without_overflow() {
    use waste_common::machine::Reservation;
    let home = tempfile::tempdir().unwrap();
    let model = data(CONTAINER);
    let start = || {
        let args = [arg(&model), "hi", "-n", "1", "--json"];
        Ran::of(tool("waste-run").args(args).env("XDG_RUNTIME_DIR", home.path()))
    };
    let small = Reservation::take_in(&home.path().join("waste"), 1 << 20, "one").unwrap();
    let ran = start().done();
    assert!(!ran.stderr.contains("have reserved"), "{}", ran.stderr);
    drop(small);
    let take = || Reservation::take_in(&home.path().join("waste"), u64::MAX, "many").unwrap();
    let _held = [take(), take()];
    start().error(4, "not_enough_ram");
}

// What is refused is refused before the model is loaded: with -v that would be said.

#[track_caller]
fn refused_before_loading(args: &[&str], exit: i32) -> Ran {
    let ran = run("waste-run", args.iter().copied().chain(["-v"])).exits(exit);
    assert!(!ran.stderr.contains("loaded in"), "{}", ran.stderr);
    ran
}

#[test]
fn a_generation_config_is_read_strictly() {
    let model = Model::copy(CONTAINER);
    let args = [model.arg(), "hi", "-n", "1"];
    let name = "generation_config.json";
    for wrong in ["{", "[]", r#"{"eos_token_id":"x"}"#, r#"{"eos_token_id":[1,-2]}"#] {
        model.set(name, wrong.as_bytes());
        let ran = refused_before_loading(&args, 3);
        assert!(ran.stderr.contains(name), "{wrong}: {}", ran.stderr);
    }
    for right in ["{}", r#"{"eos_token_id":null}"#, r#"{"eos_token_id":[1,2]}"#] {
        model.set(name, right.as_bytes());
        run("waste-run", args).done();
    }
}

#[test]
fn logits_are_not_computed_for_a_file_that_cannot_be() {
    let home = tempfile::tempdir().unwrap();
    let model = data(CONTAINER);
    let eval = |path: &std::path::Path| {
        refused_before_loading(&["eval", arg(&model), "hi", "--save-logits", arg(path)], 3)
    };
    eval(&home.path().join("none").join("logits.safetensors"));
    eval(home.path());
    assert!(!home.path().with_extension("tmp").exists());
}

// The surroundings

#[test]
fn runs_of_a_measurement_fit_the_context() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("text.txt");
    std::fs::write(&file, "The router picks a few experts.").unwrap();
    let measure =
        |args: &[&str]| with("perplexity", CONTAINER, &[&["--file", arg(&file), "--json"], args].concat());
    for wrong in [&["--run", "0"][..], &["--run", "33", "--ctx", "32"], &["--bos", "--ctx", "1"]] {
        measure(wrong).error(2, "usage");
    }
    let model = data(CONTAINER);
    let args = ["perplexity", arg(&model), "--file", arg(&file), "--run", "33", "--ctx", "32"];
    refused_before_loading(&args, 2);
    measure(&["--run", "32", "--ctx", "32"]).done();
    measure(&["--bos", "--ctx", "2"]).done();
    // One token from nothing predicts nothing.
    measure(&["--ctx", "1"]).error(3, "text_too_short");
    std::fs::write(&file, "").unwrap();
    measure(&["--bos"]).error(3, "text_too_short");
}

#[test]
fn reads_go_through_the_page_cache_where_they_must() {
    let expected = text(CONTAINER, &["hello", "-n", "6", "-q"]);
    let buffered = with("", CONTAINER, &["hello", "-n", "6", "--no-direct-io", "--json"]).done();
    let buffered = buffered.json("waste-run/1");
    assert_eq!(
        (&buffered["direct_io"], &buffered["text"]),
        (&json!(false), &json!(expected.trim_end_matches('\n')))
    );
    // A file system in memory may refuse to bypass a cache that it does not have.
    let Ok(home) = tempfile::tempdir_in("/dev/shm") else { return };
    let copy = home.path().join("copy.waste");
    std::fs::create_dir(&copy).unwrap();
    for entry in std::fs::read_dir(data(CONTAINER)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
    }
    assert_eq!(run("waste-run", [arg(&copy), "hello", "-n", "6", "-q"]).done().stdout, expected);
}

#[test]
#[cfg(target_os = "linux")]
fn threads_are_bound_to_processors_on_demand() {
    let expected = text(CONTAINER, &["hello", "-n", "6", "-q"]);
    // One that this process may use.
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    let first = allowed.trim().split(['-', ',']).next().unwrap();
    assert_eq!(text(CONTAINER, &["hello", "-n", "6", "-q", "--cpus", first]), expected);
}

#[test]
fn what_is_no_model_is_refused() {
    let home = tempfile::tempdir().unwrap();
    for command in ["", "eval", "info", "tokenize"] {
        for path in [home.path().to_owned(), home.path().join("none")] {
            let command = Some(command).filter(|command| !command.is_empty());
            let text = if command == Some("info") { None } else { Some("hi") };
            let args = command.into_iter().chain([arg(&path)]).chain(text).chain(["--json"]);
            run("waste-run", args).exits(3);
        }
    }
    run("waste-run", ["--json"]).error(2, "usage");
    // Half a container has a tokenizer and all, but no manifest yet.
    let half = Model::copy(CONTAINER);
    std::fs::remove_file(half.path("manifest.json")).unwrap();
    let none = home.path().join("none");
    for path in [arg(&none), half.arg()] {
        let error = run("waste-run", [path, "hi", "--json"]).error(3, "not_a_model");
        assert!(error["message"].as_str().unwrap().contains("neither a container"), "{error}");
    }
    let config = r#"{"schema":"waste-plan/1","config":"kimi-k3"}"#;
    let ran = Ran::of(tool("waste-run").args(["-", "hi", "--json"]).write_stdin(config));
    let error = ran.error(3, "wrong_kind");
    assert!(error["message"].as_str().unwrap().contains("names a config"), "{error}");
}
