//! The arithmetic of the engine, behind one table chosen once at open.
//!
//! [`portable`] defines every operation: 16 f32 lanes, fused multiply-add, a fixed reduction tree, one
//! implementation of exp, sigmoid, tanh and softplus; whole numbers where tables are quantised. The other sets are the
//! same definition compiled for the instructions a CPU has, single kernels written by hand for them; every set gives
//! the same bits.
#![allow(unsafe_code)]

pub mod columns;
pub mod gemm;
pub mod math;
pub mod portable;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::error::EngineError;

/// One matrix kernel over rows of f32 weights: `(weights [rows, cols], x [cols], out [rows])`.
pub type RowsF32 = fn(&[f32], &[f32], &mut [f32]);
/// One matrix kernel over rows of f16 weights: `(weights [rows, cols], x [cols], out [rows])`.
pub type RowsF16 = fn(&[u16], &[f32], &mut [f32]);
/// One matrix kernel over rows quantised in groups of 128: `(payload, f16 scales, x [cols], out [rows])`.
pub type RowsQuant = fn(&[u8], &[u16], &[f32], &mut [f32]);

/// Matrix kernels over quantised rows and several inputs: `(payload, f16 scales, inputs, length of one, out)`, where `out`
/// is [inputs, rows].
pub type RowsMany = fn(&[u8], &[u16], &[f32], usize, &mut portable::Columns);

/// Kernels that decode a row's weights once for several inputs; each product has the bits of its single kernel.
#[derive(Clone, Copy)]
pub struct Many {
    /// See [`Kernels::rows_q4_fast`]; the inputs are as [`Kernels::to_whole`] left them.
    pub rows_q4_fast: RowsMany,
    /// See [`Kernels::rows_q8_fast`]; the inputs are as [`Kernels::to_words`] left them.
    pub rows_q8_fast: RowsMany,
}

