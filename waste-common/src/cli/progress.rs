//! Progress of what can last: a bar on a terminal, a line now and then elsewhere, nothing with `-q`.

use super::{ByteSize, Output};
use indicatif::{ProgressBar, ProgressStyle};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes, shown as GiB with a rate per second.
    Bytes,
    /// Things: layers, tokens, records.
    Count,
}

/// Without a terminal nothing is said about work shorter than this.
const FIRST_LINE: Duration = Duration::from_secs(2);
/// Without a terminal, the time between two lines.
const NEXT_LINE: Duration = Duration::from_secs(10);

/// The progress of one piece of work. May be advanced from several threads; removes its bar when dropped.
pub struct Progress {
    output: Output,
    label: String,
    total: AtomicU64,
    done: AtomicU64,
    /// Done before this process began: no part of the rate.
    skipped: AtomicU64,
    unit: Unit,
    start: Instant,
    how: How,
}

enum How {
    Silent,
    Bar(ProgressBar),
    /// When the next line is due, counted from the start.
    Lines(Mutex<Duration>),
}

impl Progress {
    /// Begin. `total` is in `unit`s; 0 if it is not known.
    pub fn new(output: &Output, label: impl Into<String>, total: u64, unit: Unit) -> Progress {
        let label = label.into();
        let how = if output.quiet() {
            How::Silent
        } else if output.terminal() {
            let bar = output.bars().add(ProgressBar::new(total));
            bar.set_style(style(total > 0, unit));
            bar.set_message(label.clone());
            bar.enable_steady_tick(Duration::from_millis(200));
            How::Bar(bar)
        } else {
            How::Lines(Mutex::new(FIRST_LINE))
        };
        let (done, skipped) = (AtomicU64::new(0), AtomicU64::new(0));
        Progress {
            output: output.clone(),
            label,
            total: AtomicU64::new(total),
            done,
            skipped,
            unit,
            start: Instant::now(),
            how,
        }
    }

    /// `amount` more was already there: it counts as done but not towards the rate.
    pub fn skip(&self, amount: u64) {
        self.skipped.fetch_add(amount, Ordering::Relaxed);
        self.done.fetch_add(amount, Ordering::Relaxed);
        if let How::Bar(bar) = &self.how {
            bar.inc(amount);
            bar.reset_eta();
        }
    }

    /// `amount` more is done.
    pub fn add(&self, amount: u64) {
        self.done.fetch_add(amount, Ordering::Relaxed);
        match &self.how {
            How::Silent => (),
            How::Bar(bar) => bar.inc(amount),
            How::Lines(_) => self.line_if_due(self.start.elapsed()),
        }
    }

    /// The total became known, or changed.
    pub fn set_total(&self, total: u64) {
        self.total.store(total, Ordering::Relaxed);
        if let How::Bar(bar) = &self.how {
            bar.set_style(style(total > 0, self.unit));
            bar.set_length(total);
        }
    }

    /// The end: takes the bar away. Without a terminal a closing line, if the work was long enough for one.
    pub fn finish(self) {
        if matches!(self.how, How::Lines(_)) && self.start.elapsed() >= FIRST_LINE {
            self.output.note(self.line(self.start.elapsed()));
        }
    }

    /// Say a line if one is due `elapsed` after the start.
    fn line_if_due(&self, elapsed: Duration) {
        let How::Lines(due) = &self.how else { return };
        let mut due = due.lock().unwrap_or_else(PoisonError::into_inner);
        if elapsed >= *due {
            *due = elapsed + NEXT_LINE;
            self.output.note(self.line(elapsed));
        }
    }

