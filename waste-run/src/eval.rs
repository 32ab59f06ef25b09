//! The distribution of the next token, and all logits for whoever compares engines.

use std::io;
use std::path::Path;

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::Serialize;
use waste_common::cli::{Exit, Failure, Output, resolve_model};
use waste_common::files::{AtomicFile, FileError};
use waste_common::machine::{Paging, peak_rss_bytes};
use waste_engine::tokenizer::Tokenizer;
use waste_engine::{EngineError, Wanted};

use crate::args::EvalArgs;
use crate::images::Given;
use crate::{input, open};

#[derive(Serialize)]
struct Report {
    prompt_tokens: usize,
    vocab: usize,
    top: Vec<Candidate>,
    budget_bytes: u64,
    peak_rss_bytes: Option<u64>,
    paging: Option<Paging>,
}

#[derive(Serialize)]
struct Candidate {
    id: u32,
    text: String,
    logit: f32,
    prob: f64,
}

/// Evaluates a text.
pub fn run(args: EvalArgs, output: &Output) -> Result<Exit, Failure> {
    let model = resolve_model(&args.model)?;
    let mut found = open::find(&model, &args.open, output)?;
    let images = Given::look(&args.images, &mut found, model.path())?;
    let tokenizer = Tokenizer::open(model.path());
    let ids = match &args.ids {
        Some(ids) => ids.0.clone(),
        None => {
            let text = input::text(&args.text, model.chained().is_some())?;
            let tokenizer = match &tokenizer {
                Ok(tokenizer) => tokenizer,
                Err(_) => {
                    return Err(tokenizer
                        .err()
                        .map_or_else(|| Failure::internal("no tokenizer"), Into::into));
                }
            };
            input::encode(tokenizer, &images, &text, !args.no_bos)?
        }
    };
    if ids.is_empty() {
        return Err(Failure::usage("there is no token to evaluate"));
    }
    let places = images.places(&ids, found.config(), 0)?;
    let vocab = found.config().vocab;
    let planned = found.plan(&ids, output)?;
    let mut saved = match &args.save_logits {
        Some(path) => Some(LogitFile::create(path, &ids, vocab)?),
        None => None,
    };
    let opened = planned.load(output)?;
    let engine = &opened.engine;
    let mut session = engine.session()?;
    images.queue(&places, engine, &mut session, output)?;
    let mut last = Vec::new();
    let wanted = if saved.is_some() { Wanted::All } else { Wanted::Last };
    engine.forward(&mut session, &ids, wanted, &mut |position, logits| {
        if let Some(file) = &mut saved {
            file.row(logits).map_err(|error| EngineError::Sink(error.to_string()))?;
        }
        if position + 1 == ids.len() {
            last = logits.to_vec();
        }
        Ok(())
    })?;
    if let Some(file) = saved {
        file.finish()?;
    }
    let text = |id: u32| match &tokenizer {
        Ok(tokenizer) => tokenizer
            .token_bytes(id)
            .map_or_else(|_| String::new(), |bytes| String::from_utf8_lossy(bytes).into_owned()),
        Err(_) => String::new(),
    };
    let report = Report {
        prompt_tokens: ids.len(),
        vocab,
        top: top(&last, args.top, text),
        budget_bytes: opened.plan.budget_bytes,
        peak_rss_bytes: peak_rss_bytes(),
        paging: opened.paging(),
    };
    opened.learn()?;
    if output.json() {
        output.result(&report)?;
        return Ok(Exit::Done);
    }
    let mut stdout = output.text();
    writeln!(stdout, "{:>8}  {:>10}  {:>8}  text", "id", "logit", "prob")?;
    for candidate in &report.top {
        let Candidate { id, logit, prob, text } = candidate;
        writeln!(stdout, "{id:>8}  {logit:>10.4}  {prob:>8.6}  {text:?}")?;
    }
    Ok(Exit::Done)
}

/// The most likely tokens, the smaller id first on ties, with probabilities over the whole vocabulary.
fn top(logits: &[f32], count: usize, text: impl Fn(u32) -> String) -> Vec<Candidate> {
    let log_sum = log_sum_exp(logits);
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let rank = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let count = count.min(order.len());
    if count > 0 && count < order.len() {
        order.select_nth_unstable_by(count - 1, rank);
    }
    order.truncate(count);
    order.sort_unstable_by(rank);
    let candidate = |id: u32| {
        let logit = logits[id as usize];
        Candidate { id, text: text(id), logit, prob: (f64::from(logit) - log_sum).exp() }
    };
    order.into_iter().map(candidate).collect()
}

/// `ln Σ e^x` in f64.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + logits.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln()
}

/// A safetensors file of `logits` f32 [positions, vocab] and `ids` i32 [positions], written row by row.
struct LogitFile {
    file: AtomicFile,
    ids: Vec<u8>,
}

impl LogitFile {
    fn create(path: &Path, ids: &[u32], vocab: usize) -> Result<Self, Failure> {
        if path.is_dir() {
            return Err(FileError::io("replace", path)(io::ErrorKind::IsADirectory.into()).into());
        }
        let rows = ids.len();
        let logits =
            TensorInfo { dtype: Dtype::F32, shape: vec![rows, vocab], data_offsets: (0, 4 * rows * vocab) };
        let end = logits.data_offsets.1;
        let id_info =
            TensorInfo { dtype: Dtype::I32, shape: vec![rows], data_offsets: (end, end + 4 * rows) };
        let tensors = vec![("logits".to_owned(), logits), ("ids".to_owned(), id_info)];
        let metadata = Metadata::new(None, tensors).map_err(|error| Failure::internal(error.to_string()))?;
        let mut header =
            serde_json::to_vec(&metadata).map_err(|error| Failure::internal(error.to_string()))?;
        header.resize(header.len().next_multiple_of(8), b' ');
        let mut file = AtomicFile::create(path)?;
        file.append(&(header.len() as u64).to_le_bytes())?;
        file.append(&header)?;
        Ok(LogitFile { file, ids: ids.iter().flat_map(|&id| (id as i32).to_le_bytes()).collect() })
    }

    fn row(&mut self, logits: &[f32]) -> Result<(), FileError> {
        let bytes: Vec<u8> = logits.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.file.append(&bytes)
    }

    fn finish(mut self) -> Result<(), FileError> {
        self.file.append(&self.ids)?;
        self.file.commit()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_top_is_sorted_and_complete() {
        let logits = [0.0, 2.0, 1.0, 2.0];
        let ids = |count| top(&logits, count, |_| String::new()).iter().map(|c| c.id).collect::<Vec<_>>();
        assert!(ids(0).is_empty());
        assert_eq!(ids(1), [1]);
        assert_eq!(ids(3), [1, 3, 2]);
        assert_eq!(ids(9), [1, 3, 2, 0]);
        let sum: f64 = top(&logits, 4, |_| String::new()).iter().map(|c| c.prob).sum();
        assert!((sum - 1.0).abs() < 1e-12);
    }
}
