//! The routes, and what stands before each of them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::routing::any;
use http_body_util::BodyExt;
use serde_json::json;
use tokio::sync::OwnedSemaphorePermit;
use waste_engine::chat::Json;

use crate::access;
use crate::answer::answer;
use crate::error::{ApiError, Code, json_response, text_response};
use crate::page;
use crate::queue::Phase;
use crate::request;
use crate::service::Service;
use crate::wire::{Dialect, random_id};

/// A body must be complete by then.
const BODY_TIME: Duration = Duration::from_secs(60);
/// Longest headers, in bytes.
pub const HEADERS_MAX: usize = 32 << 10;
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Endpoint {
    Chat,
    Completions,
    Models,
    Health,
    Metrics,
    Tokenize,
    Detokenize,
    /// A file of the web page.
    Page,
    Unknown,
}

impl Endpoint {
    fn of(path: &str) -> Endpoint {
        match path {
            "/v1/chat/completions" => Endpoint::Chat,
            "/v1/completions" => Endpoint::Completions,
            "/health" | "/ready" => Endpoint::Health,
            "/metrics" => Endpoint::Metrics,
            "/tokenize" => Endpoint::Tokenize,
            "/detokenize" => Endpoint::Detokenize,
            _ if path == "/v1/models" || path.starts_with("/v1/models/") => Endpoint::Models,
            _ if page::file(path).is_some() => Endpoint::Page,
            _ => Endpoint::Unknown,
        }
    }

    fn method(self) -> Option<Method> {
        match self {
            Endpoint::Chat | Endpoint::Completions | Endpoint::Tokenize | Endpoint::Detokenize => {
                Some(Method::POST)
            }
            Endpoint::Models | Endpoint::Health | Endpoint::Metrics | Endpoint::Page => Some(Method::GET),
            Endpoint::Unknown => None,
        }
    }

    /// For the metrics; few, whatever clients ask for.
    fn name(self) -> &'static str {
        match self {
            Endpoint::Chat => "/v1/chat/completions",
            Endpoint::Completions => "/v1/completions",
            Endpoint::Models => "/v1/models",
            Endpoint::Health => "/health",
            Endpoint::Metrics => "/metrics",
            Endpoint::Tokenize => "/tokenize",
            Endpoint::Detokenize => "/detokenize",
            Endpoint::Page => "/",
            Endpoint::Unknown => "other",
        }
    }
}

/// The server, without a socket.
pub fn app(service: Arc<Service>) -> Router {
    Router::new()
        .fallback(any(serve))
        .layer(from_fn_with_state(Arc::clone(&service), around))
        .with_state(service)
}

