//! What is said while files are fetched: bars on a terminal, a line now and then elsewhere, JSON lines with `--json`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use waste_common::cli::{Output, Progress, Unit};

/// Time between two JSON lines of progress.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// Everything that is said about the work.
pub(crate) struct Talk {
    /// None says nothing.
    output: Option<Output>,
    total: Option<Progress>,
    lines: Lines,
}

/// What the JSON lines tell.
struct Lines {
    start: Instant,
    /// When the next line is due, after the start.
    due: Mutex<Duration>,
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    /// Done before this run: no part of the rate.
    skipped_bytes: AtomicU64,
    files: Mutex<BTreeMap<String, Arc<FileLine>>>,
}

struct FileLine {
    size: u64,
    done_bytes: AtomicU64,
}

impl Talk {
    /// About work on `total` bytes.
    pub fn new(output: &Output, label: &str, total: u64) -> Talk {
        let bars = !output.json();
        Talk {
            output: Some(output.clone()),
            total: bars.then(|| Progress::new(output, label, total, Unit::Bytes)),
            lines: Lines::new(total),
        }
    }

    #[cfg(test)]
    pub fn silent() -> Talk {
        Talk { output: None, total: None, lines: Lines::new(0) }
    }

    /// See [`say`].
    pub fn event(&self, event: &str, file: Option<&str>, text: &str) {
        if let Some(output) = &self.output {
            say(output, event, file, text);
        }
    }

    /// The same, only with `-v`.
    pub fn detail(&self, event: &str, file: &str, text: &str) {
        if self.output.as_ref().is_some_and(Output::verbose) {
            self.event(event, Some(file), text);
        }
    }

    /// A file is begun.
    pub fn file(&self, name: &str, size: u64) -> FileTalk<'_> {
        let bar = self.output.as_ref().filter(|output| output.terminal() && !output.json());
        let bar = bar.map(|output| Progress::new(output, name, size, Unit::Bytes));
        let line = Arc::new(FileLine { size, done_bytes: AtomicU64::new(0) });
        lock(&self.lines.files).insert(name.to_owned(), Arc::clone(&line));
        FileTalk { talk: self, name: name.to_owned(), bar, line }
    }

    fn progress_if_due(&self) {
        let elapsed = self.lines.start.elapsed();
        {
            let mut due = lock(&self.lines.due);
            if elapsed < *due {
                return;
            }
            *due = elapsed + LINE_EVERY;
        }
        if let (Some(output), Value::Object(object)) = (&self.output, self.lines.progress(elapsed)) {
            line(output, object);
        }
    }

    /// The end: takes the bars away.
    pub fn finish(self) {
        if let Some(total) = self.total {
            total.finish();
        }
    }
}

impl Lines {
    fn new(total: u64) -> Lines {
        Lines {
            start: Instant::now(),
            due: Mutex::new(Duration::ZERO),
            done_bytes: AtomicU64::new(0),
            total_bytes: AtomicU64::new(total),
            skipped_bytes: AtomicU64::new(0),
            files: Mutex::default(),
        }
    }

    fn progress(&self, elapsed: Duration) -> Value {
        let done = self.done_bytes.load(Ordering::Relaxed);
        let fetched = done.saturating_sub(self.skipped_bytes.load(Ordering::Relaxed));
        let rate = fetched as f64 / elapsed.as_secs_f64().max(1e-3);
        let total = self.total_bytes.load(Ordering::Relaxed);
        let left = total.saturating_sub(done) as f64;
        let files: Vec<Value> = lock(&self.files)
            .iter()
            .map(|(name, file)| {
                json!({"file": name, "bytes": file.done_bytes.load(Ordering::Relaxed), "size": file.size})
            })
            .collect();
        json!({
            "event": "progress",
            "bytes": done,
            "total_bytes": total,
            "bytes_per_second": rate as u64,
            "eta_seconds": (rate >= 1.0).then(|| (left / rate) as u64),
            "files": files,
        })
    }
}

/// What is said about one file; the end of it takes its bar away.
pub(crate) struct FileTalk<'a> {
    talk: &'a Talk,
    name: String,
    bar: Option<Progress>,
    line: Arc<FileLine>,
}

impl FileTalk<'_> {
    /// Bytes that were there already, and have been looked at.
    pub fn skip(&self, bytes: u64) {
        self.count(bytes);
        self.talk.lines.skipped_bytes.fetch_add(bytes, Ordering::Relaxed);
        for bar in [&self.talk.total, &self.bar].into_iter().flatten() {
            bar.skip(bytes);
        }
    }

    /// Bytes that have come.
    pub fn add(&self, bytes: u64) {
        self.count(bytes);
        for bar in [&self.talk.total, &self.bar].into_iter().flatten() {
            bar.add(bytes);
        }
        if self.talk.output.as_ref().is_some_and(Output::json) {
            self.talk.progress_if_due();
        }
    }

    /// So many bytes must be fetched once more.
    pub fn again(&self, bytes: u64) {
        let total = self.talk.lines.total_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if let Some(bar) = &self.talk.total {
            bar.set_total(total);
        }
    }

    fn count(&self, bytes: u64) {
        self.line.done_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.talk.lines.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Something that happened to the file.
    pub fn event(&self, event: &str, text: &str) {
        self.talk.event(event, Some(&self.name), text);
    }

    /// The same, only with `-v`.
    pub fn detail(&self, event: &str, text: &str) {
        self.talk.detail(event, &self.name, text);
    }
}

impl Drop for FileTalk<'_> {
    fn drop(&mut self) {
        lock(&self.talk.lines.files).remove(&self.name);
    }
}

/// Something that happened: a line of text, or an object with its `event`.
pub(crate) fn say(output: &Output, event: &str, file: Option<&str>, text: &str) {
    if output.json() {
        let mut object = Map::new();
        object.insert("event".into(), event.into());
        object.extend(file.map(|file| ("file".to_owned(), file.into())));
        object.insert("message".into(), text.into());
        line(output, object);
    } else {
        let file = file.map(|file| format!("{file}: ")).unwrap_or_default();
        output.note(format_args!("{file}{text}"));
    }
}

fn line(output: &Output, mut object: Map<String, Value>) {
    object.shift_insert(0, "schema".into(), output.schema().into());
    output.note(Value::Object(object));
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
