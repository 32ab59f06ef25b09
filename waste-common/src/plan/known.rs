//! Published models whose configuration comes with the tools, so that they can be planned without a file.

use serde_json::Value;

const KNOWN: [(&str, &str); 2] = [
    ("kimi-k3", include_str!("known/kimi-k3.json")),
    ("kimi-linear-48b", include_str!("known/kimi-linear-48b.json")),
];

/// The names, ascending.
pub fn names() -> impl Iterator<Item = &'static str> {
    KNOWN.iter().map(|(name, _)| *name)
}

/// The `config.json` of a known model.
pub fn config(name: &str) -> Option<Value> {
    let (_, text) = KNOWN.iter().find(|(known, _)| *known == name)?;
    // The files are ours and a test parses them all.
    serde_json::from_str(text).ok()
}
