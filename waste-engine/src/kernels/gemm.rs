//! Small matrix products for prefill: rows of f32 weights times the tokens of a chunk.
//!
//! Every element is the dot product of [`portable::dot`](super::portable::dot), lane for lane and in the same order,
//! so a prompt gives the same bits in chunks of any size. What the instruction sets add is register blocking: some
//! rows times some tokens at once, so that a loaded vector is used several times.

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

/// Calls `block` for every block of `R` rows and `T` tokens, and for single ones at the two edges.
#[cfg(target_arch = "x86_64")]
macro_rules! blocked {
    ($weights:ident, $x:ident, $cols:ident, $out:ident, $block:ident, $R:literal, $T:literal) => {{
        let (rows, tokens) = check($weights, $x, $cols, $out);
        let shape = Shape { cols: $cols, stride: $out.stride() };
        let (whole_rows, whole_tokens) = (rows / $R * $R, tokens / $T * $T);
        for r in (0..whole_rows).step_by($R) {
            for t in (0..whole_tokens).step_by($T) {
                // SAFETY: rows r .. r + R and tokens t .. t + T lie within the slices, and so do their places in
                // `out`, as `check` and `Columns` assert; the caller's own contract is this CPU's features.
                unsafe {
                    $block::<$R, $T>(
                        $weights.as_ptr().add(r * $cols),
                        $x.as_ptr().add(t * $cols),
                        shape,
                        $out.as_mut_ptr().add(t * shape.stride + r),
                    );
                }
            }
        }
        for r in 0..rows {
            let from = if r < whole_rows { whole_tokens } else { 0 };
            for t in from..tokens {
                // SAFETY: as above, for one row and one token.
                unsafe {
                    $block::<1, 1>(
                        $weights.as_ptr().add(r * $cols),
                        $x.as_ptr().add(t * $cols),
                        shape,
                        $out.as_mut_ptr().add(t * shape.stride + r),
                    );
                }
            }
        }
    }};
}

