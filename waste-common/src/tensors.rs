//! The one table of tensor names and shapes: what a checkpoint must have, what a container's trunk holds.
//!
//! Names are those of the published checkpoints; layers count from 0.

use crate::config::{Mixer, ModelConfig};

/// Most elements behind those a padded tensor must have (K3's `A_log` has 32).
const PADDING_MAX: u64 = 1024;

/// A tensor of the model: its name and its shape in the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Full name, prefix included.
    pub name: String,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// More elements than the shape says are allowed behind it (K3's `A_log` is padded with zeros).
    pub padded: bool,
}

impl TensorSpec {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&d| d as u64).product()
    }

    /// Whether a stored tensor of this shape can serve: the same elements, in the same rows where it is a matrix,
    /// behind which a padded one may have some more.
    pub fn accepts(&self, shape: &[usize]) -> bool {
        let Some(elements) = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d as u64)) else {
            return false;
        };
        if self.padded {
            return (self.elements()..=self.elements() + PADDING_MAX).contains(&elements);
        }
        if elements != self.elements() {
            return false;
        }
        match self.shape[..] {
            // Quantised groups end with a row, so the rows of a matrix must be the stored ones.
            [rows, cols] if rows > 1 => shape.first() == Some(&rows) && shape.last() == Some(&cols),
            [rows, ..] if self.shape.len() > 2 => shape.first() == Some(&rows),
            _ => true,
        }
    }
}

/// The three matrices of an expert, in the order of the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExpertKind {
    /// `w1`, [intermediate, input].
    Gate,
    /// `w3`, [intermediate, input].
    Up,
    /// `w2`, [input, intermediate].
    Down,
}

impl ExpertKind {
    /// All three, in the order of the record.
    pub const ALL: [ExpertKind; 3] = [ExpertKind::Gate, ExpertKind::Up, ExpertKind::Down];

    /// `gate`, `up` or `down`.
    pub fn name(self) -> &'static str {
        match self {
            ExpertKind::Gate => "gate",
            ExpertKind::Up => "up",
            ExpertKind::Down => "down",
        }
    }

    fn checkpoint_name(self) -> &'static str {
        match self {
            ExpertKind::Gate => "w1",
            ExpertKind::Up => "w3",
            ExpertKind::Down => "w2",
        }
    }
}

/// Name of an expert's matrix in a checkpoint, without the last part (`.weight`, `.weight_packed`).
pub fn expert(config: &ModelConfig, layer: usize, expert: usize, kind: ExpertKind) -> String {
    let base = layer_name(config, layer, "block_sparse_moe.experts");
    format!("{base}.{expert}.{}", kind.checkpoint_name())
}

/// Whether a tensor belongs to a routed expert, and to which layer and expert.
pub fn expert_of(name: &str) -> Option<(usize, usize)> {
    let (head, tail) = name.split_once(".block_sparse_moe.experts.")?;
    let layer = head.rsplit('.').next()?.parse().ok()?;
    let expert = tail.split('.').next()?.parse().ok()?;
    Some((layer, expert))
}

/// Name of a layer's tensor.
pub fn layer_name(config: &ModelConfig, layer: usize, tail: &str) -> String {
    format!("{}model.layers.{layer}.{tail}", config.tensor_prefix)
}

/// Name of the embedding.
pub fn embedding(config: &ModelConfig) -> String {
    format!("{}model.embed_tokens.weight", config.tensor_prefix)
}

/// Name of the output head.
pub fn head(config: &ModelConfig) -> String {
    format!("{}lm_head.weight", config.tensor_prefix)
}

/// Every tensor of the text model that is not a routed expert's.
pub fn trunk(config: &ModelConfig) -> Vec<TensorSpec> {
    let mut list = List { prefix: format!("{}model.", config.tensor_prefix), specs: Vec::new() };
    let hidden = config.hidden;
    list.add("embed_tokens.weight", &[config.vocab, hidden]);
    list.add("norm.weight", &[hidden]);
    if config.attn_res_block.is_some() {
        list.add("output_attn_res_norm.weight", &[hidden]);
        list.add("output_attn_res_proj.weight", &[1, hidden]);
    }
    if !config.tied_embeddings {
        list.specs.push(TensorSpec { name: head(config), shape: vec![config.vocab, hidden], padded: false });
    }
    for (layer, mixer) in config.mixers.iter().enumerate() {
        list.prefix = layer_name(config, layer, "");
        list.add("input_layernorm.weight", &[hidden]);
        list.add("post_attention_layernorm.weight", &[hidden]);
        if config.attn_res_block.is_some() {
            for place in ["self_attention", "mlp"] {
                list.add(&format!("{place}_res_norm.weight"), &[hidden]);
                list.add(&format!("{place}_res_proj.weight"), &[1, hidden]);
            }
        }
        match mixer {
            Mixer::Kda => list.add_kda(config),
            Mixer::Mla => list.add_mla(config),
        }
        list.add_ffn(config, layer);
    }
    list.specs
}

