//! The shards of a checkpoint that comes and goes: which parts of the container need them, whether they are there, and
//! their removal once nothing does.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use waste_common::checkpoint::Checkpoint;
use waste_common::cli::{ByteSize, Output};
use waste_common::config::ModelConfig;
use waste_common::files::{FileError, sync_dir};
use waste_common::staging::{self, ORDER, RECLAIMED, State};
use waste_common::tensors;

use crate::error::ConvertError;

/// What becomes of a shard that is needed no more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Reclaim {
    /// It stays.
    #[default]
    Off,
    /// It stays, and is named.
    Dry,
    /// It is removed.
    On,
}

/// Which parts of a container come from which shards.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Shards {
    /// Of each MoE layer's experts.
    pub layers: BTreeMap<u16, BTreeSet<String>>,
    /// The trunk's tensors in each shard that has any.
    pub trunk: BTreeMap<String, Vec<String>>,
}

impl Shards {
    /// As the index tells.
    pub fn of(checkpoint: &Checkpoint, config: &ModelConfig) -> Self {
        let mut shards = Shards::default();
        for name in checkpoint.names() {
            let Some(shard) = checkpoint.shard_of(name) else { continue };
            match tensors::expert_of(name) {
                Some((layer, expert)) => {
                    let routed = config.moe_of(layer).is_some_and(|moe| expert < moe.experts);
                    if routed && layer < config.layers() {
                        shards.layers.entry(layer as u16).or_default().insert(shard.to_owned());
                    }
                }
                None => shards.trunk.entry(shard.to_owned()).or_default().push(name.to_owned()),
            }
        }
        shards.trunk.values_mut().for_each(|names| names.sort_unstable());
        shards
    }

    /// Those that `dir` had once and has no more: what was made of them cannot be made again. Beside a downloader, only
    /// what the ledger says was removed; the others are still to come.
    pub fn gone(&self, dir: &Path, follow: bool) -> Result<Vec<String>, ConvertError> {
        let ledger = staging::read_names(&dir.join(RECLAIMED))?.unwrap_or_default();
        let gone = |name: &&str| {
            !dir.join(name).exists() && (!follow || ledger.iter().any(|removed| removed.as_str() == *name))
        };
        Ok(self.in_order().into_iter().filter(gone).map(str::to_owned).collect())
    }

    /// All of them, in the order in which they are wanted: layer by layer, then what is the trunk's alone.
    fn in_order(&self) -> Vec<&str> {
        let mut seen = BTreeSet::new();
        let all = self.layers.values().flatten().chain(self.trunk.keys());
        all.filter(|name| seen.insert(name.as_str())).map(String::as_str).collect()
    }
}

/// The shards during one run.
pub struct Supply<'a> {
    dir: PathBuf,
    shards: &'a Shards,
    /// Only what the downloader has found right counts as being there.
    follow: bool,
    reclaim: Reclaim,
    output: &'a Output,
    used: Mutex<Used>,
}

#[derive(Default)]
struct Used {
    layers: BTreeSet<u16>,
    trunk: BTreeSet<String>,
    /// Removed, or about to be.
    ledger: Vec<String>,
}

impl<'a> Supply<'a> {
    /// `layers` and `trunk` (by shard) are finished already. Writes what is wanted next, and removes at once what is
    /// not needed any more.
    pub fn begin(
        dir: &Path,
        shards: &'a Shards,
        follow: bool,
        reclaim: Reclaim,
        output: &'a Output,
        layers: impl IntoIterator<Item = u16>,
        trunk: impl IntoIterator<Item = String>,
    ) -> Result<Self, ConvertError> {
        let ledger = staging::read_names(&dir.join(RECLAIMED))?.unwrap_or_default();
        let used = Used { layers: layers.into_iter().collect(), trunk: trunk.into_iter().collect(), ledger };
        let supply = Supply { dir: dir.to_owned(), shards, follow, reclaim, output, used: Mutex::new(used) };
        supply.reconcile()?;
        supply.remove_used()?;
        Ok(supply)
    }

