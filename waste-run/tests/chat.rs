//! `waste-run chat` as a pipe sees it, and its signals.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod util;

use serde_json::Value;
use util::*;
use waste_tests::files::data;
use waste_tests::tool::{Ran, arg, tool};

/// Talks with a model: these lines, these arguments.
fn chat(model: &str, lines: &str, args: &[&str]) -> Ran {
    let model = data(model);
    Ran::of(tool("waste-run").args(["chat", arg(&model)]).args(args).write_stdin(lines))
}

/// The objects of a conversation with --json.
fn answers(ran: &Ran) -> Vec<Value> {
    let lines = ran.stdout.lines();
    let answers: Vec<Value> = lines.map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(answers.iter().all(|answer| answer["schema"] == "waste-run-chat/1"), "{answers:?}");
    answers
}

#[test]
fn stdout_carries_the_answers_and_nothing_else() {
    let lines = "Tell me a story.\r\n\n/stats\n/think\n/help\nAnother one.\n";
    let ran = chat(TALES, lines, &["-n", "40"]).done();
    assert_eq!(ran.stdout.lines().count(), 2, "{}", ran.stdout);
    assert!(ran.stdout.starts_with("There was once "), "{}", ran.stdout);
    assert!(!ran.stdout.contains('\x1b') && !ran.stdout.contains("The user"), "{}", ran.stdout);
    for said in ["context:", "answers: 1", "thinking is hidden", "/quit", "token limit"] {
        assert!(ran.stderr.contains(said), "{said}: {}", ran.stderr);
    }
    // The last line needs no end; what follows /quit is not read.
    let quiet = chat(TALES, "Tell me a story.\nAnother one.\n/quit\n\u{1}never", &["-n", "40", "-q"]).done();
    assert_eq!((quiet.stdout.as_str(), quiet.stderr.as_str()), (ran.stdout.as_str(), ""));
    assert_eq!(
        chat(TALES, "Tell me a story.", &["-n", "40", "-q"]).done().stdout,
        ran.stdout.lines().next().unwrap().to_owned() + "\n"
    );
    assert_eq!(chat(TALES, "", &["-q"]).done().stdout, "");
}

#[test]
fn json_is_an_object_an_answer() {
    let ran = chat(
        TALES,
        "Tell me a story.\nAnother one.\n/reset\nTell me a story.\n",
        &["-n", "30", "--json", "-q"],
    )
    .done();
    let answers = answers(&ran);
    assert_eq!(answers.len(), 3);
    for answer in &answers {
        has_keys(
            answer,
            &[
                "turn",
                "text",
                "reasoning",
                "finish_reason",
                "prompt_tokens",
                "tokens",
                "tokens_per_second",
                "seed",
            ],
        );
        has_keys(&answer["seconds"], &["prefill", "decode"]);
        assert_eq!((answer["finish_reason"].as_str(), answer["tokens"].as_u64()), (Some("length"), Some(30)));
        assert!(answer["reasoning"].as_str().unwrap().starts_with("The user wants a story."));
        assert!(answer["text"].as_str().unwrap().starts_with("There was once"));
    }
    // The second turn reads its own tokens alone; a new conversation begins as the first did.
    let tokens = |answer: &Value, key: &str| answer[key].as_u64().unwrap();
    assert_eq!(tokens(&answers[1], "reused_tokens"), tokens(&answers[0], "prompt_tokens") + 29);
    assert!(tokens(&answers[1], "prompt_tokens") < 60);
    assert_eq!(
        (&answers[2]["text"], &answers[2]["prompt_tokens"]),
        (&answers[0]["text"], &answers[0]["prompt_tokens"])
    );
}

#[test]
fn how_much_it_thinks() {
    let answer = |args: &[&str]| {
        let ran = chat(TALES, "Tell me a story.\n", &[args, &["-n", "40", "--json", "-q"]].concat()).done();
        answers(&ran).remove(0)
    };
    let (low, max) = (answer(&[]), answer(&["--effort", "max"]));
    assert_eq!(low["text"], answer(&["--effort", "low"])["text"]);
    assert!(low["reasoning_tokens"].as_u64() > Some(3) && max["reasoning_tokens"].as_u64() > Some(3));
    let none = answer(&["--no-thinking"]);
    assert_eq!((none["reasoning"].as_str(), none["reasoning_tokens"].as_u64()), (Some(""), Some(0)));
    assert!(none["prompt_tokens"].as_u64() < low["prompt_tokens"].as_u64());
    assert_eq!(none["text"], answer(&["--effort", "none"])["text"]);
    let little = answer(&["--max-think", "3"]);
    assert_eq!(little["reasoning_tokens"], 3);
    assert!(low["reasoning"].as_str().unwrap().starts_with(little["reasoning"].as_str().unwrap()));
    assert!(!little["text"].as_str().unwrap().is_empty());
    assert_eq!(answer(&["--max-think", "0"])["reasoning"], "");
    for wrong in [&["--no-thinking", "--max-think", "3"][..], &["--effort", "none", "--max-think", "3"]] {
        chat(TALES, "", &[wrong, &["--json"]].concat()).error(2, "usage");
    }
    chat(TALES, "", &["--effort", "medium"]).exits(2);
}

