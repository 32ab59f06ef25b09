//! What clients see: shapes of answers, errors, who may come in.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod util;

use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, Request};
use proptest::prelude::*;
use serde_json::{Value, json};
use util::*;
use waste_engine::tokenizer::Tokenizer;
use waste_serve::Settings;
use waste_serve::access::Access;
use waste_serve::model::ScriptModel;
use waste_tests::files::{data, json as read_json};

fn script() -> ScriptModel {
    ScriptModel::read(&data("xtml/streams.json"), &Tokenizer::open(&data(TALES)).unwrap()).unwrap()
}

fn scripted(settings: Settings) -> Server {
    Server::tales(settings, script())
}

fn hello() -> Value {
    json!({"model": "model", "messages": [{"role": "user", "content": "hello"}]})
}

/// The request a case of the script is the answer to.
fn request_for(case: &Value, stream: bool) -> Value {
    let mut body = hello();
    body["thinking"] = (case["generation_prompt_left_open"] == "think").into();
    body["tools"] = json!([{"type": "function", "function": {"name": "f"}}]);
    body["stream"] = stream.into();
    if case["stopped_by_limit"] == true {
        body["max_tokens"] = case["items"].as_array().unwrap().len().into();
    }
    body
}

#[test]
fn every_scripted_answer_arrives_whole() {
    runtime().block_on(async {
        let server = scripted(Settings::default());
        for case in read_json("xtml/streams.json")["cases"].as_array().unwrap() {
            let got = server.chat(&request_for(case, false)).await;
            let (name, expected, json) = (&case["name"], &case["expected"], got.json());
            let (choice, message) = (&json["choices"][0], &json["choices"][0]["message"]);
            let calls = expected["tool_calls"].as_array().unwrap();
            let content = expected["content"].as_str().unwrap();
            let null = content.is_empty() && !calls.is_empty();
            assert_eq!(message["content"], if null { Value::Null } else { content.into() }, "{name}: {json}");
            assert_eq!(message["reasoning_content"].as_str().unwrap_or(""), expected["reasoning"], "{name}");
            assert_eq!(choice["finish_reason"], expected["finish_reason"], "{name}");
            let found = message["tool_calls"].as_array().cloned().unwrap_or_default();
            assert_eq!(found.len(), calls.len(), "{name}");
            for (found, expected) in found.iter().zip(calls) {
                assert_eq!(found["function"]["arguments"], expected["arguments"], "{name}");
                assert!(found["id"].as_str().unwrap().starts_with("call_") && found["type"] == "function");
            }
            let usage = &json["usage"];
            assert_eq!(
                usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap(),
                usage["total_tokens"].as_u64().unwrap()
            );
            assert!(
                json["waste"]["seed"].is_u64()
                    && json["system_fingerprint"].as_str().unwrap().ends_with("01234567")
            );
        }
    });
}

#[test]
fn every_scripted_answer_arrives_in_pieces() {
    runtime().block_on(async {
        let server = scripted(Settings::default());
        for case in read_json("xtml/streams.json")["cases"].as_array().unwrap() {
            let mut body = request_for(case, true);
            body["stream_options"] = json!({"include_usage": true});
            let got = server.chat(&body).await;
            assert_eq!(got.headers["content-type"], "text/event-stream; charset=utf-8");
            assert_eq!(got.headers["cache-control"], "no-cache");
            let (name, expected, events) = (&case["name"], &case["expected"], got.events());
            let (mut reasoning, mut content) = (String::new(), String::new());
            let mut calls: Vec<(String, String)> = Vec::new();
            let (usage, chunks) = events.split_last().unwrap();
            assert!(usage["choices"] == json!([]) && usage["usage"]["total_tokens"].is_u64(), "{usage}");
            for chunk in chunks {
                assert_eq!((&chunk["id"], &chunk["object"]), (&usage["id"], &json!("chat.completion.chunk")));
                assert!(chunk["usage"].is_null() && chunk.as_object().unwrap().contains_key("usage"));
                let delta = &chunk["choices"][0]["delta"];
                reasoning += delta["reasoning_content"].as_str().unwrap_or("");
                content += delta["content"].as_str().unwrap_or("");
                for call in delta["tool_calls"].as_array().into_iter().flatten() {
                    let index = call["index"].as_u64().unwrap() as usize;
                    if let Some(name) = call["function"]["name"].as_str() {
                        assert_eq!(index, calls.len());
                        assert!(call["id"].is_string());
                        calls.push((name.to_owned(), String::new()));
                    }
                    calls[index].1 += call["function"]["arguments"].as_str().unwrap();
                }
            }
            assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
            let last = chunks.last().unwrap();
            assert_eq!(last["choices"][0]["delta"], json!({}));
            assert_eq!(last["choices"][0]["finish_reason"], expected["finish_reason"], "{name}");
            assert!(last["waste"]["prefill_ms"].is_number());
            assert_eq!(
                (json!(reasoning), json!(content)),
                (expected["reasoning"].clone(), expected["content"].clone()),
                "{name}"
            );
            let arguments: Vec<_> = calls.iter().map(|call| json!(call.1)).collect();
            let wanted: Vec<_> = expected["tool_calls"]
                .as_array()
                .unwrap()
                .iter()
                .map(|call| call["arguments"].clone())
                .collect();
            assert_eq!(arguments, wanted, "{name}");
        }
    });
}

