//! What stands in the container's directory when a run begins: what is taken over and what is removed.

use serde_json::Value;
use waste_common::cli::{Output, Progress, Unit};
use waste_common::container::{Container, MANIFEST};

use super::Conversion;
use super::commit::CONVERSION;
use crate::error::ConvertError;
use crate::layer::LayerJob;
use crate::parts;
use crate::run::Layers;
use crate::state::{self, STATE};

/// What a run finds.
pub(crate) enum Begun {
    Finished(Layers),
    Unfinished,
}

impl Conversion<'_> {
    /// Looks at what stands in the directory: a finished container, a begun one, nothing, or a reason to stop.
    pub fn begin(&self) -> Result<Begun, ConvertError> {
        let dir = self.dir();
        if self.request.force {
            if let Some(shards) = &self.shards {
                // What is here may be all that is left of them.
                let missing = shards.gone(&self.request.checkpoint, self.request.follow)?;
                if !missing.is_empty() {
                    return Err(ConvertError::Shards { dir: self.request.checkpoint.clone(), missing });
                }
            }
            // The manifest first: from here on there is no container. Then the state, so that what is left of the
            // old one is vouched for by nothing.
            state::remove(dir, &[MANIFEST.to_owned()])?;
            state::remove(dir, &[STATE.to_owned()])?;
            state::remove(dir, &state::written_files(dir)?)?;
            parts::remove(dir)?;
            return self.begin_anew();
        }
        let begun = state::begun(dir, &self.fingerprint)?;
        if dir.join(MANIFEST).exists() {
            return match (self.finished()?, begun) {
                (Ok(layers), _) => {
                    // Killed between the commit and the tidying up.
                    let work = state::written_files(dir)?.into_iter();
                    let work = work.filter(|name| self.is_work_file(name)).collect::<Vec<_>>();
                    state::remove(dir, &work)?;
                    state::remove(dir, &[STATE.to_owned()])?;
                    Ok(Begun::Finished(layers))
                }
                (Err(reason), false) => Err(ConvertError::Exists { dir: dir.to_owned(), reason }),
                // Ours, but damaged: what is missing is made again.
                (Err(_), true) => {
                    state::remove(dir, &[MANIFEST.to_owned()])?;
                    Ok(Begun::Unfinished)
                }
            };
        }
        // Killed before the state was there.
        let unborn = format!("{STATE}.tmp");
        let others = state::written_files(dir)?.into_iter().filter(|name| *name != unborn);
        match (begun, { others }.next()) {
            (true, _) => Ok(Begun::Unfinished),
            (false, None) => self.begin_anew(),
            (false, Some(file)) => Err(ConvertError::Foreign { dir: dir.to_owned(), file }),
        }
    }

    fn begin_anew(&self) -> Result<Begun, ConvertError> {
        state::begin(self.dir(), &self.fingerprint)?;
        Ok(Begun::Unfinished)
    }

    pub(super) fn is_work_file(&self, name: &str) -> bool {
        ["codebooks-L", "convert-L"].iter().any(|prefix| name.starts_with(prefix))
            || name.ends_with(".tmp")
            || name == "trunk-index.json"
    }

    /// The layers' errors of the container that stands here if it is what this conversion would make; else why not.
    fn finished(&self) -> Result<Result<Layers, String>, ConvertError> {
        let container = match Container::open(self.dir()) {
            Ok(container) => container,
            Err(error) => return Ok(Err(format!(" that does not open ({error})"))),
        };
        let Some(made) = container.manifest().extra.get(CONVERSION).and_then(Value::as_object) else {
            return Ok(Err(" of another tool".to_owned()));
        };
        for (key, wanted) in &self.fingerprint {
            let found = made.get(key).unwrap_or(&Value::Null);
            if found != wanted {
                return Ok(Err(format!(" with {key} {found}, this run says {wanted}")));
            }
        }
        let errors = made.get("layers").cloned().unwrap_or_default();
        Ok(serde_json::from_value(errors).map_err(|_| " of another version".to_owned()))
    }

    /// The layers that are finished and sound. Alone, it also removes what an interruption left half-made.
    pub(super) fn sweep(&self, alone: bool, output: &Output) -> Result<Layers, ConvertError> {
        let mut sound = Layers::new();
        let recorded = |job: &LayerJob| state::is_recorded(self.dir(), job.layer);
        let total = self.jobs.iter().filter(|job| recorded(job)).count();
        let progress = Progress::new(output, "layers checked", total as u64, Unit::Count);
        for job in self.jobs.iter().filter(|job| recorded(job)) {
            match state::finished(self.dir(), job, &self.fingerprint)? {
                Some(errors) => {
                    sound.insert(job.layer, errors);
                }
                None => output.warn(format_args!("layer {} is damaged on disk and is made again", job.layer)),
            }
            progress.add(1);
        }
        progress.finish();
        if alone {
            // A damaged layer whose shards may be gone is not thrown away before it has been made again.
            let kept = |job: &&LayerJob| self.shards.is_some() || sound.contains_key(&job.layer);
            let kept = self.jobs.iter().filter(kept).flat_map(|job| state::layer_files(job.layer));
            let kept: Vec<String> = kept.collect();
            let prefixes = ["experts-L", "codebooks-L", "convert-L"];
            let of_a_layer = |name: &String| prefixes.iter().any(|prefix| name.starts_with(prefix));
            let left = state::written_files(self.dir())?.into_iter().filter(|name| !name.ends_with(".lock"));
            let left =
                left.filter(|name| name.ends_with(".tmp") || (of_a_layer(name) && !kept.contains(name)));
            state::remove(self.dir(), &left.collect::<Vec<_>>())?;
        }
        Ok(sound)
    }
}