    /// `layers: 12 of 93 (12%), 0.31/s, 4 min left`
    fn line(&self, elapsed: Duration) -> String {
        let done = self.done.load(Ordering::Relaxed);
        let total = self.total.load(Ordering::Relaxed);
        let show = |amount: u64| match self.unit {
            Unit::Bytes => ByteSize(amount).to_string(),
            Unit::Count => amount.to_string(),
        };
        let mut line = format!("{}: {}", self.label, show(done));
        if total > 0 {
            let percent = u128::from(done) * 100 / u128::from(total);
            line.push_str(&format!(" of {} ({percent}%)", show(total)));
        }
        let rate = done.saturating_sub(self.skipped.load(Ordering::Relaxed)) as f64 / elapsed.as_secs_f64();
        if rate.is_finite() && rate > 0.0 {
            line.push_str(&match self.unit {
                Unit::Bytes => format!(", {}/s", ByteSize(rate as u64)),
                Unit::Count => format!(", {rate:.2}/s"),
            });
            if total > done {
                line.push_str(&format!(", {} left", duration((total - done) as f64 / rate)));
            }
        }
        line
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let How::Bar(bar) = &self.how {
            bar.finish_and_clear();
        }
    }
}

/// Seconds as people say them.
fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 90.0 => format!("{s:.0} s"),
        s if s < 5400.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

fn style(bounded: bool, unit: Unit) -> ProgressStyle {
    ProgressStyle::with_template(template(bounded, unit)).unwrap_or_else(|_| ProgressStyle::default_bar())
}

fn template(bounded: bool, unit: Unit) -> &'static str {
    match (bounded, unit) {
        (true, Unit::Bytes) => {
            "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}"
        }
        (true, Unit::Count) => "{msg} {wide_bar} {pos}/{len} {per_sec} {eta}",
        (false, Unit::Bytes) => "{msg} {spinner} {binary_bytes} {binary_bytes_per_sec}",
        (false, Unit::Count) => "{msg} {spinner} {pos} {per_sec}",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{CommonArgs, Exit, Tool, run_captured};

    #[derive(clap::Parser)]
    struct Args {
        #[command(flatten)]
        _common: CommonArgs,
    }

    const TOOL: Tool =
        Tool { name: "waste-try", version: "1", schema: "waste-try/1", examples: "", details: Vec::new };

    fn stderr_of(args: &[&str], work: impl FnOnce(&Output)) -> String {
        let captured = run_captured(TOOL, args, |_: Args, output| {
            work(output);
            Ok(Exit::Done)
        });
        assert_eq!((captured.exit, captured.stdout.as_str()), (Exit::Done, ""));
        captured.stderr
    }

    fn at(progress: &Progress, seconds: u64) {
        progress.line_if_due(Duration::from_secs(seconds));
    }

    #[test]
    fn without_a_terminal_a_line_after_2_s_and_then_every_10() {
        let work = |output: &Output| {
            let progress = Progress::new(output, "layers", 100, Unit::Count);
            progress.add(10);
            at(&progress, 1);
            at(&progress, 5);
            at(&progress, 6);
            progress.add(10);
            at(&progress, 14);
            at(&progress, 20);
            progress.finish();
        };
        assert_eq!(
            stderr_of(&[], work),
            "layers: 10 of 100 (10%), 2.00/s, 45 s left\nlayers: 20 of 100 (20%), 1.00/s, 80 s left\n"
        );
        assert_eq!(stderr_of(&["-q"], work), "");
    }

    #[test]
    fn what_was_there_before_is_no_part_of_the_rate() {
        let text = stderr_of(&[], |output| {
            let progress = Progress::new(output, "shard", 4 << 30, Unit::Bytes);
            progress.skip(2 << 30);
            progress.add(1 << 30);
            at(&progress, 1024);
        });
        assert_eq!(text, "shard: 3.00 GiB of 4.00 GiB (75%), 1.00 MiB/s, 17 min left\n");
    }

    #[test]
    fn an_unknown_total_is_not_divided_by() {
        let text = stderr_of(&[], |output| {
            let progress = Progress::new(output, "tokens", 0, Unit::Count);
            at(&progress, 4);
            progress.add(6);
            progress.set_total(u64::MAX);
            at(&progress, 20);
        });
        assert!(text.starts_with("tokens: 0\ntokens: 6 of 18446744073709551615 (0%), 0.30/s, "), "{text}");
    }

    #[test]
    fn every_template_is_understood() {
        for bounded in [true, false] {
            for unit in [Unit::Bytes, Unit::Count] {
                assert!(ProgressStyle::with_template(template(bounded, unit)).is_ok());
            }
        }
    }
}