/// Refuses headers that are too long together (431).
fn check_headers(headers: &HeaderMap) -> Result<(), ApiError> {
    // `name: value` and the end of its line.
    let bytes: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    if bytes <= HEADERS_MAX {
        return Ok(());
    }
    let message = format!("{bytes} bytes of headers; at most {HEADERS_MAX} are read");
    Err(ApiError::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", message))
}

/// The request's id, for whoever answers it.
#[derive(Clone)]
struct Id(String);

/// Around every request: its id, the line in the log, the counter, and the headers for web pages.
async fn around(State(service): State<Arc<Service>>, mut request: Request, next: Next) -> Response<Body> {
    let start = Instant::now();
    let id = given_id(request.headers()).unwrap_or_else(|| random_id("req_"));
    request.extensions_mut().insert(Id(id.clone()));
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let endpoint = Endpoint::of(trimmed(&path));
    let headers = request.headers().clone();
    let origin = check_headers(&headers).and_then(|()| service.access.check_origin(&method, &headers));
    let preflight = method == Method::OPTIONS && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match &origin {
        Err(error) => error.clone().response(),
        Ok(Some(_)) if preflight => {
            let mut response = text_response(StatusCode::NO_CONTENT, "text/plain", String::new());
            access::allow_preflight(&headers, response.headers_mut());
            response
        }
        Ok(_) => next.run(request).await,
    };
    if let Ok(Some(origin)) = origin {
        access::allow(origin, response.headers_mut());
    }
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    let status = response.status();
    service.metrics.request(endpoint.name(), status.as_u16());
    let code = response.extensions().get::<Code>().map_or("", |code| code.0);
    (service.log)(&format!(
        "{id} {method} {} {} {code} {:.3} s",
        endpoint.name(),
        status.as_u16(),
        start.elapsed().as_secs_f64()
    ));
    response
}

/// An id that the client chose, if it is fit for a log.
fn given_id(headers: &HeaderMap) -> Option<String> {
    let id = headers.get(REQUEST_ID)?.to_str().ok()?;
    let sound = (1..=64).contains(&id.len())
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    sound.then(|| id.to_owned())
}

fn trimmed(path: &str) -> &str {
    path.strip_suffix('/').unwrap_or(path)
}

async fn serve(State(service): State<Arc<Service>>, request: Request) -> Response<Body> {
    let head = request.method() == Method::HEAD;
    let mut response = match route(&service, request).await {
        Ok(response) => response,
        Err(error) => error.response(),
    };
    if head {
        *response.body_mut() = Body::empty();
    }
    response
}

async fn route(service: &Arc<Service>, request: Request) -> Result<Response<Body>, ApiError> {
    let path = trimmed(request.uri().path()).to_owned();
    let endpoint = match Endpoint::of(&path) {
        Endpoint::Page if !service.settings.ui => Endpoint::Unknown,
        endpoint => endpoint,
    };
    service.access.check_host(request.headers())?;
    // Health is for those who look after the machine, not for clients; the page asks for the key itself.
    let open = matches!(endpoint, Endpoint::Health | Endpoint::Page)
        || endpoint == Endpoint::Metrics && service.access.open_metrics;
    let owner = if open { 0 } else { service.access.owner(request.headers())? };
    let Some(method) = endpoint.method() else {
        let known = path.starts_with("/v1/");
        let code = if known { "unsupported_endpoint" } else { "not_found" };
        return Err(ApiError::new(StatusCode::NOT_FOUND, code, "there is no such endpoint here"));
    };
    let head = request.method() == Method::HEAD && method == Method::GET;
    if request.method() != method && !head {
        let error =
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", format!("use {method}"));
        let allow = if method == Method::GET { "GET, HEAD" } else { "POST" };
        return Err(error.with(header::ALLOW, HeaderValue::from_static(allow)));
    }
    let id = request.extensions().get::<Id>().map_or_else(String::new, |id| id.0.clone());
    match endpoint {
        Endpoint::Health => Ok(health(service)),
        Endpoint::Metrics => {
            let text = service.metrics.text(service.queue.status(), env!("CARGO_PKG_VERSION"));
            Ok(text_response(StatusCode::OK, "text/plain; version=0.0.4", text))
        }
        Endpoint::Models => models(service, &path),
        Endpoint::Chat => {
            let read = move |service: &Service, body: &Json| request::chat(service, body, owner);
            let asked = body(service, request, &id, read).await?;
            answer(service, Dialect::Chat, asked, &id).await
        }
        Endpoint::Completions => {
            let read = move |service: &Service, body: &Json| request::completion(service, body, owner);
            let asked = body(service, request, &id, read).await?;
            answer(service, Dialect::Completion, asked, &id).await
        }
        Endpoint::Tokenize => {
            let ids = body(service, request, &id, request::tokenize).await?;
            let object = json!({"count": ids.len(), "max_model_len": service.ctx, "tokens": ids});
            Ok(json_response(StatusCode::OK, &object))
        }
        Endpoint::Detokenize => {
            let text = body(service, request, &id, request::detokenize).await?;
            Ok(json_response(StatusCode::OK, &json!({"prompt": text})))
        }
        Endpoint::Page => page::file(&path).map(page::response).ok_or_else(ApiError::internal),
        Endpoint::Unknown => Err(ApiError::internal()),
    }
}

/// What is read of the body's JSON. Bodies and what they become are bounded together; reading takes a while (a long
/// prompt's tokens) and is not done where others are waited for.
async fn body<T: Send + 'static>(
    service: &Arc<Service>,
    request: Request,
    id: &str,
    read: impl FnOnce(&Service, &Json) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let (content, room) = content(service, request).await?;
    if service.settings.log_content {
        (service.log)(&format!("{id} {}", String::from_utf8_lossy(&content)));
    }
    let reader = Arc::clone(&service.readers).acquire_owned().await.map_err(|_| ApiError::internal())?;
    let service = Arc::clone(service);
    let work = move || {
        let (_room, _reader) = (room, reader);
        let json = Json::from_slice(&content).map_err(|error| {
            ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", format!("the body is {error}"))
        })?;
        drop(content);
        read(&service, &json)
    };
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| Err(ApiError::internal()))
}

