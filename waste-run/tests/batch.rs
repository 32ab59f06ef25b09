//! `waste-run batch`: answers in a file, whatever happens on the way.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod util;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use util::*;
use waste_tests::files::data;
use waste_tests::tool::{Ran, arg, emulated, process, run};

struct Queue {
    dir: TempDir,
}

impl Queue {
    fn new(lines: &[Value]) -> Queue {
        let dir = tempfile::tempdir().unwrap();
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        fs::write(dir.path().join("in.jsonl"), text).unwrap();
        Queue { dir }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn args<'a>(&self, model: &'a Path, input: &'a Path, out: &'a Path) -> Vec<&'a str> {
        vec![
            "batch",
            arg(model),
            arg(input),
            "--out",
            arg(out),
            "--json",
            "--ctx",
            "600",
            "--temp",
            "0.8",
            "--seed",
            "9",
        ]
    }

    fn run(&self, out: &str) -> Ran {
        self.run_with(out, &[])
    }

    fn run_with(&self, out: &str, more: &[&str]) -> Ran {
        let (model, input, out) = (data(TALES), self.file("in.jsonl"), self.file(out));
        run("waste-run", [&self.args(&model, &input, &out), more].concat())
    }

    /// The answers, without the times they took.
    fn answers(&self, out: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.file(out)).unwrap();
        let answer = |line: &str| {
            let mut answer: Value = serde_json::from_str(line).unwrap();
            answer.as_object_mut().unwrap().remove("seconds");
            answer
        };
        text.lines().map(answer).collect()
    }
}

fn questions(count: usize, tokens: usize) -> Vec<Value> {
    let ask = |i: usize| {
        json!({
            "id": format!("q{i}"), "max_tokens": tokens,
            "messages": [{"role": "user", "content": format!("Tell me story number {i}.")}],
        })
    };
    (0..count).map(ask).collect()
}

