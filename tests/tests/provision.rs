//! A machine is provisioned by the script that shows how, from a hub in this process.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;

use waste_tests::hub::{Fault, Hub};
use waste_tests::tool::{Ran, bin_dir, emulated, run};

const REPO: &str = "owner/k3-tales";

fn provision(hub: &Hub, dir: &Path, args: &[&str]) -> Ran {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/provision.sh");
    let path = format!("{}:{}", bin_dir().display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("bash");
    command.arg(script).args([REPO, "models/k3.waste"]).args(args).current_dir(dir);
    command.env("PATH", path).env("HF_ENDPOINT", hub.url());
    for key in ["HF_TOKEN", "HF_TOKEN_PATH", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"] {
        command.env_remove(key);
    }
    Ran::from_output(command.output().unwrap())
}

fn large(hub: &Hub) -> usize {
    hub.requests().iter().filter(|request| request.cdn).count()
}

#[test]
fn a_machine_is_provisioned() {
    if emulated() {
        return;
    }
    let hub = Hub::start(REPO);
    hub.commit(waste_tests::hub::k3_tales());
    let dir = tempfile::tempdir().unwrap();
    let installed = dir.path().join("models/k3.waste");

    // What does not fit is not even downloaded.
    provision(&hub, dir.path(), &["--ram", "1MiB"]).exits(4);
    // Nor what would page.
    let config = waste_tests::files::data("models/k3-tales/config.json");
    let plan = run("waste-plan", [config.to_str().unwrap(), "--ram", "1GiB", "--json"]).done();
    let floor = plan.json("waste-plan/1")["floor_bytes"].as_u64().unwrap();
    let ran = provision(&hub, dir.path(), &["--ram", &(floor + floor / 20).to_string()]).exits(1);
    assert!(ran.stderr.contains("it does not fit"), "{}", ran.stderr);
    assert_eq!(large(&hub), 0);
    provision(&hub, dir.path(), &[]).exits(2);

    // A network that goes away in between: nothing is installed, and the next run goes on.
    hub.always("model-00003-of-000004.safetensors", Fault::Status(403, vec![]));
    provision(&hub, dir.path(), &["--ram", "1GiB"]).exits(5);
    assert!(!installed.exists());
    hub.heal();
    hub.forget();
    let ran = provision(&hub, dir.path(), &["--ram", "1GiB", "--", "--jobs", "2"]).done();
    assert_eq!(ran.json("waste-verify/1")["ok"], true);
    assert!(large(&hub) <= 4);
    run("waste-verify", [installed.to_str().unwrap()]).done();
    let plan = dir.path().join("models/k3.waste.plan.json");
    run("waste-run", [installed.to_str().unwrap(), "Once", "-n", "1", "--plan", plan.to_str().unwrap()])
        .done();
    let sums =
        Command::new("sha256sum").args(["-c", "--quiet", "SHA256SUMS"]).current_dir(&installed).status();
    assert!(sums.unwrap().success());

    // Then there is nothing left to do.
    hub.forget();
    let ran = provision(&hub, dir.path(), &["--ram", "1GiB"]).done();
    assert_eq!(ran.json("waste-verify/1")["mode"], "quick");
    assert!(hub.requests().is_empty());
}
