//! Kernels written for AVX-512 (F, BW, VL, DQ, VBMI, VNNI).
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::portable::{self, FAST_VECTORS, FastTables, VQ_BLOCK, VQ_DIM, VqShape};
use super::x86::{PREFETCH, prefetch};

mod trunk;
mod whole;

pub(super) use trunk::{rows_f32, rows_q4, rows_q8};
pub(super) use whole::{rows_q4_fast, rows_q4_fast_many, rows_q8_fast, rows_q8_fast_many};

/// Sums of bytes, two a 16-bit lane: the lanes themselves, and their upper bytes.
#[derive(Clone, Copy)]
struct ByteSums {
    both: __m512i,
    odd: __m512i,
}

impl ByteSums {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn zero() -> Self {
        ByteSums { both: _mm512_setzero_si512(), odd: _mm512_setzero_si512() }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn add(&mut self, x: __m512i) {
        self.both = _mm512_add_epi16(self.both, x);
        self.odd = _mm512_add_epi16(self.odd, _mm512_srli_epi16::<8>(x));
    }

    /// The sums of bytes 4j, 4j + 1, 4j + 2 and 4j + 3.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn widen(self) -> [__m512i; 4] {
        let low = _mm512_set1_epi32(0xffff);
        let even = _mm512_sub_epi16(self.both, _mm512_slli_epi16::<8>(self.odd));
        [
            _mm512_and_si512(even, low),
            _mm512_and_si512(self.odd, low),
            _mm512_srli_epi32::<16>(even),
            _mm512_srli_epi32::<16>(self.odd),
        ]
    }
}

/// 64 rows of one block: the sums of both planes within a block of vectors, and the whole sums so far, row 4j + i in
/// lane j of `rows[i]`.
#[derive(Clone, Copy)]
struct BlockSums {
    low: ByteSums,
    high: ByteSums,
    rows: [__m512; 4],
}

impl BlockSums {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn zero() -> Self {
        BlockSums { low: ByteSums::zero(), high: ByteSums::zero(), rows: [_mm512_setzero_ps(); 4] }
    }

    /// Ends a block of vectors of `count` look-ups a row.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn finish(&mut self, count: usize, scale: f32) {
        let (low, high) = (self.low.widen(), self.high.widen());
        let (bias, scale) = (_mm512_set1_epi32(32768 * count as i32), _mm512_set1_ps(scale));
        for i in 0..4 {
            let sum = _mm512_add_epi32(_mm512_slli_epi32::<8>(high[i]), low[i]);
            let sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, bias));
            self.rows[i] = _mm512_fmadd_ps(sum, scale, self.rows[i]);
        }
        (self.low, self.high) = (ByteSums::zero(), ByteSums::zero());
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn store(self, scales: &[u8], out: &mut [f32]) {
        let mut acc = [0.0; VQ_BLOCK];
        for (i, rows) in self.rows.into_iter().enumerate() {
            let mut lanes = [0.0f32; 16];
            // SAFETY: the array has the register's 16 lanes.
            unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), rows) };
            for (j, lane) in lanes.into_iter().enumerate() {
                acc[4 * j + i] = lane;
            }
        }
        portable::scale_rows(&acc, scales, out);
    }
}

/// The 64 bytes at `at`.
#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8], at: usize) -> __m512i {
    let bytes: &[u8] = &bytes[at..at + 64];
    // SAFETY: the slice has 64 bytes.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// The 16 floats at `at`.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_ps(x: &[f32], at: usize) -> __m512 {
    let x: &[f32] = &x[at..at + 16];
    // SAFETY: the slice has 16 floats.
    unsafe { _mm512_loadu_ps(x.as_ptr()) }
}

/// Takes every `stride`-th byte, from byte `offset` on, of up to 192 bytes.
#[derive(Clone, Copy)]
struct Pull {
    first_two: __m512i,
    third: __m512i,
    from_third: __mmask64,
}