#[test]
fn the_system_message() {
    let prompt = |lines: &str, args: &[&str]| {
        let ran = chat(TALES, lines, &[args, &["-n", "4", "--json", "-q", "--no-thinking"]].concat()).done();
        answers(&ran).last().unwrap()["prompt_tokens"].as_u64().unwrap()
    };
    let plain = prompt("Hello.\n", &[]);
    let told = prompt("Hello.\n", &["--system", "Be brief."]);
    assert!(told > plain);
    assert_eq!(prompt("/system Be brief.\nHello.\n", &[]), told);
    assert_eq!(prompt("Hello.\n/reset\nHello.\n", &["--system", "Be brief."]), told);
    let shown = chat(TALES, "/system\n/system Be kind.\n/system\n", &[]).done();
    assert!(shown.stderr.contains("there is no system message") && shown.stderr.contains("is: Be kind."));
}

#[test]
fn a_kept_conversation_goes_on_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("talk.session");
    let file = arg(&file);
    let options = ["-n", "30", "--json", "-q", "--system", "Be kind.", "--temp", "0.7", "--seed", "5"];
    let whole = chat(TALES, "Tell me a story.\nAnother one.\n", &options).done();
    let first = chat(TALES, &format!("Tell me a story.\n/save {file}\n"), &options).done();
    let options = ["-n", "30", "--json", "-q", "--temp", "0.7", "--seed", "5"];
    let second = chat(TALES, &format!("Forget this.\n/load {file}\nAnother one.\n"), &options).done();
    let (whole, first, second) = (answers(&whole), answers(&first), answers(&second));
    assert_eq!(first[0]["text"], whole[0]["text"]);
    for key in ["text", "reasoning", "prompt_tokens", "reused_tokens", "context_tokens"] {
        assert_eq!(second[1][key], whole[1][key], "{key}");
    }
    // What is there stays if the file cannot be used.
    std::fs::write(dir.path().join("bad.session"), b"WSES and no more").unwrap();
    let bad = dir.path().join("bad.session");
    chat(TALES, &format!("/load {}\n", arg(&bad)), &["--json"]).exits(3);
    chat(TALES, &format!("/load {}\n", arg(&dir.path().join("none"))), &["--json"]).error(3, "no_session");
    chat(TALES, &format!("/load {file}\n"), &["--kv", "f32", "--json"]).exits(3);
    chat(CONTAINER, &format!("/load {file}\n"), &["--raw", "--json"]).exits(3);
    chat(TALES, &format!("/save {}\n", arg(&dir.path().join("no/where"))), &["--json"]).exits(3);
}

#[test]
fn the_context_is_told_of_before_it_bites() {
    // The prompt fits, and the answer fills what is left.
    let ran = chat(TALES, "Tell me a story.\nAnother one.\n", &["--ctx", "170", "--json"]).exits(3);
    let lines = answers(&ran);
    assert_eq!(lines[0]["finish_reason"], "length");
    assert_eq!((lines[1]["error"]["code"].as_str(), lines.len()), (Some("context_full"), 2));
    assert!(ran.stderr.contains("stopped because the context (--ctx) is full"), "{}", ran.stderr);
    assert!(ran.stderr.contains("the context is 100 % full (170 of 170 tokens)"), "{}", ran.stderr);
    chat(TALES, "Tell me a story.\n", &["--ctx", "100", "--json"]).error(3, "context_full");
    let roomy = chat(TALES, "Tell me a story.\n", &["--ctx", "4096", "-n", "20"]).done();
    assert!(!roomy.stderr.contains("full"), "{}", roomy.stderr);
}

