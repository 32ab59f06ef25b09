//! The tool as a shell or a script sees it.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

use std::collections::HashSet;

use serde_json::{Value, json};
use waste_tests::files::{Model, data, json};
use waste_tests::logits::{Tensors, worst_row};
use waste_tests::tool::{Ran, arg, run, tool};

const TALES: &str = "models/k3-tales";
const GOLDEN: &str = "golden/tiny-k3/ckpt";
const CONTAINER: &str = "interop/tiny-k3.waste";

/// `waste-run` with a subcommand or none, a model of ours, and further arguments.
fn with(command: &str, model: &str, args: &[&str]) -> Ran {
    let model = data(model);
    let command = Some(command).filter(|command| !command.is_empty());
    run("waste-run", command.into_iter().chain([arg(&model)]).chain(args.iter().copied()))
}

/// What is written after a prompt.
fn text(model: &str, args: &[&str]) -> String {
    with("", model, args).done().stdout
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn list(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[track_caller]
fn has_keys(value: &Value, wanted: &[&str]) {
    for key in wanted {
        assert!(value.get(key).is_some_and(|value| !value.is_null()), "{key}: {value}");
    }
}

// Streams and JSON

#[test]
fn stdout_carries_the_text_and_nothing_else() {
    let ran = with("", TALES, &["Once upon a time", "-n", "12"]).done();
    assert!(ran.stdout.starts_with(" there was a ") && ran.stdout.ends_with('\n'), "{:?}", ran.stdout);
    assert!(ran.stderr.contains("budget") && ran.stderr.contains("12 tokens"), "{}", ran.stderr);
    assert!(!ran.stderr.contains("there was a"));
    let quiet = with("", TALES, &["Once upon a time", "-n", "12", "-q"]).done();
    assert_eq!((quiet.stdout.as_str(), quiet.stderr.as_str()), (ran.stdout.as_str(), ""));
    let json = with("", TALES, &["Once upon a time", "-n", "12", "--json"]).done().json("waste-run/1");
    assert_eq!(json["text"], ran.stdout.trim_end_matches('\n'));
}

#[test]
fn a_run_reports_its_stable_keys() {
    for model in [TALES, GOLDEN, CONTAINER] {
        let report = with("", model, &["hello", "-n", "5", "--json", "--threads", "2"]).done();
        let report = report.json("waste-run/1");
        has_keys(
            &report,
            &[
                "text",
                "prompt_tokens",
                "tokens",
                "finish_reason",
                "seconds",
                "tokens_per_second",
                "expert_hits",
                "expert_misses",
                "bytes_read",
                "direct_io",
                "kernel",
                "budget_bytes",
            ],
        );
        assert_eq!(report["peak_rss_bytes"].is_u64(), cfg!(target_os = "linux"), "{report}");
        has_keys(&report["seconds"], &["load", "prefill", "decode"]);
        assert!(report["bytes_read"].as_u64().unwrap() > 0 && report["expert_misses"].as_u64().unwrap() > 0);
        assert_eq!(ids(&report["ids"]).len() as u64, report["tokens"].as_u64().unwrap());
    }
}

#[test]
fn the_subcommands_report_their_stable_keys() {
    let eval = with("eval", CONTAINER, &["hello", "--top", "3", "--json"]).done().json("waste-run-eval/1");
    assert_eq!(keys(&eval)[..4], ["schema", "prompt_tokens", "vocab", "top"]);
    let top = eval["top"].as_array().unwrap();
    assert_eq!((top.len(), &eval["vocab"]), (3, &json!(650)));
    top.iter().for_each(|candidate| assert_eq!(keys(candidate), ["id", "text", "logit", "prob"]));
    assert!(top[0]["prob"].as_f64() > top[1]["prob"].as_f64());
    let all = with("eval", CONTAINER, &["hello", "--top", "1000", "--json"]).done().json("waste-run-eval/1");
    let sum: f64 = all["top"].as_array().unwrap().iter().map(|c| c["prob"].as_f64().unwrap()).sum();
    assert!((sum - 1.0).abs() < 1e-9, "{sum}");

    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("text.txt");
    std::fs::write(&file, "The router picks a few experts.").unwrap();
    let perplexity = with("perplexity", CONTAINER, &["--file", arg(&file), "--bos", "--json"]).done();
    let perplexity = perplexity.json("waste-run-perplexity/1");
    has_keys(&perplexity, &["tokens", "bytes", "nll", "ppl", "bits_per_byte"]);
    let number = |key: &str| perplexity[key].as_f64().unwrap();
    assert_eq!(number("bytes"), 31.0);
    assert!((number("ppl") - number("nll").exp()).abs() < 1e-6 * number("ppl"));
    let bits = number("nll") * number("tokens") / 31.0 / std::f64::consts::LN_2;
    assert!((number("bits_per_byte") - bits).abs() < 1e-9);

    let tokens = with("tokenize", CONTAINER, &["hello", "--json"]).done().json("waste-run-tokenize/1");
    assert_eq!(keys(&tokens)[..3], ["schema", "n", "ids"]);
    assert_eq!(tokens["n"].as_u64().unwrap() as usize, ids(&tokens["ids"]).len());
    let back = with("detokenize", CONTAINER, &["--ids", &list(&ids(&tokens["ids"])), "--json"]).done();
    assert_eq!(back.json("waste-run-detokenize/1")["text"], "hello");

    for (model, kind) in [(CONTAINER, "container"), (GOLDEN, "checkpoint")] {
        let info = with("info", model, &["--json"]).done().json("waste-run-info/1");
        assert_eq!((&info["arch"], &info["kind"]), (&json!("kimi-k3"), &json!(kind)));
        assert_eq!(info["vision"], true);
        assert!(info[kind].as_str().unwrap().ends_with(model));
        for (key, value) in [("layers", 7), ("kda_layers", 5), ("mla_layers", 2), ("moe_layers", 6)] {
            assert_eq!(info[key], value, "{key}");
        }
        assert!(with("info", model, &[]).done().stdout.contains("18 a layer, 4 a token"));
    }
    let info = with("info", CONTAINER, &["--json"]).done().json("waste-run-info/1");
    assert!(
        info["quantization"].as_str().unwrap().contains("VQ3R") && info["record_bytes"] == 12288,
        "{info}"
    );
}

// Where the prompt comes from

#[test]
fn a_prompt_comes_from_argument_file_or_stdin() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("prompt.txt");
    std::fs::write(&file, "There was once").unwrap();
    let args = ["-n", "8", "-q", "--json"];
    let model = data(TALES);
    let piped = |dash: &[&str], stdin: &str| {
        let stdin = stdin.to_owned();
        Ran::of(tool("waste-run").arg(arg(&model)).args(dash).args(args).write_stdin(stdin)).done()
    };
    let texts = [
        with("", TALES, &[&["There was once"], &args[..]].concat()),
        with("", TALES, &[&["--file", arg(&file)], &args[..]].concat()),
        piped(&[], "There was once"),
        piped(&["-"], "There was once"),
    ]
    .map(|ran| ran.done().json("waste-run/1"));
    for other in &texts[1..] {
        assert_eq!(
            (&other["text"], &other["prompt_tokens"]),
            (&texts[0]["text"], &texts[0]["prompt_tokens"])
        );
    }
    // A final line end is part of the text.
    let longer = piped(&[], "There was once\n").json("waste-run/1");
    assert_eq!(longer["prompt_tokens"].as_u64(), texts[0]["prompt_tokens"].as_u64().map(|n| n + 1));
    std::fs::write(&file, "There was once\n").unwrap();
    let from_file = with("", TALES, &["--file", arg(&file), "-n", "8", "--json"]).done().json("waste-run/1");
    assert_eq!(
        (&from_file["text"], &from_file["prompt_tokens"]),
        (&longer["text"], &longer["prompt_tokens"])
    );
    let both = with("", TALES, &["text", "--file", arg(&file), "--json"]);
    both.error(2, "usage");
}

#[test]
fn a_text_that_is_no_utf8_is_refused() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("prompt.txt");
    std::fs::write(&file, b"ab\xff").unwrap();
    for command in ["", "eval", "tokenize"] {
        let error = with(command, CONTAINER, &["--file", arg(&file), "--json"]).error(3, "invalid_utf8");
        assert!(error["message"].as_str().unwrap().contains("byte 2"), "{error}");
    }
    let model = data(CONTAINER);
    let piped = Ran::of(tool("waste-run").args([arg(&model), "--json"]).write_stdin(&b"\x80"[..]));
    piped.error(3, "invalid_utf8");
    with("", CONTAINER, &["--file", arg(&home.path().join("none")), "--json"]).error(3, "unreadable_file");
}

