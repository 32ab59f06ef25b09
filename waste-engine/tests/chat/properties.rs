//! What must hold for any conversation and any answer.

use proptest::prelude::*;
use waste_engine::chat::json::Object;
use waste_engine::chat::{
    Arguments, Call, ChatFormat, Choice, Delta, Effort, End, Json, Message, Part, Place, Prompt, Reply,
    ResponseFormat, ToolChoice,
};
use waste_engine::sampler::StopMatcher;
use waste_engine::tokenizer::Tokenizer;

use crate::util::{TURN_NAMES, format, turns_format};

const PLACES: [bool; 2] = [true, false];

fn reply(format: &ChatFormat, thinking: bool, stop: &[&str]) -> Reply {
    format.reply(&Prompt { thinking, ..Prompt::default() }, &[], StopMatcher::new(stop).unwrap())
}

/// A token of an answer.
#[derive(Clone, Debug)]
enum Token {
    Special(&'static str),
    Bytes(&'static [u8]),
}

/// Tokens as a model that has lost its way might write them: markers, words of the format, halves of characters.
fn tokens() -> impl Strategy<Value = Vec<Token>> {
    use Token::{Bytes, Special};
    let markers = ["<|open|>", "<|close|>", "<|sep|>", "<|open|>", "<|close|>", "<|sep|>", "<|sep|>"];
    let others = ["<|end_of_msg|>", "[EOS]", "<|media_pad|>", "[BOS]"];
    let words: [&[u8]; 12] = [
        b"think",
        b"response",
        b"tools",
        b"call",
        b"call tool=\"f\" index=\"1\"",
        b"argument key=\"k\" type=\"string\"",
        b"argument key=\"n\" type=\"number\"",
        b"argument",
        b"json",
        b"message",
        b"note",
        b" \n",
    ];
    let texts: [&[u8]; 10] =
        [b"a", b" b ", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x99\x82", b"\xff", b"\"", b"<|sep|>", b"{\"x\": 1}"];
    let token = prop_oneof![
        6 => proptest::sample::select(markers.to_vec()).prop_map(Special),
        1 => proptest::sample::select(others.to_vec()).prop_map(Special),
        6 => proptest::sample::select(words.to_vec()).prop_map(Bytes),
        6 => proptest::sample::select(texts.to_vec()).prop_map(Bytes),
    ];
    proptest::collection::vec(token, 0..60)
}

fn feed(reply: &mut Reply, tokenizer: &Tokenizer, token: &Token) -> Vec<Delta> {
    match token {
        Token::Special(name) => reply.push_special(tokenizer.special_id(name).unwrap()),
        Token::Bytes(bytes) => reply.push_text(bytes),
    }
}

#[test]
fn any_answer_is_read_and_can_be_closed() {
    let (tokenizer, format) = format("mini");
    proptest!(ProptestConfig::with_cases(2000), |(tokens in tokens(), thinking in proptest::sample::select(PLACES.to_vec()))| {
        let mut one = reply(&format, thinking, &[]);
        let mut bytewise = reply(&format, thinking, &[]);
        let mut deltas = Vec::new();
        for token in &tokens {
            deltas.extend(feed(&mut one, &tokenizer, token));
            match token {
                Token::Bytes(bytes) => bytes.chunks(1).for_each(|byte| drop(bytewise.push_text(byte))),
                special => drop(feed(&mut bytewise, &tokenizer, special)),
            }
            prop_assert_eq!(one.place(), bytewise.place());
        }
        let mut closed = one.clone();
        deltas.extend(one.cut());
        bytewise.cut();

        // The pieces are the whole, however it was divided into tokens.
        let (mut reasoning, mut content, mut calls) = (String::new(), String::new(), Vec::new());
        for delta in deltas {
            match delta {
                Delta::Reasoning(text) => reasoning += &text,
                Delta::Content(text) => content += &text,
                Delta::Call { index, name } => {
                    prop_assert_eq!(index, calls.len());
                    calls.push((name, String::new()));
                }
                Delta::Arguments { index, text } => {
                    prop_assert_eq!(index + 1, calls.len());
                    calls[index].1 += &text;
                }
            }
        }
        let answer = one.answer();
        prop_assert_eq!((&answer.reasoning, &answer.content), (&reasoning, &content));
        prop_assert_eq!(answer, bytewise.answer());
        for (call, (name, arguments)) in answer.calls.iter().zip(&calls) {
            prop_assert_eq!((&call.name, &call.arguments), (name, arguments));
            // What looks finished is JSON, unless the model wrote all of it itself (a json element).
            let own = tokens.iter().any(|token| matches!(token, Token::Bytes(b"json")));
            prop_assert!(!call.complete || own || Json::parse(arguments).is_ok(), "{}", arguments);
            prop_assert!(call.complete || Json::parse(arguments).is_err() || own, "{}", arguments);
        }
        prop_assert_eq!(answer.calls.len(), calls.len());

        // What closes it does so, and adds nothing to it.
        let ended = closed.end().is_some();
        for id in format.closing(&closed).encode(&tokenizer).ids {
            closed.push(id, &tokenizer).unwrap();
        }
        prop_assert_eq!(closed.end(), Some(End::Turn));
        prop_assert_eq!(closed.place(), Place::Ended);
        if !ended {
            prop_assert_eq!(&closed.answer().content, &answer.content);
            prop_assert_eq!(&closed.answer().reasoning, &answer.reasoning);
            prop_assert!(closed.answer().calls.iter().all(|call| call.complete));
        }
    });
}

#[test]
fn without_markers_every_byte_is_content() {
    let (tokenizer, format) = format("mini");
    let texts = proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..8), 0..12);
    proptest!(|(texts in texts, stray in proptest::sample::select(vec!["<|sep|>", "<|media_pad|>", "[BOS]"]), thinking in any::<bool>())| {
        let mut reply = reply(&format, thinking, &[]);
        for text in &texts {
            reply.push_text(text);
            if stray != "<|sep|>" {
                reply.push_special(tokenizer.special_id(stray).unwrap());
            }
        }
        reply.cut();
        let all = String::from_utf8_lossy(&texts.concat()).into_owned();
        let answer = reply.answer();
        prop_assert_eq!(if thinking { &answer.reasoning } else { &answer.content }, &all);
        prop_assert_eq!(reply.finish_reason(), "length");
    });
}

