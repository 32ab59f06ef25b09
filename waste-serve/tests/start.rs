//! The tool with a socket: from its start to a signal.
#![cfg(unix)]
#![allow(clippy::unwrap_used)] // helpers of tests are tests too

#[path = "util/pictures.rs"]
mod pictures;
#[path = "util/serving.rs"]
mod serving;

use std::io::{Read, Write};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use serving::Serving;
use waste_tests::files::data;
use waste_tests::tool::{Ran, arg, process, run};

const TALES: &str = "models/k3-tales";

fn start(args: &[&str]) -> Serving {
    Serving::start(arg(&data(TALES)), args)
}

fn chat(stream: bool) -> String {
    json!({
        "model": "k3-tales", "messages": [{"role": "user", "content": "Once upon a time"}],
        "max_tokens": 8, "temperature": 0, "thinking": false, "stream": stream,
    })
    .to_string()
}

#[test]
fn it_serves_until_a_signal_comes() {
    let serving = start(&["--ctx", "512", "--threads", "2"]);
    let health = serving.ask("GET /health", "");
    assert!(health.starts_with("HTTP/1.1 200 OK\r\n") && health.contains("\"status\":\"ok\""), "{health}");
    let whole = serving.ask("POST /v1/chat/completions", &chat(false));
    assert!(
        whole.contains("\"finish_reason\":\"length\"") && whole.contains("\"completion_tokens\":8"),
        "{whole}"
    );
    let stream = serving.ask("POST /v1/chat/completions", &chat(true));
    assert!(stream.contains("text/event-stream") && stream.contains("data: [DONE]"), "{stream}");
    // Chunked bodies are as good.
    let mut chunked = serving.connect();
    let body = chat(false);
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked";
    let (one, two) = body.split_at(10);
    write!(chunked, "{head}\r\n\r\n{:x}\r\n{one}\r\n{:x}\r\n{two}\r\n0\r\n\r\n", one.len(), two.len())
        .unwrap();
    let mut text = String::new();
    chunked.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    // Headers beyond their limit, and a name that is not the server's.
    let mut long = serving.connect();
    let _ = write!(long, "GET /health HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n", "x".repeat(40 << 10));
    let mut text = String::new();
    let _ = long.read_to_string(&mut text);
    assert!(text.is_empty() || text.starts_with("HTTP/1.1 431"), "{text}");
    let mut other = serving.connect();
    write!(other, "GET /v1/models HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    other.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 403") && text.contains("host_not_allowed"), "{text}");
    let ran = serving.end().exits(0);
    assert!(
        ran.stderr.contains("/v1/chat/completions 200") && !ran.stderr.contains("Once upon"),
        "{}",
        ran.stderr
    );
}

#[test]
fn a_signal_ends_what_runs_in_good_order() {
    let home = tempfile::tempdir().unwrap();
    let script = home.path().join("script.json");
    let items: Vec<Value> = (0..10_000).map(|_| json!({"t": "word "})).collect();
    std::fs::write(&script, json!({"token_ms": 2, "cases": [{"items": items}]}).to_string()).unwrap();
    let serving = start(&["--script", arg(&script), "--drain-timeout", "0.2"]);
    let mut stream = serving.connect();
    let body = json!({
        "model": "k3-tales", "messages": [{"role": "user", "content": "x"}], "thinking": false, "stream": true,
        "max_tokens": 4000,
    })
    .to_string();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost";
    write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut start = vec![0; 1000];
    stream.read_exact(&mut start).unwrap();
    kill_process(Pid::from_child(&serving.child), Signal::TERM).unwrap();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"), "{rest}");
    Ran::from_output(serving.child.wait_with_output().unwrap()).exits(0);
}

