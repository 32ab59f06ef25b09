//! Every buffer the engine works in, by name. The engine allocates exactly these, so the plan counts them exactly.

use crate::config::{Mixer, ModelConfig};

/// What the size of the working buffers depends on, besides the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScratchOptions {
    /// Tokens of a prefill chunk.
    pub chunk: usize,
    /// Sequences that may decode together.
    pub parallel: usize,
    /// Compute threads.
    pub threads: usize,
    /// How the experts are stored.
    pub experts: ExpertStorage,
}

/// How routed experts are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertStorage {
    /// f32 matrices (a checkpoint opened directly).
    Dense,
    /// Vector quantised.
    Vq {
        /// Codebooks summed for a vector.
        stages: usize,
        /// Entries an index can name: 256, or 64 for six-bit indices.
        entries: usize,
    },
}

/// Rows of a matrix that are decoded to f32 at a time.
pub const TILE_ROWS: usize = 32;
/// Rows of a block of VQ indices.
pub const BLOCK_ROWS: usize = 64;
/// Vectors whose table entries share a unit in the fast arithmetic.
pub const TABLE_BLOCK: usize = 32;
/// Queries that attend to the cache together.
pub const QUERIES: usize = 32;
/// Cached tokens they see at a time.
pub const CACHE_TILE: usize = 64;
/// Positions whose logits are computed at a time.
pub const LOGIT_ROWS: usize = 8;

/// Numbers of f32 elements of all working buffers. T = tokens of a chunk or sequences that decode together, whichever
/// are more; h = hidden size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scratch {
    /// [T, h] four times: the stream, its mix, the normed input, a sublayer's output.
    pub stream: usize,
    /// [stored blocks, T, h] of attention residuals.
    pub blocks: usize,
    /// The largest of what a mixer or an FFN works in.
    pub stage: usize,
    /// [T, experts] router scores, [T, top-k] weights, and three times [experts] to choose in.
    pub router: usize,
    /// Tables of partial dot products: gate, up, and a token's experts' down, for each sequence; f32 entries, which take
    /// more than 16-bit ones.
    pub tables: usize,
    /// What a thread works in, for all threads: [`thread`](Self::thread) each.
    pub threads: usize,
    /// [`LOGIT_ROWS`, vocabulary].
    pub logits: usize,
    /// Codebooks of all layers, decoded, twice: by entry and by dimension.
    pub codebooks: usize,
}

impl Scratch {
    /// Sizes for a model.
    pub fn of(config: &ModelConfig, options: &ScratchOptions) -> Self {
        let (t, hidden) = (options.chunk.max(options.parallel), config.hidden);
        let blocks = config.attn_res_block.map_or(0, |block| config.layers().div_ceil(block));
        let mut scratch = Scratch {
            stream: 4 * t * hidden,
            blocks: blocks * t * hidden,
            stage: 0,
            router: 0,
            tables: 0,
            threads: options.threads * Self::thread(config, &options.experts),
            logits: LOGIT_ROWS * config.vocab,
            codebooks: 0,
        };
        let stage = |scratch: &mut Scratch, elements| scratch.stage = scratch.stage.max(elements);
        if config.count(Mixer::Kda) > 0 {
            stage(&mut scratch, KdaBuffers::of(config, t).total());
        }
        if config.count(Mixer::Mla) > 0 {
            stage(&mut scratch, MlaBuffers::of(config, t).total());
        }
        if (0..config.layers()).any(|layer| config.moe_of(layer).is_none()) {
            stage(&mut scratch, 2 * t * config.dense_intermediate);
        }
        if let Some(moe) = &config.moe {
            stage(&mut scratch, MoeBuffers::of(config, t).total());
            stage(&mut scratch, MoeBuffers::together(config, options.parallel).total());
            scratch.router = t * (moe.experts + moe.top_k) + 3 * moe.experts;
            if let ExpertStorage::Vq { stages, entries } = options.experts {
                let table = |columns: usize| columns / 8 * stages * entries;
                scratch.tables =
                    options.parallel * (2 * table(moe.input) + moe.top_k * table(moe.intermediate));
                scratch.codebooks = 2 * config.moe_layers().count() * 3 * stages * entries * 8;
            }
        }
        scratch
    }

    /// Bytes of all buffers.
    pub fn bytes(&self) -> u64 {
        let Scratch { stream, blocks, stage, router, tables, threads, logits, codebooks } = self;
        let elements = [stream, blocks, stage, router, tables, threads, logits, codebooks];
        4 * elements.iter().map(|&&n| n as u64).sum::<u64>()
    }

    /// Elements one thread works in: decoded rows of the trunk or of an expert, queries that attend to the cache, or
    /// table entries before they are rounded. Inputs as whole numbers, of as many sequences as decode together, take less
    /// than decoded rows.
    pub fn thread(config: &ModelConfig, experts: &ExpertStorage) -> usize {
        let expert = config.moe.as_ref().map_or(0, |moe| moe.input.max(moe.intermediate));
        let tile = TILE_ROWS * widest_row(config).max(expert);
        let attend = if config.count(Mixer::Mla) > 0 { attend_len(config) } else { 0 };
        let block = match experts {
            ExpertStorage::Dense => 0,
            ExpertStorage::Vq { stages, entries } => TABLE_BLOCK * stages * entries,
        };
        tile.max(attend).max(block)
    }
}

