//! The two hosts at work: the hub itself, and the one it leads to for large files.

use std::collections::VecDeque;
use std::io::{self, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::wire::{Asked, decode, head, plain, read_request, whole};
use super::{Fault, File, Request, Shared};

/// Bytes sent at once where the rate is limited.
const PIECE: usize = 8 << 10;

pub(super) fn serve(socket: &TcpListener, shared: &Arc<Shared>, cdn: bool) {
    for stream in socket.incoming() {
        if shared.end.load(Ordering::SeqCst) {
            return;
        }
        let Ok(stream) = stream else { continue };
        let shared = Arc::clone(shared);
        shared.open.fetch_add(1, Ordering::SeqCst);
        std::thread::spawn(move || {
            // A client that went away is no concern of ours.
            let _ = Server { shared: &shared, cdn }.connection(&stream);
            shared.open.fetch_sub(1, Ordering::SeqCst);
        });
    }
}

/// The end of one connection.
struct Server<'a> {
    shared: &'a Shared,
    cdn: bool,
}

impl Server<'_> {
    fn connection(&self, stream: &TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        // Wine does not tell that a client was killed.
        let patience = cfg!(windows).then_some(Duration::from_secs(5));
        stream.set_read_timeout(patience)?;
        stream.set_write_timeout(patience)?;
        let mut reader = BufReader::new(stream);
        while let Some(asked) = read_request(&mut reader)? {
            if !self.answer(stream, &asked)? {
                break;
            }
        }
        Ok(())
    }

    /// Answers; whether the connection lives on.
    fn answer(&self, stream: &TcpStream, asked: &Asked) -> io::Result<bool> {
        let mut request = Request {
            cdn: self.cdn,
            proxied: asked.proxied,
            path: asked.path.clone(),
            file: None,
            range: asked.range,
            authorization: asked.authorization.clone(),
            status: 0,
            start: 0,
            sent: 0,
            at: Instant::now(),
        };
        let result = self.route(stream, asked, &mut request);
        self.shared.state().log.push(request);
        result
    }

    fn route(&self, stream: &TcpStream, asked: &Asked, log: &mut Request) -> io::Result<bool> {
        let path = decode(asked.path.split('?').next().unwrap_or_default());
        let repo = &self.shared.repo;
        if self.cdn {
            let Some((commit, name)) = path.trim_start_matches('/').split_once('/') else {
                return plain(stream, log, 404, &[]);
            };
            return match self.find(commit, name) {
                Some(file) => self.content(stream, asked, &file, log),
                None => plain(stream, log, 404, &[]),
            };
        }
        let token = self.shared.state().token.clone();
        if token.is_some_and(|token| asked.authorization != Some(format!("Bearer {token}"))) {
            return plain(stream, log, 401, &[]);
        }
        if let Some(revision) = path.strip_prefix(&format!("/api/models/{repo}/revision/")) {
            return self.listing(stream, revision, log);
        }
        if let Some(rest) = path.strip_prefix(&format!("/{repo}/resolve/"))
            && let Some((commit, name)) = rest.split_once('/')
            && let Some(file) = self.find(commit, name)
        {
            return self.resolve(stream, asked, commit, &file, log);
        }
        plain(stream, log, 404, &[])
    }

    fn find(&self, revision: &str, name: &str) -> Option<File> {
        let (_, files) = self.shared.state().revision(revision)?;
        files.into_iter().find(|file| file.name == name)
    }

    fn next_fault(&self, name: &str) -> Fault {
        let mut state = self.shared.state();
        let next = state.faults.get_mut(name).and_then(VecDeque::pop_front);
        next.or_else(|| state.always.get(name).cloned()).unwrap_or(Fault::None)
    }

    /// What will go wrong, if it is the hub's part; else it waits for the content.
    fn hub_fault(&self, name: &str) -> Fault {
        let mut state = self.shared.state();
        let hubs = |fault: &Fault| matches!(fault, Fault::Status(..) | Fault::Headers(_));
        if let Some(faults) = state.faults.get_mut(name)
            && let Some(front) = faults.front()
        {
            return if hubs(front) { faults.pop_front().unwrap_or(Fault::None) } else { Fault::None };
        }
        state.always.get(name).filter(|fault| hubs(fault)).cloned().unwrap_or(Fault::None)
    }

    fn listing(&self, stream: &TcpStream, revision: &str, log: &mut Request) -> io::Result<bool> {
        match self.next_fault("") {
            Fault::Status(status, headers) => return plain(stream, log, status, &headers),
            Fault::Body(body) => return whole(stream, log, &body),
            Fault::Stall(_) => return self.hold(stream),
            Fault::Drop(_) => return Ok(false),
            _ => {}
        }
        let found = self.shared.state().revision(revision);
        let Some((commit, files)) = found else { return plain(stream, log, 404, &[]) };
        let siblings: Vec<Value> = files
            .iter()
            .map(|file| {
                let mut sibling =
                    json!({"rfilename": file.name, "size": file.content.len(), "blobId": file.blob()});
                if file.lfs {
                    sibling["lfs"] =
                        json!({"sha256": file.sha256(), "size": file.content.len(), "pointerSize": 134});
                }
                sibling
            })
            .collect();
        let body = json!({"id": self.shared.repo, "sha": commit, "siblings": siblings}).to_string();
        whole(stream, log, body.as_bytes())
    }

    fn resolve(
        &self,
        stream: &TcpStream,
        asked: &Asked,
        commit: &str,
        file: &File,
        log: &mut Request,
    ) -> io::Result<bool> {
        if !file.lfs {
            return self.content(stream, asked, file, log);
        }
        log.file = Some(file.name.clone());
        let others = match self.hub_fault(&file.name) {
            Fault::Status(status, headers) => return plain(stream, log, status, &headers),
            Fault::Headers(headers) => headers,
            _ => Vec::new(),
        };
        let signature = self.shared.state().log.len();
        let mut headers = vec![
            ("Location", format!("http://{}/{commit}/{}?signature={signature}", self.shared.cdn, file.name)),
            ("X-Repo-Commit", commit.to_owned()),
            ("X-Linked-Size", file.content.len().to_string()),
            ("X-Linked-ETag", format!("\"{}\"", file.sha256())),
        ];
        replace(&mut headers, others);
        plain(stream, log, 302, &headers)
    }

    /// Sends a file, or the range of it that was asked for, or what shall go wrong.
    fn content(&self, stream: &TcpStream, asked: &Asked, file: &File, log: &mut Request) -> io::Result<bool> {
        log.file = Some(file.name.clone());
        let fault = self.next_fault(&file.name);
        let mut content = Arc::clone(&file.content);
        let size = content.len() as u64;
        let mut range = asked.range.map(|(first, last)| (first, last.min(size.saturating_sub(1))));
        let (mut lie, mut end_after, mut stall) = (0i64, None, false);
        let mut headers = vec![
            ("Accept-Ranges", "bytes".to_owned()),
            ("ETag", format!("\"{}\"", if file.lfs { file.sha256() } else { file.blob() })),
        ];
        match fault {
            Fault::Status(status, headers) => return plain(stream, log, status, &headers),
            Fault::CdnStatus(status) => return plain(stream, log, status, &[]),
            Fault::Drop(after) => end_after = Some(after),
            Fault::Stall(after) => (end_after, stall) = (Some(after), true),
            Fault::Flip(at) => {
                if let Some(byte) = Arc::make_mut(&mut content).get_mut(at as usize) {
                    *byte ^= 1;
                }
            }
            Fault::Short(bytes) => lie = -(bytes as i64),
            Fault::Long(bytes) => lie = bytes as i64,
            Fault::OtherRange => range = range.map(|(first, last)| (first + 1, last)),
            Fault::NoRanges => range = None,
            Fault::Headers(others) => replace(&mut headers, others),
            Fault::Body(_) | Fault::None => {}
        }
        if range.is_some_and(|(first, last)| first > last) {
            return plain(stream, log, 416, &[]);
        }
        let (first, end) = range.map_or((0, size), |(first, last)| (first, last + 1));
        let length = (end - first).saturating_add_signed(lie);
        if range.is_some() {
            headers.push(("Content-Range", format!("bytes {first}-{}/{size}", end - 1)));
        }
        headers.push(("Content-Length", length.to_string()));
        (log.status, log.start) = (if range.is_some() { 206 } else { 200 }, first);
        head(stream, log.status, &headers)?;
        let stop = end_after.map_or(length, |after| after.min(length));
        while log.sent < stop {
            let left = (stop - log.sent) as usize;
            let rate = self.shared.state().bytes_per_second;
            let count = if rate.is_some() { left.min(PIECE) } else { left.min(4 << 20) };
            let from = (first + log.sent).min(size) as usize;
            let piece = &content[from..(from + count).min(content.len())];
            let piece = if piece.is_empty() { &[0; PIECE][..count.min(PIECE)] } else { piece };
            (&*stream).write_all(piece)?;
            log.sent += piece.len() as u64;
            if let Some(rate) = rate {
                std::thread::sleep(Duration::from_secs_f64(piece.len() as f64 / rate as f64));
            }
        }
        if stall {
            return self.hold(stream);
        }
        Ok(end_after.is_none())
    }

    /// Sends nothing until the client gives up.
    fn hold(&self, stream: &TcpStream) -> io::Result<bool> {
        stream.set_read_timeout(Some(Duration::from_millis(20)))?;
        let mut byte = [0];
        while !self.shared.end.load(Ordering::SeqCst) {
            match (&*stream).read(&mut byte) {
                Ok(0) => break,
                Err(error)
                    if !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) =>
                {
                    break;
                }
                _ => {}
            }
        }
        Ok(false)
    }
}

fn replace(headers: &mut Vec<(&'static str, String)>, others: Vec<(&'static str, String)>) {
    for (name, value) in others {
        headers.retain(|(old, _)| !old.eq_ignore_ascii_case(name));
        headers.push((name, value));
    }
}
