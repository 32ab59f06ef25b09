//! The tool: opens the model, listens, and ends in good order.

use std::net::IpAddr;
#[cfg(unix)]
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::watch;
use waste_common::cli::{Exit, Failure, Interrupt, Output};
use waste_common::json::read_bounded;

use crate::access::Access;
use crate::app::app;
use crate::args::Args;
use crate::listen::{Listener, listen};
use crate::open::{Found, find};
use crate::queue::Phase;
use crate::service::{Service, Working};

/// How often is looked whether something has ended.
const TICK: Duration = Duration::from_millis(50);
/// What answers that are cut have to reach their clients.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// Longest file of keys.
const KEY_BYTES_MAX: u64 = 1 << 20;

/// Serves until a signal comes.
///
/// # Errors
/// The model cannot be served, or the address not be listened on.
pub fn run(args: Args, output: &Output) -> Result<Exit, Failure> {
    let access = access(&args, output)?;
    let interrupt = Interrupt::install()?;
    let Found { facts, settings, open, give_up } = find(&args, output)?;
    let lines = output.clone();
    let log = Arc::new(move |line: &str| lines.note(line));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(8)
        .enable_all()
        .build()
        .map_err(|error| Failure::internal(format!("cannot start the threads of the server: {error}")))?;
    let (listener, address) = runtime.block_on(bind(&args))?;
    let (service, working) = Service::start(facts, settings, access, log, open)?;
    let ending = Ending { interrupt, give_up, drain: args.drain_timeout };
    let served = runtime.block_on(serve(service, working, listener, &address, &ending, output));
    if let Some(path) = &args.unix {
        let _ = std::fs::remove_file(path);
    }
    served.map(|()| Exit::Done)
}

/// How the server ends.
struct Ending {
    /// When this comes.
    interrupt: Interrupt,
    /// A model that is being loaded is given up.
    give_up: Arc<AtomicBool>,
    /// What is being written has so much time.
    drain: Duration,
}

async fn serve(
    service: Arc<Service>,
    working: Working,
    listener: Listener,
    address: &str,
    ending: &Ending,
    output: &Output,
) -> Result<(), Failure> {
    let (end, ended) = watch::channel(false);
    let listening = tokio::spawn(listen(listener, app(Arc::clone(&service)), ended));
    let mut announced = false;
    while !ending.interrupt.requested() && !working.is_finished() {
        if !announced && service.queue.status().phase == Phase::Serving {
            announced = true;
            announce(&service, address, output)?;
        }
        tokio::time::sleep(TICK).await;
    }
    if service.queue.status().phase == Phase::Loading {
        ending.give_up.store(true, Ordering::Relaxed);
    }
    service.queue.drain(ending.drain);
    while !working.is_finished() {
        tokio::time::sleep(TICK).await;
    }
    // Nobody will be answered any more but those who are being answered.
    let _ = end.send(true);
    let _ = tokio::time::timeout(LAST_WORDS, listening).await;
    working.join().unwrap_or_else(|_| Err(Failure::internal("the worker panicked")))
}

fn announce(service: &Service, address: &str, output: &Output) -> Result<(), Failure> {
    let model = &service.settings.model_id;
    if output.json() {
        let vision = service.images.is_some();
        return output.event(&json!({"event": "ready", "addr": address, "model": model, "vision": vision}));
    }
    writeln!(output.text(), "serving {model} on {address}")?;
    output.text().flush()
}

async fn bind(args: &Args) -> Result<(Listener, String), Failure> {
    let failed = |place: &str, error: std::io::Error| {
        Failure::new(Exit::Network, "cannot_listen", format!("cannot listen on {place}: {error}"))
    };
    if let Some(path) = &args.unix {
        #[cfg(unix)]
        {
            let place = path.display().to_string();
            take_over(path).map_err(|error| failed(&place, error))?;
            let listener = tokio::net::UnixListener::bind(path).map_err(|error| failed(&place, error))?;
            return Ok((Listener::Unix(listener), place));
        }
        #[cfg(not(unix))]
        return Err(Failure::usage(format!("there are no sockets like {} on this system", path.display())));
    }
    let place = format!("{}:{}", args.host, args.port);
    let host = args.host.trim_start_matches('[').trim_end_matches(']');
    let listener = TcpListener::bind((host, args.port)).await.map_err(|error| failed(&place, error))?;
    let address = listener.local_addr().map_err(|error| failed(&place, error))?;
    Ok((Listener::Tcp(listener), format!("http://{address}")))
}

/// Removes a socket that nobody listens on any more, such as a kill leaves behind.
#[cfg(unix)]
fn take_over(path: &Path) -> std::io::Result<()> {
    use std::io::{Error, ErrorKind};
    use std::os::unix::fs::FileTypeExt;
    use std::os::unix::net::UnixStream;

    if !std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket()) {
        return Ok(());
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(Error::new(ErrorKind::AddrInUse, "another server listens there")),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        Err(error) => Err(error),
    }
}

/// Who may come in; refuses what would let everybody.
fn access(args: &Args, output: &Output) -> Result<Access, Failure> {
    let mut keys = args.api_key.clone();
    if !keys.is_empty() {
        output
            .warn("--api-key can be seen in the list of processes; --api-key-file and WASTE_API_KEY cannot");
    }
    let lines = |text: &str| -> Vec<String> {
        text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect()
    };
    if let Some(path) = &args.api_key_file {
        let content = read_bounded(path, KEY_BYTES_MAX)?;
        let found = lines(&String::from_utf8_lossy(&content));
        if found.is_empty() {
            return Err(Failure::usage(format!("{} holds no key", path.display())));
        }
        keys.extend(found);
    }
    keys.extend(lines(&std::env::var("WASTE_API_KEY").unwrap_or_default()));
    if keys.is_empty() && args.cors_origin.iter().any(|origin| origin == "*") {
        return Err(Failure::usage("--cors-origin * lets every web page in: it needs an API key"));
    }
    let local = args.unix.is_some() || is_loopback(&args.host);
    if !local && keys.is_empty() && !args.insecure {
        return Err(Failure::usage(format!(
            "{} can be reached from elsewhere, and there is no API key: give one (--api-key-file), or --insecure",
            args.host
        )));
    }
    let mut access = Access::new(&keys);
    access.check_host = args.unix.is_none() && local && keys.is_empty();
    access.hosts = args.allowed_host.clone();
    access.origins = args.cors_origin.clone();
    access.open_metrics = args.metrics_open;
    Ok(access)
}

fn is_loopback(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}
