//! Routing traces: which experts each token used, layer by layer. One JSON line a token,
//! `{"tok": 0, "layers": [[36, 38, …], …]}`.

use std::fmt::Write as _;
use std::io::BufRead;
use std::path::Path;

use serde::Deserialize;
use waste_common::cli::Failure;
use waste_engine::{Engine, EngineError, Session, Trace as EngineTrace, Wanted};

use crate::speed::measure::Workload;

/// Longest line that is read.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// Most expert ids that are kept.
const IDS_MAX: usize = 1 << 27;
/// Experts a layer can have.
const EXPERTS_MAX: u32 = 1 << 16;

/// A trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// [tokens][layers][experts]
    pub tokens: Vec<Vec<Vec<u32>>>,
    /// Experts of a layer: one more than the highest id.
    pub experts: usize,
    /// MoE layers.
    pub layers: usize,
    /// Most experts a token uses in a layer.
    pub top_k: usize,
}

#[derive(Deserialize)]
struct Line {
    layers: Vec<Vec<u32>>,
}

impl Trace {
    /// Reads a trace.
    ///
    /// # Errors
    /// The file cannot be read, or a line is not what it should be (exit 3).
    pub fn open(path: &Path) -> Result<Trace, Failure> {
        let fail = |problem: String| Failure::data("invalid_trace", format!("{}: {problem}", path.display()));
        let file = std::fs::File::open(path).map_err(|error| fail(format!("cannot be read: {error}")))?;
        let mut reader = std::io::BufReader::new(file);
        let mut trace = Trace::default();
        let mut ids = 0usize;
        for number in 1.. {
            let mut text = Vec::new();
            let mut limited = std::io::Read::take(&mut reader, LINE_BYTES_MAX + 1);
            limited.read_until(b'\n', &mut text).map_err(|error| fail(format!("line {number}: {error}")))?;
            if text.is_empty() {
                break;
            }
            if text.len() as u64 > LINE_BYTES_MAX {
                return Err(fail(format!("line {number} is longer than {LINE_BYTES_MAX} bytes")));
            }
            if text.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let line: Line = serde_json::from_slice(&text).map_err(|error| {
                fail(format!("line {number}: expected {{\"layers\": [[ids]…]}}: {error}"))
            })?;
            if !trace.tokens.is_empty() && line.layers.len() != trace.layers {
                return Err(fail(format!(
                    "line {number} has {} layers, those before it {}",
                    line.layers.len(),
                    trace.layers
                )));
            }
            trace.layers = line.layers.len();
            for layer in &line.layers {
                if let Some(id) = layer.iter().find(|&&id| id >= EXPERTS_MAX) {
                    return Err(fail(format!("line {number} has expert {id}; ids are below {EXPERTS_MAX}")));
                }
                trace.top_k = trace.top_k.max(layer.len());
                trace.experts = trace.experts.max(layer.iter().map(|&id| id as usize + 1).max().unwrap_or(0));
                ids += layer.len();
            }
            if ids > IDS_MAX {
                return Err(fail(format!("it has more than {IDS_MAX} expert ids")));
            }
            trace.tokens.push(line.layers);
        }
        if ids == 0 {
            return Err(fail("it has no expert ids".to_owned()));
        }
        Ok(trace)
    }

    /// The share of a token's experts that the token before it used too; `None` for a single token.
    pub fn reuse(&self) -> Option<f64> {
        let (mut reused, mut all) = (0u64, 0u64);
        for pair in self.tokens.windows(2) {
            for (before, now) in pair[0].iter().zip(&pair[1]) {
                all += now.len() as u64;
                reused += now.iter().filter(|id| before.contains(id)).count() as u64;
            }
        }
        (all > 0).then(|| reused as f64 / all as f64)
    }
}

/// Runs the workload and returns the lines of its trace.
///
/// # Errors
/// As [`Engine::forward`].
pub fn record(engine: &Engine, session: &mut Session, work: &Workload) -> Result<String, EngineError> {
    session.reset();
    let mut trace = EngineTrace::default();
    let mut ignore = |_, _: &[f32]| Ok(());
    if !work.prompt.is_empty() {
        engine.forward_traced(session, &work.prompt, Wanted::Last, &mut ignore, Some(&mut trace))?;
    }
    for token in work.decode.chunks(1) {
        engine.forward_traced(session, token, Wanted::Last, &mut ignore, Some(&mut trace))?;
        trace.hidden.clear();
        trace.last.clear();
    }
    let tokens = work.prompt.len() + work.decode.len();
    let mut lines = String::new();
    for token in 0..tokens {
        let layers: Vec<&[u32]> = trace
            .routes
            .values()
            .map(|ids| {
                let top_k = ids.len() / tokens;
                &ids[token * top_k..(token + 1) * top_k]
            })
            .collect();
        // Writing to a string cannot fail.
        let _ = writeln!(lines, "{}", serde_json::json!({"tok": token, "layers": layers}));
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Trace, Failure> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        Trace::open(file.path())
    }

    #[test]
    fn traces_are_read_strictly() {
        let trace = read("{\"tok\":0,\"layers\":[[1,2],[3]]}\n\n{\"layers\":[[2,4],[5]]}").unwrap();
        assert_eq!((trace.layers, trace.experts, trace.top_k, trace.tokens.len()), (2, 6, 2, 2));
        assert_eq!(trace.reuse(), Some(1.0 / 3.0));
        for wrong in ["", "{}", "[1]", "{\"layers\":[[-1]]}", "{\"layers\":[[70000]]}", "{\"layers\":[]}"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        assert!(read("{\"layers\":[[1]]}\n{\"layers\":[[1],[2]]}").is_err());
    }

    #[test]
    fn the_real_trace_has_the_published_reuse() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/traces/");
        let trace = Trace::open(Path::new(&format!("{dir}kimi-linear-48b-300tok.jsonl"))).unwrap();
        assert_eq!((trace.layers, trace.top_k, trace.tokens.len()), (26, 8, 300));
        assert!((trace.reuse().unwrap() - 0.336).abs() < 0.001);
    }
}
