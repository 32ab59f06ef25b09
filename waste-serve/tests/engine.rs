//! The small model behind the server: what it writes, and what it need not compute again.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod util;

use std::sync::OnceLock;

use serde_json::{Value, json};
use util::*;
use waste_engine::{Engine, EngineOptions};
use waste_serve::Settings;
use waste_serve::access::Access;
use waste_serve::model::{EngineModel, Reuse};
use waste_tests::files::Model;
use waste_tests::tool::emulated;

fn model() -> &'static Model {
    static MODEL: OnceLock<Model> = OnceLock::new();
    MODEL.get_or_init(|| Model::converted(TALES))
}

fn server(reuse: Reuse) -> Server {
    server_for(reuse, Access::default())
}

fn server_for(reuse: Reuse, access: Access) -> Server {
    server_of(reuse, access, 1)
}

fn server_of(reuse: Reuse, access: Access, parallel: usize) -> Server {
    let options =
        EngineOptions { ctx: 4096, chunk: 32, threads: 2, readers: 2, parallel, ..EngineOptions::default() };
    let engine = Engine::open(&model().dir, options).unwrap();
    let settings = Settings { effort: None, parallel, queue: 32, ..Settings::default() };
    Server::new(facts(&model().dir), settings, access, EngineModel::new(engine, reuse, None, None).unwrap())
}

fn keeping() -> Reuse {
    Reuse::new(2, 1 << 30)
}