#[test]
fn every_line_has_its_answer() {
    let mut lines = questions(2, 20);
    lines.push(json!({"id": "text", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "stop": "king"}));
    lines.push(json!({
        "id": "calm", "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}],
        "effort": "none", "max_tokens": 8, "seed": 4, "top_p": 0.9, "top_k": 5,
    }));
    let queue = Queue::new(&lines);
    let report = queue.run("out.jsonl").done().json("waste-run-batch/1");
    assert_eq!(
        (&report["items"], &report["answered"], &report["skipped"]),
        (&json!(4), &json!(4), &json!(0))
    );
    let answers = queue.answers("out.jsonl");
    let ids: Vec<&str> = answers.iter().map(|answer| answer["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["q0", "q1", "text", "calm"]);
    assert!(answers[0]["reasoning"].is_string() && answers[3].get("reasoning").is_none());
    assert_eq!(answers[3]["seed"], 4);
    let alone = with("", TALES, &["Once upon a time", "-n", "12", "--stop", "king", "-q", "--json"]);
    assert_eq!(answers[2]["text"], alone.done().json("waste-run/1")["text"]);

    // Nothing is asked again; what is new is added.
    let before = fs::read(queue.file("out.jsonl")).unwrap();
    let report = queue.run("out.jsonl").done().json("waste-run-batch/1");
    assert_eq!((&report["skipped"], &report["answered"]), (&json!(4), &json!(0)));
    assert_eq!(fs::read(queue.file("out.jsonl")).unwrap(), before);
    let mut input = fs::read_to_string(queue.file("in.jsonl")).unwrap();
    input += "\n{\"id\":\"new\",\"prompt\":\"And\",\"max_tokens\":2}";
    fs::write(queue.file("in.jsonl"), input).unwrap();
    queue.run("out.jsonl").done();
    assert_eq!(queue.answers("out.jsonl")[4]["id"], "new");
}

fn sorted(mut answers: Vec<Value>) -> Vec<Value> {
    answers.sort_by_key(|answer| answer["id"].as_str().unwrap().to_owned());
    answers
}

#[test]
fn a_kill_costs_one_answer_and_changes_none() {
    killed_and_gone_on("1");
}

#[test]
fn a_kill_of_several_at_a_time_changes_none() {
    killed_and_gone_on("3");
}

fn killed_and_gone_on(parallel: &str) {
    // Of different lengths, so that they do not end together.
    let mut lines = questions(if emulated() { 2 } else { 5 }, 40);
    for (i, line) in lines.iter_mut().enumerate() {
        line["max_tokens"] = json!(40 - 5 * i);
    }
    let queue = Queue::new(&lines);
    queue.run("whole.jsonl").done();
    let whole = queue.answers("whole.jsonl");
    let (model, input, out) = (data(TALES), queue.file("in.jsonl"), queue.file("out.jsonl"));
    let mut kills = 0;
    loop {
        let lines = || fs::read_to_string(&out).map_or(0, |text| text.lines().count());
        let (before, begun) = (lines(), Instant::now());
        let mut child = process("waste-run")
            .args(queue.args(&model, &input, &out))
            .args(["--parallel", parallel])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let ended = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break Some(status);
            }
            assert!(begun.elapsed() < Duration::from_secs(600));
            if lines() > before {
                child.kill().unwrap();
                child.wait().unwrap();
                break None;
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        match ended {
            Some(status) => {
                assert!(status.success());
                break;
            }
            None => kills += 1,
        }
        // As if it had been killed in the middle of a line.
        let mut torn = fs::read(&out).unwrap();
        torn.extend(b"{\"id\":\"q4\",\"te");
        fs::write(&out, torn).unwrap();
    }
    // Where a lock keeps readers out, nobody sees when an answer is there.
    assert!(kills > 0 || cfg!(windows));
    assert_eq!(sorted(queue.answers("out.jsonl")), whole);
}

#[test]
fn several_at_a_time_have_the_answers_they_have_alone() {
    let mut lines = questions(if emulated() { 3 } else { 6 }, 24);
    for (i, line) in lines.iter_mut().enumerate() {
        line["seed"] = json!(i);
        line["frequency_penalty"] = json!(0.3 * (i % 3) as f64);
        line["max_tokens"] = json!(9 * i);
        if i % 2 == 1 {
            line["messages"][0]["content"] = json!(format!("{i} {}", "And then? ".repeat(60)));
            line["stop"] = json!(" the");
        }
    }
    lines.insert(1, json!({"id": "long", "prompt": "word ".repeat(2000)}));
    let queue = Queue::new(&lines);
    queue.run("alone.jsonl").exits(1);
    let report = queue.run_with("out.jsonl", &["--parallel", "4"]).exits(1).json("waste-run-batch/1");
    assert_eq!((&report["refused"], &report["answered"]), (&json!(1), &json!(lines.len() - 1)));
    assert_eq!(sorted(queue.answers("out.jsonl")), sorted(queue.answers("alone.jsonl")));
    let too_many = queue.run_with("out.jsonl", &["--parallel", "17"]).error(2, "usage");
    assert!(too_many["message"].as_str().unwrap().contains("1 to 16"), "{too_many}");
    queue.run_with("other.jsonl", &["--parallel", "16", "--budget", "1MiB"]).error(4, "budget_below_floor");
}

#[test]
fn what_cannot_be_answered_is_said_in_its_place() {
    let mut lines = questions(1, 4);
    lines.insert(0, json!({"id": "long", "prompt": "word ".repeat(2000)}));
    let queue = Queue::new(&lines);
    let report = queue.run("out.jsonl").exits(1).json("waste-run-batch/1");
    assert_eq!((&report["refused"], &report["answered"]), (&json!(1), &json!(1)));
    let answers = queue.answers("out.jsonl");
    assert_eq!((&answers[0]["id"], &answers[0]["error"]["code"]), (&json!("long"), &json!("context_full")));
    assert_eq!(answers[1]["id"], "q0");
    queue.run("out.jsonl").done();
}

const SCHEMA: &str = r#"{"type":"object","properties":{"fox":{"enum":["red","grey"]},"age":{"type":"integer","minimum":0,
    "maximum":99}},"required":["fox","age"],"additionalProperties":false}"#;

fn is_a_fox(text: &Value) {
    let fox: Value = serde_json::from_str(text.as_str().unwrap()).unwrap();
    assert!(matches!(fox["fox"].as_str(), Some("red" | "grey")) && fox["age"].as_u64() < Some(100), "{fox}");
    assert_eq!(fox.as_object().unwrap().len(), 2);
}

