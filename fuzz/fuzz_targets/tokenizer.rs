//! A text through a tokenizer and back; and files that claim to be one.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use waste_engine::tokenizer::{Ranks, Specials, TextStream, Tokenizer};

const RANKS: &[u8] = include_bytes!("../../tests/tokenizer/mini.tiktoken");
const SPECIALS: &[u8] = include_bytes!("../../tests/tokenizer/specials.mini.json");

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let ranks = Ranks::parse(RANKS).expect("ranks");
    let specials = Specials::from_container(ranks.len(), SPECIALS).expect("special tokens");
    Tokenizer::new(ranks, specials)
});

fuzz_target!(|data: &[u8]| {
    let _ = Ranks::parse(data);
    let _ = Specials::from_container(600, data);
    let _ = Specials::from_checkpoint(600, data);
    let Ok(text) = std::str::from_utf8(data) else { return };
    let plain = TOKENIZER.encode(text);
    // No text becomes a control token, and all of it comes back.
    assert!(plain.iter().all(|id| !TOKENIZER.is_special(*id)));
    assert_eq!(TOKENIZER.decode(&plain).expect("own ids"), data);
    let markup = TOKENIZER.encode_markup(text);
    let mut stream = TextStream::new();
    let mut shown = String::new();
    for id in markup {
        shown.push_str(&stream.push(TOKENIZER.token_bytes(id).expect("own ids")));
    }
    shown.push_str(&stream.flush());
    assert_eq!(shown, text);
});
