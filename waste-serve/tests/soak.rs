//! Sixteen clients for two minutes on a socket: nothing but answers and 429 or 503, flat memory, and every answer the
//! one it is alone. Takes three minutes; run by hand:
//! `cargo nextest run -p waste-serve --test soak --run-ignored all --no-capture`
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // helpers of tests are tests too

#[path = "util/serving.rs"]
mod serving;

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use serving::Serving;
use waste_tests::files::Model;

const CHAT: &str = "POST /v1/chat/completions";
const CLIENTS: usize = 16;
const QUESTIONS: usize = 24;
const TIME: Duration = Duration::from_secs(120);

/// Of every kind, some with long prompts, some that leave in the middle.
fn question(i: usize) -> Value {
    let text = format!("Tell me of number {i}. {}", "It was a fine day. ".repeat(i * 11 % 60));
    let mut body = json!({
        "model": "m", "messages": [{"role": "user", "content": text}], "seed": i, "temperature": 0.8,
        "max_tokens": 20 + i, "thinking": i.is_multiple_of(5),
    });
    match i % 4 {
        1 => body["frequency_penalty"] = json!(0.6),
        2 => {
            let schema = json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]});
            body["response_format"] = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": true}});
        }
        3 => {
            body["tools"] = json!([{"type": "function", "function": {"name": "tide_table"}}]);
            body["tool_choice"] = json!("required");
        }
        _ => (),
    }
    body
}

/// Status, and the answer without what no two have in common.
fn ask(serving: &Serving, body: &Value) -> (u16, Value) {
    let text = serving.ask(CHAT, &body.to_string());
    let status = text[9..12].parse().unwrap();
    let mut answer: Value = serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap();
    // An error has none.
    let mut choice = answer.pointer_mut("/choices/0").map(Value::take).unwrap_or_default();
    let calls = choice.pointer_mut("/message/tool_calls").and_then(Value::as_array_mut);
    calls.into_iter().flatten().for_each(|call| drop(call["id"].take()));
    (status, choice)
}

fn resident_kib(serving: &Serving) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", serving.child.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
#[ignore = "takes three minutes"]
fn sixteen_clients_for_two_minutes() {
    let model = Model::converted("models/k3-tales");
    let args =
        ["--model-id", "m", "--ctx", "2048", "--threads", "2", "--parallel", "4", "--queue", "9", "-q"];
    let serving = Serving::start(model.arg(), &args);
    let questions: Vec<Value> = (0..QUESTIONS).map(question).collect();
    let alone: Vec<Value> = questions
        .iter()
        .map(|body| {
            let (status, answer) = ask(&serving, body);
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
                for turn in 0usize.. {
                    if start.elapsed() > TIME {
                        break;
                    }
                    let i = (client * 7 + turn * 5) % QUESTIONS;
                    if (client + turn).is_multiple_of(9) {
                        let mut body = questions[i].clone();
                        body["stream"] = true.into();
                        let mut some = [0; 700];
                        let _ = serving.send(CHAT, &body.to_string()).read(&mut some);
                        count("left");
                        continue;
                    }
                    let (status, answer) = ask(serving, &questions[i]);
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
        resident_kib(&serving)
    });
    let late = resident_kib(&serving);
    println!("{:?}; RSS {early} KiB at 30 s, {late} KiB at {:?}", counts.lock().unwrap(), start.elapsed());
    assert!(late < early + early / 20, "{early} KiB to {late} KiB");
    assert!(counts.lock().unwrap().get("200").is_some_and(|answers| *answers > 50));
    serving.end().exits(0);
}