#[test]
fn a_text_follows_bos_and_ids_are_taken_as_they_are() {
    let top = |args: &[&str]| {
        let report = with("eval", CONTAINER, &[args, &["--json", "--top", "2"]].concat()).done();
        let report = report.json("waste-run-eval/1");
        (report["prompt_tokens"].as_u64().unwrap(), report["top"].clone())
    };
    let plain = with("tokenize", CONTAINER, &["hello", "--json"]).done().json("waste-run-tokenize/1");
    let plain = ids(&plain["ids"]);
    let bos: Vec<u32> = [394].into_iter().chain(plain.iter().copied()).collect();
    assert_eq!(top(&["hello"]), top(&["--ids", &list(&bos)]));
    assert_eq!(top(&["hello", "--no-bos"]), top(&["--ids", &list(&plain)]));
    assert_ne!(top(&["hello"]).1, top(&["hello", "--no-bos"]).1);
    // The names of special tokens are plain text in a prompt.
    assert!(top(&["[BOS]"]).0 > 2);
    let run = |args: &[&str]| {
        let report = with("", CONTAINER, &[args, &["--json", "-n", "3"]].concat()).done().json("waste-run/1");
        (report["prompt_tokens"].clone(), report["ids"].clone())
    };
    assert_eq!(run(&["hello"]), run(&["--ids", &list(&bos)]));
    assert_eq!(run(&["hello", "--no-bos"]), run(&["--ids", &list(&plain)]));
    with("", CONTAINER, &["", "--no-bos", "--json"]).exits(2);
    with("eval", CONTAINER, &["", "--no-bos", "--json"]).exits(2);
}

