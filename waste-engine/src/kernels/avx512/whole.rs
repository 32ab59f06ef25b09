//! Q4G rows times whole numbers, by VNNI.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::super::columns::Columns;
use super::super::portable::{self, GROUP, WholeGroup};
use super::super::x86::prefetch;
use super::load;
use super::trunk::{INPUTS, reduce};

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
    fn sums(&self, [even, odd]: [__m512i; 2]) -> __m512 {
        let high = _mm512_dpbusd_epi32(_mm512_setzero_si512(), even, self.high[0]);
        let high = _mm512_dpbusd_epi32(high, odd, self.high[1]);
        let low = _mm512_dpbusd_epi32(self.bias, even, self.low[0]);
        let low = _mm512_dpbusd_epi32(low, odd, self.low[1]);
        _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low))
    }
}

/// A group's even and odd nibbles.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn nibbles(bytes: &[u8]) -> [__m512i; 2] {
    let (nibble, bytes) = (_mm512_set1_epi8(15), load(bytes, 0));
    [_mm512_and_si512(bytes, nibble), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), nibble)]
}

/// See [`Kernels::rows_q4_fast`](crate::kernels::Kernels::rows_q4_fast).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")]
pub(in super::super) fn rows_q4_fast(payload: &[u8], scales: &[u16], whole: &[f32], out: &mut [f32]) {
    let input = portable::whole_parts(whole);
    let (groups, stride) = (input.0.len(), input.0.len() * GROUP / 2);
    assert!(payload.len() >= out.len() * stride && scales.len() >= out.len() * groups);
    let whole = out.len() / ROWS * ROWS;
    let (many, few) = out.split_at_mut(whole);
    let blocks = payload.chunks_exact(ROWS * stride).zip(scales.chunks_exact(ROWS * groups));
    for (out, (payload, scales)) in many.as_chunks_mut::<ROWS>().0.iter_mut().zip(blocks) {
        *out = rows::<ROWS, 1>(payload, scales, [input]).map(|[out]| out);
    }
    let rest =
        payload[whole * stride..].chunks_exact(stride).zip(scales[whole * groups..].chunks_exact(groups));
    for (out, (payload, scales)) in few.iter_mut().zip(rest) {
        [[*out]] = rows::<1, 1>(payload, scales, [input]);
    }
}

/// See [`Many::rows_q4_fast`](crate::kernels::Many::rows_q4_fast).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")]
pub(in super::super) fn rows_q4_fast_many(
    payload: &[u8],
    scales: &[u16],
    wholes: &[f32],
    len: usize,
    out: &mut Columns<'_>,
) {
    for (i, wholes) in wholes.chunks(INPUTS * len).enumerate() {
        let first = i * INPUTS;
        match wholes.len() / len {
            1 => by::<1>(payload, scales, wholes, first, out),
            2 => by::<2>(payload, scales, wholes, first, out),
            3 => by::<3>(payload, scales, wholes, first, out),
            _ => by::<INPUTS>(payload, scales, wholes, first, out),
        }
    }
}

/// Rows by `T` inputs; their products begin in row `first` of `out`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")]
fn by<const T: usize>(payload: &[u8], scales: &[u16], wholes: &[f32], first: usize, out: &mut Columns<'_>) {
    let len = wholes.len() / T;
    let inputs: [Input<'_>; T] =
        std::array::from_fn(|t| portable::whole_parts(&wholes[t * len..(t + 1) * len]));
    let groups = inputs[0].0.len();
    let stride = groups * GROUP / 2;
    assert!(payload.len() >= out.width() * stride && scales.len() >= out.width() * groups);
    let pairs = out.width() / 2;
    for pair in 0..pairs {
        let (payload, scales) = (&payload[2 * pair * stride..], &scales[2 * pair * groups..]);
        let products = rows::<2, T>(&payload[..2 * stride], &scales[..2 * groups], inputs);
        for (row, products) in products.into_iter().enumerate() {
            for (t, product) in products.into_iter().enumerate() {
                out.set(first + t, 2 * pair + row, product);
            }
        }
    }
    for row in 2 * pairs..out.width() {
        let (payload, scales) = (&payload[row * stride..], &scales[row * groups..]);
        let [products] = rows::<1, T>(&payload[..stride], &scales[..groups], inputs);
        for (t, product) in products.into_iter().enumerate() {
            out.set(first + t, row, product);
        }
    }
}

/// An input's groups, and what a unit is worth in each.
type Input<'a> = (&'a [WholeGroup], &'a [f32]);

/// `R` rows side by side, each times `T` inputs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn rows<const R: usize, const T: usize>(
    payload: &[u8],
    scales: &[u16],
    inputs: [Input<'_>; T],
) -> [[f32; T]; R] {
    let groups = scales.len() / R;
    let stride = groups * GROUP / 2;
    let mut totals = [[_mm512_setzero_ps(); T]; R];
    for first in (0..groups).step_by(FACTORS) {
        let block = first..groups.min(first + FACTORS);
        let mut factors_of = [[[0.0; FACTORS]; T]; R];
        for (row, factors_of) in factors_of.iter_mut().enumerate() {
            for (factors_of, (_, units)) in factors_of.iter_mut().zip(inputs) {
                let scales = &scales[row * groups + first..][..block.len()];
                *factors_of = factors(scales, &units[block.clone()]);
            }
        }
        for g in block {
            let mut weights = [[_mm512_setzero_si512(); 2]; R];
            for (row, weights) in weights.iter_mut().enumerate() {
                let bytes = &payload[row * stride + g * (GROUP / 2)..][..GROUP / 2];
                prefetch(bytes, R * stride);
                *weights = nibbles(bytes);
            }
            for (t, (wholes, _)) in inputs.into_iter().enumerate() {
                let whole = Group::new(&wholes[g]);
                for (row, weights) in weights.into_iter().enumerate() {
                    let factor = _mm512_set1_ps(factors_of[row][t][g - first]);
                    totals[row][t] = _mm512_fmadd_ps(whole.sums(weights), factor, totals[row][t]);
                }
            }
        }
    }
    totals.map(|totals| totals.map(|total| reduce(total)))
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
