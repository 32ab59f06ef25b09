//! Multi-head latent attention in its absorbed form, on a cache of latents (architecture.md §5).

use rayon::prelude::*;
use waste_common::plan::scratch::MlaBuffers;

use super::{by_token, cut};
use crate::compute::Compute;
use crate::matrix::Matrix;

/// Epsilon of `q_a_layernorm` and `kv_a_layernorm`: the published code's class default, not `rms_norm_eps`.
pub const LATENT_NORM_EPS: f32 = 1e-6;

/// The query projection.
pub enum Query {
    /// `q_proj` [heads · (nope + rope), hidden].
    Direct(Matrix),
    /// `q_b_proj · rms(q_a_proj · x)`.
    LowRank {
        /// [rank, hidden]
        down: Matrix,
        /// [rank]
        norm: Vec<f32>,
        /// [heads · (nope + rope), rank]
        up: Matrix,
    },
}

/// The weights of an MLA layer.
pub struct MlaLayer {
    /// Heads.
    pub heads: usize,
    /// Key columns from the latent.
    pub nope: usize,
    /// Shared key columns.
    pub rope: usize,
    /// Value dimension.
    pub value: usize,
    /// Width of the latent.
    pub kv_lora: usize,
    /// Query projection.
    pub query: Query,
    /// `kv_a_proj_with_mqa` [kv_lora + rope, hidden].
    pub latent: Matrix,
    /// `kv_a_layernorm` [kv_lora].
    pub latent_norm: Vec<f32>,
    /// `kv_b_proj` [heads · (nope + value), kv_lora]: a head's key rows, then its value rows.
    pub expand: Matrix,
    /// `g_proj` [heads · value, hidden].
    pub gate: Option<Matrix>,
    /// `o_proj` [hidden, heads · value].
    pub out: Matrix,
}

impl MlaLayer {
    /// `out = MLA(x)` for [tokens, hidden] that follow `position` cached tokens. `cache` is [ctx, kv_lora + rope] and
    /// gets the new tokens' rows.
    #[allow(clippy::too_many_arguments)]
    pub fn forward(
        &self,
        compute: &Compute,
        x: &[f32],
        position: usize,
        cache: &mut [f32],
        out: &mut [f32],
        mut buffer: &mut [f32],
        sizes: &MlaBuffers,
    ) {
        let kernels = compute.kernels;
        let cached = self.kv_lora + self.rope;
        let tokens = sizes.latents / cached;
        let queries = cut(&mut buffer, sizes.queries);
        let bottleneck = cut(&mut buffer, sizes.bottleneck);
        let bottleneck_normed = cut(&mut buffer, sizes.bottleneck);
        let raw = cut(&mut buffer, sizes.latents);
        let heads_out = cut(&mut buffer, sizes.outputs);
        let mixed = cut(&mut buffer, sizes.outputs);
        let gate = cut(&mut buffer, sizes.outputs);
        let threads = cut(&mut buffer, sizes.threads * sizes.per_thread);

        match &self.query {
            Query::Direct(projection) => projection.apply(compute, x, queries),
            Query::LowRank { down, norm, up } => {
                down.apply(compute, x, bottleneck);
                compute.tokens(bottleneck_normed, norm.len(), |t, normed| {
                    let row = &bottleneck[t * norm.len()..(t + 1) * norm.len()];
                    (kernels.rms_norm)(row, norm, LATENT_NORM_EPS, normed);
                });
                up.apply(compute, bottleneck_normed, queries);
            }
        }
        self.latent.apply(compute, x, raw);
        let new = &mut cache[position * cached..(position + tokens) * cached];
        for (row, raw) in new.chunks_exact_mut(cached).zip(raw.chunks_exact(cached)) {
            let (latent, key) = row.split_at_mut(self.kv_lora);
            (kernels.rms_norm)(&raw[..self.kv_lora], &self.latent_norm, LATENT_NORM_EPS, latent);
            key.copy_from_slice(&raw[self.kv_lora..]);
        }

        let cache = &*cache;
        let share = self.heads.div_ceil(sizes.threads);
        heads_out
            .par_chunks_mut(share * tokens * self.value)
            .zip(threads.par_chunks_mut(sizes.per_thread))
            .enumerate()
            .for_each(|(i, (out, buffer))| {
                for (h, out) in out.chunks_exact_mut(tokens * self.value).enumerate() {
                    self.attend(compute, i * share + h, queries, position, cache, out, buffer);
                }
            });
        by_token(heads_out, tokens, self.value, mixed);
        if let Some(projection) = &self.gate {
            projection.apply(compute, x, gate);
            compute.rows(mixed, 16, |first, mixed| {
                (kernels.gate)(mixed, &gate[first..first + mixed.len()]);
            });
        }
        self.out.apply(compute, mixed, out);
    }

    /// One head over all tokens of the chunk: `out` is [tokens, value].
    #[allow(clippy::too_many_arguments)]
    pub fn attend(
        &self,
        compute: &Compute,
        head: usize,
        queries: &[f32],
        position: usize,
        cache: &[f32],
        out: &mut [f32],
        mut buffer: &mut [f32],
    ) {
        let kernels = compute.kernels;
        let (lora, cached, key) = (self.kv_lora, self.kv_lora + self.rope, self.nope + self.rope);
        let rows = cut(&mut buffer, self.nope * lora);
        let absorbed = cut(&mut buffer, cached);
        let context = cut(&mut buffer, lora);
        let scores = buffer;
        let first = head * (self.nope + self.value);
        for (i, row) in rows.chunks_exact_mut(lora).enumerate() {
            self.expand.decode_row(first + i, row);
        }
        let scale = 1.0 / (key as f32).sqrt();
        for (t, out) in out.chunks_exact_mut(self.value).enumerate() {
            let query = &queries[(t * self.heads + head) * key..][..key];
            let (nope, rope) = query.split_at(self.nope);
            let (latent, shared) = absorbed.split_at_mut(lora);
            latent.fill(0.0);
            for (q, row) in nope.iter().zip(rows.chunks_exact(lora)) {
                (kernels.axpy)(*q, row, latent);
            }
            shared.copy_from_slice(rope);
            let scores = &mut scores[..position + t + 1];
            (kernels.rows_f32)(&cache[..scores.len() * cached], absorbed, scores);
            for score in scores.iter_mut() {
                *score *= scale;
            }
            (kernels.softmax)(scores);
            context.fill(0.0);
            for (score, row) in scores.iter().zip(cache.chunks_exact(cached)) {
                (kernels.axpy)(*score, &row[..lora], context);
            }
            self.expand.rows_into(kernels, first + self.nope, context, out);
        }
    }
}
