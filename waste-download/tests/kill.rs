//! Killed at any moment, again and again: the tree is right in the end, and what was on the disk is not fetched twice.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::Duration;

use support::Case;
use waste_tests::hub::{File, noise};

const JOBS: usize = 4;

/// Numbers that look random, the same in every run of the test.
struct Dice(Vec<u8>);

impl Dice {
    fn new(seed: u64) -> Dice {
        Dice(noise(4096, seed))
    }

    fn roll(&mut self, from: u64, to: u64) -> u64 {
        let bytes: [u8; 2] = [self.0.pop().unwrap(), self.0.pop().unwrap()];
        from + u64::from(u16::from_le_bytes(bytes)) % (to - from)
    }
}

/// How many bytes of each file are on the disk from its beginning on, and right, whatever any journal says.
fn on_disk(case: &Case) -> BTreeMap<String, u64> {
    let prefix = |file: &File| {
        let part = case.dest().join(".waste-parts").join(format!("{}.part", file.name));
        let content = std::fs::read(case.dest().join(&file.name)).or_else(|_| std::fs::read(part));
        let same = content.unwrap_or_default().iter().zip(&*file.content).take_while(|(a, b)| a == b).count();
        (file.name.clone(), same as u64)
    };
    case.files.iter().map(prefix).collect()
}

/// Bytes that were sent although they had been on the disk.
fn fetched_again(case: &Case, before: &BTreeMap<String, u64>) -> u64 {
    let requests = case.hub.requests();
    let contents = requests.iter().filter_map(|request| Some((request, before.get(request.file.as_ref()?)?)));
    contents
        .map(|(request, there)| (request.start + request.sent).min(*there).saturating_sub(request.start))
        .sum()
}

/// What the kills cost, in bytes.
struct Cost {
    /// Of all files.
    total: u64,
    sent: u64,
    /// Sent though they had been on the disk.
    again: u64,
    /// Fetched by the last run, which nobody killed.
    last: u64,
}

/// How many bytes of all files are there, right or wrong.
fn bytes_there(case: &Case) -> u64 {
    let bytes = |file: &File| {
        let part = case.dest().join(".waste-parts").join(format!("{}.part", file.name));
        let meta = std::fs::metadata(case.dest().join(&file.name)).or_else(|_| std::fs::metadata(part));
        meta.map_or(0, |meta| meta.len())
    };
    case.files.iter().map(bytes).sum()
}

/// Kills the download so many times, each time after as many bytes as the dice say.
fn killed(kills: u64, file_bytes: usize) -> Cost {
    let mut files: Vec<_> =
        (0..8).map(|at| File::large(&format!("model-{at}.safetensors"), noise(file_bytes, at))).collect();
    files.push(File::small("config.json", noise(20_000, 9)));
    let case = Case::new(files);
    let total: u64 = case.files.iter().map(|file| file.content.len() as u64).sum();
    case.hub.limit(Some(1 << 20));
    let jobs = JOBS.to_string();
    let mut dice = Dice::new(kills);
    let (mut sent, mut again) = (0, 0);
    for _ in 0..kills {
        let before = on_disk(&case);
        case.hub.forget();
        let mut command = case.command(&["--jobs", &jobs]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // Together less than there are.
        let enough = bytes_there(&case) + total * dice.roll(1, 1800) / 1000 / kills;
        while bytes_there(&case) < enough.min(total) && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        case.hub.settle();
        sent += case.sent();
        again += fetched_again(&case, &before);
    }
    let before = on_disk(&case);
    case.hub.forget();
    case.hub.limit(None);
    let result = case.done(&["--jobs", &jobs]);
    case.hub.settle();
    case.identical();
    // What the last run fetches is what was missing.
    let missing = total - before.values().sum::<u64>();
    let fetched = result["fetched_bytes"].as_u64().unwrap();
    assert!(fetched <= missing + missing / 100 + JOBS as u64 * (8 << 10), "{fetched} of {missing}");
    sent += case.sent();
    again += fetched_again(&case, &before);
    Cost { total, sent, again, last: fetched }
}

fn within_one_percent(kills: u64, file_bytes: usize) {
    let Cost { total, sent, again, last } = killed(kills, file_bytes);
    println!(
        "{kills} kills, {JOBS} files at once, {total} bytes in all, {last} left for the last run; {sent} sent, {again} \
         of them though they were on the disk: {:.3} %",
        100.0 * again as f64 / total as f64
    );
    assert!(last < total / 2, "hardly anything came before the kills: {last} of {total} were left");
    assert!(again * 100 <= total, "{again} bytes of {total} were fetched again");
}

#[test]
fn a_few_kills_cost_less_than_a_percent() {
    within_one_percent(6, 1 << 20);
}

/// `cargo test -p waste-download --test kill -- --ignored --nocapture`
#[test]
#[ignore = "takes half a minute"]
fn a_hundred_kills_cost_less_than_a_percent() {
    within_one_percent(100, 8 << 20);
}

#[cfg(unix)]
#[test]
fn a_signal_ends_it_at_the_next_piece_and_nothing_is_fetched_again() {
    for (signal, size) in [("-INT", 3_000_000), ("-TERM", 3_000_001)] {
        let case = Case::one(size);
        case.hub.limit(Some(1_500_000));
        let mut child = case.command(&["--json"]);
        let child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        while on_disk(&case)[support::SHARD] < 100_000 {
            std::thread::sleep(Duration::from_millis(20));
        }
        let status = std::process::Command::new("kill").args([signal, &child.id().to_string()]).status();
        assert!(status.unwrap().success());
        let ran = waste_tests::tool::Ran::from_output(child.wait_with_output().unwrap());
        ran.error(130, "interrupted");
        case.hub.settle();
        case.hub.forget();
        let before = on_disk(&case);
        assert!(before[support::SHARD] > 0 && before[support::SHARD] < size as u64);
        case.hub.limit(None);
        assert_eq!(case.done(&[])["fetched_bytes"], size as u64 - before[support::SHARD]);
        case.identical();
    }
}

/// Killed between the rename and the record: what is there is recognised, not fetched again.
#[test]
fn a_file_that_was_not_recorded_is_recognised() {
    let case = Case::usual();
    case.done(&[]);
    let path = case.dest().join(".waste-download.json");
    let state = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, state.replace("\"done\":true", "\"done\":false")).unwrap();
    let parts = case.dest().join(".waste-parts");
    std::fs::create_dir_all(&parts).unwrap();
    std::fs::write(parts.join(format!("{}.journal", support::SHARD)), "left over").unwrap();
    assert_eq!(case.done(&[])["fetched_bytes"], 0);
    case.identical();
    assert!(!std::fs::read_to_string(&path).unwrap().contains("false"));
    std::fs::remove_file(&path).unwrap();
    assert_eq!(case.done(&[])["fetched_bytes"], 0);
    case.identical();
}