/// Columns of the widest matrix of the trunk.
fn widest_row(config: &ModelConfig) -> usize {
    let (kda, mla) = (&config.kda, &config.mla);
    let shared = config.moe.as_ref().map_or(0, |moe| moe.input.max(moe.shared * moe.intermediate));
    let widths =
        [config.hidden, config.dense_intermediate, kda.width(), mla.heads * mla.value, mla.kv_lora, shared];
    widths.into_iter().chain(mla.q_lora).max().unwrap_or(0)
}

/// Elements of a KDA layer's buffers, in the order in which they stand in the stage buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KdaBuffers {
    /// [T, heads · dim] each of q, k, v, decay, gate, and q, k, v before the convolution.
    pub wide: usize,
    /// [T, dim] twice: the decay's and the gate's bottleneck.
    pub low_rank: usize,
    /// [T, heads] of beta.
    pub beta: usize,
}

impl KdaBuffers {
    /// Sizes for a chunk of `t` tokens.
    pub fn of(config: &ModelConfig, t: usize) -> Self {
        KdaBuffers { wide: t * config.kda.width(), low_rank: t * config.kda.dim, beta: t * config.kda.heads }
    }

    /// Elements of all of them.
    pub fn total(&self) -> usize {
        8 * self.wide + 2 * self.low_rank + self.beta
    }
}

/// Elements of an MLA layer's buffers, in the order in which they stand in the stage buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlaBuffers {
    /// [T, heads · (nope + rope)] queries.
    pub queries: usize,
    /// [T, q_lora] twice: the query's bottleneck and its norm.
    pub bottleneck: usize,
    /// [T, kv_lora + rope] raw latents.
    pub latents: usize,
    /// [kv_lora] of a normed latent.
    pub latent: usize,
    /// [T, heads · value] three times: by head, by token, and the gate.
    pub outputs: usize,
}

/// Elements in which a block of queries attends to the cache: a key row, `QUERIES` absorbed queries, mixed latents and
/// tiles of scores, a tile of the cache.
pub fn attend_len(config: &ModelConfig) -> usize {
    let mla = &config.mla;
    mla.kv_lora + QUERIES * (mla.cached() + mla.kv_lora + CACHE_TILE) + CACHE_TILE * mla.cached()
}

impl MlaBuffers {
    /// Sizes for a chunk of `t` tokens.
    pub fn of(config: &ModelConfig, t: usize) -> Self {
        let mla = &config.mla;
        MlaBuffers {
            queries: t * mla.heads * (mla.nope + mla.rope),
            bottleneck: t * mla.q_lora.unwrap_or(0),
            latents: t * mla.cached(),
            latent: mla.kv_lora,
            outputs: t * mla.heads * mla.value,
        }
    }

    /// Elements of all of them.
    pub fn total(&self) -> usize {
        let Self { queries, bottleneck, latents, latent, outputs } = self;
        queries + 2 * bottleneck + latents + latent + 3 * outputs
    }
}

/// Elements of an MoE layer's buffers, in the order in which they stand in the stage buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoeBuffers {
    /// [T, input] three times: the latent, an expert's gathered inputs, the weighted sum.
    pub inputs: usize,
    /// [T, top-k, input] of expert outputs, summed in rank order.
    pub outputs: usize,
    /// [T, or top-k of each token that is decoded, intermediate in whole blocks] three times: gate, up, and the activation
    /// by token.
    pub inner: usize,
    /// [T, input in whole blocks] of one expert's output.
    pub down: usize,
    /// [T, shared width] twice.
    pub shared: usize,
}

impl MoeBuffers {
    /// Sizes for a chunk of `t` tokens; nothing without experts.
    pub fn of(config: &ModelConfig, t: usize) -> Self {
        let Some(moe) = &config.moe else {
            return MoeBuffers { inputs: 0, outputs: 0, inner: 0, down: 0, shared: 0 };
        };
        MoeBuffers {
            inputs: t * moe.input,
            outputs: t * moe.top_k * moe.input,
            inner: t.max(moe.top_k) * moe.intermediate.next_multiple_of(BLOCK_ROWS),
            down: t * moe.input.next_multiple_of(BLOCK_ROWS),
            shared: t * moe.shared * moe.intermediate,
        }
    }

    /// Sizes for a token each of `n` sequences that decode together.
    pub fn together(config: &ModelConfig, n: usize) -> Self {
        let one = Self::of(config, 1);
        MoeBuffers { inner: n * one.inner, ..Self::of(config, n) }
    }

    /// Elements of all of them.
    pub fn total(&self) -> usize {
        3 * self.inputs + self.outputs + 3 * self.inner + self.down + 2 * self.shared
    }
}
