//! How fast it is, against curl, the disk and SHA-256, all with the same files:
//! `cargo test --release -p waste-download --test speed -- --ignored --nocapture`
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use sha2::{Digest, Sha256};
use support::Case;
use waste_tests::hub::{File, noise};

const FILES: usize = 4;
const BYTES: usize = 256 << 20;
const RUNS: usize = 3;

struct Bench {
    case: Case,
    dir: tempfile::TempDir,
}

impl Bench {
    fn new() -> Bench {
        let files =
            (0..FILES).map(|at| File::large(&format!("model-{at}.safetensors"), noise(BYTES, at as u64)));
        let case = Case::new(files.collect());
        // The listing needs the checksums; they are not part of any race.
        case.done(&["--dry-run"]);
        Bench { case, dir: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap() }
    }

    fn content(&self, at: usize) -> &[u8] {
        &self.case.files[at].content
    }

    fn place(&self, at: usize) -> PathBuf {
        self.dir.path().join(format!("{at}"))
    }

    /// All files hashed, so many at once.
    fn hash(&self, threads: usize) {
        at_once(threads, |at| {
            let sum =
                self.content(at).chunks(1 << 20).fold(Sha256::new(), |sha, piece| sha.chain_update(piece));
            std::hint::black_box(sum.finalize());
        });
    }

    /// All files written and made durable.
    fn write(&self, threads: usize) {
        at_once(threads, |at| {
            let output = std::fs::File::create(self.place(at)).unwrap();
            self.content(at)
                .chunks(1 << 20)
                .for_each(|piece| std::io::Write::write_all(&mut &output, piece).unwrap());
            output.sync_all().unwrap();
        });
    }

    /// All files fetched by curl to nowhere, so many at once: what the server, which has the same CPUs, can give.
    fn nowhere(&self, threads: usize) {
        at_once(threads, |at| {
            let url = self.case.hub.cdn_url(&self.case.files[at].name);
            assert!(
                Command::new("curl").args(["-sS", "-o", "/dev/null"]).arg(url).status().unwrap().success()
            );
        });
    }

    /// The same while as many bytes are hashed: what is left to do without any disk.
    fn nowhere_and_hash(&self, threads: usize) {
        std::thread::scope(|scope| {
            scope.spawn(|| self.nowhere(threads));
            self.hash(threads);
        });
    }

    /// All files fetched by curl, one after the other; made durable too if `sync` says so.
    fn curl(&self, sync: bool) {
        at_once(1, |at| {
            let (file, url) = (self.place(at), self.case.hub.cdn_url(&self.case.files[at].name));
            let status = Command::new("curl").args(["-sS", "-o"]).arg(&file).arg(url).status();
            assert!(status.unwrap().success());
            if sync {
                std::fs::File::open(&file).unwrap().sync_all().unwrap();
            }
        });
    }

    fn download(&self, jobs: &str) {
        let mut command = waste_tests::tool::process("waste-download");
        command.args([support::REPO, "-q", "--endpoint", &self.case.hub.url(), "--jobs", jobs, "--dest"]);
        let status = command.arg(self.dir.path().join("dest")).stdout(Stdio::null()).status();
        assert!(status.unwrap().success());
    }

    /// Takes everything away, and lets the disk come to rest.
    fn clean(&self) {
        for entry in std::fs::read_dir(self.dir.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) }.unwrap();
        }
        Command::new("sync").arg("-f").arg(self.dir.path()).status().unwrap();
    }
}

/// Does `work` for every file, so many at once.
fn at_once(threads: usize, work: impl Fn(usize) + Sync) {
    std::thread::scope(|scope| {
        for first in 0..threads {
            let work = &work;
            scope.spawn(move || (first..FILES).step_by(threads).for_each(work));
        }
    });
}

#[test]
#[ignore = "takes minutes and gigabytes, and the machine for itself"]
fn throughput() {
    let bench = Bench::new();
    let what: [(&str, &dyn Fn()); 12] = [
        ("SHA-256, one thread", &|| bench.hash(1)),
        ("SHA-256, two threads", &|| bench.hash(2)),
        ("writing and syncing, one file at once", &|| bench.write(1)),
        ("writing and syncing, four at once", &|| bench.write(4)),
        ("curl", &|| bench.curl(false)),
        ("curl and sync", &|| bench.curl(true)),
        ("curl to nowhere, one at once", &|| bench.nowhere(1)),
        ("curl to nowhere, four at once", &|| bench.nowhere(4)),
        ("curl to nowhere beside SHA-256, one at once", &|| bench.nowhere_and_hash(1)),
        ("curl to nowhere beside SHA-256, four at once", &|| bench.nowhere_and_hash(4)),
        ("waste-download --jobs 1", &|| bench.download("1")),
        ("waste-download --jobs 4", &|| bench.download("4")),
    ];
    println!("{FILES} files of {} MiB; MB/s, the median of {RUNS} runs (least to most)", BYTES >> 20);
    let mut rates = [const { Vec::new() }; 12];
    // In turns, so that all meet the same weather.
    for _ in 0..RUNS {
        for ((_, run), rates) in what.iter().zip(&mut rates) {
            bench.clean();
            let start = Instant::now();
            run();
            rates.push((FILES * BYTES) as f64 / start.elapsed().as_secs_f64() / 1e6);
        }
    }
    let medians = rates.map(|mut rates| {
        rates.sort_by(f64::total_cmp);
        [rates[RUNS / 2], rates[0], rates[RUNS - 1]]
    });
    for ((name, _), [median, least, most]) in what.iter().zip(&medians) {
        println!("{name}: {median:.0} ({least:.0} to {most:.0})");
    }
    let [sha, shas, disk, disks, curl, curl_sync, .., beside_one, beside_four, one, four] =
        medians.map(|[median, ..]| median);
    println!("one job: {:.0} % of the slower of curl and one thread of SHA-256", 100.0 * one / curl.min(sha));
    println!("one job, durable like it: {:.0} % of curl and sync", 100.0 * one / curl_sync.min(sha));
    let most = disk.max(disks).min(shas);
    println!("four jobs: {:.0} % of the slower of the disk and two threads of SHA-256", 100.0 * four / most);
    println!(
        "of curl to nowhere beside SHA-256: one job {:.0} %, four jobs {:.0} %",
        100.0 * one / beside_one,
        100.0 * four / beside_four
    );
}
