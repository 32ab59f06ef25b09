//! The socket: connections within limits, until the end.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// Most connections at a time.
const CONNECTIONS_MAX: usize = 256;
/// A request's headers must be complete by then.
const HEADER_TIME: Duration = Duration::from_secs(10);
/// What of a request is buffered at most: beyond, no answer says why.
const BUFFER_BYTES: usize = 2 * crate::app::HEADERS_MAX;

/// Where connections come from.
pub enum Listener {
    /// An address.
    Tcp(TcpListener),
    /// A path.
    #[cfg(unix)]
    Unix(tokio::net::UnixListener),
}

/// Takes connections until `end` says true, and then lets those that are there finish.
pub async fn listen(listener: Listener, app: Router, mut end: watch::Receiver<bool>) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let closing = end.clone();
    let mut tasks = tokio::task::JoinSet::new();
    loop {
        // Those beyond wait unaccepted.
        let Ok(permit) = Arc::clone(&slots).acquire_owned().await else { break };
        tokio::select! {
            () = ended(&mut end) => break,
            accepted = accept(&listener) => match accepted {
                Ok(stream) => {
                    tasks.spawn(connection(stream, app.clone(), closing.clone(), permit));
                }
                // A connection that broke while it was made, or no more descriptors: later ones may do.
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            },
        }
        while tasks.try_join_next().is_some() {}
    }
    while tasks.join_next().await.is_some() {}
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

async fn accept(listener: &Listener) -> io::Result<Box<dyn Stream>> {
    match listener {
        Listener::Tcp(listener) => {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            Ok(Box::new(stream))
        }
        #[cfg(unix)]
        Listener::Unix(listener) => Ok(Box::new(listener.accept().await?.0)),
    }
}

async fn connection(
    stream: Box<dyn Stream>,
    app: Router,
    mut end: watch::Receiver<bool>,
    _permit: OwnedSemaphorePermit,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIME).max_buf_size(BUFFER_BYTES);
    let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(app));
    tokio::pin!(connection);
    tokio::select! {
        _ = &mut connection => return,
        () = ended(&mut end) => (),
    }
    connection.as_mut().graceful_shutdown();
    let _ = connection.await;
}

/// Waits for the end; a sender that is gone is one too.
async fn ended(end: &mut watch::Receiver<bool>) {
    let _ = end.wait_for(|end| *end).await;
}
