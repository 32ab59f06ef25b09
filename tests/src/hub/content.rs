//! Files of a repository: made up, or those of the small model.

use std::fmt::Write as _;
use std::sync::{Arc, OnceLock};

use sha1::Sha1;
use sha2::{Digest, Sha256};

/// A file of the repository.
#[derive(Clone, Debug)]
pub struct File {
    /// Its name.
    pub name: String,
    /// Its content.
    pub content: Arc<Vec<u8>>,
    /// A large file, with a SHA-256 and on another host.
    pub lfs: bool,
    sums: Arc<OnceLock<Sums>>,
}

/// The names of a content.
#[derive(Debug)]
struct Sums {
    /// git's.
    blob: String,
    sha256: String,
}

impl File {
    /// A small file.
    pub fn small(name: &str, content: impl Into<Vec<u8>>) -> File {
        File { name: name.to_owned(), content: Arc::new(content.into()), lfs: false, sums: Arc::default() }
    }

    /// A large one.
    pub fn large(name: &str, content: impl Into<Vec<u8>>) -> File {
        File { lfs: true, ..File::small(name, content) }
    }

    /// Computed once: a listing is asked for often.
    fn sums(&self) -> &Sums {
        self.sums.get_or_init(|| {
            let mut blob = Sha1::new_with_prefix(format!("blob {}\0", self.content.len()));
            blob.update(&*self.content);
            Sums { blob: hex(&blob.finalize()), sha256: hex(&Sha256::digest(&*self.content)) }
        })
    }

    pub(super) fn blob(&self) -> &str {
        &self.sums().blob
    }

    pub(super) fn sha256(&self) -> &str {
        &self.sums().sha256
    }
}

/// The files of the small model that comes with the project.
///
/// # Panics
/// They cannot be read. (Tests only.)
pub fn k3_tales() -> Vec<File> {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("models/k3-tales");
    let entries = std::fs::read_dir(dir).unwrap_or_else(|error| panic!("{error}"));
    let read = |entry: std::fs::DirEntry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        let content = std::fs::read(entry.path()).unwrap_or_else(|error| panic!("{name}: {error}"));
        if name.ends_with(".safetensors") { File::large(&name, content) } else { File::small(&name, content) }
    };
    entries.flatten().map(read).collect()
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Bytes that look like nothing in particular, the same for the same seed.
pub fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut noise = Vec::with_capacity(bytes + 8);
    while noise.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        noise.extend(state.to_le_bytes());
    }
    noise.truncate(bytes);
    noise
}
