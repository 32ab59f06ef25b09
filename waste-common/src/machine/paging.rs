//! Whether the machine pages while a run lasts: the silent killer of speed, because a cached expert that the system has
//! swapped out looks like a hit and costs a read.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::memory::stat_major_faults;
use super::small_file;

/// Time between two looks.
const INTERVAL: Duration = Duration::from_secs(1);
/// Faults a second that read from disk from which a second was one of paging. A program's own pages make a few when
/// they are used for the first time.
const FAULTS_FROM: f64 = 50.0;
/// Seconds of paging in a row that are no accident.
const SUSTAINED: u32 = 3;

/// What paging cost, as far as the system tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Paging {
    /// This process's page faults that had to read from disk.
    pub major_faults: u64,
    /// Pages the whole machine read back from swap.
    pub pages_swapped_in: Option<u64>,
    /// Share of the time in which some process of the machine waited for memory.
    pub stalled_share: Option<f64>,
    /// Whether it went on for seconds.
    pub sustained: bool,
}

/// The system's counters at a time.
#[derive(Clone, Copy, Debug)]
struct Counters {
    at: Instant,
    major_faults: u64,
    swapped_in: Option<u64>,
    stalled_micros: Option<u64>,
}

impl Counters {
    /// This process's; `None` where the system has none (all but Linux).
    fn here() -> Option<Counters> {
        if cfg!(target_os = "linux") { Counters::of(Path::new("/"), Instant::now()) } else { None }
    }

    /// Those under `root`, said to be of a time.
    fn of(root: &Path, at: Instant) -> Option<Counters> {
        let text = |path: &str| small_file(&root.join(path));
        Some(Counters {
            at,
            major_faults: stat_major_faults(&text("proc/self/stat")?)?,
            swapped_in: text("proc/vmstat").and_then(|text| swapped_in(&text)),
            stalled_micros: text("proc/pressure/memory").and_then(|text| stalled_micros(&text)),
        })
    }

    fn since(&self, before: &Counters) -> Paging {
        let less = |now: Option<u64>, before: Option<u64>| Some(now?.saturating_sub(before?));
        let micros = self.at.duration_since(before.at).as_micros() as f64;
        let stalled = less(self.stalled_micros, before.stalled_micros);
        Paging {
            major_faults: self.major_faults.saturating_sub(before.major_faults),
            pages_swapped_in: less(self.swapped_in, before.swapped_in),
            stalled_share: stalled.filter(|_| micros > 0.0).map(|stalled| (stalled as f64 / micros).min(1.0)),
            sustained: false,
        }
    }
}

/// Counts seconds of paging in a row.
#[derive(Debug, Default)]
struct Judge {
    row: u32,
    sustained: bool,
}

impl Judge {
    /// Takes a look; true when paging has just turned out to be sustained, which is said once.
    fn look(&mut self, before: &Counters, now: &Counters) -> bool {
        let seconds = now.at.duration_since(before.at).as_secs_f64();
        let faults = now.major_faults.saturating_sub(before.major_faults) as f64;
        self.row = if faults >= FAULTS_FROM * seconds { self.row + 1 } else { 0 };
        let news = self.row >= SUSTAINED && !self.sustained;
        self.sustained |= news;
        news
    }
}

/// Watches for paging in a thread of its own until it is dropped.
#[derive(Debug)]
pub struct PagingWatch {
    /// None where the system has no counters.
    first: Option<Counters>,
    sustained: Arc<AtomicBool>,
    thread: Option<(Sender<()>, JoinHandle<()>)>,
}

impl PagingWatch {
    /// Starts to watch; `sustained` is called at most once. Where the system has no counters, nothing is watched.
    pub fn start(sustained: impl FnOnce() + Send + 'static) -> PagingWatch {
        let first = Counters::here();
        let mut watch = PagingWatch { first, sustained: Arc::default(), thread: None };
        let Some(first) = first else { return watch };
        let flag = Arc::clone(&watch.sustained);
        let (stop, stopped) = channel::<()>();
        let look = move || {
            let (mut judge, mut last, mut sustained) = (Judge::default(), first, Some(sustained));
            while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let Some(now) = Counters::here() else { continue };
                if judge.look(&last, &now)
                    && let Some(sustained) = sustained.take()
                {
                    flag.store(true, Ordering::Relaxed);
                    sustained();
                }
                last = now;
            }
        };
        // Without the thread the counters are still told.
        let thread = std::thread::Builder::new().name("waste-paging".to_owned()).spawn(look);
        watch.thread = thread.ok().map(|thread| (stop, thread));
        watch
    }

    /// What paging has cost since the start; `None` where the system does not tell.
    pub fn so_far(&self) -> Option<Paging> {
        let now = Counters::here()?;
        let sustained = self.sustained.load(Ordering::Relaxed);
        self.first.map(|first| Paging { sustained, ..now.since(&first) })
    }
}

