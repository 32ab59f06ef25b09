//! Requests: redirects followed by hand, so that the token goes to the hub alone; answers read piece by piece, with an
//! eye on the interrupt and on connections that have stalled.
//!
//! reqwest's blocking client hands every piece from thread to thread and cannot be interrupted; so each thread drives
//! the asynchronous one itself.

use std::future::Future;
use std::pin::pin;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue, LOCATION, RANGE};
use reqwest::{Client, Response, StatusCode, Url, redirect};
use tokio::runtime::Runtime;

use crate::error::DownloadError;
use crate::wait::{Stop, TICK, asked};

const REDIRECTS_MAX: usize = 10;

/// Why a request brought nothing, or no more.
#[derive(Debug)]
pub(crate) enum Fault {
    /// It may do better next time; the server may have said when.
    Retry { reason: String, after: Option<Duration> },
    /// What was fetched so far is of another file than what the server has now.
    Changed { reason: String },
    /// It will not.
    Fatal(DownloadError),
}

impl From<DownloadError> for Fault {
    fn from(error: DownloadError) -> Fault {
        Fault::Fatal(error)
    }
}

impl Fault {
    pub fn retry(reason: impl Into<String>) -> Fault {
        Fault::Retry { reason: reason.into(), after: None }
    }
}

/// What all connections share.
#[derive(Clone, Debug)]
pub(crate) struct Hub {
    endpoint: Url,
    /// `Bearer …`; shown nowhere.
    authorization: Option<HeaderValue>,
    /// A connection without a byte for so long has stalled.
    stall: Duration,
}

impl Hub {
    pub fn new(endpoint: Url, token: Option<&str>, stall: Duration) -> Result<Hub, DownloadError> {
        let authorization = token.map(|token| {
            let mut value = HeaderValue::from_str(&format!("Bearer {token}"))?;
            value.set_sensitive(true);
            Ok::<_, reqwest::header::InvalidHeaderValue>(value)
        });
        let authorization = authorization.transpose().map_err(|_| DownloadError::Refused {
            what: "the token".to_owned(),
            problem: "it has characters that no token has".to_owned(),
        })?;
        Ok(Hub { endpoint, authorization, stall })
    }

    /// A URL of the hub; each part is one segment, whatever it holds.
    pub fn url(&self, parts: &[&str]) -> Url {
        let mut url = self.endpoint.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(parts);
        }
        url
    }

    fn is_hub(&self, url: &Url) -> bool {
        url.origin() == self.endpoint.origin()
    }
}

/// One thread's way to the network.
pub(crate) struct Connection<'a> {
    hub: &'a Hub,
    stop: &'a Stop,
    runtime: Runtime,
    client: Client,
}

/// Every way to the network: as many as files are fetched at once. A file gives its own back as soon as its last byte has
/// come, so that the next one begins while it is hashed to its end and made durable.
pub(crate) struct Lines<'a> {
    free: Mutex<Vec<Connection<'a>>>,
    returned: Condvar,
    stop: &'a Stop,
}

/// One of them, taken.
pub(crate) struct Line<'l, 'a> {
    lines: &'l Lines<'a>,
    connection: Option<Connection<'a>>,
}

impl<'a> Lines<'a> {
    pub fn new(count: usize, hub: &'a Hub, stop: &'a Stop) -> Result<Self, DownloadError> {
        let free = (0..count).map(|_| Connection::new(hub, stop)).collect::<Result<_, _>>()?;
        Ok(Lines { free: Mutex::new(free), returned: Condvar::new(), stop })
    }

    /// Waits for one that is free.
    pub fn take(&self) -> Result<Line<'_, 'a>, DownloadError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(connection) = free.pop() {
                return Ok(Line { lines: self, connection: Some(connection) });
            }
            self.stop.check()?;
            free = self.returned.wait_timeout(free, TICK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl<'a> Line<'_, 'a> {
    /// The connection; taken again, if it has been given back.
    pub fn connection(&mut self) -> Result<&Connection<'a>, DownloadError> {
        if self.connection.is_none() {
            self.connection = self.lines.take()?.connection.take();
        }
        self.connection.as_ref().ok_or_else(|| DownloadError::Internal("a connection has gone".to_owned()))
    }

