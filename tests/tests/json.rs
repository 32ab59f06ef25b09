//! docs/json.md lists every key of every tool's JSON, and every exit code.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

use serde_json::Value;
use waste_common::cli::Exit;
use waste_tests::files::{Model, data};
use waste_tests::tool::{Ran, arg, emulated, process, tool};

fn document() -> String {
    let text =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/json.md")).unwrap();
    text.replace("\r\n", "\n")
}

/// A key as the document writes it, and whether it may be missing.
type Keys = BTreeMap<String, bool>;

/// The keys of every schema.
fn listed() -> BTreeMap<String, Keys> {
    let mut schemas: BTreeMap<String, Keys> = BTreeMap::new();
    let mut schema = String::new();
    for line in document().lines() {
        if let Some(title) = line.strip_prefix("### ") {
            schema = title.trim_matches('`').to_owned();
            continue;
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, keys, sometimes, _, _] = cells[..] else { continue };
        if !keys.starts_with('`') {
            continue;
        }
        assert!(["", "sometimes"].contains(&sometimes), "{line}");
        for key in keys.split('`').skip(1).step_by(2).flat_map(spelled_out) {
            let known = schemas.entry(schema.clone()).or_default();
            assert!(
                known.insert(key, !sometimes.is_empty()).is_none() || schema == "errors",
                "twice: {line}"
            );
        }
    }
    schemas
}

/// `a.{b,c}` as `a.b` and `a.c`.
fn spelled_out(key: &str) -> Vec<String> {
    match key.split_once('{').and_then(|(head, rest)| Some((head, rest.strip_suffix('}')?))) {
        Some((head, names)) => names.split(',').map(|name| format!("{head}{name}")).collect(),
        None => vec![key.to_owned()],
    }
}

/// Every key of a value, with the way to it. Objects and lists of objects are no keys themselves if their parts are
/// listed.
fn keys(value: &Value, way: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            for (key, value) in object {
                let way = if way.is_empty() { key.clone() } else { format!("{way}.{key}") };
                found.insert(way.clone());
                keys(value, &way, found);
            }
        }
        Value::Array(values) => values.iter().for_each(|value| keys(value, &format!("{way}[]"), found)),
        _ => (),
    }
}

/// Whether a key of the document means this one: `<x>` stands for any name.
fn means(listed: &str, key: &str) -> bool {
    let (mut listed, mut key) = (listed.split('.'), key.split('.'));
    loop {
        match (listed.next(), key.next()) {
            (None, None) => return true,
            (Some(listed), Some(key)) if listed == key || listed.starts_with('<') => (),
            _ => return false,
        }
    }
}

/// Whether it is only the way to listed ones.
fn leads(listed: &str, key: &str) -> bool {
    let ways = [format!("{key}."), format!("{key}[]")];
    ways.iter().any(|way| listed.starts_with(way))
        || listed.split('.').zip(key.split('.')).all(|(listed, key)| listed == key || listed.starts_with('<'))
            && listed.split('.').count() > key.split('.').count()
}

struct Seen(BTreeMap<String, BTreeSet<String>>);

impl Seen {
    fn add(&mut self, ran: &Ran, exits: &[i32]) {
        assert!(exits.contains(&ran.exit.unwrap()), "{ran:?}");
        assert!(!ran.stdout.is_empty(), "{ran:?}");
        for line in ran.stdout.lines() {
            let value: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
            let schema = value["schema"].as_str().unwrap();
            let schema = if ran.exit > Some(1) && value.get("error").is_some() { "errors" } else { schema };
            let found = self.0.entry(schema.to_owned()).or_default();
            keys(&value, "", found);
            found.remove("schema");
        }
    }
}

#[test]
fn every_exit_code_is_listed() {
    let document = document();
    for (exit, meaning) in Exit::TABLE {
        assert!(document.contains(&format!("| {} | {meaning} |\n", exit.code())), "{exit:?}");
    }
}

