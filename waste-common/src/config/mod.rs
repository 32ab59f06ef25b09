//! The model's configuration: the keys of `config.json`, typed, bounded, and read by value.
//!
//! Kimi K3 nests the decoder under `text_config` and prefixes its tensors with `language_model.`; Kimi-Linear is
//! flat. A container keeps the decoder's object and the rest of the outer one under `_outer`. What a
//! configuration asks for and this project does not implement is refused by name.

mod keys;
#[cfg(test)]
mod tests;

use serde_json::{Map, Value};

use crate::error::{Coded, Exit};

use keys::{Keys, brief, missing, object};

/// Upper bounds of single dimensions: far above any model, far below any overflow.
const DIMENSION_MAX: u64 = 1 << 20;
const VOCAB_MAX: u64 = 1 << 24;
const LAYERS_MAX: u64 = 1024;
const EXPERTS_MAX: u64 = 1 << 16;
/// Most experts of a token.
pub const TOP_K_MAX: u64 = 64;
const HEADS_MAX: u64 = 1 << 16;
const CONV_KERNEL_MAX: u64 = 64;
/// Products of two dimensions (a matrix's elements) stay below this.
const MATRIX_MAX: u64 = 1 << 36;

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error, PartialEq)]
#[allow(missing_docs)]
pub enum ConfigError {
    #[error("the configuration has no `{key}`")]
    Missing { key: String },
    #[error("the configuration's `{key}` is {found}; expected {expected}")]
    Invalid { key: String, found: String, expected: String },
    #[error("this model needs what is not implemented: `{key}` = {found} ({implemented})")]
    Unsupported { key: String, found: String, implemented: String },
}

impl Coded for ConfigError {
    fn exit(&self) -> Exit {
        Exit::Data
    }

    fn code(&self) -> &'static str {
        match self {
            ConfigError::Missing { .. } | ConfigError::Invalid { .. } => "invalid_config",
            ConfigError::Unsupported { .. } => "unsupported_model",
        }
    }
}

/// How a layer mixes tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mixer {
    /// Kimi Delta Attention: a recurrent state of constant size.
    Kda,
    /// Multi-head latent attention over a cache of latents.
    Mla,
}

/// The activation of dense, shared and routed FFNs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `silu(gate) * up`.
    Silu,
    /// `beta·tanh(gate/beta)·sigmoid(gate) · linear_beta·tanh(up/linear_beta)`; without `linear_beta`, `up` itself.
    Situ {
        /// Bound of the gate's factor.
        beta: f32,
        /// Bound of the linear factor.
        linear_beta: Option<f32>,
    },
}

/// How router logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScore {
    /// Each expert by itself.
    Sigmoid,
    /// Over all experts.
    Softmax,
}

/// The mixture-of-experts part.
#[derive(Clone, Debug, PartialEq)]
pub struct Moe {
    /// Routed experts of a layer.
    pub experts: usize,
    /// Experts a token is routed to.
    pub top_k: usize,
    /// Shared experts (one FFN of that many times the width).
    pub shared: usize,
    /// Inner width of one expert.
    pub intermediate: usize,
    /// Width the routed experts run on: the latent's, or the hidden size.
    pub input: usize,
    /// Whether routed experts run in a latent of their own (`routed_expert_hidden_size`).
    pub latent: bool,
    /// Whether the latent sum is normalised before it is projected up.
    pub latent_norm: bool,
    /// Layers below this one are dense.
    pub first_dense: usize,
    /// Every how many layers is one MoE.
    pub frequency: usize,
    /// Score function of the router.
    pub score: RouterScore,
    /// Whether the chosen weights are divided by their sum.
    pub renormalize: bool,
    /// Factor on the chosen weights.
    pub scaling: f32,
    /// Expert groups, if group-limited routing is active: (groups, groups kept).
    pub groups: Option<(usize, usize)>,
}

/// Kimi Delta Attention's shape. Key and value dimension are both `dim`.
#[derive(Clone, Debug, PartialEq)]
pub struct Kda {
    /// Heads.
    pub heads: usize,
    /// Dimension of a head.
    pub dim: usize,
    /// Taps of the short causal convolution.
    pub conv_kernel: usize,
    /// `g_proj` instead of `g_a_proj`, `g_b_proj`.
    pub full_rank_gate: bool,
    /// Bounded decay `lb·sigmoid(A·z)`; without it `-A·softplus(z)`.
    pub lower_bound: Option<f32>,
}

impl Kda {
    /// Channels of q, k, v: heads × dim.
    pub fn width(&self) -> usize {
        self.heads * self.dim
    }
}

