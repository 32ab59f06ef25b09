//! The smallest tokenizer that the tools accept: the 256 bytes, then the special tokens.

use std::fmt::Write;

use serde_json::{Value, json};

/// The first special id.
const FIRST: u32 = 256;

/// Special tokens with a name: number among the special ids, name. Numbers are those of the Kimi models.
const SPECIALS: [(u32, &str); 10] = [
    (0, "[BOS]"),
    (1, "[EOS]"),
    (2, "<|end_of_msg|>"),
    (3, "<|open|>"),
    (4, "<|close|>"),
    (5, "<|sep|>"),
    (18, "<|media_begin|>"),
    (19, "<|media_content|>"),
    (20, "<|media_end|>"),
    (21, "<|media_pad|>"),
];

/// Ids of a configuration that are the tokenizer's.
pub const TOKEN_IDS: [(&str, u32); 4] = [
    ("bos_token_id", FIRST),
    ("eos_token_id", FIRST + 2),
    ("pad_token_id", FIRST + 255),
    ("media_placeholder_token_id", FIRST + 21),
];

/// The rank file: every byte is a token.
pub fn ranks() -> String {
    let mut file = String::new();
    for byte in 0..=u8::MAX {
        // Writing to a string cannot fail.
        let _ = writeln!(file, "{} {byte}", base64(byte));
    }
    file
}

/// One byte in base64.
fn base64(byte: u8) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digit = |index: u8| char::from(DIGITS[usize::from(index)]);
    format!("{}{}==", digit(byte >> 2), digit((byte & 3) << 4))
}

/// `specials.json` of a container.
pub fn container_specials() -> Value {
    SPECIALS.iter().map(|(number, name)| json!({"id": FIRST + number, "text": name})).collect()
}

/// How K3 prepares images: converters want it wherever there is a vision tower.
pub const PREPROCESSOR: &str = include_str!("shapes/preprocessor_config.json");

/// `vision.json` of a container of this configuration, if that has a vision tower.
pub fn container_vision(config: &Value) -> Option<Value> {
    let mut keys = config.get("vision_config")?.as_object()?.clone();
    let preprocessor: Value = serde_json::from_str(PREPROCESSOR).ok()?;
    let media = preprocessor.get("media_proc_cfg")?.as_object()?;
    for key in ["image_mean", "image_std", "patch_size", "in_patch_limit", "patch_limit_on_one_side"] {
        keys.insert(key.to_owned(), media.get(key)?.clone());
    }
    keys.insert("max_patches".to_owned(), json!(1024));
    Some(keys.into())
}

/// `tokenizer_config.json` of a checkpoint.
pub fn checkpoint_specials() -> Value {
    let tokens: serde_json::Map<String, Value> = SPECIALS
        .iter()
        .map(|(number, name)| ((FIRST + number).to_string(), json!({"content": name, "special": true})))
        .collect();
    json!({"added_tokens_decoder": tokens, "bos_token": "[BOS]", "eos_token": "[EOS]"})
}
