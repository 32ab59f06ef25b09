//! The scripts that spread a conversion over processes and machines, and the one for real weights.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Output};

use waste_tests::files::data;
use waste_tests::tool::{arg, bin_dir, emulated, run};

fn script(name: &str, args: &[&str]) -> Output {
    let path = format!("{}:{}", bin_dir().display(), std::env::var("PATH").unwrap());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts").join(name);
    let output = Command::new(script).args(args).env("PATH", path).env("EFFORT", "fast").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

#[test]
fn layers_in_parallel_give_the_same_container() {
    if emulated() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (whole, pieces) = (dir.path().join("whole"), dir.path().join("pieces"));
    let checkpoint = data("golden/tiny-linear/ckpt");
    let options = ["--effort", "fast", "--cb-sample", "1024"];
    run("waste-convert", [arg(&checkpoint), arg(&whole)].into_iter().chain(options)).done();
    let args = [&[arg(&checkpoint), arg(&pieces), "--layers", "1-2", "--"], &options[..]].concat();
    script("convert-parallel.sh", &args);
    assert!(!pieces.join("manifest.json").exists());
    script("convert-parallel.sh", &[&[arg(&checkpoint), arg(&pieces), "--"], &options[..]].concat());
    for entry in std::fs::read_dir(&whole).unwrap() {
        let name = entry.unwrap().file_name();
        let same = std::fs::read(whole.join(&name)).unwrap() == std::fs::read(pieces.join(&name)).unwrap();
        assert!(same, "{}", name.display());
    }
}

#[test]
fn real_weights_are_reported_on() {
    if emulated() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let container = dir.path().join("c.waste");
    let checkpoint = data("models/k3-tales");
    run("waste-convert", [arg(&checkpoint), arg(&container), "--effort", "fast", "-q"]).done();
    let probe = dir.path().join("probe");
    let output = script("accept-real.sh", &[arg(&checkpoint), arg(&probe), arg(&container)]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    for key in ["dry_run", "probe_layer", "plan_source", "verify", "plan", "run", "perplexity"] {
        assert_eq!(report[key]["exit"], 0, "{key}: {report}");
    }
    let error = report["probe_layer"]["result"]["error"]["gate"].as_f64().unwrap();
    assert!((0.15..0.2).contains(&error), "{report}");
    assert_eq!(report["run"]["result"]["tokens"], 16);
}