/// Multi-head latent attention's shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Mla {
    /// Heads.
    pub heads: usize,
    /// Rank of the query's bottleneck, if it has one.
    pub q_lora: Option<usize>,
    /// Width of the latent.
    pub kv_lora: usize,
    /// Key columns from the latent, per head.
    pub nope: usize,
    /// Key columns shared by all heads (no rotary embedding is applied).
    pub rope: usize,
    /// Value dimension of a head.
    pub value: usize,
    /// Whether the output is gated by `g_proj`.
    pub output_gate: bool,
}

impl Mla {
    /// Numbers a cached token takes: latent and shared key.
    pub fn cached(&self) -> usize {
        self.kv_lora + self.rope
    }
}

/// The vision tower's shape (`vision_config`).
#[derive(Clone, Debug, PartialEq)]
pub struct Vision {
    /// Width of the tower.
    pub hidden: usize,
    /// Blocks.
    pub layers: usize,
    /// Attention heads.
    pub heads: usize,
    /// Width of q, k and v each.
    pub qkv: usize,
    /// Inner width of a block's MLP.
    pub intermediate: usize,
    /// Side of a square patch in pixels.
    pub patch: usize,
    /// Rows and columns of the learned position table.
    pub positions: (usize, usize),
    /// Width of the projector's output: the decoder's hidden size.
    pub text_hidden: usize,
}

/// A model's configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// `kimi-k3` or `kimi-linear`; descriptive.
    pub arch: &'static str,
    /// Prefix of the decoder's tensor names.
    pub tensor_prefix: &'static str,
    /// Hidden size.
    pub hidden: usize,
    /// Rows of the embedding and the head.
    pub vocab: usize,
    /// Epsilon of all norms but those of MLA's latents and the tower.
    pub rms_eps: f32,
    /// Whether the head is the embedding.
    pub tied_embeddings: bool,
    /// The FFNs' activation.
    pub activation: Activation,
    /// Inner width of a dense FFN.
    pub dense_intermediate: usize,
    /// The mixture of experts, if the model has one.
    pub moe: Option<Moe>,
    /// KDA's shape.
    pub kda: Kda,
    /// MLA's shape.
    pub mla: Mla,
    /// The mixer of each layer; its length is the number of layers.
    pub mixers: Vec<Mixer>,
    /// Layers of an attention-residual block; `None` for ordinary residuals.
    pub attn_res_block: Option<usize>,
    /// `[BOS]`, as the configuration names it.
    pub bos: Option<u32>,
    /// Ids that end a generation, as the configuration names them.
    pub eos: Vec<u32>,
    /// Placeholder id of an image row.
    pub media_placeholder: Option<u32>,
    /// The vision tower, if the model has one.
    pub vision: Option<Vision>,
}

impl ModelConfig {
    /// Reads a checkpoint's `config.json`, nested or flat.
    pub fn from_checkpoint(config: &Value) -> Result<Self, ConfigError> {
        let outer = object("config.json", config)?;
        match outer.get("text_config") {
            Some(text) => Self::read(object("text_config", text)?, Some(outer)),
            None => Self::read(outer, None),
        }
    }

    /// Reads a manifest's `config`: the decoder's object, with the outer one under `_outer` if there was one.
    pub fn from_container(config: &Value) -> Result<Self, ConfigError> {
        let text = object("config", config)?;
        match text.get("_outer") {
            Some(outer) => Self::read(text, Some(object("_outer", outer)?)),
            None => Self::read(text, None),
        }
    }

    /// Layers of the decoder.
    pub fn layers(&self) -> usize {
        self.mixers.len()
    }

    /// The MoE part of a layer, or `None` where the layer is dense.
    pub fn moe_of(&self, layer: usize) -> Option<&Moe> {
        self.moe.as_ref().filter(|moe| layer >= moe.first_dense && layer.is_multiple_of(moe.frequency))
    }

