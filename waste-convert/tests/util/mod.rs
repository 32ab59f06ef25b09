//! What the tests share.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::Value;
use waste_common::checkpoint::Checkpoint;
use waste_common::config::ModelConfig;
use waste_common::importance::{self, InputSquares};

/// A file or directory of the project's `tests`.
pub fn shared(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests").join(name)
}

pub fn golden(name: &str) -> PathBuf {
    shared(&format!("golden/{name}/ckpt"))
}

pub fn tales() -> PathBuf {
    shared("models/k3-tales")
}

pub fn tool() -> Command {
    let mut command = waste_tests::tool::tool("waste-convert");
    command.env_remove("WASTE_THREADS");
    command
}

/// Converts with `--json` and gives the object.
pub fn convert(checkpoint: &Path, container: &Path, options: &[&str]) -> Value {
    let output = tool().arg(checkpoint).arg(container).args(options).arg("--json").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs a conversion that must fail with this exit and code; gives the error object.
pub fn refused(checkpoint: &Path, container: &Path, options: &[&str], exit: i32, code: &str) -> Value {
    let output = tool().arg(checkpoint).arg(container).args(options).arg("--json").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(exit), "{text} {}", String::from_utf8_lossy(&output.stderr));
    let object: Value = serde_json::from_str(&text).expect(&text);
    assert_eq!(object["error"]["code"], code, "{text}");
    object["error"].clone()
}

/// Every file of a directory.
pub fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entry = |entry: std::io::Result<fs::DirEntry>| {
        let entry = entry.unwrap();
        (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())
    };
    let mut files: BTreeMap<String, Vec<u8>> = fs::read_dir(dir).unwrap().map(entry).collect();
    // Stays where locked files cannot be removed.
    files.remove(".waste.lock");
    files
}

/// Compares two containers byte by byte without printing them.
pub fn assert_same(one: &Path, other: &Path) {
    let (one, other) = (files(one), files(other));
    assert!(one.contains_key("manifest.json"));
    assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>());
    for (name, content) in &one {
        assert!(content == &other[name], "{name} differs");
    }
}

/// A copy of a checkpoint that may be changed.
pub fn copy(checkpoint: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(checkpoint).unwrap() {
        let entry = entry.unwrap();
        // Not fs::copy: the copy must be writable.
        fs::write(dir.path().join(entry.file_name()), fs::read(entry.path()).unwrap()).unwrap();
    }
    dir
}

/// Overwrites bytes of a tensor.
pub fn poke(checkpoint: &Path, tensor: &str, at: u64, bytes: &[u8]) {
    let opened = Checkpoint::open(checkpoint).unwrap();
    let info = opened.info(tensor).unwrap();
    assert!(at + bytes.len() as u64 <= info.bytes);
    let shard = checkpoint.join(opened.shard_of(tensor).unwrap());
    let mut file = fs::OpenOptions::new().write(true).open(shard).unwrap();
    file.seek(SeekFrom::Start(info.offset + at)).unwrap();
    file.write_all(bytes).unwrap();
}

/// Changes a JSON file.
pub fn edit(file: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    change(&mut value);
    fs::write(file, value.to_string()).unwrap();
}

/// A file of importance for a checkpoint: one token for each expert, the first columns much larger.
pub fn importance(path: &Path, checkpoint: &Path, large: f32) {
    let checkpoint = Checkpoint::open(checkpoint).unwrap();
    let config = ModelConfig::from_checkpoint(checkpoint.config()).unwrap();
    let mut layers = BTreeMap::new();
    for layer in config.moe_layers() {
        let moe = config.moe_of(layer).unwrap();
        let mut squares = InputSquares::new(moe.experts, moe.input, moe.intermediate);
        let row = |width| (0..width).map(|c| if c < width / 4 { large } else { 1.0 }).collect::<Vec<f32>>();
        for expert in 0..moe.experts {
            squares.add(expert, &row(moe.input).repeat(100), &row(moe.intermediate).repeat(100));
        }
        layers.insert(layer as u16, squares);
    }
    importance::write(path, &layers).unwrap();
}
