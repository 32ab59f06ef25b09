//! The layers of the model: weights, and one function a layer that takes a chunk of tokens through it.

pub mod attn_res;
pub mod embedding;
pub mod ffn;
pub mod kda;
pub mod kv_cache;
pub mod mla;
pub mod moe;
pub mod router;
pub mod tables;

/// Cuts the next `n` elements off a working buffer.
pub(crate) fn cut<'a>(buffer: &mut &'a mut [f32], n: usize) -> &'a mut [f32] {
    let (head, tail) = std::mem::take(buffer).split_at_mut(n);
    *buffer = tail;
    head
}

/// Gathers `[heads, tokens, dim]` into `[tokens, heads · dim]`.
pub(crate) fn by_token(heads: &[f32], tokens: usize, dim: usize, out: &mut [f32]) {
    let width = heads.len() / tokens;
    for (h, head) in heads.chunks_exact(tokens * dim).enumerate() {
        for (t, values) in head.chunks_exact(dim).enumerate() {
            out[t * width + h * dim..][..dim].copy_from_slice(values);
        }
    }
}
