//! Sixteen clients for two minutes on a socket: nothing but answers and 429 or 503, flat memory, and every answer the
//! one it is alone. Takes three minutes; run by hand:
//! `cargo nextest run -p waste-serve --test soak --run-ignored all --no-capture`
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // helpers of tests are tests too

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use waste_tests::files::Model;
use waste_tests::tool::process;

const CLIENTS: usize = 16;
const QUESTIONS: usize = 24;
const TIME: Duration = Duration::from_secs(120);

/// Of every kind, some with long prompts, some that leave in the middle.
fn question(i: usize) -> Value {
    let text = format!("Tell me of number {i}. {}", "It was a fine day. ".repeat(i * 11 % 60));
    let mut body = json!({
        "model": "m", "messages": [{"role": "user", "content": text}], "seed": i, "temperature": 0.8,
        "max_tokens": 20 + i, "thinking": i % 5 == 0,
    });
    match i % 4 {
        1 => body["frequency_penalty"] = json!(0.6),
        2 => {
            let schema = json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]});
            body["response_format"] =
                json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": true}});
        }
        3 => {
            body["tools"] = json!([{"type": "function", "function": {"name": "tide_table"}}]);
            body["tool_choice"] = json!("required");
        }
        _ => (),
    }
    body
}

struct Serving {
    child: Child,
    address: String,
}

impl Serving {
    fn start(model: &Model) -> Serving {
        let mut command = process("waste-serve");
        command.args([model.arg(), "--port", "0", "--json", "--model-id", "m", "--ctx", "2048", "--threads", "2"]);
        command.args(["--parallel", "4", "--queue", "9", "-q"]).env_remove("WASTE_API_KEY");
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let ready: Value = serde_json::from_str(&line).unwrap();
        let address = ready["addr"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned();
        Serving { child, address }
    }

    fn send(&self, body: &Value) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
        let body = body.to_string();
        let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close";
        write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
        stream
    }

    /// Status, and the answer without what no two have in common.
    fn ask(&self, body: &Value) -> (u16, Value) {
        let mut text = String::new();
        self.send(body).read_to_string(&mut text).unwrap();
        let status = text[9..12].parse().unwrap();
        let mut answer: Value = serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap();
        let mut choice = answer["choices"][0].take();
        for call in choice["message"]["tool_calls"].as_array_mut().into_iter().flatten() {
            call["id"].take();
        }
        (status, choice)
    }

    fn resident_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

#[test]
#[ignore = "takes three minutes"]
fn sixteen_clients_for_two_minutes() {
    let model = Model::converted("models/k3-tales");
    let serving = Serving::start(&model);
    let questions: Vec<Value> = (0..QUESTIONS).map(question).collect();
    let alone: Vec<Value> = questions
        .iter()
        .map(|body| {
            let (status, answer) = serving.ask(body);
            assert_eq!(status, 200);
            answer
        })
        .collect();
    let counts = Mutex::new(BTreeMap::<String, u64>::new());
    let count = |what: &str| *counts.lock().unwrap().entry(what.to_owned()).or_default() += 1;
    let start = Instant::now();
    let early = std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (serving, questions, alone, count) = (&serving, &questions, &alone, &count);
            scope.spawn(move || {
                for turn in 0.. {
                    if start.elapsed() > TIME {
                        break;
                    }
                    let i = (client * 7 + turn * 5) % QUESTIONS;
                    if (client + turn) % 9 == 0 {
                        let mut body = questions[i].clone();
                        body["stream"] = true.into();
                        let mut some = [0; 700];
                        let _ = serving.send(&body).read(&mut some);
                        count("left");
                        continue;
                    }
                    let (status, answer) = serving.ask(&questions[i]);
                    count(&status.to_string());
                    match status {
                        200 => assert_eq!(answer, alone[i], "question {i}"),
                        429 | 503 => std::thread::sleep(Duration::from_millis(200)),
                        status => panic!("{status}"),
                    }
                }
            });
        }
        std::thread::sleep(Duration::from_secs(30));
        serving.resident_kib()
    });
    let late = serving.resident_kib();
    println!("{:?}; RSS {early} KiB at 30 s, {late} KiB at {:?}", counts.lock().unwrap(), start.elapsed());
    assert!(late < early + early / 20, "{early} KiB to {late} KiB");
    assert!(counts.lock().unwrap().get("200").is_some_and(|answers| *answers > 50));
    let Serving { mut child, .. } = serving;
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert!(child.wait().unwrap().success());
}
