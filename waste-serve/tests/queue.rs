//! The line: order, limits, clients that leave, the end.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod util;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tower::ServiceExt;
use util::*;
use waste_serve::Settings;

fn ask(text: &str, stream: bool) -> Value {
    json!({"model": "model", "messages": [{"role": "user", "content": text}], "stream": stream, "thinking": false})
}

/// Lets the model answer so many requests with a word each.
fn answers(strings: &Strings, count: usize) {
    for _ in 0..count {
        for step in [Step::Text(""), Step::Text(""), Step::Text("word"), Step::End] {
            strings.steps.send(step).unwrap();
        }
    }
}

#[test]
fn first_come_first_served() {
    runtime().block_on(async {
        let (puppet, strings) = puppet();
        let server = Arc::new(Server::tales(Settings { queue: 7, ..Settings::default() }, puppet));
        let mut clients = Vec::new();
        for i in 0..8 {
            let client = Arc::clone(&server);
            clients.push(tokio::spawn(
                async move { client.chat(&ask(&format!("number {i}"), i % 2 == 0)).await },
            ));
            // In this order: one at the model, the others in the line.
            let queue = &server.service.queue;
            until("the request", || queue.status().waiting + queue.status().running == i + 1).await;
            until("the first to run", || queue.status().running == 1).await;
        }
        let status = server.service.queue.status();
        assert_eq!((status.running, status.waiting), (1, 7));
        let full = server.chat(&ask("one too many", false)).await;
        assert_eq!(full.code(), (429, "queue_full".to_owned()));
        let retry: u64 = full.headers["retry-after"].to_str().unwrap().parse().unwrap();
        assert!((1..=600).contains(&retry));
        answers(&strings, 8);
        for client in clients {
            let got = client.await.unwrap();
            assert_eq!(got.status, StatusCode::OK);
            assert!(got.text.contains("word"), "{}", got.text);
        }
        let tokenizer = &server.service.tokenizer;
        let prompts = strings.prompts.lock().unwrap();
        for (i, ids) in prompts.iter().enumerate() {
            let text = String::from_utf8(tokenizer.decode(ids).unwrap()).unwrap();
            assert!(text.contains(&format!("number {i}")), "{i}: {text}");
        }
    });
}

