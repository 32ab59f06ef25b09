//! `usage.waste`: how often a model's tokens used each expert, learned over runs that were told to.
//!
//! Header: u32 magic `WUSG`, u32 version 2, u64 tokens in 256ths, the SHA-256 of the container's manifest; then for each
//! expert that was ever used u16 layer, u16 expert, u32 uses in 256ths, two u32 that are 0; then the CRC-32 of all
//! before. Little endian. (Version 1 lacks both sums, so nobody can tell whose it is.) It is a hint that costs or saves
//! time: entries that name what the container does not have are skipped.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use waste_common::error::{Coded, Exit};
use waste_common::files::{FileError, write_atomic};
use waste_common::json::{JsonError, read_bounded};

/// The file's usual name, in the container.
pub const USAGE: &str = "usage.waste";

const MAGIC: [u8; 4] = *b"WUSG";
const VERSION: u32 = 2;
const HEADER: usize = 48;
const ENTRY: usize = 16;
/// Largest file that is read: two million experts, twenty times those of Kimi K3.
const BYTES_MAX: u64 = 32 << 20;
/// What a token, and a use, count in the file.
const UNIT: f64 = 256.0;
/// Tokens after which what was learned before counts half.
const HALF_LIFE: f64 = 8192.0;

/// What was learned of a container.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usage {
    /// In 256ths.
    tokens: u64,
    /// Uses in 256ths, by layer and expert.
    uses: BTreeMap<(u16, u16), u32>,
}

/// Why a usage file cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum UsageError {
    #[error(transparent)]
    Read(#[from] JsonError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{} is no usage file: it does not begin with `WUSG`", path.display())]
    NotUsage { path: PathBuf },
    #[error("{} is a usage file of version {found}; this program knows version {VERSION}", path.display())]
    Version { path: PathBuf, found: u32 },
    #[error("{} is damaged: its length or checksum is wrong", path.display())]
    Damaged { path: PathBuf },
    #[error(
        "{} was learned from another container (manifest {found}, this one's is {expected})",
        path.display()
    )]
    Foreign { path: PathBuf, found: String, expected: String },
}

impl UsageError {
    /// Whether the file is a usage file, though not one to be used: what learns may replace it.
    pub fn is_usage(&self) -> bool {
        matches!(self, UsageError::Version { .. } | UsageError::Damaged { .. } | UsageError::Foreign { .. })
    }
}

impl Coded for UsageError {
    fn exit(&self) -> Exit {
        match self {
            UsageError::Read(error) => error.exit(),
            UsageError::File(error) => error.exit(),
            _ => Exit::Data,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            UsageError::Read(error) => error.code(),
            UsageError::File(error) => error.code(),
            UsageError::NotUsage { .. } => "not_a_usage_file",
            UsageError::Version { .. } => "usage_version",
            UsageError::Damaged { .. } => "usage_damaged",
            UsageError::Foreign { .. } => "usage_of_another_container",
        }
    }

    fn fields(&self) -> Map<String, Value> {
        match self {
            UsageError::Read(error) => error.fields(),
            UsageError::File(error) => error.fields(),
            UsageError::NotUsage { path }
            | UsageError::Version { path, .. }
            | UsageError::Damaged { path }
            | UsageError::Foreign { path, .. } => {
                Map::from_iter([("file".to_owned(), path.display().to_string().into())])
            }
        }
    }
}

impl Usage {
    /// Reads what was learned of the container whose manifest has this SHA-256 (lower-case hex); `None` if there is no
    /// such file.
    ///
    /// # Errors
    /// It cannot be read, is damaged, or is another container's.
    pub fn load(path: &Path, manifest_sha256: &str) -> Result<Option<Usage>, UsageError> {
        if !path.try_exists().map_err(FileError::io("look for", path))? {
            return Ok(None);
        }
        Self::parse(path, &read_bounded(path, BYTES_MAX)?, manifest_sha256).map(Some)
    }

    fn parse(path: &Path, content: &[u8], expected: &str) -> Result<Usage, UsageError> {
        let path = || path.to_owned();
        let u16_at = |bytes: &[u8], at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at =
            |bytes: &[u8], at: usize| u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16;
        if !content.starts_with(&MAGIC) {
            return Err(UsageError::NotUsage { path: path() });
        }
        if content.len() < 8 {
            return Err(UsageError::Damaged { path: path() });
        }
        let found = u32_at(content, 4);
        if found != VERSION {
            return Err(UsageError::Version { path: path(), found });
        }
        if content.len() < HEADER + 4 || !(content.len() - HEADER - 4).is_multiple_of(ENTRY) {
            return Err(UsageError::Damaged { path: path() });
        }
        let (body, crc) = content.split_at(content.len() - 4);
        if crc32fast::hash(body) != u32_at(crc, 0) {
            return Err(UsageError::Damaged { path: path() });
        }
        let found: String = body[16..HEADER].iter().map(|byte| format!("{byte:02x}")).collect();
        if found != expected {
            return Err(UsageError::Foreign { path: path(), found, expected: expected.to_owned() });
        }
        let entries = body[HEADER..].chunks_exact(ENTRY);
        Ok(Usage {
            tokens: u64::from(u32_at(body, 8)) | u64::from(u32_at(body, 12)) << 32,
            uses: entries.map(|entry| ((u16_at(entry, 0), u16_at(entry, 2)), u32_at(entry, 4))).collect(),
        })
    }