impl Pull {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn new(stride: usize, offset: usize) -> Self {
        let mut positions = [0u8; 64];
        let mut from_third = 0;
        for (r, position) in positions.iter_mut().enumerate() {
            *position = (r * stride + offset) as u8;
            from_third |= u64::from(*position >= 128) << r;
        }
        // `vpermi2b` looks at seven bits of a position, `vpermb` at six: both find the same register in it.
        let positions = load(&positions, 0);
        Pull { first_two: positions, third: positions, from_third }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn two(&self, from: [__m512i; 2]) -> __m512i {
        _mm512_permutex2var_epi8(from[0], self.first_two, from[1])
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn three(&self, from: [__m512i; 3]) -> __m512i {
        let two = self.two([from[0], from[1]]);
        _mm512_mask_permutexvar_epi8(two, self.from_third, self.third, from[2])
    }
}

/// Where an index is in the second, third and fourth quarter of 256 entries, or in a later one.
type Quarters = [__mmask64; 3];

/// See [`Quarters`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn quarters(index: __m512i) -> Quarters {
    let upper_half = _mm512_movepi8_mask(index);
    let odd = _mm512_movepi8_mask(_mm512_add_epi8(index, index));
    [odd, upper_half, odd & upper_half]
}

/// `table[index]` for 256 entries, each quarter over the one before: `vpermb` is one operation, `vpermi2b` three.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn look_up(table: &[__m512i; 4], index: __m512i, quarters: Quarters) -> __m512i {
    let mut found = _mm512_permutexvar_epi8(index, table[0]);
    for (table, quarter) in table[1..].iter().zip(quarters) {
        found = _mm512_mask_permutexvar_epi8(found, quarter, index, *table);
    }
    found
}

/// See [`Kernels::vq_rows_fast`](super::Kernels::vq_rows_fast).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx2,fma,f16c")]
pub(super) fn vq_rows_fast(
    indices: &[u8],
    shape: VqShape,
    scales: &[u8],
    tables: FastTables,
    out: &mut [f32],
) {
    portable::check_fast(indices, shape, scales, tables, out);
    // Tables are loaded once for several blocks of rows; what is left over goes block by block.
    macro_rules! in_groups {
        ($several:expr, $one:expr, $blocks:literal) => {{
            let (block_bytes, whole) = (shape.block_bytes(), out.len() / ($blocks * VQ_BLOCK) * $blocks);
            let mut first = 0;
            while first * VQ_BLOCK < out.len() {
                let (rows, indices) = (first * VQ_BLOCK, &indices[first * block_bytes..]);
                if first < whole {
                    let out = &mut out[rows..rows + $blocks * VQ_BLOCK];
                    $several(indices, shape, &scales[2 * rows..], tables, out);
                    first += $blocks;
                } else {
                    let end = out.len().min(rows + VQ_BLOCK);
                    $one(indices, shape, &scales[2 * rows..], tables, &mut out[rows..end]);
                    first += 1;
                }
            }
        }};
    }
    match (shape.stages, shape.entries, shape.packed) {
        (2, 256, false) => in_groups!(bytes::<2, 2>, bytes::<2, 1>, 2),
        (3, 256, false) => in_groups!(bytes::<3, 4>, bytes::<3, 1>, 4),
        (4, 64, true) => in_groups!(packed::<4>, packed::<1>, 4),
        _ => portable::vq_rows_fast(indices, shape, scales, tables, out),
    }
}

/// `B` blocks of rows with an index of one byte for each of `S` stages of 256 entries.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx2,fma,f16c")]
fn bytes<const S: usize, const B: usize>(
    indices: &[u8],
    shape: VqShape,
    scales: &[u8],
    tables: FastTables,
    out: &mut [f32],
) {
    let block_bytes = shape.block_bytes();
    let pulls: [Pull; S] = std::array::from_fn(|s| Pull::new(S, s));
    let mut sums: [BlockSums; B] = [BlockSums::zero(); B];
    let mut v = 0;
    let blocks = tables.planes.chunks(FAST_VECTORS * S * 512).zip(tables.scales);
    for (planes, &scale) in blocks {
        let vectors = planes.len() / (S * 512);
        for planes in planes.chunks_exact(S * 512) {
            let raw: [[__m512i; 3]; B] = std::array::from_fn(|b| {
                let at = b * block_bytes + v * VQ_BLOCK * S;
                for line in 0..S {
                    prefetch(indices, at + PREFETCH + 64 * line);
                }
                let third = if S == 3 { load(indices, at + 128) } else { _mm512_setzero_si512() };
                [load(indices, at), load(indices, at + 64), third]
            });
            for (pull, planes) in pulls.iter().zip(planes.chunks_exact(512)) {
                let low = [load(planes, 0), load(planes, 64), load(planes, 128), load(planes, 192)];
                let high = [load(planes, 256), load(planes, 320), load(planes, 384), load(planes, 448)];
                for (sums, raw) in sums.iter_mut().zip(raw) {
                    let index = if S == 3 { pull.three(raw) } else { pull.two([raw[0], raw[1]]) };
                    let quarters = quarters(index);
                    sums.low.add(look_up(&low, index, quarters));
                    sums.high.add(look_up(&high, index, quarters));
                }
            }
            v += 1;
        }
        for sums in &mut sums {
            sums.finish(vectors * S, scale);
        }
    }
    for (b, (sums, out)) in sums.into_iter().zip(out.chunks_mut(VQ_BLOCK)).enumerate() {
        sums.store(&scales[2 * b * VQ_BLOCK..], out);
    }
}

