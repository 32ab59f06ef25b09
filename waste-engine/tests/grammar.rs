//! Texts that keep to a grammar.
#![allow(clippy::unwrap_used)] // helpers of tests are tests too

use proptest::prelude::*;
use serde_json::{Value, json};
use waste_engine::grammar::{Constraint, GRAMMAR_BYTES_MAX, Grammars};
use waste_engine::sampler::{Mask, TokenConstraint};
use waste_engine::tokenizer::Tokenizer;

fn tokenizer() -> Tokenizer {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/models/k3-tales");
    Tokenizer::open(&dir).unwrap()
}

fn grammars(tokenizer: &Tokenizer) -> Grammars {
    Grammars::new(tokenizer, tokenizer.vocab_size() as usize).unwrap()
}

fn allowed(mask: &Mask) -> Vec<u32> {
    (0..mask.vocab() as u32).filter(|id| mask.allows(*id)).collect()
}

/// Feeds a text; where it is refused, and whether it may end.
fn feed(tokenizer: &Tokenizer, mut constraint: Constraint, text: &str) -> Result<bool, usize> {
    for (at, id) in tokenizer.encode(text).into_iter().enumerate() {
        let mask = constraint.mask().unwrap();
        let taken = constraint.accept(id).is_ok();
        assert_eq!(mask.allows(id), taken, "token {at} of {text:?}");
        if !taken {
            return Err(at);
        }
    }
    Ok(constraint.may_end().unwrap())
}

#[test]
fn a_text_is_taken_if_the_schema_takes_it() {
    let tokenizer = tokenizer();
    let grammars = grammars(&tokenizer);
    let schema = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0},
            "kind": {"enum": ["fox", "owl"]},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
        },
        "required": ["name", "kind"],
        "additionalProperties": false,
        "$defs": {"tag": {"type": "string"}},
    });
    let constraint = grammars.json_schema(&schema).unwrap();
    let feed = |text: &str| feed(&tokenizer, constraint.clone(), text);
    for text in [
        r#"{"name":"Ada","kind":"fox"}"#,
        r#"{ "name": "Ä \" 猫\n", "age": 7, "kind": "owl", "tags": ["a", "b"] }"#,
        "{\n  \"name\": \"\",\n  \"kind\": \"owl\"\n}",
    ] {
        assert_eq!(feed(text), Ok(true), "{text}");
    }
    for text in ["", "{", r#"{"name":"Ada""#, r#"{"name":"Ada","kind":"fox""#] {
        assert_eq!(feed(text), Ok(false), "{text}");
    }
    for text in [
        "hello",
        r#"{"name":"Ada","kind":"cat"}"#,
        r#"{"name":"Ada","age":-1,"kind":"fox"}"#,
        r#"{"name":"Ada","age":1.5,"kind":"fox"}"#,
        r#"{"kind":"fox"}"#,
        r#"{"name":"Ada","kind":"fox","more":1}"#,
        r#"{"name":"Ada","kind":"fox","tags":["a","b","c"]}"#,
        r#"{"name":"Ada","kind":"fox"} and more"#,
        r#"{"name":"<|close|>","kind":"fox"} "#,
    ] {
        assert!(feed(text).is_err() || text.contains("<|close|>"), "{text}");
    }
}

#[test]
fn blank_space_comes_to_an_end() {
    let tokenizer = tokenizer();
    let object = grammars(&tokenizer).json_object().unwrap();
    assert_eq!(feed(&tokenizer, object.clone(), &format!("{{{}\"a\":1}}", " ".repeat(20))), Ok(true));
    assert!(feed(&tokenizer, object.clone(), &format!("{{{}\"a\":1}}", " ".repeat(60))).is_err());
    assert!(feed(&tokenizer, object, &format!("{{{}\"a\":1}}", "\n ".repeat(60))).is_err());
}

#[test]
fn special_tokens_are_no_text() {
    let tokenizer = tokenizer();
    let grammars = grammars(&tokenizer);
    for mut constraint in [grammars.json_object().unwrap(), grammars.lark("start: /(.|\\n)*/").unwrap()] {
        for text in ["", "{\"a\": \""] {
            for id in tokenizer.encode(text) {
                constraint.accept(id).unwrap();
            }
            let mask = constraint.mask().unwrap();
            assert!(
                !mask.is_empty() && allowed(&mask).iter().all(|id| !tokenizer.is_special(*id)),
                "{text:?}"
            );
        }
    }
}

