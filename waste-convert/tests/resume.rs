//! An interrupted conversion, continued, gives the bytes of an uninterrupted one.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod util;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use util::*;
use waste_common::cli::{Captured, CommonArgs, Exit, Interrupt, Tool, run_captured};
use waste_common::container::integrity::sha256_hex;
use waste_convert::{Effort, Options, Reclaim, Request, Work};

/// The quickest format.
const OPTIONS: [&str; 6] = ["--cb-sample", "2048", "--format", "vq4p", "--effort", "fast"];

fn spawn(checkpoint: &Path, container: &Path) -> Child {
    waste_tests::tool::process("waste-convert")
        .arg(checkpoint)
        .arg(container)
        .args(OPTIONS)
        .args(["--threads", "1", "--jobs", "1", "-q"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Waits until a file appears. False if the conversion ended first.
fn wait_for(file: &Path, child: &mut Child) -> bool {
    let end = Instant::now() + Duration::from_secs(600);
    while Instant::now() < end {
        if file.exists() {
            return true;
        }
        if child.try_wait().unwrap().is_some() {
            return file.exists();
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    panic!("{} did not appear", file.display());
}

#[test]
fn killed_at_any_point_it_goes_on_to_the_same_bytes() {
    if waste_tests::tool::emulated() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (whole, pieces) = (dir.path().join("whole"), dir.path().join("pieces"));
    convert(&tales(), &whole, &OPTIONS);
    let mut killed = 0;
    for file in [
        "convert.state.json",
        "trunk.bin.tmp",
        "trunk.bin",
        "codebooks-L1.bin",
        "experts-L1.bin.tmp",
        "experts-L2.bin",
        "codebooks-L4.bin",
        "experts-L5.bin",
        "specials.json",
        "codebooks.bin.tmp",
        "codebooks.bin",
        "manifest.sha256",
        "manifest.json.tmp",
    ] {
        let mut child = spawn(&tales(), &pieces);
        wait_for(&pieces.join(file), &mut child);
        child.kill().unwrap();
        killed += u32::from(!child.wait().unwrap().success());
    }
    assert!(killed >= 6, "killed {killed} times only");
    let report = convert(&tales(), &pieces, &OPTIONS);
    assert!(report["resumed_layers"].as_u64().unwrap() >= 5, "{report}");
    assert_same(&whole, &pieces);
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_with_130_and_leaves_a_resumable_state() {
    let dir = tempfile::tempdir().unwrap();
    let container = dir.path().join("c");
    let mut child = spawn(&tales(), &container);
    assert!(wait_for(&container.join("experts-L2.bin"), &mut child));
    let sent = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(!files(&container).keys().any(|name| name.ends_with(".tmp")));
    let report = convert(&tales(), &container, &OPTIONS);
    assert!(report["resumed_layers"].as_u64().unwrap() >= 1, "{report}");
}

const TOOL: Tool = Tool { name: "try", version: "1", schema: "try/1", examples: "", details: Vec::new };

#[derive(clap::Parser)]
struct NoArgs {
    #[command(flatten)]
    _common: CommonArgs,
}

fn request(container: PathBuf) -> Request {
    let options = Options { cb_sample: 1024, effort: Effort::Fast, ..Options::default() };
    Request {
        checkpoint: golden("tiny-linear"),
        container,
        options,
        work: Work::All,
        threads: 1,
        jobs: 1,
        follow: false,
        reclaim: Reclaim::Off,
        reserve: 0,
        program: None,
        force: false,
        importance: None,
    }
}

/// Converts in this process; `stop` ends it at the first safe point.
fn run(container: &Path, stop: bool) -> Captured {
    let interrupt = Interrupt::new();
    if stop {
        interrupt.request();
    }
    run_captured(TOOL, ["--json"], |_: NoArgs, output| {
        output.result(&waste_convert::convert::convert(
            &request(container.to_owned()),
            output,
            &interrupt,
        )?)?;
        Ok(Exit::Done)
    })
}

/// A directory as a kill between two layers leaves it: the first `layers` are finished.
fn begun(whole: &Path, layers: u16) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(run(dir.path(), true).exit, Exit::Interrupted);
    let manifest = whole.join("manifest.json");
    let manifest: serde_json::Value = serde_json::from_slice(&fs::read(manifest).unwrap()).unwrap();
    let books = fs::read(whole.join("codebooks.bin")).unwrap();
    let part = books.len() / 4;
    for layer in 1..=usize::from(layers) {
        let bank = format!("experts-L{layer}.bin");
        fs::copy(whole.join(&bank), dir.path().join(&bank)).unwrap();
        let name = format!("codebooks-L{layer}.bin");
        fs::write(dir.path().join(name), &books[(layer - 1) * part..][..part]).unwrap();
    }
    let state: serde_json::Value =
        serde_json::from_slice(&fs::read(dir.path().join("convert.state.json")).unwrap()).unwrap();
    let options_sha256 = sha256_hex(state["options"].to_string().as_bytes());
    for layer in 1..=layers {
        let errors = &manifest["conversion"]["layers"][layer.to_string()];
        let record = serde_json::json!({"version": 2, "options_sha256": options_sha256, "errors": errors});
        fs::write(dir.path().join(format!("convert-L{layer}.json")), record.to_string()).unwrap();
    }
    dir
}

#[test]
fn what_is_damaged_is_made_again_and_what_is_sound_is_kept() {
    let whole = tempfile::tempdir().unwrap();
    assert_eq!(run(whole.path(), false).exit, Exit::Done);
    type Damage = fn(&Path);
    let damages: [(u64, Damage); 12] = [
        (3, |_| ()),
        (2, |dir| fs::remove_file(dir.join("experts-L2.bin")).unwrap()),
        (2, |dir| fs::remove_file(dir.join("codebooks-L1.bin")).unwrap()),
        // A payload byte, a header, a codebook's header.
        (2, |dir| flip(&dir.join("experts-L3.bin"), 5000)),
        (2, |dir| flip(&dir.join("experts-L1.bin"), 4)),
        (2, |dir| flip(&dir.join("codebooks-L2.bin"), 0)),
        (2, |dir| fs::write(dir.join("experts-L2.bin"), b"short").unwrap()),
        (3, |dir| fs::write(dir.join("trunk-index.json"), b"[").unwrap()),
        (3, |dir| fs::write(dir.join("experts-L9.bin.tmp"), b"left over").unwrap()),
        (3, |dir| fs::write(dir.join("experts-L4.bin"), b"not vouched for").unwrap()),
        (2, |dir| fs::write(dir.join("convert-L1.json"), b"{").unwrap()),
        (2, |dir| fs::remove_file(dir.join("convert-L3.json")).unwrap()),
    ];
    for (number, (kept, damage)) in damages.into_iter().enumerate() {
        let dir = begun(whole.path(), 3);
        damage(dir.path());
        let captured = run(dir.path(), false);
        assert_eq!(captured.exit, Exit::Done, "{number}: {}", captured.stderr);
        let report: serde_json::Value = serde_json::from_str(&captured.stdout).unwrap();
        assert_eq!(report["resumed_layers"], kept, "{number}");
        assert_same(whole.path(), dir.path());
    }
    // A finished container loses a bank while its state still stands.
    let dir = begun(whole.path(), 3);
    fs::copy(whole.path().join("manifest.json"), dir.path().join("manifest.json")).unwrap();
    assert_eq!(run(dir.path(), false).exit, Exit::Done);
    assert_same(whole.path(), dir.path());
}

fn flip(file: &Path, at: usize) {
    let mut content = fs::read(file).unwrap();
    content[at] ^= 1;
    fs::write(file, content).unwrap();
}

#[test]
fn a_damaged_trunk_is_made_again() {
    if waste_tests::tool::emulated() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (whole, pieces) = (dir.path().join("whole"), dir.path().join("pieces"));
    convert(&tales(), &whole, &OPTIONS);
    let mut child = spawn(&tales(), &pieces);
    assert!(wait_for(&pieces.join("experts-L1.bin.tmp"), &mut child));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(pieces.join("trunk-index.json").exists());
    flip(&pieces.join("trunk.bin"), 1_000_000);
    convert(&tales(), &pieces, &OPTIONS);
    assert_same(&whole, &pieces);
}

#[test]
fn other_options_and_other_states_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(run(dir.path(), true).exit, Exit::Interrupted);
    let checkpoint = golden("tiny-linear");
    let error = refused(
        &checkpoint,
        dir.path(),
        &["--cb-sample", "1024", "--effort", "fast", "--format", "vq4p"],
        3,
        "other_options",
    );
    assert_eq!(
        (&error["option"], &error["begun"], &error["wanted"]),
        (&"format".into(), &"VQ3R".into(), &"VQ4P".into())
    );
    let error = refused(
        &golden("tiny-k3"),
        dir.path(),
        &["--cb-sample", "1024", "--effort", "fast"],
        3,
        "other_options",
    );
    assert_eq!(error["option"], "checkpoint_sha256");
    edit(&dir.path().join("convert.state.json"), |state| state["version"] = 1.into());
    refused(&checkpoint, dir.path(), &["--cb-sample", "1024", "--effort", "fast"], 3, "bad_state");
    fs::write(dir.path().join("convert.state.json"), b"{").unwrap();
    refused(&checkpoint, dir.path(), &["--cb-sample", "1024", "--effort", "fast"], 3, "bad_state");
    convert(&checkpoint, dir.path(), &["--cb-sample", "1024", "--effort", "fast", "--force"]);
}
