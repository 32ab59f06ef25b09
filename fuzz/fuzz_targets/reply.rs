//! An answer of a model that has lost its way: read token by token, whole or byte by byte, cut off anywhere.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use waste_engine::chat::{ChatFormat, Choice, Prompt};
use waste_engine::sampler::StopMatcher;
use waste_engine::tokenizer::{Ranks, Specials, Tokenizer};

const RANKS: &[u8] = include_bytes!("../../tests/tokenizer/mini.tiktoken");
const SPECIALS: &[u8] = include_bytes!("../../tests/tokenizer/specials.mini.json");

static FORMAT: LazyLock<(Tokenizer, ChatFormat)> = LazyLock::new(|| {
    let ranks = Ranks::parse(RANKS).expect("ranks");
    let specials = Specials::from_container(ranks.len(), SPECIALS).expect("special tokens");
    let tokenizer = Tokenizer::new(ranks, specials);
    let format = ChatFormat::find(Path::new("nowhere"), &tokenizer, Choice::Auto).expect("a format");
    (tokenizer, format)
});

/// Bytes from 0xf8 on, which no UTF-8 has, stand for control tokens.
const MARKERS: [&str; 8] = [
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|end_of_msg|>",
    "[EOS]",
    "<|media_pad|>",
    "[BOS]",
    "[PAD]",
];

fuzz_target!(|data: &[u8]| {
    let (tokenizer, format) = &*FORMAT;
    let Some((&first, data)) = data.split_first() else { return };
    let prompt = Prompt { thinking: first % 2 == 0, ..Prompt::default() };
    let stop = || StopMatcher::new(&["stop".to_owned()]).expect("a stop string");
    let mut whole = format.reply(&prompt, format.stop_ids(), stop());
    let mut bytewise = format.reply(&prompt, format.stop_ids(), stop());
    for run in data.chunk_by(|a, b| *a < 0xf8 && *b < 0xf8) {
        match run {
            [marker] if *marker >= 0xf8 => {
                let Some(id) = tokenizer.special_id(MARKERS[usize::from(marker - 0xf8)]) else { continue };
                drop(whole.push_special(id));
                drop(bytewise.push_special(id));
            }
            text => {
                drop(whole.push_text(text));
                text.chunks(1).for_each(|byte| drop(bytewise.push_text(byte)));
            }
        }
        assert_eq!(whole.place(), bytewise.place());
    }
    let _ = format.closing(&whole);
    whole.cut();
    let _ = (whole.answer(), whole.counts(), whole.finish_reason());
});
