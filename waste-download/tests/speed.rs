//! How fast it is, against curl and against one thread of SHA-256:
//! `cargo test --release -p waste-download --test speed -- --ignored --nocapture`
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use sha2::{Digest, Sha256};
use support::Case;
use waste_tests::hub::{File, noise};

const FILES: usize = 4;
const BYTES: usize = 512 << 20;
const RUNS: usize = 3;

/// MB a second; the best of some runs.
fn best(mut run: impl FnMut() -> u64) -> f64 {
    let once = |run: &mut dyn FnMut() -> u64| {
        Command::new("sync").status().unwrap();
        let start = Instant::now();
        let bytes = run();
        bytes as f64 / start.elapsed().as_secs_f64() / 1e6
    };
    (0..RUNS).map(|_| once(&mut run)).fold(0.0, f64::max)
}

fn sha256(bytes: &[u8]) {
    std::hint::black_box(
        bytes.chunks(1 << 20).fold(Sha256::new(), |sha, piece| sha.chain_update(piece)).finalize(),
    );
}

#[test]
#[ignore = "takes minutes and gigabytes, and the machine for itself"]
fn throughput() {
    let files = (0..FILES).map(|at| File::large(&format!("model-{at}.safetensors"), noise(BYTES, at as u64)));
    let case = Case::new(files.collect());
    let base = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let dir = tempfile::tempdir_in(base).unwrap();
    let one = &case.files[0].content;
    println!("{FILES} files of {} MiB; MB/s, the best of {RUNS} runs", BYTES >> 20);

    let hashed = best(|| {
        sha256(one);
        BYTES as u64
    });
    println!("SHA-256, one thread: {hashed:.0}");
    let two = best(|| {
        std::thread::scope(|scope| {
            (0..2).for_each(|at| drop(scope.spawn(move || sha256(&case_content(at)))))
        });
        2 * BYTES as u64
    });
    println!("SHA-256, two threads (with making their bytes): {two:.0}");
    let disk = best(|| {
        let file = dir.path().join("written");
        let output = std::fs::File::create(&file).unwrap();
        one.chunks(1 << 20).for_each(|piece| std::io::Write::write_all(&mut &output, piece).unwrap());
        output.sync_all().unwrap();
        BYTES as u64
    });
    println!("writing and syncing one file: {disk:.0}");
    let file = dir.path().join("fetched");
    for sync in [false, true] {
        let curl = best(|| {
            let url = case.hub.cdn_url(&case.files[0].name);
            let status = Command::new("curl").args(["-sS", "-o"]).arg(&file).arg(url).status();
            assert!(status.unwrap().success());
            if sync {
                std::fs::File::open(&file).unwrap().sync_all().unwrap();
            }
            BYTES as u64
        });
        println!("curl{}: {curl:.0}", if sync { " and sync" } else { "" });
        std::fs::remove_file(&file).unwrap();
    }
    for jobs in ["1", "4"] {
        let dest = dir.path().join("dest");
        let downloaded = best(|| {
            let _ = std::fs::remove_dir_all(&dest);
            let mut command = case.command(&["--jobs", jobs]);
            command.args(["--quiet"]).stdout(Stdio::null());
            let args: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
            let args = args
                .iter()
                .filter(|arg| *arg != "-v")
                .map(|arg| if *arg == *case.dest() { dest.as_os_str() } else { arg.as_os_str() });
            let status = Command::new(command.get_program()).args(args).stdout(Stdio::null()).status();
            assert!(status.unwrap().success());
            (FILES * BYTES) as u64
        });
        println!("waste-download --jobs {jobs}: {downloaded:.0}");
    }
}

fn case_content(at: usize) -> Vec<u8> {
    noise(BYTES, at as u64)
}