macro_rules! kernel_table {
    ($( $(#[$doc:meta])* $kernel:ident: fn($($arg:ident: $type:ty),*) $(-> $ret:ty)?; )*) => {
        /// The kernels of one instruction set.
        #[derive(Clone, Copy)]
        pub struct Kernels {
            /// `portable`, `avx2`, …
            pub name: &'static str,
            /// Several inputs at a time, where that gains something.
            pub many: Option<Many>,
            $( $(#[$doc])* pub $kernel: fn($($type),*) $(-> $ret)?, )*
        }

        const PORTABLE: Kernels = Kernels { name: "portable", many: None, $( $kernel: portable::$kernel, )* };

        #[cfg(target_arch = "x86_64")]
        compiled! { compiled_avx2, "avx2", "avx2,fma,f16c", $( $kernel($($arg: $type),*) $(-> $ret)?; )* }
        #[cfg(target_arch = "x86_64")]
        compiled! {
            compiled_avx512, "avx512", "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c",
            $( $kernel($($arg: $type),*) $(-> $ret)?; )*
        }
    };
}

/// A set that is the portable source compiled for more instructions.
#[cfg(target_arch = "x86_64")]
macro_rules! compiled {
    (
        $module:ident, $name:literal, $features:literal,
        $( $kernel:ident($($arg:ident: $type:ty),*) $(-> $ret:ty)?; )*
    ) => {
        mod $module {
            use super::{portable, Kernels};

            $(
                #[target_feature(enable = $features)]
                fn $kernel($($arg: $type),*) $(-> $ret)? {
                    portable::$kernel($($arg),*)
                }
            )*

            pub(super) const TABLE: Kernels = Kernels {
                name: $name,
                many: None,
                // SAFETY: `Kernels::named` hands this table out only after it has seen the CPU report these features.
                $( $kernel: |$($arg),*| unsafe { self::$kernel($($arg),*) }, )*
            };
        }
    };
}

kernel_table! {
    /// Dot products of rows of f32 weights with `x`.
    rows_f32: fn(weights: &[f32], x: &[f32], out: &mut [f32]);
    /// Rows of f32 weights, [rows, cols], times tokens, [tokens, cols]; `out` is [tokens, rows].
    gemm: fn(weights: &[f32], x: &[f32], cols: usize, out: &mut portable::Columns);
    /// Dot products of rows of f16 weights with `x`.
    rows_f16: fn(weights: &[u16], x: &[f32], out: &mut [f32]);
    /// f16 numbers as f32.
    widen_f16: fn(x: &[u16], out: &mut [f32]);
    /// Dot products of Q8G rows with `x`.
    rows_q8: fn(payload: &[u8], scales: &[u16], x: &[f32], out: &mut [f32]);
    /// Dot products of Q4G rows with `x`.
    rows_q4: fn(payload: &[u8], scales: &[u16], x: &[f32], out: &mut [f32]);
    /// An input as 16-bit whole numbers, for [`Kernels::rows_q4_fast`]; `whole` has [`portable::whole_len`] elements. See
    /// [`portable::to_whole`].
    to_whole: fn(x: &[f32], whole: &mut [f32]);
    /// Dot products of Q4G rows with an input as [`Kernels::to_whole`] left it. See [`portable::rows_q4_fast`].
    rows_q4_fast: fn(payload: &[u8], scales: &[u16], whole: &[f32], out: &mut [f32]);
    /// An input as 16-bit whole numbers, for [`Kernels::rows_q8_fast`]; `words` has [`portable::words_len`] elements. See
    /// [`portable::to_words`].
    to_words: fn(x: &[f32], words: &mut [f32]);
    /// Dot products of Q8G rows with an input as [`Kernels::to_words`] left it. See [`portable::rows_q8_fast`].
    rows_q8_fast: fn(payload: &[u8], scales: &[u16], words: &[f32], out: &mut [f32]);
    /// Dot products of Q3G rows with `x`.
    rows_q3: fn(payload: &[u8], scales: &[u16], x: &[f32], out: &mut [f32]);
    /// One Q8G row decoded: `(payload, f16 scales, out [cols])`.
    decode_q8: fn(payload: &[u8], scales: &[u16], out: &mut [f32]);
    /// One Q4G row decoded.
    decode_q4: fn(payload: &[u8], scales: &[u16], out: &mut [f32]);
    /// One Q3G row decoded.
    decode_q3: fn(payload: &[u8], scales: &[u16], out: &mut [f32]);
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
    /// Quantised tables of one input, for [`Kernels::vq_rows_fast`]; see [`portable::vq_tables_fast`].
    vq_tables_fast: fn(
        codebooks: &[f32],
        shape: portable::VqShape,
        x: &[f32],
        scratch: &mut [f32],
        planes: &mut [u8],
        scales: &mut [f32]
    );
    /// Rows of a VQ matrix by look-up in quantised tables; see [`portable::vq_rows_fast`].
    vq_rows_fast: fn(
        indices: &[u8],
        shape: portable::VqShape,
        scales: &[u8],
        tables: portable::FastTables,
        out: &mut [f32]
    );
    /// Rows of a VQ matrix decoded to f32; see [`portable::vq_expand`].
    vq_expand: fn(block: &[u8], shape: portable::VqShape, first: usize, scales: &[u8], codebooks: &[f32], out: &mut [f32]);
    /// `x = x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`.
    gelu_tanh: fn(x: &mut [f32]);
    /// `x = x/2 · (1 + erf(x/√2))`.
    gelu_erf: fn(x: &mut [f32]);
}

// What is written by hand asks for no more than its table's features, which `Kernels::named` has seen the CPU report.
#[cfg(target_arch = "x86_64")]
static AVX2: Kernels = Kernels {
    // SAFETY: see above.
    gemm: |w, x, cols, out| unsafe { gemm::gemm_avx2(w, x, cols, out) },
    // SAFETY: see above.
    rows_q8: |p, s, x, out| unsafe { avx2::rows_q8(p, s, x, out) },
    // SAFETY: see above.
    rows_q4: |p, s, x, out| unsafe { avx2::rows_q4(p, s, x, out) },
    // SAFETY: see above.
    rows_q4_fast: |p, s, w, out| unsafe { avx2::rows_q4_fast(p, s, w, out) },
    // SAFETY: see above.
    rows_q8_fast: |p, s, w, out| unsafe { avx2::rows_q8_fast(p, s, w, out) },
    // SAFETY: see above.
    vq_rows_fast: |i, shape, s, t, out| unsafe { avx2::vq_rows_fast(i, shape, s, t, out) },
    // SAFETY: see above.
    vq_expand: |b, shape, f, s, c, out| unsafe { avx2::vq_expand(b, shape, f, s, c, out) },
    ..compiled_avx2::TABLE
};

#[cfg(target_arch = "x86_64")]
static AVX512: Kernels = Kernels {
    many: Some(Many {
        // SAFETY: see above.
        rows_q4_fast: |p, s, w, len, out| unsafe { avx512::rows_q4_fast_many(p, s, w, len, out) },
        // SAFETY: see above.
        rows_q8_fast: |p, s, w, len, out| unsafe { avx512::rows_q8_fast_many(p, s, w, len, out) },
    }),
    // SAFETY: see above.
    gemm: |w, x, cols, out| unsafe { gemm::gemm_avx512(w, x, cols, out) },
    // SAFETY: see above.
    rows_f32: |w, x, out| unsafe { avx512::rows_f32(w, x, out) },
    // SAFETY: see above.
    rows_q8: |p, s, x, out| unsafe { avx512::rows_q8(p, s, x, out) },
    // SAFETY: see above.
    rows_q4: |p, s, x, out| unsafe { avx512::rows_q4(p, s, x, out) },
    // SAFETY: see above.
    rows_q4_fast: |p, s, w, out| unsafe { avx512::rows_q4_fast(p, s, w, out) },
    // SAFETY: see above.
    rows_q8_fast: |p, s, w, out| unsafe { avx512::rows_q8_fast(p, s, w, out) },
    // SAFETY: see above.
    vq_tables: |c, shape, x, t| unsafe { avx512::vq_tables(c, shape, x, t) },
    // SAFETY: see above.
    vq_tables_fast: |c, shape, x, t, p, s| unsafe { avx512::vq_tables_fast(c, shape, x, t, p, s) },
    // SAFETY: see above.
    vq_rows_fast: |i, shape, s, t, out| unsafe { avx512::vq_rows_fast(i, shape, s, t, out) },
    vq_expand: AVX2.vq_expand,
    vq_rows: |i, shape, s, t, out| match (shape.stages, shape.entries, shape.packed) {
        // SAFETY: see above.
        (4, 64, true) => unsafe { avx512::vq_rows_packed(i, shape, s, t, out) },
        // Compiled for AVX2 it is faster: the compiler turns the strided loads into shuffles otherwise.
        _ => (compiled_avx2::TABLE.vq_rows)(i, shape, s, t, out),
    },
    ..compiled_avx512::TABLE
};

/// The portable source is already compiled for NEON there; what it gains from is written by hand.
#[cfg(target_arch = "aarch64")]
static NEON: Kernels = Kernels {
    name: "neon",
    // SAFETY: every 64-bit Arm CPU that Rust builds for has NEON.
    gemm: |w, x, cols, out| unsafe { gemm::gemm_neon(w, x, cols, out) },
    rows_q4_fast: neon::rows_q4_fast,
    rows_q8_fast: neon::rows_q8_fast,
    vq_rows_fast: neon::vq_rows_fast,
    ..PORTABLE
};

impl Kernels {
    /// Names that `WASTE_KERNELS` accepts in this build, the best last.
    pub const NAMES: &'static [&'static str] = if cfg!(target_arch = "x86_64") {
        &["portable", "avx2", "avx512"]
    } else if cfg!(target_arch = "aarch64") {
        &["portable", "neon"]
    } else {
        &["portable"]
    };

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
                if can { Ok(&AVX2) } else { Err(refuse("this CPU lacks AVX2, FMA or F16C")) }
            }
            #[cfg(target_arch = "x86_64")]
            "avx512" => {
                let can = is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vbmi")
                    && is_x86_feature_detected!("avx512vnni")
                    && is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c");
                if can {
                    Ok(&AVX512)
                } else {
                    Err(refuse("this CPU lacks AVX-512 F, BW, VL, DQ, VBMI or VNNI"))
                }
            }
            // Every 64-bit Arm CPU that Rust builds for has NEON.
            #[cfg(target_arch = "aarch64")]
            "neon" => Ok(&NEON),
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
