//! Waiting: after failures, for a rate, for what a server asked. Every wait ends with the interrupt.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use reqwest::header::{HeaderMap, RETRY_AFTER};
use waste_common::cli::Interrupt;

use crate::error::DownloadError;

/// How often a wait looks at the interrupt.
pub(crate) const TICK: Duration = Duration::from_millis(50);
/// Longest wait of our own.
const BACK_OFF_MAX: Duration = Duration::from_secs(60);
/// Longest wait a server can ask for.
const ASKED_MAX: Duration = Duration::from_secs(3600);

/// Time that a rate makes up for: on a busy machine every wait takes longer than it should.
const MAKES_UP: Duration = Duration::from_millis(100);

/// Says when to stop: a signal, or another file's failure that ends all.
#[derive(Debug, Default)]
pub(crate) struct Stop {
    interrupt: Interrupt,
    failed: AtomicBool,
}

impl Stop {
    pub fn new(interrupt: &Interrupt) -> Stop {
        Stop { interrupt: interrupt.clone(), failed: AtomicBool::new(false) }
    }

    /// Ends the other files too.
    pub fn all(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    pub fn requested(&self) -> bool {
        self.interrupt.requested() || self.failed.load(Ordering::Relaxed)
    }

    /// For the safe points.
    pub fn check(&self) -> Result<(), DownloadError> {
        if self.requested() { Err(DownloadError::Interrupted) } else { Ok(()) }
    }

    pub fn sleep_until(&self, end: Instant) -> Result<(), DownloadError> {
        loop {
            self.check()?;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(TICK));
        }
    }
}

/// Exponential back-off with full jitter: anything from nothing up to a bound that doubles.
pub(crate) fn back_off(first: Duration, failures: u32) -> Duration {
    let bound = first.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(BACK_OFF_MAX);
    bound.mul_f64(random())
}

/// A number from 0 up to 1. Without a source of randomness every wait is half as long as it may be.
fn random() -> f64 {
    getrandom::u64().map_or(0.5, |bits| (bits >> 11) as f64 / (1u64 << 53) as f64)
}

/// How long a server wants to be left alone: `Retry-After` in seconds or as a date, or `RateLimit` with nothing left.
pub(crate) fn asked(headers: &HeaderMap) -> Option<Duration> {
    let text = |name: &str| headers.get(name)?.to_str().ok();
    let after = text(RETRY_AFTER.as_str()).and_then(|text| {
        let text = text.trim();
        match text.parse::<u64>() {
            Ok(seconds) => Some(Duration::from_secs(seconds)),
            Err(_) => Some(http_date(text)?.duration_since(SystemTime::now()).unwrap_or_default()),
        }
    });
    let limits = || headers.get_all("ratelimit").iter().filter_map(|value| value.to_str().ok());
    after
        .or_else(|| limits().flat_map(|text| text.split(',')).filter_map(spent).max())
        .map(|wait| wait.min(ASKED_MAX))
}

/// `"api";r=0;t=55`: of this limit nothing remains for 55 seconds.
fn spent(limit: &str) -> Option<Duration> {
    let value = |key: &str| {
        let mut parts = limit.split(';').filter_map(|part| part.trim().split_once('='));
        parts.find(|(name, _)| *name == key)?.1.parse::<u64>().ok()
    };
    (value("r")? == 0).then_some(Duration::from_secs(value("t")?))
}

/// `Sun, 06 Nov 1994 08:49:37 GMT`, the one form of date servers may send.
fn http_date(text: &str) -> Option<SystemTime> {
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let parts: Vec<&str> = text.split_ascii_whitespace().collect();
    let [_, day, month, year, time, "GMT"] = parts[..] else { return None };
    let number = |text: &str, range: std::ops::Range<u64>| {
        text.parse::<u64>().ok().filter(|number| range.contains(number))
    };
    let month = MONTHS.iter().position(|name| *name == month)? as u64 + 1;
    let (day, year) = (number(day, 1..32)?, number(year, 1970..10_000)?);
    let clock: Vec<u64> =
        time.split(':').zip([24, 60, 61]).map(|(part, end)| number(part, 0..end)).collect::<Option<_>>()?;
    let [hour, minute, second] = clock[..] else { return None };
    // Days since 1970-01-01, counting years from March so that the leap day comes last.
    let (shifted, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * shifted + shifted / 4 - shifted / 100 + shifted / 400 + (153 * month + 2) / 5 + day - 1;
    let seconds = (days.checked_sub(719_468)?) * 86_400 + hour * 3600 + minute * 60 + second;
    Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
}

/// What a server asked for holds for every file: nobody sends a request before.
#[derive(Debug, Default)]
pub(crate) struct Quiet {
    until: Mutex<Option<Instant>>,
}

impl Quiet {
    pub fn extend(&self, wait: Duration) {
        let end = Instant::now() + wait;
        let mut until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        *until = Some(until.map_or(end, |until| until.max(end)));
    }

    pub fn pass(&self, stop: &Stop) -> Result<(), DownloadError> {
        let until = *self.until.lock().unwrap_or_else(PoisonError::into_inner);
        until.map_or(Ok(()), |until| stop.sleep_until(until))
    }
}

/// How often and how patiently failures are answered with another try; the same for all files.
#[derive(Debug)]
pub(crate) struct Retries {
    /// Failures in a row.
    max: u32,
    /// Bound of the first wait.
    first: Duration,
    pub quiet: Quiet,
}

impl Retries {
    pub fn new(max: u32, first: Duration) -> Retries {
        Retries { max, first, quiet: Quiet::default() }
    }

    /// What to do after the `failures`th failure in a row: wait, and how long.
    ///
    /// # Errors
    /// It is one too many.
    pub fn after(
        &self,
        failures: u32,
        reason: &str,
        asked: Option<Duration>,
        what: &str,
    ) -> Result<Wait, DownloadError> {
        if failures > self.max {
            let (what, last) = (what.to_owned(), reason.to_owned());
            return Err(DownloadError::Network { what, tries: failures, last });
        }
        if let Some(asked) = asked {
            self.quiet.extend(asked);
        }
        let wait = back_off(self.first, failures).max(asked.unwrap_or_default());
        let text = format!("{reason}; try {failures} of {} in {:.1} s", self.max, wait.as_secs_f64());
        Ok(Wait { until: Instant::now() + wait, text })
    }
}

/// A wait before the next try.
#[derive(Debug)]
pub(crate) struct Wait {
    until: Instant,
    /// Why and how long, for people.
    pub text: String,
}

impl Wait {
    pub fn pass(&self, stop: &Stop) -> Result<(), DownloadError> {
        stop.sleep_until(self.until)
    }
}

/// A rate all files share.
#[derive(Debug)]
pub(crate) struct Rate {
    bytes_per_second: f64,
    /// When the bytes taken so far will have been paid for.
    next: Mutex<Instant>,
}

impl Rate {
    pub fn new(bytes_per_second: u64) -> Rate {
        Rate { bytes_per_second: bytes_per_second.max(1) as f64, next: Mutex::new(Instant::now()) }
    }

    /// Waits until `bytes` more are allowed.
    pub fn take(&self, bytes: usize, stop: &Stop) -> Result<(), DownloadError> {
        let cost = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second);
        let end = {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            *next = due(*next, Instant::now()) + cost;
            *next
        };
        stop.sleep_until(end)
    }
}

