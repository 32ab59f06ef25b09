//! Answers from a file in place of a model's, for tests of everything around the engine.

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use waste_common::cli::Failure;
use waste_common::json::{MANIFEST_BYTES_MAX, read_bounded};
use waste_engine::EngineError;
use waste_engine::tokenizer::Tokenizer;

use super::{Choose, Model, Piece};
use crate::job::Job;

/// The file: `{"cases":[{"items":[{"t":"text"},{"m":"close"},…]},…]}`, and how long things take.
#[derive(Debug, Deserialize)]
struct File {
    cases: Vec<Case>,
    #[serde(default)]
    prefill_ms: u64,
    #[serde(default)]
    token_ms: u64,
}

#[derive(Debug, Deserialize)]
struct Case {
    items: Vec<Item>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Item {
    Text { t: String },
    Marker { m: String },
}

/// Tokens of a chunk, as far as cancelling is concerned.
const CHUNK: usize = 256;

/// Gives request after request the next case; after the last one the first again.
pub struct ScriptModel {
    cases: Vec<Vec<Piece>>,
    next: usize,
    left: std::vec::IntoIter<Piece>,
    end: u32,
    prefill: Duration,
    token: Duration,
}

impl ScriptModel {
    /// Reads a script. Markers are those of the tokenizer.
    ///
    /// # Errors
    /// The file cannot be read, or names a marker that the tokenizer does not have.
    pub fn read(path: &Path, tokenizer: &Tokenizer) -> Result<ScriptModel, Failure> {
        let bad = |why: String| Failure::data("invalid_script", format!("{}: {why}", path.display()));
        let content = read_bounded(path, MANIFEST_BYTES_MAX)?;
        let file: File = serde_json::from_slice(&content).map_err(|error| bad(error.to_string()))?;
        let special = |name: &str| {
            let name = match name {
                "eos" => "[EOS]".to_owned(),
                "reserved" => return tokenizer.banned_in_text().last().copied(),
                name => format!("<|{name}|>"),
            };
            tokenizer.special_id(&name)
        };
        let piece = |item: &Item| match item {
            Item::Text { t } => Ok(Piece::Text(t.clone())),
            Item::Marker { m } => {
                special(m).map(Piece::Special).ok_or_else(|| bad(format!("the tokenizer has no {m:?}")))
            }
        };
        let cases: Vec<Vec<Piece>> = file
            .cases
            .iter()
            .map(|case| case.items.iter().map(piece).collect())
            .collect::<Result<_, Failure>>()?;
        if cases.is_empty() {
            return Err(bad("it has no cases".to_owned()));
        }
        Ok(ScriptModel {
            cases,
            next: 0,
            left: Vec::new().into_iter(),
            end: special("eos").or_else(|| special("end_of_msg")).unwrap_or_default(),
            prefill: Duration::from_millis(file.prefill_ms),
            token: Duration::from_millis(file.token_ms),
        })
    }
}

impl Model for ScriptModel {
    fn prefill(
        &mut self,
        job: &Job,
        tell: &mut dyn FnMut(usize) -> bool,
    ) -> Result<Option<usize>, EngineError> {
        self.left = self.cases[self.next % self.cases.len()].clone().into_iter();
        self.next += 1;
        let mut done = 0;
        while done < job.ids.len() {
            std::thread::sleep(self.prefill);
            done = job.ids.len().min(done + CHUNK);
            if !tell(done) {
                return Ok(None);
            }
        }
        Ok(Some(0))
    }

    fn next(&mut self, _: &mut Choose<'_>) -> Result<Piece, EngineError> {
        std::thread::sleep(self.token);
        Ok(self.left.next().unwrap_or(Piece::Special(self.end)))
    }
}
