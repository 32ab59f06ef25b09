//! `convert.state.json`: how far a conversion has come. It is a claim; what it names is checked on disk.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use waste_common::container::integrity::check_trunk_entry;
use waste_common::container::writer::{
    TRUNK_INDEX, bank_entry, codebook_part_name, finished_layer, finished_trunk,
};
use waste_common::container::{BankFile, CODEBOOKS, ContainerError, MANIFEST, MANIFEST_SHA256, TRUNK};
use waste_common::container::{Source as File, Trunk, TrunkEntry};
use waste_common::files::{FileError, sync_dir, write_atomic};
use waste_common::json::{self, MANIFEST_BYTES_MAX};

use crate::error::ConvertError;
use crate::layer::{Errors, LayerJob};
use crate::sidecars;

/// The file's name.
pub const STATE: &str = "convert.state.json";
const VERSION: u64 = 1;

/// The state of a conversion.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Version of this file.
    version: u64,
    /// What the container is made of and how; see `Options::fingerprint`.
    options: Map<String, Value>,
    /// Finished layers and their errors.
    pub layers: BTreeMap<u16, Errors>,
}

impl State {
    /// A conversion that has not begun.
    pub fn new(options: Map<String, Value>) -> Self {
        State { version: VERSION, options, layers: BTreeMap::new() }
    }

    /// The state in `dir`, if a conversion with these options was begun there.
    ///
    /// # Errors
    /// The file is of another version, or the options are others.
    pub fn load(dir: &Path, options: &Map<String, Value>) -> Result<Option<Self>, ConvertError> {
        let file = dir.join(STATE);
        if !file.exists() {
            return Ok(None);
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
        if let Some(key) = other {
            let value = |map: &Map<String, Value>| Box::new(map.get(key).cloned().unwrap_or(Value::Null));
            return Err(ConvertError::Options {
                dir: dir.to_owned(),
                key: key.clone(),
                begun: value(&state.options),
                wanted: value(options),
            });
        }
        Ok(Some(state))
    }

    /// Writes the state durably.
    pub fn save(&self, dir: &Path) -> Result<(), ConvertError> {
        let file = dir.join(STATE);
        let content = serde_json::to_vec_pretty(self)
            .map_err(|error| ConvertError::State { file: file.clone(), problem: error.to_string() })?;
        Ok(write_atomic(&file, &content)?)
    }

    /// Whether `job` is finished and its files are sound: sizes, every header, every payload's checksum.
    pub fn has(&self, dir: &Path, job: &LayerJob) -> Result<bool, ConvertError> {
        if !self.layers.contains_key(&job.layer) {
            return Ok(false);
        }
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
}

/// The index of a finished trunk whose every tensor has the right checksum.
pub fn sound_trunk(dir: &Path) -> Result<Option<Vec<TrunkEntry>>, ConvertError> {
    let entries = match finished_trunk(dir) {
        Err(ContainerError::Json(_)) => None,
        other => other?,
    };
    let Some(entries) = entries else { return Ok(None) };
    let trunk = Trunk::new(File::open(dir, TRUNK)?, entries)?;
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
        let numbered = |prefix: &str| {
            let number = whole.strip_prefix(prefix).and_then(|rest| rest.strip_suffix(".bin"));
            number.is_some_and(|number| number.parse::<u16>().is_ok())
        };
        let fixed = [TRUNK, TRUNK_INDEX, CODEBOOKS, MANIFEST_SHA256];
        if fixed.contains(&whole)
            || sidecars::NAMES.contains(&whole)
            || numbered("experts-L")
            || numbered("codebooks-L")
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

/// The names of a layer's two files.
pub fn layer_files(layer: u16) -> [String; 2] {
    [waste_common::container::bank_name(layer.into()), codebook_part_name(layer.into())]
}
