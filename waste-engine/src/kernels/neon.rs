//! Kernels written for NEON, which every 64-bit Arm CPU has.
#![allow(unsafe_code)]

use std::arch::aarch64::*;

use waste_common::quant::half::f16_to_f32;

use super::portable::{self, FAST_VECTORS, FastTables, GROUP, VQ_BLOCK, VqShape, WholeGroup, Words};

/// Rows that go together.
const ROWS: usize = 16;

/// 64 entries of a byte table from `at` on.
#[inline(always)]
fn load_table(bytes: &[u8], at: usize) -> uint8x16x4_t {
    let bytes: &[u8] = &bytes[at..at + 64];
    // SAFETY: the slice has 64 bytes; NEON is part of the target.
    unsafe { vld1q_u8_x4(bytes.as_ptr()) }
}

/// Bytes 0, 1 and 2 of each of 16 triples.
#[inline(always)]
fn load_triples(bytes: &[u8]) -> [uint8x16_t; 3] {
    let bytes: &[u8] = &bytes[..3 * ROWS];
    // SAFETY: the slice has 48 bytes; NEON is part of the target.
    let uint8x16x3_t(x, y, z) = unsafe { vld3q_u8(bytes.as_ptr()) };
    [x, y, z]
}

/// Bytes 0 and 1 of each of 16 pairs.
#[inline(always)]
fn load_pairs(bytes: &[u8]) -> [uint8x16_t; 2] {
    let bytes: &[u8] = &bytes[..2 * ROWS];
    // SAFETY: the slice has 32 bytes; NEON is part of the target.
    let uint8x16x2_t(x, y) = unsafe { vld2q_u8(bytes.as_ptr()) };
    [x, y]
}

/// Sums of bytes of 16 rows.
type ByteSums = [uint16x8_t; 2];

/// 16 rows: the sums of both planes within a block of vectors, and the whole sums so far.
#[derive(Clone, Copy)]
struct RowSums {
    planes: [ByteSums; 2],
    rows: [float32x4_t; 4],
}

impl RowSums {
    #[inline(always)]
    fn zero() -> Self {
        // SAFETY: NEON is part of the target.
        unsafe { RowSums { planes: [[vdupq_n_u16(0); 2]; 2], rows: [vdupq_n_f32(0.0); 4] } }
    }

    #[inline(always)]
    fn add(&mut self, plane: usize, x: uint8x16_t) {
        let sums = &mut self.planes[plane];
        // SAFETY: NEON is part of the target.
        unsafe {
            sums[0] = vaddw_u8(sums[0], vget_low_u8(x));
            sums[1] = vaddw_high_u8(sums[1], x);
        }
    }

    /// Ends a block of vectors of `count` look-ups a row.
    #[inline(always)]
    fn finish(&mut self, count: usize, scale: f32) {
        let [low, high] = self.planes;
        // SAFETY: NEON is part of the target.
        unsafe {
            let bias = vdupq_n_s32(32768 * count as i32);
            for i in 0..2 {
                let first = vmlal_n_u16(vmovl_u16(vget_low_u16(low[i])), vget_low_u16(high[i]), 256);
                let second = vmlal_n_u16(vmovl_u16(vget_high_u16(low[i])), vget_high_u16(high[i]), 256);
                for (j, sum) in [first, second].into_iter().enumerate() {
                    let sum = vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(sum), bias));
                    self.rows[2 * i + j] = vfmaq_n_f32(self.rows[2 * i + j], sum, scale);
                }
            }
        }
        *self = RowSums { rows: self.rows, ..RowSums::zero() };
    }

    #[inline(always)]
    fn store(self, scales: &[u8], out: &mut [f32]) {
        let mut acc = [0.0; ROWS];
        for (acc, rows) in acc.chunks_exact_mut(4).zip(self.rows) {
            // SAFETY: the chunk has the register's four lanes; NEON is part of the target.
            unsafe { vst1q_f32(acc.as_mut_ptr(), rows) };
        }
        portable::scale_rows(&acc, scales, out);
    }
}

/// See [`Kernels::vq_rows_fast`](super::Kernels::vq_rows_fast).
pub(super) fn vq_rows_fast(
    indices: &[u8],
    shape: VqShape,
    scales: &[u8],
    tables: FastTables,
    out: &mut [f32],
) {
    portable::check_fast(indices, shape, scales, tables, out);
    let kernel: fn(&[u8], VqShape, &[u8], FastTables, &mut [f32]) =
        match (shape.stages, shape.entries, shape.packed) {
            (2, 256, false) => |i, shape, s, t, out| bytes(i, shape, s, t, out, load_pairs),
            (3, 256, false) => |i, shape, s, t, out| bytes(i, shape, s, t, out, load_triples),
            (4, 64, true) => packed,
            _ => return portable::vq_rows_fast(indices, shape, scales, tables, out),
        };
    let blocks = indices.chunks(shape.block_bytes()).zip(scales.chunks(2 * VQ_BLOCK));
    for (out, (indices, scales)) in out.chunks_mut(VQ_BLOCK).zip(blocks) {
        kernel(indices, shape, scales, tables, out);
    }
}

