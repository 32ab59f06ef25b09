//! Q4G and Q8G rows in the *fast* arithmetic: the input as 16-bit whole numbers, products summed exactly.

use waste_common::quant::half::f16_to_f32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{GROUP, LANES, ROUND, reduce};

/// Largest magnitude of an input element: so that its upper byte, rounded, is one too.
const WHOLE_MAX: f32 = 32639.0;
/// A group whose elements are all below this counts as zero: its unit would not be a normal number.
const WHOLE_TINY: f32 = 1e-30;

/// One group of an input, `x = unit · (256 · high + low)`, even and odd elements apart as the nibbles lie.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub struct WholeGroup {
    /// Upper bytes of the even elements.
    pub even_high: [i8; GROUP / 2],
    /// Upper bytes of the odd ones.
    pub odd_high: [i8; GROUP / 2],
    /// Lower bytes of the even elements, signed.
    pub even_low: [i8; GROUP / 2],
    /// Lower bytes of the odd ones.
    pub odd_low: [i8; GROUP / 2],
    /// What the nibbles' bias of 8 makes of each lane: −8 times the sum of its eight elements.
    pub bias: [i32; LANES],
}

/// Elements that an input of `cols` takes as whole numbers.
pub const fn whole_len(cols: usize) -> usize {
    cols.div_ceil(GROUP) * GROUP_LEN
}

/// Elements of a group: itself, and what its unit is worth.
const GROUP_LEN: usize = size_of::<WholeGroup>() / 4 + 1;

/// An input as [`to_whole`] left it: its groups, and what a unit is worth in each.
#[inline(always)]
pub fn whole_parts(whole: &[f32]) -> (&[WholeGroup], &[f32]) {
    let (wholes, units) = whole.split_at(whole.len() / GROUP_LEN * (GROUP_LEN - 1));
    // Both are made of four-byte numbers, so this always succeeds.
    (<[WholeGroup]>::ref_from_bytes(wholes.as_bytes()).unwrap_or_default(), units)
}

/// Writes an input as whole numbers to `whole`, [`whole_len`] elements. A group with an infinite or undefined element
/// gets an undefined unit.
#[inline(always)]
pub fn to_whole(x: &[f32], whole: &mut [f32]) {
    let groups = x.len().div_ceil(GROUP);
    let (wholes, units) = whole[..whole_len(x.len())].split_at_mut(groups * (GROUP_LEN - 1));
    // As in `whole_parts`.
    let Ok(wholes) = <[WholeGroup]>::mut_from_bytes(wholes.as_mut_bytes()) else { return };
    for ((whole, unit), x) in wholes.iter_mut().zip(units.iter_mut()).zip(x.chunks(GROUP)) {
        let rounded;
        (*unit, rounded) = round_group(x);
        for (i, pair) in rounded.chunks_exact(2).enumerate() {
            let low = [pair[0] as i8, pair[1] as i8];
            let high = [0, 1].map(|i| ((pair[i] - i32::from(low[i])) >> 8) as i8);
            ([whole.even_low[i], whole.odd_low[i]], [whole.even_high[i], whole.odd_high[i]]) = (low, high);
        }
        for (bias, eight) in whole.bias.iter_mut().zip(rounded.chunks_exact(8)) {
            *bias = -8 * eight.iter().sum::<i32>();
        }
    }
}

/// One group of an input of Q8G rows.
pub type Words = [i16; GROUP];

/// Elements that an input of `cols` takes as [`Words`].
pub const fn words_len(cols: usize) -> usize {
    cols.div_ceil(GROUP) * WORDS_LEN
}

/// Elements of a group: itself, and what its unit is worth.
const WORDS_LEN: usize = size_of::<Words>() / 4 + 1;

/// An input as [`to_words`] left it: its groups, and what a unit is worth in each.
#[inline(always)]
pub fn words_parts(words: &[f32]) -> (&[Words], &[f32]) {
    let (words, units) = words.split_at(words.len() / WORDS_LEN * (WORDS_LEN - 1));
    // As in `whole_parts`.
    (<[Words]>::ref_from_bytes(words.as_bytes()).unwrap_or_default(), units)
}

/// [`to_whole`] for Q8G rows: whole numbers in their order, [`words_len`] elements.
#[inline(always)]
pub fn to_words(x: &[f32], words: &mut [f32]) {
    let groups = x.len().div_ceil(GROUP);
    let (words, units) = words[..words_len(x.len())].split_at_mut(groups * (WORDS_LEN - 1));
    // As in `whole_parts`.
    let Ok(words) = <[Words]>::mut_from_bytes(words.as_mut_bytes()) else { return };
    for ((words, unit), x) in words.iter_mut().zip(units.iter_mut()).zip(x.chunks(GROUP)) {
        let rounded;
        (*unit, rounded) = round_group(x);
        *words = rounded.map(|x| x as i16);
    }
}

