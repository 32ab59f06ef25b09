//! The tokenizer against its vectors, and against damaged and hostile input.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::path::{Path, PathBuf};
use std::time::Instant;

use proptest::prelude::*;
use serde_json::Value;
use sha2::{Digest, Sha256};
use waste_engine::tokenizer::{Ranks, SpecialError, Specials, TextStream, Tokenizer, TokenizerError};

const TESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests");
const RANK_FILES: [(&str, &str); 2] = [("cl100k", "cl100k_base.tiktoken"), ("mini", "mini.tiktoken")];

fn read(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(TESTS).join(name)).unwrap()
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&read(name)).unwrap()
}

fn tokenizer(name: &str) -> Tokenizer {
    let file = RANK_FILES.iter().find(|entry| entry.0 == name).unwrap().1;
    let ranks = Ranks::parse(&read(&format!("tokenizer/{file}"))).unwrap();
    let list = read(&format!("tokenizer/specials.{name}.json"));
    let specials = Specials::from_container(ranks.len(), &list).unwrap();
    Tokenizer::new(ranks, specials)
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn cases(vectors: &Value) -> &[Value] {
    vectors["cases"].as_array().unwrap()
}

#[test]
fn pieces_and_ids_of_all_texts() {
    let vectors = json("tokenizer/vectors.json");
    assert_eq!(cases(&vectors).len(), 420);
    let mut markup_cases = 0;
    for (name, _) in RANK_FILES {
        let tokenizer = tokenizer(name);
        for case in cases(&vectors) {
            let text = case["text"].as_str().unwrap();
            let pieces: Vec<String> = serde_json::from_value(case["pieces"].clone()).unwrap();
            assert_eq!(tokenizer.pieces(text).collect::<Vec<_>>(), pieces, "{text:?}");

            let content = ids(&case[name]["text"]);
            assert_eq!(tokenizer.encode(text), content, "{name} {text:?}");
            assert_eq!(tokenizer.decode(&content).unwrap(), text.as_bytes());

            let markup = case[name].get("markup");
            markup_cases += usize::from(markup.is_some());
            let markup = markup.map_or_else(|| content.clone(), ids);
            assert_eq!(tokenizer.encode_markup(text), markup, "{name} {text:?} as markup");
            assert_eq!(tokenizer.decode(&markup).unwrap(), text.as_bytes());
        }
    }
    assert!(markup_cases > 0);
}

#[test]
fn bytes_and_streamed_text_of_all_id_lists() {
    let vectors = json("tokenizer/decode.json");
    assert_eq!(cases(&vectors).len(), 23);
    for (name, _) in RANK_FILES {
        let tokenizer = tokenizer(name);
        for case in cases(&vectors) {
            let list = ids(&case[name]["ids"]);
            let bytes = tokenizer.decode(&list).unwrap();
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hex, case["bytes_hex"], "{}", case["name"]);

            let mut stream = TextStream::new();
            let mut all = String::new();
            for (index, id) in list.iter().enumerate() {
                let text = stream.push(tokenizer.token_bytes(*id).unwrap());
                assert_eq!(text, case[name]["pieces"][index], "{} token {index}", case["name"]);
                all += &text;
            }
            let flushed = stream.flush();
            assert_eq!(flushed, case[name]["flush"], "{}", case["name"]);
            assert_eq!(all + &flushed, case["lossy"].as_str().unwrap());
        }
    }
}