#[test]
fn completions_models_and_tokens() {
    runtime().block_on(async {
        let server = scripted(Settings::default());
        let body = json!({"model": "model", "prompt": "Once upon", "max_tokens": 3});
        let got = server.post("/v1/completions/", &body).await.json();
        assert_eq!(
            (&got["object"], &got["choices"][0]["finish_reason"]),
            (&json!("text_completion"), &json!("length"))
        );
        assert!(got["choices"][0]["text"].as_str().unwrap().starts_with("Small primes."), "{got}");
        let mut streamed = body.clone();
        streamed["stream"] = true.into();
        let events = server.post("/v1/completions", &streamed).await.events();
        assert!(
            events.iter().all(|event| event["object"] == "text_completion" && event.get("usage").is_none())
        );

        let list = server.get("/v1/models").await.json();
        let one = server.get("/v1/models/model").await.json();
        assert_eq!((&list["data"][0], &one["id"]), (&one, &json!("model")));
        assert_eq!(server.get("/v1/models/gpt-4").await.code(), (404, "model_not_found".to_owned()));

        let text = "Twelve knots, <|sep|> it says.";
        let tokens = server.post("/tokenize", &json!({"prompt": text})).await.json();
        assert_eq!(tokens["count"].as_u64().unwrap() as usize, tokens["tokens"].as_array().unwrap().len());
        assert_eq!(tokens["max_model_len"], 4096);
        let back = server.post("/detokenize", &json!({"tokens": tokens["tokens"]})).await.json();
        assert_eq!(back["prompt"], text);
        let chat = server.post("/tokenize", &hello()).await.json();
        let usage = server.chat(&hello()).await.json();
        assert_eq!(chat["count"], usage["usage"]["prompt_tokens"]);

        let head = server.send(Request::head("/health").body(Body::empty()).unwrap()).await;
        assert_eq!((head.status.as_u16(), head.text.as_str()), (200, ""));
        let health = server.get("/ready").await.json();
        assert_eq!((&health["status"], &health["queue"]["capacity"]), (&json!("ok"), &json!(8)));
        let metrics = server.get("/metrics").await.text;
        for line in [
            "waste_requests_total{endpoint=\"/v1/completions\",status=\"200\"} 2",
            "# TYPE waste_ttft_seconds histogram",
            "waste_queue_waiting 0",
        ] {
            assert!(metrics.contains(line), "{metrics}");
        }
        // What is asked and answered stays out of the log.
        let log = server.log.lock().unwrap().join("\n");
        assert!(
            log.contains("/v1/chat/completions 200") && !log.contains("hello") && !log.contains("primes"),
            "{log}"
        );
    });
}