/// A block of rows with an index of one byte for each of `S` stages of 256 entries.
#[inline(always)]
fn bytes<const S: usize>(
    indices: &[u8],
    shape: VqShape,
    scales: &[u8],
    tables: FastTables,
    out: &mut [f32],
    load: impl Fn(&[u8]) -> [uint8x16_t; S],
) {
    let mut sums = [RowSums::zero(); VQ_BLOCK / ROWS];
    let mut rows = indices[..shape.block_bytes()].chunks_exact(VQ_BLOCK * S);
    for (planes, &scale) in tables.planes.chunks(FAST_VECTORS * S * 512).zip(tables.scales) {
        let vectors = planes.len() / (S * 512);
        for (stages, rows) in planes.chunks_exact(S * 512).zip(&mut rows) {
            let index: [[uint8x16_t; S]; VQ_BLOCK / ROWS] =
                std::array::from_fn(|group| load(&rows[group * ROWS * S..]));
            for (s, stage) in stages.chunks_exact(512).enumerate() {
                for (p, plane) in stage.chunks_exact(256).enumerate() {
                    let table = [0, 64, 128, 192].map(|at| load_table(plane, at));
                    for (sums, index) in sums.iter_mut().zip(index) {
                        sums.add(p, look_up(table, index[s]));
                    }
                }
            }
        }
        for sums in &mut sums {
            sums.finish(vectors * S, scale);
        }
    }
    let rows = out.chunks_mut(ROWS).zip(scales.chunks(2 * ROWS));
    for (sums, (out, scales)) in sums.into_iter().zip(rows) {
        sums.store(scales, out);
    }
}

/// `table[index]` for 256 entries.
#[inline(always)]
fn look_up(table: [uint8x16x4_t; 4], index: uint8x16_t) -> uint8x16_t {
    // SAFETY: NEON is part of the target. An index beyond 63 finds 0 or, with `tbx`, keeps what is there.
    unsafe {
        let next = vdupq_n_u8(64);
        let mut found = vqtbl4q_u8(table[0], index);
        let mut index = index;
        for table in &table[1..] {
            index = vsubq_u8(index, next);
            found = vqtbx4q_u8(found, *table, index);
        }
        found
    }
}

/// A block of rows with four indices of 6 bits in three bytes.
fn packed(indices: &[u8], shape: VqShape, scales: &[u8], tables: FastTables, out: &mut [f32]) {
    let mut sums = [RowSums::zero(); VQ_BLOCK / ROWS];
    let mut rows = indices[..shape.block_bytes()].chunks_exact(VQ_BLOCK * 3);
    for (planes, &scale) in tables.planes.chunks(FAST_VECTORS * 512).zip(tables.scales) {
        let vectors = planes.len() / 512;
        for (stages, rows) in planes.chunks_exact(512).zip(&mut rows) {
            let index: [[uint8x16_t; 4]; VQ_BLOCK / ROWS] =
                std::array::from_fn(|group| fields(load_triples(&rows[group * ROWS * 3..])));
            for (s, stage) in stages.chunks_exact(128).enumerate() {
                for (p, plane) in stage.chunks_exact(64).enumerate() {
                    let table = load_table(plane, 0);
                    for (sums, index) in sums.iter_mut().zip(index) {
                        // SAFETY: NEON is part of the target.
                        sums.add(p, unsafe { vqtbl4q_u8(table, index[s]) });
                    }
                }
            }
        }
        for sums in &mut sums {
            sums.finish(vectors * 4, scale);
        }
    }
    let rows = out.chunks_mut(ROWS).zip(scales.chunks(2 * ROWS));
    for (sums, (out, scales)) in sums.into_iter().zip(rows) {
        sums.store(scales, out);
    }
}

/// The four 6-bit fields of three bytes.
#[inline(always)]
fn fields([x, y, z]: [uint8x16_t; 3]) -> [uint8x16_t; 4] {
    // SAFETY: NEON is part of the target.
    unsafe {
        let six_bits = vdupq_n_u8(0x3f);
        [
            vandq_u8(x, six_bits),
            vandq_u8(vorrq_u8(vshrq_n_u8::<6>(x), vshlq_n_u8::<2>(y)), six_bits),
            vandq_u8(vorrq_u8(vshrq_n_u8::<4>(y), vshlq_n_u8::<4>(z)), six_bits),
            vshrq_n_u8::<2>(z),
        ]
    }
}