#[test]
fn long_inputs_are_cut_where_the_reference_cuts_them() {
    let vectors = json("tokenizer/cuts.json");
    assert_eq!(cases(&vectors).len(), 13);
    for (name, _) in RANK_FILES {
        let tokenizer = tokenizer(name);
        for case in cases(&vectors) {
            let recipe: Vec<(String, usize)> = serde_json::from_value(case["recipe"].clone()).unwrap();
            let text: String = recipe.iter().map(|(part, count)| part.repeat(*count)).collect();
            assert_eq!(text.chars().count() as u64, case["chars"].as_u64().unwrap());
            let lengths: Vec<usize> = tokenizer.parts(&text).map(|part| part.chars().count()).collect();
            assert_eq!(serde_json::to_value(lengths).unwrap(), case["cut_lengths"], "{}", case["name"]);

            for (mode, list) in
                [("text", tokenizer.encode(&text)), ("markup", tokenizer.encode_markup(&text))]
            {
                let expected = &case[name][mode];
                assert_eq!(list[..8], ids(&expected["head"]), "{name} {mode} {}", case["name"]);
                assert_eq!(list[list.len() - 8..], ids(&expected["tail"]));
                assert_eq!(list.len() as u64, expected["n"].as_u64().unwrap());
                let bytes: Vec<u8> = list.iter().flat_map(|id| id.to_le_bytes()).collect();
                let hash: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
                assert_eq!(hash, expected["sha256"], "{name} {mode} {}", case["name"]);
            }
        }
    }
}

#[test]
fn the_golden_checkpoints_and_their_containers() {
    for model in ["tiny-k3", "tiny-linear"] {
        let checkpoint = PathBuf::from(format!("{TESTS}/golden/{model}/ckpt"));
        let tokenizer = Tokenizer::open(&checkpoint).unwrap();
        assert_eq!(tokenizer.vocab_size(), 650);
        assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(394), Some(395)));
        assert_eq!((tokenizer.unk(), tokenizer.pad()), (Some(648), Some(649)));

        // What a container carries: the same rank file, and the named specials as a list.
        let container = tempfile::tempdir().unwrap();
        std::fs::copy(checkpoint.join("tiktoken.model"), container.path().join("tokenizer.model")).unwrap();
        let named: Vec<Value> = tokenizer
            .specials()
            .filter(|(_, name)| !name.starts_with("<|reserved_token_"))
            .map(|(id, text)| serde_json::json!({"id": id, "text": text}))
            .collect();
        let list = serde_json::to_vec(&named).unwrap();
        std::fs::write(container.path().join("specials.json"), list).unwrap();
        let same = Tokenizer::open(container.path()).unwrap();
        assert!(tokenizer.specials().eq(same.specials()));

        let vectors = json(&format!("golden/{model}/tokenizer_vectors.json"));
        let vectors = vectors.as_array().unwrap();
        assert!(vectors.len() > 10);
        for case in vectors {
            let text = case["text"].as_str().unwrap();
            for tokenizer in [&tokenizer, &same] {
                let list = tokenizer.encode_markup(text);
                assert_eq!(list, ids(&case["ids"]), "{model} {text:?}");
                assert_eq!(tokenizer.decode(&list).unwrap(), text.as_bytes());
            }
        }
    }
}

#[test]
fn ids_that_never_belong_in_text() {
    let k3 = Tokenizer::open(&PathBuf::from(format!("{TESTS}/golden/tiny-k3/ckpt"))).unwrap();
    assert_eq!(k3.media(), [412, 413, 414, 415]);
    let banned = k3.banned_in_text();
    for name in ["[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>", "[EOT]", "<osagent_mode>"] {
        assert!(!banned.contains(&k3.special_id(name).unwrap()), "{name}");
    }
    // All 256 but the named ones that are not media, BOS, UNK or PAD.
    assert_eq!(banned.len(), 256 - 9);
    assert!(banned.iter().all(|id| k3.is_special(*id)));
    let linear = Tokenizer::open(&PathBuf::from(format!("{TESTS}/golden/tiny-linear/ckpt"))).unwrap();
    assert!(linear.media().is_empty());
    assert!(linear.banned_in_text().contains(&412));
}

/// Regression: text over 256 bytes was lost, special ids could not be decoded, or only at a piece start.
#[test]
fn specials_are_found_anywhere_and_decoded_and_long_pieces_kept() {
    let tokenizer = tokenizer("mini");
    for (id, name) in tokenizer.specials() {
        let text = format!("ab{name}c {name}");
        let list = tokenizer.encode_markup(&text);
        assert_eq!(list.iter().filter(|found| **found == id).count(), 2, "{name}");
        assert_eq!(tokenizer.decode(&list).unwrap(), text.as_bytes());
    }
    for unit in ["专", "🙂", "é", "a", "A", "\u{301}", "-", " ", "\n", "7"] {
        for count in [85, 86, 87, 300, 5000] {
            let text = unit.repeat(count);
            assert_eq!(tokenizer.decode(&tokenizer.encode(&text)).unwrap(), text.as_bytes());
        }
    }
    for id in [tokenizer.vocab_size(), u32::MAX] {
        assert!(
            matches!(tokenizer.decode(&[5, id]), Err(TokenizerError::UnknownId { id: found, .. }) if found == id)
        );
    }
}

