//! Requests and answers as they go over the wire.

use std::fmt::Write as _;
use std::io::{self, BufRead, Write};
use std::net::TcpStream;

use super::Request;

/// What a client asks.
pub(super) struct Asked {
    pub path: String,
    pub proxied: bool,
    pub range: Option<(u64, u64)>,
    pub authorization: Option<String>,
}

/// Reads a request; None at the end of the connection.
pub(super) fn read_request(reader: &mut impl BufRead) -> io::Result<Option<Asked>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let target = line.split(' ').nth(1).unwrap_or("/").to_owned();
    let proxied = target.starts_with("http://");
    let path = match target.strip_prefix("http://") {
        Some(rest) => rest.split_once('/').map_or("/".to_owned(), |(_, path)| format!("/{path}")),
        None => target,
    };
    let mut asked = Asked { path, proxied, range: None, authorization: None };
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let line = line.trim_end();
        let Some((name, value)) = line.split_once(':') else { return Ok(Some(asked)) };
        let value = value.trim();
        match name.to_ascii_lowercase().as_str() {
            "authorization" => asked.authorization = Some(value.to_owned()),
            "range" => {
                let range = value.strip_prefix("bytes=").and_then(|range| range.split_once('-'));
                asked.range = range.and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
            }
            _ => {}
        }
    }
}

/// `%20` and the like.
pub(super) fn decode(path: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = path.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let hex = tail.get(..2).and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        match (byte, hex) {
            (b'%', Some(value)) => {
                bytes.push(value);
                rest = &tail[2..];
            }
            _ => {
                bytes.push(byte);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

pub(super) fn head(
    mut stream: &TcpStream,
    status: u16,
    headers: &[(&'static str, String)],
) -> io::Result<()> {
    let mut text = format!("HTTP/1.1 {status} Status\r\n");
    for (name, value) in headers {
        let _ = write!(text, "{name}: {value}\r\n");
    }
    text.push_str("\r\n");
    stream.write_all(text.as_bytes())
}

/// An answer without a body.
pub(super) fn plain(
    stream: &TcpStream,
    log: &mut Request,
    status: u16,
    headers: &[(&'static str, String)],
) -> io::Result<bool> {
    log.status = status;
    let headers = [headers, &[("Content-Length", "0".to_owned())]].concat();
    head(stream, status, &headers)?;
    Ok(true)
}

pub(super) fn whole(mut stream: &TcpStream, log: &mut Request, body: &[u8]) -> io::Result<bool> {
    log.status = 200;
    head(stream, 200, &[("Content-Length", body.len().to_string())])?;
    stream.write_all(body)?;
    Ok(true)
}