/// Several at a time; one goes on with a text, at a temperature at which it would say anything.
#[test]
fn answers_keep_to_a_schema() {
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    let mut lines = questions(3, 500);
    lines[1]["response_format"] = json!({"type": "text"});
    lines[2]["response_format"] =
        json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 7}}});
    lines.push(json!({"id": "raw", "prompt": "Once", "temperature": 1.5, "response_format":
        {"type": "json_schema", "json_schema": {"schema": schema}}}));
    let queue = Queue::new(&lines);
    fs::write(queue.file("fox.json"), SCHEMA).unwrap();
    let form = queue.file("fox.json");
    for parallel in ["1", "3"] {
        queue.run_with(parallel, &["--json-schema", arg(&form), "--parallel", parallel]).done();
    }
    let answers = sorted(queue.answers("1"));
    assert_eq!(answers, sorted(queue.answers("3")));
    let of = |id: &str| answers.iter().find(|answer| answer["id"] == id).unwrap();
    for answer in [of("q0"), of("raw")] {
        is_a_fox(&answer["text"]);
        assert_eq!(answer["finish_reason"], "stop");
    }
    // Thinking is free, and what says otherwise is not held to it.
    assert!(!of("q0")["reasoning"].as_str().unwrap().is_empty());
    assert!(serde_json::from_str::<Value>(of("q1")["text"].as_str().unwrap()).is_err());
    assert_eq!(of("q2")["text"].as_str().unwrap().trim(), "7");
}

#[test]
fn wrong_lines_are_named_before_anything_is_done() {
    let sound = questions(1, 4).remove(0);
    for (wrong, why) in [
        (json!([1]), "object"),
        (json!({"prompt": "a"}), "id"),
        (json!({"id": "", "prompt": "a"}), "id"),
        (json!({"id": "a"}), "either"),
        (json!({"id": "a", "prompt": "a", "messages": []}), "either"),
        (json!({"id": "a", "prompt": 3}), "either"),
        (json!({"id": "a", "prompt": "a", "max_token": 3}), "max_token"),
        (json!({"id": "a", "prompt": "a", "temperature": 9}), "temperature"),
        (json!({"id": "a", "prompt": "a", "max_tokens": -1}), "max_tokens"),
        (json!({"id": "a", "prompt": "a", "stop": [""]}), "stop"),
        (json!({"id": "a", "messages": [{"role": "nobody"}]}), "role"),
        (json!({"id": "q0", "prompt": "a"}), "before"),
        (json!({"id": "a", "prompt": "a", "response_format": {"type": "xml"}}), "response_format"),
        (json!({"id": "a", "prompt": "a", "response_format": {"type": "json_schema"}}), "schema"),
        (
            json!({"id": "a", "prompt": "a", "response_format":
                {"type": "json_schema", "json_schema": {"schema": {"type": "number", "not": {}}}}}),
            "response_format",
        ),
        (json!({"id": "a", "messages": [{"role": "user", "content": "a"}], "effort": "much"}), "effort"),
    ] {
        let queue = Queue::new(&[sound.clone(), wrong.clone()]);
        let error = queue.run("out.jsonl").error(3, "invalid_batch");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("line 2") && message.contains(why), "{wrong}: {message}");
        assert!(!queue.file("out.jsonl").exists());
    }
}

#[test]
fn files_that_are_not_ours_are_left_alone() {
    let queue = Queue::new(&questions(1, 2));
    for content in ["my notes\nof today\n", "{\"id\": 3}\n", "{}\n"] {
        fs::write(queue.file("out.jsonl"), content).unwrap();
        queue.run("out.jsonl").error(3, "invalid_answers");
        assert_eq!(fs::read_to_string(queue.file("out.jsonl")).unwrap(), content);
    }
    let holder = fs::File::create(queue.file("held.jsonl")).unwrap();
    holder.lock().unwrap();
    queue.run("held.jsonl").error(6, "locked");
    drop(holder);
    queue.run("held.jsonl").done();
    queue.run("no/where.jsonl").error(3, "unwritable_file");
}
