//! A server without a socket, with a model that the tests steer.

#![allow(dead_code, clippy::unwrap_used)] // not every file of tests needs all

use std::collections::HashMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::BodyExt;
use serde_json::Value;
use tower::ServiceExt;
use waste_engine::EngineError;
use waste_engine::chat::{ChatFormat, Choice};
use waste_engine::tokenizer::Tokenizer;
use waste_serve::access::Access;
use waste_serve::job::Job;
use waste_serve::model::{Given, Model, Write};
use waste_serve::service::Working;
use waste_serve::{Facts, Service, Settings, app};
use waste_tests::files::data;

pub const TALES: &str = "models/k3-tales";

pub fn facts(dir: &Path) -> Facts {
    let tokenizer = Tokenizer::open(dir).unwrap();
    let format = ChatFormat::find(dir, &tokenizer, Choice::Auto);
    let stop_ids = tokenizer.eos().into_iter().collect();
    Facts {
        format,
        vocab: 4096,
        ctx: 4096,
        stop_ids,
        fingerprint: "0123456789abcdef".to_owned(),
        tokenizer,
        budget_bytes: Some(1 << 30),
        images: None,
    }
}

/// A server and all that belongs to it.
pub struct Server {
    pub app: Router,
    pub service: Arc<Service>,
    pub log: Arc<Mutex<Vec<String>>>,
    working: Option<Working>,
}

/// What an answer was.
#[derive(Debug)]
pub struct Got {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub text: String,
}

impl Got {
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// The code of an error's answer, whose shape is checked.
    #[track_caller]
    pub fn code(&self) -> (u16, String) {
        let json = self.json();
        let error = json["error"].as_object().unwrap_or_else(|| panic!("{}", self.text));
        assert_eq!(error.keys().collect::<Vec<_>>(), ["message", "type", "param", "code"]);
        assert!(!error["message"].as_str().unwrap().is_empty());
        assert!(self.headers.contains_key("x-request-id"));
        (self.status.as_u16(), error["code"].as_str().unwrap().to_owned())
    }

    /// The events of a stream, without comments.
    #[track_caller]
    pub fn events(&self) -> Vec<Value> {
        let mut events = Vec::new();
        let mut done = false;
        for frame in self.text.split_terminator("\n\n") {
            if frame.starts_with(':') {
                continue;
            }
            let data = frame.strip_prefix("data: ").unwrap_or_else(|| panic!("{frame:?}"));
            assert!(!done, "after the end: {data}");
            match data {
                "[DONE]" => done = true,
                json => events.push(serde_json::from_str(json).unwrap()),
            }
        }
        assert_eq!(
            done,
            events.last().is_some_and(|event: &Value| event.get("error").is_none()),
            "{}",
            self.text
        );
        events
    }
}

impl Server {
    pub fn new(facts: Facts, settings: Settings, access: Access, model: impl Model + 'static) -> Server {
        let log = Arc::new(Mutex::new(Vec::new()));
        let lines = Arc::clone(&log);
        let mut model = Some(Box::new(model) as Box<dyn Model>);
        let open = Box::new(move || {
            model.take().ok_or_else(|| waste_common::cli::Failure::internal("opened a second time"))
        });
        let write = Arc::new(move |line: &str| lines.lock().unwrap().push(line.to_owned()));
        let (service, working) = Service::start(facts, settings, access, write, open).unwrap();
        while service.queue.status().phase == waste_serve::queue::Phase::Loading {
            std::thread::yield_now();
        }
        Server { app: app(Arc::clone(&service)), service, log, working: Some(working) }
    }

    pub fn tales(settings: Settings, model: impl Model + 'static) -> Server {
        Server::new(facts(&data(TALES)), settings, Access::default(), model)
    }

    pub async fn send(&self, request: Request<Body>) -> Got {
        let response = self.app.clone().oneshot(request).await.unwrap();
        let (status, headers) = (response.status(), response.headers().clone());
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        Got { status, headers, text: String::from_utf8(bytes.to_vec()).unwrap() }
    }

