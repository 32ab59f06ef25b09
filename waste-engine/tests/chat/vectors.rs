//! The vectors of the XTML format.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};
use waste_engine::chat::read;
use waste_engine::chat::{
    ChatError, Delta, End, Image, Json, Kind, Part, Prompt, Reply, Segments, ToolChoice,
};
use waste_engine::sampler::StopMatcher;

use crate::util::{format, json, merge, tokenizer};

/// The prompt of a vector's request, or why there is none.
fn prompt(request: &Json) -> Result<Prompt, String> {
    // The vectors show that the raw renderer drops unknown roles; the reader refuses them or maps them.
    let known = |message: &&Json| message.get("role").and_then(Json::as_str) != Some("developer");
    let list = request.get("messages").unwrap().as_array().unwrap();
    let list = Json::Array(list.iter().filter(known).cloned().collect());
    let messages = read::messages(&list).map_err(|error| error.to_string())?;
    let thinking = request.get("thinking").and_then(Json::as_bool).unwrap_or(true);
    let effort = request.get("thinking_effort").and_then(Json::as_str).filter(|_| thinking);
    let images = request.get("image_prompts").and_then(Json::as_array).unwrap_or_default();
    Ok(Prompt {
        messages: messages.list,
        tools: request.get("tools").and_then(Json::as_array).unwrap_or_default().to_vec(),
        tool_choice: match request.get("tool_choice").and_then(Json::as_str) {
            Some("required") => ToolChoice::Required,
            Some("none") => ToolChoice::None,
            _ => ToolChoice::Auto,
        },
        response_format: request.get("response_format").map(read::response_format).unwrap_or_default(),
        thinking,
        effort: effort.map(str::parse).transpose()?,
        images: images.iter().map(|block| image(block.as_str().unwrap())).collect(),
        answer: request.get("add_generation_prompt").and_then(Json::as_bool).unwrap_or(true),
    })
}

/// The size in `<|media_begin|>image WxH<|media_content|>…`.
fn image(block: &str) -> Image {
    let size =
        block.strip_prefix("<|media_begin|>image ").unwrap().split_once("<|media_content|>").unwrap().0;
    let (width, height) = size.split_once('x').unwrap();
    Image { width: width.parse().unwrap(), height: height.parse().unwrap(), rows: 1 }
}

fn render(request: &Json) -> Result<Segments, String> {
    let (_, format) = format("mini");
    format.render(&prompt(request)?).map_err(|error| error.to_string())
}

#[test]
fn prompts_as_segments() {
    let vectors = json("xtml/prompts.json");
    let cases = vectors.get("cases").unwrap().as_array().unwrap();
    assert_eq!(cases.len(), 77);
    let mut failed = 0;
    for case in cases {
        let name = case.get("name").unwrap().as_str().unwrap();
        let rendered = render(case.get("request").unwrap());
        if case.get("error").and_then(Json::as_bool) == Some(true) {
            failed += 1;
            assert!(rendered.is_err(), "{name}");
            continue;
        }
        let rendered = rendered.unwrap_or_else(|error| panic!("{name}: {error}"));
        let found: Vec<(&str, bool)> = rendered
            .list()
            .iter()
            .map(|segment| (segment.text.as_str(), segment.kind != Kind::Content))
            .collect();
        let expected: Vec<(&str, bool)> = case
            .get("segments")
            .unwrap()
            .as_array()
            .unwrap()
            .iter()
            .map(|pair| pair.as_array().unwrap())
            .map(|pair| (pair[0].as_str().unwrap(), pair[1].as_bool().unwrap()))
            .collect();
        assert_eq!(found, expected, "{name}");
    }
    assert_eq!(failed, 7);
}

#[test]
fn prompts_as_ids() {
    let requests: BTreeMap<String, Json> = json("xtml/prompts.json")
        .get("cases")
        .unwrap()
        .as_array()
        .unwrap()
        .iter()
        .map(|case| {
            (case.get("name").unwrap().as_str().unwrap().to_owned(), case.get("request").unwrap().clone())
        })
        .collect();
    let vectors = json("xtml/prompt_ids.json");
    let cases = vectors.get("cases").unwrap().as_object().unwrap();
    assert_eq!(cases.len(), 70);
    for ranks in ["cl100k", "mini"] {
        let tokenizer = tokenizer(ranks);
        for (name, case) in cases {
            let expected = case.get(ranks).unwrap();
            let ids = render(&requests[name]).unwrap().encode(&tokenizer).ids;
            if let Some(list) = expected.get("ids") {
                let list: Vec<u32> =
                    list.as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as u32).collect();
                assert_eq!(ids, list, "{name} {ranks}");
            }
            assert_eq!(ids.len() as i64, expected.get("n").unwrap().as_i64().unwrap(), "{name} {ranks}");
            assert_eq!(Some(hash(&ids).as_str()), expected.get("sha256").unwrap().as_str(), "{name} {ranks}");
        }
    }
}

