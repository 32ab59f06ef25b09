//! What decides the bytes of a container.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use waste_common::container::{ExpertFmt, ExpertQuant, TrunkFmt};

/// Number of the encoding recipe: goes up when the same options give other bytes.
pub const RECIPE: u32 = 2;
/// Sample vectors a set of codebooks is fitted to.
pub const CB_SAMPLE: usize = 300_000;
/// Tensors of the trunk below this many elements stay F32.
pub const TRUNK_MIN_ELEMENTS: u64 = 65_536;

/// How much time goes into good weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Effort {
    /// Residual k-means and greedy search: the cost of the published recipe
    Fast,
    /// Codebooks refined together, a beam search of 4
    Normal,
    /// A beam search of 16, row scales and codes fitted to each other
    Max,
}

/// What an effort stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recipe {
    /// Rounds of least squares over all codebooks of a kind.
    pub refinements: usize,
    /// Width of the beam in those rounds; 1 is greedy.
    pub fit_width: usize,
    /// Width of the beam when weights are encoded.
    pub width: usize,
    /// How often a row is encoded, each time with the scale fitted to its last codes.
    pub passes: usize,
}

impl Effort {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Effort::Fast => "fast",
            Effort::Normal => "normal",
            Effort::Max => "max",
        }
    }

    /// What is done.
    pub fn recipe(self) -> Recipe {
        match self {
            Effort::Fast => Recipe { refinements: 0, fit_width: 1, width: 1, passes: 1 },
            Effort::Normal => Recipe { refinements: 6, fit_width: 4, width: 4, passes: 1 },
            Effort::Max => Recipe { refinements: 8, fit_width: 8, width: 16, passes: 3 },
        }
    }
}

/// The options of a conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// How the routed experts are stored.
    pub format: ExpertFmt,
    /// How they are encoded.
    pub effort: Effort,
    /// Bits of the text trunk's matrices, 4 or 8.
    pub trunk_bits: u8,
    /// Tensors of the trunk below this many elements stay F32.
    pub trunk_min_elements: u64,
    /// Sample vectors per (layer, kind).
    pub cb_sample: usize,
    /// Seed of the choice of samples and of the codebooks' first entries.
    pub seed: u64,
    /// SHA-256 of the file that says how much each input column matters.
    #[serde(default)]
    pub importance: Option<[u8; 32]>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            format: ExpertFmt::Vq3r,
            effort: Effort::Normal,
            trunk_bits: 4,
            trunk_min_elements: TRUNK_MIN_ELEMENTS,
            cb_sample: CB_SAMPLE,
            seed: 0,
            importance: None,
        }
    }
}

impl Options {
    /// `expert_quant` of the manifest.
    pub fn quant(&self) -> ExpertQuant {
        let (stages, entries) = match self.format {
            ExpertFmt::Vq3r => (3, 256),
            ExpertFmt::Vq2r => (2, 256),
            ExpertFmt::Vq4p => (4, 64),
        };
        ExpertQuant::new(self.format, stages, entries)
    }

    /// The format of the text trunk's matrices.
    pub fn trunk_fmt(&self) -> TrunkFmt {
        if self.trunk_bits == 8 { TrunkFmt::Q8g } else { TrunkFmt::Q4g }
    }

    /// Everything that decides the bytes, with the checkpoint's fingerprint: kept in the state and the manifest, so
    /// that conversions are not mixed.
    pub fn fingerprint(&self, checkpoint: &str) -> Map<String, Value> {
        let value = json!({
            "recipe": RECIPE,
            "format": self.format.name(),
            "effort": self.effort.name(),
            "trunk_bits": self.trunk_bits,
            "trunk_min_elements": self.trunk_min_elements,
            "cb_sample": self.cb_sample,
            "seed": self.seed,
            "checkpoint_sha256": checkpoint,
        });
        let mut map = match value {
            Value::Object(map) => map,
            _ => Map::new(),
        };
        // Absent without it, so that conversions begun before it came go on.
        if let Some(sha256) = &self.importance {
            let hex: String = sha256.iter().map(|byte| format!("{byte:02x}")).collect();
            map.insert("importance_sha256".to_owned(), hex.into());
        }
        map
    }
}
