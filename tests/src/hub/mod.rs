//! A hub in this process: its listing, its redirects to another host, its ranges; and, where it is told to, all that
//! goes wrong on the way.

mod content;
mod server;
mod wire;

use std::collections::{HashMap, VecDeque};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sha1::{Digest, Sha1};

use content::hex;
pub use content::{File, k3_tales, noise};
use server::serve;

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
