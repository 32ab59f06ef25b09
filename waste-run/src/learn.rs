//! What earlier runs leave to later ones: how often each expert was used.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use waste_common::cli::{Failure, Output};
use waste_common::container::Container;
use waste_common::files::AtomicFile;
use waste_engine::Engine;
use waste_engine::experts::Usage;
use waste_engine::experts::usage::USAGE;

use crate::args::ModelArgs;

/// The usage file of a container.
pub struct Learning {
    path: PathBuf,
    manifest_sha256: String,
    learn: bool,
    usage: Option<Arc<Usage>>,
}

impl Learning {
    /// Looks for the usage file. One that cannot be used is a warning, for it only saves time; but nothing is replaced
    /// that is no usage file.
    ///
    /// # Errors
    /// The file that was asked for is missing, or could not be written in the end.
    pub fn find(
        dir: &Path,
        container: &Container,
        args: &ModelArgs,
        output: &Output,
    ) -> Result<Learning, Failure> {
        let path = args.usage.clone().unwrap_or_else(|| dir.join(USAGE));
        let manifest_sha256 = container.manifest_sha256().to_owned();
        let usage = match Usage::load(&path, &manifest_sha256) {
            Ok(None) if args.usage.is_some() && !args.learn => {
                let missing = format!("there is no usage file {}; --learn makes one", path.display());
                return Err(Failure::data("unreadable_file", missing));
            }
            Ok(usage) => usage.map(Arc::new),
            Err(error) if args.learn && !error.is_usage() => return Err(error.into()),
            Err(error) => {
                let next = if args.learn { "it will be replaced" } else { "--learn replaces it" };
                output.warn(format_args!("{error}; the cache begins empty ({next})"));
                None
            }
        };
        if args.learn {
            // Dropped again: a place that cannot be written is refused before the run, not after it.
            drop(AtomicFile::create(&path)?);
        }
        Ok(Learning { path, manifest_sha256, learn: args.learn, usage })
    }

    /// What was learned before.
    pub fn usage(&self) -> Option<Arc<Usage>> {
        self.usage.clone()
    }

    /// Adds what this run used, to what other runs may have added meanwhile.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, engine: &Engine) -> Result<(), Failure> {
        if self.learn {
            let mut usage = Usage::load(&self.path, &self.manifest_sha256).ok().flatten().unwrap_or_default();
            engine.learn(&mut usage);
            usage.save(&self.path, &self.manifest_sha256)?;
        }
        Ok(())
    }
}
