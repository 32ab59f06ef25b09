//! Tables of partial dot products, and their whole numbers.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::portable::{self, FAST_VECTORS, VQ_DIM, VqShape};
use super::{load, load_ps};

/// Entries of a table that go together.
const TILE: usize = 32;

/// See [`Kernels::vq_tables`](super::super::Kernels::vq_tables).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx2,fma,f16c")]
pub(in super::super) fn vq_tables(codebooks: &[f32], shape: VqShape, x: &[f32], tables: &mut [f32]) {
    let VqShape { stages, entries, .. } = shape;
    if entries % TILE != 0 {
        return portable::vq_tables(codebooks, shape, x, tables);
    }
    let per_vector = stages * entries;
    let blocks = tables.chunks_mut(FAST_VECTORS * per_vector);
    for (tables, x) in blocks.zip(x.chunks(FAST_VECTORS * VQ_DIM)) {
        let x = x.as_chunks::<VQ_DIM>().0;
        for (s, book) in codebooks.chunks_exact(VQ_DIM * entries).take(stages).enumerate() {
            for first in (0..entries).step_by(TILE) {
                // 16 registers: the tile stays there while the vectors pass.
                let tile: [[__m512; 2]; VQ_DIM] = std::array::from_fn(|d| {
                    let at = d * entries + first;
                    [load_ps(book, at), load_ps(book, at + 16)]
                });
                for (table, x) in tables.chunks_exact_mut(per_vector).zip(x) {
                    let mut sums = [_mm512_setzero_ps(); 2];
                    for d in 0..VQ_DIM {
                        let x = _mm512_set1_ps(x[d]);
                        sums[0] = _mm512_fmadd_ps(tile[d][0], x, sums[0]);
                        sums[1] = _mm512_fmadd_ps(tile[d][1], x, sums[1]);
                    }
                    let out = &mut table[s * entries + first..][..TILE];
                    // SAFETY: the slice has two registers' 32 lanes.
                    unsafe {
                        _mm512_storeu_ps(out.as_mut_ptr(), sums[0]);
                        _mm512_storeu_ps(out.as_mut_ptr().add(16), sums[1]);
                    }
                }
            }
        }
    }
}

/// See [`Kernels::vq_tables_fast`](super::super::Kernels::vq_tables_fast).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx2,fma,f16c")]
pub(in super::super) fn vq_tables_fast(
    codebooks: &[f32],
    shape: VqShape,
    x: &[f32],
    scratch: &mut [f32],
    planes: &mut [u8],
    units: &mut [f32],
) {
    let VqShape { stages, entries, .. } = shape;
    if entries % 64 != 0 {
        return portable::vq_tables_fast(codebooks, shape, x, scratch, planes, units);
    }
    portable::check_tables_fast(codebooks, shape, x, planes, units);
    let (per_vector, wide) = (stages * entries, shape.wide() * entries);
    let quantise = Quantise::new();
    let blocks = planes.chunks_mut(FAST_VECTORS * shape.vector_planes());
    let blocks = blocks.zip(units.chunks_exact_mut(shape.block_units()));
    for ((planes, units), x) in blocks.zip(x.chunks(FAST_VECTORS * VQ_DIM)) {
        let tables = &mut scratch[..x.len() / VQ_DIM * per_vector];
        vq_tables(codebooks, shape, x, tables);
        let factors = portable::fast_units(shape, units, |range| largest(tables, per_vector, range));
        if units[0].is_nan() {
            tables.fill(0.0);
        }
        let vectors = planes.chunks_exact_mut(shape.vector_planes());
        for (planes, table) in vectors.zip(tables.chunks_exact(per_vector)) {
            let (wide_planes, narrow_planes) = planes.split_at_mut(2 * wide);
            let (wide, narrow) = table.split_at(wide);
            let stages = wide_planes.chunks_exact_mut(2 * entries).zip(wide.chunks_exact(entries));
            for (planes, table) in stages {
                let (lows, highs) = planes.split_at_mut(entries);
                quantise.wide(table, factors[0], lows, highs);
            }
            let stages = narrow_planes.chunks_exact_mut(entries).zip(narrow.chunks_exact(entries));
            for ((plane, table), factor) in stages.zip(&factors[1..]) {
                quantise.narrow(table, *factor, plane);
            }
        }
    }
}