// Numbers

#[test]
fn saved_logits_are_those_of_the_reference() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("logits.safetensors");
    for (model, golden) in [
        ("golden/tiny-k3/ckpt", "golden/tiny-k3/text.safetensors"),
        ("golden/tiny-linear/ckpt", "golden/tiny-linear/text.safetensors"),
        ("interop/tiny-k3.waste", "interop/tiny-k3.logits.safetensors"),
        ("interop/tiny-linear.waste", "interop/tiny-linear.logits.safetensors"),
    ] {
        let golden = Tensors::open(&data(golden));
        let (shape, expected) = golden.get("logits_f64");
        let wanted: Vec<u32> = golden.get("ids").1.iter().map(|&id| id as u32).collect();
        let args = ["--ids", &list(&wanted), "--save-logits", arg(&file), "--json"];
        let report = with("eval", model, &args).done().json("waste-run-eval/1");
        let saved = Tensors::open(&file);
        let (found_shape, found) = saved.get("logits");
        assert_eq!(found_shape, shape, "{model}");
        assert_eq!(saved.get("ids"), golden.get("ids"), "{model}");
        let worst = worst_row(&found, &expected, shape[1]);
        assert!(worst <= 3e-5, "{model}: {worst:e}");
        // What is printed is the last row.
        let best = report["top"][0]["id"].as_u64().unwrap() as usize;
        let last = &found[found.len() - shape[1]..];
        assert_eq!(report["top"][0]["logit"].as_f64().unwrap() as f32, last[best] as f32);
    }
}

#[test]
fn greedy_text_is_that_of_the_reference() {
    let meta = json("interop/meta.json");
    for name in ["tiny-k3", "tiny-linear"] {
        let prompt = list(&ids(&meta[name]["ids"]));
        let expected = ids(&meta[name]["greedy"]);
        let n = expected.len().to_string();
        let args = ["--ids", &prompt, "-n", &n, "--no-mask", "--json"];
        let report = with("", &format!("interop/{name}.waste"), &args).done().json("waste-run/1");
        assert_eq!(ids(&report["ids"]), expected, "{name}");
    }
}

#[test]
fn a_prompt_may_be_longer_than_8192_tokens() {
    let model = data(CONTAINER);
    let prompt = "a few experts ".repeat(1650);
    let args = ["--ctx", "16384", "-n", "2", "--json"];
    let report = Ran::of(tool("waste-run").arg(arg(&model)).args(args).write_stdin(prompt)).done();
    let report = report.json("waste-run/1");
    assert!(report["prompt_tokens"].as_u64().unwrap() > 8192, "{report}");
    assert_eq!((&report["tokens"], &report["ctx"]), (&json!(2), &json!(16384)));
}

// Tokens

#[test]
fn special_tokens_are_recognised_with_markup_only() {
    let tokens = |args: &[&str]| -> Vec<u32> {
        let words = with("tokenize", CONTAINER, args).done().stdout;
        words.split_whitespace().map(|id| id.parse().unwrap()).collect()
    };
    assert_eq!(tokens(&["<|open|>x<|close|>", "--markup"]), [397, 120, 398]);
    let content = tokens(&["<|open|>x<|close|>"]);
    assert!(content.len() > 3 && !content.iter().any(|id| (394..650).contains(id)), "{content:?}");
    let back = with("detokenize", CONTAINER, &["--ids", &list(&content)]).done().stdout;
    assert_eq!(back, "<|open|>x<|close|>");
    assert_eq!(with("detokenize", CONTAINER, &["--ids", "397,120"]).done().stdout, "<|open|>x");
    assert_eq!(tokens(&[""]), [0u32; 0]);
}

