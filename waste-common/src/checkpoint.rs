//! A checkpoint in Hugging Face layout: `config.json`, an index, safetensors shards.
//!
//! Shards are opened and their headers checked when the first of their tensors is asked for; tensor data is read
//! by position, tensor by tensor, and widened to f32. Nothing is kept in memory but names and offsets.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

pub use safetensors::tensor::Dtype;
use safetensors::tensor::Metadata;
use serde_json::Value;

use crate::config::ModelConfig;
use crate::container::integrity::sha256_hex;
use crate::error::{Coded, Exit};
use crate::io::{PlainFile, ReadError};
use crate::json::{self, INDEX_BYTES_MAX, JsonError, MANIFEST_BYTES_MAX};
use crate::quant::{half, mxfp4};
use crate::tensors::{self, ExpertKind};

/// Largest safetensors header that is read (K3's are about 1 MB).
const HEADER_BYTES_MAX: u64 = 100 << 20;
const INDEX_FILE: &str = "model.safetensors.index.json";
const SINGLE_FILE: &str = "model.safetensors";

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CheckpointError {
    #[error(transparent)]
    Json(#[from] JsonError),
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("{} holds neither {INDEX_FILE} nor {SINGLE_FILE}", dir.display())]
    NoWeights { dir: PathBuf },
    #[error("{}: {problem}", path.display())]
    Index { path: PathBuf, problem: String },
    #[error("{}: {problem}", path.display())]
    Shard { path: PathBuf, problem: String },
    #[error("the checkpoint has no tensor `{name}`")]
    MissingTensor { name: String },
    #[error("tensor `{name}` in {}: {problem}", path.display())]
    Tensor { name: String, path: PathBuf, problem: String },
}

impl Coded for CheckpointError {
    fn exit(&self) -> Exit {
        match self {
            CheckpointError::Json(error) => error.exit(),
            CheckpointError::Read(error) => error.exit(),
            _ => Exit::Data,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            CheckpointError::Json(error) => error.code(),
            CheckpointError::Read(error) => error.code(),
            CheckpointError::MissingTensor { .. } => "missing_tensor",
            _ => "invalid_checkpoint",
        }
    }
}

/// Where a tensor lies and what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Stored type.
    pub dtype: Dtype,
    /// Stored shape.
    pub shape: Vec<usize>,
    /// First byte in the shard file.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
}

impl TensorInfo {
    /// Rows: the product of all dimensions but the last (1 for a vector).
    pub fn rows(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, head)| head.iter().product())
    }

    /// Whether [`Checkpoint::read_f32`] can widen it.
    pub fn is_float(&self) -> bool {
        matches!(self.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32)
    }

    /// Elements of a row: the last dimension.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

/// The tensors that hold one matrix of an expert.
enum ExpertTensors {
    Plain { name: String },
    Packed { packed: String, scale: String, rows: usize, cols: usize },
}

/// An opened safetensors file.
pub(crate) struct Shard {
    file: PlainFile,
    data_start: u64,
    header: Metadata,
}

/// An opened checkpoint directory.
pub struct Checkpoint {
    dir: PathBuf,
    config: Value,
    shard_names: Vec<String>,
    shards: Vec<OnceLock<Shard>>,
    /// Tensor name → number of its shard.
    tensors: HashMap<Box<str>, u16>,
}

