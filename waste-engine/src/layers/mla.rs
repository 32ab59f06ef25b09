//! Multi-head latent attention in its absorbed form, on a cache of latents (architecture.md §5).

use rayon::prelude::*;
use waste_common::plan::scratch::{CACHE_TILE, MlaBuffers, QUERIES};

use super::kv_cache::KvCache;
use super::{by_token, cut};
use crate::compute::Compute;
use crate::kernels::columns::Columns;
use crate::kernels::portable::RunningSoftmax;
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
    /// `out = MLA(x)` for [tokens, hidden] of as many sequences, each of which has its share of the tokens: they follow
    /// so many cached ones, and the cache gets the new ones' rows.
    pub fn forward(
        &self,
        compute: &Compute,
        x: &[f32],
        sequences: &mut [(usize, &mut KvCache)],
        out: &mut [f32],
        mut buffer: &mut [f32],
        sizes: &MlaBuffers,
    ) {
        let kernels = compute.kernels;
        let cached = self.kv_lora + self.rope;
        // Of each sequence.
        let tokens = sizes.latents / cached / sequences.len();
        let queries = cut(&mut buffer, sizes.queries);
        let bottleneck = cut(&mut buffer, sizes.bottleneck);
        let bottleneck_normed = cut(&mut buffer, sizes.bottleneck);
        let raw = cut(&mut buffer, sizes.latents);
        let normed = cut(&mut buffer, sizes.latent);
        let heads_out = cut(&mut buffer, sizes.outputs);
        let mixed = cut(&mut buffer, sizes.outputs);
        let gate = cut(&mut buffer, sizes.outputs);

        let gated = || {
            if let Some(projection) = &self.gate {
                projection.apply(compute, x, gate);
            }
        };
        let query = || match &self.query {
            Query::Direct(projection) => projection.apply(compute, x, queries),
            Query::LowRank { down, norm, up } => {
                down.apply(compute, x, bottleneck);
                compute.tokens(bottleneck_normed, norm.len(), |t, normed| {
                    let row = &bottleneck[t * norm.len()..(t + 1) * norm.len()];
                    (kernels.rms_norm)(row, norm, LATENT_NORM_EPS, normed);
                });
                up.apply(compute, bottleneck_normed, queries);
            }
        };
        let latent = || self.latent.apply(compute, x, raw);
        rayon::join(query, || rayon::join(latent, gated));
        for (t, raw) in raw.chunks_exact_mut(cached).enumerate() {
            let (latent, _) = raw.split_at_mut(self.kv_lora);
            (kernels.rms_norm)(latent, &self.latent_norm, LATENT_NORM_EPS, normed);
            latent.copy_from_slice(normed);
            let (position, cache) = &mut sequences[t / tokens];
            cache.store(*position + t % tokens, raw);
        }

        let block = (self.heads * tokens).div_ceil(4 * compute.threads()).min(QUERIES);
        let asked = tokens * self.heads * (self.nope + self.rope);
        let share = tokens * self.heads * self.value;
        let each = heads_out.par_chunks_mut(share).zip(queries.par_chunks(asked)).zip(sequences.par_iter());
        each.with_max_len(1).for_each(|((heads_out, queries), (position, cache))| {
            heads_out.par_chunks_mut(block * self.value).enumerate().with_max_len(1).for_each(|(b, out)| {
                self.attend(compute, b * block, tokens, queries, *position, cache, out);
            });
        });
        for (heads_out, mixed) in heads_out.chunks_exact(share).zip(mixed.chunks_exact_mut(share)) {
            by_token(heads_out, tokens, self.value, mixed);
        }
        if self.gate.is_some() {
            compute.rows(mixed, 16, |first, mixed| {
                (kernels.gate)(mixed, &gate[first..first + mixed.len()]);
            });
        }
        self.out.apply(compute, mixed, out);
    }

    /// A block of queries over the cache: number `first ..` of [heads, tokens], as many as `out`, [n, value], has
    /// rows, at most `QUERIES`. The cache goes by in tiles; each query keeps a running maximum, sum and mix, so nothing
    /// grows with the context and a query's result does not depend on its neighbours.
    #[allow(clippy::too_many_arguments)]
    pub fn attend(
        &self,
        compute: &Compute,
        first: usize,
        tokens: usize,
        queries: &[f32],
        position: usize,
        cache: &KvCache,
        out: &mut [f32],
    ) {
        let kernels = compute.kernels;
        let (lora, cached, key) = (self.kv_lora, self.kv_lora + self.rope, self.nope + self.rope);
        let n = out.len() / self.value;
        let len = lora + n * (cached + lora + CACHE_TILE) + CACHE_TILE * cached;
        compute.with_scratch(len, |mut buffer| {
            let row = cut(&mut buffer, lora);
            let absorbed = cut(&mut buffer, n * cached);
            let mixes = cut(&mut buffer, n * lora);
            let scores = cut(&mut buffer, n * CACHE_TILE);
            let decoded_tile = buffer;
            let place = |query: usize| ((first + query) / tokens, (first + query) % tokens);
            let query = |i: usize| {
                let (head, token) = place(i);
                &queries[(token * self.heads + head) * key..][..key]
            };

            // A head's key rows, each decoded once, times the queries of all its tokens.
            let mut start = 0;
            while start < n {
                let head = place(start).0;
                let end = ((head + 1) * tokens - first).min(n);
                let absorbed = &mut absorbed[start * cached..end * cached];
                for (absorbed, i) in absorbed.chunks_exact_mut(cached).zip(start..) {
                    absorbed[..lora].fill(0.0);
                    absorbed[lora..].copy_from_slice(&query(i)[self.nope..]);
                }
                for d in 0..self.nope {
                    self.expand.decode_row(kernels, head * (self.nope + self.value) + d, row);
                    for (absorbed, i) in absorbed.chunks_exact_mut(cached).zip(start..) {
                        (kernels.axpy)(query(i)[d], row, &mut absorbed[..lora]);
                    }
                }
                start = end;
            }

            let scale = 1.0 / (key as f32).sqrt();
            let mut running = [RunningSoftmax::EMPTY; QUERIES];
            mixes.fill(0.0);
            let seen = |query: usize| position + place(query).1 + 1;
            let end = (0..n).map(seen).max().unwrap_or(0);
            for start in (0..end).step_by(CACHE_TILE) {
                let tile = cache.rows(kernels, start, end.min(start + CACHE_TILE), decoded_tile);
                (kernels.gemm)(tile, absorbed, cached, &mut Columns::new(scores, CACHE_TILE));
                let queries =
                    scores.chunks_exact_mut(CACHE_TILE).zip(mixes.chunks_exact_mut(lora)).zip(&mut running);
                for (i, ((scores, mix), running)) in queries.enumerate() {
                    let visible = seen(i).saturating_sub(start).min(tile.len() / cached);
                    if visible > 0 {
                        (kernels.attend_tile)(&mut scores[..visible], scale, tile, cached, running, mix);
                    }
                }
            }
            let rows = out.chunks_exact_mut(self.value).zip(mixes.chunks_exact_mut(lora));
            for (i, (out, mix)) in rows.enumerate() {
                let share = 1.0 / running[i].sum;
                mix.iter_mut().for_each(|x| *x *= share);
                self.expand.rows_into(kernels, place(i).0 * (self.nope + self.value) + self.nope, mix, out);
            }
        });
    }
}
