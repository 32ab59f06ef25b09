//! Attention residuals: a softmax mix of the running sum and the stored block sums (architecture.md §3b).

use crate::compute::Compute;

/// The weights of one mix.
pub struct AttnRes {
    /// `norm.weight · proj.weight`, elementwise: the only way in which the two are used. [hidden]
    pub weight: Vec<f32>,
    /// Epsilon of the norm.
    pub eps: f32,
}

/// Most stored blocks plus the running sum.
pub const ROWS_MAX: usize = 1025;

impl AttnRes {
    /// `out[t] = Σ_i softmax(s)_i · v_i` over the stored blocks and the prefix, with
    /// `s_i = (v_i · weight) / sqrt(mean(v_i²) + eps)`.
    ///
    /// `blocks` is [stored, capacity, hidden] with `stride` elements a block, `prefix` and `out` [tokens, hidden].
    pub fn mix(&self, compute: &Compute, blocks: &[f32], stride: usize, prefix: &[f32], out: &mut [f32]) {
        let (kernels, hidden) = (compute.kernels, self.weight.len());
        compute.tokens(out, hidden, |t, out| {
            let at = t * hidden..(t + 1) * hidden;
            let rows =
                || blocks.chunks_exact(stride).map(|block| &block[at.clone()]).chain([&prefix[at.clone()]]);
            let mut scores = [0.0; ROWS_MAX];
            let mut n = 0;
            for row in rows() {
                let mean_square = (kernels.dot)(row, row) / hidden as f32;
                scores[n] = (kernels.dot)(row, &self.weight) / (mean_square + self.eps).sqrt();
                n += 1;
            }
            (kernels.softmax)(&mut scores[..n]);
            out.fill(0.0);
            for (row, score) in rows().zip(scores) {
                (kernels.axpy)(score, row, out);
            }
        });
    }
}
