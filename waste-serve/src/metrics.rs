//! What is counted, in the text format of Prometheus.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use waste_common::machine::resident_bytes;

use crate::job::Finished;
use crate::model::Reads;
use crate::queue::Status;

/// Upper bounds of the histograms' buckets, in seconds.
const BOUNDS: [f64; 16] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 1800.0];

/// All counters.
#[derive(Default)]
pub struct Metrics(Mutex<Counts>);

#[derive(Default)]
struct Counts {
    requests: BTreeMap<(&'static str, u16), u64>,
    cancelled: BTreeMap<&'static str, u64>,
    prompt: u64,
    reused: u64,
    generated: [u64; 4],
    hits: u64,
    misses: u64,
    bytes: u64,
    images: u64,
    first_token: Histogram,
    token: Histogram,
    queue: Histogram,
}

#[derive(Default)]
struct Histogram {
    buckets: [u64; BOUNDS.len()],
    count: u64,
    sum: f64,
}

impl Histogram {
    fn add(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        for (bucket, _) in self.buckets.iter_mut().zip(BOUNDS).filter(|(_, bound)| seconds <= *bound) {
            *bucket += 1;
        }
        self.count += 1;
        self.sum += seconds;
    }

    fn write(&self, name: &str, out: &mut String) {
        let _ = writeln!(out, "# TYPE {name} histogram");
        for (bucket, bound) in self.buckets.iter().zip(BOUNDS) {
            let _ = writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {bucket}");
        }
        let _ = writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {}", self.count);
        let _ = writeln!(out, "{name}_sum {}\n{name}_count {}", self.sum, self.count);
    }
}

impl Metrics {
    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request was answered.
    pub fn request(&self, endpoint: &'static str, status: u16) {
        *self.lock().requests.entry((endpoint, status)).or_default() += 1;
    }

    /// A client left.
    pub fn cancelled(&self, during: &'static str) {
        *self.lock().cancelled.entry(during).or_default() += 1;
    }

    /// A prompt went in.
    pub fn prompt(&self, tokens: usize, reused: usize) {
        let mut counts = self.lock();
        counts.prompt += tokens as u64;
        counts.reused += reused as u64;
    }

    /// Time until the first token.
    pub fn first_token(&self, time: Duration) {
        self.lock().first_token.add(time);
    }

    /// Time from token to token.
    pub fn token(&self, time: Duration) {
        self.lock().token.add(time);
    }

    /// Time in the line.
    pub fn waited(&self, time: Duration) {
        self.lock().queue.add(time);
    }

    /// An answer was written.
    pub fn answer(&self, finished: &Finished) {
        let mut counts = self.lock();
        let of = finished.counts;
        for (sum, tokens) in counts.generated.iter_mut().zip([of.reasoning, of.content, of.tool, of.markup]) {
            *sum += tokens as u64;
        }
    }

    /// Experts were used and read, images seen.
    pub fn reads(&self, reads: Reads) {
        let mut counts = self.lock();
        counts.hits += reads.hits;
        counts.misses += reads.misses;
        counts.bytes += reads.bytes;
        counts.images += reads.images;
    }

    /// Everything as text.
    pub fn text(&self, status: Status, version: &str) -> String {
        let counts = self.lock();
        let mut out = String::new();
        let mut one = |name: &str, kind: &str, labels: &str, value: u64| {
            if !out.contains(&format!("# TYPE {name} ")) {
                let _ = writeln!(out, "# TYPE {name} {kind}");
            }
            let _ = writeln!(out, "{name}{labels} {value}");
        };
        one("waste_build_info", "gauge", &format!("{{version=\"{version}\"}}"), 1);
        for ((endpoint, status), count) in &counts.requests {
            let labels = format!("{{endpoint=\"{endpoint}\",status=\"{status}\"}}");
            one("waste_requests_total", "counter", &labels, *count);
        }
        one("waste_requests_running", "gauge", "", status.running as u64);
        one("waste_slots", "gauge", "", status.slots as u64);
        one("waste_queue_waiting", "gauge", "", status.waiting as u64);
        one("waste_prompt_tokens_total", "counter", "", counts.prompt);
        one("waste_prompt_tokens_reused_total", "counter", "", counts.reused);
        for (kind, count) in ["reasoning", "content", "tool", "markup"].iter().zip(counts.generated) {
            one("waste_generation_tokens_total", "counter", &format!("{{kind=\"{kind}\"}}"), count);
        }
        one("waste_expert_hits_total", "counter", "", counts.hits);
        one("waste_expert_misses_total", "counter", "", counts.misses);
        one("waste_bytes_read_total", "counter", "", counts.bytes);
        one("waste_images_encoded_total", "counter", "", counts.images);
        if let Some(bytes) = resident_bytes() {
            one("waste_resident_bytes", "gauge", "", bytes);
        }
        for (reason, count) in &counts.cancelled {
            one("waste_cancelled_total", "counter", &format!("{{reason=\"{reason}\"}}"), *count);
        }
        counts.first_token.write("waste_ttft_seconds", &mut out);
        counts.token.write("waste_token_seconds", &mut out);
        counts.queue.write("waste_queue_seconds", &mut out);
        out
    }
}
