//! What decides the bytes of a container.

use serde_json::{Map, Value, json};
use waste_common::container::{ExpertFmt, ExpertQuant, TrunkFmt};

/// Number of the encoding recipe: goes up when the same options give other bytes.
pub const RECIPE: u32 = 1;
/// Sample vectors a set of codebooks is fitted to.
pub const CB_SAMPLE: usize = 300_000;

/// The options of a conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// How the routed experts are stored.
    pub format: ExpertFmt,
    /// Bits of the text trunk's matrices, 4 or 8.
    pub trunk_bits: u8,
    /// Sample vectors per (layer, kind).
    pub cb_sample: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options { format: ExpertFmt::Vq3r, trunk_bits: 4, cb_sample: CB_SAMPLE }
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
            "trunk_bits": self.trunk_bits,
            "cb_sample": self.cb_sample,
            "checkpoint_sha256": checkpoint,
        });
        match value {
            Value::Object(map) => map,
            _ => Map::new(),
        }
    }
}