impl Checkpoint {
    /// Opens a directory: reads its configuration and index, no shard yet.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let config = json::read(&dir.join("config.json"), MANIFEST_BYTES_MAX)?;
        let (shard_names, tensors) = if dir.join(INDEX_FILE).exists() {
            read_index(&dir.join(INDEX_FILE))?
        } else if dir.join(SINGLE_FILE).exists() {
            let shard = Shard::open(&dir.join(SINGLE_FILE))?;
            let names = shard.header.offset_keys();
            (vec![SINGLE_FILE.to_owned()], names.into_iter().map(|name| (name.into(), 0)).collect())
        } else {
            return Err(CheckpointError::NoWeights { dir: dir.to_owned() });
        };
        let shards = shard_names.iter().map(|_| OnceLock::new()).collect();
        Ok(Checkpoint { dir: dir.to_owned(), config, shard_names, shards, tensors })
    }

    /// Whether a directory looks like a checkpoint rather than a container.
    pub fn is_checkpoint(dir: &Path) -> bool {
        dir.join("config.json").exists() && (dir.join(INDEX_FILE).exists() || dir.join(SINGLE_FILE).exists())
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The whole of `config.json`.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// Names of all shard files.
    pub fn shard_names(&self) -> &[String] {
        &self.shard_names
    }

    /// Bytes of all shard files that exist.
    pub fn bytes(&self) -> u64 {
        let size = |name| std::fs::metadata(self.dir.join(name)).map_or(0, |meta| meta.len());
        self.shard_names.iter().map(size).sum()
    }

    /// A name for this checkpoint that a change of its configuration or of a file's size changes (not one of weights
    /// alone: that would be reading them all): a SHA-256 in lower-case hex.
    pub fn fingerprint(&self) -> String {
        let mut text = self.config.to_string();
        for name in &self.shard_names {
            let bytes = std::fs::metadata(self.dir.join(name)).map_or(0, |meta| meta.len());
            text.push_str(&format!("\n{name} {bytes}"));
        }
        sha256_hex(text.as_bytes())
    }

    /// Names of all tensors, in no particular order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(|name| &**name)
    }

    /// Whether the index names a tensor.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The file that holds a tensor.
    pub fn shard_of(&self, name: &str) -> Option<&str> {
        self.tensors.get(name).map(|&shard| &*self.shard_names[shard as usize])
    }

    /// Type, shape and place of a tensor.
    pub fn info(&self, name: &str) -> Result<TensorInfo, CheckpointError> {
        self.locate(name).map(|(info, _)| info)
    }

    /// A tensor's bytes as stored.
    pub fn read_bytes(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let (info, shard) = self.locate(name)?;
        // The header was checked against the file's real size, so this allocates no more than the file holds.
        let mut bytes = vec![0; info.bytes as usize];
        shard.file.read_exact_at(info.offset, &mut bytes)?;
        Ok(bytes)
    }

    /// A whole bf16, f16 or f32 tensor, widened to f32.
    pub fn read_f32(&self, name: &str) -> Result<Vec<f32>, CheckpointError> {
        let rows = self.info(name)?.rows();
        self.read_rows_f32(name, 0, rows)
    }

    /// Rows `first .. first + count` of a bf16, f16 or f32 tensor, widened to f32.
    pub fn read_rows_f32(&self, name: &str, first: usize, count: usize) -> Result<Vec<f32>, CheckpointError> {
        let (info, shard) = self.locate(name)?;
        let fail = |problem| CheckpointError::Tensor { name: name.to_owned(), path: shard.path(), problem };
        if first.checked_add(count).is_none_or(|end| end > info.rows()) {
            return Err(fail(format!("rows {first} + {count} of {}", info.rows())));
        }
        let width = match info.dtype {
            Dtype::BF16 | Dtype::F16 => 2,
            Dtype::F32 => 4,
            other => return Err(fail(format!("its type {other:?} is none of BF16, F16, F32"))),
        };
        let row_bytes = info.cols() * width;
        let mut bytes = vec![0; count * row_bytes];
        shard.file.read_exact_at(info.offset + (first * row_bytes) as u64, &mut bytes)?;
        let pairs = || bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
        Ok(match info.dtype {
            Dtype::BF16 => pairs().map(half::bf16_to_f32).collect(),
            Dtype::F16 => pairs().map(half::f16_to_f32).collect(),
            _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        })
    }

    /// Checks that a matrix of a routed expert is there in the right type and shape; nothing but headers is read.
    pub fn check_expert(
        &self,
        config: &ModelConfig,
        layer: usize,
        expert: usize,
        kind: ExpertKind,
    ) -> Result<(), CheckpointError> {
        self.locate_expert(config, layer, expert, kind).map(drop)
    }

    /// One matrix of a routed expert, [rows, cols] in f32, from MXFP4 (`weight_packed`, `weight_scale`) or a plain
    /// `weight`; which one it is, the index decides.
    pub fn read_expert(
        &self,
        config: &ModelConfig,
        layer: usize,
        expert: usize,
        kind: ExpertKind,
    ) -> Result<Vec<f32>, CheckpointError> {
        let rows = match self.locate_expert(config, layer, expert, kind)? {
            ExpertTensors::Plain { name } => self.info(&name)?.rows(),
            ExpertTensors::Packed { rows, .. } => rows,
        };
        self.read_expert_rows(config, layer, expert, kind, 0, rows)
    }

    /// Rows `first .. first + count` of a matrix of a routed expert; see [`Checkpoint::read_expert`].
    pub fn read_expert_rows(
        &self,
        config: &ModelConfig,
        layer: usize,
        expert: usize,
        kind: ExpertKind,
        first: usize,
        count: usize,
    ) -> Result<Vec<f32>, CheckpointError> {
        let (packed, scale, rows, cols) = match self.locate_expert(config, layer, expert, kind)? {
            ExpertTensors::Plain { name } => return self.read_rows_f32(&name, first, count),
            ExpertTensors::Packed { packed, scale, rows, cols } => (packed, scale, rows, cols),
        };
        if first.checked_add(count).is_none_or(|end| end > rows) {
            return Err(self.tensor_error(&packed, format!("rows {first} + {count} of {rows}")));
        }
        let read = |name: &str, row_bytes: usize| {
            let (info, shard) = self.locate(name)?;
            let mut bytes = vec![0; count * row_bytes];
            shard.file.read_exact_at(info.offset + (first * row_bytes) as u64, &mut bytes)?;
            Ok::<_, CheckpointError>(bytes)
        };
        let (code_bytes, scale_bytes) = (mxfp4::row_bytes(cols), mxfp4::row_scales(cols));
        let (codes, scales) = (read(&packed, code_bytes)?, read(&scale, scale_bytes)?);
        let mut values = vec![0.0; count * cols];
        let rows = codes.chunks_exact(code_bytes).zip(scales.chunks_exact(scale_bytes));
        for (out, (codes, scales)) in values.chunks_exact_mut(cols).zip(rows) {
            mxfp4::decode_row(codes, scales, out);
        }
        if values.iter().any(|value| !value.is_finite()) {
            return Err(self.tensor_error(&scale, "it decodes to values that are not finite".to_owned()));
        }
        Ok(values)
    }

    fn locate_expert(
        &self,
        config: &ModelConfig,
        layer: usize,
        expert: usize,
        kind: ExpertKind,
    ) -> Result<ExpertTensors, CheckpointError> {
        let base = tensors::expert(config, layer, expert, kind);
        let moe = config.moe.as_ref().ok_or_else(|| CheckpointError::MissingTensor { name: base.clone() })?;
        let (rows, cols) = match kind {
            ExpertKind::Gate | ExpertKind::Up => (moe.intermediate, moe.input),
            ExpertKind::Down => (moe.input, moe.intermediate),
        };
        let packed = format!("{base}.weight_packed");
        if !self.contains(&packed) {
            let name = format!("{base}.weight");
            self.demand_shape(&name, &[rows, cols], None)?;
            return Ok(ExpertTensors::Plain { name });
        }
        let scale = format!("{base}.weight_scale");
        if cols % mxfp4::BLOCK != 0 {
            let problem = format!("{cols} columns are no multiple of MXFP4's group of {}", mxfp4::BLOCK);
            return Err(self.tensor_error(&packed, problem));
        }
        self.demand_shape(&packed, &[rows, cols / 2], Some(Dtype::U8))?;
        self.demand_shape(&scale, &[rows, cols / mxfp4::BLOCK], Some(Dtype::U8))?;
        Ok(ExpertTensors::Packed { packed, scale, rows, cols })
    }

    fn demand_shape(&self, name: &str, shape: &[usize], dtype: Option<Dtype>) -> Result<(), CheckpointError> {
        let info = self.info(name)?;
        if info.shape != shape || dtype.is_some_and(|dtype| dtype != info.dtype) {
            let expected = dtype.map_or(String::new(), |dtype| format!("{dtype:?} "));
            let problem = format!("it is {:?} {:?}; expected {expected}{shape:?}", info.dtype, info.shape);
            return Err(self.tensor_error(name, problem));
        }
        Ok(())
    }

    fn tensor_error(&self, name: &str, problem: String) -> CheckpointError {
        let path = self.dir.join(self.shard_of(name).unwrap_or_default());
        CheckpointError::Tensor { name: name.to_owned(), path, problem }
    }

    fn locate(&self, name: &str) -> Result<(TensorInfo, &Shard), CheckpointError> {
        let missing = || CheckpointError::MissingTensor { name: name.to_owned() };
        let number = *self.tensors.get(name).ok_or_else(missing)? as usize;
        let shard = match self.shards[number].get() {
            Some(shard) => shard,
            None => {
                let opened = Shard::open(&self.dir.join(&self.shard_names[number]))?;
                self.shards[number].get_or_init(|| opened)
            }
        };
        let info = shard.info(name).ok_or_else(|| CheckpointError::Tensor {
            name: name.to_owned(),
            path: shard.path(),
            problem: "the index places it in this file, which does not hold it".to_owned(),
        })?;
        Ok((info, shard))
    }
}