#[test]
fn ids_are_read_strictly() {
    let model = data(CONTAINER);
    let piped = |stdin: &'static str| {
        Ran::of(tool("waste-run").args(["detokenize", arg(&model), "--json"]).write_stdin(stdin))
    };
    assert_eq!(piped("104 105\n,33").done().json("waste-run-detokenize/1")["text"], "hi!");
    for wrong in ["x", "104 -1", "1.0", "99999999999"] {
        piped(wrong).error(3, "invalid_ids");
    }
    for command in ["", "eval", "detokenize"] {
        for wrong in ["1,x", "1,-2", "4294967296"] {
            with(command, CONTAINER, &["--ids", wrong, "--json"]).error(2, "usage");
        }
    }
    for command in ["", "eval"] {
        let error = with(command, CONTAINER, &["--ids", "1,650", "--json"]).error(3, "token_out_of_range");
        assert!(error["message"].as_str().unwrap().contains("650"), "{error}");
    }
    assert_eq!(with("detokenize", CONTAINER, &["--ids", "700", "--json"]).exit, Some(3));
}

#[test]
fn without_a_tokenizer_ids_are_evaluated() {
    let model = Model::copy(CONTAINER);
    std::fs::remove_file(model.path("tokenizer.model")).unwrap();
    let run = |args: &[&str]| run("waste-run", args.iter().copied().chain(["--json"]));
    let bare = run(&["eval", model.arg(), "--ids", "394,104"]).done().json("waste-run-eval/1");
    let full = with("eval", CONTAINER, &["--ids", "394,104", "--json"]).done().json("waste-run-eval/1");
    assert_eq!(bare["top"][0]["logit"], full["top"][0]["logit"]);
    run(&["info", model.arg()]).done();
    for args in [&["eval", model.arg(), "hi"][..], &[model.arg(), "hi"]] {
        let ran = run(args).exits(3);
        assert!(ran.stderr.contains("tokenizer"), "{}", ran.stderr);
    }
}

#[test]
fn without_a_tokenizer_ids_are_written() {
    let model = Model::copy(CONTAINER);
    std::fs::remove_file(model.path("tokenizer.model")).unwrap();
    let args = ["--ids", "394,104", "-n", "5", "--no-mask"];
    let run = |more: &[&str]| run("waste-run", [&[model.arg()], &args[..], more].concat());
    let full = with("", CONTAINER, &[&args[..], &["--json"]].concat()).done().json("waste-run/1");
    let bare = run(&["--json"]).done().json("waste-run/1");
    assert_eq!((&bare["text"], &bare["ids"]), (&json!(""), &full["ids"]));
    let ran = run(&[]).done();
    assert_eq!(ran.stdout.trim_end().replace(' ', ","), list(&ids(&full["ids"])));
    assert!(ran.stderr.contains("no tokenizer"), "{}", ran.stderr);
    let error = run(&["--stop", "x", "--json"]).error(2, "usage");
    assert!(error["message"].as_str().unwrap().contains("tokenizer"), "{error}");
    // One that is there and damaged is not passed over.
    model.set("tokenizer.model", b"x");
    run(&["--json"]).exits(3);
}

/// A tokenizer of more tokens than the model has. The bug behind it: the last id was looked up among the logits.
#[test]
fn a_text_beyond_the_models_vocabulary_is_not_measured() {
    let model = Model::copy(CONTAINER);
    let mut ranks = String::from_utf8(model.read("tokenizer.model")).unwrap();
    let digits: Vec<char> = ('A'..='Z').chain('a'..='z').chain('0'..='9').chain(['+', '/']).collect();
    let mut count = ranks.lines().count();
    for (a, b) in (b'A'..=b'Z').flat_map(|a| (b'A'..=b'Z').map(move |b| (a, b))) {
        let sextets = [a >> 2, (a & 3) << 4 | b >> 4, (b & 15) << 2].map(|at| digits[usize::from(at)]);
        let token: String = sextets.iter().chain(&['=']).collect();
        if !ranks.contains(&format!("{token} ")) {
            ranks += &format!("{}{token} {count}\n", if ranks.ends_with('\n') { "" } else { "\n" });
            count += 1;
        }
    }
    model.set("tokenizer.model", ranks.as_bytes());
    model.set("specials.json", b"[]");
    let file = model.beside("text.txt");
    std::fs::write(&file, "0ZZ").unwrap();
    let last = (count - 1).to_string();
    let tokens = run("waste-run", ["tokenize", model.arg(), "0ZZ"]).done().stdout;
    assert!(tokens.trim_end().ends_with(&last), "{tokens}");
    let ran = run("waste-run", ["perplexity", model.arg(), "--file", arg(&file), "--json"]);
    let error = ran.error(3, "token_out_of_range");
    assert!(error["message"].as_str().unwrap().contains(&last), "{error}");
}

