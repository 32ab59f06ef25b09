//! The web page: three files inside the program, which ask for nothing from elsewhere.

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, Response, StatusCode, header};

use crate::error::text_response;

/// Nothing but this server's own files, and nobody's frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A file of the page: its type and content.
pub fn file(path: &str) -> Option<(&'static str, &'static str)> {
    match path {
        "" => Some(("text/html; charset=utf-8", include_str!("../ui/index.html"))),
        "/ui.css" => Some(("text/css; charset=utf-8", include_str!("../ui/ui.css"))),
        "/ui.js" => Some(("text/javascript; charset=utf-8", include_str!("../ui/ui.js"))),
        _ => None,
    }
}

/// The answer that carries a file.
pub fn response((kind, content): (&'static str, &'static str)) -> Response<Body> {
    let mut response = text_response(StatusCode::OK, kind, content.to_owned());
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    // A new version of the program has a new page.
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(
        HeaderName::from_static("cross-origin-opener-policy"),
        HeaderValue::from_static("same-origin"),
    );
    response
}