/// Parameters of the text model: all, and those one token uses.
pub fn parameters(config: &ModelConfig) -> (u64, u64) {
    let trunk: u64 = trunk(config).iter().map(TensorSpec::elements).sum();
    let Some(moe) = &config.moe else { return (trunk, trunk) };
    let expert = 3 * (moe.input * moe.intermediate) as u64;
    let layers = config.moe_layers().count() as u64;
    (trunk + layers * moe.experts as u64 * expert, trunk + layers * moe.top_k as u64 * expert)
}

/// Every tensor of the vision tower and its projector; empty without one.
pub fn vision(config: &ModelConfig) -> Vec<TensorSpec> {
    let Some(vision) = &config.vision else { return Vec::new() };
    let mut list = List { prefix: String::new(), specs: Vec::new() };
    let (hidden, merged) = (vision.hidden, 4 * vision.hidden);
    list.add("vision_tower.patch_embed.proj.weight", &[hidden, 3, vision.patch, vision.patch]);
    list.add("vision_tower.patch_embed.pos_emb.weight", &[vision.positions.0, vision.positions.1, hidden]);
    for block in 0..vision.layers {
        list.prefix = format!("vision_tower.encoder.blocks.{block}.");
        list.add("norm0.weight", &[hidden]);
        list.add("norm1.weight", &[hidden]);
        list.add("wqkv.weight", &[3 * vision.qkv, hidden]);
        list.add("wo.weight", &[hidden, vision.qkv]);
        list.add("mlp.fc0.weight", &[vision.intermediate, hidden]);
        list.add("mlp.fc1.weight", &[hidden, vision.intermediate]);
    }
    list.prefix.clear();
    list.add("vision_tower.encoder.final_layernorm.weight", &[hidden]);
    list.add("mm_projector.proj.0.weight", &[merged, merged]);
    list.add("mm_projector.proj.2.weight", &[vision.text_hidden, merged]);
    list.add("mm_projector.post_norm.weight", &[vision.text_hidden]);
    list.specs
}

struct List {
    prefix: String,
    specs: Vec<TensorSpec>,
}

impl List {
    fn add(&mut self, tail: &str, shape: &[usize]) {
        self.specs.push(TensorSpec {
            name: format!("{}{tail}", self.prefix),
            shape: shape.to_vec(),
            padded: tail.ends_with("A_log"),
        });
    }

    fn add_kda(&mut self, config: &ModelConfig) {
        let (kda, hidden) = (&config.kda, config.hidden);
        let width = kda.width();
        for part in ["q", "k", "v"] {
            self.add(&format!("self_attn.{part}_proj.weight"), &[width, hidden]);
            self.add(&format!("self_attn.{part}_conv1d.weight"), &[width, 1, kda.conv_kernel]);
        }
        self.add("self_attn.f_a_proj.weight", &[kda.dim, hidden]);
        self.add("self_attn.f_b_proj.weight", &[width, kda.dim]);
        self.add("self_attn.A_log", &[kda.heads]);
        self.add("self_attn.dt_bias", &[width]);
        self.add("self_attn.b_proj.weight", &[kda.heads, hidden]);
        if kda.full_rank_gate {
            self.add("self_attn.g_proj.weight", &[width, hidden]);
        } else {
            self.add("self_attn.g_a_proj.weight", &[kda.dim, hidden]);
            self.add("self_attn.g_b_proj.weight", &[width, kda.dim]);
        }
        self.add("self_attn.o_norm.weight", &[kda.dim]);
        self.add("self_attn.o_proj.weight", &[hidden, width]);
    }