#[test]
fn without_a_format_it_goes_on_with_the_text() {
    let ran = chat(TALES, "Once upon a time\n and then\n", &["--raw", "-n", "12", "-q", "--json"]).done();
    let first = with("", TALES, &["Once upon a time", "-n", "12", "-q", "--json"]).done().json("waste-run/1");
    let answers = answers(&ran);
    assert_eq!(
        (&answers[0]["text"], &answers[0]["prompt_tokens"]),
        (&first["text"], &first["prompt_tokens"])
    );
    assert!(answers[1]["prompt_tokens"].as_u64().unwrap() < 6);

    // A model with neither markers nor chat.json.
    let model = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(data(CONTAINER)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, model.path().join(path.file_name().unwrap())).unwrap();
    }
    std::fs::write(
        model.path().join("specials.json"),
        r#"[{"id":394,"text":"[BOS]"},{"id":395,"text":"[EOS]"},{"id":396,"text":"<|end|>"}]"#,
    )
    .unwrap();
    let model = arg(model.path());
    chat(model, "hello\n", &["--json"]).error(3, "unsupported_chat_format");
    chat(model, "hello\n", &["--raw", "-n", "4"]).done();
    let file = r#"{"user":["Q: ","\n"],"assistant":["A: ","<|end|>"],"open":"A: "}"#;
    std::fs::write(std::path::Path::new(model).join("chat.json"), file).unwrap();
    chat(model, "hello\n", &["-n", "4"]).done();
    for asked in [&["--effort", "low"], &["--max-think", "3"]] {
        chat(model, "", &[asked, &["--json"][..]].concat()).error(2, "usage");
    }
    std::fs::write(std::path::Path::new(model).join("chat.json"), file.replace("<|end|>", "<|fin|>"))
        .unwrap();
    let refused = chat(model, "hello\n", &["--json"]).error(3, "invalid_chat_format");
    assert!(refused["message"].as_str().unwrap().contains("<|fin|>"));
}

#[test]
fn what_cannot_be_is_refused() {
    chat(TALES, "/nope\n", &["--json"]).error(2, "usage");
    assert!(!chat(TALES, "//nope\n", &["-n", "4", "-q"]).done().stdout.is_empty());
    chat(TALES, "", &["--temp", "9", "--json"]).error(2, "invalid_sampling_option");
    chat(TALES, "", &["--stop", "", "--json"]).error(2, "invalid_stop_string");
    chat(TALES, "", &["--raw", "--effort", "low"]).exits(2);
    let ran = Ran::of(tool("waste-run").args(["chat", "-", "--json"]).write_stdin("{}"));
    ran.error(2, "usage");
    let model = data(TALES);
    let ran =
        Ran::of(tool("waste-run").args(["chat", arg(&model), "--json"]).write_stdin(&b"a\nb\xff\n"[..]));
    assert!(ran.exits(3).stdout.contains("\"invalid_utf8\""));
}

#[test]
fn a_stop_string_ends_an_answer_and_not_its_thinking() {
    let ran = chat(TALES, "Tell me a story.\n", &["--stop", "story", "--stop", "who", "--json", "-q"]).done();
    let answer = answers(&ran).remove(0);
    assert!(answer["reasoning"].as_str().unwrap().contains("story"));
    assert_eq!(answer["finish_reason"], "stop");
    assert!(answer["text"].as_str().unwrap().starts_with("There was once a "));
    assert!(!answer["text"].as_str().unwrap().contains("who"));
}

#[cfg(unix)]
mod signals {
    use std::io::{Read, Write};
    use std::process::{Child, Stdio};
    use std::sync::{Arc, Mutex};
    use std::time::{Duration, Instant};

    use rustix::process::{Pid, Signal, kill_process};
    use waste_tests::tool::process;

    use super::*;