    /// Writes it, atomically.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, path: &Path, manifest_sha256: &str) -> Result<(), UsageError> {
        let mut content = MAGIC.to_vec();
        content.extend(VERSION.to_le_bytes());
        content.extend(self.tokens.to_le_bytes());
        let nibble = |digit: u8| (digit as char).to_digit(16).unwrap_or(0) as u8;
        let digits = manifest_sha256.as_bytes().chunks(2);
        content.extend(digits.map(|pair| pair.iter().fold(0, |byte, &digit| byte << 4 | nibble(digit))));
        content.resize(HEADER, 0);
        for (&(layer, expert), uses) in &self.uses {
            content.extend(layer.to_le_bytes());
            content.extend(expert.to_le_bytes());
            content.extend(uses.to_le_bytes());
            content.extend([0; 8]);
        }
        let crc = crc32fast::hash(&content);
        content.extend(crc.to_le_bytes());
        Ok(write_atomic(path, &content)?)
    }

    /// Adds a run of so many tokens; what was learned before fades.
    pub fn learn(&mut self, tokens: u64, uses: impl IntoIterator<Item = ((u16, u16), u32)>) {
        let left = (-(tokens as f64) / HALF_LIFE).exp2();
        // Floats become whole numbers without overflow, and are rounded down so that short runs let things fade too.
        self.tokens = (self.tokens as f64 * left + tokens as f64 * UNIT) as u64;
        for old in self.uses.values_mut() {
            *old = (f64::from(*old) * left) as u32;
        }
        for (id, count) in uses {
            let uses = self.uses.entry(id).or_default();
            *uses = (f64::from(*uses) + f64::from(count) * UNIT) as u32;
        }
        self.uses.retain(|_, uses| *uses > 0);
    }

    /// Shares of the tokens that used each expert, by layer and expert.
    pub fn shares(&self) -> impl Iterator<Item = ((u16, u16), f32)> + '_ {
        let tokens = self.tokens.max(1) as f32;
        self.uses.iter().map(move |(&id, &uses)| (id, (uses as f32 / tokens).min(1.0)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MANIFEST: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    fn learned() -> Usage {
        let mut usage = Usage::default();
        usage.learn(100, [((1, 7), 50), ((3, 900), 1)]);
        usage
    }

    #[test]
    fn what_is_learned_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(USAGE);
        assert_eq!(Usage::load(&path, MANIFEST).unwrap(), None);
        learned().save(&path, MANIFEST).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len() as usize, HEADER + 2 * ENTRY + 4);
        let found = Usage::load(&path, MANIFEST).unwrap().unwrap();
        assert_eq!(found, learned());
        assert_eq!(found.shares().collect::<Vec<_>>(), [((1, 7), 0.5), ((3, 900), 0.01)]);
    }

    #[test]
    fn what_was_learned_fades() {
        let mut usage = learned();
        usage.learn(8192, [((2, 2), 8192)]);
        let shares: BTreeMap<_, _> = usage.shares().collect();
        assert!(shares[&(1, 7)] < 0.004 && shares[&(2, 2)] > 0.99, "{shares:?}");
        // Short runs let it fade too, and what has faded is forgotten.
        for _ in 0..6000 {
            usage.learn(30, []);
        }
        assert_eq!(usage.shares().count(), 0);
        usage.learn(u64::MAX, [((0, 0), u32::MAX)]);
        usage.learn(u64::MAX, [((0, 0), u32::MAX)]);
    }

    #[test]
    fn other_files_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(USAGE);
        learned().save(&path, MANIFEST).unwrap();
        let other = MANIFEST.replace("00", "01");
        let error = Usage::load(&path, &other).unwrap_err();
        assert!(error.is_usage() && error.code() == "usage_of_another_container", "{error}");
        assert!(error.to_string().contains(MANIFEST) && error.to_string().contains(&other), "{error}");
        let content = std::fs::read(&path).unwrap();
        for len in 0..content.len() {
            let error = Usage::parse(&path, &content[..len], MANIFEST).unwrap_err();
            assert_eq!(error.is_usage(), len >= 4, "{len}: {error}");
        }
        for at in 0..content.len() {
            let mut content = content.clone();
            content[at] ^= 1;
            Usage::parse(&path, &content, MANIFEST).unwrap_err();
        }
        std::fs::write(&path, b"WUSG\x01\0\0\0\x05\0\0\0\0\0\0\0").unwrap();
        let error = Usage::load(&path, MANIFEST).unwrap_err();
        assert!(matches!(error, UsageError::Version { found: 1, .. }), "{error}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_answer_or_an_error(mut bytes: Vec<u8>, crc: bool) {
            if crc {
                bytes.splice(..0, [&MAGIC[..], &VERSION.to_le_bytes()[..], &[0x5a; 40]].concat());
                let sum = crc32fast::hash(&bytes);
                bytes.extend(sum.to_le_bytes());
            }
            let usage = Usage::parse(Path::new("x"), &bytes, &"5a".repeat(32));
            if let Ok(usage) = usage {
                prop_assert!(usage.shares().all(|(_, share)| (0.0..=1.0).contains(&share)));
            }
        }
    }
}