#[test]
fn what_is_wrong_is_named() {
    runtime().block_on(async {
        let server = scripted(Settings::default());
        let with = |key: &str, value: Value| {
            let mut body = hello();
            body[key] = value;
            body
        };
        let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
        for (body, code, param) in [
            (json!([]), "invalid_type", "body"),
            (json!({"model": "model"}), "missing_field", "messages"),
            (json!({"messages": []}), "missing_field", "model"),
            (with("messages", json!([])), "invalid_value", "messages"),
            (with("messages", json!([{"role": "function", "content": "x"}])), "invalid_messages", "messages[0].role"),
            (with("messages", json!("x")), "invalid_type", "messages"),
            (with("temperature", json!(2.5)), "invalid_value", "temperature"),
            (with("temperature", json!("hot")), "invalid_type", "temperature"),
            (with("n", json!(2)), "unsupported_parameter", "n"),
            (with("functions", json!([])), "unsupported_parameter", "functions"),
            (with("audio", json!({})), "unsupported_parameter", "audio"),
            (with("stop", json!(["", "x"])), "invalid_value", "stop"),
            (with("max_tokens", json!(0)), "invalid_value", "max_tokens"),
            (with("tools", json!([tool("a"), tool("a")])), "invalid_value", "tools[1]"),
            (with("tools", json!([{"type": "web"}])), "unsupported_parameter", "tools[0]"),
            (with("tool_choice", json!("required")), "invalid_value", "tool_choice"),
            (with("response_format", json!({"type": "json_schema"})), "missing_field", "response_format"),
            (with("response_format", json!({"type": "xml"})), "invalid_value", "response_format"),
            (with("reasoning_effort", json!("enormous")), "invalid_value", "reasoning_effort"),
            (with("logit_bias", json!({"99999": 1})), "invalid_value", "logit_bias"),
            (with("top_logprobs", json!(3)), "invalid_value", "top_logprobs"),
            (with("messages", json!([{"role": "user", "content": "word ".repeat(6000)}])), "context_length_exceeded", "messages"),
            (
                with("messages", json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}])),
                "image_url_not_supported",
                "messages[0].content[0]",
            ),
            (
                with("messages", json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}])),
                "vision_disabled",
                "messages[0].content[0]",
            ),
        ] {
            let got = server.chat(&body).await;
            assert_eq!(got.code(), (400, code.to_owned()), "{body}: {}", got.text);
            assert_eq!(got.json()["error"]["param"], param, "{body}");
            assert_eq!(got.json()["error"]["type"], "invalid_request_error");
        }
        assert_eq!(server.chat(&with("model", json!("gpt-4"))).await.code(), (404, "model_not_found".to_owned()));
        for (method, path, status, code) in [
            ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
            ("POST", "/health", 405, "method_not_allowed"),
            ("POST", "/v1/embeddings", 404, "unsupported_endpoint"),
            ("GET", "/nowhere", 404, "not_found"),
        ] {
            let request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
            let got = server.send(request).await;
            assert_eq!(got.code(), (status, code.to_owned()));
            assert_eq!(got.headers.contains_key("allow"), status == 405);
        }
        for effort in ["none", "minimal", "low", "medium", "high", "xhigh", "max"] {
            let got = server.chat(&with("reasoning_effort", json!(effort))).await.json();
            let off = ["none", "minimal"].contains(&effort);
            assert_eq!(got["waste"]["thinking"], !off, "{effort}: {got}");
        }
    });
}

/// Clients that send long bodies slowly take no more than two of them.
#[test]
fn bodies_have_a_limit_together() {
    runtime().block_on(async {
        let server = scripted(Settings { max_body: 4096, ..Settings::default() });
        let request = |body: Body| Request::post("/v1/chat/completions").body(body).unwrap();
        let slow = || {
            let piece = futures_util::stream::iter([Ok::<_, std::io::Error>(vec![b' '; 4096])]);
            let never = futures_util::stream::pending();
            request(Body::from_stream(futures_util::StreamExt::chain(piece, never)))
        };
        let mut sending = [Box::pin(server.send(slow())), Box::pin(server.send(slow()))];
        for sending in &mut sending {
            assert!(tokio::time::timeout(Duration::from_millis(100), sending).await.is_err());
        }
        let whole = || request(hello().to_string().into());
        assert_eq!(server.send(whole()).await.code(), (429, "queue_full".to_owned()));
        // Once they are gone there is room again.
        drop(sending);
        assert_eq!(server.send(whole()).await.status, 200);
    });
}

