//! The entries of a manifest: what they hold, and the bounds each must keep by itself.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::quant::vq::{self, IndexBits};
use crate::quant::{Encoded, GROUP, QuantError, half, q3g, q4g, q8g, scale_count};

/// Name of an expert format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExpertFmt {
    /// Bytes, three stages as a rule.
    #[serde(rename = "VQ3R")]
    Vq3r,
    /// Bytes, two stages as a rule.
    #[serde(rename = "VQ2R")]
    Vq2r,
    /// Four 6-bit stages.
    #[serde(rename = "VQ4P")]
    Vq4p,
}

impl ExpertFmt {
    /// The fmt byte a writer puts into record headers.
    pub fn code(self) -> u8 {
        match self {
            ExpertFmt::Vq3r => 4,
            ExpertFmt::Vq2r => 5,
            ExpertFmt::Vq4p => 8,
        }
    }

    /// The name in the manifest.
    pub fn name(self) -> &'static str {
        match self {
            ExpertFmt::Vq3r => "VQ3R",
            ExpertFmt::Vq2r => "VQ2R",
            ExpertFmt::Vq4p => "VQ4P",
        }
    }
}

/// `expert_quant`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExpertQuant {
    /// The format's name; the numbers below decide.
    pub fmt: ExpertFmt,
    /// Codebooks summed per vector, 1–8.
    pub stages: u32,
    /// Weights per vector, 8.
    pub vec_dim: u32,
    /// Entries per codebook, 1–256.
    pub entries: u32,
    /// Rows per index block, 64.
    pub index_block: u32,
    /// 8, or 6 with four stages of at most 64 entries.
    #[serde(default = "eight")]
    pub index_bits: u32,
    /// Descriptive only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_weight: Option<f64>,
    /// Further keys.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

fn eight() -> u32 {
    8
}

impl ExpertQuant {
    /// The usual description of `fmt` with so many stages and entries.
    pub fn new(fmt: ExpertFmt, stages: u32, entries: u32) -> Self {
        let index_bits = if fmt == ExpertFmt::Vq4p { 6 } else { 8 };
        ExpertQuant {
            fmt,
            stages,
            vec_dim: vq::VEC_DIM as u32,
            entries,
            index_block: vq::ROW_BLOCK as u32,
            index_bits,
            bits_per_weight: Some(f64::from(stages * index_bits) / vq::VEC_DIM as f64),
            extra: Map::new(),
        }
    }

    /// The index width; anything but 6 reads as 8 (other values are refused on parsing).
    pub fn bits(&self) -> IndexBits {
        if self.index_bits == 6 { IndexBits::Six } else { IndexBits::Eight }
    }

    /// Codebooks a layer owns: one per matrix kind and stage.
    pub fn codebooks_per_layer(&self) -> u32 {
        3 * self.stages
    }

    pub(super) fn check(&self) -> Result<(), (&'static str, String)> {
        if self.index_block as usize != vq::ROW_BLOCK {
            return Err(("index_block", format!("{}; only 64 is supported", self.index_block)));
        }
        if self.vec_dim as usize != vq::VEC_DIM {
            return Err(("vec_dim", format!("{}; only 8 is supported", self.vec_dim)));
        }
        if self.stages < 1 || self.stages as usize > vq::STAGES_MAX {
            return Err(("stages", format!("{}; 1 to 8 are supported", self.stages)));
        }
        if self.entries < 1 || self.entries as usize > vq::ENTRIES_MAX {
            return Err(("entries", format!("{}; 1 to 256 are supported", self.entries)));
        }
        match (self.index_bits, self.fmt) {
            (8, ExpertFmt::Vq3r | ExpertFmt::Vq2r) => Ok(()),
            (6, ExpertFmt::Vq4p) if self.stages == 4 && self.entries <= 64 => Ok(()),
            (6, ExpertFmt::Vq4p) => Err((
                "index_bits",
                format!("6 needs 4 stages of at most 64 entries, not {} of {}", self.stages, self.entries),
            )),
            (bits, fmt) => Err(("index_bits", format!("{bits} does not go with {}", fmt.name()))),
        }
    }
}

/// One entry of `layers`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Bank {
    /// File name, `experts-L{n}.bin`.
    pub file: String,
    /// Records in it.
    pub experts: u32,
    /// Its size.
    pub bytes: u64,
    /// The first of the layer's codebooks.
    pub codebook_base: u16,
    /// Further keys.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// How a trunk tensor is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub enum TrunkFmt {
    /// Raw f32.
    F32,
    /// Raw f16.
    F16,
    /// int8 groups.
    Q8g,
    /// 4-bit groups.
    Q4g,
    /// 3-bit groups.
    Q3g,
}