#[test]
fn a_socket_that_a_kill_left_is_taken_over_and_a_live_one_is_not() {
    let home = tempfile::tempdir().unwrap();
    let (path, script) = (home.path().join("socket"), home.path().join("script.json"));
    std::fs::write(&script, json!({"cases": [{"items": [{"t": "word"}]}]}).to_string()).unwrap();
    let args = ["--unix", arg(&path), "--script", arg(&script)];
    let mut killed = Serving::listening(arg(&data(TALES)), &args);
    killed.child.kill().unwrap();
    killed.child.wait().unwrap();
    assert!(path.exists());
    let serving = Serving::listening(arg(&data(TALES)), &args);
    let model = data(TALES);
    let refused = run("waste-serve", [&[arg(&model), "--json"], &args[..]].concat());
    let error = refused.error(5, "cannot_listen");
    assert!(error["message"].as_str().unwrap().contains("another server"), "{error}");
    let mut stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
    write!(stream, "GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    serving.end().exits(0);
    assert!(!path.exists());
    // Anything else that is there is left alone.
    std::fs::write(&path, "mine").unwrap();
    run("waste-serve", [&[arg(&model), "--json"], &args[..]].concat()).error(5, "cannot_listen");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
}

#[test]
fn a_plan_says_how_many_are_written_at_a_time() {
    let home = tempfile::tempdir().unwrap();
    let plan = home.path().join("plan.json");
    let model = data(TALES);
    let planned = run("waste-plan", [arg(&model), "--parallel", "3", "--ctx", "256", "--json"]).done();
    std::fs::write(&plan, planned.stdout).unwrap();
    for (more, slots) in [(&[][..], 3), (&["--parallel", "2"][..], 2)] {
        let serving = start(&[&["--plan", arg(&plan), "--threads", "2"][..], more].concat());
        let health = serving.ask("GET /health", "");
        assert!(health.contains(&format!("\"slots\":{slots}")), "{health}");
        let models = serving.ask("GET /v1/models", "");
        assert!(models.contains("\"max_model_len\":256"), "{models}");
        serving.end().exits(0);
    }
}

/// The model that sees, as a process.
#[test]
fn it_sees() {
    let home = tempfile::tempdir().unwrap();
    let plan = home.path().join("plan.json");
    let model = data("interop/tiny-k3.waste");
    let planned = run("waste-plan", [arg(&model), "--vision", "--ctx", "512", "--json"]).done();
    std::fs::write(&plan, planned.stdout).unwrap();
    for args in [&["--plan", arg(&plan)][..], &["--vision", "--ctx", "512", "--parallel", "2"]] {
        let serving =
            Serving::start(arg(&model), &[args, &["--threads", "2", "--max-patches", "256"]].concat());
        let models = serving.ask("GET /v1/models", "");
        assert!(models.contains("\"vision\":true") && models.contains("\"max_model_len\":512"), "{models}");
        let ask = |image: &[u8]| {
            let content = [pictures::picture(image), pictures::text("What is it?")];
            let body = json!({
                "model": "tiny-k3", "messages": [{"role": "user", "content": content}], "max_tokens": 8,
                "temperature": 0, "thinking": false,
            });
            serving.ask("POST /v1/chat/completions", &body.to_string())
        };
        let got = ask(&pictures::file(pictures::IMAGE));
        let got: Value = serde_json::from_str(got.split_once("\r\n\r\n").unwrap().1).unwrap();
        let image = data(pictures::IMAGE);
        let chat = ["chat", arg(&model), "--image", arg(&image), "--no-thinking", "-n", "8", "--temp", "0"];
        let mut command = waste_tests::tool::tool("waste-run");
        let ran = Ran::of(command.args(chat).args(["--json", "-q"]).write_stdin("What is it?\n")).done();
        let said: Value = serde_json::from_str(ran.stdout.lines().next().unwrap()).unwrap();
        assert_eq!(got["choices"][0]["message"]["content"], said["text"], "{got}");
        // What claims to be large takes no memory: neither sides beyond all limits, nor pixels that are not there.
        let peak = peak_bytes(&serving);
        for (width, height) in [(1 << 31, 1 << 31), (16_384, 16_384), (16_000, 4_000), (4_000, 4_000)] {
            let got = ask(&pictures::png(width, height, None));
            assert!(got.starts_with("HTTP/1.1 400") && got.contains("image_invalid"), "{got}");
        }
        assert!(peak_bytes(&serving) - peak < 80 << 20, "{} {peak}", peak_bytes(&serving));
        serving.end().exits(0);
    }
}

/// What a process took at most, where the system says so.
fn peak_bytes(serving: &Serving) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", serving.child.id())).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.map_or(0, |line| line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10)
}

#[test]
fn what_does_not_fit_or_make_sense_is_refused() {
    let refused = |args: &[&str], environment: &[(&str, &str)], exit: i32, code: &str| {
        let model = data(TALES);
        let mut command = process("waste-serve");
        command.args([arg(&model), "--json"]).args(args).envs(environment.iter().copied());
        let error = Ran::from_output(command.output().unwrap()).error(exit, code);
        error["message"].as_str().unwrap().to_owned()
    };
    assert!(refused(&["--parallel", "0"], &[], 2, "usage").contains("1 to 16"));
    refused(&["--vision"], &[], 3, "no_vision");
    for args in [&["--max-patches", "64"][..], &["--allow-image-dir", "."]] {
        assert!(refused(args, &[], 2, "usage").contains("--vision"));
    }
    assert!(refused(&["--vision", "--max-patches", "3"], &[], 2, "usage").contains("4 to 1024"));
    refused(&["--parallel", "16", "--ctx", "1000000", "--budget", "64MiB"], &[], 4, "budget_below_floor");
    for (key, value) in
        [("WASTE_IO_DEPTH", "65"), ("WASTE_LOOKAHEAD", "x"), ("WASTE_THREADS", "0"), ("WASTE_BUDGET", "much")]
    {
        assert!(refused(&[], &[(key, value)], 2, "usage").contains(key));
    }
}

#[test]
fn what_would_let_everybody_in_is_refused() {
    let refused = |args: &[&str]| {
        let model = data(TALES);
        let args = [&[arg(&model), "--json"], args].concat();
        run("waste-serve", args).error(2, "usage")["message"].as_str().unwrap().to_owned()
    };
    assert!(refused(&["--host", "0.0.0.0"]).contains("--insecure"));
    assert!(refused(&["--cors-origin", "*"]).contains("API key"));
    let home = tempfile::tempdir().unwrap();
    let keys = home.path().join("keys");
    std::fs::write(&keys, "\n \n").unwrap();
    assert!(refused(&["--api-key-file", arg(&keys)]).contains("no key"));
}