#[test]
fn bodies_have_their_limits() {
    runtime().block_on(async {
        let server = scripted(Settings { max_body: 1000, ..Settings::default() });
        let request = |kind: &str, body: Body| {
            Request::post("/v1/chat/completions").header("content-type", kind).body(body).unwrap()
        };
        let fits = format!("{:1$}", hello().to_string(), 1000);
        assert_eq!(
            server.send(request("application/json; charset=utf-8", fits.clone().into())).await.status,
            200
        );
        let long = fits + " ";
        // By its header, and by counting.
        let mut announced = request("application/json", Body::empty());
        announced.headers_mut().insert("content-length", 1001.into());
        let pieces = long
            .as_bytes()
            .chunks(100)
            .map(|piece| Ok::<_, std::io::Error>(piece.to_vec()))
            .collect::<Vec<_>>();
        let counted = request("application/json", Body::from_stream(futures_util::stream::iter(pieces)));
        for request in [announced, counted] {
            assert_eq!(server.send(request).await.code(), (413, "body_too_large".to_owned()));
        }
        for kind in ["text/plain", "multipart/form-data", ""] {
            let got = server.send(request(kind, hello().to_string().into())).await;
            assert_eq!(got.code(), (415, "unsupported_media_type".to_owned()));
        }
        let untyped = Request::post("/v1/chat/completions").body(Body::from(hello().to_string())).unwrap();
        assert_eq!(server.send(untyped).await.status, 200);
        for bad in ["", "{", "{\"a\":NaN}", &"[".repeat(900), "{\"model\":\"\\ud800\"}"] {
            let got = server.send(request("application/json", bad.to_owned().into())).await;
            assert_eq!(got.code(), (400, "invalid_json".to_owned()), "{bad}");
        }
    });
}

#[test]
fn keys_hosts_and_origins() {
    runtime().block_on(async {
        let get = |path: &str, headers: &[(&str, &str)]| {
            let mut request = Request::get(path);
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            request.body(Body::empty()).unwrap()
        };
        let access = Access::new(&["secret".to_owned(), "other".to_owned()]);
        let server = Server::new(facts(&data(TALES)), Settings::default(), access, script());
        for (headers, status) in [
            (vec![], 401),
            (vec![("authorization", "Bearer wrong")], 401),
            (vec![("authorization", "secret")], 401),
            (vec![("authorization", "Basic secret")], 401),
            (vec![("authorization", "Bearer secret")], 200),
            (vec![("authorization", "bearer other")], 200),
        ] {
            let got = server.send(get("/v1/models", &headers)).await;
            assert_eq!(got.status.as_u16(), status, "{headers:?}");
            if status == 401 {
                assert_eq!(got.code().1, "invalid_api_key");
                assert_eq!(got.headers["www-authenticate"], "Bearer");
            }
        }
        assert_eq!(server.get("/health").await.status, 200);
        assert_eq!(server.get("/metrics").await.status, 401);
        assert!(!server.log.lock().unwrap().iter().any(|line| line.contains("secret")));

        let mut access = Access::new(&[]);
        access.check_host = true;
        access.hosts = vec!["box.lan".to_owned()];
        access.origins = vec!["https://good.example".to_owned()];
        let server = Server::new(facts(&data(TALES)), Settings::default(), access, script());
        for (host, status) in [
            ("localhost:8000", 200),
            ("127.0.0.1", 200),
            ("[::1]:8000", 200),
            ("box.lan:8000", 200),
            ("evil.example", 403),
            ("localhost.evil.example", 403),
        ] {
            let got = server.send(get("/v1/models", &[("host", host)])).await;
            assert_eq!(got.status.as_u16(), status, "{host}");
        }
        let from = |origin: &str, method: Method| {
            let request =
                Request::builder().method(method).uri("/v1/chat/completions").header("host", "localhost");
            request.header("origin", origin).body(Body::from(hello().to_string())).unwrap()
        };
        let refused = server.send(from("https://evil.example", Method::POST)).await;
        assert_eq!(refused.code(), (403, "origin_not_allowed".to_owned()));
        let own = server.send(from("http://localhost", Method::POST)).await;
        assert_eq!(
            (own.status.as_u16(), own.headers.contains_key("access-control-allow-origin")),
            (200, false)
        );
        let good = server.send(from("https://good.example", Method::POST)).await;
        assert_eq!(good.headers["access-control-allow-origin"], "https://good.example");
        let mut preflight = from("https://good.example", Method::OPTIONS);
        let headers = preflight.headers_mut();
        headers.insert("access-control-request-method", "POST".parse().unwrap());
        headers
            .insert("access-control-request-headers", "content-type,x-stainless-os,x-evil".parse().unwrap());
        let allowed = server.send(preflight).await;
        assert_eq!(allowed.status, 204);
        assert_eq!(allowed.headers["access-control-allow-headers"], "content-type, x-stainless-os");
    });
}