    pub async fn get(&self, path: &str) -> Got {
        self.send(Request::get(path).body(Body::empty()).unwrap()).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Got {
        self.send(post(path, body)).await
    }

    pub async fn chat(&self, body: &Value) -> Got {
        self.post("/v1/chat/completions", body).await
    }

    /// Ends the worker and says how it ended.
    pub fn end(mut self) -> Result<(), String> {
        self.service.queue.drain(std::time::Duration::ZERO);
        self.working.take().unwrap().join().unwrap().map_err(|failure| failure.to_string())
    }
}

pub fn post(path: &str, body: &Value) -> Request<Body> {
    let request =
        Request::builder().method(Method::POST).uri(path).header("content-type", "application/json");
    request.body(Body::from(body.to_string())).unwrap()
}

/// Says what it is told to, piece by piece, when it is told to.
pub struct Puppet {
    steps: Receiver<Step>,
    pub prompts: Arc<Mutex<Vec<Vec<u32>>>>,
    pub calls: Arc<Mutex<Vec<Call>>>,
    /// Tokens of each slot's prompt that are in.
    done: HashMap<usize, usize>,
    end: u32,
}

pub enum Step {
    /// A chunk of the prompt, or a piece of text.
    Text(&'static str),
    End,
    Fail,
    Panic,
}

/// What a model was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    Begin(usize),
    Prefill(usize),
    Next(Vec<usize>),
    Done(usize),
}

/// The strings of a puppet.
pub struct Strings {
    pub steps: Sender<Step>,
    pub prompts: Arc<Mutex<Vec<Vec<u32>>>>,
    pub calls: Arc<Mutex<Vec<Call>>>,
}

impl Strings {
    /// Lets it go on so many steps with this text; one that has ended needs none.
    pub fn pull(&self, steps: usize, text: &'static str) {
        for _ in 0..steps {
            let _ = self.steps.send(Step::Text(text));
        }
    }

    pub fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap().clone()
    }
}

pub fn puppet() -> (Puppet, Strings) {
    let (sender, steps) = channel();
    let (prompts, calls) = (Arc::<Mutex<Vec<_>>>::default(), Arc::<Mutex<Vec<_>>>::default());
    let end = Tokenizer::open(&data(TALES)).unwrap().special_id("<|end_of_msg|>").unwrap();
    let strings = Strings { steps: sender, prompts: Arc::clone(&prompts), calls: Arc::clone(&calls) };
    (Puppet { steps, prompts, calls, done: HashMap::new(), end }, strings)
}

impl Puppet {
    fn step(&self) -> Result<Given<'static>, EngineError> {
        match self.steps.recv() {
            Ok(Step::Text(text)) => Ok(Given::Text(text.to_owned())),
            // Let go of: the answer ends.
            Ok(Step::End) | Err(_) => Ok(Given::Special(self.end)),
            Ok(Step::Fail) => Err(EngineError::NoSlot { slots: 1 }),
            Ok(Step::Panic) => panic!("as told"),
        }
    }

    fn called(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }
}

impl Model for Puppet {
    fn begin(&mut self, slot: usize, job: &mut Job) -> Result<usize, EngineError> {
        self.called(Call::Begin(slot));
        self.prompts.lock().unwrap().push(job.ids.clone());
        self.done.insert(slot, 0);
        Ok(0)
    }

    /// Two chunks, each a step.
    fn prefill(&mut self, slot: usize, job: &mut Job, _: &dyn Fn() -> bool) -> Result<usize, EngineError> {
        self.called(Call::Prefill(slot));
        self.step()?;
        let done = self.done.get_mut(&slot).unwrap();
        *done = if *done == 0 { job.ids.len() / 2 } else { job.ids.len() };
        Ok(*done)
    }

    /// A step for each.
    fn next(&mut self, slots: &[usize], write: &mut Write<'_>) -> Result<(), EngineError> {
        self.called(Call::Next(slots.to_vec()));
        for slot in slots {
            let step = self.step();
            // An engine that fails fails all; one alone is told of it in its place.
            if step.is_err() && slots.len() > 1 {
                return step.map(|_| ());
            }
            write(*slot, step);
        }
        Ok(())
    }

    fn done(&mut self, slot: usize, _: &Job) {
        self.called(Call::Done(slot));
    }
}

/// Waits for something that another thread does.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..20_000 {
        if holds() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    panic!("{what} did not come about");
}

pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}
