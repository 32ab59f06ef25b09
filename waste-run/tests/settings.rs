//! Settings that change no text: kernels, reads, threads, caches, what was learned.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod util;

use util::*;

use serde_json::Value;
use waste_tests::files::{Model, data};
use waste_tests::tool::{Ran, arg, run, tool};

#[test]
fn every_kernel_set_and_switch_gives_the_same_text() {
    let model = data(CONTAINER);
    let text = |key: &str, value: &str| {
        Ran::of(tool("waste-run").args([arg(&model), "hello", "-n", "8", "-q"]).env(key, value)).done().stdout
    };
    let expected = text("WASTE_KERNELS", "");
    for (key, value) in [("WASTE_KERNELS", "portable"), ("WASTE_LOOKAHEAD", "0"), ("WASTE_IO_DEPTH", "0")] {
        assert_eq!(text(key, value), expected, "{key}={value}");
    }
}

#[cfg(unix)]
mod unix {
    use std::io::{BufRead, BufReader, Read};
    use std::process::{Child, Stdio};

    use waste_tests::tool::process;

    use super::*;

    /// A run that lasts.
    fn long(args: &[&str], stdout: Stdio) -> Child {
        let model = data(TALES);
        let mut command = process("waste-run");
        command.args([arg(&model), "Once upon a time"]).args(args);
        command.stdin(Stdio::null()).stdout(stdout).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    fn interrupt(child: &Child) {
        let pid = rustix::process::Pid::from_child(child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    }

    #[test]
    fn an_interrupt_keeps_the_text_so_far() {
        let mut child = long(&["-n", "100000", "--ctx", "200000", "--threads", "1"], Stdio::piped());
        let mut stdout = child.stdout.take().unwrap();
        let mut first = [0; 8];
        stdout.read_exact(&mut first).unwrap();
        interrupt(&child);
        let mut rest = String::new();
        stdout.read_to_string(&mut rest).unwrap();
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(130), "{stderr}");
        assert!(first.starts_with(b" there ") && rest.ends_with('\n'), "{rest:?}");
        assert!(stderr.contains("interrupted"), "{stderr}");
    }

    #[test]
    fn an_interrupted_run_reports_what_it_has() {
        let mut child = long(&["-n", "100000", "--ctx", "200000", "--json"], Stdio::piped());
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        // The first line tells the budget: the handler is in place.
        let mut line = String::new();
        stderr.read_line(&mut line).unwrap();
        interrupt(&child);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(130));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        // Before or after the model was loaded: an error, or a report.
        let reason = report["finish_reason"].as_str().or(report["error"]["code"].as_str());
        assert!(matches!(reason, Some("cancelled" | "interrupted")), "{report}");
    }