/// Rounds table entries to whole numbers, 64 at a time.
struct Quantise {
    /// Where the low bytes of 64 words are among two registers of interleaved words.
    low: __m512i,
}

impl Quantise {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn new() -> Self {
        // Lane i of the register k of four goes to byte 16k + i; the words of two registers are interleaved before.
        let mut positions = [0u8; 64];
        for (j, position) in positions.iter_mut().enumerate() {
            *position = (j / 32 * 64 + j / 16 % 2 * 2 + j % 16 * 4) as u8;
        }
        Quantise { low: load(&positions, 0) }
    }

    /// The lower words of the rounded entries from `at` on: 16 of them in the even words, the 16 after in the odd.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn words(table: &[f32], at: usize, factor: __m512) -> __m512i {
        let bits = |at: usize| {
            let scaled = _mm512_mul_ps(load_ps(table, at), factor);
            _mm512_castps_si512(_mm512_add_ps(scaled, _mm512_set1_ps(portable::ROUND)))
        };
        _mm512_mask_blend_epi16(0xaaaa_aaaa, bits(at), _mm512_slli_epi32::<16>(bits(at + 16)))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn wide(&self, table: &[f32], factor: f32, lows: &mut [u8], highs: &mut [u8]) {
        let (factor, bias) = (_mm512_set1_ps(factor), _mm512_set1_epi8(-128));
        let high = _mm512_add_epi8(self.low, _mm512_set1_epi8(1));
        let rows = lows.as_chunks_mut::<64>().0.iter_mut().zip(highs.as_chunks_mut::<64>().0);
        for ((lows, highs), table) in rows.zip(table.as_chunks::<64>().0) {
            let (first, second) = (Self::words(table, 0, factor), Self::words(table, 32, factor));
            store(lows, _mm512_permutex2var_epi8(first, self.low, second));
            store(highs, _mm512_xor_si512(_mm512_permutex2var_epi8(first, high, second), bias));
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn narrow(&self, table: &[f32], factor: f32, plane: &mut [u8]) {
        let (factor, bias) = (_mm512_set1_ps(factor), _mm512_set1_epi8(-128));
        for (plane, table) in plane.as_chunks_mut::<64>().0.iter_mut().zip(table.as_chunks::<64>().0) {
            let (first, second) = (Self::words(table, 0, factor), Self::words(table, 32, factor));
            store(plane, _mm512_xor_si512(_mm512_permutex2var_epi8(first, self.low, second), bias));
        }
    }
}

/// Writes a register's 64 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
fn store(bytes: &mut [u8; 64], x: __m512i) {
    // SAFETY: the array has 64 bytes.
    unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), x) }
}

/// The largest magnitude as bits among a range of each vector's entries, a multiple of 64 long.
#[inline]
#[target_feature(enable = "avx512f")]
fn largest(tables: &[f32], per_vector: usize, range: Range<usize>) -> u32 {
    let magnitude = _mm512_set1_epi32(0x7fff_ffff);
    let mut largest = [_mm512_setzero_si512(); 4];
    for table in tables.chunks_exact(per_vector) {
        for table in table[range.clone()].as_chunks::<64>().0 {
            for (i, largest) in largest.iter_mut().enumerate() {
                let bits = _mm512_castps_si512(load_ps(table, 16 * i));
                *largest = _mm512_max_epu32(*largest, _mm512_and_si512(bits, magnitude));
            }
        }
    }
    let [a, b, c, d] = largest;
    _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_max_epu32(a, b), _mm512_max_epu32(c, d)))
}
