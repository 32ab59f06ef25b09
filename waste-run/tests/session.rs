//! Texts that go on over several runs, their ends and their deaths.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod util;

use std::io::Read;
use std::path::Path;
use std::process::{Child, Stdio};
use util::*;

use waste_common::files::FileLock;
use waste_tests::files::data;
use waste_tests::tool::{Ran, arg, emulated, process};

const PROMPT: &str = "Once upon a time there was a";
/// Sampled, so that the random numbers must go on too.
const SAMPLED: [&str; 5] = ["--temp", "0.9", "--seed", "11", "-q"];

fn session(file: &Path, args: &[&str]) -> Ran {
    with("", TALES, &[args, &["--session", arg(file)], &SAMPLED].concat())
}

/// What one run writes.
fn whole(tokens: &str) -> String {
    text(TALES, &[&[PROMPT, "-n", tokens], &SAMPLED[..]].concat())
}

#[test]
fn several_runs_write_what_one_writes() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("s");
    let line = |ran: Ran| ran.done().stdout.strip_suffix('\n').unwrap().to_owned();
    let mut found = line(session(&file, &[PROMPT, "-n", "7"]));
    found += &line(with("", TALES, &["--session", arg(&file), "-n", "9", "--temp", "0.9", "-q"]));
    found += &line(session(&file, &["-n", "14"]));
    assert_eq!(found, whole("30").trim_end_matches('\n'));
    // A new prompt comes after all that.
    let report = session(&file, &[" And the king", "-n", "2", "--json"]).done().json("waste-run/1");
    assert_eq!((&report["tokens"], &report["resumed_tokens"]), (&2.into(), &0.into()));
    // Elsewhere the lock cannot be removed safely.
    let left = std::fs::read_dir(home.path()).unwrap().count();
    assert!(left == 1 || cfg!(windows), "nothing but the session file stays");
}

/// Starts a run that saves after each token, and waits until it has written some text.
fn started(file: &Path, autosave: bool, more: &[&str]) -> (Child, String) {
    let mut command = process("waste-run");
    command.arg(data(TALES)).args([PROMPT, "-n", "60", "--session", arg(file)]).args(SAMPLED).args(more);
    if autosave {
        command.args(["--autosave", "0"]);
    }
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut start = vec![0; 20];
    child.stdout.as_mut().unwrap().read_exact(&mut start).unwrap();
    (child, String::from_utf8(start).unwrap())
}

#[test]
fn an_answer_goes_on_after_a_crash_with_the_same_text() {
    if emulated() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("s");
    let expected = whole("60");
    let (mut child, start) = started(&file, true, &[]);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(expected.starts_with(&start));
    let report = session(&file, &["--json"]).done().json("waste-run/1");
    assert_eq!(report["text"].as_str().unwrap(), expected.trim_end_matches('\n'));
    let resumed = report["resumed_tokens"].as_u64().unwrap();
    assert!(resumed > 0 && report["tokens"] == 60, "{report}");
    // What was finished is not begun again: the next run goes on after it.
    let next = session(&file, &["-n", "5"]).done().stdout;
    assert_eq!(expected.trim_end_matches('\n').to_owned() + &next, whole("65"));
}

#[test]
fn an_interrupted_answer_keeps_the_options_it_was_begun_with() {
    if emulated() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let (file, grammar) = (home.path().join("s"), home.path().join("grammar"));
    std::fs::write(&grammar, "start: /[a-z ]*/").unwrap();
    let manner = ["--grammar", arg(&grammar), "--top-k", "30", "--frequency-penalty", "0.3"];
    let expected = text(TALES, &[&[PROMPT, "-n", "60"], &SAMPLED[..], &manner].concat());
    let (mut child, _) = started(&file, true, &manner);
    child.kill().unwrap();
    child.wait().unwrap();
    std::fs::remove_file(&grammar).unwrap();
    let kept = std::fs::read(&file).unwrap();
    let resumed = |more: &[&str]| {
        std::fs::write(&file, &kept).unwrap();
        text(TALES, &[&["--session", arg(&file), "-q"], more].concat())
    };
    assert_eq!(resumed(&[]), expected);
    // What is given counts.
    assert_ne!(resumed(&["--top-k", "1"]), expected);
    // Another answer is written as its own options say.
    resumed(&[]);
    let done = std::fs::read(&file).unwrap();
    let next = |more: &[&str]| {
        std::fs::write(&file, &done).unwrap();
        text(TALES, &[&[" Then", "-n", "8", "--session", arg(&file), "-q"], more].concat())
    };
    assert_eq!(next(&[]), next(&["--temp", "0"]));
}

#[cfg(unix)]
#[test]
fn a_signal_saves_the_session() {
    use rustix::process::{Pid, Signal, kill_process};
    if emulated() {
        return;
    }
    let expected = whole("60");
    for signal in [Signal::TERM, Signal::INT] {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("s");
        let (child, _) = started(&file, false, &[]);
        kill_process(Pid::from_child(&child), signal).unwrap();
        let ran = Ran::from_output(child.wait_with_output().unwrap());
        // The rest may have been written before the signal came; either way nothing is lost.
        assert!(matches!(ran.exit, Some(0 | 130)), "{ran:?}");
        if ran.exit == Some(130) {
            assert_eq!(session(&file, &[]).done().stdout, expected);
        }
    }
}

#[test]
fn what_cannot_go_on_says_so_and_keeps_the_file() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("s");
    session(&file, &[PROMPT, "-n", "4"]).done();
    let before = std::fs::read(&file).unwrap();
    let error = |args: &[&str], exit, code| session(&file, &[args, &["--json"]].concat()).error(exit, code);
    error(&["--kv", "f32"], 3, "session_of_other_options");
    error(&["--arith", "exact"], 3, "session_of_other_options");
    error(&["--prefill-chunk", "8"], 3, "session_of_other_options");
    error(&["-n", "0"], 2, "usage");
    let other = with("", CONTAINER, &["--session", arg(&file), "--json"]);
    other.error(3, "session_of_another_model");
    let seed = with("", TALES, &["--session", arg(&file), "--seed", "12", "--json"]).error(2, "usage");
    assert!(seed["message"].as_str().unwrap().contains("seed 11"), "{seed}");
    with("", TALES, &["x", "--autosave", "1"]).exits(2);
    let other_run = FileLock::acquire(&file).unwrap();
    error(&[], 6, "locked");
    drop(other_run);
    assert_eq!(std::fs::read(&file).unwrap(), before);
    let mut damaged = before.clone();
    damaged[100] ^= 4;
    std::fs::write(&file, &damaged).unwrap();
    error(&[], 3, "session_damaged");
    std::fs::write(&file, b"my only copy").unwrap();
    error(&[], 3, "not_a_session_file");
    assert_eq!(std::fs::read(&file).unwrap(), b"my only copy");
}