fn ask(messages: &[Value]) -> Value {
    json!({"model": "model", "messages": messages, "temperature": 0.8, "seed": 3, "max_tokens": 24, "logprobs": true, "top_logprobs": 3})
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

/// Text and the bits of every log probability.
fn answer(got: &Value) -> (String, Value, u64) {
    let choice = &got["choices"][0];
    let cached = got["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    (choice["message"]["content"].as_str().unwrap_or("").to_owned(), choice["logprobs"].clone(), cached)
}

/// A prompt that was computed up to the conversation's end before, and one that never was.
#[test]
fn a_kept_state_gives_the_bits_of_a_fresh_one() {
    if emulated() {
        return;
    }
    runtime().block_on(async {
        let kept = server(keeping());
        let first = user(&"Once upon a time there was a king who had three daughters. ".repeat(5));
        let one = kept.chat(&ask(std::slice::from_ref(&first))).await.json();
        let fresh = answer(&one);
        assert_eq!(fresh.2, 0);
        // The same again: all of the prompt is kept, and what it left.
        let again = answer(&kept.chat(&ask(std::slice::from_ref(&first))).await.json());
        assert_eq!((&again.0, &again.1), (&fresh.0, &fresh.1));
        assert_eq!(Some(again.2), one["usage"]["prompt_tokens"].as_u64());
        // With another note at the end only the conversation is.
        let mut noted = ask(std::slice::from_ref(&first));
        noted["response_format"] = json!({"type": "json_object"});
        let found = answer(&kept.chat(&noted).await.json());
        assert!(found.2 > 0 && found.2 < one["usage"]["prompt_tokens"].as_u64().unwrap());
        let expected = answer(&server(Reuse::new(0, 0)).chat(&noted).await.json());
        assert_eq!((found.0, found.1, expected.2), (expected.0, expected.1, 0));
    });
}

#[test]
fn the_next_turn_computes_only_what_is_new() {
    if emulated() {
        return;
    }
    runtime().block_on(async {
        let server = server(keeping());
        let first = user(&"There was once a miller who had a daughter. ".repeat(80));
        let one = server.chat(&ask(std::slice::from_ref(&first))).await.json();
        let prompt = one["usage"]["prompt_tokens"].as_u64().unwrap();
        assert!(prompt > 800, "{prompt}");
        let said = json!({"role": "assistant", "content": one["choices"][0]["message"]["content"]});
        let two = server.chat(&ask(&[first.clone(), said, user("And then?")])).await.json();
        let cached = two["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        // At least the first message; all of the answer if it was rendered as it was generated.
        assert!(cached + 20 >= prompt, "{cached} of {prompt}");
        assert_eq!(two["waste"]["prompt_reused"], cached);
        // Another conversation knows nothing of it.
        let other = server.chat(&ask(&[user("Hello")])).await.json();
        assert!(answer(&other).2 < 10);
        let metrics = server.get("/metrics").await.text;
        assert!(
            metrics.contains(&format!("waste_prompt_tokens_reused_total {}", cached + answer(&other).2)),
            "{metrics}"
        );
    });
}

#[test]
fn keys_do_not_share_states() {
    if emulated() {
        return;
    }
    runtime().block_on(async {
        let server = server_for(keeping(), Access::new(&["one".to_owned(), "two".to_owned()]));
        let body = ask(&[user("Once upon a time there was a king.")]);
        for (key, kept) in [("one", false), ("two", false), ("one", true), ("two", true)] {
            let mut request = post("/v1/chat/completions", &body);
            request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
            assert_eq!(answer(&server.send(request).await.json()).2 > 0, kept, "{key}");
        }
    });
}

#[test]
fn a_text_goes_on_as_on_the_command_line() {
    if emulated() {
        return;
    }
    runtime().block_on(async {
        let server = server(keeping());
        let args = [model().arg(), "Once upon a time", "-n", "20", "--no-bos", "--json", "-q"];
        let run = waste_tests::tool::run("waste-run", args).done().json("waste-run/1");
        let body = json!({"model": "model", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "logprobs": 2});
        let got = server.post("/v1/completions", &body).await.json();
        let choice = &got["choices"][0];
        assert_eq!(choice["text"], run["text"]);
        let logprobs = &choice["logprobs"];
        let tokens: String = logprobs["tokens"].as_array().unwrap().iter().map(|token| token.as_str().unwrap()).collect();
        assert_eq!(json!(tokens), run["text"]);
        for (i, chosen) in logprobs["token_logprobs"].as_array().unwrap().iter().enumerate() {
            let best = logprobs["top_logprobs"][i].as_object().unwrap().values().next().unwrap();
            assert_eq!(chosen, best, "greedy takes the most likely");
        }
        // The prompt as ids, streamed, with a stop string.
        let tokens = server.post("/tokenize", &json!({"prompt": "Once upon a time"})).await.json();
        let stop = run["text"].as_str().unwrap().split(' ').nth(4).unwrap();
        let body = json!({"model": "model", "prompt": tokens["tokens"], "max_tokens": 20, "temperature": 0, "stop": stop, "stream": true});
        let events = server.post("/v1/completions", &body).await.events();
        let text: String = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
        assert_eq!(text, run["text"].as_str().unwrap().split(stop).next().unwrap());
        assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "stop");
        // A bias beyond all others chooses.
        let comma = server.post("/tokenize", &json!({"prompt": ","})).await.json()["tokens"][0].to_string();
        let body = json!({"model": "model", "prompt": "Once", "max_tokens": 3, "temperature": 0, "logit_bias": {comma: 100}});
        assert_eq!(server.post("/v1/completions", &body).await.json()["choices"][0]["text"], ",,,");
    });
}

#[test]
fn a_tool_that_must_be_called_is() {
    if emulated() {
        return;
    }
    runtime().block_on(async {
        let server = server(keeping());
        let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
        for (choice, names) in [
            (json!("required"), &["tide_table", "weather"][..]),
            (json!({"type": "function", "function": {"name": "weather"}}), &["weather"]),
        ] {
            for (thinking, seed) in [(false, 1), (true, 2)] {
                let body = json!({
                    "model": "model", "messages": [user("Is the tide high?")], "tools": [tool("tide_table"), tool("weather")],
                    "tool_choice": choice, "thinking": thinking, "seed": seed, "max_tokens": 120, "temperature": 1.0,
                });
                let got = server.chat(&body).await.json();
                let name = got["choices"][0]["message"]["tool_calls"][0]["function"]["name"].as_str().unwrap_or("none");
                assert!(names.contains(&name), "{got}");
            }
        }
        let mut none = ask(&[user("Is the tide high?")]);
        none["tools"] = json!([tool("tide_table")]);
        none["tool_choice"] = "none".into();
        let got = server.chat(&none).await.json();
        assert!(got["choices"][0]["message"].get("tool_calls").is_none(), "{got}");
    });
}

/// The schema of what people expect of such answers: an object, an enum, a number, a list.
fn creature() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["fox", "owl", "hare"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "likes": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
        },
        "required": ["name", "kind", "age", "likes"],
        "additionalProperties": false,
    })
}

fn is_creature(text: &str) -> bool {
    let Ok(value) = serde_json::from_str::<Value>(text) else { return false };
    let Some(object) = value.as_object() else { return false };
    let strings = |list: &Vec<Value>| list.len() <= 2 && list.iter().all(Value::is_string);
    object.len() == 4
        && value["name"].is_string()
        && ["fox", "owl", "hare"].iter().any(|kind| value["kind"] == *kind)
        && value["age"].as_u64().is_some_and(|age| age <= 99)
        && value["likes"].as_array().is_some_and(strings)
}

