//! Every command of the README and of the documents beside it works as it is printed, and every link leads somewhere.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;

/// The lines of the `sh` blocks. (Those of docs/embedding.md are waste-capi's tests.)
fn commands() -> Vec<String> {
    let read = |name: &str| std::fs::read_to_string(root().join(name)).unwrap();
    let text = ["README.md", "docs/tuning.md", "docs/measuring.md"].map(read).concat();
    let mut inside = false;
    let mut commands = Vec::new();
    for line in text.lines() {
        match line {
            "```sh" => inside = true,
            "```" => inside = false,
            command if inside => commands.push(command.to_owned()),
            _ => {}
        }
    }
    commands
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

#[test]
fn every_command_works() {
    if waste_tests::tool::emulated() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let model = root().join("tests/models/k3-tales").canonicalize().unwrap();
    // The one request the README makes is answered by a hub in this process, with the small model.
    let hub = waste_tests::hub::Hub::start("moonshotai/Kimi-K3");
    hub.commit(waste_tests::hub::k3_tales());
    // The whole evaluation text takes a while; its beginning shows as much.
    let text = std::fs::read_to_string(model.join("eval.txt")).unwrap();
    std::fs::write(dir.path().join("text.txt"), &text[..4000]).unwrap();
    let bin = waste_tests::tool::bin_dir();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut ran = 0;
    for command in commands() {
        // Run by the test script itself, or needing the source tree.
        if command.starts_with("./scripts/")
            || command.starts_with("cargo ")
            || command.starts_with("export ")
        {
            assert!(!command.contains("waste-run"));
            continue;
        }
        let output = Command::new("bash")
            .args(["-e", "-o", "pipefail", "-c", &command])
            .current_dir(dir.path())
            .env("PATH", &path)
            .env("HF_ENDPOINT", hub.url())
            .env("NO_PROXY", "127.0.0.1")
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command}\n{stderr}");
        let silent =
            command.starts_with("waste-convert") || command.starts_with("cp ") || command.contains("' > ");
        assert!(!output.stdout.is_empty() || silent, "{command}");
        ran += 1;
    }
    assert!(ran >= 12, "only {ran} commands were found");
}

#[test]
fn the_scripts_it_names_exist() {
    let scripts = commands().into_iter().filter(|command| command.starts_with("./scripts/"));
    let mut found = 0;
    for script in scripts {
        let file = script.split(' ').next().unwrap();
        assert!(root().join(file).is_file(), "{script}");
        found += 1;
    }
    assert_eq!(found, 3);
}

#[test]
fn every_link_leads_somewhere() {
    let mut files: Vec<_> =
        ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(|name| root().join(name)).into();
    files.extend(std::fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path()));
    let mut links = 0;
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        for link in text.split("](").skip(1).map(|rest| rest.split(')').next().unwrap()) {
            if !link.contains("://") {
                let place = file.parent().unwrap().join(link.split('#').next().unwrap());
                assert!(place.exists(), "{}: {link}", file.display());
                links += 1;
            }
        }
    }
    assert!(links >= 6, "{links}");
}
