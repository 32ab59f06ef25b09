//! Kimi Delta Attention: short convolutions, gated delta rule, gated norm (architecture.md §4).

use rayon::prelude::*;
use waste_common::plan::scratch::KdaBuffers;

use super::{by_token, cut};
use crate::compute::Compute;
use crate::kernels::portable::KdaHead;
use crate::matrix::{Matrix, apply_all};

/// Added to the sum of squares of q and k: not to the mean, and not `rms_norm_eps`.
pub const L2_EPS: f32 = 1e-6;
/// Most taps of the convolution.
const TAPS_MAX: usize = 64;

/// The output gate.
pub enum Gate {
    /// `g_proj`.
    Full(Matrix),
    /// `g_b_proj · g_a_proj`, nothing between.
    LowRank(Matrix, Matrix),
}

/// The log decay's form.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// `-A · softplus(z)`.
    Softplus,
    /// `bound · sigmoid(A · z)`.
    Bounded(f32),
}

/// The weights of a KDA layer. W = heads · dim.
pub struct KdaLayer {
    /// Heads.
    pub heads: usize,
    /// Dimension of a head.
    pub dim: usize,
    /// q, k, v projections, [W, hidden].
    pub qkv: [Matrix; 3],
    /// q, k, v convolutions, [taps, W], oldest tap first.
    pub conv: [Vec<f32>; 3],
    /// Decay's low-rank projection: `f_a_proj` [dim, hidden], `f_b_proj` [W, dim].
    pub decay_projection: (Matrix, Matrix),
    /// `exp(A_log)` of each head.
    pub a: Vec<f32>,
    /// [W]
    pub dt_bias: Vec<f32>,
    /// Form of the log decay.
    pub decay: Decay,
    /// `b_proj` [heads, hidden].
    pub beta: Matrix,
    /// Output gate, [W, hidden].
    pub gate: Gate,
    /// `o_norm` [dim].
    pub norm: Vec<f32>,
    /// Epsilon of `o_norm`.
    pub eps: f32,
    /// `o_proj` [hidden, W].
    pub out: Matrix,
}

/// What a KDA layer carries from token to token.
#[derive(Clone, Debug, PartialEq)]
pub struct KdaState {
    /// [heads, key dim, value dim]
    pub recurrent: Vec<f32>,
    /// The last inputs of the q, k, v convolutions, [taps − 1, W], oldest first.
    pub conv: [Vec<f32>; 3],
}

impl KdaState {
    /// The state before the first token.
    pub fn new(heads: usize, dim: usize, taps: usize) -> Self {
        let history = || vec![0.0; (taps - 1) * heads * dim];
        KdaState { recurrent: vec![0.0; heads * dim * dim], conv: [history(), history(), history()] }
    }
}