#[test]
fn an_answer_keeps_to_its_schema_every_time() {
    if emulated() {
        return;
    }
    runtime().block_on(async {
        let server = server(keeping());
        let format = json!({"type": "json_schema", "json_schema": {"name": "creature", "schema": creature(), "strict": true}});
        for seed in 0..100 {
            let body = json!({
                "model": "model", "messages": [user("Tell me of an animal.")], "response_format": format,
                "temperature": 1.0, "seed": seed, "max_tokens": 400, "stream": seed % 10 == 3,
            });
            let got = server.chat(&body).await;
            let (text, reason) = if seed % 10 == 3 {
                let events = got.events();
                let text = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
                let reason = events.iter().find_map(|event| event["choices"][0]["finish_reason"].as_str());
                (text.collect::<String>(), reason.unwrap_or_default().to_owned())
            } else {
                let got = got.json();
                assert_eq!(got["waste"]["grammar"], "enforced");
                let choice = &got["choices"][0];
                let text = choice["message"]["content"].as_str().unwrap_or_default().to_owned();
                (text, choice["finish_reason"].as_str().unwrap_or_default().to_owned())
            };
            assert!(is_creature(&text) && reason == "stop", "{seed}: {reason}: {text}");
        }
    });
}

#[test]
fn json_with_thinking_with_tools_and_cut() {
    if emulated() {
        return;
    }
    runtime().block_on(async {
        let server = server(keeping());
        let schema = json!({"type": "json_schema", "json_schema": {"name": "creature", "schema": creature()}});
        let ask = |seed: u64, format: &Value| {
            json!({
                "model": "model", "messages": [user("Is the tide high?")], "response_format": format,
                "temperature": 1.0, "seed": seed, "max_tokens": 600,
            })
        };
        let (mut thought, mut called) = (0, 0);
        for seed in 0..6 {
            let mut body = ask(seed, &schema);
            body["thinking"] = true.into();
            let got = server.chat(&body).await.json();
            let choice = &got["choices"][0];
            // Thinking is free, and may be all there is room for.
            if choice["finish_reason"] == "stop" {
                assert!(is_creature(choice["message"]["content"].as_str().unwrap()), "{got}");
                thought += 1;
            }
            // A call may stand in place of the text.
            let mut body = ask(seed, &schema);
            body["tools"] = json!([{"type": "function", "function": {"name": "tide_table"}}]);
            let got = server.chat(&body).await.json();
            let message = &got["choices"][0]["message"];
            let content = message["content"].as_str().unwrap_or_default();
            assert!(is_creature(content) || content.is_empty() && !message["tool_calls"].is_null(), "{got}");
            // And must, if it is asked for; the text may be there too.
            body["tool_choice"] = "required".into();
            let got = server.chat(&body).await.json();
            let message = &got["choices"][0]["message"];
            assert_eq!(message["tool_calls"][0]["function"]["name"], "tide_table", "{got}");
            let content = message["content"].as_str().unwrap_or_default();
            assert!(content.is_empty() || is_creature(content), "{got}");
            called += usize::from(content.is_empty());
        }
        assert!(thought > 0 && called > 0, "{thought} {called}");
        let object = server.chat(&ask(1, &json!({"type": "json_object"}))).await.json();
        let choice = &object["choices"][0];
        let text = choice["message"]["content"].as_str().unwrap();
        let whole = serde_json::from_str::<Value>(text).is_ok_and(|value| value.is_object());
        assert!(whole || choice["finish_reason"] == "length", "{object}");
        let mut cut = ask(1, &schema);
        cut["max_tokens"] = 3.into();
        let cut = server.chat(&cut).await.json();
        assert_eq!(cut["choices"][0]["finish_reason"], "length");
        // What cannot be kept to is said.
        let odd = json!({"type": "array", "uniqueItems": true});
        let format = |strict: bool| json!({"type": "json_schema", "json_schema": {"name": "a", "schema": odd, "strict": strict}});
        let refused = server.chat(&ask(1, &format(true))).await;
        assert_eq!((refused.status.as_u16(), refused.json()["error"]["code"].as_str()), (400, Some("unsupported_schema")));
        let mut loose = ask(1, &format(false));
        loose["max_tokens"] = 3.into();
        assert_eq!(server.chat(&loose).await.json()["waste"]["grammar"], "prompt-only");
    });
}

