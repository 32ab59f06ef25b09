//! Who may come in: keys, hosts, origins.

use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use sha2::{Digest, Sha256};

use crate::error::ApiError;

/// The rules.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// Hashes of the keys, so that comparing takes the same time whatever is wrong.
    keys: Vec<[u8; 32]>,
    /// Whether only the names of this machine, and those that are allowed, may stand in `Host`: against web pages that
    /// make a browser think this server were theirs.
    pub check_host: bool,
    /// Further names for `Host`.
    pub hosts: Vec<String>,
    /// Web pages that may call; `*` for all.
    pub origins: Vec<String>,
    /// Whether `/metrics` needs no key.
    pub open_metrics: bool,
}

impl Access {
    /// The rules for these keys; without any, everybody may come in.
    pub fn new(keys: &[String]) -> Access {
        Access { keys: keys.iter().map(|key| hash(key)).collect(), ..Access::default() }
    }

    /// Whether a key is needed.
    pub fn has_keys(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Who asks: one number for each key, 0 without keys.
    ///
    /// # Errors
    /// A key is needed, and this is none.
    pub fn owner(&self, headers: &HeaderMap) -> Result<u64, ApiError> {
        if self.keys.is_empty() {
            return Ok(0);
        }
        let value = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let given = value
            .and_then(|value| value.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        let given = hash(given.map_or("", |(_, key)| key.trim()));
        // Over all keys, to the end.
        let mut found = 0;
        for key in &self.keys {
            let differs = key.iter().zip(&given).fold(0, |differs, (a, b)| differs | (a ^ b));
            found |= u8::from(differs == 0);
        }
        if found == 1 {
            let [a, b, c, d, e, f, g, h, ..] = given;
            return Ok(u64::from_le_bytes([a, b, c, d, e, f, g, h]));
        }
        let error = ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", "a valid API key is needed");
        Err(error.with(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")))
    }

    /// Refuses names of hosts that are not this server's.
    ///
    /// # Errors
    /// As said.
    pub fn check_host(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if !self.check_host {
            return Ok(());
        }
        let host = headers.get(header::HOST).map_or(Some(""), |value| value.to_str().ok());
        let known = |host: &str| {
            let name = host_name(host);
            let same = |other: &str| name.eq_ignore_ascii_case(other);
            ["localhost", "127.0.0.1", "[::1]"].iter().any(|own| same(own))
                || self.hosts.iter().any(|allowed| same(allowed) || host.eq_ignore_ascii_case(allowed))
        };
        match host {
            Some(host) if known(host) => Ok(()),
            _ => Err(ApiError::new(
                StatusCode::FORBIDDEN,
                "host_not_allowed",
                "this name of the server is not allowed (see --allowed-host)",
            )),
        }
    }

    /// What a web page's request is answered with; `None` if it is none, or none that is allowed.
    ///
    /// # Errors
    /// A page that is not allowed wants to change something.
    pub fn check_origin(
        &self,
        method: &Method,
        headers: &HeaderMap,
    ) -> Result<Option<HeaderValue>, ApiError> {
        let Some(origin) = headers.get(header::ORIGIN) else { return Ok(None) };
        let allowed =
            self.origins.iter().any(|allowed| allowed == "*" || origin.as_bytes() == allowed.as_bytes());
        if allowed {
            return Ok(Some(origin.clone()));
        }
        // A page of this server's own is no stranger.
        let own = headers.get(header::HOST).and_then(|host| host.to_str().ok());
        let same = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, host)| host);
        if method == Method::POST && (same.is_none() || same != own) {
            return Err(ApiError::new(
                StatusCode::FORBIDDEN,
                "origin_not_allowed",
                "web pages of this origin may not call (see --cors-origin)",
            ));
        }
        Ok(None)
    }
}

/// Headers for a web page that may call.
pub fn allow(origin: HeaderValue, headers: &mut HeaderMap) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(header::VARY, HeaderValue::from_static("Origin"));
    headers
        .insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("x-request-id, retry-after"));
}

/// What a page asks before it calls.
pub fn allow_preflight(request: &HeaderMap, headers: &mut HeaderMap) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
    let asked = request.get(header::ACCESS_CONTROL_REQUEST_HEADERS).and_then(|value| value.to_str().ok());
    let known = |name: &&str| {
        ["authorization", "content-type", "x-request-id"].contains(name) || name.starts_with("x-stainless-")
    };
    let asked = asked.unwrap_or_default().to_ascii_lowercase();
    let names: Vec<&str> = asked.split(',').map(str::trim).filter(known).collect();
    if let Ok(names) = HeaderValue::from_str(&names.join(", ")) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names);
    }
    headers.insert(HeaderName::from_static("access-control-max-age"), HeaderValue::from_static("600"));
}

/// A host without its port.
fn host_name(host: &str) -> &str {
    match host.rfind(':') {
        Some(at) if !host[at..].contains(']') => &host[..at],
        _ => host,
    }
}

fn hash(key: &str) -> [u8; 32] {
    Sha256::digest(key).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_cut_off() {
        for (host, name) in
            [("localhost:8000", "localhost"), ("[::1]:80", "[::1]"), ("[::1]", "[::1]"), ("a", "a"), ("", "")]
        {
            assert_eq!(host_name(host), name);
        }
    }
}