impl TrunkFmt {
    /// The format's name.
    pub fn name(self) -> &'static str {
        match self {
            TrunkFmt::F32 => "F32",
            TrunkFmt::F16 => "F16",
            TrunkFmt::Q8g => "Q8G",
            TrunkFmt::Q4g => "Q4G",
            TrunkFmt::Q3g => "Q3G",
        }
    }

    /// Whether weights come in groups with a scale.
    pub fn is_grouped(self) -> bool {
        !matches!(self, TrunkFmt::F32 | TrunkFmt::F16)
    }

    /// Bytes of one row without its scales; `None` on overflow.
    pub fn row_bytes(self, cols: u64) -> Option<u64> {
        match self {
            TrunkFmt::F32 => cols.checked_mul(4),
            TrunkFmt::F16 => cols.checked_mul(2),
            TrunkFmt::Q8g => q8g::row_bytes(cols),
            TrunkFmt::Q4g => q4g::row_bytes(cols),
            TrunkFmt::Q3g => q3g::row_bytes(cols),
        }
    }

    /// Encodes `src`, `[rows, cols]`; raw formats have no scales.
    ///
    /// # Panics
    /// If `src` does not hold `rows * cols` weights.
    pub fn encode_rows(self, src: &[f32], rows: usize, cols: usize) -> Result<Encoded, QuantError> {
        match self {
            TrunkFmt::F32 => {
                assert_eq!(Some(src.len()), rows.checked_mul(cols), "weights of a {rows} x {cols} matrix");
                let payload = src.iter().flat_map(|value| value.to_le_bytes()).collect();
                Ok(Encoded { payload, scales: Vec::new() })
            }
            TrunkFmt::F16 => {
                assert_eq!(Some(src.len()), rows.checked_mul(cols), "weights of a {rows} x {cols} matrix");
                if let Some(at) = src.iter().position(|value| value.is_nan() || value.abs() >= 65520.0) {
                    return Err(QuantError::NotFinite { row: at / cols, col: at % cols, value: src[at] });
                }
                let payload = src.iter().flat_map(|value| half::f32_to_f16(*value).to_le_bytes()).collect();
                Ok(Encoded { payload, scales: Vec::new() })
            }
            TrunkFmt::Q8g => q8g::encode_rows(src, rows, cols),
            TrunkFmt::Q4g => q4g::encode_rows(src, rows, cols),
            TrunkFmt::Q3g => q3g::encode_rows(src, rows, cols),
        }
    }

    /// Decodes one row into `out`, `[cols]`.
    ///
    /// # Panics
    /// If `row` or `scales` are too short for `out.len()` weights.
    pub fn decode_row(self, row: &[u8], scales: &[u16], out: &mut [f32]) {
        match self {
            TrunkFmt::F32 => {
                for (value, bytes) in out.iter_mut().zip(row.chunks_exact(4)) {
                    *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                }
            }
            TrunkFmt::F16 => half::f16_bytes_to_f32(&row[..2 * out.len()], out),
            TrunkFmt::Q8g => q8g::decode_row(row, scales, out),
            TrunkFmt::Q4g => q4g::decode_row(row, scales, out),
            TrunkFmt::Q3g => q3g::decode_row(row, scales, out),
        }
    }
}

impl From<TrunkFmt> for u64 {
    fn from(fmt: TrunkFmt) -> u64 {
        match fmt {
            TrunkFmt::F32 => 0,
            TrunkFmt::F16 => 1,
            TrunkFmt::Q8g => 2,
            TrunkFmt::Q4g => 3,
            TrunkFmt::Q3g => 7,
        }
    }
}

impl TryFrom<u64> for TrunkFmt {
    type Error = String;

    fn try_from(code: u64) -> Result<Self, String> {
        let refused = |name: &str| Err(format!("fmt {code} ({name}) is not a trunk format"));
        match code {
            0 => Ok(TrunkFmt::F32),
            1 => Ok(TrunkFmt::F16),
            2 => Ok(TrunkFmt::Q8g),
            3 => Ok(TrunkFmt::Q4g),
            7 => Ok(TrunkFmt::Q3g),
            4 => refused("VQ3R"),
            5 => refused("VQ2R"),
            6 => refused("SUB1"),
            8 => refused("VQ4P"),
            _ => refused("unknown"),
        }
    }
}