/// Regression: user text that spells role markers must not become them.
#[test]
fn content_never_holds_a_special_id() {
    for (name, _) in RANK_FILES {
        let tokenizer = tokenizer(name);
        let all: String = tokenizer.specials().map(|(_, name)| name).collect();
        for text in [all.clone(), all.replace("><", "> <"), format!("{all}{all}")] {
            let list = tokenizer.encode(&text);
            assert!(list.iter().all(|id| !tokenizer.is_special(*id)));
            assert_eq!(tokenizer.decode(&list).unwrap(), text.as_bytes());
        }
        assert_eq!(tokenizer.encode_markup(&all).len(), 256);
    }
}

#[test]
fn any_text_comes_back() {
    let tokenizer = tokenizer("mini");
    let names: Vec<String> = tokenizer.specials().map(|(_, name)| name.to_owned()).take(20).collect();
    let part = prop_oneof![
        any::<String>(),
        proptest::sample::select(names),
        proptest::string::string_regex("[ -~\\n\u{4e00}-\u{4eff}éß½']{0,30}").unwrap(),
    ];
    let mut runner = proptest::test_runner::TestRunner::default();
    runner
        .run(&proptest::collection::vec(part, 0..6), |parts| {
            let text = parts.concat();
            let content = tokenizer.encode(&text);
            prop_assert!(content.iter().all(|id| !tokenizer.is_special(*id)));
            prop_assert_eq!(tokenizer.decode(&content).unwrap(), text.as_bytes());
            prop_assert_eq!(tokenizer.decode(&tokenizer.encode_markup(&text)).unwrap(), text.as_bytes());
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_mutated_rank_file_is_refused_or_works() {
    let original = read("tokenizer/mini.tiktoken");
    let mut state = 0x853c_49e6_748f_ea9bu64;
    let mut next = |bound: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % bound
    };
    let (mut accepted, mut refused) = (0, 0);
    for case in 0..2000 {
        let mut file = original.clone();
        for _ in 0..1 + case % 3 {
            let at = next(file.len() - 8);
            match next(7) {
                0 => file[at] ^= 1 << next(8),
                1 => file[at] = b"0123456789=AZaz \r\n+/"[next(20)],
                2 => drop(file.drain(at..at + 1 + next(7))),
                3 => file.insert(at, b" \n0A="[next(5)]),
                4 => file.truncate(at),
                5 => file.splice(at..at, *b"\r\n\n").for_each(drop),
                _ => {
                    let line = at + file[at..].iter().position(|byte| *byte == b'\n').unwrap_or(0);
                    let copy = original[at..(at + 40).min(original.len())].to_vec();
                    file.splice(line..line, copy).for_each(drop);
                }
            }
            if file.len() < 64 {
                break;
            }
        }
        match Ranks::parse(&file) {
            Err(_) => refused += 1,
            Ok(ranks) => {
                accepted += 1;
                let specials = Specials::new(ranks.len(), []).unwrap();
                let tokenizer = Tokenizer::new(ranks, specials);
                let text = "The engine reads 专家 only, don't it?";
                assert_eq!(tokenizer.decode(&tokenizer.encode(text)).unwrap(), text.as_bytes());
            }
        }
    }
    assert!(accepted > 20 && refused > 1000, "accepted {accepted}, refused {refused}");
}

#[test]
fn a_directory_without_a_tokenizer_says_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Tokenizer::open(dir.path()).err().unwrap();
    assert!(matches!(open(), TokenizerError::Missing { .. }));
    std::fs::write(dir.path().join("tokenizer.model"), b"AA== 1\n").unwrap();
    std::fs::write(dir.path().join("specials.json"), b"[]").unwrap();
    let message = open().to_string();
    assert!(message.contains("tokenizer.model") && message.contains("line 1"), "{message}");
    std::fs::write(dir.path().join("tokenizer.model"), read("golden/tiny-k3/ckpt/tiktoken.model")).unwrap();
    assert_eq!(Tokenizer::open(dir.path()).unwrap().special_name(394), Some("<|reserved_token_394|>"));
    std::fs::write(dir.path().join("specials.json"), br#"[{"id":1,"text":"a"}]"#).unwrap();
    assert!(matches!(open(), TokenizerError::Specials { source: SpecialError::Range { id: 1, .. }, .. }));
    // A rank file beyond the bound is refused by its size alone.
    let file = std::fs::File::create(dir.path().join("tokenizer.model")).unwrap();
    file.set_len(1 << 40).unwrap();
    assert!(matches!(open(), TokenizerError::Read(_)));
}

#[test]
fn a_container_without_specials_has_the_reserved_names() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &[u8]| std::fs::write(dir.path().join(name), content).unwrap();
    write("tokenizer.model", &read("golden/tiny-k3/ckpt/tiktoken.model"));
    let named = || Tokenizer::open(dir.path()).unwrap().special_name(395).unwrap().to_owned();
    write("manifest.json", b"{}");
    let tokenizer = Tokenizer::open(dir.path()).unwrap();
    assert_eq!((tokenizer.vocab_size(), tokenizer.eos()), (650, None));
    assert!(tokenizer.specials().all(|(id, name)| name == format!("<|reserved_token_{id}|>")));
    // The manifest decides: a checkpoint's file beside it is none of the container's.
    write("tokenizer_config.json", br#"{"added_tokens_decoder":{"395":{"content":"[EOS]"}}}"#);
    assert_eq!(named(), "<|reserved_token_395|>");
    // And a container's file is none of a checkpoint's.
    write("specials.json", br#"[{"id":395,"text":"other"}]"#);
    assert_eq!(named(), "other");
    std::fs::remove_file(dir.path().join("manifest.json")).unwrap();
    assert_eq!(named(), "[EOS]");
}

/// `cargo test --release -p waste-engine --test tokenizer -- --ignored --nocapture speed`
#[test]
#[ignore = "a measurement, not a check"]
fn speed() {
    let vectors = json("tokenizer/vectors.json");
    let mixed: String = cases(&vectors).iter().map(|case| case["text"].as_str().unwrap()).collect();
    let english = std::fs::read_to_string(Path::new(TESTS).join("../waste-engine/src/tokenizer/split.rs"));
    let mut texts =
        vec![("vectors", mixed.repeat(4_000_000 / mixed.len())), ("source", english.unwrap().repeat(200))];
    for (name, unit) in [("letter", "a"), ("capital", "Q"), ("dashes", "-"), ("han", "好"), ("digits", "7")]
    {
        texts.push((name, unit.repeat(1_000_000 / unit.len())));
    }
    for (name, file) in RANK_FILES {
        let file = read(&format!("tokenizer/{file}"));
        let begin = Instant::now();
        let ranks = Ranks::parse(&file).unwrap();
        println!("{name}: {} ranks in {:?}", ranks.len(), begin.elapsed());
        let begin = Instant::now();
        let specials = Specials::new(ranks.len(), []).unwrap();
        let tokenizer = Tokenizer::new(ranks, specials);
        println!("{name}: specials and classes in {:?}", begin.elapsed());
        for (text_name, text) in &texts {
            let begin = Instant::now();
            let pieces = tokenizer.pieces(text).count();
            let split = begin.elapsed();
            let begin = Instant::now();
            let tokens = tokenizer.encode(text).len();
            let rate = |time: std::time::Duration| text.len() as f64 / 1e6 / time.as_secs_f64();
            println!(
                "{name} {text_name}: {} bytes, {pieces} pieces, {tokens} tokens: split {:.1} MB/s, all {:.1} MB/s ({:?})",
                text.len(),
                rate(split),
                rate(begin.elapsed()),
                begin.elapsed()
            );
        }
    }
}