/// Strings that would be structure if they could.
fn forged() -> impl Strategy<Value = String> {
    let names = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]", "<|media_pad|>", "[BOS]"];
    let pieces: Vec<&'static str> = names
        .into_iter()
        .chain(TURN_NAMES.iter().copied())
        .chain(["message role=\"system\"", "\"", "&quot;", "a", " ", "\n", "é", "<|", "|>"])
        .collect();
    proptest::collection::vec(proptest::sample::select(pieces), 1..6)
        .prop_map(|pieces| format!("x{}", pieces.concat()))
}

/// A conversation with a string of the caller in every place where a client can put one.
fn everywhere(texts: &[String], xtml: bool) -> Prompt {
    let mut texts = texts.iter().cycle().cloned();
    let mut text = move || texts.next().unwrap();
    let json = |text: String, other: String| Json::Object(Object::from([(text, Json::String(other))]));
    let parts = |text: String| vec![Part::Text(text)];
    let call = |name: String, arguments| Call { id: Some("a".to_owned()), name, arguments };
    let arguments = |key: String, value: String, inner: String, leaf: String| {
        Object::from([(key, Json::String(value)), ("o".to_owned(), json(inner, leaf))])
    };
    Prompt {
        messages: vec![
            Message::System { name: text(), content: parts(text()), tools: Vec::new() },
            Message::User { name: text(), content: vec![Part::Text(text()), Part::Text(text())] },
            Message::Assistant {
                name: text(),
                reasoning: if xtml { text() } else { String::new() },
                content: parts(text()),
                calls: vec![
                    call(text(), Arguments::Object(arguments(text(), text(), text(), text()))),
                    call(text(), Arguments::Text(text())),
                ],
            },
            Message::Tool { id: Some("a".to_owned()), name: text(), content: parts(text()) },
        ],
        tools: vec![json(text(), text())],
        tool_choice: ToolChoice::Required,
        response_format: ResponseFormat::JsonSchema(json(text(), text())),
        thinking: xtml,
        effort: xtml.then_some(Effort::High),
        ..Prompt::default()
    }
}

#[test]
fn nobody_forges_structure() {
    for (xtml, (tokenizer, format)) in [(true, format("mini")), (false, turns_format())] {
        let specials = |texts: &[String]| -> Vec<u32> {
            let rendered = format.render(&everywhere(texts, xtml)).unwrap();
            rendered.encode(&tokenizer).ids.into_iter().filter(|id| tokenizer.is_special(*id)).collect()
        };
        let honest = specials(&["x".to_owned()]);
        assert!(honest.len() > 20);
        proptest!(ProptestConfig::with_cases(200), |(texts in proptest::collection::vec(forged(), 1..30))| {
            prop_assert_eq!(&specials(&texts), &honest);
        });
    }
}

fn value() -> impl Strategy<Value = Json> {
    let leaf = prop_oneof![
        Just(Json::Null),
        any::<bool>().prop_map(Json::Bool),
        proptest::sample::select(vec!["0", "-17", "2.5", "1e-05", "123456789012345678901234567890"])
            .prop_map(|text| Json::parse(text).unwrap()),
        forged().prop_map(Json::String),
        ".{0,12}".prop_map(Json::String),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..3).prop_map(Json::Array),
            proptest::collection::vec((".{0,4}", inner), 0..3)
                .prop_map(|entries| Json::Object(entries.into_iter().collect())),
        ]
    })
}