    /// Compares what is needed with what was removed.
    fn reconcile(&self) -> Result<(), ConvertError> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let needed: Vec<&str> =
            self.shards.in_order().into_iter().filter(|name| self.needed(&used, name)).collect();
        if self.follow {
            // Something made of it was damaged since: it has to come again.
            let before = used.ledger.len();
            used.ledger.retain(|name| !needed.contains(&name.as_str()) || self.dir.join(name).exists());
            if used.ledger.len() != before {
                staging::write_names(&self.dir.join(RECLAIMED), used.ledger.iter().map(String::as_str))?;
            }
            staging::write_names(&self.dir.join(ORDER), needed.iter().copied())?;
            return Ok(());
        }
        let missing: Vec<String> =
            needed.into_iter().filter(|name| !self.dir.join(name).exists()).map(str::to_owned).collect();
        if missing.is_empty() { Ok(()) } else { Err(ConvertError::Shards { dir: self.dir.clone(), missing }) }
    }

    fn needed(&self, used: &Used, shard: &str) -> bool {
        let mut layers = self.shards.layers.iter();
        layers.any(|(layer, shards)| shards.contains(shard) && !used.layers.contains(layer))
            || (self.shards.trunk.contains_key(shard) && !used.trunk.contains(shard))
    }

    /// Whether some shards are there; `state` is what the downloader says now.
    pub fn there<'s>(&self, state: Option<&State>, shards: impl IntoIterator<Item = &'s String>) -> bool {
        let done = |name: &str| !self.follow || state.is_some_and(|state| state.is_done(name));
        shards.into_iter().all(|name| done(name) && self.dir.join(name).exists())
    }

    /// Whether a layer can be converted.
    pub fn has_layer(&self, state: Option<&State>, layer: u16) -> bool {
        self.shards.layers.get(&layer).is_none_or(|shards| self.there(state, shards))
    }

    /// What the downloader says.
    pub fn state(&self) -> Result<Option<State>, ConvertError> {
        if self.follow { Ok(State::read(&self.dir)?) } else { Ok(None) }
    }

    /// A layer is durably finished and was read back.
    pub fn layer_used(&self, layer: u16) -> Result<(), ConvertError> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).layers.insert(layer);
        self.remove_used()
    }

    /// The trunk's tensors of a shard are durably written and were read back.
    pub fn trunk_used(&self, shard: &str) -> Result<(), ConvertError> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).trunk.insert(shard.to_owned());
        self.remove_used()
    }

    /// Removes what is needed no more: first the ledger says so, durably, then the file goes.
    fn remove_used(&self) -> Result<(), ConvertError> {
        if self.reclaim == Reclaim::Off {
            return Ok(());
        }
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let state = State::read(&self.dir)?;
        for shard in self.shards.in_order() {
            let path = self.dir.join(shard);
            if self.needed(&used, shard) || !path.exists() {
                continue;
            }
            // What cannot be fetched again, or was not found right, is not thrown away.
            if !state.as_ref().is_some_and(|state| state.is_done(shard)) {
                continue;
            }
            let bytes = fs::metadata(&path).map_or(0, |meta| meta.len());
            if self.reclaim == Reclaim::Dry {
                if !used.ledger.iter().any(|name| name == shard) {
                    used.ledger.push(shard.to_owned());
                    self.output.note(format_args!("{shard} ({}) would be removed", ByteSize(bytes)));
                }
                continue;
            }
            if !used.ledger.iter().any(|name| name == shard) {
                used.ledger.push(shard.to_owned());
                staging::write_names(&self.dir.join(RECLAIMED), used.ledger.iter().map(String::as_str))?;
            }
            fs::remove_file(&path).map_err(FileError::io("remove", &path))?;
            sync_dir(&self.dir)?;
            self.output.note(format_args!("{shard} ({}) is used up and removed", ByteSize(bytes)));
        }
        Ok(())
    }
}
