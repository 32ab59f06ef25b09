//! A hub in this process: its listing, its redirects to another host, its ranges; and, where it is told to, all that
//! goes wrong on the way.

mod wire;

use std::collections::{HashMap, VecDeque};
use std::fmt::Write as _;
use std::io::{self, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};

use wire::{Asked, decode, head, plain, read_request, whole};

/// Bytes sent at once where the rate is limited.
const PIECE: usize = 8 << 10;

/// What goes wrong with one answer.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The connection ends after so many bytes.
    Drop(u64),
    /// Nothing more comes after so many bytes.
    Stall(u64),
    /// The byte at this place of the file is another one.
    Flip(u64),
    /// So many bytes fewer than there are, and the length says so.
    Short(u64),
    /// So many bytes more than there are, and the length says so.
    Long(u64),
    /// Another range than the one that was asked for.
    OtherRange,
    /// The whole file, whatever range was asked for.
    NoRanges,
    /// The hub answers with this status and these headers.
    Status(u16, Vec<(&'static str, String)>),
    /// The host the hub leads to answers with this status.
    CdnStatus(u16),
    /// Other headers than the true ones.
    Headers(Vec<(&'static str, String)>),
    /// Another body (of the listing).
    Body(Vec<u8>),
    /// Nothing goes wrong.
    None,
}

/// A file of the repository.
#[derive(Clone, Debug)]
pub struct File {
    /// Its name.
    pub name: String,
    /// Its content.
    pub content: Arc<Vec<u8>>,
    /// A large file, with a SHA-256 and on another host.
    pub lfs: bool,
    sums: Arc<OnceLock<Sums>>,
}

/// The names of a content.
#[derive(Debug)]
struct Sums {
    /// git's.
    blob: String,
    sha256: String,
}

impl File {
    /// A small file.
    pub fn small(name: &str, content: impl Into<Vec<u8>>) -> File {
        File { name: name.to_owned(), content: Arc::new(content.into()), lfs: false, sums: Arc::default() }
    }

    /// A large one.
    pub fn large(name: &str, content: impl Into<Vec<u8>>) -> File {
        File { lfs: true, ..File::small(name, content) }
    }

    /// Computed once: a listing is asked for often.
    fn sums(&self) -> &Sums {
        self.sums.get_or_init(|| {
            let mut blob = Sha1::new_with_prefix(format!("blob {}\0", self.content.len()));
            blob.update(&*self.content);
            Sums { blob: hex(&blob.finalize()), sha256: hex(&Sha256::digest(&*self.content)) }
        })
    }

    fn blob(&self) -> &str {
        &self.sums().blob
    }

    fn sha256(&self) -> &str {
        &self.sums().sha256
    }
}

/// The files of the small model that comes with the project.
///
/// # Panics
/// They cannot be read. (Tests only.)
pub fn k3_tales() -> Vec<File> {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("models/k3-tales");
    let entries = std::fs::read_dir(dir).unwrap_or_else(|error| panic!("{error}"));
    let read = |entry: std::fs::DirEntry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        let content = std::fs::read(entry.path()).unwrap_or_else(|error| panic!("{name}: {error}"));
        if name.ends_with(".safetensors") { File::large(&name, content) } else { File::small(&name, content) }
    };
    entries.flatten().map(read).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Bytes that look like nothing in particular, the same for the same seed.
pub fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut noise = Vec::with_capacity(bytes + 8);
    while noise.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        noise.extend(state.to_le_bytes());
    }
    noise.truncate(bytes);
    noise
}

/// A request as it came, and what was answered.
#[derive(Clone, Debug)]
pub struct Request {
    /// It came to the host of large files.
    pub cdn: bool,
    /// It came as to a proxy.
    pub proxied: bool,
    /// Path and query.
    pub path: String,
    /// The file it is for.
    pub file: Option<String>,
    /// The range that was asked for, both ends in it.
    pub range: Option<(u64, u64)>,
    /// The header of this name.
    pub authorization: Option<String>,
    /// The status of the answer.
    pub status: u16,
    /// Where in the file the answer begins.
    pub start: u64,
    /// Bytes of the file that were sent.
    pub sent: u64,
    /// When it came.
    pub at: Instant,
}

#[derive(Default)]
struct State {
    /// Commits and their files; the last is what `main` is.
    commits: Vec<(String, Vec<File>)>,
    /// What goes wrong with the next answers for a file; `""` is the listing.
    faults: HashMap<String, VecDeque<Fault>>,
    /// What goes wrong with all of them.
    always: HashMap<String, Fault>,
    log: Vec<Request>,
    token: Option<String>,
    bytes_per_second: Option<u64>,
}

impl State {
    /// A commit, by its name or as `main`, and its files.
    fn revision(&self, revision: &str) -> Option<(String, Vec<File>)> {
        match revision {
            "main" => self.commits.last().cloned(),
            _ => self.commits.iter().find(|(commit, _)| commit == revision).cloned(),
        }
    }
}

struct Shared {
    repo: String,
    cdn: SocketAddr,
    state: Mutex<State>,
    end: AtomicBool,
    /// Connections that are open.
    open: AtomicU64,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A hub that runs until it is dropped.
pub struct Hub {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Hub {
    /// Starts a hub with one empty repository.
    ///
    /// # Panics
    /// There is no port for it. (Tests only.)
    pub fn start(repo: &str) -> Hub {
        let listen =
            || TcpListener::bind("127.0.0.1:0").and_then(|socket| Ok((socket.local_addr()?, socket)));
        let (address, hub) = listen().unwrap_or_else(|error| panic!("{error}"));
        let (cdn_address, cdn) = listen().unwrap_or_else(|error| panic!("{error}"));
        let shared = Arc::new(Shared {
            repo: repo.to_owned(),
            cdn: cdn_address,
            state: Mutex::default(),
            end: AtomicBool::new(false),
            open: AtomicU64::new(0),
        });
        for (socket, cdn) in [(hub, false), (cdn, true)] {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || serve(&socket, &shared, cdn));
        }
        Hub { address, shared }
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// A URL of a large file on the other host, as the hub would give it.
    pub fn cdn_url(&self, name: &str) -> String {
        format!("http://{}/{}/{name}?signature=0", self.shared.cdn, self.main())
    }

    /// Adds a commit, which `main` is from now on, and says its name.
    pub fn commit(&self, files: impl IntoIterator<Item = File>) -> String {
        let files: Vec<File> = files.into_iter().collect();
        let mut sha = Sha1::new();
        for file in &files {
            sha.update(file.name.as_bytes());
            sha.update(file.blob().as_bytes());
        }
        let commit = hex(&sha.finalize());
        self.shared.state().commits.push((commit.clone(), files));
        commit
    }

    /// The commit that `main` is.
    pub fn main(&self) -> String {
        self.shared.state().commits.last().map(|(commit, _)| commit.clone()).unwrap_or_default()
    }

    /// Lets one answer for a file go wrong, after those that were told before; `""` is the listing.
    pub fn fault(&self, file: &str, fault: Fault) {
        self.shared.state().faults.entry(file.to_owned()).or_default().push_back(fault);
    }

    /// Lets every answer for a file go wrong that no other fault is for.
    pub fn always(&self, file: &str, fault: Fault) {
        self.shared.state().always.insert(file.to_owned(), fault);
    }

    /// Everything goes well from now on.
    pub fn heal(&self) {
        let mut state = self.shared.state();
        state.faults.clear();
        state.always.clear();
    }

    /// Who does not have this token is sent away.
    pub fn demand_token(&self, token: &str) {
        self.shared.state().token = Some(token.to_owned());
    }

    /// The rate of each connection.
    pub fn limit(&self, bytes_per_second: Option<u64>) {
        self.shared.state().bytes_per_second = bytes_per_second;
    }

    /// The requests so far.
    pub fn requests(&self) -> Vec<Request> {
        self.shared.state().log.clone()
    }

    /// The requests for the content of a file, in their order.
    pub fn fetches(&self, file: &str) -> Vec<Request> {
        let content = |request: &Request| request.file.as_deref() == Some(file) && request.status != 302;
        self.requests().into_iter().filter(content).collect()
    }

    /// Forgets the requests so far.
    pub fn forget(&self) {
        self.shared.state().log.clear();
    }

    /// Waits until no connection is open, so that the log is complete.
    pub fn settle(&self) {
        while self.shared.open.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.shared.end.store(true, Ordering::SeqCst);
        for address in [self.address, self.shared.cdn] {
            // Wakes the one that waits for connections.
            let _ = TcpStream::connect(address);
        }
    }
}

fn serve(socket: &TcpListener, shared: &Arc<Shared>, cdn: bool) {
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
