//! How far a conversion has come: `convert.state.json` says with what it was begun, `convert-L{n}.json` that a layer is
//! finished. These are claims; what they name is checked on disk.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use waste_common::container::integrity::{check_trunk_entry, sha256_hex};
use waste_common::container::writer::{
    TRUNK_INDEX, bank_entry, codebook_part_name, finished_layer, finished_trunk,
};
use waste_common::container::{
    BankFile, CODEBOOKS, ContainerError, MANIFEST, MANIFEST_SHA256, TRUNK, bank_name,
};
use waste_common::container::{Source, Trunk, TrunkEntry};
use waste_common::files::{FileError, sync_dir, write_atomic};
use waste_common::json::{self, MANIFEST_BYTES_MAX};

use crate::error::ConvertError;
use crate::layer::{Errors, LayerJob};
use crate::sidecars;

/// The file's name.
pub const STATE: &str = "convert.state.json";
const VERSION: u64 = 2;

/// What a conversion was begun with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct State {
    /// Version of this file.
    version: u64,
    /// What the container is made of and how; see `Options::fingerprint`.
    options: Map<String, Value>,
}

/// Whether a conversion with these options was begun in `dir`.
///
/// # Errors
/// The file is of another version, or the options are others.
pub fn begun(dir: &Path, options: &Map<String, Value>) -> Result<bool, ConvertError> {
    let file = dir.join(STATE);
    if !file.exists() {
        return Ok(false);
    }
    let fail = |problem: String| ConvertError::State { file: file.clone(), problem };
    let value = json::read(&file, MANIFEST_BYTES_MAX).map_err(|error| fail(error.to_string()))?;
    match value.get("version").and_then(Value::as_u64) {
        Some(VERSION) => {}
        found => {
            let found = found.map_or("unknown".to_owned(), |version| version.to_string());
            return Err(fail(format!("its version is {found}; this tool writes {VERSION}")));
        }
    }
    let state: State = serde_json::from_value(value).map_err(|error| fail(error.to_string()))?;
    let keys = options.keys().chain(state.options.keys());
    let other = keys.into_iter().find(|key| options.get(*key) != state.options.get(*key));
    match other {
        None => Ok(true),
        Some(key) => {
            let value = |map: &Map<String, Value>| Box::new(map.get(key).cloned().unwrap_or(Value::Null));
            Err(ConvertError::Options {
                dir: dir.to_owned(),
                key: key.clone(),
                begun: value(&state.options),
                wanted: value(options),
            })
        }
    }
}

/// Records, durably, that a conversion is begun.
pub fn begin(dir: &Path, options: &Map<String, Value>) -> Result<(), ConvertError> {
    let state = State { version: VERSION, options: options.clone() };
    write_json(&dir.join(STATE), &state)
}

/// What says that a layer is finished: written after its two files are durable.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct LayerRecord {
    version: u64,
    /// Of the options it was made with.
    options_sha256: String,
    errors: Errors,
}

fn record_name(layer: u16) -> String {
    format!("convert-L{layer}.json")
}

fn options_sha256(options: &Map<String, Value>) -> String {
    sha256_hex(Value::from(options.clone()).to_string().as_bytes())
}

/// Records, durably, that a layer is finished.
pub fn record(
    dir: &Path,
    layer: u16,
    errors: &Errors,
    options: &Map<String, Value>,
) -> Result<(), ConvertError> {
    let record = LayerRecord { version: VERSION, options_sha256: options_sha256(options), errors: *errors };
    write_json(&dir.join(record_name(layer)), &record)
}

/// Removes the record of a layer that is made again.
pub fn forget(dir: &Path, layer: u16) -> Result<(), ConvertError> {
    if dir.join(record_name(layer)).exists() { remove(dir, &[record_name(layer)]) } else { Ok(()) }
}

/// Whether there is a record of a layer, sound or not.
pub fn is_recorded(dir: &Path, layer: u16) -> bool {
    dir.join(record_name(layer)).exists()
}

/// The errors of a layer that is recorded as finished with these options, and whose files are sound: sizes, every
/// header, every payload's checksum.
pub fn finished(
    dir: &Path,
    job: &LayerJob,
    options: &Map<String, Value>,
) -> Result<Option<Errors>, ConvertError> {
    if !is_recorded(dir, job.layer) {
        return Ok(None);
    }
    // What does not parse says nothing.
    let value = json::read(&dir.join(record_name(job.layer)), MANIFEST_BYTES_MAX).ok();
    let record = value.and_then(|value| serde_json::from_value::<LayerRecord>(value).ok());
    let ours =
        |record: &LayerRecord| record.version == VERSION && record.options_sha256 == options_sha256(options);
    let Some(record) = record.filter(ours) else { return Ok(None) };
    Ok(sound(dir, job)?.then_some(record.errors))
}

/// Whether a layer is recorded and its files look right: sizes, the first headers. Quick, for a look from outside.
pub fn looks_finished(dir: &Path, job: &LayerJob) -> bool {
    let found = finished_layer(dir, job.layer, job.experts as u32, &job.geometry, &job.quant);
    is_recorded(dir, job.layer) && matches!(found, Ok(Some(base)) if base == job.codebook_base)
}

