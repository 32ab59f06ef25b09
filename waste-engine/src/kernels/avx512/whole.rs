//! Q4G rows times whole numbers, by VNNI.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::super::portable::{self, GROUP, WholeGroup};
use super::super::x86::{PREFETCH, prefetch};
use super::load;
use super::trunk::reduce;

/// Groups whose factors are made at a time.
const FACTORS: usize = 16;

/// The lanes' sums of one group.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn group(bytes: &[u8], whole: &WholeGroup) -> __m512 {
    let signed = |x: &[i8; GROUP / 2]| {
        // SAFETY: the array has the register's 64 bytes.
        unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
    };
    // SAFETY: the array has the register's 16 lanes.
    let bias = unsafe { _mm512_loadu_si512(whole.bias.as_ptr().cast()) };
    let nibble = _mm512_set1_epi8(15);
    let bytes = load(bytes, 0);
    let even = _mm512_and_si512(bytes, nibble);
    let odd = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), nibble);
    let high = _mm512_dpbusd_epi32(_mm512_setzero_si512(), even, signed(&whole.even_high));
    let high = _mm512_dpbusd_epi32(high, odd, signed(&whole.odd_high));
    let low = _mm512_dpbusd_epi32(bias, even, signed(&whole.even_low));
    let low = _mm512_dpbusd_epi32(low, odd, signed(&whole.odd_low));
    _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low))
}

/// See [`Kernels::rows_q4_fast`](crate::kernels::Kernels::rows_q4_fast).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")]
pub(in super::super) fn rows_q4_fast(
    payload: &[u8],
    scales: &[u16],
    x: &[f32],
    scratch: &mut [f32],
    out: &mut [f32],
) {
    let (wholes, units) = portable::to_whole(x, scratch);
    let stride = wholes.len() * GROUP / 2;
    assert!(payload.len() >= out.len() * stride && scales.len() >= out.len() * wholes.len());
    let rows = payload.chunks_exact(stride).zip(scales.chunks_exact(wholes.len()));
    for (out, (row, scales)) in out.iter_mut().zip(rows) {
        let mut total = _mm512_setzero_ps();
        let blocks = scales.chunks(FACTORS).zip(units.chunks(FACTORS)).zip(wholes.chunks(FACTORS));
        for (((scales, units), wholes), row) in blocks.zip(row.chunks(FACTORS * GROUP / 2)) {
            let factors = factors(scales, units);
            for ((bytes, whole), factor) in row.chunks_exact(GROUP / 2).zip(wholes).zip(factors) {
                prefetch(bytes, PREFETCH);
                total = _mm512_fmadd_ps(group(bytes, whole), _mm512_set1_ps(factor), total);
            }
        }
        *out = reduce(total);
    }
}

/// `scale · unit` of up to 16 groups.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,f16c")]
fn factors(scales: &[u16], units: &[f32]) -> [f32; FACTORS] {
    let mask = (1u32 << scales.len()) - 1;
    let mut factors = [0.0; FACTORS];
    // SAFETY: the mask has a bit for each element the slices have; the array has the register's 16 lanes.
    unsafe {
        let scales = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask as u16, scales.as_ptr().cast()));
        let units = _mm512_maskz_loadu_ps(mask as u16, units.as_ptr());
        _mm512_storeu_ps(factors.as_mut_ptr(), _mm512_mul_ps(scales, units));
    }
    factors
}