    /// A conversation whose answers would not end before the context does.
    fn endless() -> Child {
        let model = data(TALES);
        process("waste-run")
            .args(["chat", arg(&model), "--raw", "--ctx", "60000"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn signal(child: &Child, signal: Signal) {
        kill_process(Pid::from_child(child), signal).unwrap();
    }

    fn wait(child: &mut Child) -> Option<i32> {
        let begun = Instant::now();
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return status.code();
            }
            assert!(begun.elapsed() < Duration::from_secs(120), "it goes on");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// What a pipe has carried so far.
    #[derive(Clone, Default)]
    struct Heard(Arc<Mutex<Vec<u8>>>);

    impl Heard {
        fn of(mut pipe: impl Read + Send + 'static) -> Heard {
            let heard = Heard::default();
            let bytes = heard.0.clone();
            std::thread::spawn(move || {
                let mut piece = [0; 4096];
                while let Ok(length @ 1..) = pipe.read(&mut piece) {
                    bytes.lock().unwrap().extend(&piece[..length]);
                }
            });
            heard
        }

        fn text(&self) -> String {
            String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
        }

        fn wait(&self, what: impl Fn(&str) -> bool) {
            let begun = Instant::now();
            while !what(&self.text()) {
                assert!(begun.elapsed() < Duration::from_secs(120), "{}", self.text());
                std::thread::sleep(Duration::from_millis(10));
            }
        }

        /// Waits until nothing comes any more; says how much came.
        fn settle(&self) -> usize {
            let mut length = self.text().len();
            loop {
                std::thread::sleep(Duration::from_millis(500));
                let now = self.text().len();
                if now == length {
                    return length;
                }
                length = now;
            }
        }
    }

    #[test]
    fn ctrl_c_stops_an_answer_and_not_the_program() {
        let mut child = endless();
        let mut stdin = child.stdin.take().unwrap();
        let stdout = Heard::of(child.stdout.take().unwrap());
        let stderr = Heard::of(child.stderr.take().unwrap());
        let mut before = 0;
        for answers in ["answers: 1,", "answers: 2,"] {
            stdin.write_all(b"Once upon a time\n").unwrap();
            stdout.wait(|text| text.len() > before + 40);
            signal(&child, Signal::INT);
            stdin.write_all(b"/stats\n").unwrap();
            stderr.wait(|text| text.contains(answers));
            before = stdout.settle();
        }
        drop(stdin);
        assert_eq!(wait(&mut child), Some(0));
        assert!(stdout.text().ends_with('\n'));
        assert_eq!(stderr.text().matches("stopped because interrupted").count(), 2, "{}", stderr.text());
    }

    #[test]
    fn sigterm_ends_the_program() {
        let mut child = endless();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(b"Once upon a time\n").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0; 40]).unwrap();
        signal(&child, Signal::TERM);
        let mut rest = Vec::new();
        child.stdout.take().unwrap().read_to_end(&mut rest).unwrap();
        assert_eq!(wait(&mut child), Some(130));
    }

    #[test]
    fn ctrl_c_between_answers_ends_the_program() {
        let mut child = endless();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(b"/system\n").unwrap();
        let mut stderr = child.stderr.take().unwrap();
        let mut said = Vec::new();
        while !String::from_utf8_lossy(&said).contains("no system message") {
            let mut byte = [0];
            stderr.read_exact(&mut byte).unwrap();
            said.push(byte[0]);
        }
        signal(&child, Signal::INT);
        assert_eq!(wait(&mut child), Some(130));
    }
}

/// In each turn, thinking or not, and without a chat format; thinking itself is free, and at its limit it is ended.
#[test]
fn answers_keep_to_a_schema_or_a_grammar() {
    let dir = tempfile::tempdir().unwrap();
    let (schema, grammar) = (dir.path().join("schema.json"), dir.path().join("grammar.lark"));
    std::fs::write(&schema, r#"{"enum":["a fox","an owl"]}"#).unwrap();
    std::fs::write(&grammar, "start: \"It was \" /[a-z]{3,9}/ \".\"").unwrap();
    let wild = ["--temp", "1.2", "--seed", "3", "-n", "200", "--json", "-q"];
    let json = ["--json-schema", arg(&schema)];
    let lines = "Who was it?\nAnd who else?\n";
    for (args, thinks) in [(&["--max-think", "30"][..], true), (&["--no-thinking"], false)] {
        let found = answers(&chat(TALES, lines, &[&wild[..], &json, args].concat()).done());
        assert_eq!(found.len(), 2);
        for answer in found {
            assert!(matches!(answer["text"].as_str(), Some("\"a fox\"" | "\"an owl\"")), "{answer}");
            assert_eq!(answer["finish_reason"], "stop", "{answer}");
            assert_eq!(!answer["reasoning"].as_str().unwrap().is_empty(), thinks, "{answer}");
        }
    }
    for args in [&["--raw"][..], &["--no-thinking"], &["--raw", "--stop", ".\n"]] {
        let args = [&wild[..], &["--grammar", arg(&grammar)], args].concat();
        for answer in answers(&chat(TALES, lines, &args).done()) {
            let text = answer["text"].as_str().unwrap();
            let word = text.strip_prefix("It was ").and_then(|text| text.strip_suffix('.')).unwrap_or("");
            assert!(
                (3..=9).contains(&word.len()) && word.bytes().all(|b| b.is_ascii_lowercase()),
                "{answer}"
            );
        }
    }
    chat(TALES, "", &["--json-schema", arg(&grammar), "--json"]).error(3, "unsupported_schema");
}