/// From when on the next bytes are paid for, if those so far have been until `paid`.
fn due(paid: Instant, now: Instant) -> Instant {
    paid.max(now.checked_sub(MAKES_UP).unwrap_or(now))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_minute_and_are_jittered_from_nothing() {
        let first = Duration::from_secs(1);
        for (failures, bound) in [(1, 1), (2, 2), (4, 8), (7, 60), (u32::MAX, 60)] {
            let waits: Vec<_> = (0..200).map(|_| back_off(first, failures)).collect();
            let bound = Duration::from_secs(bound);
            assert!(waits.iter().all(|wait| *wait <= bound));
            assert!(waits.iter().any(|wait| *wait < bound / 4) && waits.iter().any(|wait| *wait > bound / 2));
        }
    }

    #[test]
    fn servers_ask_in_seconds_by_date_or_by_their_rate_limit() {
        let of = |name: &'static str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            asked(&headers)
        };
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        assert_eq!(of("retry-after", " 7 "), seconds(7));
        assert_eq!(of("retry-after", "999999999999"), seconds(3600));
        assert_eq!(of("retry-after", "Sun, 06 Nov 1994 08:49:37 GMT"), seconds(0));
        assert_eq!(of("retry-after", "Fri, 31 Dec 9999 23:59:59 GMT"), seconds(3600));
        assert_eq!(of("retry-after", "soon"), None);
        assert_eq!(of("ratelimit", "\"api\";r=0;t=55"), seconds(55));
        assert_eq!(of("ratelimit", "\"api\";r=3;t=55"), None);
        assert_eq!(of("ratelimit", "\"a\";r=3;t=900, \"b\"; r=0; t=7, \"c\";t=9;r=0"), seconds(9));
        assert_eq!(of("ratelimit", "\"a\";r=0, r;t, ;;=0,\"b\";r=0;t=x"), None);
        assert_eq!(of("x", "1"), None);
    }

    #[test]
    fn dates_are_counted_right() {
        let of = |text| http_date(text).unwrap().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        assert_eq!(of("Thu, 01 Jan 1970 00:00:00 GMT"), 0);
        assert_eq!(of("Sun, 06 Nov 1994 08:49:37 GMT"), 784_111_777);
        assert_eq!(of("Thu, 29 Feb 2024 12:00:00 GMT"), 1_709_208_000);
        for bad in ["", "Sun, 06 Nov 1994 08:49 GMT", "Sun, 99 Nov 1994 08:49:37 GMT", "a b c d e GMT"] {
            assert_eq!(http_date(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_rate_is_shared_and_kept() {
        let (rate, stop, start) = (Rate::new(1 << 20), Stop::default(), Instant::now());
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..8).try_for_each(|_| rate.take(16 << 10, &stop)).unwrap());
            }
        });
        assert!(start.elapsed() >= Duration::from_millis(245));
    }

    #[test]
    fn a_rate_makes_up_for_a_wait_that_was_too_long_but_not_for_all_time() {
        let paid = Instant::now();
        let after = |ms| due(paid, paid + Duration::from_millis(ms)).duration_since(paid).as_millis();
        assert_eq!([0, 60, 100, 101, 5_000].map(after), [0, 0, 0, 1, 4_900]);
        let ahead = paid + Duration::from_secs(1);
        assert_eq!(due(ahead, paid), ahead);
    }

    #[test]
    fn a_wait_ends_with_the_interrupt() {
        let stop = Stop::default();
        let quiet = Quiet::default();
        quiet.extend(Duration::from_secs(3600));
        stop.all();
        assert!(quiet.pass(&stop).is_err());
    }
}
