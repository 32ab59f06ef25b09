//! What `scripts/install.sh` puts where, and takes away again.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use waste_tests::tool::{bin_dir, emulated};

fn install(prefix: &Path, args: &[&str]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/install.sh");
    let done = Command::new("bash").arg(script).arg("--prefix").arg(prefix).args(args).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

fn files(dir: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(next) = dirs.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => dirs.push(path),
                false => {
                    assert!(std::fs::metadata(&path).unwrap().len() > 100, "{}", path.display());
                    found.insert(path.strip_prefix(dir).unwrap().display().to_string());
                }
            }
        }
    }
    found
}

#[test]
fn tools_pages_and_completions_come_and_go() {
    if emulated() {
        return;
    }
    let prefix = tempfile::tempdir().unwrap();
    let bins = bin_dir();
    let from = ["--from", bins.to_str().unwrap()];
    install(prefix.path(), &from);
    let found = files(prefix.path());
    for tool in ["download", "convert", "verify", "plan", "run", "bench", "serve"] {
        for file in [
            format!("bin/waste-{tool}"),
            format!("share/man/man1/waste-{tool}.1"),
            format!("share/bash-completion/completions/waste-{tool}"),
            format!("share/zsh/site-functions/_waste-{tool}"),
            format!("share/fish/vendor_completions.d/waste-{tool}.fish"),
        ] {
            assert!(found.contains(&file), "{file}: {found:?}");
        }
    }
    for sub in ["run-chat", "run-batch", "run-perplexity", "bench-kernels"] {
        assert!(found.contains(&format!("share/man/man1/waste-{sub}.1")), "{sub}: {found:?}");
    }
    install(prefix.path(), &from);
    assert_eq!(files(prefix.path()), found);
    install(prefix.path(), &["--remove"]);
    assert_eq!(files(prefix.path()), BTreeSet::new());
}