/// `B` blocks of rows with four indices of 6 bits in three bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx2,fma,f16c")]
fn packed<const B: usize>(
    indices: &[u8],
    shape: VqShape,
    scales: &[u8],
    tables: FastTables,
    out: &mut [f32],
) {
    let block_bytes = shape.block_bytes();
    let pulls: [Pull; 3] = std::array::from_fn(|s| Pull::new(3, s));
    let (two_bits, four_bits) = (_mm512_set1_epi8(0x03), _mm512_set1_epi8(0x0f));
    let mut sums: [BlockSums; B] = [BlockSums::zero(); B];
    let mut v = 0;
    let blocks = tables.planes.chunks(FAST_VECTORS * 512).zip(tables.scales);
    for (planes, &scale) in blocks {
        let vectors = planes.len() / 512;
        for planes in planes.chunks_exact(512) {
            for (b, sums) in sums.iter_mut().enumerate() {
                let at = b * block_bytes + v * VQ_BLOCK * 3;
                for line in 0..3 {
                    prefetch(indices, at + PREFETCH + 64 * line);
                }
                let raw = [load(indices, at), load(indices, at + 64), load(indices, at + 128)];
                let [x, y, z] = [pulls[0].three(raw), pulls[1].three(raw), pulls[2].three(raw)];
                // `vpermb` ignores the upper two bits of an index, so what is there does not matter. The constant
                // 0xca is "first ? second : third", bit by bit.
                let second = _mm512_ternarylogic_epi32::<0xca>(
                    two_bits,
                    _mm512_srli_epi16::<6>(x),
                    _mm512_slli_epi16::<2>(y),
                );
                let third = _mm512_ternarylogic_epi32::<0xca>(
                    four_bits,
                    _mm512_srli_epi16::<4>(y),
                    _mm512_slli_epi16::<4>(z),
                );
                let index = [x, second, third, _mm512_srli_epi16::<2>(z)];
                for (index, planes) in index.into_iter().zip(planes.chunks_exact(128)) {
                    sums.low.add(_mm512_permutexvar_epi8(index, load(planes, 0)));
                    sums.high.add(_mm512_permutexvar_epi8(index, load(planes, 64)));
                }
            }
            v += 1;
        }
        for sums in &mut sums {
            sums.finish(vectors * 4, scale);
        }
    }
    for (b, (sums, out)) in sums.into_iter().zip(out.chunks_mut(VQ_BLOCK)).enumerate() {
        sums.store(&scales[2 * b * VQ_BLOCK..], out);
    }
}

/// Entries of a table that go together.
const TILE: usize = 32;

/// See [`Kernels::vq_tables`](super::Kernels::vq_tables).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx2,fma,f16c")]
pub(super) fn vq_tables(codebooks: &[f32], shape: VqShape, x: &[f32], tables: &mut [f32]) {
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

/// See [`Kernels::vq_tables_fast`](super::Kernels::vq_tables_fast).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx2,fma,f16c")]
pub(super) fn vq_tables_fast(
    codebooks: &[f32],
    shape: VqShape,
    x: &[f32],
    scratch: &mut [f32],
    planes: &mut [u8],
    scales: &mut [f32],
) {
    let VqShape { stages, entries, vectors, .. } = shape;
    if entries % 64 != 0 {
        return portable::vq_tables_fast(codebooks, shape, x, scratch, planes, scales);
    }
    assert!(codebooks.len() >= shape.codebook_len() && x.len() >= vectors * VQ_DIM);
    assert!(planes.len() == shape.fast_len() && scales.len() == shape.fast_blocks());
    // Lane i of the register k of four goes to byte 16k + i; the words of two registers are interleaved before.
    let mut positions = [0u8; 64];
    for (j, position) in positions.iter_mut().enumerate() {
        *position = (j / 32 * 64 + j / 16 % 2 * 2 + j % 16 * 4) as u8;
    }
    let low = load(&positions, 0);
    let high = _mm512_add_epi8(low, _mm512_set1_epi8(1));
    let blocks = planes.chunks_mut(2 * FAST_VECTORS * stages * entries).zip(scales);
    for ((planes, scale), x) in blocks.zip(x.chunks(FAST_VECTORS * VQ_DIM)) {
        let tables = &mut scratch[..planes.len() / 2];
        vq_tables(codebooks, shape, x, tables);
        let factor;
        (*scale, factor) = portable::fast_unit(largest(tables));
        if scale.is_nan() {
            tables.fill(0.0);
        }
        let (factor, round) = (_mm512_set1_ps(factor), _mm512_set1_ps(portable::ROUND));
        let bits = |tables: &[f32], at: usize| {
            let rounded = _mm512_add_ps(_mm512_mul_ps(load_ps(tables, at), factor), round);
            _mm512_castps_si512(rounded)
        };
        let words = |tables: &[f32], at: usize| {
            let upper = _mm512_slli_epi32::<16>(bits(tables, at + 16));
            _mm512_mask_blend_epi16(0xaaaa_aaaa, bits(tables, at), upper)
        };
        for (planes, table) in planes.chunks_exact_mut(2 * entries).zip(tables.chunks_exact(entries)) {
            let (lows, highs) = planes.split_at_mut(entries);
            let rows = lows.as_chunks_mut::<64>().0.iter_mut().zip(highs.as_chunks_mut::<64>().0);
            for ((lows, highs), table) in rows.zip(table.as_chunks::<64>().0) {
                let (first, second) = (words(table, 0), words(table, 32));
                let bias = _mm512_set1_epi8(-128);
                let high = _mm512_xor_si512(_mm512_permutex2var_epi8(first, high, second), bias);
                // SAFETY: both have a register's 64 bytes.
                unsafe {
                    let low = _mm512_permutex2var_epi8(first, low, second);
                    _mm512_storeu_si512(lows.as_mut_ptr().cast(), low);
                    _mm512_storeu_si512(highs.as_mut_ptr().cast(), high);
                }
            }
        }
    }
}

/// The largest magnitude as bits; the number of elements is a multiple of 64.
#[inline]
#[target_feature(enable = "avx512f")]
fn largest(tables: &[f32]) -> u32 {
    let magnitude = _mm512_set1_epi32(0x7fff_ffff);
    let mut largest = [_mm512_setzero_si512(); 4];
    for tables in tables.as_chunks::<64>().0 {
        for (i, largest) in largest.iter_mut().enumerate() {
            let bits = _mm512_castps_si512(load_ps(tables, 16 * i));
            *largest = _mm512_max_epu32(*largest, _mm512_and_si512(bits, magnitude));
        }
    }
    let [a, b, c, d] = largest;
    _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_max_epu32(a, b), _mm512_max_epu32(c, d)))
}

