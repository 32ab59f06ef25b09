//! Small matrix products for prefill: rows of f32 weights times the tokens of a chunk.
//!
//! Every element is the dot product of [`portable::dot`](super::portable::dot), lane for lane and in the same order,
//! so a prompt gives the same bits in chunks of any size. What the instruction sets add is blocking: some rows times
//! some tokens share what is loaded into registers, and what they come back to stays in the caches.

use super::columns::Columns;
use super::portable::dot;

/// Rows and tokens of a product; panics if `out` cannot hold them.
fn check(weights: &[f32], x: &[f32], cols: usize, out: &Columns) -> (usize, usize) {
    let (rows, tokens) = (weights.len() / cols, x.len() / cols);
    assert!(rows <= out.width() && tokens <= out.rows(), "{tokens} x {rows} results do not fit");
    (rows, tokens)
}

/// `out[t, r] = weights[r] · x[t]`: the definition. `weights` is [rows, cols], `x` [tokens, cols].
#[inline(always)]
pub fn gemm(weights: &[f32], x: &[f32], cols: usize, out: &mut Columns) {
    check(weights, x, cols, out);
    for (t, x) in x.chunks_exact(cols).enumerate() {
        for (r, row) in weights.chunks_exact(cols).enumerate() {
            out.set(t, r, dot(row, x));
        }
    }
}

/// Columns that pass at a time: those of a tile's rows stay in the first cache meanwhile.
const PANEL: usize = 512;

/// [`gemm`] for one instruction set: `$R` rows and `$T` tokens share what is loaded. Tokens go in groups of `$TOKENS`,
/// rows in tiles of `$ROWS`; the lanes' sums of a tile wait in `acc` from one panel of columns to the next.
///
/// A vector is `$L` of the 16 lanes, `$H` of them are all.
macro_rules! register_blocked {
    (
        $module:ident, $name:ident, $features:literal, [$R:literal, $T:literal], [$ROWS:literal, $TOKENS:literal],
        $V:ty, [$L:literal, $H:literal], $zero:expr, $load:expr, $partial:expr, $fma:expr, $reduce:expr
    ) => {
        pub use $module::$name;

        mod $module {
            use super::{PANEL, check};
            #[cfg(target_arch = "aarch64")]
            use std::arch::aarch64::*;
            #[cfg(target_arch = "x86_64")]
            use std::arch::x86_64::*;

            use crate::kernels::columns::Columns;

            type Sums = [[[$V; $H]; $ROWS]; $TOKENS];

            /// [`gemm`](super::gemm) for this instruction set.
            ///
            /// # Safety
            /// The CPU has the features.
            #[target_feature(enable = $features)]
            pub unsafe fn $name(weights: &[f32], x: &[f32], cols: usize, out: &mut Columns) {
                let (rows, tokens) = check(weights, x, cols, out);
                let (tail, whole) = (cols % 16, cols / 16 * 16);
                let zero = $zero;
                for t0 in (0..tokens).step_by($TOKENS) {
                    let t1 = $TOKENS.min(tokens - t0);
                    let x = &x[t0 * cols..(t0 + t1) * cols];
                    for r0 in (0..rows).step_by($ROWS) {
                        let r1 = $ROWS.min(rows - r0);
                        let w = &weights[r0 * cols..(r0 + r1) * cols];
                        let mut acc: Sums = [[[zero; $H]; $ROWS]; $TOKENS];
                        if tail > 0 {
                            for (acc, x) in acc.iter_mut().zip(x.chunks_exact(cols)) {
                                for (acc, w) in acc.iter_mut().zip(w.chunks_exact(cols)) {
                                    // SAFETY: only what the slices have is read.
                                    unsafe {
                                        let (w, x) = ($partial(&w[whole..]), $partial(&x[whole..]));
                                        for h in 0..$H {
                                            acc[h] = $fma(w[h], x[h], acc[h]);
                                        }
                                    }
                                }
                            }
                        }
                        for from in (0..whole).step_by(PANEL) {
                            let panel = from..whole.min(from + PANEL);
                            for t in (0..t1).step_by($T) {
                                for r in (0..r1).step_by($R) {
                                    let (n, m) = ($R.min(r1 - r), $T.min(t1 - t));
                                    // SAFETY: rows r .. r + n of `w` and tokens t .. t + m of `x` have `cols`
                                    // elements each, and the panel lies within them.
                                    unsafe {
                                        let (w, x) = (w.as_ptr().add(r * cols), x.as_ptr().add(t * cols));
                                        match (n, m) {
                                            ($R, $T) => block::<$R, $T>(w, x, cols, &panel, &mut acc, r, t),
                                            ($R, _) => {
                                                for i in 0..m {
                                                    let x = x.add(i * cols);
                                                    block::<$R, 1>(w, x, cols, &panel, &mut acc, r, t + i);
                                                }
                                            }
                                            _ => {
                                                for i in 0..n {
                                                    let w = w.add(i * cols);
                                                    for j in 0..m {
                                                        let x = x.add(j * cols);
                                                        block::<1, 1>(
                                                            w,
                                                            x,
                                                            cols,
                                                            &panel,
                                                            &mut acc,
                                                            r + i,
                                                            t + j,
                                                        );
                                                    }
                                                }
                                            }
                                        }
                                    }
                                }
                            }
                        }
                        for (t, acc) in acc.iter().enumerate().take(t1) {
                            for (r, acc) in acc.iter().enumerate().take(r1) {
                                out.set(t0 + t, r0 + r, $reduce(*acc));
                            }
                        }
                    }
                }
            }

            /// # Safety
            /// `R` rows of `cols` weights and `T` tokens of `cols` elements can be read, the panel, of whole 16s, lies
            /// within them; the CPU has the features.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn block<const R: usize, const T: usize>(
                w: *const f32,
                x: *const f32,
                cols: usize,
                panel: &std::ops::Range<usize>,
                sums: &mut Sums,
                r: usize,
                t: usize,
            ) {
                let mut acc: [[[$V; $H]; T]; R] =
                    std::array::from_fn(|i| std::array::from_fn(|j| sums[t + j][r + i]));
                for c in panel.clone().step_by(16) {
                    for h in 0..$H {
                        // SAFETY: c + 16 <= cols, and the caller's contract.
                        unsafe {
                            let at = c + h * $L;
                            let x: [$V; T] = std::array::from_fn(|t| $load(x.add(t * cols + at)));
                            for (r, acc) in acc.iter_mut().enumerate() {
                                let w = $load(w.add(r * cols + at));
                                for (acc, x) in acc.iter_mut().zip(x) {
                                    acc[h] = $fma(w, x, acc[h]);
                                }
                            }
                        }
                    }
                }
                for (i, acc) in acc.into_iter().enumerate() {
                    for (j, acc) in acc.into_iter().enumerate() {
                        sums[t + j][r + i] = acc;
                    }
                }
            }
        }
    };
}