impl KdaLayer {
    /// `out = KDA(x)` for [tokens, hidden], carrying on the states of as many sequences, each of which has its share of
    /// the tokens.
    pub fn forward(
        &self,
        compute: &Compute,
        x: &[f32],
        states: &mut [&mut KdaState],
        out: &mut [f32],
        mut buffer: &mut [f32],
        sizes: &KdaBuffers,
    ) {
        let kernels = compute.kernels;
        let (dim, width) = (self.dim, self.heads * self.dim);
        // Of each sequence.
        let tokens = sizes.wide / width / states.len();
        let share = tokens * width;
        let [q, k, v, decay, gate, raw_q, raw_k, raw_v] =
            std::array::from_fn(|_| cut(&mut buffer, sizes.wide));
        let (decay_low, gate_low) = (cut(&mut buffer, sizes.low_rank), cut(&mut buffer, sizes.low_rank));
        let beta = cut(&mut buffer, sizes.beta);

        // What x alone is needed for, then what that is needed for: two parallel steps.
        let mut projections = [
            (&self.qkv[0], &mut *raw_q),
            (&self.qkv[1], &mut *raw_k),
            (&self.qkv[2], &mut *raw_v),
            (&self.decay_projection.0, &mut *decay_low),
            match &self.gate {
                Gate::Full(projection) => (projection, &mut *gate),
                Gate::LowRank(down, _) => (down, &mut *gate_low),
            },
            (&self.beta, &mut *beta),
        ];
        apply_all(compute, x, &mut projections);
        let decayed = || {
            self.decay_projection.1.apply(compute, decay_low, decay);
            compute.tokens(decay, dim, |i, z| {
                let head = i % self.heads;
                let bias = &self.dt_bias[head * dim..(head + 1) * dim];
                match self.decay {
                    Decay::Softplus => (kernels.decay_softplus)(z, bias, self.a[head]),
                    Decay::Bounded(bound) => (kernels.decay_bounded)(z, bias, self.a[head], bound),
                }
                (kernels.exp)(z);
            });
        };
        let gated = || {
            if let Gate::LowRank(_, up) = &self.gate {
                up.apply(compute, gate_low, gate);
            }
        };
        let convolved = |i: usize, history: &mut [f32], raw: &[f32], y: &mut [f32], scale: Option<f32>| {
            convolve(compute, &self.conv[i], history, raw, y, width);
            if let Some(scale) = scale {
                compute.tokens(y, dim, |_, y| l2_normalise(kernels.dot, y, scale));
            }
        };
        let convolutions = || {
            let inputs = raw_q.par_chunks(share).zip(raw_k.par_chunks(share)).zip(raw_v.par_chunks(share));
            let outputs = q.par_chunks_mut(share).zip(k.par_chunks_mut(share)).zip(v.par_chunks_mut(share));
            let sequences = states.par_iter_mut().zip(inputs).zip(outputs).with_max_len(1);
            sequences.for_each(|((state, ((raw_q, raw_k), raw_v)), ((q, k), v))| {
                let [past_q, past_k, past_v] = &mut state.conv;
                rayon::join(
                    || convolved(0, past_q, raw_q, q, Some(1.0 / (dim as f32).sqrt())),
                    || convolved(1, past_k, raw_k, k, Some(1.0)),
                );
                convolved(2, past_v, raw_v, v, None);
            });
        };
        rayon::join(convolutions, || rayon::join(decayed, gated));
        (kernels.sigmoid)(beta);

        let heads_out = raw_q;
        let sequences =
            heads_out.par_chunks_mut(share).zip(states.par_iter_mut()).enumerate().with_max_len(1);
        sequences.for_each(|(s, (heads_out, state))| {
            let heads = heads_out.par_chunks_mut(tokens * dim).zip(state.recurrent.par_chunks_mut(dim * dim));
            heads.enumerate().for_each(|(h, (o, state))| {
                for (t, o) in o.chunks_exact_mut(dim).enumerate() {
                    let token = s * tokens + t;
                    let at = token * width + h * dim;
                    let at = at..at + dim;
                    let head = KdaHead {
                        q: &q[at.clone()],
                        k: &k[at.clone()],
                        v: &v[at.clone()],
                        decay: &decay[at],
                        beta: beta[token * self.heads + h],
                    };
                    (kernels.kda_step)(state, head, o);
                }
            });
        });
        let o = q;
        for (heads_out, o) in heads_out.chunks_exact(share).zip(o.chunks_exact_mut(share)) {
            by_token(heads_out, tokens, dim, o);
        }
        let normed = v;
        compute.tokens(normed, dim, |i, normed| {
            let at = i * dim..(i + 1) * dim;
            (kernels.rms_norm)(&o[at.clone()], &self.norm, self.eps, normed);
            (kernels.gate)(normed, &gate[at]);
        });
        self.out.apply(compute, normed, out);
    }
}

/// `x = x / sqrt(Σ x² + 1e-6) · scale`.
pub fn l2_normalise(dot: fn(&[f32], &[f32]) -> f32, x: &mut [f32], scale: f32) {
    let factor = 1.0 / (dot(x, x) + L2_EPS).sqrt() * scale;
    for x in x {
        *x *= factor;
    }
}

/// Causal depthwise convolution and SiLU over [tokens, width]; `history` ends as the last inputs.
pub fn convolve(
    compute: &Compute,
    weight: &[f32],
    history: &mut [f32],
    x: &[f32],
    y: &mut [f32],
    width: usize,
) {
    let taps = weight.len() / width;
    let past = taps - 1;
    let input = |t: usize| match t.checked_sub(past) {
        Some(t) => &x[t * width..(t + 1) * width],
        None => &history[t * width..(t + 1) * width],
    };
    compute.tokens(y, width, |t, y| {
        let mut slices: [&[f32]; TAPS_MAX] = [&[]; TAPS_MAX];
        for (j, slice) in slices[..taps].iter_mut().enumerate() {
            *slice = input(t + j);
        }
        (compute.kernels.conv_silu)(&slices[..taps], weight, y);
    });
    let tokens = x.len() / width;
    if tokens >= past {
        history.copy_from_slice(&x[(tokens - past) * width..]);
    } else {
        history.copy_within(tokens * width.., 0);
        history[(past - tokens) * width..].copy_from_slice(x);
    }
}
