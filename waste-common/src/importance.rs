//! How much each input column of each routed expert matters: the mean square of what came in there while a text went
//! through the model. waste-run measures it, waste-convert weighs errors with it.
//!
//! A safetensors file with three tensors for each MoE layer L: `layers.L.tokens` (U32, [experts]: the tokens each expert
//! saw), `layers.L.input` (F32, [experts, width of the input]: for gate and up) and `layers.L.inner` (F32, [experts,
//! inner width]: for down). Its metadata say `format` = `waste-importance` and `version` = `1`.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::tensor::Dtype;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::checkpoint::{CheckpointError, Shard};
use crate::config::ModelConfig;
use crate::error::{Coded, Exit};
use crate::files::{AtomicFile, FileError};
use crate::tensors::ExpertKind;

const FORMAT: &str = "waste-importance";
const VERSION: &str = "1";

/// Why a file of importance cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ImportanceError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{path}: {problem}")]
    Invalid { path: String, problem: String },
}

impl Coded for ImportanceError {
    fn exit(&self) -> Exit {
        match self {
            ImportanceError::Checkpoint(error) => error.exit(),
            ImportanceError::File(error) => error.exit(),
            ImportanceError::Invalid { .. } => Exit::Data,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            ImportanceError::Checkpoint(CheckpointError::Read(error)) => error.code(),
            ImportanceError::File(error) => error.code(),
            ImportanceError::Checkpoint(_) | ImportanceError::Invalid { .. } => "invalid_importance",
        }
    }
}

/// What a layer's experts are given, summed up.
#[derive(Clone, Debug, PartialEq)]
pub struct InputSquares {
    input_width: usize,
    inner_width: usize,
    tokens: Vec<u32>,
    /// [experts, input]
    input: Vec<f32>,
    /// [experts, inner]
    inner: Vec<f32>,
}

impl InputSquares {
    /// Of so many experts, before any token.
    pub fn new(experts: usize, input_width: usize, inner_width: usize) -> Self {
        InputSquares {
            input_width,
            inner_width,
            tokens: vec![0; experts],
            input: vec![0.0; experts * input_width],
            inner: vec![0.0; experts * inner_width],
        }
    }

    /// Adds the tokens that visit an expert: `[tokens, input]` for gate and up, `[tokens, inner]` for down.
    pub fn add(&mut self, expert: usize, input: &[f32], inner: &[f32]) {
        fn squares(sums: &mut [f32], rows: &[f32]) {
            for row in rows.chunks_exact(sums.len()) {
                sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x * x);
            }
        }
        let tokens = input.len() / self.input_width;
        self.tokens[expert] = self.tokens[expert].saturating_add(u32::try_from(tokens).unwrap_or(u32::MAX));
        squares(&mut self.input[expert * self.input_width..][..self.input_width], input);
        squares(&mut self.inner[expert * self.inner_width..][..self.inner_width], inner);
    }
}

/// Writes what was measured, by layer, durably.
///
/// # Errors
/// The disk refuses.
pub fn write(path: &Path, layers: &BTreeMap<u16, InputSquares>) -> Result<(), ImportanceError> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": FORMAT, "version": VERSION}));
    let mut end = 0u64;
    for (layer, squares) in layers {
        let experts = squares.tokens.len();
        let parts = [
            ("tokens", "U32", vec![experts]),
            ("input", "F32", vec![experts, squares.input_width]),
            ("inner", "F32", vec![experts, squares.inner_width]),
        ];
        for (part, dtype, shape) in parts {
            let start = end;
            end += 4 * shape.iter().product::<usize>() as u64;
            let info = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
            header.insert(format!("layers.{layer}.{part}"), info);
        }
    }
    let mut header = Value::from(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = AtomicFile::create(path)?;
    file.append(&(header.len() as u64).to_le_bytes())?;
    file.append(&header)?;
    for squares in layers.values() {
        for tokens in &squares.tokens {
            file.append(&tokens.to_le_bytes())?;
        }
        for (sums, width) in [(&squares.input, squares.input_width), (&squares.inner, squares.inner_width)] {
            for (sums, tokens) in sums.chunks_exact(width.max(1)).zip(&squares.tokens) {
                for sum in sums {
                    file.append(&(sum / (*tokens).max(1) as f32).to_le_bytes())?;
                }
            }
        }
    }
    Ok(file.commit()?)
}

/// A file of importance.
pub struct Importance {
    file: Shard,
}

