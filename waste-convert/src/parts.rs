//! The trunk in parts, one for each shard, for a checkpoint whose shards come and go. At the end the parts become the
//! trunk that would have been written at once.

use std::fs;
use std::path::{Path, PathBuf};

use waste_common::container::writer::TrunkWriter;
use waste_common::container::{Source as File, TRUNK, Trunk, TrunkEntry};
use waste_common::files::{FileError, sync_dir};
use waste_common::quant::Encoded;
use waste_common::tensors;

use crate::error::ConvertError;
use crate::layer::Tick;
use crate::options::Options;
use crate::source::Source;
use crate::state;
use crate::supply::Shards;
use crate::trunk;

/// The directory of the parts.
pub const PARTS: &str = "trunk-parts";
/// Bytes that are copied at a time.
const PIECE: u64 = 32 << 20;

/// Where the part of a shard lies.
fn part(dir: &Path, shard: &str) -> PathBuf {
    dir.join(PARTS).join(shard)
}

/// Whether the part of a shard is finished and sound.
pub fn is_finished(dir: &Path, shard: &str) -> Result<bool, ConvertError> {
    let part = part(dir, shard);
    Ok(part.is_dir() && state::sound_trunk(&part)?.is_some())
}

/// Writes the part of a shard, durably, and reads it back.
///
/// # Errors
/// As for [`trunk::convert_trunk`]; what was read back is not what was written.
pub fn write(
    checkpoint: &Path,
    shards: &Shards,
    options: &Options,
    dir: &Path,
    shard: &str,
    tick: Tick,
) -> Result<(), ConvertError> {
    // Opened for this part alone: the shard may be removed afterwards, and must not be held open.
    let source = Source::open_some(checkpoint)?;
    let mut names = Vec::new();
    for name in shards.trunk.get(shard).into_iter().flatten() {
        if source.carries(name)? {
            names.push(name.clone());
        }
    }
    let part = part(dir, shard);
    fs::create_dir_all(&part).map_err(FileError::io("create", &part))?;
    trunk::convert_trunk(&source, options, &names, &part, tick)?;
    sync_dir(&dir.join(PARTS))?;
    sync_dir(dir)?;
    if is_finished(dir, shard)? {
        return Ok(());
    }
    Err(ConvertError::ReadBack { file: part.join(TRUNK) })
}

/// Merges the parts of all shards into the trunk, and removes them.
///
/// # Errors
/// A part is damaged, or the model needs a tensor that is in none.
pub fn merge(
    source: &Source,
    shards: &Shards,
    dir: &Path,
    tick: Tick,
) -> Result<Vec<TrunkEntry>, ConvertError> {
    let mut parts = Vec::new();
    for shard in shards.trunk.keys() {
        let part = part(dir, shard);
        let entries = state::sound_trunk(&part)?;
        let entries = entries.ok_or_else(|| ConvertError::ReadBack { file: part.join(TRUNK) })?;
        parts.push(Trunk::new(File::open(&part, TRUNK)?, entries)?);
    }
    let mut all: Vec<(&TrunkEntry, &Trunk)> =
        parts.iter().flat_map(|part| part.entries().iter().map(move |entry| (entry, part))).collect();
    all.sort_unstable_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    let needed = tensors::trunk(&source.config).into_iter().chain(tensors::vision(&source.config));
    let missing = needed.map(|spec| spec.name);
    let missing = missing.filter(|name| all.binary_search_by(|(entry, _)| entry.name.cmp(name)).is_err());
    let names: Vec<String> = missing.collect();
    if !names.is_empty() {
        return Err(ConvertError::Missing { dir: source.checkpoint.dir().to_owned(), names });
    }
    let mut trunk = TrunkWriter::create(dir)?;
    for (entry, part) in all {
        copy(entry, part, &mut trunk, tick)?;
    }
    trunk.finish()?;
    drop(parts);
    // The shards are gone by now, and the parts go next: what is left is read back first.
    let entries = state::sound_trunk(dir)?.ok_or_else(|| ConvertError::ReadBack { file: dir.join(TRUNK) })?;
    remove(dir)?;
    Ok(entries)
}

/// Copies a tensor as it is stored.
fn copy(entry: &TrunkEntry, part: &Trunk, trunk: &mut TrunkWriter, tick: Tick) -> Result<(), ConvertError> {
    let sizes = part.sizes(entry)?;
    let mut tensor = trunk.tensor(&entry.name, &entry.shape, entry.fmt)?;
    let mut start = 0;
    while start < sizes.payload_bytes {
        let mut payload = vec![0; PIECE.min(sizes.payload_bytes - start) as usize];
        part.read_payload(entry, start, &mut payload)?;
        start += payload.len() as u64;
        tick(payload.len() as u64)?;
        tensor.encoded(&Encoded { payload, scales: Vec::new() })?;
    }
    let mut scales = Vec::new();
    part.read_scales(entry, 0, sizes.scales, &mut scales)?;
    tensor.encoded(&Encoded { payload: Vec::new(), scales })?;
    Ok(tensor.finish()?)
}

/// Removes all parts.
///
/// # Errors
/// The system refuses.
pub fn remove(dir: &Path) -> Result<(), ConvertError> {
    let parts = dir.join(PARTS);
    match fs::remove_dir_all(&parts) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(FileError::io("remove", &parts)(error).into())
        }
        _ => Ok(sync_dir(dir)?),
    }
}