/// At most 16 elements, and zeros after them.
#[inline(always)]
fn padded(x: &[f32]) -> [f32; 16] {
    let mut block = [0.0; 16];
    block[..x.len()].copy_from_slice(x);
    block
}

#[cfg(target_arch = "x86_64")]
register_blocked! {
    avx512, gemm_avx512, "avx512f,avx512dq,avx2,fma", [4, 4], [8, 32], __m512, [16, 1],
    _mm512_setzero_ps(),
    _mm512_loadu_ps,
    |x: &[f32]| [_mm512_loadu_ps(super::padded(x).as_ptr())],
    _mm512_fmadd_ps,
    |[lanes]: [__m512; 1]| {
        super::reduce_eight(_mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps::<1>(lanes)))
    }
}

#[cfg(target_arch = "x86_64")]
register_blocked! {
    avx2, gemm_avx2, "avx2,fma", [2, 3], [8, 30], __m256, [8, 2],
    _mm256_setzero_ps(),
    _mm256_loadu_ps,
    |x: &[f32]| {
        let x = super::padded(x);
        [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))]
    },
    _mm256_fmadd_ps,
    |[a, b]: [__m256; 2]| super::reduce_eight(_mm256_add_ps(a, b))
}

#[cfg(target_arch = "aarch64")]
register_blocked! {
    neon, gemm_neon, "neon", [2, 3], [8, 30], float32x4_t, [4, 4],
    vdupq_n_f32(0.0),
    vld1q_f32,
    |x: &[f32]| {
        let x = super::padded(x);
        std::array::from_fn::<float32x4_t, 4, _>(|h| vld1q_f32(x.as_ptr().add(4 * h)))
    },
    |w, x, acc| vfmaq_f32(acc, w, x),
    |[a, b, c, d]: [float32x4_t; 4]| {
        let four = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
        let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
        vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
    }
}

/// The rest of the reduction tree: lanes 4 apart, 2 apart, 1 apart.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2")]
fn reduce_eight(lanes: std::arch::x86_64::__m256) -> f32 {
    use std::arch::x86_64::*;

    let four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps::<1>(lanes));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}

#[cfg(test)]
mod tests {
    use super::*;

    type Gemm = unsafe fn(&[f32], &[f32], usize, &mut Columns);

    fn sets() -> Vec<(&'static str, Gemm)> {
        #[allow(unused_mut)]
        let mut sets: Vec<(&'static str, Gemm)> = vec![("portable", gemm)];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                sets.push(("avx2", gemm_avx2));
            }
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq") {
                sets.push(("avx512", gemm_avx512));
            }
        }
        #[cfg(target_arch = "aarch64")]
        sets.push(("neon", gemm_neon));
        sets
    }

    #[test]
    fn every_element_is_the_dot_product_to_the_bit() {
        let noise = |n: usize, seed: u32| -> Vec<f32> {
            (0..n as u32)
                .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32 / 8e6 - 1.0)
                .collect()
        };
        for cols in [1, 15, 16, 17, 40, 64, 129, 528, 1100] {
            for (rows, tokens) in [(1, 1), (3, 2), (4, 4), (5, 7), (8, 3), (13, 9), (9, 35), (16, 64)] {
                // Miri sees all there is in the smaller ones.
                if cfg!(miri) && rows * tokens * cols > 600 {
                    continue;
                }
                let (w, x) = (noise(rows * cols, 1), noise(tokens * cols, 99));
                let stride = rows + 2;
                for (name, gemm) in sets() {
                    let mut out = vec![7.0; tokens * stride];
                    // SAFETY: the set is listed only where the CPU has its features.
                    unsafe { gemm(&w, &x, cols, &mut Columns::new(&mut out, stride)) };
                    for t in 0..tokens {
                        for r in 0..rows {
                            let expected = dot(&w[r * cols..(r + 1) * cols], &x[t * cols..(t + 1) * cols]);
                            let found = out[t * stride + r];
                            assert_eq!(found.to_bits(), expected.to_bits(), "{name} {cols} {rows}x{tokens}");
                        }
                        assert_eq!(out[t * stride + rows..(t + 1) * stride], [7.0, 7.0], "{name}");
                    }
                }
            }
        }
    }
}