    /// The numbers of the MoE layers, ascending.
    pub fn moe_layers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.layers()).filter(|&layer| self.moe_of(layer).is_some())
    }

    /// Layers with this mixer.
    pub fn count(&self, mixer: Mixer) -> usize {
        self.mixers.iter().filter(|&&m| m == mixer).count()
    }

    fn read(text: &Map<String, Value>, outer: Option<&Map<String, Value>>) -> Result<Self, ConfigError> {
        let keys = Keys(text);
        refuse_unknown_family(text, outer)?;
        keys.demand_bool(
            "mla_use_nope",
            true,
            "no rotary embedding; a model that rotates is not implemented",
        )?;
        if keys.optional("num_nextn_predict_layers", LAYERS_MAX)?.unwrap_or(0) > 0 {
            return Err(keys.unsupported("num_nextn_predict_layers", "no multi-token prediction layers"));
        }
        check_quantization(text)?;

        let hidden = keys.size("hidden_size", DIMENSION_MAX)?;
        let layers = keys.size("num_hidden_layers", LAYERS_MAX)?;
        let rms_eps = keys.float("rms_norm_eps")?.ok_or_else(|| missing("rms_norm_eps"))?;
        if !(rms_eps > 0.0 && rms_eps < 1.0) {
            return Err(keys.invalid("rms_norm_eps", "a number between 0 and 1"));
        }
        let config = ModelConfig {
            arch: if outer.is_some() { "kimi-k3" } else { "kimi-linear" },
            tensor_prefix: if outer.is_some() { "language_model." } else { "" },
            hidden,
            vocab: keys.size("vocab_size", VOCAB_MAX)?,
            rms_eps,
            tied_embeddings: keys.boolean("tie_word_embeddings", false)?,
            activation: activation(&keys)?,
            dense_intermediate: keys.size("intermediate_size", DIMENSION_MAX)?,
            moe: moe(&keys, hidden)?,
            kda: kda(text)?,
            mla: mla(&keys)?,
            mixers: mixers(text, layers)?,
            attn_res_block: keys.optional_size("attn_res_block_size", DIMENSION_MAX)?,
            bos: keys.optional("bos_token_id", VOCAB_MAX)?.map(|id| id as u32),
            eos: eos(text, outer)?,
            media_placeholder: match outer {
                Some(outer) => {
                    Keys(outer).optional("media_placeholder_token_id", VOCAB_MAX)?.map(|id| id as u32)
                }
                None => None,
            },
            vision: match outer.and_then(|outer| outer.get("vision_config")) {
                None | Some(Value::Null) => None,
                Some(vision) => Some(read_vision(object("vision_config", vision)?)?),
            },
        };
        config.check_products()?;
        Ok(config)
    }

    /// Every matrix of the model fits a bound, so that later size arithmetic cannot overflow.
    fn check_products(&self) -> Result<(), ConfigError> {
        let (kda, mla) = (&self.kda, &self.mla);
        let shared = self.moe.as_ref().map_or(0, |moe| moe.shared * moe.intermediate);
        let text = [
            ("vocab_size", self.vocab),
            ("intermediate_size", self.dense_intermediate),
            ("linear_attn_config", kda.width()),
            ("qk_nope_head_dim", mla.heads * (mla.nope + mla.rope)),
            ("v_head_dim", mla.heads * (mla.nope + mla.value)),
            ("moe_intermediate_size", shared),
        ];
        let tower = self.vision.iter().flat_map(|vision| {
            let positions = vision.positions.0 * vision.positions.1;
            let patch = 3 * vision.patch * vision.patch;
            let widths = [positions, patch, 3 * vision.qkv, vision.intermediate, 4 * vision.text_hidden];
            widths.map(|width| ("vision_config", width, 4 * vision.hidden))
        });
        for (key, width, by) in text.map(|(key, width)| (key, width, self.hidden)).into_iter().chain(tower) {
            let elements = (width as u64).checked_mul(by as u64);
            if elements.is_none_or(|elements| elements > MATRIX_MAX) {
                return Err(ConfigError::Invalid {
                    key: key.to_owned(),
                    found: format!("a matrix of {width} x {by}"),
                    expected: format!("at most {MATRIX_MAX} elements"),
                });
            }
        }
        Ok(())
    }
}

fn refuse_unknown_family(
    text: &Map<String, Value>,
    outer: Option<&Map<String, Value>>,
) -> Result<(), ConfigError> {
    for (keys, class, model_type) in [
        (Some(text), "KimiLinearForCausalLM", "kimi_linear"),
        (outer, "KimiK3ForConditionalGeneration", "kimi_k3"),
    ] {
        let Some(keys) = keys else { continue };
        let refuse = |key: &str, found: &Value, implemented: &str| {
            Err(ConfigError::Unsupported {
                key: key.to_owned(),
                found: brief(found),
                implemented: implemented.to_owned(),
            })
        };
        if let Some(named) = Keys(keys).get("architectures")
            && !named.as_array().is_some_and(|named| named.iter().any(|name| name == class))
        {
            return refuse("architectures", named, "KimiLinearForCausalLM, KimiK3ForConditionalGeneration");
        }
        if let Some(named) = Keys(keys).get("model_type")
            && named != model_type
        {
            return refuse("model_type", named, "kimi_linear, kimi_k3");
        }
    }
    Ok(())
}