#[test]
fn a_queued_stream_says_so_and_a_running_one_how_far_it_is() {
    runtime().block_on(async {
        let (puppet, strings) = puppet();
        let server = Arc::new(Server::tales(Settings::default(), puppet));
        let first = Arc::clone(&server);
        let first = tokio::spawn(async move { first.chat(&ask("a", false)).await });
        until("the first to run", || server.service.queue.status().running == 1).await;
        let second = Arc::clone(&server);
        let second = tokio::spawn(async move { second.chat(&ask("b", true)).await });
        until("the second to wait", || server.service.queue.status().waiting == 1).await;
        answers(&strings, 2);
        assert_eq!(first.await.unwrap().status, StatusCode::OK);
        let got = second.await.unwrap();
        assert!(got.text.starts_with(": queued 1\n\ndata: {"), "{}", got.text);
        assert!(got.text.contains("\n\n: prefill "), "{}", got.text);
        assert_eq!(got.events()[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    });
}

#[test]
fn a_client_that_leaves_frees_the_model() {
    runtime().block_on(async {
        let (puppet, strings) = puppet();
        let server = Arc::new(Server::tales(Settings::default(), puppet));
        let queue = Arc::clone(&server.service.queue);
        for stream in [false, true] {
            // While the prompt goes in.
            let client = Arc::clone(&server);
            let body = ask("leaves", stream);
            let task = tokio::spawn(async move { client.chat(&body).await });
            until("it to run", || queue.status().running == 1).await;
            let waiting = Arc::clone(&server);
            let waits = tokio::spawn(async move { waiting.chat(&ask("waits and leaves", stream)).await });
            until("the other to wait", || queue.status().waiting == 1).await;
            waits.abort();
            until("the line to be empty", || queue.status().waiting == 0).await;
            task.abort();
            let _ = task.await;
            // No more than this one chunk.
            strings.steps.send(Step::Text("")).unwrap();
            until("the model to be free", || queue.status().running == 0).await;
        }
        let begun = |call: &Call| matches!(call, Call::Prefill(_));
        assert_eq!(strings.calls().iter().filter(|call| begun(call)).count(), 2);
        // In the middle of an answer.
        let response =
            server.app.clone().oneshot(post("/v1/chat/completions", &ask("x", true))).await.unwrap();
        let mut body = response.into_body();
        for step in [Step::Text(""), Step::Text(""), Step::Text("one")] {
            strings.steps.send(step).unwrap();
        }
        let mut text = String::new();
        while !text.contains("one") {
            text += std::str::from_utf8(&body.frame().await.unwrap().unwrap().into_data().unwrap()).unwrap();
        }
        drop(body);
        strings.steps.send(Step::Text("two")).unwrap();
        until("the model to be free", || queue.status().running == 0).await;
        // The next one is answered as if nothing had been.
        answers(&strings, 1);
        let got = server.chat(&ask("y", false)).await;
        assert_eq!(got.json()["choices"][0]["message"]["content"], "word");
        let metrics = server.get("/metrics").await.text;
        for line in
            ["waste_cancelled_total{reason=\"prefill\"} 2", "waste_cancelled_total{reason=\"decode\"} 1"]
        {
            assert!(metrics.contains(line), "{metrics}");
        }
    });
}

#[test]
fn who_waits_too_long_is_told() {
    runtime().block_on(async {
        let (puppet, strings) = puppet();
        let settings = Settings { queue_timeout: Duration::from_millis(30), ..Settings::default() };
        let server = Arc::new(Server::tales(settings, puppet));
        let first = Arc::clone(&server);
        let first = tokio::spawn(async move { first.chat(&ask("a", false)).await });
        until("the first to run", || server.service.queue.status().running == 1).await;
        assert_eq!(server.chat(&ask("b", false)).await.code(), (503, "queue_timeout".to_owned()));
        let stream = server.chat(&ask("b", true)).await;
        assert_eq!(stream.events()[0]["error"]["code"], "queue_timeout");
        answers(&strings, 1);
        assert_eq!(first.await.unwrap().status, StatusCode::OK);
    });
}

#[test]
fn draining_sends_the_waiting_away_and_cuts_what_runs_too_long() {
    runtime().block_on(async {
        let (puppet, strings) = puppet();
        let server = Arc::new(Server::tales(Settings::default(), puppet));
        let queue = Arc::clone(&server.service.queue);
        let clients: Vec<_> = (0..2)
            .map(|_| {
                let client = Arc::clone(&server);
                tokio::spawn(async move { client.chat(&ask("a", false)).await })
            })
            .collect();
        until("one to run and one to wait", || (queue.status().running, queue.status().waiting) == (1, 1))
            .await;
        for step in [Step::Text(""), Step::Text("")] {
            strings.steps.send(step).unwrap();
        }
        queue.drain(Duration::from_millis(50));
        let health = server.get("/health").await;
        assert_eq!((health.status.as_u16(), &health.json()["status"]), (503, &json!("draining")));
        let refused = server.chat(&ask("late", false)).await;
        assert_eq!(refused.code(), (503, "shutting_down".to_owned()));
        assert_eq!(refused.headers["x-should-retry"], "false");
        tokio::time::sleep(Duration::from_millis(60)).await;
        strings.steps.send(Step::Text("half")).unwrap();
        let mut got = Vec::new();
        for client in clients {
            got.push(client.await.unwrap());
        }
        got.sort_by_key(|got| got.status.as_u16());
        let choice = &got[0].json()["choices"][0];
        assert_eq!(
            (&choice["finish_reason"], &choice["message"]["content"]),
            (&json!("length"), &json!("half"))
        );
        assert_eq!(got[1].code(), (503, "shutting_down".to_owned()));
        until("the worker to end", || queue.ended()).await;
        assert_eq!(server.chat(&ask("later", false)).await.status.as_u16(), 503);
        Arc::into_inner(server).unwrap().end().unwrap();
    });
}

#[test]
fn a_failing_engine_is_told_of_and_is_not_the_end() {
    runtime().block_on(async {
        let (puppet, strings) = puppet();
        let server = Server::tales(Settings::default(), puppet);
        for failures in 1..=3 {
            strings.steps.send(Step::Fail).unwrap();
            let got = server.chat(&ask("a", false)).await;
            assert_eq!(got.code(), (500, "engine_error".to_owned()));
            let status = server.get("/health").await.status.as_u16();
            assert_eq!(status, if failures < 3 { 200 } else { 503 });
        }
        // A stream has begun already.
        strings.steps.send(Step::Fail).unwrap();
        let events = server.chat(&ask("a", true)).await.events();
        assert_eq!(events.last().unwrap()["error"]["code"], "engine_error");
        answers(&strings, 1);
        assert_eq!(server.chat(&ask("a", false)).await.status, StatusCode::OK);
        assert_eq!(server.get("/health").await.status, StatusCode::OK);
        // After a panic the model is opened again, which this test's cannot be.
        strings.steps.send(Step::Panic).unwrap();
        assert_eq!(server.chat(&ask("a", false)).await.code(), (500, "internal_error".to_owned()));
        until("the worker to end", || server.service.queue.ended()).await;
        assert!(server.end().unwrap_err().contains("second time"));
    });
}

#[test]
fn a_slow_body_is_no_reason_to_wait_for_others() {
    runtime().block_on(async {
        let (puppet, strings) = puppet();
        let server = Arc::new(Server::tales(Settings::default(), puppet));
        let (sender, receiver) = tokio::sync::mpsc::channel::<Result<axum::body::Bytes, std::io::Error>>(1);
        let frames = futures_util::stream::unfold(receiver, |mut receiver| async move {
            Some((receiver.recv().await?, receiver))
        });
        let request =
            axum::http::Request::post("/v1/chat/completions").body(Body::from_stream(frames)).unwrap();
        let slow = Arc::clone(&server);
        let slow = tokio::spawn(async move { slow.send(request).await });
        sender.send(Ok(r#"{"model":"model","#.into())).await.unwrap();
        answers(&strings, 2);
        assert_eq!(server.chat(&ask("quick", false)).await.status, StatusCode::OK);
        sender.send(Ok(r#""messages":[{"role":"user","content":"x"}]}"#.into())).await.unwrap();
        drop(sender);
        assert_eq!(slow.await.unwrap().status, StatusCode::OK);
    });
}

#[test]
fn a_whole_answer_that_takes_long_is_kept_alive() {
    runtime().block_on(async {
        let (puppet, strings) = puppet();
        let often = Some(Duration::from_millis(20));
        let settings = Settings { blocking_keepalive: often, ..Settings::default() };
        let server = Arc::new(Server::tales(settings, puppet));
        // Quick ones are as ever.
        strings.steps.send(Step::Fail).unwrap();
        assert_eq!(server.chat(&ask("fails", false)).await.code(), (500, "engine_error".to_owned()));
        for fails in [false, true] {
            let response =
                server.app.clone().oneshot(post("/v1/chat/completions", &ask("slow", false))).await.unwrap();
            assert_eq!(
                (response.status(), &response.headers()["content-type"]),
                (StatusCode::OK, &HeaderValue::from_static("application/json"))
            );
            let mut body = response.into_body();
            for _ in 0..3 {
                assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), " ");
            }
            if fails {
                strings.steps.send(Step::Fail).unwrap();
            } else {
                answers(&strings, 1);
            }
            let rest = body.collect().await.unwrap().to_bytes();
            let json: Value = serde_json::from_slice(&rest).unwrap();
            match fails {
                true => assert_eq!(json["error"]["code"], "engine_error"),
                false => assert_eq!(json["choices"][0]["message"]["content"], "word"),
            }
        }
        // A client that leaves meanwhile frees the model.
        let response =
            server.app.clone().oneshot(post("/v1/chat/completions", &ask("leaves", false))).await.unwrap();
        drop(response);
        strings.steps.send(Step::Text("")).unwrap();
        until("the model to be free", || server.service.queue.status().running == 0).await;
    });
}