/// Requests of all kinds, each with a prompt of its own.
fn variety() -> Vec<Value> {
    let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
    let schema = json!({"type": "json_schema", "json_schema": {"name": "creature", "schema": creature(), "strict": true}});
    let kinds = [
        json!({"temperature": 0}),
        json!({"temperature": 0.9, "logprobs": true, "top_logprobs": 4}),
        json!({"temperature": 1.0, "presence_penalty": 1.1, "frequency_penalty": 0.7}),
        json!({"temperature": 1.0, "response_format": schema, "max_tokens": 200}),
        json!({"temperature": 1.0, "tools": [tool("tide_table"), tool("weather")], "tool_choice": "required", "max_tokens": 100}),
        json!({"temperature": 0.8, "stop": [" the", "."], "top_k": 30}),
        json!({"temperature": 0.7, "thinking": true, "max_tokens": 60}),
        json!({"temperature": 0.8, "min_p": 0.05, "max_tokens": 1}),
    ];
    let body = |(i, kind): (usize, &Value)| {
        let text = format!("Tell me of number {i}. {}", "It was a fine day. ".repeat(i * 7 % 40));
        let mut body =
            json!({"model": "model", "messages": [user(&text)], "seed": 100 + i, "max_tokens": 40});
        body.as_object_mut().unwrap().extend(kind.as_object().unwrap().clone());
        body
    };
    kinds.iter().chain(&kinds).enumerate().map(body).collect()
}

/// What an answer says, without what no two have in common.
fn said(mut got: Value) -> Value {
    let mut choice = got["choices"][0].take();
    let calls = choice.pointer_mut("/message/tool_calls").and_then(Value::as_array_mut);
    calls.into_iter().flatten().for_each(|call| drop(call["id"].take()));
    json!([choice, got["usage"], got["waste"]["seed"], got["waste"]["grammar"]])
}

/// The answers, asked for all at once.
async fn all_at_once(server: &std::sync::Arc<Server>, bodies: &[Value]) -> Vec<Value> {
    let ask = |body: &Value| {
        let (server, body) = (std::sync::Arc::clone(server), body.clone());
        tokio::spawn(async move { server.chat(&body).await.json() })
    };
    let mut clients: Vec<_> = bodies.iter().map(ask).collect();
    let mut answers = Vec::new();
    for client in &mut clients {
        answers.push(said(client.await.unwrap()));
    }
    answers
}

#[test]
fn each_of_several_has_the_answer_it_has_alone() {
    if emulated() {
        return;
    }
    runtime().block_on(async {
        let bodies = variety();
        let alone = server(Reuse::new(0, 0));
        let mut expected = Vec::new();
        for body in &bodies {
            expected.push(said(alone.chat(body).await.json()));
        }
        let together = std::sync::Arc::new(server_of(keeping(), Access::default(), 4));
        assert!(all_at_once(&together, &bodies).await == expected);
        // Others come and leave again, in their prompts and in their answers.
        let visitors = (0..6).map(|i| {
            let text = format!("Visitor {i}. {}", "A word. ".repeat(i * 40));
            let body = json!({"model": "model", "messages": [user(&text)], "seed": i, "stream": true, "max_tokens": 500});
            let server = std::sync::Arc::clone(&together);
            tokio::spawn(async move {
                let wait = std::time::Duration::from_millis(20 + 30 * i as u64);
                let _ = tokio::time::timeout(wait, server.chat(&body)).await;
            })
        });
        let visitors: Vec<_> = visitors.collect();
        assert!(all_at_once(&together, &bodies[..6]).await.iter().map(|said| &said[0]).eq(expected[..6].iter().map(|said| &said[0])));
        for visitor in visitors {
            visitor.await.unwrap();
        }
        let queue = std::sync::Arc::clone(&together.service.queue);
        until("all to be free", || queue.status().running == 0).await;
    });
}

/// Turns of several conversations at a time go on from their own states, as they do one after the other.
#[test]
fn states_are_each_conversations_own() {
    if emulated() {
        return;
    }
    runtime().block_on(async {
        let conversations = 4;
        let first: Vec<Value> = (0..conversations)
            .map(|i| ask(&[user(&format!("Story {i}. {}", "There was a miller. ".repeat(10 + 5 * i)))]))
            .collect();
        let one =
            std::sync::Arc::new(server_of(Reuse::new(2 * conversations, 1 << 30), Access::default(), 1));
        let many = std::sync::Arc::new(server_of(
            Reuse::new(2 * conversations, 1 << 30),
            Access::default(),
            conversations,
        ));
        let mut answers = Vec::new();
        for body in &first {
            answers.push(said(one.chat(body).await.json()));
        }
        assert!(all_at_once(&many, &first).await == answers);
        let second: Vec<Value> = first
            .iter()
            .zip(&answers)
            .map(|(body, said)| {
                let reply = json!({"role": "assistant", "content": said[0]["message"]["content"]});
                ask(&[body["messages"][0].clone(), reply, user("And then?")])
            })
            .collect();
        let mut expected = Vec::new();
        for (body, before) in second.iter().zip(&answers) {
            let said = said(one.chat(body).await.json());
            let cached = said[1]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
            assert!(cached + 20 >= before[1]["prompt_tokens"].as_u64().unwrap(), "{said}");
            expected.push(said);
        }
        assert!(all_at_once(&many, &second).await == expected);
    });
}