/// Experts may be packed as MXFP4; any other quantised checkpoint is refused.
fn check_quantization(text: &Map<String, Value>) -> Result<(), ConfigError> {
    let Some(quantization) = Keys(text).get("quantization_config") else { return Ok(()) };
    let keys = Keys(object("quantization_config", quantization)?);
    if keys.word("format", "absent")? == "mxfp4-pack-quantized" {
        return Ok(());
    }
    let key = if keys.get("format").is_some() { "format" } else { "quant_method" };
    Err(keys.unsupported(key, "unquantised or mxfp4-pack-quantized checkpoints"))
}

fn activation(keys: &Keys) -> Result<Activation, ConfigError> {
    match keys.word("hidden_act", "silu")? {
        "silu" => Ok(Activation::Silu),
        "situ" => {
            let beta = keys.float("activation_situ_beta")?.filter(|&beta| beta != 0.0).unwrap_or(1.0);
            let linear_beta = keys.float("activation_situ_linear_beta")?;
            if beta <= 0.0 {
                return Err(keys.invalid("activation_situ_beta", "a positive number"));
            }
            if linear_beta.is_some_and(|beta| beta <= 0.0) {
                return Err(keys.invalid("activation_situ_linear_beta", "a positive number"));
            }
            Ok(Activation::Situ { beta, linear_beta })
        }
        _ => Err(keys.unsupported("hidden_act", "silu, situ")),
    }
}

fn moe(keys: &Keys, hidden: usize) -> Result<Option<Moe>, ConfigError> {
    let Some(experts) = keys.optional_size("num_experts", EXPERTS_MAX)? else { return Ok(None) };
    let top_k_key = if keys.get("num_experts_per_token").is_some() {
        "num_experts_per_token"
    } else {
        "num_experts_per_tok"
    };
    let top_k = keys.size(top_k_key, TOP_K_MAX)?;
    if top_k > experts {
        return Err(keys.invalid(top_k_key, &format!("at most num_experts = {experts}")));
    }
    let score = match keys.word("moe_router_activation_func", "sigmoid")? {
        "sigmoid" => RouterScore::Sigmoid,
        "softmax" => RouterScore::Softmax,
        _ => return Err(keys.unsupported("moe_router_activation_func", "sigmoid, softmax")),
    };
    let groups = keys.optional_size("num_expert_group", EXPERTS_MAX)?.unwrap_or(1);
    let kept = keys.optional_size("topk_group", EXPERTS_MAX)?.unwrap_or(1);
    let groups = (groups > 1 && groups > kept).then_some((groups, kept));
    if let Some((groups, kept)) = groups {
        if !experts.is_multiple_of(groups) || experts / groups < 2 {
            return Err(keys.invalid("num_expert_group", "a divisor of num_experts with two experts a group"));
        }
        if kept * (experts / groups) < top_k {
            return Err(keys.invalid("topk_group", "groups that hold at least num_experts_per_token experts"));
        }
    }
    let latent = keys.optional_size("routed_expert_hidden_size", DIMENSION_MAX)?;
    Ok(Some(Moe {
        experts,
        top_k,
        shared: keys.optional("num_shared_experts", 1 << 10)?.unwrap_or(0) as usize,
        intermediate: keys.size("moe_intermediate_size", DIMENSION_MAX)?,
        input: latent.unwrap_or(hidden),
        latent: latent.is_some(),
        latent_norm: latent.is_some() && keys.boolean("latent_moe_use_norm", false)?,
        first_dense: keys.optional("first_k_dense_replace", LAYERS_MAX)?.unwrap_or(0) as usize,
        frequency: keys.optional_size("moe_layer_freq", LAYERS_MAX)?.unwrap_or(1),
        score,
        renormalize: keys.boolean("moe_renormalize", true)?,
        scaling: keys.float("routed_scaling_factor")?.unwrap_or(1.0),
        groups,
    }))
}

fn kda(text: &Map<String, Value>) -> Result<Kda, ConfigError> {
    let keys = Keys(linear_attention(text)?);
    let lower_bound = keys.float("gate_lower_bound")?;
    if lower_bound.is_some_and(|bound| bound >= 0.0) {
        return Err(keys.invalid("gate_lower_bound", "a negative number"));
    }
    let conv_kernel = keys.size("short_conv_kernel_size", CONV_KERNEL_MAX)?;
    Ok(Kda {
        heads: keys.size("num_heads", HEADS_MAX)?,
        dim: keys.size("head_dim", 1 << 12)?,
        conv_kernel,
        full_rank_gate: keys.boolean("use_full_rank_gate", false)?,
        lower_bound,
    })
}

