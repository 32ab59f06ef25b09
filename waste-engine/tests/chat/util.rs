//! Tokenizers and formats of the vectors.

use std::path::Path;

use waste_engine::chat::{ChatFormat, Choice, Delta, Json};
use waste_engine::tokenizer::{Ranks, Specials, Tokenizer};

pub fn path(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests").join(name)
}

pub fn json(name: &str) -> Json {
    Json::from_slice(&std::fs::read(path(name)).unwrap()).unwrap()
}

pub fn ranks(name: &str) -> Ranks {
    let file = if name == "mini" { "mini.tiktoken" } else { "cl100k_base.tiktoken" };
    Ranks::parse(&std::fs::read(path("tokenizer").join(file)).unwrap()).unwrap()
}

/// With K3's special tokens.
pub fn tokenizer(name: &str) -> Tokenizer {
    let ranks = ranks(name);
    let list = std::fs::read(path(&format!("tokenizer/specials.{name}.json"))).unwrap();
    let specials = Specials::from_container(ranks.len(), &list).unwrap();
    Tokenizer::new(ranks, specials)
}

/// With special tokens of these names.
pub fn tokenizer_with(names: &[&str]) -> Tokenizer {
    let ranks = ranks("mini");
    let first = ranks.len() as u64;
    let specials =
        Specials::new(ranks.len(), (first..).zip(names.iter().map(|name| (*name).to_owned()))).unwrap();
    Tokenizer::new(ranks, specials)
}

/// The XTML format, and its tokenizer.
pub fn format(name: &str) -> (Tokenizer, ChatFormat) {
    let tokenizer = tokenizer(name);
    let format = ChatFormat::find(Path::new("nowhere"), &tokenizer, Choice::Auto).unwrap();
    (tokenizer, format)
}

/// Puts a delta after another one of the same kind together with it.
pub fn merge(deltas: Vec<Delta>) -> Vec<Delta> {
    let mut merged: Vec<Delta> = Vec::new();
    for delta in deltas {
        match (merged.last_mut(), &delta) {
            (Some(Delta::Reasoning(all)), Delta::Reasoning(text)) => all.push_str(text),
            (Some(Delta::Content(all)), Delta::Content(text)) => all.push_str(text),
            (Some(Delta::Arguments { index: a, text: all }), Delta::Arguments { index: b, text })
                if a == b =>
            {
                all.push_str(text);
            }
            _ => merged.push(delta),
        }
    }
    merged
}