    fn add_mla(&mut self, config: &ModelConfig) {
        let (mla, hidden) = (&config.mla, config.hidden);
        let queries = mla.heads * (mla.nope + mla.rope);
        match mla.q_lora {
            None => self.add("self_attn.q_proj.weight", &[queries, hidden]),
            Some(rank) => {
                self.add("self_attn.q_a_proj.weight", &[rank, hidden]);
                self.add("self_attn.q_a_layernorm.weight", &[rank]);
                self.add("self_attn.q_b_proj.weight", &[queries, rank]);
            }
        }
        self.add("self_attn.kv_a_proj_with_mqa.weight", &[mla.cached(), hidden]);
        self.add("self_attn.kv_a_layernorm.weight", &[mla.kv_lora]);
        self.add("self_attn.kv_b_proj.weight", &[mla.heads * (mla.nope + mla.value), mla.kv_lora]);
        if mla.output_gate {
            self.add("self_attn.g_proj.weight", &[mla.heads * mla.value, hidden]);
        }
        self.add("self_attn.o_proj.weight", &[hidden, mla.heads * mla.value]);
    }

    fn add_ffn(&mut self, config: &ModelConfig, layer: usize) {
        let hidden = config.hidden;
        let Some(moe) = config.moe_of(layer) else {
            return self.add_glu("mlp", config.dense_intermediate, hidden);
        };
        self.add("block_sparse_moe.gate.weight", &[moe.experts, hidden]);
        self.add("block_sparse_moe.gate.e_score_correction_bias", &[moe.experts]);
        if moe.shared > 0 {
            self.add_glu("block_sparse_moe.shared_experts", moe.shared * moe.intermediate, hidden);
        }
        if moe.latent {
            self.add("block_sparse_moe.routed_expert_down_proj.weight", &[moe.input, hidden]);
            self.add("block_sparse_moe.routed_expert_up_proj.weight", &[hidden, moe.input]);
            if moe.latent_norm {
                self.add("block_sparse_moe.routed_expert_norm.weight", &[moe.input]);
            }
        }
    }

    fn add_glu(&mut self, base: &str, inner: usize, hidden: usize) {
        self.add(&format!("{base}.gate_proj.weight"), &[inner, hidden]);
        self.add(&format!("{base}.up_proj.weight"), &[inner, hidden]);
        self.add(&format!("{base}.down_proj.weight"), &[hidden, inner]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(file: &str) -> ModelConfig {
        let path = format!("{}/../tests/configs/{file}", env!("CARGO_MANIFEST_DIR"));
        let json = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        ModelConfig::from_checkpoint(&json).unwrap()
    }

    /// The published index of K3 lists 497,220 tensors: the table plus two per expert matrix.
    #[test]
    fn k3_has_as_many_tensors_as_its_index() {
        let config = config("kimi-k3.config.json");
        let experts = 92 * 896 * 3 * 2;
        assert_eq!(parameters(&config).0 / 1_000_000_000, 2779);
        assert_eq!(trunk(&config).len() + vision(&config).len() + experts, 497_220);
    }

    #[test]
    fn expert_names_are_told_from_the_trunk() {
        let config = config("kimi-k3.config.json");
        let name = expert(&config, 17, 805, ExpertKind::Down) + ".weight_packed";
        assert_eq!(name, "language_model.model.layers.17.block_sparse_moe.experts.805.w2.weight_packed");
        assert_eq!(expert_of(&name), Some((17, 805)));
        assert!(trunk(&config).iter().all(|t| expert_of(&t.name).is_none()));
    }

    #[test]
    fn shapes_are_accepted_by_what_they_mean() {
        let spec =
            |shape: &[usize], padded| TensorSpec { name: String::new(), shape: shape.to_vec(), padded };
        assert!(spec(&[96], true).accepts(&[128]) && spec(&[32], true).accepts(&[1, 1, 32, 1]));
        assert!(!spec(&[96], true).accepts(&[95]) && !spec(&[96], true).accepts(&[400_000_000]));
        assert!(spec(&[8, 4], false).accepts(&[8, 1, 4]) && !spec(&[8, 4], false).accepts(&[8, 2, 2]));
        assert!(spec(&[8, 1, 4], false).accepts(&[8, 4]) && !spec(&[8, 4], false).accepts(&[4, 8]));
        assert!(spec(&[1, 256], false).accepts(&[256]) && spec(&[256], false).accepts(&[1, 256]));
        assert!(!spec(&[4], false).accepts(&[usize::MAX, usize::MAX]));
    }
}
