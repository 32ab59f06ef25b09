//! What MODEL names, and the sizes that follow from it.

use std::path::{Path, PathBuf};

use waste_common::checkpoint::Checkpoint;
use waste_common::cli::chain::Kind;
use waste_common::cli::{Failure, Model};
use waste_common::container::{Container, MANIFEST};
use waste_common::json::{self, MANIFEST_BYTES_MAX};
use waste_common::plan::{ModelSizes, known};

/// A model whose sizes are known.
pub struct Source {
    /// What was looked at.
    pub kind: Kind,
    /// Where it is, or its name.
    pub path: PathBuf,
    /// Its sizes.
    pub sizes: ModelSizes,
}

impl Source {
    /// Looks at a model: a container's manifest, or a configuration.
    ///
    /// # Errors
    /// Nothing usable is there (exit 3).
    pub fn open(model: &Model) -> Result<Source, Failure> {
        let path = model.path();
        let kind = match model.chained() {
            Some(chained) => chained.kind,
            None => kind_of(path)?,
        };
        let (path, sizes) = match kind {
            Kind::Container => (path.to_owned(), ModelSizes::of_container(&Container::open(path)?)),
            Kind::Checkpoint => (path.to_owned(), ModelSizes::of_config(&read(&path.join("config.json"))?)),
            Kind::Config => {
                let (path, config) = config(path)?;
                (path, ModelSizes::of_config(&config))
            }
        };
        // Which file it was, the library cannot know.
        let sizes = sizes.map_err(|error| {
            let mut failure = Failure::from(error);
            failure.message = format!("{}: {}", path.display(), failure.message);
            failure
        })?;
        Ok(Source { kind, path, sizes })
    }
}

fn kind_of(path: &Path) -> Result<Kind, Failure> {
    if path.is_dir() {
        if path.join(MANIFEST).exists() {
            return Ok(Kind::Container);
        }
        if Checkpoint::is_checkpoint(path) {
            return Ok(Kind::Checkpoint);
        }
        if path.join("config.json").exists() {
            return Ok(Kind::Config);
        }
        return Err(nothing(
            path,
            "holds neither a manifest.json (a finished container) nor a config.json (a checkpoint)",
        ));
    }
    Ok(Kind::Config)
}

/// A configuration, and where it was found: a file, a directory with one, or a known name. What exists wins.
fn config(path: &Path) -> Result<(PathBuf, serde_json::Value), Failure> {
    if path.is_dir() {
        let file = path.join("config.json");
        return Ok((file.clone(), read(&file)?));
    }
    if path.exists() {
        return Ok((path.to_owned(), read(path)?));
    }
    match path.to_str().and_then(known::config) {
        Some(config) => Ok((path.to_owned(), config)),
        None => {
            let names: Vec<_> = known::names().collect();
            let problem = format!("does not exist and is no known model ({})", names.join(", "));
            Err(nothing(path, &problem))
        }
    }
}

fn read(file: &Path) -> Result<serde_json::Value, Failure> {
    Ok(json::read(file, MANIFEST_BYTES_MAX)?)
}

fn nothing(path: &Path, problem: &str) -> Failure {
    Failure::data("no_model", format!("{} {problem}", path.display()))
}