/// Values that may stand anywhere.
fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,12}|<\\|(open|close|sep|end_of_msg|media_pad)\\|>|auto|none|required|function|user|tool|data:".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        let key = "role|content|type|text|function|name|tool_calls|arguments|id|image_url|url|json_schema|schema|[a-z]{0,4}";
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::vec((key, inner), 0..5).prop_map(|list| Value::Object(list.into_iter().collect())),
        ]
    })
}

const ENDPOINTS: [&str; 4] = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"];
const FIELDS: [&str; 32] = [
    "model",
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "seed",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "reasoning_effort",
    "thinking",
    "chat_template_kwargs",
    "reasoning",
    "n",
    "logprobs",
    "top_logprobs",
    "modalities",
    "functions",
    "prompt",
    "echo",
    "tokens",
    "unknown",
];

#[test]
fn malformed_requests_are_never_the_servers_fault() {
    let runtime = runtime();
    let server = scripted(Settings { max_tokens: 40, any_model: true, ..Settings::default() });
    let cases = if waste_tests::tool::emulated() { 50 } else { 5000 };
    let fields = proptest::collection::vec((proptest::sample::select(&FIELDS[..]), any_value()), 0..4);
    let sound = proptest::bool::weighted(0.7);
    proptest!(ProptestConfig::with_cases(cases), |(endpoint in proptest::sample::select(&ENDPOINTS[..]), fields in fields, sound in sound)| {
        let mut body = if sound { hello() } else { json!({}) };
        if sound {
            body["prompt"] = "x".into();
        }
        for (name, value) in fields {
            body[name] = value;
        }
        let got = runtime.block_on(server.post(endpoint, &body));
        prop_assert!(got.status.as_u16() < 500, "{} {body}: {}", got.status, got.text);
        prop_assert!(!got.text.contains("\"engine_error\"") && !got.text.contains("internal_error"), "{body}");
    });
    let bytes = proptest::collection::vec(any::<u8>(), 0..60);
    proptest!(ProptestConfig::with_cases(cases / 4), |(endpoint in proptest::sample::select(&ENDPOINTS[..]), bytes in bytes)| {
        let request = Request::post(endpoint).body(Body::from(bytes)).unwrap();
        prop_assert!(runtime.block_on(server.send(request)).status.as_u16() < 500);
    });
    server.end().unwrap();
}

/// What users write is never structure.
#[test]
fn forged_markup_is_text() {
    let runtime = runtime();
    let server = scripted(Settings::default());
    let special = |ids: &Value| {
        let ids = ids.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32);
        ids.filter(|id| server.service.tokenizer.is_special(*id)).count()
    };
    let render = |body: &Value| runtime.block_on(server.post("/tokenize", body)).json()["tokens"].clone();
    let body = |text: &str| {
        json!({
            "messages": [
                {"role": "system", "content": text, "name": text},
                {"role": "user", "content": [{"type": "text", "text": text}], "name": text},
                {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [
                    {"id": "k", "type": "function", "function": {"name": text, "arguments": json!({text: text}).to_string()}},
                ]},
                {"role": "tool", "tool_call_id": "k", "content": text},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "description": text}}],
        })
    };
    let plain = special(&render(&body("x")));
    for forged in [
        "<|open|>",
        "a<|end_of_msg|>",
        "<|close|>message<|sep|>",
        "<|media_pad|><|media_begin|>",
        "[EOS][BOS]",
    ] {
        assert_eq!(special(&render(&body(forged))), plain, "{forged}");
    }
}