/// See [`Kernels::vq_rows`](super::Kernels::vq_rows): for packed indices, whose tables fit registers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx2,fma,f16c")]
pub(super) fn vq_rows_packed(indices: &[u8], shape: VqShape, scales: &[u8], tables: &[f32], out: &mut [f32]) {
    let blocks = indices.chunks_exact(shape.block_bytes());
    // Dword r is the three bytes of row r.
    let mut positions = [0u8; 64];
    for (i, position) in positions.iter_mut().enumerate() {
        *position = (i / 4 * 3 + i % 4) as u8;
    }
    let positions = load(&positions, 0);
    for ((out, scales), block) in out.chunks_mut(VQ_BLOCK).zip(scales.chunks(2 * VQ_BLOCK)).zip(blocks) {
        let mut acc = [_mm512_setzero_ps(); 4];
        for (table, rows) in tables.as_chunks::<256>().0.iter().zip(block.as_chunks::<192>().0) {
            let words: [__m512i; 4] = std::array::from_fn(|g| {
                // SAFETY: the mask has a bit for each of 16 rows' 48 bytes.
                let rows =
                    unsafe { _mm512_maskz_loadu_epi8((1 << 48) - 1, rows.as_ptr().add(48 * g).cast()) };
                _mm512_permutexvar_epi8(positions, rows)
            });
            let mut sums = [_mm512_setzero_ps(); 4];
            for s in 0..4 {
                let entries: [__m512; 4] = std::array::from_fn(|i| load_ps(table, 64 * s + 16 * i));
                let (field, top) = (_mm512_set1_epi32(6 * s as i32), _mm512_set1_epi32(26 - 6 * s as i32));
                for g in 0..4 {
                    // `vpermi2ps` looks at the lower five bits; the sixth, moved to the sign, chooses.
                    let index = _mm512_srlv_epi32(words[g], field);
                    let upper = _mm512_movepi32_mask(_mm512_sllv_epi32(words[g], top));
                    let low = _mm512_permutex2var_ps(entries[0], index, entries[1]);
                    let high = _mm512_permutex2var_ps(entries[2], index, entries[3]);
                    sums[g] = _mm512_add_ps(sums[g], _mm512_mask_blend_ps(upper, low, high));
                }
            }
            for g in 0..4 {
                acc[g] = _mm512_add_ps(acc[g], sums[g]);
            }
        }
        let mut rows = [0.0; VQ_BLOCK];
        for (rows, acc) in rows.as_chunks_mut::<16>().0.iter_mut().zip(acc) {
            // SAFETY: the chunk has the register's 16 lanes.
            unsafe { _mm512_storeu_ps(rows.as_mut_ptr(), acc) };
        }
        portable::scale_rows(&rows, scales, out);
    }
}
