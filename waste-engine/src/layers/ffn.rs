//! The gated FFN of dense layers and shared experts, and the activations (architecture.md §6).

use waste_common::config::Activation;

use super::cut;
use crate::compute::Compute;
use crate::kernels::Kernels;
use crate::matrix::{Matrix, apply_all};

/// `gate = act(gate, up)`.
pub fn activate(kernels: &Kernels, activation: Activation, gate: &mut [f32], up: &[f32]) {
    match activation {
        Activation::Silu => (kernels.silu_mul)(gate, up),
        Activation::Situ { beta, linear_beta } => {
            (kernels.situ_mul)(gate, up, beta, linear_beta.unwrap_or(f32::INFINITY));
        }
    }
}

/// A gated FFN.
pub struct Ffn {
    /// [inner, hidden]
    pub gate: Matrix,
    /// [inner, hidden]
    pub up: Matrix,
    /// [hidden, inner]
    pub down: Matrix,
}

impl Ffn {
    /// `out = down · act(gate · x, up · x)` for [tokens, hidden]; works in `2 · tokens · inner` elements of `buffer`.
    pub fn forward(
        &self,
        compute: &Compute,
        activation: Activation,
        x: &[f32],
        out: &mut [f32],
        mut buffer: &mut [f32],
    ) {
        let inner = self.gate.rows;
        let elements = x.len() / self.gate.cols * inner;
        let (gate, up) = (cut(&mut buffer, elements), cut(&mut buffer, elements));
        apply_all(compute, x, &mut [(&self.gate, &mut *gate), (&self.up, &mut *up)]);
        compute.rows(gate, 16, |first, gate| {
            activate(compute.kernels, activation, gate, &up[first..first + gate.len()]);
        });
        self.down.apply(compute, gate, out);
    }
}