/// Of the ids as little-endian words.
fn hash(ids: &[u32]) -> String {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn replies_as_deltas_and_messages() {
    let vectors = json("xtml/streams.json");
    let cases = vectors.get("cases").unwrap().as_array().unwrap();
    assert_eq!(cases.len(), 46);
    let (tokenizer, format) = format("mini");
    for case in cases {
        let text = |json: &Json, key: &str| json.get(key).unwrap().as_str().unwrap().to_owned();
        let name = text(case, "name");
        let thinking = text(case, "generation_prompt_left_open") == "think";
        let prompt = Prompt { thinking, ..Prompt::default() };
        let mut reply: Reply = format.reply(&prompt, &[], StopMatcher::new::<&str>(&[]).unwrap());
        let deltas = case.get("deltas").unwrap().as_array().unwrap();
        for (item, expected) in case.get("items").unwrap().as_array().unwrap().iter().zip(deltas) {
            let found = match item.get("m").and_then(Json::as_str) {
                None => reply.push_text(text(item, "t").as_bytes()),
                Some(marker) => {
                    let marker = match marker {
                        "eos" => "[EOS]".to_owned(),
                        "reserved" => {
                            format!("<|reserved_token_{}|>", tokenizer.specials().last().unwrap().0 - 9)
                        }
                        marker => format!("<|{marker}|>"),
                    };
                    reply.push(tokenizer.special_id(&marker).unwrap(), &tokenizer).unwrap()
                }
            };
            let expected = expected.as_array().unwrap().iter().map(|delta| {
                let delta = delta.as_array().unwrap();
                let text = delta[1].as_str().unwrap().to_owned();
                let index = || delta[2].get("call").unwrap().as_i64().unwrap() as usize;
                match delta[0].as_str().unwrap() {
                    "reasoning" => Delta::Reasoning(text),
                    "content" => Delta::Content(text),
                    "call" => Delta::Call { index: index(), name: text },
                    _ => Delta::Arguments { index: index(), text },
                }
            });
            assert_eq!(merge(found), merge(expected.collect()), "{name}");
        }
        if case.get("stopped_by_limit").unwrap().as_bool().unwrap() {
            assert_eq!(reply.cut(), [], "{name}");
        }
        let expected = case.get("expected").unwrap();
        let answer = reply.answer();
        assert_eq!(answer.reasoning, text(expected, "reasoning"), "{name}");
        assert_eq!(answer.content, text(expected, "content"), "{name}");
        let calls: Vec<(&str, &str, bool)> = answer
            .calls
            .iter()
            .map(|call| (call.name.as_str(), call.arguments.as_str(), call.complete))
            .collect();
        let expected_calls: Vec<(&str, &str, bool)> = expected
            .get("tool_calls")
            .unwrap()
            .as_array()
            .unwrap()
            .iter()
            .map(|call| {
                let text = |key: &str| call.get(key).unwrap().as_str().unwrap();
                (text("name"), text("arguments"), call.get("complete").unwrap().as_bool().unwrap())
            })
            .collect();
        assert_eq!(calls, expected_calls, "{name}");
        assert_eq!(
            reply.end() == Some(End::Turn),
            expected.get("turn_closed").unwrap().as_bool().unwrap(),
            "{name}"
        );
        assert_eq!(reply.finish_reason(), text(expected, "finish_reason"), "{name}");
    }
}

#[test]
fn images_stand_where_their_parts_do_after_sorting() {
    let json = Json::parse(
        r#"[{"role":"assistant","tool_calls":[{"id":"a","name":"f"},{"id":"b","name":"g"}]},
            {"role":"tool","tool_call_id":"b","content":[{"type":"image","image":"of b"}]},
            {"role":"tool","tool_call_id":"a","content":[{"type":"image_url","image_url":"of a"}]}]"#,
    )
    .unwrap();
    let messages = read::messages(&json).unwrap();
    assert_eq!(messages.images[1].url(), Some("of a"));
    let image = |width, rows| Image { width, height: 1, rows };
    let prompt =
        Prompt { messages: messages.list, images: vec![image(7, 3), image(5, 2)], ..Prompt::default() };
    let (tokenizer, format) = format("mini");
    let encoded = format.render(&prompt).unwrap().encode(&tokenizer);
    assert_eq!(encoded.images, [1, 0]);
    let pad = tokenizer.special_id("<|media_pad|>").unwrap();
    let runs: Vec<usize> = encoded
        .ids
        .chunk_by(|a, b| (*a == pad) == (*b == pad))
        .filter(|run| run[0] == pad)
        .map(<[u32]>::len)
        .collect();
    assert_eq!(runs, [2, 3]);
    let twice = Prompt {
        messages: vec![waste_engine::chat::Message::User {
            name: String::new(),
            content: vec![Part::Image(0), Part::Image(0)],
        }],
        images: vec![image(1, 1)],
        ..Prompt::default()
    };
    assert!(matches!(format.render(&twice), Err(ChatError::Images { parts: 2, given: 1 })));
}
