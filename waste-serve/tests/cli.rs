//! The tool with a socket: from its start to a signal.
#![cfg(unix)]
#![allow(clippy::unwrap_used)] // helpers of tests are tests too

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use waste_tests::files::data;
use waste_tests::tool::{Ran, arg, process, run};

const TALES: &str = "models/k3-tales";

struct Serving {
    child: Child,
    address: String,
}

impl Serving {
    fn start(args: &[&str]) -> Serving {
        let mut command = process("waste-serve");
        command.args([arg(&data(TALES)), "--port", "0", "--json"]).args(args).env_remove("WASTE_API_KEY");
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        let ready: Value = serde_json::from_str(&line).unwrap_or_else(|error| {
            let mut stderr = String::new();
            child.stderr.as_mut().unwrap().read_to_string(&mut stderr).unwrap();
            panic!("{error}: {line:?} {stderr}")
        });
        assert_eq!((&ready["schema"], &ready["event"]), (&json!("waste-serve/1"), &json!("ready")));
        let address = ready["addr"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned();
        Serving { child, address }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// Sends a request and reads until the server closes.
    fn ask(&self, head: &str, body: &str) -> String {
        let mut stream = self.connect();
        let length = body.len();
        let host = "host: localhost\r\nconnection: close";
        write!(stream, "{head} HTTP/1.1\r\n{host}\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    fn end(self) -> Ran {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        Ran::from_output(self.child.wait_with_output().unwrap())
    }
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
    let serving = Serving::start(&["--ctx", "512", "--threads", "2"]);
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
    let serving = Serving::start(&["--script", arg(&script), "--drain-timeout", "0.2"]);
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