    #[test]
    fn a_measurement_and_a_long_prompt_can_be_stopped() {
        let model = data(TALES);
        let text = data("models/k3-tales/eval.txt");
        let common = ["--file", arg(&text), "--ctx", "40000", "--json"];
        let (perplexity, eval) = (["perplexity", arg(&model)], ["eval", arg(&model)]);
        for command in [&perplexity[..], &eval, &[arg(&model)]] {
            let mut child = process("waste-run")
                .args(command)
                .args(common)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let mut line = String::new();
            let mut stderr = BufReader::new(child.stderr.take().unwrap());
            stderr.read_line(&mut line).unwrap();
            rustix::process::kill_process(
                rustix::process::Pid::from_child(&child),
                rustix::process::Signal::TERM,
            )
            .unwrap();
            let output = child.wait_with_output().unwrap();
            assert_eq!(output.status.code(), Some(130), "{command:?}");
            let report: Value = serde_json::from_slice(&output.stdout).unwrap();
            let reason = report["finish_reason"].as_str().or(report["error"]["code"].as_str());
            assert!(matches!(reason, Some("cancelled" | "interrupted")), "{report}");
            drop(stderr);
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_boundless_budget_leaves_ram_to_others() {
        let home = tempfile::tempdir().unwrap();
        let model = data(TALES);
        let args = [arg(&model), "Once upon a time", "-n", "100000", "--ctx", "200000", "--budget", "99999T"];
        let mut first = process("waste-run")
            .args(args)
            .env("XDG_RUNTIME_DIR", home.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Once it writes, it has its reservation.
        first.stdout.as_mut().unwrap().read_exact(&mut [0; 4]).unwrap();
        let second = [arg(&model), "hi", "-n", "1"];
        let second = Ran::of(tool("waste-run").args(second).env("XDG_RUNTIME_DIR", home.path()));
        first.kill().unwrap();
        first.wait().unwrap();
        second.done();
    }

    #[test]
    fn a_reader_that_goes_away_ends_it_quietly() {
        for args in [&["-n", "100000", "--ctx", "200000"][..], &["-n", "4", "--json"]] {
            let mut child = long(args, Stdio::piped());
            drop(child.stdout.take());
            let output = child.wait_with_output().unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(0), "{args:?} {stderr}");
            assert!(!stderr.contains("standard output") && !stderr.contains("panicked"), "{stderr}");
        }
    }

    #[test]
    fn closed_streams_are_no_obstacle() {
        let path = process("waste-run").get_program().to_owned();
        if !path.to_string_lossy().ends_with("waste-run") {
            return; // Under an emulator the shell cannot start it.
        }
        let model = data(CONTAINER);
        let shell = |redirect: &str, args: &[&str]| {
            let script = format!("exec \"$0\" \"$@\" {redirect}");
            let output =
                std::process::Command::new("sh").args(["-c", &script]).arg(&path).args(args).output();
            Ran::from_output(output.unwrap())
        };
        let args = ["--ids", "394,104", "-n", "4", "-q"];
        let expected = text(CONTAINER, &args);
        let ran = shell("<&-", &[&[arg(&model)], &args[..]].concat()).done();
        assert_eq!(ran.stdout, expected);
        assert_eq!(shell("<&- 2>&-", &[&[arg(&model)], &args[..]].concat()).done().stdout, expected);
        // With nothing to read the text is empty: [BOS] alone.
        let ran = shell("<&-", &["eval", arg(&model), "--json"]).done();
        assert_eq!(ran.json("waste-run-eval/1")["prompt_tokens"], 1);
    }
}

/// A smaller type for the latents costs a little precision and nothing else; a chunk's size costs nothing.
#[test]
fn kv_types_and_chunks_change_little() {
    let eval = |args: &[&str]| -> Vec<f64> {
        let text = "The router picks a few experts for every token";
        let args = [&[text, "--json", "--arith", "exact"], args].concat();
        let report = with("eval", CONTAINER, &args).done().json("waste-run-eval/1");
        report["top"].as_array().unwrap().iter().map(|top| top["logit"].as_f64().unwrap()).collect()
    };
    let expected = eval(&["--kv", "f32"]);
    for (args, tolerance) in [
        (&["--kv", "f16"][..], 0.01),
        (&["--kv", "q8"], 0.2),
        (&["--kv", "f32", "--prefill-chunk", "1"], 1e-3),
        (&["--kv", "f32", "--prefill-chunk", "3"], 1e-3),
    ] {
        for (found, expected) in eval(args).iter().zip(&expected) {
            assert!((found - expected).abs() <= tolerance, "{args:?}: {found} {expected}");
        }
    }
}

// Learning

#[test]
fn what_a_run_learns_warms_the_next_one_and_changes_no_text() {
    let model = Model::copy(CONTAINER);
    let run_with = |args: &[&str]| {
        let args = [&[model.arg(), "hello", "-n", "24", "--json"], args].concat();
        run("waste-run", args).done()
    };
    let plain = run_with(&[]).json("waste-run/1");
    assert!(!model.path("usage.waste").exists() && plain["expert_warm_reads"].is_u64());
    let learned = run_with(&["--learn"]).json("waste-run/1");
    assert!(model.path("usage.waste").exists());
    let floor = run("waste-plan", [model.arg(), "--json"]).done().json("waste-plan/1")["floor_bytes"].clone();
    let warm = run_with(&["--budget", &floor.to_string()]).json("waste-run/1");
    for report in [&learned, &warm] {
        assert_eq!((&report["text"], &report["ids"]), (&plain["text"], &plain["ids"]));
    }
    // Kept elsewhere, it is the same.
    let file = model.beside("kept");
    let file = arg(&file);
    run_with(&["--learn", "--usage", file]);
    let eval = ["eval", model.arg(), "hello", "--usage", file];
    run("waste-run", eval).done();
}

#[test]
fn the_usage_of_another_container_is_refused_with_a_warning() {
    let (model, other) = (Model::copy(CONTAINER), Model::copy("interop/tiny-linear.waste"));
    run("waste-run", ["eval", other.arg(), "--ids", "1,2,3", "--learn"]).done();
    std::fs::copy(other.path("usage.waste"), model.path("usage.waste")).unwrap();
    let ran = run("waste-run", ["eval", model.arg(), "--ids", "1,2,3"]).done();
    assert!(ran.stderr.contains("usage.waste was learned from another container"), "{}", ran.stderr);
    let ran = run("waste-run", ["eval", model.arg(), "--ids", "1,2,3", "--learn"]).done();
    assert!(ran.stderr.contains("it will be replaced"), "{}", ran.stderr);
    let ran = run("waste-run", ["eval", model.arg(), "--ids", "1,2,3"]).done();
    assert!(!ran.stderr.contains("warning"), "{}", ran.stderr);
}

#[test]
fn learning_that_cannot_be_is_refused_before_the_run() {
    let model = Model::copy(CONTAINER);
    // Nobody's file is replaced.
    let file = model.beside("notes.txt");
    std::fs::write(&file, "precious").unwrap();
    let eval = ["eval", model.arg(), "--ids", "1", "--json", "--usage", arg(&file)];
    run("waste-run", eval.into_iter().chain(["--learn"])).error(3, "not_a_usage_file");
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
    let missing = model.beside("missing");
    run("waste-run", ["eval", model.arg(), "--ids", "1", "--json", "--usage", arg(&missing)])
        .error(3, "unreadable_file");
    let nowhere = model.beside("nowhere").join("usage");
    let eval = ["eval", model.arg(), "--ids", "1", "--json", "--learn", "--usage", arg(&nowhere)];
    run("waste-run", eval).error(3, "file_error");
    let model = data(TALES);
    run("waste-run", ["eval", arg(&model), "--ids", "1", "--json", "--learn"]).error(2, "usage");
}

#[test]
fn lookahead_and_paging_are_reported_where_there_is_something_to_tell() {
    let report = with("", CONTAINER, &["hello", "-n", "2", "--json"]).done().json("waste-run/1");
    let ranks = report["lookahead"].as_array().unwrap();
    assert!(ranks.iter().all(|rank| rank["right"].as_u64() <= rank["guessed"].as_u64()), "{ranks:?}");
    let paging = &report["paging"];
    assert_eq!(paging.is_object(), cfg!(target_os = "linux"), "{report}");
    assert!(
        paging.is_null() || (paging["major_faults"].is_u64() && paging["sustained"] == false),
        "{paging}"
    );
}

/// How far predictions are from another model's: nothing from its own, whatever the chunks.
#[test]
fn predictions_are_compared_with_another_models() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "Once upon a time there was a king who had three sons. ".repeat(4)).unwrap();
    let measure = |args: &[&str]| {
        let common = ["--file", arg(file.path()), "--run", "40", "--bos", "--json"];
        let args: Vec<&str> = common.into_iter().chain(args.iter().copied()).collect();
        with("perplexity", CONTAINER, &args)
    };
    let number = |report: &Value, key: &str| report[key].as_f64().unwrap();
    let (itself, checkpoint, other) = (data(CONTAINER), data(GOLDEN), data("models/k3-tales"));
    let report = measure(&["--against", arg(&itself), "--kv", "f32"]).done().json("waste-run-perplexity/1");
    assert_eq!((number(&report, "kl"), number(&report, "same_top")), (0.0, 1.0));
    let whole = measure(&["--against", arg(&checkpoint)]).done().json("waste-run-perplexity/1");
    assert!(number(&whole, "kl") > 1e-4 && number(&whole, "kl_standard_error") > 0.0, "{whole}");
    let pieces = measure(&["--against", arg(&checkpoint), "--prefill-chunk", "7"]).done();
    let pieces = pieces.json("waste-run-perplexity/1");
    assert_eq!(pieces["tokens"], whole["tokens"]);
    for key in ["kl", "nll"] {
        let (one, other) = (number(&whole, key), number(&pieces, key));
        assert!((one - other).abs() < 1e-3 * one, "{key}: {one} {other}");
    }
    assert!(measure(&[]).done().json("waste-run-perplexity/1").get("kl").is_none());
    // What the experts were given is of this model, and the measured numbers are no others.
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("importance");
    let measured = measure(&["--save-importance", arg(&saved)]).done().json("waste-run-perplexity/1");
    assert_eq!(measured["nll"], measure(&[]).done().json("waste-run-perplexity/1")["nll"]);
    let importance = waste_common::importance::Importance::open(&saved).unwrap();
    let container = waste_common::container::Container::open(&itself).unwrap();
    let config = waste_common::config::ModelConfig::from_container(&container.manifest().config).unwrap();
    importance.check(&config).unwrap();
    let layer = config.moe_layers().next().unwrap();
    let visits: u32 = importance.layer(&config, layer).unwrap().tokens.iter().sum();
    let top_k = config.moe_of(layer).unwrap().top_k;
    assert_eq!(u64::from(visits), measured["tokens"].as_u64().unwrap() * top_k as u64);
    measure(&["--save-importance", arg(&dir.path().join("no/such"))]).error(3, "file_error");
    measure(&["--against", arg(&other)]).error(3, "other_vocabulary");
}