    /// Lets another file have it.
    pub fn give_back(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.lines.free.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
            self.lines.returned.notify_one();
        }
    }
}

impl Drop for Line<'_, '_> {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// An answer whose body has not been read.
pub(crate) struct Reply {
    /// The headers of the hub's own answer, which may have been a redirect.
    pub hub_headers: HeaderMap,
    response: Response,
}

impl Reply {
    pub fn status(&self) -> StatusCode {
        self.response.status()
    }

    pub fn headers(&self) -> &HeaderMap {
        self.response.headers()
    }

    /// The length of the body, if the server says it.
    pub fn length(&self) -> Option<u64> {
        // reqwest's own method forgets the header of an empty answer.
        self.headers().get("content-length")?.to_str().ok()?.parse().ok()
    }
}

impl<'a> Connection<'a> {
    pub fn new(hub: &'a Hub, stop: &'a Stop) -> Result<Self, DownloadError> {
        // A second call finds the first one's provider: as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let internal =
            |problem: String| DownloadError::Internal(format!("cannot use the network: {problem}"));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| internal(error.to_string()))?;
        let client = Client::builder()
            .user_agent(concat!("waste-download/", env!("CARGO_PKG_VERSION")))
            .redirect(redirect::Policy::none())
            .retry(reqwest::retry::never())
            .referer(false)
            .http1_only()
            .connect_timeout(hub.stall)
            .build()
            .map_err(|error| internal(causes(&error)))?;
        Ok(Connection { hub, stop, runtime, client })
    }

    /// Asks the hub, and whomever it sends us to. `what` is what the answer is wanted for, in messages.
    ///
    /// # Errors
    /// Anything but 200 and 206.
    pub fn get(&self, mut url: Url, range: Option<(u64, u64)>, what: &str) -> Result<Reply, Fault> {
        let mut hub_headers = None;
        for _ in 0..REDIRECTS_MAX {
            let at_hub = self.hub.is_hub(&url);
            let mut request = self.client.get(url.clone());
            if let Some(value) = self.hub.authorization.as_ref().filter(|_| at_hub) {
                request = request.header(AUTHORIZATION, value.clone());
            }
            if let Some((first, last)) = range {
                request = request.header(RANGE, format!("bytes={first}-{last}"));
            }
            let response = self.wait(request.send())?.map_err(broken)?;
            if at_hub {
                hub_headers = Some(response.headers().clone());
            }
            let status = response.status();
            if status.is_redirection() && status != StatusCode::NOT_MODIFIED {
                url = redirected(&url, response.headers()).map_err(Fault::retry)?;
                continue;
            }
            if status != StatusCode::OK && status != StatusCode::PARTIAL_CONTENT {
                return Err(refusal(status, response.headers(), at_hub, what));
            }
            return Ok(Reply { hub_headers: hub_headers.unwrap_or_default(), response });
        }
        Err(Fault::retry(format!("more than {REDIRECTS_MAX} redirects")))
    }

    /// The next piece of an answer; None at its end.
    pub fn piece(&self, reply: &mut Reply) -> Result<Option<bytes::Bytes>, Fault> {
        self.wait(reply.response.chunk())?.map_err(broken)
    }

    /// A whole answer of at most `max` bytes.
    pub fn body(&self, reply: &mut Reply, max: usize, what: &str) -> Result<Vec<u8>, Fault> {
        let mut body = Vec::new();
        while let Some(piece) = self.piece(reply)? {
            if body.len() + piece.len() > max {
                let problem = format!("it has more than {max} bytes");
                return Err(Fault::Fatal(DownloadError::Answer { what: what.to_owned(), problem }));
            }
            body.extend_from_slice(&piece);
        }
        Ok(body)
    }

    /// Drives `work` until it is done, has stalled, or shall stop.
    fn wait<T>(&self, work: impl Future<Output = T>) -> Result<T, Fault> {
        self.runtime.block_on(async {
            let mut work = pin!(work);
            let start = Instant::now();
            loop {
                match tokio::time::timeout(TICK, work.as_mut()).await {
                    Ok(done) => return Ok(done),
                    Err(_) => self.stop.check()?,
                }
                if start.elapsed() >= self.hub.stall {
                    let seconds = self.hub.stall.as_secs_f64();
                    return Err(Fault::retry(format!("the connection stalled: no byte for {seconds} s")));
                }
            }
        })
    }
}

