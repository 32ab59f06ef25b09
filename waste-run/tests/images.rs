//! Images beside a text: in a prompt, in a conversation, in a session.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod util;

use std::path::PathBuf;

use safetensors::SafeTensors;
use serde_json::Value;
use util::*;
use waste_tests::files::data;
use waste_tests::tool::{Ran, arg, run, tool};

const IMAGE: &str = "golden/tiny-k3/image.png";
const OTHER: &str = "golden/components/rgb_exact.png";
/// Positions that [`IMAGE`] takes, and its markup beside them: begin, `image 75x53`, content, end.
const ROWS: u64 = 6;

fn file(name: &str) -> String {
    arg(&data(name)).to_owned()
}

/// What the tool says of a prompt with images.
fn report(model: &str, prompt: &str, images: &[&str], more: &[&str]) -> Value {
    let images: Vec<String> = images.iter().map(|image| format!("--image={}", file(image))).collect();
    let images: Vec<&str> = images.iter().map(String::as_str).collect();
    let args = [&[prompt][..], &images, more, &["--json", "-q"]].concat();
    with("", model, &args).done().json("waste-run/1")
}

fn golden(name: &str) -> Vec<f64> {
    let bytes = std::fs::read(data("golden/tiny-k3/image.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = tensors.tensor(name).unwrap();
    match tensor.dtype() {
        safetensors::Dtype::F64 => {
            tensor.data().chunks_exact(8).map(|x| f64::from_le_bytes(x.try_into().unwrap())).collect()
        }
        _ => {
            tensor.data().chunks_exact(4).map(|x| i32::from_le_bytes(x.try_into().unwrap()).into()).collect()
        }
    }
}

#[test]
fn an_image_in_a_prompt_gives_the_golden_logits() {
    let dir = tempfile::tempdir().unwrap();
    let logits = dir.path().join("logits.safetensors");
    let ids: Vec<u32> = golden("ids").into_iter().map(|id| id as u32).collect();
    let image = file(IMAGE);
    let args = ["--ids", &list(&ids), "--image", &image, "--save-logits", arg(&logits), "--kv", "f32"];
    with("eval", GOLDEN, &args).done();
    let bytes = std::fs::read(&logits).unwrap();
    let found = SafeTensors::deserialize(&bytes).unwrap();
    let found = found.tensor("logits").unwrap();
    let found = found.data().chunks_exact(4).map(|x| f64::from(f32::from_le_bytes(x.try_into().unwrap())));
    let expected = golden("logits_f64");
    assert_eq!(found.len(), expected.len());
    let (mut error, mut norm) = (0.0, 0.0);
    for (found, expected) in found.zip(&expected) {
        error += (found - expected).powi(2);
        norm += expected.powi(2);
    }
    let relative = (error / norm).sqrt();
    assert!(relative < 1e-4, "{relative}");
}

#[test]
fn images_stand_before_the_text_in_their_order() {
    for model in [GOLDEN, CONTAINER] {
        let plain = report(model, "It shows", &[], &["-n", "6"]);
        let one = report(model, "It shows", &[IMAGE], &["-n", "6"]);
        let tokens = |report: &Value| report["prompt_tokens"].as_u64().unwrap();
        let markup = with("tokenize", model, &["image 75x53", "--json"]).done().json("waste-run-tokenize/1");
        let markup = 3 + markup["ids"].as_array().unwrap().len() as u64;
        assert_eq!(tokens(&one), tokens(&plain) + markup + ROWS);
        assert_ne!(one["ids"], plain["ids"]);
        let [two, turned] = [[IMAGE, OTHER], [OTHER, IMAGE]].map(|images| {
            let report = report(model, "It shows", &images, &["-n", "6"]);
            (tokens(&report), report["ids"].clone())
        });
        assert_eq!(two.0, turned.0);
        assert_ne!(two.1, turned.1);
        let small = report(model, "It shows", &[IMAGE], &["-n", "1", "--max-patches", "4"]);
        assert!(tokens(&small) < tokens(&one));
    }
}

/// Talks with the model that sees.
fn chat(lines: &str, args: &[&str]) -> Ran {
    let model = data(GOLDEN);
    let args = [&["chat", arg(&model), "--no-thinking", "-n", "8", "--json"], args].concat();
    Ran::of(tool("waste-run").args(args).write_stdin(lines.to_owned()))
}

fn answers(ran: &Ran) -> Vec<Value> {
    ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_conversation_about_an_image_encodes_it_once() {
    let image = file(IMAGE);
    let lines = format!("/image {image}\nWhat is it?\nSay it again.\n/image {image}\nAnd this?\n");
    let ran = chat(&lines, &["--vision", "-v"]).done();
    assert_eq!(ran.stderr.matches("encoded in").count(), 1, "{}", ran.stderr);
    let said = answers(&ran);
    assert_eq!(said.len(), 3);
    let count = |answer: &Value, key: &str| answer[key].as_u64().unwrap();
    // The second turn reads its own words alone.
    assert!(count(&said[0], "prompt_tokens") > ROWS);
    assert!(count(&said[1], "prompt_tokens") < count(&said[2], "prompt_tokens"));
    assert!(count(&said[1], "reused_tokens") >= count(&said[0], "prompt_tokens"));

    // An image of the command line goes with the first message.
    let given = chat("What is it?\nSay it again.\n", &["--image", &image, "-q"]).done();
    let texts = |answers: &[Value]| answers.iter().map(|answer| answer["text"].clone()).collect::<Vec<_>>();
    assert_eq!(texts(&answers(&given)), texts(&said[..2]));
    let blind = answers(&chat("What is it?\n", &["-q"]).done());
    assert_ne!(texts(&blind), texts(&said[..1]));
}

#[test]
fn a_conversation_with_an_image_is_kept_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let kept = dir.path().join("kept");
    let image = file(IMAGE);
    let whole = answers(&chat("What is it?\nSay it again.\n", &["--image", &image, "-q"]).done());
    let save = format!("What is it?\n/save {}\n", kept.display());
    chat(&save, &["--image", &image, "-q"]).done();
    let load = format!("/load {}\nSay it again.\n", kept.display());
    // What goes on about it needs no tower.
    let rest = answers(&chat(&load, &["-q"]).done());
    assert_eq!(rest[0]["text"], whole[1]["text"]);
}

#[test]
fn a_text_about_an_image_goes_on_over_several_runs() {
    let dir = tempfile::tempdir().unwrap();
    let session = dir.path().join("s");
    let whole = report(GOLDEN, "It shows", &[IMAGE], &["-n", "10"]);
    let first = report(GOLDEN, "It shows", &[IMAGE], &["-n", "4", "--session", arg(&session)]);
    let model = data(GOLDEN);
    let rest = run("waste-run", [arg(&model), "--session", arg(&session), "-n", "6", "--json", "-q"]);
    let rest = rest.done().json("waste-run/1");
    let joined = [ids(&first["ids"]), ids(&rest["ids"])].concat();
    assert_eq!(joined, ids(&whole["ids"]));
}

#[test]
fn what_cannot_be_seen_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &[u8]| -> PathBuf {
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    };
    let image = file(IMAGE);
    let text = write("text.png", b"no image");
    let png = std::fs::read(data(IMAGE)).unwrap();
    let cut = write("cut.png", &png[..png.len() / 2]);
    let missing = dir.path().join("missing.png");
    let refused = |model: &str, args: &[&str], exit: i32, code: &str| {
        let error = with("", model, &[&["It shows"], args, &["--json", "-q"]].concat()).error(exit, code);
        error["message"].as_str().unwrap().to_owned()
    };
    refused(TALES, &["--image", &image], 3, "no_vision");
    for (path, code) in [(&text, "image_invalid"), (&cut, "image_invalid")] {
        let message = refused(GOLDEN, &["--image", arg(path)], 3, code);
        assert!(message.contains(arg(path)), "{message}");
    }
    let ran = with("", GOLDEN, &["It shows", "--image", arg(&missing), "--json", "-q"]);
    assert_eq!(ran.exit, Some(3), "{}", ran.stderr);
    let many: Vec<&str> = std::iter::repeat_n(["--image", image.as_str()], 17).flatten().collect();
    assert!(refused(GOLDEN, &many, 2, "usage").contains("at most 16"));
    refused(GOLDEN, &["--max-patches", "64"], 2, "usage");
    with("", GOLDEN, &["--ids", "1,2", "--image", &image, "--json", "-q"]).error(3, "no_placeholder");
    let ran = chat(&format!("/image {image}\n"), &["-q"]);
    ran.error(3, "vision_disabled");
    let model = data(GOLDEN);
    let raw = ["chat", arg(&model), "--raw", "--image", &image, "--json", "-q"];
    Ran::of(tool("waste-run").args(raw).write_stdin("")).error(2, "usage");
}
