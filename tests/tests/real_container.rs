//! Checks of a real container, whatever model it is: `WASTE_TEST_CONTAINER=DIR scripts/test.sh`. Without it the small
//! model is taken, so that the checks themselves are checked.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use serde_json::Value;
use waste_tests::files::Model;
use waste_tests::tool::{Ran, arg, emulated, run};

const PROMPT: &str = "Once upon a time, in a country far away,";
const TEXT: &str = "The fox said to the crow: how well you sing! The crow opened her beak, and the cheese fell down. \
     The fox took it and went away, for it was the cheese that he had wanted, and not the song.";

static SMALL: LazyLock<Model> = LazyLock::new(|| Model::converted("models/k3-tales"));

fn container() -> PathBuf {
    match std::env::var_os("WASTE_TEST_CONTAINER").filter(|dir| !dir.is_empty()) {
        Some(dir) => {
            let dir = PathBuf::from(dir);
            // The tests run in another directory than the shell.
            let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
            let dir = if dir.is_absolute() { dir } else { root.join(dir) };
            assert!(dir.join("manifest.json").is_file(), "{} is no container", dir.display());
            dir
        }
        None => SMALL.dir.clone(),
    }
}

fn told(tool: &str, args: &[&str], schema: &str) -> Value {
    let json = run(tool, [args, &["--json"]].concat()).done().json(schema);
    eprintln!("{tool} {}: {json}", args.join(" "));
    json
}

fn written(more: &[&str]) -> (String, Vec<u64>) {
    let dir = container();
    let args = [&[arg(&dir), PROMPT, "-n", "12", "--ctx", "256"], more].concat();
    let json = told("waste-run", &args, "waste-run/1");
    let ids = json["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
    (json["text"].as_str().unwrap().to_owned(), ids)
}

#[test]
fn it_is_sound_as_far_as_headers_say_and_can_be_planned() {
    if emulated() {
        return;
    }
    let dir = container();
    let verified = told("waste-verify", &[arg(&dir), "--quick"], "waste-verify/1");
    assert_eq!(verified["ok"], true);
    let info = told("waste-run", &["info", arg(&dir)], "waste-run-info/1");
    let plan = told("waste-plan", &[arg(&dir)], "waste-plan/1");
    assert_eq!((&plan["arch"], &plan["fits"]), (&info["arch"], &Value::Bool(true)));
    // One token less than nothing is below the floor, and is said to be.
    let budget = (plan["floor_bytes"].as_u64().unwrap() - 1).to_string();
    run("waste-plan", [arg(&dir), "--budget", &budget, "--json"]).error(4, "budget_below_floor");
}

#[test]
fn greedy_text_is_the_same_whatever_the_cache() {
    if emulated() {
        return;
    }
    let once = written(&[]);
    assert_eq!(once.1.len(), 12, "{once:?}");
    assert_eq!(written(&[]), once);
    let dir = container();
    let floor = told("waste-plan", &[arg(&dir), "--ctx", "256"], "waste-plan/1")["floor_bytes"].to_string();
    assert_eq!(written(&["--budget", &floor]), once);
    assert_eq!(written(&["--threads", "1", "--no-direct-io", "--verify"]), once);
}

#[test]
fn the_types_of_the_cache_of_latents_agree() {
    if emulated() {
        return;
    }
    let dir = container();
    let logits = |kv: &str| {
        let args = ["eval", arg(&dir), TEXT, "--top", "20", "--ctx", "256", "--kv", kv];
        let top = told("waste-run", &args, "waste-run-eval/1")["top"].clone();
        let top = top
            .as_array()
            .unwrap()
            .iter()
            .map(|one| (one["id"].as_u64().unwrap(), one["prob"].as_f64().unwrap()));
        top.collect::<Vec<_>>()
    };
    let exact = logits("f32");
    assert!(exact.iter().all(|(_, prob)| prob.is_finite()));
    for (kv, most) in [("f16", 0.01), ("q8", 0.05)] {
        for (id, prob) in logits(kv).into_iter().take(5) {
            let known = exact.iter().find(|(known, _)| *known == id);
            let (_, expected) = known.unwrap_or_else(|| panic!("{kv}: {id} is not among {exact:?}"));
            assert!((prob - expected).abs() < most, "{kv}: {id} has {prob}, f32 gives {expected}");
        }
    }
}

#[test]
fn a_session_goes_on_with_the_same_text() {
    if emulated() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let (file, dir) = (home.path().join("session"), container());
    let part = |prompt: &[&str], n: &str| {
        let session = ["--session", arg(&file), "-n", n, "--ctx", "256", "--seed", "5", "--temp", "0.7"];
        told("waste-run", &[&[arg(&dir)], prompt, &session[..]].concat(), "waste-run/1")["ids"].clone()
    };
    let whole = {
        let args = [arg(&dir), PROMPT, "-n", "10", "--ctx", "256", "--seed", "5", "--temp", "0.7"];
        told("waste-run", &args, "waste-run/1")["ids"].as_array().unwrap().clone()
    };
    let first = part(&[PROMPT], "6").as_array().unwrap().clone();
    let rest = part(&[], "4").as_array().unwrap().clone();
    assert_eq!([first, rest].concat(), whole);
    // One that is damaged is refused.
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    Ran::error(
        &run("waste-run", [arg(&dir), "--session", arg(&file), "--ctx", "256", "--json"]),
        3,
        "session_damaged",
    );
}

#[test]
fn perplexity_is_a_number() {
    if emulated() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let (file, dir) = (home.path().join("text.txt"), container());
    std::fs::write(&file, TEXT).unwrap();
    let args = ["perplexity", arg(&dir), "--file", arg(&file), "--ctx", "256", "--bos"];
    let json = told("waste-run", &args, "waste-run-perplexity/1");
    let perplexity = json["ppl"].as_f64().unwrap();
    assert!(perplexity.is_finite() && perplexity > 1.0, "{json}");
    // What has learned to write does better than chance.
    assert!(json["bits_per_byte"].as_f64().unwrap() < 8.0, "{json}");
}