/// The body's bytes, within its limits, and the room it takes as long as that is held.
async fn content(
    service: &Service,
    request: Request,
) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), ApiError> {
    if let Some(kind) = request.headers().get(header::CONTENT_TYPE) {
        let kind = kind.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim();
        let json = kind.eq_ignore_ascii_case("application/json")
            || kind.get(kind.len().saturating_sub(5)..).is_some_and(|end| end.eq_ignore_ascii_case("+json"));
        if !json {
            let message = "the body must be of type application/json";
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message));
        }
    }
    let max = service.settings.max_body;
    let too_large = || {
        let message = format!("the body may have at most {max} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
    };
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    if length.and_then(|length| length.parse::<u64>().ok()).is_some_and(|length| length > max as u64) {
        return Err(too_large());
    }
    let mut incoming = request.into_body();
    let (mut content, mut room) = (Vec::new(), None::<OwnedSemaphorePermit>);
    let read = async {
        while let Some(frame) = incoming.frame().await {
            let frame = frame.map_err(|_| ApiError::bad("invalid_json", "body", "the body is incomplete"))?;
            let Ok(data) = frame.into_data() else { continue };
            if content.len() + data.len() > max {
                return Err(too_large());
            }
            let held = room.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
            let needed = (content.len() + data.len()).div_ceil(1024).saturating_sub(held);
            let more = Arc::clone(&service.bodies).try_acquire_many_owned(needed as u32);
            let more = more.map_err(|_| ApiError::crowded())?;
            match &mut room {
                Some(room) => room.merge(more),
                None => room = Some(more),
            }
            content.extend_from_slice(&data);
        }
        Ok(())
    };
    match tokio::time::timeout(BODY_TIME, read).await {
        Ok(outcome) => outcome?,
        Err(_) => {
            let message = "the body was not complete in time";
            return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", message));
        }
    }
    Ok((content, room))
}

fn health(service: &Service) -> Response<Body> {
    let status = service.queue.status();
    let word = match status.phase {
        Phase::Loading => "loading",
        Phase::Draining => "draining",
        Phase::Serving if status.failing => "failing",
        Phase::Serving => "ok",
    };
    let body = json!({
        "status": word,
        "model": service.settings.model_id,
        "version": env!("CARGO_PKG_VERSION"),
        "uptime_s": service.started.elapsed().as_secs(),
        "queue": {
            "running": status.running, "slots": status.slots, "waiting": status.waiting, "capacity": status.capacity,
        },
    });
    json_response(if word == "ok" { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, &body)
}

fn models(service: &Service, path: &str) -> Result<Response<Body>, ApiError> {
    let format = service.format().ok();
    let tools = match format {
        Some(format) if format.calls_tools() && format.name() == "turns" => json!("experimental"),
        Some(format) => json!(format.calls_tools()),
        None => json!(false),
    };
    let model = json!({
        "id": service.settings.model_id,
        "object": "model",
        "created": service.created,
        "owned_by": "waste",
        "max_model_len": service.ctx,
        "budget_bytes": service.budget_bytes,
        "chat_format": format.map(|format| format.name()),
        "thinks": format.is_some_and(|format| format.thinks()),
        "tools": tools,
        "vision": service.images.is_some(),
    });
    match path.strip_prefix("/v1/models/") {
        None => Ok(json_response(StatusCode::OK, &json!({"object": "list", "data": [model]}))),
        Some(name) if decoded(name) == service.settings.model_id => Ok(json_response(StatusCode::OK, &model)),
        Some(name) => Err(service.no_such_model(name)),
    }
}

/// A path's part without its percent signs; clients encode the slash in names.
pub fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let hex = tail.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()).filter(|_| *first == b'%') {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_signs_are_decoded() {
        for (text, expected) in
            [("a%2Fb", "a/b"), ("%", "%"), ("%2", "%2"), ("%zz", "%zz"), ("é%c3%a9", "éé"), ("%%41", "%A")]
        {
            assert_eq!(decoded(text), expected);
        }
    }
}
