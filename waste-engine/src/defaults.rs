//! What a model's files say about writing with it: `generation_config.json`, and ids that end a text.

use std::path::{Path, PathBuf};

use waste_common::config::{ModelConfig, read_eos};
use waste_common::error::{Coded, Exit};
use waste_common::json::{self, JsonError, MANIFEST_BYTES_MAX};

use crate::tokenizer::Tokenizer;

/// What the files say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Defaults {
    /// Every id that ends a text: what the configurations name, and [EOS]; the files disagree, so all of them stop.
    pub stop_ids: Vec<u32>,
    /// `temperature`
    pub temperature: Option<f64>,
    /// `top_p`
    pub top_p: Option<f64>,
}

/// Why they cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum DefaultsError {
    #[error(transparent)]
    Read(#[from] JsonError),
    #[error("{}: expected {what}", path.display())]
    Invalid { path: PathBuf, what: &'static str },
}

impl Coded for DefaultsError {
    fn exit(&self) -> Exit {
        Exit::Data
    }

    fn code(&self) -> &'static str {
        match self {
            DefaultsError::Read(error) => error.code(),
            DefaultsError::Invalid { .. } => "invalid_generation_config",
        }
    }
}

impl Defaults {
    /// Reads them for the model in `dir`.
    ///
    /// # Errors
    /// `generation_config.json` is there and cannot be used.
    pub fn read(
        dir: &Path,
        config: &ModelConfig,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Defaults, DefaultsError> {
        let mut defaults = Defaults { stop_ids: config.eos.clone(), ..Defaults::default() };
        let path = dir.join("generation_config.json");
        if path.exists() {
            let invalid = |what| DefaultsError::Invalid { path: path.clone(), what };
            let file = json::read(&path, MANIFEST_BYTES_MAX)?;
            let file = file.as_object().ok_or_else(|| invalid("a JSON object"))?;
            let eos = read_eos(file.get("eos_token_id"));
            let what = "`eos_token_id` to be a token id or a list of at most 64 of them";
            defaults.stop_ids.extend(eos.ok_or_else(|| invalid(what))?);
            let number = |key: &str, most: f64, what| match file.get(key).filter(|value| !value.is_null()) {
                None => Ok(None),
                Some(value) => match value.as_f64().filter(|value| (0.0..=most).contains(value)) {
                    Some(value) => Ok(Some(value)),
                    None => Err(invalid(what)),
                },
            };
            defaults.temperature = number("temperature", 2.0, "`temperature` to be a number from 0 to 2")?;
            defaults.top_p = number("top_p", 1.0, "`top_p` to be a number from 0 to 1")?;
        }
        defaults.stop_ids.extend(tokenizer.and_then(Tokenizer::eos));
        defaults.stop_ids.sort_unstable();
        defaults.stop_ids.dedup();
        Ok(defaults)
    }
}