/// Whether the two files of a layer are sound.
fn sound(dir: &Path, job: &LayerJob) -> Result<bool, ConvertError> {
    let experts = job.experts as u32;
    match finished_layer(dir, job.layer, experts, &job.geometry, &job.quant) {
        Ok(Some(base)) if base == job.codebook_base => {}
        Ok(_) | Err(ContainerError::Record { .. } | ContainerError::Codebook { .. }) => return Ok(false),
        Err(error) => return Err(error.into()),
    }
    let bank = bank_entry(job.layer, experts, job.codebook_base, &job.geometry);
    let bank = BankFile::open(dir, job.layer, &bank, u32::MAX, &job.geometry)?;
    let mut buffer = vec![0; job.geometry.record_bytes()];
    for expert in (0..experts).map(|expert| expert as u16) {
        let sound = bank.read(expert, &mut buffer).and_then(|record| {
            record.verify_crc(&bank.expected(expert))?;
            record.verify_padding(&bank.expected(expert))
        });
        match sound {
            Err(ContainerError::Record { .. }) => return Ok(false),
            other => other?,
        }
    }
    Ok(true)
}

/// A layer that is being made, locked against other processes; the lock ends with the process.
pub struct LayerLock {
    _file: File,
    /// Another process held it.
    pub waited: bool,
}

impl LayerLock {
    /// Locks a layer, and waits for another process that is at it.
    pub fn acquire(dir: &Path, layer: u16) -> Result<Self, ConvertError> {
        let path = dir.join(format!("convert-L{layer}.lock"));
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false);
        let file = options.open(&path).map_err(FileError::io("open", &path))?;
        let waited = match file.try_lock() {
            Ok(()) => false,
            Err(TryLockError::WouldBlock) => {
                file.lock().map_err(FileError::io("lock", &path))?;
                true
            }
            Err(TryLockError::Error(error)) => return Err(FileError::io("lock", &path)(error).into()),
        };
        Ok(LayerLock { _file: file, waited })
    }
}

fn write_json(file: &Path, value: &impl Serialize) -> Result<(), ConvertError> {
    let content = serde_json::to_vec_pretty(value)
        .map_err(|error| ConvertError::State { file: file.to_owned(), problem: error.to_string() })?;
    Ok(write_atomic(file, &content)?)
}

/// The index of a finished trunk whose every tensor has the right checksum.
pub fn sound_trunk(dir: &Path) -> Result<Option<Vec<TrunkEntry>>, ConvertError> {
    let entries = match finished_trunk(dir) {
        Err(ContainerError::Json(_)) => None,
        other => other?,
    };
    let Some(entries) = entries else { return Ok(None) };
    let trunk = Trunk::new(Source::open(dir, TRUNK)?, entries)?;
    for entry in trunk.entries() {
        match check_trunk_entry(&trunk, entry) {
            Ok(true) => {}
            Ok(false) | Err(ContainerError::Checksum { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Some(trunk.entries().to_vec()))
}

/// Files in `dir` that a conversion writes, `tmp` leftovers included; the state and the manifest excepted.
pub fn written_files(dir: &Path) -> Result<Vec<String>, ConvertError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(FileError::io("list", dir))? {
        let entry = entry.map_err(FileError::io("list", dir))?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let whole = name.strip_suffix(".tmp").unwrap_or(&name);
        let numbered = |prefix: &str, suffix: &str| {
            let number = whole.strip_prefix(prefix).and_then(|rest| rest.strip_suffix(suffix));
            number.is_some_and(|number| number.parse::<u16>().is_ok())
        };
        let fixed = [TRUNK, TRUNK_INDEX, CODEBOOKS, MANIFEST_SHA256];
        if fixed.contains(&whole)
            || sidecars::NAMES.contains(&whole)
            || numbered("experts-L", ".bin")
            || numbered("codebooks-L", ".bin")
            || numbered("convert-L", ".json")
            || numbered("convert-L", ".lock")
            || (name != whole && [MANIFEST, STATE].contains(&whole))
        {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Removes files of `dir`.
pub fn remove(dir: &Path, names: &[String]) -> Result<(), ConvertError> {
    for name in names {
        let path = dir.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(FileError::io("remove", &path)(error).into());
            }
            _ => {}
        }
    }
    Ok(sync_dir(dir)?)
}

/// Bytes of those of `names` that are on disk.
pub fn bytes_of(dir: &Path, names: impl IntoIterator<Item = impl AsRef<str>>) -> u64 {
    let size = |name: &str| fs::metadata(dir.join(name)).map_or(0, |meta| meta.len());
    names.into_iter().map(|name| size(name.as_ref())).sum()
}

/// The names of a finished layer's files.
pub fn layer_files(layer: u16) -> [String; 3] {
    [bank_name(layer.into()), codebook_part_name(layer.into()), record_name(layer)]
}