/// The sums of eight elements each of a quarter of a group: 16 bytes of nibbles, byte `at` on.
#[inline(always)]
fn quarter_group(bytes: &[u8], whole: &WholeGroup, at: usize) -> int32x4_t {
    let bytes: &[u8] = &bytes[at..at + 16];
    let lanes: &[i32] = &whole.bias[at / 4..at / 4 + 4];
    let signed = |x: &[i8; GROUP / 2]| {
        let x: &[i8] = &x[at..at + 16];
        // SAFETY: the slice has 16 bytes; NEON is part of the target.
        unsafe { vld1q_s8(x.as_ptr()) }
    };
    // SAFETY: the slices have 16 bytes and 4 lanes; NEON is part of the target.
    unsafe {
        let (bytes, bias) = (vld1q_u8(bytes.as_ptr()), vld1q_s32(lanes.as_ptr()));
        let even = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)));
        let odd = vreinterpretq_s8_u8(vshrq_n_u8::<4>(bytes));
        // Two products of at most 15 · 128 fit 16 bits.
        let sum = |evens: int8x16_t, odds: int8x16_t| {
            let first = vmull_s8(vget_low_s8(even), vget_low_s8(evens));
            let first = vmlal_s8(first, vget_low_s8(odd), vget_low_s8(odds));
            let second = vmlal_high_s8(vmull_high_s8(even, evens), odd, odds);
            vpaddq_s32(vpaddlq_s16(first), vpaddlq_s16(second))
        };
        let high = sum(signed(&whole.even_high), signed(&whole.odd_high));
        let low = sum(signed(&whole.even_low), signed(&whole.odd_low));
        vaddq_s32(vshlq_n_s32::<8>(high), vaddq_s32(low, bias))
    }
}

/// A quarter of the lanes' sums of a group: words from word `at` on of each quarter of it.
#[inline(always)]
fn quarter_words(bytes: &[u8], words: &Words, at: usize) -> int32x4_t {
    // SAFETY: NEON is part of the target.
    let mut sums = [unsafe { vdupq_n_s32(0) }; 2];
    for first in (at..GROUP).step_by(GROUP / 4) {
        let (bytes, words): (&[u8], &[i16]) = (&bytes[first..first + 8], &words[first..first + 8]);
        // SAFETY: the slices have 8 bytes and 8 words; NEON is part of the target.
        unsafe {
            let weights = vmovl_s8(vld1_s8(bytes.as_ptr().cast()));
            let words = vld1q_s16(words.as_ptr());
            sums[0] = vmlal_s16(sums[0], vget_low_s16(weights), vget_low_s16(words));
            sums[1] = vmlal_high_s16(sums[1], weights, words);
        }
    }
    // SAFETY: NEON is part of the target.
    unsafe { vpaddq_s32(sums[0], sums[1]) }
}

/// Rows times whole numbers; `quarter` gives a quarter of the lanes' sums of a group of so many bytes.
#[inline(always)]
fn rows_fast<X>(
    group_bytes: usize,
    payload: &[u8],
    scales: &[u16],
    (groups, units): (&[X], &[f32]),
    out: &mut [f32],
    quarter: impl Fn(&[u8], &X, usize) -> int32x4_t,
) {
    let stride = groups.len() * group_bytes;
    assert!(payload.len() >= out.len() * stride && scales.len() >= out.len() * groups.len());
    let rows = payload.chunks_exact(stride).zip(scales.chunks_exact(groups.len()));
    for (out, (row, scales)) in out.iter_mut().zip(rows) {
        // SAFETY: NEON is part of the target.
        let mut total = [unsafe { vdupq_n_f32(0.0) }; 4];
        let groups = row.chunks_exact(group_bytes).zip(groups).zip(units.iter().zip(scales));
        for ((bytes, x), (unit, &scale)) in groups {
            let factor = f16_to_f32(scale) * unit;
            for (i, total) in total.iter_mut().enumerate() {
                let sum = quarter(bytes, x, i);
                // SAFETY: NEON is part of the target.
                *total = unsafe { vfmaq_n_f32(*total, vcvtq_f32_s32(sum), factor) };
            }
        }
        let mut lanes = [0.0; 16];
        for (lanes, total) in lanes.chunks_exact_mut(4).zip(total) {
            // SAFETY: the chunk has the register's four lanes; NEON is part of the target.
            unsafe { vst1q_f32(lanes.as_mut_ptr(), total) };
        }
        *out = portable::reduce(lanes);
    }
}

/// See [`Kernels::rows_q4_fast`](super::Kernels::rows_q4_fast).
pub(super) fn rows_q4_fast(payload: &[u8], scales: &[u16], whole: &[f32], out: &mut [f32]) {
    let quarter = |bytes: &[u8], x: &WholeGroup, i| quarter_group(bytes, x, 16 * i);
    rows_fast(GROUP / 2, payload, scales, portable::whole_parts(whole), out, quarter);
}

/// See [`Kernels::rows_q8_fast`](super::Kernels::rows_q8_fast).
pub(super) fn rows_q8_fast(payload: &[u8], scales: &[u16], words: &[f32], out: &mut [f32]) {
    let quarter = |bytes: &[u8], x: &Words, i| quarter_words(bytes, x, 8 * i);
    rows_fast(GROUP, payload, scales, portable::words_parts(words), out, quarter);
}