#[test]
fn every_key_is_listed_and_every_listed_key_is_there() {
    if emulated() {
        return;
    }
    let mut seen = Seen(BTreeMap::new());
    let home = tempfile::tempdir().unwrap();
    let at = |name: &str| arg(&home.path().join(name)).to_owned();
    let source = data("models/k3-tales");
    let (source, model) = (arg(&source), Model::empty("k3.waste"));
    let mut run = |name: &str, args: &[&str], exits: &[i32]| {
        let ran = Ran::of(tool(name).args(args).arg("--json").current_dir(home.path()));
        seen.add(&ran, exits);
        ran
    };

    let effort = ["--effort", "fast"];
    run("waste-convert", &[&[source, &at("dry.waste"), "--dry-run"][..], &effort].concat(), &[0]);
    run("waste-convert", &[&[source, model.arg()][..], &effort].concat(), &[0]);
    run("waste-convert", &[&[source, model.arg(), "--status"][..], &effort].concat(), &[0]);

    run("waste-verify", &[model.arg()], &[0]);
    run("waste-verify", &[model.arg(), "--source", source], &[0]);
    let bad = Model::empty("bad.waste");
    for entry in std::fs::read_dir(&model.dir).unwrap() {
        let name = entry.unwrap().file_name();
        bad.set(arg(Path::new(&name)), &model.read(arg(Path::new(&name))));
    }
    let mut trunk = bad.read("trunk.bin");
    trunk[5000] ^= 1;
    bad.set("trunk.bin", &trunk);
    run("waste-verify", &[bad.arg()], &[1]);
    run("waste-verify", &[bad.arg(), "--repair", "--from", model.arg()], &[0]);

    run("waste-plan", &[model.arg()], &[0]);
    run("waste-plan", &["kimi-k3", "--ram", "64GiB", "--dest", ".", "--disk-gbps", "5"], &[0, 1]);
    run("waste-plan", &["kimi-k3", "--ram", "8GiB"], &[4]);

    run("waste-run", &[model.arg(), "Once", "-n", "4"], &[0]);
    run("waste-run", &["eval", model.arg(), "Once", "--top", "2"], &[0]);
    let text = at("text.txt");
    std::fs::write(&text, "Once upon a time there was a king. He had a daughter, and she was kind.").unwrap();
    run("waste-run", &["perplexity", model.arg(), "--file", &text, "--run", "31", "--bos"], &[0]);
    run("waste-run", &["perplexity", model.arg(), "--file", &text, "--run", "31", "--against", source], &[0]);
    run("waste-run", &["tokenize", model.arg(), "hello"], &[0]);
    run("waste-run", &["detokenize", model.arg(), "--ids", "5,6"], &[0]);
    run("waste-run", &["info", model.arg()], &[0]);
    run("waste-run", &["info", source], &[0]);
    let (questions, answers) = (at("q.jsonl"), at("a.jsonl"));
    std::fs::write(&questions, r#"{"id": "a", "prompt": "Once", "max_tokens": 3}"#).unwrap();
    run("waste-run", &["batch", model.arg(), &questions, "--out", &answers], &[0]);
    std::fs::write(&questions, r#"{"id": "b"}"#).unwrap();
    run("waste-run", &["batch", model.arg(), &questions, "--out", &answers], &[3]);
    run("waste-run", &[&at("nowhere"), "Once"], &[3]);

    let bench = at("bench.waste");
    run("waste-bench", &["synth", "tiny-linear", &bench], &[0]);
    let work = ["--runs", "1", "--prompt-tokens", "16", "-n", "8"];
    run("waste-bench", &[&[bench.as_str(), "--compare", "arith=exact,fast"][..], &work].concat(), &[0]);
    run(
        "waste-bench",
        &[&["sweep", &bench, "--budget", "64MiB..80MiB", "--steps", "2"][..], &work].concat(),
        &[0, 1],
    );
    run("waste-bench", &["kernels", "--only", "rows_q4", "--rounds", "1", "--spread-mib", "8"], &[0]);
    run("waste-bench", &["encode", "--vectors", "1000", "--runs", "1"], &[0]);
    run("waste-bench", &["vision", arg(&data("interop/tiny-k3.waste")), "--runs", "1"], &[0]);
    let trace = data("traces/kimi-linear-48b-300tok.jsonl");
    run("waste-bench", &["cache", "--trace", arg(&trace)], &[0]);
    let disk = ["disk", ".", "--size", "64MiB", "--record", "128KiB", "--depth", "1", "--seconds", "0.05"];
    run("waste-bench", &disk, &[0, 1]);

    let chat =
        Ran::of(tool("waste-run").args(["chat", model.arg(), "-n", "6", "--json"]).write_stdin("Hello\n"));
    seen.add(&chat, &[0]);
    let hub = waste_tests::hub::Hub::start("moonshotai/Kimi-K3");
    hub.commit(waste_tests::hub::k3_tales());
    let dest = at("Kimi-K3");
    for more in [&["--dry-run"][..], &[], &["--check"]] {
        let mut command = tool("waste-download");
        command.args(["moonshotai/Kimi-K3", "--dest", &dest, "--json"]).args(more);
        command.env("HF_ENDPOINT", hub.url()).env("NO_PROXY", "127.0.0.1");
        seen.add(&Ran::of(&mut command), &[0]);
    }
    let mut serve = process("waste-serve");
    serve.args([model.arg(), "--port", "0", "--json"]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut serve = serve.stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(serve.stdout.take().unwrap()).read_line(&mut line).unwrap();
    serve.kill().unwrap();
    serve.wait().unwrap();
    seen.add(&Ran { exit: Some(0), stdout: line, stderr: String::new() }, &[0]);

    compare(&listed(), &seen.0);
}

fn compare(listed: &BTreeMap<String, Keys>, seen: &BTreeMap<String, BTreeSet<String>>) {
    let mut wrong = Vec::new();
    let none = Keys::new();
    for (schema, found) in seen {
        let listed = listed.get(schema).unwrap_or(&none);
        for key in found {
            if !listed.keys().any(|known| means(known, key) || leads(known, key)) {
                wrong.push(format!("{schema}: `{key}` is not listed"));
            }
        }
    }
    for (schema, keys) in listed {
        let found = seen.get(schema);
        for (key, sometimes) in keys {
            let there = found.is_some_and(|found| found.iter().any(|found| means(key, found)));
            if !there && !sometimes {
                wrong.push(format!("{schema}: `{key}` is listed, and was not seen"));
            }
        }
    }
    assert!(wrong.is_empty(), "docs/json.md:\n{}", wrong.join("\n"));
}

#[test]
fn what_is_missing_on_either_side_is_found() {
    assert_eq!(spelled_out("a[].{b,c}"), ["a[].b", "a[].c"]);
    assert!(means("a.<x>.b", "a.y.b") && !means("a.<x>.b", "a.y.c") && !means("a", "a.b"));
    assert!(leads("a.<x>.b", "a.y") && leads("a[].b", "a") && !leads("ab.c", "a") && !leads("a.b", "a.b"));
    let listed =
        BTreeMap::from([("s".to_owned(), Keys::from([("a".to_owned(), false), ("b".to_owned(), true)]))]);
    let outcome = |keys: &[&str]| {
        let found = keys.iter().map(|key| (*key).to_owned()).collect();
        let seen = BTreeMap::from([("s".to_owned(), found)]);
        std::panic::catch_unwind(|| compare(&listed, &seen)).is_ok()
    };
    assert!(outcome(&["a"]) && outcome(&["a", "b"]));
    assert!(!outcome(&["b"]) && !outcome(&["a", "c"]));
    // The document names every schema once that this test runs, and no other.
    assert_eq!(self::listed().len(), 24);
}
