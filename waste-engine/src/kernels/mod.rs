//! The arithmetic of the engine, behind one table chosen once at open.
//!
//! [`portable`] defines every operation: 16 f32 lanes, fused multiply-add, a fixed reduction tree, one
//! implementation of exp, sigmoid, tanh and softplus. The other sets are the same definition compiled for the
//! instructions a CPU has, so every set gives the same bits.
#![allow(unsafe_code)]

pub mod columns;
pub mod gemm;
pub mod math;
pub mod portable;

use crate::error::EngineError;
use columns::Columns;

/// One matrix kernel over rows of f32 weights: `(weights [rows, cols], x [cols], out [rows])`.
pub type RowsF32 = fn(&[f32], &[f32], &mut [f32]);
/// One matrix kernel over rows of f16 weights: `(weights [rows, cols], x [cols], out [rows])`.
pub type RowsF16 = fn(&[u16], &[f32], &mut [f32]);
/// One matrix kernel over rows quantised in groups of 128: `(payload, f16 scales, x [cols], out [rows])`.
pub type RowsQuant = fn(&[u8], &[u16], &[f32], &mut [f32]);

macro_rules! kernel_table {
    ($( $(#[$doc:meta])* $kernel:ident: fn($($arg:ident: $type:ty),*) $(-> $ret:ty)?; )*) => {
        /// The kernels of one instruction set.
        #[derive(Clone, Copy)]
        pub struct Kernels {
            /// `portable`, `avx2`, …
            pub name: &'static str,
            /// Rows of f32 weights times tokens: `(weights [rows, cols], x [tokens, cols], cols, out [tokens, rows])`.
            pub gemm: fn(&[f32], &[f32], usize, &mut Columns),
            $( $(#[$doc])* pub $kernel: fn($($type),*) $(-> $ret)?, )*
        }

        static PORTABLE: Kernels = Kernels { name: "portable", gemm: gemm::gemm, $( $kernel: portable::$kernel, )* };

        #[cfg(target_arch = "x86_64")]
        mod avx2 {
            use super::{Kernels, gemm::gemm_avx2, portable};

            $(
                #[target_feature(enable = "avx2,fma,f16c")]
                fn $kernel($($arg: $type),*) $(-> $ret)? {
                    portable::$kernel($($arg),*)
                }
            )*

            pub(super) static TABLE: Kernels = Kernels {
                name: "avx2",
                // SAFETY: as below.
                gemm: |weights, x, cols, out| unsafe { gemm_avx2(weights, x, cols, out) },
                // SAFETY: `Kernels::named` hands this table out only after it has seen the CPU report AVX2, FMA and F16C.
                $( $kernel: |$($arg),*| unsafe { self::$kernel($($arg),*) }, )*
            };
        }
    };
}

kernel_table! {
    /// Dot products of rows of f32 weights with `x`.
    rows_f32: fn(weights: &[f32], x: &[f32], out: &mut [f32]);
    /// Dot products of rows of f16 weights with `x`.
    rows_f16: fn(weights: &[u16], x: &[f32], out: &mut [f32]);
    /// f16 numbers as f32.
    widen_f16: fn(x: &[u16], out: &mut [f32]);
    /// Dot products of Q8G rows with `x`.
    rows_q8: fn(payload: &[u8], scales: &[u16], x: &[f32], out: &mut [f32]);
    /// Dot products of Q4G rows with `x`.
    rows_q4: fn(payload: &[u8], scales: &[u16], x: &[f32], out: &mut [f32]);
    /// Dot products of Q3G rows with `x`.
    rows_q3: fn(payload: &[u8], scales: &[u16], x: &[f32], out: &mut [f32]);
    /// Dot product.
    dot: fn(a: &[f32], b: &[f32]) -> f32;
    /// `y += a · x`.
    axpy: fn(a: f32, x: &[f32], y: &mut [f32]);
    /// RMS norm: `out = x / sqrt(mean(x²) + eps) · weight`.
    rms_norm: fn(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]);
    /// Softmax in place, the maximum subtracted.
    softmax: fn(x: &mut [f32]);
    /// One query over one tile of the latent cache: scores [n] become weights, the running softmax and the mix of
    /// latents go on.
    attend_tile: fn(scores: &mut [f32], scale: f32, tile: &[f32], cached: usize, running: &mut portable::RunningSoftmax, mix: &mut [f32]);
    /// `x = sigmoid(x)`.
    sigmoid: fn(x: &mut [f32]);
    /// `x = silu(x)`.
    silu: fn(x: &mut [f32]);
    /// `x *= sigmoid(gate)`.
    gate: fn(x: &mut [f32], gate: &[f32]);
    /// `gate = silu(gate) · up`.
    silu_mul: fn(gate: &mut [f32], up: &[f32]);
    /// `gate = beta·tanh(gate/beta)·sigmoid(gate) · linear_beta·tanh(up/linear_beta)`; an infinite `linear_beta` means `up`.
    situ_mul: fn(gate: &mut [f32], up: &[f32], beta: f32, linear_beta: f32);
    /// Log decay of one KDA head, softplus form: `z = -a · softplus(z + bias)`.
    decay_softplus: fn(z: &mut [f32], bias: &[f32], a: f32);
    /// Log decay of one KDA head, bounded form: `z = bound · sigmoid(a · (z + bias))`.
    decay_bounded: fn(z: &mut [f32], bias: &[f32], a: f32, bound: f32);
    /// `x = exp(x)`.
    exp: fn(x: &mut [f32]);
    /// One tap sum of the causal convolution: `y = Σ_j weight[j] · x[j]`, taps oldest first, then SiLU.
    conv_silu: fn(taps: &[&[f32]], weight: &[f32], y: &mut [f32]);
    /// One token through one KDA head: state [dim, dim], the normalised q and k, v, decay factors, beta, output.
    kda_step: fn(state: &mut [f32], head: portable::KdaHead, o: &mut [f32]);
    /// Tables of partial dot products of one input with one kind's codebooks; see [`portable::vq_tables`].
    vq_tables: fn(codebooks: &[f32], shape: portable::VqShape, x: &[f32], tables: &mut [f32]);
    /// Rows of a VQ matrix by table look-up; see [`portable::vq_rows`].
    vq_rows: fn(indices: &[u8], shape: portable::VqShape, scales: &[u8], tables: &[f32], out: &mut [f32]);
    /// Rows of a VQ matrix decoded to f32; see [`portable::vq_expand`].
    vq_expand: fn(block: &[u8], shape: portable::VqShape, first: usize, scales: &[u8], codebooks: &[f32], out: &mut [f32]);
    /// `x = x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`.
    gelu_tanh: fn(x: &mut [f32]);
    /// `x = x/2 · (1 + erf(x/√2))`.
    gelu_erf: fn(x: &mut [f32]);
}

impl Kernels {
    /// Names that `WASTE_KERNELS` accepts in this build.
    pub const NAMES: &'static [&'static str] =
        if cfg!(target_arch = "x86_64") { &["portable", "avx2"] } else { &["portable"] };

    /// The best set this CPU can run.
    pub fn detect() -> &'static Kernels {
        Self::NAMES.iter().rev().find_map(|name| Self::named(name).ok()).unwrap_or(&PORTABLE)
    }

    /// The set of this name; an error if this build or this CPU does not have it.
    pub fn named(name: &str) -> Result<&'static Kernels, EngineError> {
        let refuse = |why: &str| EngineError::Kernels { name: name.to_owned(), why: why.to_owned() };
        match name {
            "portable" => Ok(&PORTABLE),
            #[cfg(target_arch = "x86_64")]
            "avx2" => {
                let can = is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c");
                if can { Ok(&avx2::TABLE) } else { Err(refuse("this CPU lacks AVX2, FMA or F16C")) }
            }
            _ => Err(refuse(&format!("this build has {}", Self::NAMES.join(", ")))),
        }
    }

    /// What `WASTE_KERNELS` asks for, or the best.
    pub fn from_env() -> Result<&'static Kernels, EngineError> {
        match std::env::var("WASTE_KERNELS") {
            Ok(name) if !name.is_empty() => Self::named(&name),
            _ => Ok(Self::detect()),
        }
    }
}
