//! Answers from a file in place of a model's, for tests of everything around the engine.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use waste_common::cli::Failure;
use waste_common::json::{MANIFEST_BYTES_MAX, read_bounded};
use waste_engine::EngineError;
use waste_engine::tokenizer::Tokenizer;

use super::{Given, Model, Write};
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

/// An answer.
struct Slot {
    /// Tokens of the prompt that are in.
    done: usize,
    left: std::vec::IntoIter<Given<'static>>,
}

/// Gives request after request the next case; after the last one the first again.
pub struct ScriptModel {
    cases: Vec<Vec<Given<'static>>>,
    next: usize,
    slots: BTreeMap<usize, Slot>,
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
            Item::Text { t } => Ok(Given::Text(t.clone())),
            Item::Marker { m } => {
                special(m).map(Given::Special).ok_or_else(|| bad(format!("the tokenizer has no {m:?}")))
            }
        };
        let cases: Vec<Vec<Given<'static>>> = file
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
            slots: BTreeMap::new(),
            end: special("eos").or_else(|| special("end_of_msg")).unwrap_or_default(),
            prefill: Duration::from_millis(file.prefill_ms),
            token: Duration::from_millis(file.token_ms),
        })
    }
}

impl Model for ScriptModel {
    fn begin(&mut self, slot: usize, _: &mut Job) -> Result<usize, EngineError> {
        let case = self.cases[self.next % self.cases.len()].clone();
        self.next += 1;
        self.slots.insert(slot, Slot { done: 0, left: case.into_iter() });
        Ok(0)
    }

    fn prefill(&mut self, slot: usize, job: &mut Job, _: &dyn Fn() -> bool) -> Result<usize, EngineError> {
        std::thread::sleep(self.prefill);
        let Some(slot) = self.slots.get_mut(&slot) else { return Ok(job.ids.len()) };
        slot.done = job.ids.len().min(slot.done + CHUNK);
        Ok(slot.done)
    }

    fn next(&mut self, slots: &[usize], write: &mut Write<'_>) -> Result<(), EngineError> {
        std::thread::sleep(self.token);
        for slot in slots {
            let next = self.slots.get_mut(slot).and_then(|slot| slot.left.next());
            write(*slot, Ok(next.unwrap_or(Given::Special(self.end))));
        }
        Ok(())
    }
}
