//! How fast it is, against the memory and against the disk, for a container of some gigabytes that fits in memory:
//! `WASTE_CONTAINER=k3.waste cargo test --release -p waste-verify --test speed -- --ignored --nocapture`
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use waste_common::io::{ALIGNMENT, AlignedBuf, Bypass, ReadFile};

const RUNS: usize = 5;
/// What the opponents read at once: enough for the disk, and for the cache of one core.
const PIECE: usize = 1 << 20;

struct Bench {
    dir: PathBuf,
    files: Vec<PathBuf>,
    bytes: u64,
    threads: usize,
}

impl Bench {
    fn new() -> Bench {
        let dir =
            PathBuf::from(std::env::var_os("WASTE_CONTAINER").expect("WASTE_CONTAINER names a container"));
        let files: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        let bytes = files.iter().map(|path| path.metadata().unwrap().len()).sum();
        Bench { dir, files, bytes, threads: std::thread::available_parallelism().unwrap().get() }
    }

    /// Puts every file out of the page cache.
    fn cool(&self) {
        for path in &self.files {
            let of = format!("if={}", path.display());
            assert!(
                Command::new("dd")
                    .args([&*of, "iflag=nocache", "count=0", "status=none"])
                    .status()
                    .unwrap()
                    .success()
            );
        }
    }

    /// Puts every file into it.
    fn warm(&self) {
        self.files.iter().for_each(|path| drop(std::fs::read(path).unwrap()));
    }

    /// Reads every byte, and its crc32 if `sum` says so: the least anybody can do.
    fn plain(&self, threads: usize, bypass: Bypass, sum: bool) {
        let files: Vec<_> = self.files.iter().map(|path| ReadFile::open(path, bypass).unwrap()).collect();
        let pieces: Vec<(&ReadFile, u64)> = files
            .iter()
            .flat_map(|file| (0..file.len()).step_by(PIECE).map(move |offset| (file, offset)))
            .collect();
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    let mut buffer = AlignedBuf::zeroed(PIECE.next_multiple_of(ALIGNMENT)).unwrap();
                    while let Some((file, offset)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let read = file.read_tail(*offset, buffer.bytes_mut()).unwrap();
                        if sum {
                            std::hint::black_box(crc32fast::hash(&buffer.bytes()[..read]));
                        }
                    }
                });
            }
        });
    }

    fn verify(&self) {
        let mut command = waste_tests::tool::process("waste-verify");
        assert!(command.arg(&self.dir).args(["--json", "-q"]).output().unwrap().status.success());
    }
}

/// GB a second, the runs of all taking turns so that they meet the same weather; the median of each.
fn medians(bytes: u64, before: &dyn Fn(), what: &[(&str, &dyn Fn())]) -> Vec<f64> {
    let mut rates = vec![Vec::new(); what.len()];
    for _ in 0..RUNS {
        for ((_, run), rates) in what.iter().zip(&mut rates) {
            before();
            let start = Instant::now();
            run();
            rates.push(bytes as f64 / start.elapsed().as_secs_f64() / 1e9);
        }
    }
    let medians = rates.into_iter().zip(what).map(|(mut rates, (name, _))| {
        rates.sort_by(f64::total_cmp);
        println!("{name}: {:.2} GB/s ({:.2} to {:.2})", rates[RUNS / 2], rates[0], rates[RUNS - 1]);
        rates[RUNS / 2]
    });
    medians.collect()
}

#[test]
#[ignore = "takes a minute, a container and the machine for itself"]
fn throughput() {
    let bench = Bench::new();
    let threads = bench.threads;
    println!("{} bytes, {threads} threads; the median of {RUNS} runs", bench.bytes);
    bench.warm();
    let [memory, verify] = medians(
        bench.bytes,
        &|| (),
        &[
            ("cached: a pass of crc32", &|| bench.plain(threads, Bypass::Off, true)),
            ("cached: waste-verify", &|| bench.verify()),
        ],
    )[..] else {
        unreachable!()
    };
    println!("cached: {:.0} % of memory speed", 100.0 * verify / memory);
    let [disk, disks, verify] = medians(
        bench.bytes,
        &|| bench.cool(),
        &[
            ("cold: past the page cache, one thread", &|| bench.plain(1, Bypass::On, false)),
            ("cold: past the page cache, all threads", &|| bench.plain(threads, Bypass::On, false)),
            ("cold: waste-verify", &|| bench.verify()),
        ],
    )[..] else {
        unreachable!()
    };
    println!("cold: {:.0} % of the disk", 100.0 * verify / disk.max(disks));
}