/// One entry of `trunk`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrunkEntry {
    /// Tensor name, with the prefix.
    pub name: String,
    /// Storage format.
    pub fmt: TrunkFmt,
    /// File offset of the weights.
    pub off: u64,
    /// 1 to 4 dimensions.
    pub shape: Vec<u64>,
    /// 128 for grouped formats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u64>,
    /// File offset of the scales.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_off: Option<u64>,
    /// Weights and scales together.
    pub bytes: u64,
    /// CRC-32 of these bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crc32: Option<u32>,
    /// Further keys.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// The sizes that follow from a tensor's shape and format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrunkSizes {
    /// Product of all dimensions but the last.
    pub rows: u64,
    /// The last dimension.
    pub cols: u64,
    /// Weight bytes of a row.
    pub row_bytes: u64,
    /// Weight bytes of all rows.
    pub payload_bytes: u64,
    /// f16 scales of all rows.
    pub scales: u64,
    /// Weights and scales together.
    pub bytes: u64,
}

impl TrunkSizes {
    /// Sizes of a tensor; the error says what is wrong with the shape.
    pub fn new(fmt: TrunkFmt, shape: &[u64]) -> Result<Self, String> {
        if shape.is_empty() || shape.len() > 4 || shape.contains(&0) {
            return Err(format!("shape {shape:?}: 1 to 4 dimensions of at least 1 are expected"));
        }
        let cols = shape[shape.len() - 1];
        let sizes = || {
            let rows = shape[..shape.len() - 1].iter().try_fold(1u64, |rows, dim| rows.checked_mul(*dim))?;
            let row_bytes = fmt.row_bytes(cols)?;
            let payload_bytes = rows.checked_mul(row_bytes)?;
            let scales = if fmt.is_grouped() { scale_count(rows, cols)? } else { 0 };
            let bytes = payload_bytes.checked_add(scales.checked_mul(2)?)?;
            // Decoded, it must be addressable too.
            isize::try_from(rows.checked_mul(cols)?.checked_mul(4)?).ok()?;
            Some(TrunkSizes { rows, cols, row_bytes, payload_bytes, scales, bytes })
        };
        sizes().ok_or_else(|| format!("shape {shape:?} is too large"))
    }
}

impl TrunkEntry {
    /// The sizes that follow from shape and format.
    pub fn sizes(&self) -> Result<TrunkSizes, String> {
        TrunkSizes::new(self.fmt, &self.shape)
    }

    /// Checks everything that does not need the file; returns the end offset.
    pub(super) fn check(&self) -> Result<u64, String> {
        if self.name.is_empty() || self.name.len() > 1024 || self.name.contains('\0') {
            return Err("name: 1 to 1024 bytes without NUL are expected".into());
        }
        let sizes = self.sizes()?;
        if self.bytes != sizes.bytes {
            return Err(format!(
                "bytes is {}, but {} of shape {:?} takes {}",
                self.bytes,
                self.fmt.name(),
                self.shape,
                sizes.bytes
            ));
        }
        let end = self.off.checked_add(self.bytes).ok_or("off + bytes overflows")?;
        if self.fmt.is_grouped() {
            if self.group != Some(GROUP as u64) {
                return Err(format!("group is {}, only 128 is supported", show(self.group)));
            }
            let expected = self.off + sizes.payload_bytes;
            if self.scale_off != Some(expected) {
                return Err(format!("scale_off is {}, expected {expected}", show(self.scale_off)));
            }
        }
        Ok(end)
    }
}

fn show(value: Option<u64>) -> String {
    value.map_or("absent".to_owned(), |value| value.to_string())
}

/// `integrity`: checksums of what v0 leaves unprotected.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Integrity {
    /// `"crc32"`.
    pub algorithm: String,
    /// Of `codebooks.bin`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub codebooks: Option<CodebooksSum>,
    /// Of the banks' record headers, by layer.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub banks: BTreeMap<u32, BankSum>,
    /// Of the small files beside.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, FileSum>,
    /// Further keys.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// Checksum of `codebooks.bin`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodebooksSum {
    /// File size.
    pub bytes: u64,
    /// Of the whole file.
    pub crc32: u32,
}

/// Checksum of a bank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BankSum {
    /// File size.
    pub bytes: u64,
    /// Of all 48-byte record headers, in order.
    pub crc32_headers: u32,
}

/// Checksum of a small file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSum {
    /// File size.
    pub bytes: u64,
    /// Lower-case hex.
    pub sha256: String,
}
