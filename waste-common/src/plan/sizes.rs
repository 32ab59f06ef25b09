//! What a plan needs to know of a model, from a container's manifest or from a configuration alone.

use serde_json::Value;

use super::error::PlanError;
use super::scratch::ExpertStorage;
use crate::config::{ModelConfig, Vision};
use crate::container::{Container, ExpertFmt, ExpertQuant, Geometry, TrunkFmt, TrunkSizes, codebook_bytes};
use crate::quant::vq::IndexBits;
use crate::tensors::{self, TensorSpec};

/// Tensors of fewer elements stay f32 in a trunk.
const QUANTISED_FROM: u64 = 65_536;

/// Reads of experts that a checkpoint run directly decodes at a time.
const DIRECT_READERS: u64 = 4;

/// The sizes of a model. All in bytes unless said otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSizes {
    /// The configuration they follow from.
    pub config: ModelConfig,
    /// How experts are stored.
    pub storage: ExpertStorage,
    /// Trunk tensors of the text model that stay in memory.
    pub trunk_bytes: u64,
    /// Weights of the vision tower and its projector.
    pub tower_bytes: u64,
    /// One expert; 0 without MoE layers.
    pub record_bytes: u64,
    /// MoE layers.
    pub moe_layers: u64,
    /// Experts of all layers together.
    pub experts: u64,
    /// All experts.
    pub experts_bytes: u64,
    /// What decoding needs beside the scratch buffers while weights are read.
    pub staging_bytes: u64,
    /// Banks, trunk and codebooks of the container, made or to be made.
    pub container_bytes: u64,
    /// Tensor data of the checkpoint the container is made from; `None` for a container, which needs none.
    pub checkpoint_bytes: Option<u64>,
}

impl ModelSizes {
    /// Sizes of an opened container.
    ///
    /// # Errors
    /// The manifest's configuration cannot be used.
    pub fn of_container(container: &Container) -> Result<Self, PlanError> {
        let manifest = container.manifest();
        let config = ModelConfig::from_container(&manifest.config)?;
        let mut sum = Sum::default();
        let (mut trunk, mut tower) = (0, 0);
        let embedding = tensors::embedding(&config);
        for entry in &manifest.trunk {
            if !entry.name.starts_with(config.tensor_prefix) {
                tower += u128::from(entry.bytes);
            } else if entry.name != embedding || config.tied_embeddings {
                trunk += u128::from(entry.bytes);
            }
        }
        let experts_bytes = manifest.layers.values().map(|bank| u128::from(bank.bytes)).sum();
        let codebooks = container.codebooks().map_or(0, |books| books.source().bytes());
        let files = experts_bytes + u128::from(container.trunk().source().bytes()) + u128::from(codebooks);
        let sizes = ModelSizes {
            storage: storage(&manifest.expert_quant),
            trunk_bytes: sum.take("the trunk", trunk),
            tower_bytes: sum.take("the vision tower", tower),
            record_bytes: container.geometry().map_or(0, |geometry| geometry.record_bytes() as u64),
            moe_layers: manifest.layers.len() as u64,
            experts: manifest.layers.values().map(|bank| u64::from(bank.experts)).sum(),
            experts_bytes: sum.take("the experts", experts_bytes),
            staging_bytes: 0,
            container_bytes: sum.take("the container", files),
            checkpoint_bytes: None,
            config,
        };
        sum.check(sizes)
    }

    /// Sizes of the container that would be made of a checkpoint with this `config.json`, in the usual formats: 3-bit
    /// experts ([`usual_quant`]), 4-bit trunk, 8-bit embedding, head and tower.
    ///
    /// # Errors
    /// The configuration cannot be used, or its experts cannot be laid out in records.
    pub fn of_config(config: &Value) -> Result<Self, PlanError> {
        Self::of_config_with(config, &usual_quant())
    }

    /// [`of_config`](Self::of_config) with another format of experts.
    ///
    /// # Errors
    /// As there.
    pub fn of_config_with(json: &Value, quant: &ExpertQuant) -> Result<Self, PlanError> {
        let config = ModelConfig::from_checkpoint(json)?;
        let mut sum = Sum::default();
        let trunk = tensors::trunk(&config);
        let tower = stored_all(&tensors::vision(&config), &config)?;
        let all = stored_all(&trunk, &config)?;
        let embedding = tensors::embedding(&config);
        let streamed = match trunk.iter().find(|spec| spec.name == embedding && !config.tied_embeddings) {
            Some(spec) => u128::from(stored(spec, &config)?),
            None => 0,
        };
        let mut sizes = Self::without_experts(config);
        let mut codebooks = 0;
        if let (Some(moe), true) = (&sizes.config.moe, sizes.moe_layers > 0) {
            let geometry = Geometry::new(quant, moe.intermediate as u64, moe.input as u64)?;
            sizes.record_bytes = geometry.record_bytes() as u64;
            codebooks = u128::from(sizes.moe_layers)
                * u128::from(quant.codebooks_per_layer())
                * u128::from(codebook_bytes(quant.entries));
        }
        sizes.storage = storage(quant);
        let experts = u128::from(sizes.experts) * u128::from(sizes.record_bytes);
        sizes.trunk_bytes = sum.take("the trunk", all - streamed);
        sizes.tower_bytes = sum.take("the vision tower", tower);
        sizes.experts_bytes = sum.take("the experts", experts);
        sizes.container_bytes = sum.take("the container", all + tower + experts + codebooks);
        sizes.checkpoint_bytes =
            Some(sum.take("the checkpoint", checkpoint_bytes(&sizes.config, packed(json))));
        sum.check(sizes)
    }

