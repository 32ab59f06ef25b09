//! A hub and a directory, and the tool between them.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use waste_tests::hub::{File, Hub, noise};
use waste_tests::tool::{self, Ran};

pub const REPO: &str = "owner/model";
pub const SHARD: &str = "model-1.safetensors";

pub struct Case {
    pub hub: Hub,
    pub dir: tempfile::TempDir,
    pub files: Vec<File>,
}

impl Case {
    /// A hub with these files.
    pub fn new(files: Vec<File>) -> Case {
        let hub = Hub::start(REPO);
        hub.commit(files.clone());
        Case { hub, dir: tempfile::tempdir().unwrap(), files }
    }

    /// One small file, one large one, one in a directory.
    pub fn usual() -> Case {
        Case::new(vec![
            File::small("config.json", "{\"a\": 1}\n"),
            File::large(SHARD, noise(300_000, 1)),
            File::large("sub/dir/extra weights.bin", noise(100_000, 2)),
        ])
    }

    /// Only one large file.
    pub fn one(bytes: usize) -> Case {
        Case::new(vec![File::large(SHARD, noise(bytes, 3))])
    }

    pub fn dest(&self) -> PathBuf {
        self.dir.path().join("dest")
    }

    /// The tool with what every test wants, before it is started.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = tool::process("waste-download");
        let dest = self.dest();
        command.args([REPO, "-v", "--dest", dest.to_str().unwrap()]).args(args);
        for (key, value) in [("--endpoint", &*self.hub.url()), ("--retry-wait", "0.01"), ("--reserve", "0")] {
            if !args.contains(&key) {
                command.args([key, value]);
            }
        }
        command
    }

    pub fn run(&self, args: &[&str]) -> Ran {
        Ran::from_output(self.command(args).output().unwrap())
    }

    /// Runs with `--json`; the result.
    #[track_caller]
    pub fn done(&self, args: &[&str]) -> Value {
        self.run(&[args, &["--json"]].concat()).done().json("waste-download/1")
    }

    /// All of the files are there, nothing else but the state is.
    #[track_caller]
    pub fn identical(&self) {
        let mut tree = tree(&self.dest());
        tree.remove(".waste-download.json").unwrap();
        tree.retain(|name, _| !name.starts_with(".waste.lock"));
        let expected: BTreeMap<_, _> =
            self.files.iter().map(|file| (file.name.clone(), file.content.to_vec())).collect();
        assert_eq!(tree.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
        for (name, content) in &expected {
            assert!(tree[name] == *content, "{name} differs");
        }
    }

    /// The state of the download, as it is written down.
    pub fn state(&self) -> Value {
        let text = std::fs::read_to_string(self.dest().join(".waste-download.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    /// Bytes of files that were sent.
    pub fn sent(&self) -> u64 {
        self.hub.requests().iter().map(|request| request.sent).sum()
    }
}

/// All files below a directory, with `/` between the parts of their names.
pub fn tree(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    fn walk(dir: &Path, prefix: &str, found: &mut BTreeMap<String, Vec<u8>>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let entry = entry.unwrap();
            let name = format!("{prefix}{}", entry.file_name().to_str().unwrap());
            if entry.file_type().unwrap().is_dir() {
                walk(&entry.path(), &format!("{name}/"), found);
            } else {
                found.insert(name, std::fs::read(entry.path()).unwrap());
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(dir, "", &mut found);
    found
}
