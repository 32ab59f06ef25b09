//! A run whose shards come and go: layers and the trunk's parts are made as shards arrive, and shards leave when nothing
//! needs them any more.

use std::sync::atomic::{AtomicBool, Ordering};

use waste_common::cli::{Interrupt, Output};
use waste_common::container::TrunkEntry;
use waste_common::tensors;

use super::Conversion;
use crate::convert::PAUSE;
use crate::error::ConvertError;
use crate::layer::LayerJob;
use crate::run::{self, Layers};
use crate::supply::{Shards, Supply};
use crate::{parts, state};

impl Conversion<'_> {
    /// Makes the layers that are owed, added to `layers`, and, if this run is `alone`, the trunk.
    pub(super) fn staged(
        &self,
        shards: &Shards,
        owed: &[&LayerJob],
        layers: &mut Layers,
        alone: bool,
        output: &Output,
        interrupt: &Interrupt,
    ) -> Result<Option<Vec<TrunkEntry>>, ConvertError> {
        let trunk = if alone { self.whole_trunk()? } else { None };
        let mut used = Vec::new();
        for shard in shards.trunk.keys() {
            if trunk.is_some() || parts::is_finished(self.dir(), shard)? {
                used.push(shard.clone());
            }
        }
        let request = self.request;
        let (checkpoint, done) = (&request.checkpoint, layers.keys().copied());
        let supply =
            Supply::begin(checkpoint, shards, request.follow, request.reclaim, output, done, used.clone())?;
        let stop = AtomicBool::new(false);
        let made = std::thread::scope(|scope| {
            let parts = scope.spawn(|| match alone {
                true => self.parts(&supply, shards, &used, &stop, interrupt),
                false => Ok(()),
            });
            let made = run::layers(self, owed, Some(&supply), &stop, output, interrupt);
            if made.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            let parts = parts.join().unwrap_or(Err(ConvertError::Interrupted));
            // What stopped the other is the reason.
            match (made, parts) {
                (Err(error), Err(ConvertError::Interrupted)) => Err(error),
                (made, parts) => parts.and(made),
            }
        })?;
        layers.extend(made);
        if !alone || trunk.is_some() {
            return Ok(trunk);
        }
        let tick = |_| if interrupt.requested() { Err(ConvertError::Interrupted) } else { Ok(()) };
        Ok(Some(parts::merge(self.source, shards, self.dir(), &tick)?))
    }

    /// The trunk's parts that are still to be made, each as its shard arrives.
    fn parts(
        &self,
        supply: &Supply,
        shards: &Shards,
        finished: &[String],
        stop: &AtomicBool,
        interrupt: &Interrupt,
    ) -> Result<(), ConvertError> {
        let stopped = || stop.load(Ordering::Relaxed) || interrupt.requested();
        let tick = |_| if stopped() { Err(ConvertError::Interrupted) } else { Ok(()) };
        let work = || {
            let mut owed: Vec<&String> =
                shards.trunk.keys().filter(|shard| !finished.contains(shard)).collect();
            while !owed.is_empty() {
                tick(0)?;
                let state = supply.state()?;
                let Some(at) = owed.iter().position(|shard| supply.there(state.as_ref(), [*shard])) else {
                    std::thread::sleep(PAUSE);
                    continue;
                };
                let shard = owed.remove(at);
                let request = self.request;
                parts::write(&request.checkpoint, shards, &request.options, self.dir(), shard, &tick)?;
                supply.trunk_used(shard)?;
            }
            Ok(())
        };
        let result = work();
        if result.is_err() {
            stop.store(true, Ordering::Relaxed);
        }
        result
    }

    /// The finished trunk of a checkpoint whose shards come and go.
    fn whole_trunk(&self) -> Result<Option<Vec<TrunkEntry>>, ConvertError> {
        let Some(entries) = state::sound_trunk(self.dir())? else { return Ok(None) };
        let config = &self.source.config;
        let mut needed = tensors::trunk(config).into_iter().chain(tensors::vision(config));
        let whole = needed.all(|spec| entries.iter().any(|entry| entry.name == spec.name));
        Ok(whole.then_some(entries))
    }
}
