//! Two engines on one machine do not each take all of it: what one has reserved is no RAM for the other.
//! (The directory of reservations is found by XDG_RUNTIME_DIR.)
#![cfg(unix)]
#![allow(clippy::unwrap_used)] // helpers of tests are tests too

use std::io::Read;
use std::path::Path;
use std::process::{Child, Stdio};

use serde_json::Value;
use waste_common::machine::{Machine, Reservation};
use waste_tests::files::data;
use waste_tests::tool::{Ran, arg, process, tool};

const CONTAINER: &str = "interop/tiny-k3.waste";

fn run(runtime: &Path, args: &[&str]) -> Ran {
    let model = data(CONTAINER);
    let mut command = tool("waste-run");
    Ran::of(
        command.env("XDG_RUNTIME_DIR", runtime).args([arg(&model), "hello", "-n", "2", "--json"]).args(args),
    )
}

fn plan(runtime: &Path) -> Value {
    let model = data(CONTAINER);
    let mut command = tool("waste-plan");
    Ran::of(command.env("XDG_RUNTIME_DIR", runtime).args([arg(&model), "--json"])).done().json("waste-plan/1")
}

/// A run that has reserved its budget and goes on.
struct Running(Child);

impl Running {
    fn start(runtime: &Path, budget: &str) -> Running {
        let model = data("models/k3-tales");
        let mut command = process("waste-run");
        command.args([
            arg(&model),
            "Once upon a time",
            "-n",
            "100000",
            "--ctx",
            "200000",
            "--budget",
            budget,
        ]);
        command.env("XDG_RUNTIME_DIR", runtime).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut first = [0; 1];
        let mut stdout = child.stdout.take().unwrap();
        stdout.read_exact(&mut first).unwrap();
        child.stdout = Some(stdout);
        Running(child)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_reservation_leaves_less() {
    let runtime = tempfile::tempdir().unwrap();
    let alone = plan(runtime.path());
    assert_eq!(alone["reserved_bytes"], 0);
    let taken = 512 << 20;
    let reservation = Reservation::take_in(&runtime.path().join("waste"), taken, "another engine").unwrap();
    let beside = plan(runtime.path());
    assert_eq!(beside["reserved_bytes"].as_u64(), Some(taken));
    let usable = |plan: &Value| plan["usable_ram_bytes"].as_u64().unwrap();
    assert_eq!(usable(&beside), usable(&alone) - taken);
    let ran = run(runtime.path(), &["-v"]).done();
    assert!(ran.stderr.contains("reserved") && ran.stderr.contains("512.00 MiB"), "{}", ran.stderr);
    drop(reservation);
    assert!(!run(runtime.path(), &["-v"]).done().stderr.contains("reserved"));
    assert_eq!(plan(runtime.path())["reserved_bytes"], 0);
}

#[test]
fn what_others_have_taken_is_not_taken_again() {
    let runtime = tempfile::tempdir().unwrap();
    // Whatever engines run here besides have reserved in another directory.
    let machine = Machine::probe().unwrap();
    let usable = machine.usable_ram_bytes + machine.reserved_bytes;
    let reservation = Reservation::take_in(&runtime.path().join("waste"), usable, "another engine").unwrap();
    for args in [&[][..], &["--budget", "max"], &["--budget", "64MiB"]] {
        let error = run(runtime.path(), args).error(4, "not_enough_ram");
        assert_eq!(error["reserved_bytes"].as_u64(), Some(usable), "{error}");
    }
    run(runtime.path(), &["--allow-swap"]).done();
    drop(reservation);
    run(runtime.path(), &[]).done();
}

#[test]
fn two_processes_see_each_other() {
    let runtime = tempfile::tempdir().unwrap();
    let reserved = || plan(runtime.path())["reserved_bytes"].as_u64().unwrap();
    // Of a budget, what the run can really take is reserved.
    let first = Running::start(runtime.path(), "700MiB");
    let one = reserved();
    assert!(one > 1 << 20 && one < 700 << 20, "{one}");
    let second = Running::start(runtime.path(), "800MiB");
    let both = reserved();
    assert!(both > one, "{both} {one}");
    let ran = run(runtime.path(), &["-v"]).done();
    assert!(ran.stderr.contains("reserved"), "{}", ran.stderr);
    // One that is killed leaves nothing behind.
    drop(first);
    assert_eq!(reserved(), both - one);
    drop(second);
    assert_eq!(reserved(), 0);
}

#[test]
fn a_finished_run_leaves_no_reservation() {
    let runtime = tempfile::tempdir().unwrap();
    run(runtime.path(), &[]).done();
    run(runtime.path(), &["--ctx", "1"]).exits(3);
    let files = std::fs::read_dir(runtime.path().join("waste")).unwrap();
    let left: Vec<_> = files.map(|file| file.unwrap().file_name()).filter(|name| name != "lock").collect();
    assert!(left.is_empty(), "{left:?}");
}
