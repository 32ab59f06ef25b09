//! Rows of the trunk's formats.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::super::portable::{self, GROUP};
use super::super::x86::{PREFETCH, prefetch};
use super::{load, load_ps};

/// The sum of 16 lanes by halving: the tree of every reduction.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx2")]
pub(super) fn reduce(lanes: __m512) -> f32 {
    let eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps::<1>(lanes));
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}

/// The value of an f16.
#[inline]
#[target_feature(enable = "f16c,avx2")]
fn widen_half(bits: u16) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
}

/// Rows quantised in groups of 128: `group` gives the lanes' sums of a whole group, `last` those of a shorter one.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx2,fma,f16c")]
fn rows_grouped(
    group_bytes: usize,
    payload: &[u8],
    scales: &[u16],
    x: &[f32],
    out: &mut [f32],
    group: impl Fn(&[u8], &[f32]) -> __m512,
    last: impl Fn(&[u8], &[f32]) -> [f32; 16],
) {
    let groups = x.len().div_ceil(GROUP);
    let stride = groups * group_bytes;
    assert!(payload.len() >= out.len() * stride && scales.len() >= out.len() * groups);
    let (whole, rest) = x.as_chunks::<GROUP>();
    let rows = payload.chunks_exact(stride).zip(scales.chunks_exact(groups));
    for (out, (row, scales)) in out.iter_mut().zip(rows) {
        let mut total = _mm512_setzero_ps();
        for ((bytes, x), &scale) in row.chunks_exact(group_bytes).zip(whole).zip(scales) {
            for line in (0..group_bytes).step_by(64) {
                prefetch(bytes, PREFETCH + line);
            }
            let scale = _mm512_set1_ps(widen_half(scale));
            total = _mm512_fmadd_ps(scale, group(bytes, x), total);
        }
        if !rest.is_empty() {
            let lanes = last(&row[whole.len() * group_bytes..], rest);
            let scale = _mm512_set1_ps(widen_half(scales[whole.len()]));
            total = _mm512_fmadd_ps(scale, load_ps(&lanes, 0), total);
        }
        *out = reduce(total);
    }
}

/// See [`Kernels::rows_q4`](crate::kernels::Kernels::rows_q4).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx2,fma,f16c")]
pub(in super::super) fn rows_q4(payload: &[u8], scales: &[u16], x: &[f32], out: &mut [f32]) {
    // Dword l of the first holds the bytes with element l of the first four 16-blocks of the group, so does the
    // second of the last four; odd elements are in the upper half of their byte.
    let positions = |first: usize| {
        let mut positions = [0u8; 64];
        for (i, position) in positions.iter_mut().enumerate() {
            *position = (8 * (first + i % 4) + i / 8) as u8;
        }
        positions
    };
    let (first, second) = (load(&positions(0), 0), load(&positions(4), 0));
    let odd = _mm512_set1_epi64(4 << 32);
    let values = _mm512_setr_ps(
        -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0,
    );
    let group = |bytes: &[u8], x: &[f32]| {
        let bytes = load(bytes, 0);
        let mut sum = _mm512_setzero_ps();
        for (half, positions) in [first, second].into_iter().enumerate() {
            let nibbles = _mm512_srlv_epi32(_mm512_permutexvar_epi8(positions, bytes), odd);
            let x = &x[64 * half..64 * half + 64];
            // `vpermps` looks at the lower four bits of an index only.
            let w = _mm512_permutexvar_ps(nibbles, values);
            sum = _mm512_fmadd_ps(w, load_ps(x, 0), sum);
            let w = _mm512_permutexvar_ps(_mm512_srli_epi32::<8>(nibbles), values);
            sum = _mm512_fmadd_ps(w, load_ps(x, 16), sum);
            let w = _mm512_permutexvar_ps(_mm512_srli_epi32::<16>(nibbles), values);
            sum = _mm512_fmadd_ps(w, load_ps(x, 32), sum);
            let w = _mm512_permutexvar_ps(_mm512_srli_epi32::<24>(nibbles), values);
            sum = _mm512_fmadd_ps(w, load_ps(x, 48), sum);
        }
        sum
    };
    rows_grouped(GROUP / 2, payload, scales, x, out, group, portable::last_q4);
}

/// See [`Kernels::rows_q8`](crate::kernels::Kernels::rows_q8).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx2,fma,f16c")]
pub(in super::super) fn rows_q8(payload: &[u8], scales: &[u16], x: &[f32], out: &mut [f32]) {
    let group = |bytes: &[u8], x: &[f32]| {
        let mut sum = _mm512_setzero_ps();
        for (bytes, x) in bytes.as_chunks::<16>().0.iter().zip(x.as_chunks::<16>().0) {
            // SAFETY: the chunk has 16 bytes.
            let bytes = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
            let w = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
            sum = _mm512_fmadd_ps(w, load_ps(x, 0), sum);
        }
        sum
    };
    rows_grouped(GROUP, payload, scales, x, out, group, portable::last_q8);
}

/// See [`Kernels::rows_f32`](crate::kernels::Kernels::rows_f32).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx2,fma,f16c")]
pub(in super::super) fn rows_f32(weights: &[f32], x: &[f32], out: &mut [f32]) {
    let cols = x.len();
    assert!(weights.len() >= out.len() * cols);
    let mut weights = weights;
    let mut eights = out.chunks_exact_mut(8);
    for out in &mut eights {
        let rows;
        (rows, weights) = weights.split_at(8 * cols);
        let sums: [__m512; 8] = dots(rows, x);
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = reduce(sum);
        }
    }
    for (out, row) in eights.into_remainder().iter_mut().zip(weights.chunks_exact(cols)) {
        let [sum] = dots(row, x);
        *out = reduce(sum);
    }
}

/// The lanes of `R` rows' dot products with `x`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx2,fma,f16c")]
fn dots<const R: usize>(weights: &[f32], x: &[f32]) -> [__m512; R] {
    let cols = x.len();
    assert!(weights.len() == R * cols);
    let mut sums = [_mm512_setzero_ps(); R];
    let whole = cols / 16 * 16;
    if whole < cols {
        let mask = (1u16 << (cols - whole)) - 1;
        for (r, sum) in sums.iter_mut().enumerate() {
            let row = &weights[r * cols + whole..(r + 1) * cols];
            // SAFETY: the mask has a bit for each of the slices' last elements only.
            let (w, x) = unsafe {
                (_mm512_maskz_loadu_ps(mask, row.as_ptr()), _mm512_maskz_loadu_ps(mask, x[whole..].as_ptr()))
            };
            *sum = _mm512_mask3_fmadd_ps(w, x, *sum, mask);
        }
    }
    for column in (0..whole).step_by(16) {
        let x = load_ps(x, column);
        for (r, sum) in sums.iter_mut().enumerate() {
            // SAFETY: r < R and column + 16 <= cols, so all 16 lie within the R · cols weights.
            let w = unsafe { _mm512_loadu_ps(weights.as_ptr().add(r * cols + column)) };
            *sum = _mm512_fmadd_ps(w, x, *sum);
        }
    }
    sums
}