impl Shard {
    /// Opens a safetensors file and checks its header against its size.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let fail = |problem| CheckpointError::Shard { path: path.to_owned(), problem };
        let file = PlainFile::open(path)?;
        let mut length = [0; 8];
        if file.len() < 8 {
            return Err(fail(format!("it has {} bytes, too few for a safetensors file", file.len())));
        }
        file.read_exact_at(0, &mut length)?;
        let length = u64::from_le_bytes(length);
        if length > HEADER_BYTES_MAX || length > file.len() - 8 {
            return Err(fail(format!("its header claims {length} bytes in a file of {}", file.len())));
        }
        let mut header = vec![0; length as usize];
        file.read_exact_at(8, &mut header)?;
        let header: Metadata = serde_json::from_slice(&header)
            .map_err(|error| fail(format!("its header is invalid: {error}")))?;
        let data_start = 8 + length;
        let expected = data_start + header.data_len() as u64;
        if expected != file.len() {
            return Err(fail(format!(
                "its header describes {expected} bytes, the file has {}: download it again",
                file.len()
            )));
        }
        Ok(Shard { file, data_start, header })
    }

    /// The file.
    pub fn path(&self) -> PathBuf {
        self.file.path().to_owned()
    }

    /// What it says of itself.
    pub fn header(&self) -> &Metadata {
        &self.header
    }

    /// Type, shape and place of a tensor, if it is here.
    pub fn info(&self, name: &str) -> Option<TensorInfo> {
        let info = self.header.info(name)?;
        let (start, end) = info.data_offsets;
        Some(TensorInfo {
            dtype: info.dtype,
            shape: info.shape.clone(),
            offset: self.data_start + start as u64,
            bytes: (end - start) as u64,
        })
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.file.len()
    }

    /// Reads bytes of the file.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        Ok(self.file.read_exact_at(offset, bytes)?)
    }
}