impl Drop for PagingWatch {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.thread.take() {
            drop(stop);
            // A watcher that panicked has nothing to say.
            let _ = thread.join();
        }
    }
}

/// `pswpin` of proc/vmstat.
fn swapped_in(vmstat: &str) -> Option<u64> {
    vmstat.lines().find_map(|line| line.strip_prefix("pswpin "))?.trim().parse().ok()
}

/// `total` of the line `some` of proc/pressure/memory, microseconds.
fn stalled_micros(pressure: &str) -> Option<u64> {
    let some = pressure.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split_whitespace().find_map(|word| word.strip_prefix("total="))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(faults: u64, swapped: u64, stalled: u64) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: String| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("proc/self/stat", format!("7 (waste run) S 1 2 3 4 5 6 70 80 {faults} 100 11"));
        write("proc/vmstat", format!("pgpgin 5\npswpin {swapped}\npswpout 3\n"));
        write(
            "proc/pressure/memory",
            format!("some avg10=0.00 avg60=0.00 avg300=0.00 total={stalled}\nfull avg10=0.00 total=1\n"),
        );
        dir
    }

    #[test]
    fn counters_are_compared() {
        let start = Instant::now();
        let before = Counters::of(root(10, 100, 5_000).path(), start).unwrap();
        let later = start + Duration::from_secs(2);
        let after = Counters::of(root(25, 160, 505_000).path(), later).unwrap();
        assert_eq!(
            after.since(&before),
            Paging {
                major_faults: 15,
                pages_swapped_in: Some(60),
                stalled_share: Some(0.25),
                sustained: false
            }
        );
    }

    #[test]
    fn what_the_system_does_not_tell_is_left_out() {
        let dir = root(1, 2, 3);
        for file in ["proc/vmstat", "proc/pressure/memory"] {
            std::fs::remove_file(dir.path().join(file)).unwrap();
        }
        let counters = Counters::of(dir.path(), Instant::now()).unwrap();
        let paging = counters.since(&counters);
        assert_eq!((paging.major_faults, paging.pages_swapped_in, paging.stalled_share), (0, None, None));
        std::fs::remove_file(dir.path().join("proc/self/stat")).unwrap();
        assert!(Counters::of(dir.path(), Instant::now()).is_none());
        assert_eq!(stalled_micros("full total=3\n"), None);
        assert_eq!(swapped_in("pswpin x\n"), None);
    }

    #[test]
    fn only_seconds_of_paging_in_a_row_are_sustained_and_said_once() {
        let start = Instant::now();
        let counters = |second: u64, major_faults| Counters {
            at: start + Duration::from_secs(second),
            major_faults,
            swapped_in: None,
            stalled_micros: None,
        };
        let said = |faults: &[u64]| {
            let (mut judge, mut total, mut said) = (Judge::default(), 0, 0);
            for (second, faults) in (0..).zip(faults) {
                let before = counters(second, total);
                total += faults;
                said += u32::from(judge.look(&before, &counters(second + 1, total)));
            }
            (said, judge.sustained)
        };
        assert_eq!(said(&[500, 500, 0, 500, 500, 0, 49, 49, 49]), (0, false));
        assert_eq!(said(&[0, 50, 50, 50]), (1, true));
        assert_eq!(said(&[100; 20]), (1, true));
        assert_eq!(said(&[100, 100, 100, 0, 0, 100, 100, 100]), (1, true));
    }

    #[test]
    fn a_watch_ends_at_once_and_tells_where_the_system_does() {
        let start = Instant::now();
        let watch = PagingWatch::start(|| ());
        let paging = watch.so_far();
        assert_eq!(paging.is_some(), cfg!(target_os = "linux"));
        assert!(paging.is_none_or(|paging| !paging.sustained));
        drop(watch);
        assert!(start.elapsed() < Duration::from_secs(60));
    }
}