/// What a unit of a group of up to 128 elements is worth, and how many each element has.
#[inline(always)]
fn round_group(x: &[f32]) -> (f32, [i32; GROUP]) {
    // As whole numbers the magnitudes of floats keep their order, and NaN is the largest.
    let largest = f32::from_bits(x.iter().fold(0, |m, x| m.max(x.to_bits() & 0x7fff_ffff)));
    let (unit, factor) = if !largest.is_finite() {
        (f32::NAN, 0.0)
    } else if largest < WHOLE_TINY {
        (0.0, 0.0)
    } else {
        (largest / WHOLE_MAX, WHOLE_MAX / largest)
    };
    let mut rounded = [0i32; GROUP];
    for (rounded, &x) in rounded.iter_mut().zip(x) {
        let x = if unit.is_nan() { 0.0 } else { x };
        *rounded = (x * factor + ROUND).to_bits() as i32 - ROUND.to_bits() as i32;
    }
    (unit, rounded)
}

/// See [`Kernels::rows_q4_fast`](crate::kernels::Kernels::rows_q4_fast). Lane j of a group is the exact sum of its
/// elements 8j .. 8j + 8; the lanes of all groups are combined in order, `total = fma(lane, scale · unit, total)`, and
/// reduced by halving.
#[inline(always)]
pub fn rows_q4_fast(payload: &[u8], scales: &[u16], whole: &[f32], out: &mut [f32]) {
    let (wholes, units) = whole_parts(whole);
    let stride = wholes.len() * GROUP / 2;
    assert!(payload.len() >= out.len() * stride && scales.len() >= out.len() * wholes.len());
    let rows = payload.chunks_exact(stride).zip(scales.chunks_exact(wholes.len()));
    for (out, (row, scales)) in out.iter_mut().zip(rows) {
        let mut total = [0.0f32; LANES];
        let groups = row.chunks_exact(GROUP / 2).zip(wholes).zip(units.iter().zip(scales));
        for ((bytes, whole), (unit, &scale)) in groups {
            let factor = f16_to_f32(scale) * unit;
            for (j, (total, bytes)) in total.iter_mut().zip(bytes.chunks_exact(4)).enumerate() {
                let (mut high, mut low) = (0, whole.bias[j]);
                for (i, byte) in (4 * j..).zip(bytes) {
                    let (even, odd) = (i32::from(byte & 15), i32::from(byte >> 4));
                    high += even * i32::from(whole.even_high[i]) + odd * i32::from(whole.odd_high[i]);
                    low += even * i32::from(whole.even_low[i]) + odd * i32::from(whole.odd_low[i]);
                }
                *total = ((high * 256 + low) as f32).mul_add(factor, *total);
            }
        }
        *out = reduce(total);
    }
}

/// See [`Kernels::rows_q8_fast`](crate::kernels::Kernels::rows_q8_fast). Lane j of a group is the exact sum of elements
/// 2j and 2j + 1 of each quarter of it; the lanes of all groups are combined as those of [`rows_q4_fast`].
#[inline(always)]
pub fn rows_q8_fast(payload: &[u8], scales: &[u16], words: &[f32], out: &mut [f32]) {
    let (words, units) = words_parts(words);
    let stride = words.len() * GROUP;
    assert!(payload.len() >= out.len() * stride && scales.len() >= out.len() * words.len());
    let rows = payload.chunks_exact(stride).zip(scales.chunks_exact(words.len()));
    for (out, (row, scales)) in out.iter_mut().zip(rows) {
        let mut total = [0.0f32; LANES];
        let groups = row.as_chunks::<GROUP>().0.iter().zip(words).zip(units.iter().zip(scales));
        for ((bytes, words), (unit, &scale)) in groups {
            let factor = f16_to_f32(scale) * unit;
            let mut sums = [0i32; LANES];
            for (bytes, words) in bytes.chunks_exact(2 * LANES).zip(words.chunks_exact(2 * LANES)) {
                for (j, sum) in sums.iter_mut().enumerate() {
                    let product = |i: usize| i32::from(bytes[i] as i8) * i32::from(words[i]);
                    *sum += product(2 * j) + product(2 * j + 1);
                }
            }
            for (total, sum) in total.iter_mut().zip(sums) {
                *total = (sum as f32).mul_add(factor, *total);
            }
        }
        *out = reduce(total);
    }
}
