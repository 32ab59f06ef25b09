//! Several answers at a time: whose turn it is, who leaves, and what fails together.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod util;

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use util::*;
use waste_serve::Settings;

const SLOTS: usize = 3;

fn ask(text: &str) -> Value {
    json!({"model": "model", "messages": [{"role": "user", "content": text}], "thinking": false})
}

struct Scene {
    server: Arc<Server>,
    strings: Strings,
    clients: usize,
}

impl Scene {
    fn new(queue: usize) -> Scene {
        let (puppet, strings) = puppet();
        let settings = Settings { parallel: SLOTS, queue, ..Settings::default() };
        Scene { server: Arc::new(Server::tales(settings, puppet)), strings, clients: 0 }
    }

    /// Another client, in the line or at the model.
    async fn client(&mut self) -> JoinHandle<Got> {
        let (server, body) = (Arc::clone(&self.server), ask(&format!("number {}", self.clients)));
        let before = self.there();
        let client = tokio::spawn(async move { server.chat(&body).await });
        until("the client", || self.there() > before).await;
        self.clients += 1;
        client
    }

    fn there(&self) -> usize {
        let status = self.server.service.queue.status();
        status.running + status.waiting
    }

    fn running(&self) -> usize {
        self.server.service.queue.status().running
    }

    /// Waits until the model was asked for this.
    async fn called(&self, what: &Call) {
        until("the call", || self.strings.calls().contains(what)).await;
    }
}

async fn leaves(client: JoinHandle<Got>) {
    client.abort();
    let _ = client.await;
}

#[test]
fn a_chunk_of_one_then_a_token_of_each() {
    runtime().block_on(async {
        let mut scene = Scene::new(8);
        let first = scene.client().await;
        scene.called(&Call::Prefill(0)).await;
        let others = [scene.client().await, scene.client().await];
        // Two chunks of the first; then two each of the others, in turns, and the first goes on all the while.
        scene.strings.pull(2 + 1 + 4 + 4 + 1 + 2, "a");
        scene.called(&Call::Next(vec![0, 1, 2])).await;
        let mut calls = scene.strings.calls();
        calls.truncate(14);
        let next = |slots: &[usize]| Call::Next(slots.to_vec());
        // The others come after the first chunk that they waited for.
        let expected = [
            Call::Begin(0),
            Call::Prefill(0),
            Call::Begin(1),
            Call::Begin(2),
            Call::Prefill(1),
            Call::Prefill(2),
            Call::Prefill(0),
            next(&[0]),
            Call::Prefill(1),
            next(&[0, 1]),
            Call::Prefill(2),
            next(&[0, 1, 2]),
        ];
        assert_eq!(calls[..12], expected);
        drop(scene.strings.steps);
        for client in [first].into_iter().chain(others) {
            let got = client.await.unwrap().json();
            let text = got["choices"][0]["message"]["content"].as_str().unwrap();
            assert!(text.starts_with('a'), "{text}");
        }
    });
}

#[test]
fn whoever_has_a_slot_does_not_wait_and_the_line_is_behind_them() {
    runtime().block_on(async {
        let mut scene = Scene::new(2);
        let mut clients = Vec::new();
        for _ in 0..SLOTS + 2 {
            clients.push(scene.client().await);
        }
        // One of them waits for the first chunk that is on its way, and comes in after it.
        let full = scene.server.chat(&ask("too many")).await;
        assert_eq!(full.code(), (429, "queue_full".to_owned()));
        scene.strings.pull(1, "");
        until("all slots to be taken", || scene.running() == SLOTS).await;
        let health = scene.server.get("/health").await.json();
        assert_eq!(health["queue"], json!({"running": 3, "slots": 3, "waiting": 2, "capacity": 2}));
        let metrics = scene.server.get("/metrics").await.text;
        assert!(metrics.contains("\nwaste_requests_running 3\n") && metrics.contains("\nwaste_slots 3\n"));
        drop(scene.strings.steps);
        for client in clients {
            assert_eq!(client.await.unwrap().status, StatusCode::OK);
        }
    });
}

#[test]
fn who_leaves_frees_only_its_own_slot() {
    runtime().block_on(async {
        let mut scene = Scene::new(8);
        let mut clients = Vec::new();
        for _ in 0..SLOTS {
            clients.push(scene.client().await);
        }
        scene.strings.pull(1, "");
        until("all slots to be taken", || scene.running() == SLOTS).await;
        let waiting = scene.client().await;
        // In the middle of its prompt; the next one comes in its place.
        leaves(clients.remove(1)).await;
        scene.strings.pull(1, "");
        let slots = |call: &Call| matches!(call, Call::Begin(_));
        until("the one that waited", || scene.strings.calls().iter().filter(|call| slots(call)).count() == 4)
            .await;
        assert_eq!(scene.running(), SLOTS);
        // The rest of three prompts; in the middle of an answer, one leaves.
        scene.strings.pull(30, "x");
        scene.called(&Call::Next(vec![0, 1, 2])).await;
        leaves(clients.remove(1)).await;
        let mut left = [clients.remove(0), waiting];
        until("its slot to be free", || {
            scene.strings.pull(1, "x");
            scene.running() == 2
        })
        .await;
        drop(scene.strings.steps);
        for client in &mut left {
            assert_eq!(client.await.unwrap().status, StatusCode::OK);
        }
        let metrics = scene.server.get("/metrics").await.text;
        for reason in ["prefill", "decode"] {
            let line = format!("waste_cancelled_total{{reason=\"{reason}\"}} 1");
            assert!(metrics.contains(&line), "{metrics}");
        }
    });
}

#[test]
fn what_fails_for_all_is_one_failure() {
    runtime().block_on(async {
        let mut scene = Scene::new(8);
        for round in 1..=3 {
            let mut clients = Vec::new();
            for _ in 0..SLOTS {
                clients.push(scene.client().await);
            }
            scene.strings.pull(1, "");
            until("all slots to be taken", || scene.running() == SLOTS).await;
            // All prompts, and a token of each on the way.
            scene.strings.pull(5 + 3, "x");
            let together = Call::Next(vec![0, 1, 2]);
            until("all to be written", || {
                scene.strings.calls().iter().filter(|call| **call == together).count() >= round
            })
            .await;
            scene.strings.steps.send(Step::Fail).unwrap();
            for client in clients {
                assert_eq!(client.await.unwrap().code(), (500, "engine_error".to_owned()));
            }
            let status = scene.server.get("/health").await.status.as_u16();
            assert_eq!(status, if round < 3 { 200 } else { 503 });
        }
    });
}

#[test]
fn draining_cuts_all_that_run() {
    runtime().block_on(async {
        let mut scene = Scene::new(8);
        let mut clients = Vec::new();
        for _ in 0..SLOTS {
            clients.push(scene.client().await);
        }
        scene.strings.pull(1, "");
        until("all slots to be taken", || scene.running() == SLOTS).await;
        let waiting = scene.client().await;
        scene.strings.pull(5, "");
        scene.server.service.queue.drain(Duration::from_millis(50));
        assert_eq!(waiting.await.unwrap().code(), (503, "shutting_down".to_owned()));
        tokio::time::sleep(Duration::from_millis(60)).await;
        scene.strings.pull(3 * SLOTS, "half");
        for client in clients {
            let got = client.await.unwrap().json();
            assert_eq!(got["choices"][0]["finish_reason"], "length");
        }
        until("the worker to end", || scene.server.service.queue.ended()).await;
    });
}
