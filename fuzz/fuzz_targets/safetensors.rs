//! A safetensors file: its header, and the tensors it claims to have.
#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use waste_common::checkpoint::Checkpoint;

static DIR: LazyLock<PathBuf> = LazyLock::new(|| {
    let dir = std::env::temp_dir().join(format!("waste-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a temporary directory");
    std::fs::write(dir.join("config.json"), "{}").expect("a configuration");
    dir
});

fuzz_target!(|data: &[u8]| {
    // The length of the header is given in half of the inputs: it is seldom guessed.
    let header = (data.len() as u64).to_le_bytes();
    let with_length = [&header[..], data].concat();
    for content in [data, with_length.as_slice()] {
        std::fs::write(DIR.join("model.safetensors"), content).expect("a temporary file");
        let Ok(checkpoint) = Checkpoint::open(&DIR) else { continue };
        let names: Vec<String> = checkpoint.names().map(str::to_owned).collect();
        for name in names {
            let info = checkpoint.info(&name).expect("a tensor that was named");
            let bytes = checkpoint.read_bytes(&name).expect("a tensor lies within its file");
            assert_eq!(bytes.len() as u64, info.bytes);
            let _ = checkpoint.read_f32(&name);
        }
    }
});