type Index = (Vec<String>, HashMap<Box<str>, u16>);

fn read_index(path: &Path) -> Result<Index, CheckpointError> {
    let content = json::read_bounded(path, INDEX_BYTES_MAX)?;
    let index: IndexFile = serde_json::from_slice(&content)
        .map_err(|source| JsonError::Syntax { path: path.to_owned(), source })?;
    let fail = |problem| CheckpointError::Index { path: path.to_owned(), problem };
    for name in &index.weight_map.shards {
        if let Err(problem) = crate::container::check_file_name(name) {
            return Err(fail(format!("the shard name {name:?} is refused: {problem}")));
        }
    }
    if index.weight_map.tensors.is_empty() {
        return Err(fail("it names no tensor".to_owned()));
    }
    Ok((index.weight_map.shards, index.weight_map.tensors))
}

#[derive(serde::Deserialize)]
struct IndexFile {
    weight_map: WeightMap,
}

/// The index's map with shard names stored once: K3's has 497,220 entries.
#[derive(Default)]
struct WeightMap {
    shards: Vec<String>,
    tensors: HashMap<Box<str>, u16>,
}

impl<'de> serde::Deserialize<'de> for WeightMap {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = WeightMap;

            fn expecting(&self, formatter: &mut std::fmt::Formatter) -> std::fmt::Result {
                formatter.write_str("a map from tensor name to file name")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                use serde::de::Error;
                let mut numbers: HashMap<String, u16> = HashMap::new();
                let mut result = WeightMap::default();
                while let Some((tensor, shard)) = map.next_entry::<Box<str>, String>()? {
                    let number = match numbers.get(&shard) {
                        Some(&number) => number,
                        None => {
                            let number = u16::try_from(numbers.len())
                                .map_err(|_| A::Error::custom("more than 65536 shards"))?;
                            numbers.insert(shard.clone(), number);
                            result.shards.push(shard);
                            number
                        }
                    };
                    if result.tensors.insert(tensor, number).is_some() {
                        return Err(A::Error::custom("a tensor is named twice"));
                    }
                }
                Ok(result)
            }
        }
        deserializer.deserialize_map(Visitor)
    }
}