#[test]
fn what_cannot_be_kept_to_is_refused() {
    let tokenizer = tokenizer();
    let grammars = grammars(&tokenizer);
    let mut deep = json!({"type": "string"});
    for _ in 0..40 {
        deep = json!({"type": "array", "items": deep});
    }
    grammars.json_schema(&deep).unwrap();
    for _ in 0..40 {
        deep = json!({"type": "array", "items": deep});
    }
    for schema in [
        deep,
        json!(7),
        json!([]),
        json!(false),
        json!({"type": "nothing"}),
        json!({"$ref": "https://example.com/schema.json"}),
        json!({"$ref": "#/$defs/missing"}),
        json!({"type": "array", "uniqueItems": true}),
        json!({"type": "string", "pattern": "(a"}),
        json!({"not": {"type": "string"}, "type": "object"}),
    ] {
        let error = grammars.json_schema(&schema).unwrap_err();
        assert!(!error.to_string().is_empty(), "{schema}");
    }
    // Its options are ours.
    let lenient = json!({"type": "array", "uniqueItems": true, "x-guidance": {"lenient": true}});
    grammars.json_schema(&lenient).unwrap_err();
    for text in ["", "{", "[1"] {
        grammars.json_schema_text(text).unwrap_err();
    }
    grammars.json_schema_text(&" ".repeat(GRAMMAR_BYTES_MAX + 1)).unwrap_err();
    for grammar in ["", "start: other", "start: \"a", "no start"] {
        grammars.lark(grammar).unwrap_err();
    }
    grammars.lark(&format!("start: \"{}\"", "a".repeat(GRAMMAR_BYTES_MAX))).unwrap_err();
    // Refused or not, it does not take forever.
    if let Ok(mut large) = grammars.lark("start: /((((a{0,1000}){0,1000}){0,1000}){0,1000}b)/") {
        let _ = large.mask();
    }
}

/// What a client may send to break a server: refused or made, within bounds.
#[test]
fn hostile_schemas_end_in_an_answer() {
    let tokenizer = tokenizer();
    let grammars = grammars(&tokenizer);
    let nested = |count: usize| format!("{}a{}", "(".repeat(count), ")".repeat(count));
    for schema in [
        json!({"$ref": "#"}),
        json!({"allOf": [{"$ref": "#"}]}),
        json!({"anyOf": [{"$ref": "#"}, {"type": "object", "properties": {"a": {"$ref": "#"}}}]}),
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        json!({"type": "string", "pattern": nested(50_000)}),
        json!({"type": "string", "pattern": "(a{1,500}){1,500}{1,500}b"}),
        json!({"type": "string", "minLength": 4_000_000_000u64}),
        json!({"type": "string", "maxLength": 4_000_000_000u64}),
        json!({"type": "array", "items": {"type": "null"}, "minItems": 4_000_000_000u64}),
        json!({"type": "integer", "minimum": 1e300, "maximum": 1e301}),
        json!({"enum": (0..20_000).collect::<Vec<_>>()}),
    ] {
        if let Ok(mut constraint) = grammars.json_schema(&schema) {
            let _ = constraint.mask().and_then(|_| constraint.may_end());
        }
    }
    for (open, close) in [("(", ")"), ("[", "]")] {
        let grammar = format!("start: {}\"a\"{}", open.repeat(100_000), close.repeat(100_000));
        let _ = grammars.lark(&grammar);
    }
}

/// A random walk through a grammar; `None` if it did not come to an end.
fn walk(tokenizer: &Tokenizer, mut constraint: Constraint, seed: u64, most: usize) -> Option<String> {
    let mut ids = Vec::new();
    let mut state = seed;
    while ids.len() < most {
        let mask = constraint.mask().unwrap();
        let list = allowed(&mask);
        let may_end = constraint.may_end().unwrap();
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        if list.is_empty() || may_end && state >> 62 == 0 {
            assert!(may_end);
            return Some(String::from_utf8(tokenizer.decode(&ids).unwrap()).unwrap());
        }
        // Short tokens and what closes strings are preferred, or no walk would end.
        let closing = list.iter().copied().filter(|id| {
            let bytes = tokenizer.token_bytes(*id).unwrap();
            matches!(bytes, b"\"" | b"}" | b"]" | b"\":" | b"\",")
        });
        let closing: Vec<u32> = closing.collect();
        let list = if !closing.is_empty() && state >> 40 & 3 == 0 { &closing } else { &list };
        let id = list[(state >> 33) as usize % list.len()];
        constraint.accept(id).unwrap();
        ids.push(id);
    }
    None
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn whoever_keeps_to_the_mask_writes_json(seed: u64) {
        let tokenizer = tokenizer();
        let schema = json!({
            "type": "object",
            "properties": {"a": {"type": "string", "maxLength": 20}, "b": {"type": "boolean"}},
            "required": ["a", "b"],
            "additionalProperties": false,
        });
        let constraint = grammars(&tokenizer).json_schema(&schema).unwrap();
        let text = walk(&tokenizer, constraint, seed, 400);
        prop_assert!(text.is_some());
        let value: Value = serde_json::from_str(&text.unwrap()).unwrap();
        prop_assert!(value["a"].is_string() && value["b"].is_boolean(), "{}", value);
    }

    #[test]
    fn any_text_for_a_grammar_is_refused_or_taken(text in ".{0,200}") {
        let tokenizer = tokenizer();
        let grammars = grammars(&tokenizer);
        let _ = grammars.lark(&text);
        let _ = grammars.json_schema_text(&text);
    }
}
