//! Kimi's turn markers, chat.json, and answers with a sampler.

use std::path::Path;

use waste_engine::Finish;
use waste_engine::chat::{
    ChatError, ChatFormat, Choice, Delta, Effort, End, Json, Limits, Message, Place, Prompt, Turn, read,
};
use waste_engine::sampler::{SamplerOptions, StopMatcher};
use waste_engine::tokenizer::Tokenizer;

use crate::util::{format, merge, tokenizer_with, turns_format};

fn text(format: &ChatFormat, prompt: &Prompt) -> String {
    format.render(prompt).unwrap().list().iter().map(|segment| segment.text.as_str()).collect()
}

fn unsupported(format: &ChatFormat, prompt: &Prompt) -> &'static str {
    match format.render(prompt) {
        Err(ChatError::Unsupported { field }) => field,
        other => panic!("{other:?}"),
    }
}

fn answers(messages: &str) -> Prompt {
    let messages = read::messages(&Json::parse(messages).unwrap()).unwrap().list;
    Prompt { messages, thinking: false, ..Prompt::default() }
}

#[test]
fn a_conversation_in_turns() {
    let (tokenizer, format) = turns_format();
    assert_eq!((format.name(), format.thinks(), format.calls_tools()), ("turns", false, true));
    let mut prompt = answers(
        r#"[{"role":"system","content":"Be brief."},{"role":"user","name":"ana","content":[{"type":"text","text":"Depth"},{"type":"text","text":"?"}]},
            {"role":"assistant","content":"Wait.","tool_calls":[{"id":"c9","function":{"name":"tide","arguments":"{\"b\":1}"}},
              {"id":"c8","function":{"name":"clock","arguments":{"z":[1,2.50],"a":"é"}}}]},
            {"role":"tool","tool_call_id":"c8","content":"12:00"},{"role":"tool","tool_call_id":"c9","name":"gauge","content":"4.2 m"}]"#,
    );
    prompt.tools = vec![Json::parse(r#"{"type":"function","function":{"name":"tide"}}"#).unwrap()];
    assert_eq!(
        text(&format, &prompt),
        "<|im_system|>tool_declare<|im_middle|>[{\"type\":\"function\",\"function\":{\"name\":\"tide\"}}]<|im_end|>\
         <|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>ana<|im_middle|>Depth?<|im_end|>\
         <|im_assistant|>assistant<|im_middle|>Wait.<|tool_calls_section_begin|>\
         <|tool_call_begin|>functions.tide:0<|tool_call_argument_begin|>{\"b\":1}<|tool_call_end|>\
         <|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{\"z\": [1, 2.5], \"a\": \"é\"}<|tool_call_end|>\
         <|tool_calls_section_end|><|im_end|>\
         <|im_system|>tool<|im_middle|>## Return of functions.clock:1\n12:00<|im_end|>\
         <|im_system|>gauge<|im_middle|>## Return of functions.tide:0\n4.2 m<|im_end|>\
         <|im_assistant|>assistant<|im_middle|>"
    );
    // One marker, label and middle are the ids of one markup segment.
    let opening = format.render(&Prompt { thinking: false, ..Prompt::default() }).unwrap().encode(&tokenizer);
    assert_eq!(opening.ids, tokenizer.encode_markup("<|im_assistant|>assistant<|im_middle|>"));

    assert_eq!(unsupported(&format, &Prompt::default()), "thinking");
    let effort = Prompt { thinking: false, effort: Some(Effort::Low), ..Prompt::default() };
    assert_eq!(unsupported(&format, &effort), "reasoning_effort");
    let image = answers(r#"[{"role":"user","content":[{"type":"image","image":"x"}]}]"#);
    assert_eq!(unsupported(&format, &image), "messages.content.image_url");
    let thought = answers(r#"[{"role":"assistant","content":"","reasoning_content":"hm"}]"#);
    assert_eq!(unsupported(&format, &thought), "messages.reasoning_content");
    let orphan =
        answers(r#"[{"role":"user","content":"x"},{"role":"tool","tool_call_id":"zzz","content":"y"}]"#);
    assert_eq!(format.render(&orphan).unwrap_err().param(), Some("messages[1].tool_call_id"));
}

#[test]
fn an_answer_in_turns() {
    let (tokenizer, format) = turns_format();
    let prompt = Prompt { thinking: false, ..Prompt::default() };
    let start = || format.reply(&prompt, &[], StopMatcher::new::<&str>(&[]).unwrap());
    let mut reply = start();
    let mut push = |text: &str| -> Vec<Delta> {
        let ids = tokenizer.encode_markup(text);
        merge(ids.into_iter().flat_map(|id| reply.push(id, &tokenizer).unwrap()).collect())
    };
    let call = |index: usize, name: &str| Delta::Call { index, name: name.to_owned() };
    let arguments = |index: usize, text: &str| Delta::Arguments { index, text: text.to_owned() };
    assert_eq!(push("Wait.<|tool_calls_section_begin|>\n"), [Delta::Content("Wait.".to_owned())]);
    assert_eq!(
        push("<|tool_call_begin|> functions.a.tide:0 <|tool_call_argument_begin|>"),
        [call(0, "tide")]
    );
    assert_eq!(push("{\"b\": 1}<|tool_call_end|> dropped "), [arguments(0, "{\"b\": 1}")]);
    assert_eq!(push("<|tool_call_begin|>:<|tool_call_argument_begin|>nameless<|tool_call_end|>"), []);
    assert_eq!(push("<|tool_call_begin|>ping<|tool_call_argument_begin|>"), [call(1, "ping")]);
    assert_eq!(push("<|tool_calls_section_end|>Bye"), [arguments(1, "{}"), Delta::Content("Bye".to_owned())]);
    assert_eq!(push("<|im_end|>ghost"), []);
    assert_eq!((reply.end(), reply.finish_reason()), (Some(End::Turn), "tool_calls"));
    assert!(reply.answer().calls.iter().all(|call| call.complete));

    // Wherever it is cut, it can be closed; and no half call looks whole.
    let whole =
        "a<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"k\": 1}";
    let ids = tokenizer.encode_markup(whole);
    for length in 0..=ids.len() {
        let mut reply = start();
        for id in &ids[..length] {
            reply.push(*id, &tokenizer).unwrap();
        }
        reply.cut();
        assert!(reply.answer().calls.iter().all(|call| !call.complete));
        assert_eq!(reply.finish_reason(), "length");
        for id in format.closing(&reply).encode(&tokenizer).ids {
            reply.push(id, &tokenizer).unwrap();
        }
        assert_eq!(reply.end(), Some(End::Turn));
    }
}

#[test]
fn without_every_marker_there_are_no_turns() {
    let nowhere = Path::new("nowhere");
    let tokenizer =
        tokenizer_with(&["[EOS]", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_end|>"]);
    assert!(matches!(ChatFormat::find(nowhere, &tokenizer, Choice::Auto), Err(ChatError::NoFormat { .. })));
}

fn with_file(tokenizer: &Tokenizer, content: &str, choice: Choice) -> Result<ChatFormat, ChatError> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("chat.json"), content).unwrap();
    ChatFormat::find(dir.path(), tokenizer, choice)
}

#[test]
fn a_format_from_a_file() {
    let tokenizer = tokenizer_with(&["[EOS]", "<|user|>", "<|end|>", "<|bot|>"]);
    let file = r#"{"user":["<|user|>Q: ","<|end|>\n"],"assistant":["<|bot|>","<|end|>\n"],"open":"<|bot|>"}"#;
    let format = with_file(&tokenizer, file, Choice::Auto).unwrap();
    assert_eq!((format.name(), format.thinks()), ("file", false));
    let end = tokenizer.special_id("<|end|>").unwrap();
    assert!(format.stop_ids().contains(&end) && format.stop_ids().contains(&tokenizer.eos().unwrap()));
    let prompt = answers(
        r#"[{"role":"user","content":"<|end|>"},{"role":"assistant","content":"b"},{"role":"user","content":"c"}]"#,
    );
    assert_eq!(
        text(&format, &prompt),
        "<|user|>Q: <|end|><|end|>\n<|bot|>b<|end|>\n<|user|>Q: c<|end|>\n<|bot|>"
    );
    let ids = format.render(&prompt).unwrap().encode(&tokenizer).ids;
    assert_eq!(ids.iter().filter(|id| **id == end).count(), 3);
    let mut reply = format.reply(&prompt, &[], StopMatcher::new::<&str>(&[]).unwrap());
    assert_eq!(reply.push_text(b"d"), [Delta::Content("d".to_owned())]);
    reply.push_special(end);
    assert_eq!(reply.end(), Some(End::Turn));
    assert_eq!(format.closing(&reply).encode(&tokenizer).ids, tokenizer.encode_markup("<|end|>\n"));
    let system = answers(r#"[{"role":"system","content":"x"}]"#);
    assert_eq!(format.render(&system).unwrap_err().param(), Some("messages[0].role"));

    for wrong in [
        file.replace("<|bot|>\"}", "<|bat|>\"}"),
        file.replace("[\"<|bot|>\",\"<|end|>", "[\"<|bot|>\",\"<end>"),
        file.replace("\"open\"", "\"opens\""),
        file.replace("[\"<|user|>Q: ", "[\"<|user"),
        String::new(),
    ] {
        let error = with_file(&tokenizer, &wrong, Choice::Auto).unwrap_err();
        assert!(matches!(error, ChatError::File { .. }), "{wrong}: {error}");
    }
    // The markers of the tokenizer win, unless the file is asked for.
    let (tokenizer, _) = crate::util::format("mini");
    let file = r#"{"user":["<|open|>","<|close|>"],"assistant":["","<|sep|>"],"open":""}"#;
    assert_eq!(with_file(&tokenizer, file, Choice::Auto).unwrap().name(), "xtml");
    assert_eq!(with_file(&tokenizer, file, Choice::File).unwrap().name(), "file");
    assert!(matches!(
        ChatFormat::find(Path::new("nowhere"), &tokenizer, Choice::File),
        Err(ChatError::Read(_))
    ));
}

/// An answer of a model that only ever wants one token.
fn turn(thinking: bool, limits: Limits, token: &str) -> (Tokenizer, ChatFormat, Turn, Vec<f32>) {
    let (tokenizer, format) = format("mini");
    let prompt = Prompt { messages: vec![Message::user("x")], thinking, ..Prompt::default() };
    let turn = Turn::new(&format, &tokenizer, &prompt, SamplerOptions::default(), limits).unwrap();
    let mut logits = vec![0.0; tokenizer.vocab_size() as usize];
    logits[tokenizer.encode_markup(token)[0] as usize] = 1.0;
    (tokenizer, format, turn, logits)
}

fn limits(tokens: usize, think: Option<usize>) -> Limits {
    Limits { tokens, think, stop: Vec::new(), stop_ids: Vec::new() }
}

#[test]
fn thinking_is_closed_at_its_limit() {
    for most in [0, 3] {
        let (tokenizer, format, mut turn, logits) = turn(true, limits(20, Some(most)), "a");
        while turn.finish().is_none() {
            turn.next(&logits, None, &tokenizer).unwrap();
        }
        let forced = format.end_thinking().unwrap().encode(&tokenizer).ids;
        let answer = turn.reply().answer();
        assert_eq!(answer.reasoning, "a".repeat(most));
        assert_eq!(answer.content, "a".repeat(20 - most - forced.len()));
        assert_eq!(turn.tokens()[most..most + forced.len()], forced);
        assert_eq!((turn.finish(), turn.reply().finish_reason()), (Some(Finish::Length), "length"));
    }
    // Without thinking there is nothing to close.
    let (tokenizer, _, mut turn, logits) = turn(false, limits(4, Some(0)), "a");
    while turn.finish().is_none() {
        turn.next(&logits, None, &tokenizer).unwrap();
    }
    assert_eq!(turn.reply().answer().content, "aaaa");
}

#[test]
fn a_turn_ends_by_id_string_limit_or_hand() {
    let (tokenizer, _, mut ended, logits) = turn(false, limits(9, None), "<|end_of_msg|>");
    assert_eq!(ended.next(&logits, None, &tokenizer).unwrap(), []);
    assert_eq!((ended.finish(), ended.tokens()), (Some(Finish::Stop), &[][..]));
    assert_eq!(ended.next(&logits, None, &tokenizer).unwrap(), []);

    let stop = Limits { stop: vec!["aa".to_owned()], ..limits(9, None) };
    let (tokenizer, _, mut stopped, logits) = turn(false, stop, "a");
    assert_eq!(stopped.next(&logits, None, &tokenizer).unwrap(), []);
    assert_eq!(stopped.next(&logits, None, &tokenizer).unwrap(), []);
    assert_eq!((stopped.finish(), stopped.tokens().len()), (Some(Finish::StopString), 2));

    let (tokenizer, _, mut cut, logits) = turn(false, limits(9, None), "a");
    cut.next(&logits, None, &tokenizer).unwrap();
    assert_eq!(cut.cut(Finish::Cancelled), []);
    assert_eq!((cut.finish(), cut.reply().place()), (Some(Finish::Cancelled), Place::Response));

    let (.., none, _) = turn(false, limits(0, None), "a");
    assert_eq!(none.finish(), Some(Finish::Length));
}
