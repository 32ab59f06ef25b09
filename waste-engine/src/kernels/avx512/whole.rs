//! Q4G and Q8G rows times whole numbers, by VNNI.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::super::columns::Columns;
use super::super::portable::{self, GROUP, WholeGroup, Words};
use super::super::x86::prefetch;
use super::load;
use super::trunk::reduce;

/// Groups whose factors are made at a time.
const FACTORS: usize = 16;

/// Rows that share what is loaded of the input.
const ROWS: usize = 4;

/// Inputs that share what is loaded and decoded of a row.
const INPUTS: usize = 4;

/// A group's even and odd nibbles.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn nibbles(bytes: &[u8]) -> [__m512i; 2] {
    let (nibble, bytes) = (_mm512_set1_epi8(15), load(bytes, 0));
    [_mm512_and_si512(bytes, nibble), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), nibble)]
}

/// The lanes' sums of an input's group with a row's nibbles.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn nibble_sums(x: &WholeGroup, [even, odd]: [__m512i; 2]) -> __m512 {
    let signed = |x: &[i8; GROUP / 2]| {
        // SAFETY: the array has the register's 64 bytes.
        unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
    };
    // SAFETY: the array has the register's 16 lanes.
    let bias = unsafe { _mm512_loadu_si512(x.bias.as_ptr().cast()) };
    let high = _mm512_dpbusd_epi32(_mm512_setzero_si512(), even, signed(&x.even_high));
    let high = _mm512_dpbusd_epi32(high, odd, signed(&x.odd_high));
    let low = _mm512_dpbusd_epi32(bias, even, signed(&x.even_low));
    let low = _mm512_dpbusd_epi32(low, odd, signed(&x.odd_low));
    _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low))
}

/// A group's bytes as words.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn widened(bytes: &[u8]) -> [__m512i; 4] {
    let bytes = [load(bytes, 0), load(bytes, 64)];
    let [a, b] = bytes.map(|bytes| {
        let halves = [_mm512_castsi512_si256(bytes), _mm512_extracti64x4_epi64::<1>(bytes)];
        halves.map(|half| _mm512_cvtepi8_epi16(half))
    });
    [a[0], a[1], b[0], b[1]]
}

/// The lanes' sums of an input's group with a row's words.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn word_sums(x: &Words, weights: [__m512i; 4]) -> __m512 {
    let mut sum = _mm512_setzero_si512();
    for (x, weights) in x.as_chunks::<32>().0.iter().zip(weights) {
        // SAFETY: the chunk has the register's 32 words.
        let x = unsafe { _mm512_loadu_si512(x.as_ptr().cast()) };
        sum = _mm512_dpwssd_epi32(sum, weights, x);
    }
    _mm512_cvtepi32_ps(sum)
}

/// An input's groups, and what a unit is worth in each.
type Input<'a, X> = (&'a [X], &'a [f32]);

/// How a format's groups are read: the bytes of one, its weights, and the lanes' sums of those with an input's group.
struct Format<X, D, S> {
    bytes: usize,
    decode: D,
    sums: S,
    input: fn(&[f32]) -> Input<'_, X>,
}

/// The table's entries for a format: one input, and several.
macro_rules! kernels {
    ($one:ident, $many:ident, $bytes:expr, $decode:ident, $sums:ident, $input:ident) => {
        /// See [`Kernels`](crate::kernels::Kernels).
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")]
        pub(in super::super) fn $one(payload: &[u8], scales: &[u16], input: &[f32], out: &mut [f32]) {
            let (decode, sums) = (|bytes: &[u8]| $decode(bytes), |x: &_, weights| $sums(x, weights));
            let format = Format { bytes: $bytes, decode, sums, input: portable::$input };
            one(&format, payload, scales, input, out);
        }

        /// See [`Many`](crate::kernels::Many).
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")]
        pub(in super::super) fn $many(
            payload: &[u8],
            scales: &[u16],
            inputs: &[f32],
            len: usize,
            out: &mut Columns<'_>,
        ) {
            let (decode, sums) = (|bytes: &[u8]| $decode(bytes), |x: &_, weights| $sums(x, weights));
            let format = Format { bytes: $bytes, decode, sums, input: portable::$input };
            for (i, inputs) in inputs.chunks(INPUTS * len).enumerate() {
                let first = i * INPUTS;
                match inputs.len() / len {
                    1 => by::<1, _, _>(&format, payload, scales, inputs, first, out),
                    2 => by::<2, _, _>(&format, payload, scales, inputs, first, out),
                    3 => by::<3, _, _>(&format, payload, scales, inputs, first, out),
                    _ => by::<INPUTS, _, _>(&format, payload, scales, inputs, first, out),
                }
            }
        }
    };
}