fn linear_attention(text: &Map<String, Value>) -> Result<&Map<String, Value>, ConfigError> {
    object("linear_attn_config", text.get("linear_attn_config").ok_or_else(|| missing("linear_attn_config"))?)
}

fn mla(keys: &Keys) -> Result<Mla, ConfigError> {
    let heads = keys.size("num_attention_heads", HEADS_MAX)?;
    if keys.optional_size("num_key_value_heads", HEADS_MAX)?.unwrap_or(heads) != heads {
        return Err(keys.unsupported("num_key_value_heads", "as many as num_attention_heads"));
    }
    Ok(Mla {
        heads,
        q_lora: keys.optional_size("q_lora_rank", DIMENSION_MAX)?,
        kv_lora: keys.size("kv_lora_rank", DIMENSION_MAX)?,
        nope: keys.size("qk_nope_head_dim", DIMENSION_MAX)?,
        rope: keys.size("qk_rope_head_dim", DIMENSION_MAX)?,
        value: keys.size("v_head_dim", DIMENSION_MAX)?,
        output_gate: keys.boolean("mla_use_output_gate", false)?,
    })
}

/// The two 1-based lists must partition the layers.
fn mixers(text: &Map<String, Value>, layers: usize) -> Result<Vec<Mixer>, ConfigError> {
    let keys = linear_attention(text)?;
    let mut mixers = vec![None; layers];
    for (key, mixer) in [("kda_layers", Mixer::Kda), ("full_attn_layers", Mixer::Mla)] {
        let invalid = || Keys(keys).invalid(key, &format!("layer numbers from 1 to {layers}, each once"));
        let listed = keys.get(key).ok_or_else(|| missing(key))?.as_array().ok_or_else(invalid)?;
        for number in listed {
            let layer = number.as_u64().filter(|&n| n >= 1 && n <= layers as u64).ok_or_else(invalid)?;
            if mixers[layer as usize - 1].replace(mixer).is_some() {
                return Err(invalid());
            }
        }
    }
    mixers.iter().position(Option::is_none).map_or(Ok(()), |layer| {
        Err(ConfigError::Invalid {
            key: "linear_attn_config".to_owned(),
            found: format!("layer {} in neither list", layer + 1),
            expected: "kda_layers and full_attn_layers that name every layer once".to_owned(),
        })
    })?;
    Ok(mixers.into_iter().flatten().collect())
}

fn eos(text: &Map<String, Value>, outer: Option<&Map<String, Value>>) -> Result<Vec<u32>, ConfigError> {
    let keys = Keys(text);
    let found = keys.get("eos_token_id").or_else(|| outer.and_then(|outer| Keys(outer).get("eos_token_id")));
    read_eos(found).ok_or_else(|| keys.invalid("eos_token_id", "a token id or a list of at most 64 of them"))
}

/// Token ids that end a generation: one, a list, or none.
pub fn read_eos(value: Option<&Value>) -> Option<Vec<u32>> {
    let id = |value: &Value| value.as_u64().filter(|&id| id <= VOCAB_MAX).map(|id| id as u32);
    match value {
        None | Some(Value::Null) => Some(Vec::new()),
        Some(Value::Array(ids)) if ids.len() <= 64 => ids.iter().map(id).collect(),
        Some(value) => Some(vec![id(value)?]),
    }
}

fn read_vision(vision: &Map<String, Value>) -> Result<Vision, ConfigError> {
    let keys = Keys(vision);
    Ok(Vision {
        hidden: keys.size("vt_hidden_size", DIMENSION_MAX)?,
        layers: keys.size("vt_num_hidden_layers", LAYERS_MAX)?,
        heads: keys.size("vt_num_attention_heads", HEADS_MAX)?,
        qkv: keys.size("qkv_hidden_size", DIMENSION_MAX)?,
        intermediate: keys.size("vt_intermediate_size", DIMENSION_MAX)?,
        patch: keys.size("patch_size", 1 << 10)?,
        positions: (keys.size("init_pos_emb_height", 1 << 12)?, keys.size("init_pos_emb_width", 1 << 12)?),
        text_hidden: keys.size("text_hidden_size", DIMENSION_MAX)?,
    })
}