// Context and length

#[test]
fn the_context_is_a_limit() {
    for command in ["", "eval"] {
        let error = with(command, CONTAINER, &["--ids", "1,2,3,4,5", "--ctx", "4", "--json"]);
        let error = error.error(3, "context_full");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains('5') && message.contains('4') && message.contains("--ctx"), "{message}");
    }
    let report = |args: &[&str]| {
        let ran = with("", CONTAINER, &[&["--ids", "394,104,105", "--json", "--no-mask"], args].concat());
        ran.done().json("waste-run/1")
    };
    let full = report(&["--ctx", "6", "-n", "100"]);
    let free = report(&["-n", "4"]);
    // Three of the prompt, three of its own, and one that nothing follows.
    assert_eq!((&full["finish_reason"], &full["ids"]), (&json!("length"), &free["ids"]));
    assert_eq!(report(&["--ctx", "3", "-n", "100"])["tokens"], 1);
    let none = report(&["-n", "0"]);
    assert_eq!((&none["tokens"], &none["text"]), (&json!(0), &json!("")));
    assert_eq!(none["finish_reason"], "length");
    for wrong in ["0", "99999999999"] {
        with("", CONTAINER, &["hi", "--ctx", wrong, "--json"]).exits(2);
    }
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let whole = text(TALES, &["Once upon a time", "-n", "24", "-q"]);
    for stop in ["widow who", "dow w"] {
        let args = ["Once upon a time", "-n", "24", "--stop", "not there", "--stop", stop, "--json"];
        let report = with("", TALES, &args).done().json("waste-run/1");
        assert_eq!(report["text"], whole[..whole.find(stop).unwrap()]);
        assert_eq!(report["finish_reason"], "stop");
        assert!(report["tokens"].as_u64().unwrap() < 24);
    }
    with("", CONTAINER, &["hi", "--stop", "", "--json"]).exits(2);
}

// Sampling

#[test]
fn a_seed_gives_the_same_text_again() {
    let sample =
        |args: &[&str]| text(TALES, &[&["There was once", "-n", "12", "-q", "--temp", "1"], args].concat());
    let first = sample(&["--seed", "7"]);
    assert_eq!(first, sample(&["--seed", "7", "--threads", "1"]));
    let others: HashSet<String> = ["1", "2", "3"].map(|seed| sample(&["--seed", seed])).into();
    assert!(others.len() == 3 && !others.contains(&first));
    let report = with("", TALES, &["hi", "-n", "3", "--temp", "1", "--json"]).done().json("waste-run/1");
    let seed = report["seed"].as_u64().unwrap().to_string();
    let again = with("", TALES, &["hi", "-n", "3", "--temp", "1", "--json", "--seed", &seed]).done();
    assert_eq!(again.json("waste-run/1")["text"], report["text"]);
}

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
    let refused = |plan: Value, exit| {
        std::fs::write(&file, plan.to_string()).unwrap();
        with("", CONTAINER, &["hi", "--plan", arg(&file), "--json"]).exits(exit);
    };
    refused(json!({"container": "k", "fits": false}), 1);
    refused(json!({"container": "k", "ctx": "many"}), 3);
    refused(json!({"container": "k", "kv": "bf16"}), 3);
    refused(json!({"container": "k", "vision": true}), 2);
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
        let args = [&["The router picks a few experts for every token", "--json"], args].concat();
        let report = with("eval", CONTAINER, &args).done().json("waste-run-eval/1");
        report["top"].as_array().unwrap().iter().map(|top| top["logit"].as_f64().unwrap()).collect()
    };
    let expected = eval(&[]);
    for (args, tolerance) in [
        (&["--kv", "f16"][..], 0.01),
        (&["--kv", "q8"], 0.2),
        (&["--prefill-chunk", "1"], 1e-3),
        (&["--prefill-chunk", "3"], 1e-3),
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
