//! How far the layers have come: a bar or lines for people, JSON lines with `--json`, both on standard error.

use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::json;
use waste_common::cli::{Output, Progress, Unit};

/// Time between two JSON lines.
const NEXT_LINE: Duration = Duration::from_secs(2);

/// Counts layers, experts and bytes of the source.
pub struct Tracker {
    output: Output,
    /// Of bytes; without `--json`.
    progress: Option<Progress>,
    start: Instant,
    /// When the next JSON line is due.
    due: Mutex<Duration>,
    layers: usize,
    bytes: u64,
    experts: u64,
    layers_done: AtomicUsize,
    bytes_done: AtomicI64,
    experts_done: AtomicI64,
}

impl Tracker {
    /// Of so many layers with so many bytes and experts.
    pub fn new(output: &Output, layers: usize, bytes: u64, experts: u64) -> Self {
        let progress = (!output.json()).then(|| Progress::new(output, "layers", bytes, Unit::Bytes));
        Tracker {
            output: output.clone(),
            progress,
            start: Instant::now(),
            due: Mutex::new(NEXT_LINE),
            layers,
            bytes,
            experts,
            layers_done: AtomicUsize::new(0),
            bytes_done: AtomicI64::new(0),
            experts_done: AtomicI64::new(0),
        }
    }

    /// So many more experts with so many bytes; negative if they have to be made again.
    pub fn experts(&self, experts: i64, bytes: i64) {
        self.experts_done.fetch_add(experts, Ordering::Relaxed);
        self.bytes_done.fetch_add(bytes, Ordering::Relaxed);
        match &self.progress {
            // What was lost is not taken back: the bar only goes on.
            Some(progress) => progress.add(bytes.max(0) as u64),
            None => self.line(false),
        }
    }

    /// One more layer; how many of how many that makes.
    pub fn layer(&self) -> (usize, usize) {
        let done = self.layers_done.fetch_add(1, Ordering::Relaxed) + 1;
        if self.progress.is_none() {
            self.line(true);
        }
        (done, self.layers)
    }

    fn line(&self, now: bool) {
        let elapsed = self.start.elapsed();
        let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        if !now && elapsed < *due {
            return;
        }
        *due = elapsed + NEXT_LINE;
        let bytes = self.bytes_done.load(Ordering::Relaxed).max(0) as u64;
        let rate = bytes as f64 / elapsed.as_secs_f64().max(1e-9);
        let left = self.bytes.saturating_sub(bytes) as f64;
        self.output.note(json!({"progress": {
            "layers_done": self.layers_done.load(Ordering::Relaxed),
            "layers": self.layers,
            "experts_done": self.experts_done.load(Ordering::Relaxed).max(0),
            "experts": self.experts,
            "source_bytes_done": bytes,
            "source_bytes": self.bytes,
            "bytes_per_second": rate.round(),
            "eta_seconds": (rate > 0.0).then(|| (left / rate).round()),
        }}));
    }
}