/// What it says of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerImportance {
    /// The tokens each expert saw.
    pub tokens: Vec<u32>,
    input: Vec<f32>,
    inner: Vec<f32>,
}

impl LayerImportance {
    /// The mean squares of an expert's columns, of the input of one of its matrices.
    pub fn columns(&self, expert: usize, kind: ExpertKind) -> &[f32] {
        let values = match kind {
            ExpertKind::Gate | ExpertKind::Up => &self.input,
            ExpertKind::Down => &self.inner,
        };
        let width = values.len() / self.tokens.len().max(1);
        &values[expert * width..][..width]
    }
}

impl Importance {
    /// Opens a file, and looks at nothing but its header.
    ///
    /// # Errors
    /// It is something else, or of another version.
    pub fn open(path: &Path) -> Result<Self, ImportanceError> {
        let found = Importance { file: Shard::open(path)? };
        let metadata = found.file.header().metadata().clone().unwrap_or_default();
        let says = |key: &str| metadata.get(key).map(String::as_str);
        match (says("format"), says("version")) {
            (Some(FORMAT), Some(VERSION)) => Ok(found),
            (Some(FORMAT), version) => {
                let version = version.unwrap_or("none");
                Err(found.invalid(format!("its version is {version}; this tool reads {VERSION}")))
            }
            _ => {
                Err(found
                    .invalid("it is no file of importance (waste-run perplexity --save-importance)".into()))
            }
        }
    }

