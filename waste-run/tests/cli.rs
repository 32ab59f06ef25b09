//! The tool as a shell or a script sees it: text, JSON, prompts, subcommands.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod util;

use std::collections::HashSet;
use util::*;

use serde_json::json;
use waste_tests::files::{Model, data, json};
use waste_tests::logits::{Tensors, worst_row};
use waste_tests::tool::{Ran, arg, run, tool};

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
        let exact = ["--arith", "exact", "--kv", "f32"];
        let args = ["--ids", &list(&wanted), "--save-logits", arg(&file), "--json"];
        let report = with("eval", model, &[&args[..], &exact].concat()).done().json("waste-run-eval/1");
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
    if waste_tests::tool::emulated() {
        return;
    }
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