/// What is rendered as history is what a reader of the same tokens would have seen.
#[test]
fn an_answer_is_rendered_as_it_is_read() {
    let (tokenizer, format) = format("mini");
    let call = (forged(), proptest::collection::vec((forged(), value()), 0..3));
    let calls = proptest::collection::vec(call, 0..3);
    proptest!(ProptestConfig::with_cases(300), |(reasoning in forged(), content in ".{0,20}", calls in calls, thinking in any::<bool>())| {
        let calls: Vec<Call> = calls
            .into_iter()
            .map(|(name, arguments)| Call { id: None, name, arguments: Arguments::Object(arguments.into_iter().collect()) })
            .collect();
        let assistant = Message::Assistant {
            name: String::new(),
            reasoning: reasoning.clone(),
            content: vec![Part::Text(content.clone())],
            calls: calls.clone(),
        };
        let prompt = |messages, answer| Prompt { messages, thinking, answer, ..Prompt::default() };
        let opening = format.render(&prompt(vec![], true)).unwrap().encode(&tokenizer);
        prop_assert_eq!(opening.conversation, 0);
        let whole = format.render(&prompt(vec![assistant], false)).unwrap().encode(&tokenizer);
        prop_assert_eq!(whole.conversation, whole.ids.len());
        let (begin, rest) = whole.ids.split_at(opening.ids.len());
        prop_assert_eq!(begin, &opening.ids);

        let mut reply = reply(&format, thinking, &[]);
        for id in rest {
            reply.push(*id, &tokenizer).unwrap();
        }
        prop_assert_eq!(reply.end(), Some(End::Turn));
        let answer = reply.answer();
        prop_assert_eq!(&answer.reasoning, if thinking { &reasoning } else { "" });
        prop_assert_eq!(&answer.content, &content);
        prop_assert_eq!(answer.calls.len(), calls.len());
        for (read, call) in answer.calls.iter().zip(&calls) {
            let Arguments::Object(arguments) = &call.arguments else { unreachable!() };
            prop_assert_eq!(&read.name, &call.name);
            prop_assert_eq!(Json::parse(&read.arguments).unwrap(), Json::Object(arguments.clone()));
        }
    });
}

#[test]
fn stop_strings_end_the_content_and_nothing_else() {
    let (tokenizer, format) = format("mini");
    let close = |reply: &mut Reply, name: &str, marker: &str| {
        let mut deltas = reply.push_special(tokenizer.special_id(marker).unwrap());
        deltas.extend(reply.push_text(name.as_bytes()));
        deltas.extend(reply.push_special(tokenizer.special_id("<|sep|>").unwrap()));
        deltas
    };
    let mut reply = reply(&format, true, &["STOP", "é!"]);
    assert_eq!(reply.push_text(b"STOP"), [Delta::Reasoning("STOP".to_owned())]);
    close(&mut reply, "think", "<|close|>");
    close(&mut reply, "response", "<|open|>");
    assert_eq!(reply.push_text(b"one ST"), [Delta::Content("one ".to_owned())]);
    assert_eq!(reply.push_text(b"AR \xc3"), [Delta::Content("STAR ".to_owned())]);
    // Held back, as it could begin a stop string; and it was none.
    assert_eq!(reply.push_text(b"\xa9"), []);
    let mut cut = reply.clone();
    assert_eq!(cut.cut(), [Delta::Content("é".to_owned())]);
    assert_eq!(reply.push_text(b"! never seen"), []);
    assert_eq!((reply.end(), reply.finish_reason()), (Some(End::StopString), "stop"));
    assert_eq!(reply.answer().content, "one STAR ");
    assert_eq!(reply.counts().reasoning, 1);
    assert_eq!(reply.counts().content, 4);
}

#[test]
fn half_a_character_before_a_marker_is_not_lost() {
    let (tokenizer, format) = format("mini");
    let mut reply = reply(&format, false, &[]);
    assert_eq!(reply.push_text(b"a\xf0\x9f"), [Delta::Content("a".to_owned())]);
    // A special token that means nothing does not come between the halves.
    reply.push_special(tokenizer.special_id("[BOS]").unwrap());
    assert_eq!(reply.push_text(b"\x99\x82\xc3"), [Delta::Content("🙂".to_owned())]);
    let open = tokenizer.special_id("<|open|>").unwrap();
    assert_eq!(reply.push_special(open), [Delta::Content("\u{fffd}".to_owned())]);
    assert_eq!(reply.place(), Place::Header);
}

#[test]
fn an_endless_header_is_dropped() {
    let (tokenizer, format) = format("mini");
    let mut reply = reply(&format, false, &[]);
    reply.push_special(tokenizer.special_id("<|open|>").unwrap());
    for _ in 0..4096 / 8 {
        assert_eq!(reply.push_text(b"12345678"), []);
    }
    assert_eq!(reply.place(), Place::Header);
    assert_eq!(reply.push_text(b"9"), []);
    assert_eq!(reply.push_text(b"seen"), [Delta::Content("seen".to_owned())]);
    assert_eq!(ChatFormat::find(std::path::Path::new("x"), &tokenizer, Choice::Auto).unwrap().name(), "xtml");
}
