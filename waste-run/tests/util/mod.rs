//! What the tests of the tool share.

#![allow(dead_code)] // not every file of tests needs all

use serde_json::Value;
use waste_tests::files::data;
use waste_tests::tool::{Ran, arg, run};

pub const TALES: &str = "models/k3-tales";
pub const GOLDEN: &str = "golden/tiny-k3/ckpt";
pub const CONTAINER: &str = "interop/tiny-k3.waste";

/// `waste-run` with a subcommand or none, a model of ours, and further arguments.
pub fn with(command: &str, model: &str, args: &[&str]) -> Ran {
    let model = data(model);
    let command = Some(command).filter(|command| !command.is_empty());
    run("waste-run", command.into_iter().chain([arg(&model)]).chain(args.iter().copied()))
}

/// What is written after a prompt.
pub fn text(model: &str, args: &[&str]) -> String {
    with("", model, args).done().stdout
}

pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

pub fn list(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

pub fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[track_caller]
pub fn has_keys(value: &Value, wanted: &[&str]) {
    for key in wanted {
        assert!(value.get(key).is_some_and(|value| !value.is_null()), "{key}: {value}");
    }
}