/// Where a redirect leads. An encrypted way never leads to one that is not.
fn redirected(from: &Url, headers: &HeaderMap) -> Result<Url, String> {
    let location = headers.get(LOCATION).and_then(|value| value.to_str().ok());
    let location = location.ok_or("a redirect without a place")?;
    let to = from.join(location).map_err(|error| format!("a redirect to no URL: {error}"))?;
    let host = to.host_str().unwrap_or_default();
    match (from.scheme(), to.scheme()) {
        (_, "https") | ("http", "http") => Ok(to),
        ("https", "http") => Err(format!("a redirect from https to http ({host}) is not followed")),
        (_, other) => Err(format!("a redirect to {other}: is not followed")),
    }
}

/// What an answer without the wanted content means.
fn refusal(status: StatusCode, headers: &HeaderMap, at_hub: bool, what: &str) -> Fault {
    let what = what.to_owned();
    match status.as_u16() {
        408 | 425 | 429 | 500..=599 => {
            Fault::Retry { reason: format!("the server answered {status}"), after: asked(headers) }
        }
        416 => Fault::Changed { reason: "the server has no such range".to_owned() },
        // Signed addresses end; the hub gives a new one.
        _ if !at_hub => Fault::retry(format!(
            "the address the hub had given answered {status}; it may have expired, a new one is asked for"
        )),
        401 => Fault::Fatal(DownloadError::Unauthorized { what }),
        403 => Fault::Fatal(DownloadError::Forbidden { what }),
        404 | 410 => Fault::Fatal(DownloadError::NotFound { what }),
        _ => Fault::Fatal(DownloadError::Refused { what, problem: format!("the hub answered {status}") }),
    }
}

/// A connection that failed. The URL is left out: a signed one is a secret.
fn broken(error: reqwest::Error) -> Fault {
    Fault::retry(causes(&error.without_url()))
}

fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap()
    }

    #[test]
    fn parts_of_a_url_cannot_become_more_parts() {
        let hub = |endpoint| Hub::new(url(endpoint), None, TICK).unwrap();
        let of = |endpoint, parts: &[&str]| hub(endpoint).url(parts).to_string();
        assert_eq!(
            of("https://h", &["a", "refs/pr/1", "b c#?%"]),
            "https://h/a/refs%2Fpr%2F1/b%20c%23%3F%25"
        );
        assert_eq!(of("https://h/mirror/", &["a"]), "https://h/mirror/a");
        assert_eq!(of("https://h/mirror", &["a"]), "https://h/mirror/a");
    }

    #[test]
    fn a_hub_is_its_scheme_host_and_port() {
        let hub = Hub::new(url("https://hub.example/x"), Some("t"), TICK).unwrap();
        assert!(hub.is_hub(&url("https://hub.example/y?z")) && hub.is_hub(&url("https://hub.example:443/")));
        for other in ["http://hub.example/", "https://hub.example:8443/", "https://cdn.hub.example/"] {
            assert!(!hub.is_hub(&url(other)), "{other}");
        }
        assert!(!format!("{hub:?}").contains("Bearer t"));
        assert!(Hub::new(url("https://h"), Some("a\nb"), TICK).is_err());
    }

    #[test]
    fn redirects_do_not_lose_the_encryption() {
        let to = |from: &str, place: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(LOCATION, place.parse().unwrap());
            redirected(&url(from), &headers).map(|url| url.to_string())
        };
        assert_eq!(to("https://h/a/b", "c").unwrap(), "https://h/a/c");
        assert_eq!(to("https://h/a", "https://cdn/x").unwrap(), "https://cdn/x");
        assert_eq!(to("http://h/a", "/x").unwrap(), "http://h/x");
        for bad in ["http://cdn/x", "file:///etc/passwd", "ftp://x/"] {
            assert!(to("https://h/a", bad).is_err(), "{bad}");
        }
        assert!(redirected(&url("http://h"), &HeaderMap::new()).is_err());
    }
}