    /// SHA-256 of the file.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn sha256(&self) -> Result<[u8; 32], ImportanceError> {
        let mut sha = Sha256::new();
        let mut piece = vec![0; 1 << 20];
        let mut at = 0;
        while at < self.file.bytes() {
            let count = (self.file.bytes() - at).min(piece.len() as u64) as usize;
            self.file.read(at, &mut piece[..count])?;
            sha.update(&piece[..count]);
            at += count as u64;
        }
        Ok(sha.finalize().into())
    }

    /// Checks that it is of a model of this shape.
    ///
    /// # Errors
    /// A layer is missing, or of another shape.
    pub fn check(&self, config: &ModelConfig) -> Result<(), ImportanceError> {
        for layer in config.moe_layers() {
            let Some(moe) = config.moe_of(layer) else { continue };
            self.offset(layer, "tokens", Dtype::U32, &[moe.experts])?;
            self.offset(layer, "input", Dtype::F32, &[moe.experts, moe.input])?;
            self.offset(layer, "inner", Dtype::F32, &[moe.experts, moe.intermediate])?;
        }
        Ok(())
    }

    /// Reads a layer of a model of this shape.
    ///
    /// # Errors
    /// As for [`check`](Self::check), or a value is no mean square.
    pub fn layer(&self, config: &ModelConfig, layer: usize) -> Result<LayerImportance, ImportanceError> {
        let (experts, input, inner) = match config.moe_of(layer) {
            Some(moe) => (moe.experts, moe.input, moe.intermediate),
            None => (0, 0, 0),
        };
        let words = |part: &str, dtype, shape: &[usize]| {
            let offset = self.offset(layer, part, dtype, shape)?;
            let mut bytes = vec![0; 4 * shape.iter().product::<usize>()];
            self.file.read(offset, &mut bytes)?;
            Ok::<_, ImportanceError>(bytes.as_chunks::<4>().0.to_vec())
        };
        let floats =
            |part: &str, width: usize| {
                let words = words(part, Dtype::F32, &[experts, width])?;
                let values: Vec<f32> = words.into_iter().map(f32::from_le_bytes).collect();
                match values.iter().find(|value| !(value.is_finite() && **value >= 0.0)) {
                    None => Ok(values),
                    Some(value) => Err(self
                        .invalid(format!("`layers.{layer}.{part}` holds {value}, which is no mean square"))),
                }
            };
        let tokens = words("tokens", Dtype::U32, &[experts])?.into_iter().map(u32::from_le_bytes).collect();
        Ok(LayerImportance { tokens, input: floats("input", input)?, inner: floats("inner", inner)? })
    }

    /// Where a tensor of the wanted type and shape lies.
    fn offset(
        &self,
        layer: usize,
        part: &str,
        dtype: Dtype,
        shape: &[usize],
    ) -> Result<u64, ImportanceError> {
        let name = format!("layers.{layer}.{part}");
        let Some(info) = self.file.info(&name) else {
            return Err(self.invalid(format!("`{name}` is missing: it is of another model")));
        };
        if info.dtype != dtype || info.shape != shape {
            let found = format!("{:?} {:?}", info.dtype, info.shape);
            return Err(self.invalid(format!("`{name}` is {found}; this model needs {dtype:?} {shape:?}")));
        }
        Ok(info.offset)
    }

    fn invalid(&self, problem: String) -> ImportanceError {
        ImportanceError::Invalid { path: self.file.path().display().to_string(), problem }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn config() -> ModelConfig {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/models/k3-tales/config.json");
        let config = crate::json::read(Path::new(file), 1 << 20).unwrap();
        ModelConfig::from_checkpoint(&config).unwrap()
    }

    fn measured(config: &ModelConfig) -> BTreeMap<u16, InputSquares> {
        let layer = |layer: usize| {
            let moe = config.moe_of(layer).unwrap();
            let mut squares = InputSquares::new(moe.experts, moe.input, moe.intermediate);
            squares.add(1, &vec![2.0; 3 * moe.input], &vec![layer as f32; 3 * moe.intermediate]);
            squares.add(1, &vec![0.0; moe.input], &vec![0.0; moe.intermediate]);
            (layer as u16, squares)
        };
        config.moe_layers().map(layer).collect()
    }

    #[test]
    fn what_was_measured_is_read_back_as_means() {
        let dir = tempfile::tempdir().unwrap();
        let (path, config) = (dir.path().join("i.safetensors"), config());
        write(&path, &measured(&config)).unwrap();
        let file = Importance::open(&path).unwrap();
        file.check(&config).unwrap();
        let first = config.moe_layers().next().unwrap();
        let layer = file.layer(&config, first).unwrap();
        assert_eq!(layer.tokens[..3], [0, 4, 0]);
        assert!(layer.columns(1, ExpertKind::Gate).iter().all(|x| *x == 3.0));
        let inner = 0.75 * (first * first) as f32;
        assert!(layer.columns(1, ExpertKind::Down).iter().all(|x| *x == inner));
        assert!(layer.columns(0, ExpertKind::Up).iter().all(|x| *x == 0.0));
        // Any reader of the format opens it.
        let content = std::fs::read(&path).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&content).unwrap();
        assert_eq!(tensors.len(), 3 * config.moe_layers().count());
        assert_eq!(file.sha256().unwrap(), <[u8; 32]>::from(Sha256::digest(&content)));
    }

    #[test]
    fn what_is_of_another_model_or_no_mean_square_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (path, config) = (dir.path().join("i.safetensors"), config());
        let mut layers = measured(&config);
        let first = config.moe_layers().next().unwrap();
        let last = layers.pop_last().unwrap();
        write(&path, &layers).unwrap();
        let error = Importance::open(&path).unwrap().check(&config).unwrap_err();
        assert_eq!((error.exit(), error.code()), (Exit::Data, "invalid_importance"));
        layers.insert(last.0, InputSquares::new(3, 8, 8));
        write(&path, &layers).unwrap();
        assert!(Importance::open(&path).unwrap().check(&config).is_err());
        layers = measured(&config);
        layers.get_mut(&(first as u16)).unwrap().input[5] = f32::NAN;
        write(&path, &layers).unwrap();
        let file = Importance::open(&path).unwrap();
        file.check(&config).unwrap();
        assert!(file.layer(&config, first).is_err());
        let shard = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../tests/models/k3-tales/model-00001-of-000004.safetensors"
        );
        assert!(Importance::open(Path::new(shard)).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        /// A damaged file is refused or read, but never brings anything down.
        #[test]
        fn damage_never_panics(at in 0usize..4000, byte: u8, cut in proptest::option::of(0usize..4000)) {
            let dir = tempfile::tempdir().unwrap();
            let (path, config) = (dir.path().join("i.safetensors"), config());
            let mut layers = measured(&config);
            while layers.len() > 1 {
                layers.pop_last();
            }
            write(&path, &layers).unwrap();
            let mut content = std::fs::read(&path).unwrap();
            content[at] = byte;
            content.truncate(cut.unwrap_or(content.len()));
            std::fs::write(&path, &content).unwrap();
            if let Ok(file) = Importance::open(&path) {
                let _ = file.check(&config);
                let _ = file.layer(&config, usize::from(*layers.keys().next().unwrap()));
            }
        }
    }
}