#[cfg(target_arch = "x86_64")]
pub use x86::{gemm_avx2, gemm_avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::check;
    use crate::kernels::columns::Columns;

    /// Elements from a row, and a token, to the next: of the operands and of the results.
    #[derive(Clone, Copy)]
    struct Shape {
        cols: usize,
        stride: usize,
    }

    /// [`gemm`](super::gemm) with AVX2 and FMA: blocks of 3 rows and 2 tokens.
    ///
    /// # Safety
    /// The CPU has AVX2 and FMA.
    #[target_feature(enable = "avx2,fma")]
    pub unsafe fn gemm_avx2(weights: &[f32], x: &[f32], cols: usize, out: &mut Columns) {
        blocked!(weights, x, cols, out, block_avx2, 3, 2);
    }

    /// [`gemm`](super::gemm) with AVX-512: blocks of 4 rows and 4 tokens.
    ///
    /// # Safety
    /// The CPU has AVX-512 F and DQ.
    #[target_feature(enable = "avx512f,avx512dq,avx2,fma")]
    pub unsafe fn gemm_avx512(weights: &[f32], x: &[f32], cols: usize, out: &mut Columns) {
        blocked!(weights, x, cols, out, block_avx512, 4, 4);
    }

    /// # Safety
    /// `R` rows of `cols` weights, `T` tokens of `cols` elements and their places in `out` can be accessed; the CPU
    /// has the features.
    #[target_feature(enable = "avx512f,avx512dq,avx2,fma")]
    unsafe fn block_avx512<const R: usize, const T: usize>(
        w: *const f32,
        x: *const f32,
        shape: Shape,
        out: *mut f32,
    ) {
        let Shape { cols, stride } = shape;
        let (tail, whole) = (cols % 16, cols / 16 * 16);
        let mut acc = [[_mm512_setzero_ps(); T]; R];
        // SAFETY: every offset is below R · cols, T · cols, or (T − 1) · stride + R; a masked load touches only the
        // lanes of the tail.
        unsafe {
            if tail > 0 {
                let mask = (1u16 << tail) - 1;
                for (r, acc) in acc.iter_mut().enumerate() {
                    let w = _mm512_maskz_loadu_ps(mask, w.add(r * cols + whole));
                    for (t, acc) in acc.iter_mut().enumerate() {
                        *acc = _mm512_fmadd_ps(w, _mm512_maskz_loadu_ps(mask, x.add(t * cols + whole)), *acc);
                    }
                }
            }
            for c in (0..whole).step_by(16) {
                let x: [__m512; T] = std::array::from_fn(|t| _mm512_loadu_ps(x.add(t * cols + c)));
                for (r, acc) in acc.iter_mut().enumerate() {
                    let w = _mm512_loadu_ps(w.add(r * cols + c));
                    for (acc, x) in acc.iter_mut().zip(x) {
                        *acc = _mm512_fmadd_ps(w, x, *acc);
                    }
                }
            }
            for (r, acc) in acc.into_iter().enumerate() {
                for (t, acc) in acc.into_iter().enumerate() {
                    let half = _mm256_add_ps(_mm512_castps512_ps256(acc), _mm512_extractf32x8_ps::<1>(acc));
                    *out.add(t * stride + r) = reduce(half);
                }
            }
        }
    }

    /// # Safety
    /// As [`block_avx512`].
    #[target_feature(enable = "avx2,fma")]
    unsafe fn block_avx2<const R: usize, const T: usize>(
        w: *const f32,
        x: *const f32,
        shape: Shape,
        out: *mut f32,
    ) {
        let Shape { cols, stride } = shape;
        let (tail, whole) = (cols % 16, cols / 16 * 16);
        let mut acc = [[[_mm256_setzero_ps(); 2]; T]; R];
        // SAFETY: every offset is below R · cols, T · cols, or (T − 1) · stride + R; the tail is copied into a whole
        // block first.
        unsafe {
            if tail > 0 {
                for (r, acc) in acc.iter_mut().enumerate() {
                    let w = padded(w.add(r * cols + whole), tail);
                    for (t, acc) in acc.iter_mut().enumerate() {
                        let x = padded(x.add(t * cols + whole), tail);
                        for h in 0..2 {
                            acc[h] = _mm256_fmadd_ps(w[h], x[h], acc[h]);
                        }
                    }
                }
            }
            for c in (0..whole).step_by(16) {
                let x: [[__m256; 2]; T] = std::array::from_fn(|t| {
                    [_mm256_loadu_ps(x.add(t * cols + c)), _mm256_loadu_ps(x.add(t * cols + c + 8))]
                });
                for (r, acc) in acc.iter_mut().enumerate() {
                    let w = [_mm256_loadu_ps(w.add(r * cols + c)), _mm256_loadu_ps(w.add(r * cols + c + 8))];
                    for (acc, x) in acc.iter_mut().zip(x) {
                        for h in 0..2 {
                            acc[h] = _mm256_fmadd_ps(w[h], x[h], acc[h]);
                        }
                    }
                }
            }
            for (r, acc) in acc.into_iter().enumerate() {
                for (t, acc) in acc.into_iter().enumerate() {
                    *out.add(t * stride + r) = reduce(_mm256_add_ps(acc[0], acc[1]));
                }
            }
        }
    }

    /// # Safety
    /// `n` elements, at most 16, can be read; the CPU has AVX2.
    #[target_feature(enable = "avx2")]
    unsafe fn padded(source: *const f32, n: usize) -> [__m256; 2] {
        let mut block = [0.0f32; 16];
        // SAFETY: the caller grants `n` elements, and the block has 16.
        unsafe {
            std::ptr::copy_nonoverlapping(source, block.as_mut_ptr(), n.min(16));
            [_mm256_loadu_ps(block.as_ptr()), _mm256_loadu_ps(block.as_ptr().add(8))]
        }
    }

    /// The rest of the reduction tree: lanes 4 apart, 2 apart, 1 apart.
    #[target_feature(enable = "avx2")]
    fn reduce(lanes: __m256) -> f32 {
        let four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps::<1>(lanes));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
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
        sets
    }

    #[test]
    fn every_element_is_the_dot_product_to_the_bit() {
        let noise = |n: usize, seed: u32| -> Vec<f32> {
            (0..n as u32)
                .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32 / 8e6 - 1.0)
                .collect()
        };
        for cols in [1, 15, 16, 17, 40, 64, 129] {
            for (rows, tokens) in [(1, 1), (3, 2), (4, 4), (5, 7), (8, 3), (13, 9)] {
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
