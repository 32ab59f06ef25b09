//! What goes wrong, as clients see it.

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};
use waste_common::error::{Coded, Exit};
use waste_engine::EngineError;
use waste_engine::chat::ChatError;
use waste_engine::sampler::SamplerError;

/// An answer that is an error.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    /// The status.
    pub status: StatusCode,
    /// The stable name, such as `queue_full`.
    pub code: &'static str,
    /// The field of the request it is about.
    pub param: Option<String>,
    /// For people.
    pub message: String,
    /// Further headers.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

impl ApiError {
    /// An error of this status.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError { status, code, param: None, message: message.into(), headers: Vec::new() }
    }

    /// The request is wrong (400).
    pub fn bad(code: &'static str, param: &str, message: impl Into<String>) -> ApiError {
        ApiError { param: Some(param.to_owned()), ..ApiError::new(StatusCode::BAD_REQUEST, code, message) }
    }

    /// A value that cannot be (400 `invalid_value`).
    pub fn value(param: &str, message: impl Into<String>) -> ApiError {
        ApiError::bad("invalid_value", param, message)
    }

    /// Something that there is not (400 `unsupported_parameter`).
    pub fn unsupported(param: &str, message: impl Into<String>) -> ApiError {
        ApiError::bad("unsupported_parameter", param, message)
    }

    /// A bug, or a machine that fails (500); the message names no place of the machine.
    pub fn internal() -> ApiError {
        ApiError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal_error",
            "an internal error; the log says more",
        )
    }

    /// Not now (503).
    pub fn unavailable(code: &'static str, message: &str) -> ApiError {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, code, message)
    }

    /// Too much is being received at this moment.
    pub fn crowded() -> ApiError {
        let message = "other requests take all the room there is for bodies or images; try again soon";
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", message)
            .with(header::RETRY_AFTER, HeaderValue::from_static("1"))
    }

    /// The server ends: no use in trying again here.
    pub fn shutting_down() -> ApiError {
        ApiError::unavailable("shutting_down", "the server is shutting down")
            .with(HeaderName::from_static("x-should-retry"), HeaderValue::from_static("false"))
    }

    /// With a header.
    #[must_use]
    pub fn with(mut self, name: HeaderName, value: HeaderValue) -> ApiError {
        self.headers.push((name, value));
        self
    }

    /// The class that the clients' libraries know.
    pub fn kind(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// `{"error":{…}}`
    pub fn object(&self) -> Value {
        json!({"error": {
            "message": self.message, "type": self.kind(), "param": self.param, "code": self.code,
        }})
    }

    /// The whole answer.
    pub fn response(self) -> Response<Body> {
        let mut response = json_response(self.status, &self.object());
        response.headers_mut().extend(self.headers.iter().map(|(name, value)| (name.clone(), value.clone())));
        // For the line in the log.
        response.extensions_mut().insert(Code(self.code));
        response
    }
}

/// The code of an error's answer, for the log.
#[derive(Clone, Copy, Debug)]
pub struct Code(pub &'static str);

/// An answer of JSON.
pub fn json_response(status: StatusCode, body: &Value) -> Response<Body> {
    text_response(status, "application/json", body.to_string())
}

/// An answer of text.
pub fn text_response(status: StatusCode, kind: &'static str, body: String) -> Response<Body> {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> ApiError {
        let code = error.code();
        let param = error.param().map(str::to_owned);
        ApiError { param, ..ApiError::new(StatusCode::BAD_REQUEST, code, error.to_string()) }
    }
}

/// What an engine's error means to a client: options were the request's, all else is the machine's.
impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> ApiError {
        match error {
            EngineError::ContextFull { .. } => {
                ApiError::bad("context_length_exceeded", "messages", error.to_string())
            }
            EngineError::Sampler(ref inner) if inner.exit() == Exit::Usage => {
                ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", error.to_string())
            }
            // A client's schema can be more than there is time for; that is no failure of the engine.
            EngineError::Sampler(SamplerError::Constraint { .. }) => {
                ApiError::bad("unsupported_schema", "response_format", error.to_string())
            }
            EngineError::Stop(_) => ApiError::value("stop", error.to_string()),
            EngineError::Expert { layer, expert, ref source } => ApiError::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "engine_error",
                format!("layer {layer}, expert {expert} could not be read ({})", source.code()),
            ),
            _ => ApiError::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "engine_error",
                format!("the engine failed ({}); the log says more", error.code()),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schema_that_leads_nowhere_is_no_failure_of_ours() {
        let why = "step limit".to_owned();
        let error = ApiError::from(EngineError::from(SamplerError::Constraint { why }));
        assert_eq!((error.status.as_u16(), error.code), (400, "unsupported_schema"));
    }
}