    /// Sizes of a checkpoint with this `config.json` that is run directly: everything in f32, nothing quantised.
    ///
    /// # Errors
    /// The configuration cannot be used.
    pub fn of_checkpoint_run_directly(json: &Value) -> Result<Self, PlanError> {
        let config = ModelConfig::from_checkpoint(json)?;
        let mut sum = Sum::default();
        let floats = |specs: &[TensorSpec]| specs.iter().map(|spec| 4 * u128::from(spec.elements())).sum();
        let trunk = tensors::trunk(&config);
        let mut resident: u128 = floats(&trunk);
        if !config.tied_embeddings {
            resident -= 4 * config.vocab as u128 * config.hidden as u128;
        }
        let tower: u128 = floats(&tensors::vision(&config));
        let mut sizes = Self::without_experts(config);
        // The stored bytes of the largest tensor lie beside its floats while the trunk is loaded.
        let largest = trunk.iter().map(|spec| 4 * u128::from(spec.elements())).max().unwrap_or(0);
        let mut decoding = 0;
        if let (Some(moe), true) = (&sizes.config.moe, sizes.moe_layers > 0) {
            let elements = moe.input as u64 * moe.intermediate as u64;
            sizes.record_bytes = (12 * elements).next_multiple_of(crate::container::record::RECORD_ALIGN);
            // Each reader holds a matrix as stored (at most f32) and as floats before it goes to its slot.
            decoding = u128::from(DIRECT_READERS) * 8 * u128::from(elements);
        }
        let experts = u128::from(sizes.experts) * u128::from(sizes.record_bytes);
        sizes.storage = ExpertStorage::Dense;
        sizes.trunk_bytes = sum.take("the trunk", resident);
        sizes.tower_bytes = sum.take("the vision tower", tower);
        sizes.experts_bytes = sum.take("the experts", experts);
        sizes.staging_bytes = sum.take("the staging", largest.max(decoding));
        sizes.checkpoint_bytes =
            Some(sum.take("the checkpoint", checkpoint_bytes(&sizes.config, packed(json))));
        sum.check(sizes)
    }

    fn without_experts(config: ModelConfig) -> Self {
        let moe_layers = config.moe_layers().count() as u64;
        let experts = config.moe.as_ref().map_or(0, |moe| moe.experts as u64 * moe_layers);
        ModelSizes {
            config,
            storage: ExpertStorage::Dense,
            trunk_bytes: 0,
            tower_bytes: 0,
            record_bytes: 0,
            moe_layers,
            experts,
            experts_bytes: 0,
            staging_bytes: 0,
            container_bytes: 0,
            checkpoint_bytes: None,
        }
    }
}

/// The usual format of experts: VQ3R, three stages of 256 entries.
pub fn usual_quant() -> ExpertQuant {
    ExpertQuant::new(ExpertFmt::Vq3r, 3, 256)
}

/// Whether a checkpoint's experts are MXFP4 (any other quantisation is refused with the configuration).
fn packed(json: &Value) -> bool {
    let text = json.get("text_config").unwrap_or(json);
    text.get("quantization_config").is_some_and(|quantization| !quantization.is_null())
}

fn storage(quant: &ExpertQuant) -> ExpertStorage {
    // Whatever an index can name has an entry in the tables.
    let entries = if quant.bits() == IndexBits::Six { 64 } else { 256 };
    ExpertStorage::Vq { stages: quant.stages as usize, entries }
}

/// How a tensor is stored in a trunk by default.
pub fn usual_format(spec: &TensorSpec, config: &ModelConfig) -> TrunkFmt {
    if spec.shape.len() == 1 || spec.elements() < QUANTISED_FROM {
        TrunkFmt::F32
    } else if spec.name == tensors::embedding(config)
        || spec.name == tensors::head(config)
        || !spec.name.starts_with(config.tensor_prefix)
    {
        TrunkFmt::Q8g
    } else {
        TrunkFmt::Q4g
    }
}

/// Bytes of a tensor in a trunk.
fn stored(spec: &TensorSpec, config: &ModelConfig) -> Result<u64, PlanError> {
    let mut shape: Vec<u64> = spec.shape.iter().map(|&d| d as u64).collect();
    // A convolution over patches is used, and stored, as a matrix.
    if shape.len() == 4 {
        shape = vec![shape[0], shape[1..].iter().product()];
    }
    let sizes = TrunkSizes::new(usual_format(spec, config), &shape);
    Ok(sizes.map_err(|_| PlanError::TooLarge { what: "a tensor" })?.bytes)
}

