//! From a job in the line to an answer on the wire, whole or streamed.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Response, StatusCode, header};
use futures_util::stream;
use serde_json::Value;
use tokio::time::timeout_at;
use waste_engine::chat::Delta;

use crate::error::{ApiError, json_response};
use crate::job::{Event, Finished};
use crate::queue::Handle;
use crate::request::Asked;
use crate::service::Service;
use crate::wire::{Dialect, Envelope, frame};

/// A stream says something at least so often.
const QUIET: Duration = Duration::from_secs(10);

/// Puts a request in the line and answers it.
///
/// # Errors
/// It cannot be taken, or fails before anything was sent.
pub async fn answer(
    service: &Arc<Service>,
    dialect: Dialect,
    asked: Asked,
    id: &str,
) -> Result<Response<Body>, ApiError> {
    let envelope = Envelope::new(service, dialect, &asked);
    let stream = asked.stream;
    let handle = service.queue.submit(asked.job)?;
    let deadline = Instant::now() + service.settings.queue_timeout;
    let order =
        Order { service: Arc::clone(service), envelope, handle, deadline, started: false, id: id.to_owned() };
    match service.settings.blocking_keepalive {
        _ if stream => Ok(order.stream()),
        None => order.whole().await.map(|whole| json_response(StatusCode::OK, &whole)),
        Some(often) => order.kept_alive(often).await,
    }
}

struct Order {
    service: Arc<Service>,
    envelope: Envelope,
    handle: Handle,
    /// Until then the job must have the engine.
    deadline: Instant,
    started: bool,
    /// The request, for the log.
    id: String,
}

impl Order {
    /// The next event; an error if there will be none.
    async fn event(&mut self) -> Result<Event, ApiError> {
        let event = if self.started {
            self.handle.events.recv().await
        } else {
            match timeout_at(self.deadline.into(), self.handle.events.recv()).await {
                Ok(event) => event,
                // Out of the line; or it got the engine this very moment.
                Err(_) if self.handle.withdraw() => {
                    return Err(ApiError::unavailable("queue_timeout", "the request waited too long"));
                }
                Err(_) => self.handle.events.recv().await,
            }
        };
        match event {
            Some(Event::Failed(error)) => Err(error),
            Some(event) => {
                self.started |= matches!(event, Event::Started);
                Ok(event)
            }
            // The worker is gone.
            None => Err(ApiError::internal()),
        }
    }

    fn log(&self, finished: &Finished) {
        (self.service.log)(&format!(
            "{} prompt {} ({} reused) answer {} in {:.2} s + {:.2} s + {:.2} s: {}",
            self.id,
            finished.prompt_tokens,
            finished.cached_tokens,
            finished.completion_tokens,
            finished.queue_ms / 1e3,
            finished.prefill_ms / 1e3,
            finished.decode_ms / 1e3,
            finished.reason,
        ));
    }

    async fn whole(mut self) -> Result<Value, ApiError> {
        let (mut parts, mut logprobs) = (Vec::new(), Vec::new());
        loop {
            match self.event().await? {
                Event::Deltas(deltas, logprob) => {
                    parts.extend(deltas);
                    logprobs.extend(logprob);
                }
                Event::Done(finished) => {
                    self.log(&finished);
                    return Ok(self.envelope.whole(&self.service, parts, &logprobs, &finished));
                }
                Event::Started | Event::Prefill { .. } | Event::Failed(_) => (),
            }
        }
    }

    /// The whole answer; white space before it if it takes long.
    async fn kept_alive(self, often: Duration) -> Result<Response<Body>, ApiError> {
        let mut whole = Box::pin(self.whole());
        if let Ok(whole) = tokio::time::timeout(often, &mut whole).await {
            return whole.map(|whole| json_response(StatusCode::OK, &whole));
        }
        let mut first = true;
        let parts = stream::unfold(Some(whole), move |whole| {
            let wait = if std::mem::take(&mut first) { Duration::ZERO } else { often };
            async move {
                let mut whole = whole?;
                let (part, rest) = match tokio::time::timeout(wait, &mut whole).await {
                    Err(_) => (" ".to_owned(), Some(whole)),
                    Ok(whole) => (whole.unwrap_or_else(|error| error.object()).to_string(), None),
                };
                Some((Ok::<_, std::convert::Infallible>(Bytes::from(part)), rest))
            }
        });
        let mut response = Response::new(Body::from_stream(parts));
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Ok(response)
    }

    fn stream(self) -> Response<Body> {
        let mut frames = VecDeque::new();
        if let Some(ahead) = self.handle.ahead().filter(|ahead| *ahead > 0) {
            frames.push_back(format!(": queued {ahead}\n\n"));
        }
        let streaming = Streaming { order: self, frames, characters: 0, over: false };
        let frames = stream::unfold(streaming, |mut streaming| async move {
            let frame = streaming.next().await?;
            Some((Ok::<_, std::convert::Infallible>(Bytes::from(frame)), streaming))
        });
        let mut response = Response::new(Body::from_stream(frames));
        for (name, value) in [
            (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
            (header::CACHE_CONTROL, "no-cache"),
            (header::HeaderName::from_static("x-accel-buffering"), "no"),
        ] {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        response
    }
}

struct Streaming {
    order: Order,
    frames: VecDeque<String>,
    /// Of content so far.
    characters: usize,
    over: bool,
}

impl Streaming {
    /// The next frame; `None` at the end.
    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(frame) = self.frames.pop_front() {
                return Some(frame);
            }
            if self.over {
                return None;
            }
            match tokio::time::timeout(QUIET, self.order.event()).await {
                Err(_) => self.frames.push_back(match self.order.handle.ahead() {
                    Some(ahead) => format!(": queued {ahead}\n\n"),
                    None => ": ping\n\n".to_owned(),
                }),
                Ok(Err(error)) => {
                    self.over = true;
                    self.frames.push_back(frame(&error.object()));
                }
                Ok(Ok(event)) => self.take(event),
            }
        }
    }

    fn take(&mut self, event: Event) {
        let Order { service, envelope, .. } = &mut self.order;
        match event {
            Event::Started => self.frames.extend(envelope.first().map(|chunk| frame(&chunk))),
            // The last one is not worth a word: text follows.
            Event::Prefill { done, of } if done < of => {
                self.frames.push_back(format!(": prefill {done}/{of}\n\n"));
            }
            Event::Prefill { .. } | Event::Failed(_) => (),
            Event::Deltas(deltas, logprob) => {
                let at = self.characters;
                let text = |delta: &Delta| match delta {
                    Delta::Content(text) => text.chars().count(),
                    _ => 0,
                };
                self.characters += deltas.iter().map(text).sum::<usize>();
                let chunks = envelope.deltas(service, deltas, logprob, at);
                self.frames.extend(chunks.iter().map(frame));
            }
            Event::Done(finished) => {
                self.over = true;
                self.frames.extend(envelope.last(&finished).iter().map(frame));
                self.frames.push_back("data: [DONE]\n\n".to_owned());
                self.order.log(&finished);
            }
        }
    }
}