kernels!(rows_q4_fast, rows_q4_fast_many, GROUP / 2, nibbles, nibble_sums, whole_parts);
kernels!(rows_q8_fast, rows_q8_fast_many, GROUP, widened, word_sums, words_parts);

/// Rows by one input.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")]
fn one<const N: usize, X>(
    format: &Format<X, impl Fn(&[u8]) -> [__m512i; N], impl Fn(&X, [__m512i; N]) -> __m512>,
    payload: &[u8],
    scales: &[u16],
    input: &[f32],
    out: &mut [f32],
) {
    let input = (format.input)(input);
    let groups = input.0.len();
    let stride = groups * format.bytes;
    assert!(payload.len() >= out.len() * stride && scales.len() >= out.len() * groups);
    let whole = out.len() / ROWS * ROWS;
    let (many, few) = out.split_at_mut(whole);
    let blocks = payload.chunks_exact(ROWS * stride).zip(scales.chunks_exact(ROWS * groups));
    for (out, (payload, scales)) in many.as_chunks_mut::<ROWS>().0.iter_mut().zip(blocks) {
        *out = rows::<ROWS, 1, N, X>(format, payload, scales, [input]).map(|[out]| out);
    }
    let rest =
        payload[whole * stride..].chunks_exact(stride).zip(scales[whole * groups..].chunks_exact(groups));
    for (out, (payload, scales)) in few.iter_mut().zip(rest) {
        [[*out]] = rows::<1, 1, N, X>(format, payload, scales, [input]);
    }
}

/// Rows by `T` inputs; their products begin in row `first` of `out`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")]
fn by<const T: usize, const N: usize, X>(
    format: &Format<X, impl Fn(&[u8]) -> [__m512i; N], impl Fn(&X, [__m512i; N]) -> __m512>,
    payload: &[u8],
    scales: &[u16],
    inputs: &[f32],
    first: usize,
    out: &mut Columns<'_>,
) {
    let len = inputs.len() / T;
    let inputs: [Input<'_, X>; T] = std::array::from_fn(|t| (format.input)(&inputs[t * len..(t + 1) * len]));
    let groups = inputs[0].0.len();
    let stride = groups * format.bytes;
    assert!(payload.len() >= out.width() * stride && scales.len() >= out.width() * groups);
    let pairs = out.width() / 2;
    for pair in 0..pairs {
        let (payload, scales) = (&payload[2 * pair * stride..], &scales[2 * pair * groups..]);
        let products = rows::<2, T, N, X>(format, &payload[..2 * stride], &scales[..2 * groups], inputs);
        for (row, products) in products.into_iter().enumerate() {
            for (t, product) in products.into_iter().enumerate() {
                out.set(first + t, 2 * pair + row, product);
            }
        }
    }
    for row in 2 * pairs..out.width() {
        let (payload, scales) = (&payload[row * stride..], &scales[row * groups..]);
        let [products] = rows::<1, T, N, X>(format, &payload[..stride], &scales[..groups], inputs);
        for (t, product) in products.into_iter().enumerate() {
            out.set(first + t, row, product);
        }
    }
}

/// `R` rows side by side, each times `T` inputs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn rows<const R: usize, const T: usize, const N: usize, X>(
    format: &Format<X, impl Fn(&[u8]) -> [__m512i; N], impl Fn(&X, [__m512i; N]) -> __m512>,
    payload: &[u8],
    scales: &[u16],
    inputs: [Input<'_, X>; T],
) -> [[f32; T]; R] {
    let groups = scales.len() / R;
    let stride = groups * format.bytes;
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
            let mut weights = [[_mm512_setzero_si512(); N]; R];
            for (row, weights) in weights.iter_mut().enumerate() {
                let bytes = &payload[row * stride + g * format.bytes..][..format.bytes];
                for line in (0..format.bytes).step_by(64) {
                    prefetch(bytes, R * stride + line);
                }
                *weights = (format.decode)(bytes);
            }
            for (t, (groups, _)) in inputs.into_iter().enumerate() {
                for (row, weights) in weights.into_iter().enumerate() {
                    let factor = _mm512_set1_ps(factors_of[row][t][g - first]);
                    let sums = (format.sums)(&groups[g], weights);
                    totals[row][t] = _mm512_fmadd_ps(sums, factor, totals[row][t]);
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
