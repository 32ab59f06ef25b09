//! Q4G rows times whole numbers, by VNNI.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::super::portable::{self, GROUP, WholeGroup};
use super::super::x86::prefetch;
use super::load;
use super::trunk::reduce;

/// Groups whose factors are made at a time.
const FACTORS: usize = 16;

/// Rows that share what is loaded of the input.
const ROWS: usize = 4;

/// One group of an input, in registers.
struct Group {
    high: [__m512i; 2],
    low: [__m512i; 2],
    bias: __m512i,
}

impl Group {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    fn new(whole: &WholeGroup) -> Group {
        let signed = |x: &[i8; GROUP / 2]| {
            // SAFETY: the array has the register's 64 bytes.
            unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
        };
        Group {
            high: [signed(&whole.even_high), signed(&whole.odd_high)],
            low: [signed(&whole.even_low), signed(&whole.odd_low)],
            // SAFETY: the array has the register's 16 lanes.
            bias: unsafe { _mm512_loadu_si512(whole.bias.as_ptr().cast()) },
        }
    }

    /// The lanes' sums with a row's weights.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    fn sums(&self, bytes: &[u8]) -> __m512 {
        let nibble = _mm512_set1_epi8(15);
        let bytes = load(bytes, 0);
        let even = _mm512_and_si512(bytes, nibble);
        let odd = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), nibble);
        let high = _mm512_dpbusd_epi32(_mm512_setzero_si512(), even, self.high[0]);
        let high = _mm512_dpbusd_epi32(high, odd, self.high[1]);
        let low = _mm512_dpbusd_epi32(self.bias, even, self.low[0]);
        let low = _mm512_dpbusd_epi32(low, odd, self.low[1]);
        _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low))
    }
}

/// See [`Kernels::rows_q4_fast`](crate::kernels::Kernels::rows_q4_fast).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")]
pub(in super::super) fn rows_q4_fast(payload: &[u8], scales: &[u16], whole: &[f32], out: &mut [f32]) {
    let (wholes, units) = portable::whole_parts(whole);
    let (groups, stride) = (wholes.len(), wholes.len() * GROUP / 2);
    assert!(payload.len() >= out.len() * stride && scales.len() >= out.len() * groups);
    let whole = out.len() / ROWS * ROWS;
    let (many, few) = out.split_at_mut(whole);
    let blocks = payload.chunks_exact(ROWS * stride).zip(scales.chunks_exact(ROWS * groups));
    for (out, (payload, scales)) in many.as_chunks_mut::<ROWS>().0.iter_mut().zip(blocks) {
        rows(payload, scales, wholes, units, out);
    }
    let rest =
        payload[whole * stride..].chunks_exact(stride).zip(scales[whole * groups..].chunks_exact(groups));
    for (out, (payload, scales)) in few.as_chunks_mut::<1>().0.iter_mut().zip(rest) {
        rows(payload, scales, wholes, units, out);
    }
}

/// `N` rows side by side.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn rows<const N: usize>(
    payload: &[u8],
    scales: &[u16],
    wholes: &[WholeGroup],
    units: &[f32],
    out: &mut [f32; N],
) {
    let (groups, stride) = (wholes.len(), wholes.len() * GROUP / 2);
    let mut totals = [_mm512_setzero_ps(); N];
    for (block, (wholes, units)) in wholes.chunks(FACTORS).zip(units.chunks(FACTORS)).enumerate() {
        let first = block * FACTORS;
        let mut factors_of = [[0.0; FACTORS]; N];
        for (row, factors_of) in factors_of.iter_mut().enumerate() {
            *factors_of = factors(&scales[row * groups + first..][..wholes.len()], units);
        }
        for (g, whole) in wholes.iter().enumerate() {
            let whole = Group::new(whole);
            for (row, total) in totals.iter_mut().enumerate() {
                let bytes = &payload[row * stride + (first + g) * (GROUP / 2)..][..GROUP / 2];
                prefetch(bytes, N * stride);
                *total = _mm512_fmadd_ps(whole.sums(bytes), _mm512_set1_ps(factors_of[row][g]), *total);
            }
        }
    }
    for (out, total) in out.iter_mut().zip(totals) {
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