fn stored_all(specs: &[TensorSpec], config: &ModelConfig) -> Result<u128, PlanError> {
    specs.iter().try_fold(0, |sum, spec| Ok(sum + u128::from(stored(spec, config)?)))
}

/// Tensor data of a published checkpoint: bf16, but f32 where the release keeps it, and experts as MXFP4 if `packed`.
fn checkpoint_bytes(config: &ModelConfig, packed: bool) -> u128 {
    const F32: [&str; 5] =
        ["_conv1d.weight", ".A_log", ".dt_bias", ".o_norm.weight", ".e_score_correction_bias"];
    let mut bytes = 0;
    for spec in tensors::trunk(config).iter().chain(&tensors::vision(config)) {
        // K3 pads the heads of `A_log` to a multiple of 128.
        let elements = match spec.padded && !config.tensor_prefix.is_empty() {
            true => spec.elements().next_multiple_of(128),
            false => spec.elements(),
        };
        let width = if F32.iter().any(|tail| spec.name.ends_with(tail)) { 4 } else { 2 };
        bytes += width * u128::from(elements);
    }
    let Some(moe) = &config.moe else { return bytes };
    let matrix = |rows: usize, cols: usize| {
        let (rows, cols) = (rows as u128, cols as u128);
        // Two weights a byte, and a scale for each 32 of them.
        if packed { rows * (cols.div_ceil(2) + cols.div_ceil(32)) } else { 2 * rows * cols }
    };
    let expert = 2 * matrix(moe.intermediate, moe.input) + matrix(moe.input, moe.intermediate);
    bytes + config.moe_layers().count() as u128 * moe.experts as u128 * expert
}

/// Queries whose attention scores a thread of the vision tower holds.
pub const VISION_QUERIES: usize = 16;
/// Images of a request or a conversation, whose embeddings there is memory for.
pub const VISION_IMAGES: usize = 16;
/// Patches of an image: the most that padding makes of the 1024 of vision.json (a narrow image).
pub const VISION_PATCHES: u64 = 2048;
/// Embeddings of an image.
pub const VISION_ROWS: u64 = VISION_PATCHES / 4;
/// Largest encoded image.
const VISION_ENCODED: u64 = 20 << 20;
/// What an image takes while it is decoded. Its decoder keeps a copy of the file; that and its pixels take up to four
/// times the largest decoded image, 64 MiB.
pub const VISION_DECODING: u64 = 2 * VISION_ENCODED + 4 * (64 << 20);

/// What an image of `patches` patches takes on its way through the vision tower, in bytes: the stream and a sublayer's
/// input or output; q, k, v side by side or the MLP's inner values; q, k, v and output of every head; each thread's
/// scores; the rows it becomes.
pub fn vision_activations(vision: &Vision, patches: u64, threads: u64) -> u128 {
    let [hidden, qkv, inner] = [vision.hidden, vision.qkv, vision.intermediate].map(|n| n as u128);
    let wide = (3 * qkv).max(inner).max(hidden);
    let scores = u128::from(threads) * VISION_QUERIES as u128;
    let patches = u128::from(patches);
    4 * (patches * (2 * hidden + wide + 4 * qkv + scores) + patches / 4 * vision.text_hidden as u128)
}

/// Pixels of so many patches, a byte a channel.
pub fn vision_patch_bytes(vision: &Vision, patches: u64) -> u128 {
    3 * u128::from(patches) * (vision.patch as u128).pow(2)
}

/// So many embeddings, in bytes.
pub fn vision_row_bytes(vision: &Vision, rows: u64) -> u128 {
    4 * u128::from(rows) * vision.text_hidden as u128
}

/// Weights of the tower, and a bound for what images take: one is decoded or encoded at a time.
pub(super) fn vision_bytes(vision: &Vision, tower_bytes: u64, threads: u64) -> u128 {
    let queued = VISION_IMAGES as u128 * vision_row_bytes(vision, VISION_ROWS);
    // Before the tower begins, only the patches are left beside the file: as bytes, and as numbers.
    let pixels = 5 * vision_patch_bytes(vision, VISION_PATCHES);
    let encoding = u128::from(VISION_ENCODED) + pixels + vision_activations(vision, VISION_PATCHES, threads);
    u128::from(tower_bytes) + encoding.max(VISION_DECODING.into()) + queued
}

/// Sums that may not fit into 64 bits; the first that does not is reported.
#[derive(Default)]
struct Sum(Option<&'static str>);

impl Sum {
    fn take(&mut self, what: &'static str, bytes: u128) -> u64 {
        u64::try_from(bytes).unwrap_or_else(|_| {
            self.0.get_or_insert(what);
            u64::MAX
        })
    }

    fn check<T>(self, value: T) -> Result<T, PlanError> {
        self.0.map_or(Ok(value), |what| Err(PlanError::TooLarge { what }))
    }
}
