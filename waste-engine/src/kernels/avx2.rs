//! Kernels written for AVX2 and FMA.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::portable::{self, FAST_VECTORS, FastTables, GROUP, VQ_BLOCK, VQ_DIM, VqShape, WholeGroup};
use super::x86::{PREFETCH, prefetch};

/// Blocks of rows that pass over a vector's tables together.
const BLOCKS: usize = 8;
/// Rows that go together.
const ROWS: usize = 32;

/// The 32 bytes at `at`.
#[inline]
#[target_feature(enable = "avx2")]
fn load(bytes: &[u8], at: usize) -> __m256i {
    let bytes: &[u8] = &bytes[at..at + 32];
    // SAFETY: the slice has 32 bytes.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// The 16 bytes at `at`.
#[inline]
#[target_feature(enable = "avx2")]
fn load_half(bytes: &[u8], at: usize) -> __m128i {
    let bytes: &[u8] = &bytes[at..at + 16];
    // SAFETY: the slice has 16 bytes.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

/// Takes every third byte of 48 bytes in each half of the registers.
struct Pull {
    positions: [[__m256i; 3]; 3],
}

impl Pull {
    #[inline]
    #[target_feature(enable = "avx2")]
    fn new() -> Self {
        let positions = std::array::from_fn(|first| {
            std::array::from_fn(|register| {
                let mut positions = [0x80u8; 32];
                for (lane, position) in positions.iter_mut().enumerate() {
                    let byte = lane % 16 * 3 + first;
                    if byte / 16 == register {
                        *position = (byte % 16) as u8;
                    }
                }
                load(&positions, 0)
            })
        });
        Pull { positions }
    }

    /// The four 6-bit fields of the three bytes of each of 32 rows.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn fields(&self, bytes: &[u8]) -> [__m256i; 4] {
        let raw: [__m256i; 3] = std::array::from_fn(|i| {
            _mm256_set_m128i(load_half(bytes, 48 + 16 * i), load_half(bytes, 16 * i))
        });
        let [x, y, z] = self.positions.map(|positions| {
            let [a, b, c] = [0, 1, 2].map(|i| _mm256_shuffle_epi8(raw[i], positions[i]));
            _mm256_or_si256(_mm256_or_si256(a, b), c)
        });
        let (two_bits, four_bits) = (_mm256_set1_epi8(0x03), _mm256_set1_epi8(0x0f));
        let second = select(two_bits, _mm256_srli_epi16::<6>(x), _mm256_slli_epi16::<2>(y));
        let third = select(four_bits, _mm256_srli_epi16::<4>(y), _mm256_slli_epi16::<4>(z));
        let six_bits = _mm256_set1_epi8(0x3f);
        [x, second, third, _mm256_srli_epi16::<2>(z)].map(|field| _mm256_and_si256(field, six_bits))
    }
}

/// Sums of bytes, two a 16-bit lane: the lanes themselves, and their upper bytes.
#[derive(Clone, Copy)]
struct ByteSums {
    both: __m256i,
    odd: __m256i,
}

impl ByteSums {
    #[inline]
    #[target_feature(enable = "avx2")]
    fn add(&mut self, x: __m256i) {
        self.both = _mm256_add_epi16(self.both, x);
        self.odd = _mm256_add_epi16(self.odd, _mm256_srli_epi16::<8>(x));
    }

    /// The sums of bytes 4j, 4j + 1, 4j + 2 and 4j + 3.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn widen(self) -> [__m256i; 4] {
        let low = _mm256_set1_epi32(0xffff);
        let even = _mm256_sub_epi16(self.both, _mm256_slli_epi16::<8>(self.odd));
        [
            _mm256_and_si256(even, low),
            _mm256_and_si256(self.odd, low),
            _mm256_srli_epi32::<16>(even),
            _mm256_srli_epi32::<16>(self.odd),
        ]
    }
}

/// 32 rows: the sums of both planes within a block of vectors, and the whole sums so far, row 4j + i in lane j of
/// `rows[i]`.
#[derive(Clone, Copy)]
struct RowSums {
    low: ByteSums,
    high: ByteSums,
    rows: [__m256; 4],
}

impl RowSums {
    #[inline]
    #[target_feature(enable = "avx2")]
    fn zero() -> Self {
        let zero = ByteSums { both: _mm256_setzero_si256(), odd: _mm256_setzero_si256() };
        RowSums { low: zero, high: zero, rows: [_mm256_setzero_ps(); 4] }
    }

    /// Ends a block of vectors of `count` look-ups a row.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn finish(&mut self, count: usize, scale: f32) {
        let (low, high) = (self.low.widen(), self.high.widen());
        let (bias, scale) = (_mm256_set1_epi32(32768 * count as i32), _mm256_set1_ps(scale));
        for i in 0..4 {
            let sum = _mm256_add_epi32(_mm256_slli_epi32::<8>(high[i]), low[i]);
            let sum = _mm256_cvtepi32_ps(_mm256_sub_epi32(sum, bias));
            self.rows[i] = _mm256_fmadd_ps(sum, scale, self.rows[i]);
        }
        *self = RowSums { rows: self.rows, ..RowSums::zero() };
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn store(self, scales: &[u8], out: &mut [f32]) {
        let mut acc = [0.0; ROWS];
        for (i, rows) in self.rows.into_iter().enumerate() {
            let mut lanes = [0.0f32; 8];
            // SAFETY: the array has the register's 8 lanes.
            unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), rows) };
            for (j, lane) in lanes.into_iter().enumerate() {
                acc[4 * j + i] = lane;
            }
        }
        portable::scale_rows(&acc, scales, out);
    }
}

/// The bits of `a` where the mask has ones, those of `b` elsewhere.
#[inline]
#[target_feature(enable = "avx2")]
fn select(mask: __m256i, a: __m256i, b: __m256i) -> __m256i {
    _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b))
}

/// A plane of a table for [`look_up`]: its first 16 entries, then each 16 xor the 16 before.
#[inline]
#[target_feature(enable = "avx2")]
fn chain(plane: &[u8], chain: &mut [u8]) {
    let mut before = _mm_setzero_si128();
    for (i, chain) in chain.chunks_exact_mut(16).enumerate() {
        let entries = load_half(plane, 16 * i);
        let link = _mm_xor_si128(entries, before);
        // SAFETY: the chunk has 16 bytes.
        unsafe { _mm_storeu_si128(chain.as_mut_ptr().cast(), link) };
        before = entries;
    }
}

/// `low[index]` and `high[index]` for two tables of 64 entries, given as [`chain`]s, and 2 × 32 indices below 64.
///
/// `pshufb` finds an entry among 16 by an index's low bits, and gives 0 where the top bit is set: where less than
/// the place of the 16 has been reached. The entry is the xor of all it finds.
#[inline]
#[target_feature(enable = "avx2")]
fn look_up(low: &[u8; 64], high: &[u8; 64], index: [__m256i; 2]) -> [[__m256i; 2]; 2] {
    let mut index = index;
    let mut found = [[_mm256_setzero_si256(); 2]; 2];
    for link in 0..4 {
        let low = _mm256_broadcastsi128_si256(load_half(low, 16 * link));
        let high = _mm256_broadcastsi128_si256(load_half(high, 16 * link));
        for half in 0..2 {
            if link > 0 {
                index[half] = _mm256_sub_epi8(index[half], _mm256_set1_epi8(16));
            }
            found[half][0] = _mm256_xor_si256(found[half][0], _mm256_shuffle_epi8(low, index[half]));
            found[half][1] = _mm256_xor_si256(found[half][1], _mm256_shuffle_epi8(high, index[half]));
        }
    }
    found
}

/// See [`Kernels::vq_rows_fast`](super::Kernels::vq_rows_fast).
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn vq_rows_fast(
    indices: &[u8],
    shape: VqShape,
    scales: &[u8],
    tables: FastTables,
    out: &mut [f32],
) {
    portable::check_fast(indices, shape, scales, tables, out);
    // For 256 entries 16 permutes a plane are slower than the loads of the portable loop.
    if (shape.stages, shape.entries, shape.packed) != (4, 64, true) {
        return portable::vq_rows_fast(indices, shape, scales, tables, out);
    }
    let groups = indices.chunks(BLOCKS * shape.block_bytes()).zip(scales.chunks(2 * BLOCKS * VQ_BLOCK));
    for (out, (indices, scales)) in out.chunks_mut(BLOCKS * VQ_BLOCK).zip(groups) {
        packed(indices, shape, scales, tables, out);
    }
}

/// Up to [`BLOCKS`] blocks of rows with four indices of 6 bits in three bytes.
#[target_feature(enable = "avx2,fma,f16c")]
fn packed(indices: &[u8], shape: VqShape, scales: &[u8], tables: FastTables, out: &mut [f32]) {
    let pull = Pull::new();
    let mut sums = [[RowSums::zero(); 2]; BLOCKS];
    let sums = &mut sums[..out.len().div_ceil(VQ_BLOCK)];
    let mut chains = [[[0u8; 64]; 2]; 4];
    let mut v = 0;
    for (planes, &scale) in tables.planes.chunks(FAST_VECTORS * 512).zip(tables.scales) {
        let vectors = planes.len() / 512;
        for planes in planes.chunks_exact(512) {
            for (chains, planes) in chains.iter_mut().zip(planes.chunks_exact(128)) {
                chain(&planes[..64], &mut chains[0]);
                chain(&planes[64..], &mut chains[1]);
            }
            for (b, sums) in sums.iter_mut().enumerate() {
                let at = b * shape.block_bytes() + v * VQ_BLOCK * 3;
                for line in 0..3 {
                    prefetch(indices, at + PREFETCH + 64 * line);
                }
                let rows = &indices[at..at + VQ_BLOCK * 3];
                let (first, second) = rows.split_at(ROWS * 3);
                let index = [pull.fields(first), pull.fields(second)];
                for (s, [low, high]) in chains.iter().enumerate() {
                    let found = look_up(low, high, [index[0][s], index[1][s]]);
                    for half in 0..2 {
                        sums[half].low.add(found[half][0]);
                        sums[half].high.add(found[half][1]);
                    }
                }
            }
            v += 1;
        }
        for sums in sums.as_flattened_mut() {
            sums.finish(vectors * 4, scale);
        }
    }
    let rows = out.chunks_mut(ROWS).zip(scales.chunks(2 * ROWS));
    for (sums, (out, scales)) in sums.as_flattened().iter().zip(rows) {
        sums.store(scales, out);
    }
}

/// The sum of 16 lanes by halving: the tree of every reduction.
#[inline]
#[target_feature(enable = "avx2")]
fn reduce(lanes: [__m256; 2]) -> f32 {
    let eight = _mm256_add_ps(lanes[0], lanes[1]);
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}

/// The value of an f16 in all lanes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn widen_half(bits: u16) -> __m256 {
    _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
}

/// The lanes' sums of whole numbers, bytes, times `x`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn dot_bytes(bytes: &[u8; GROUP], x: &[f32; GROUP]) -> [__m256; 2] {
    let mut sums = [_mm256_setzero_ps(); 2];
    for (bytes, x) in bytes.as_chunks::<16>().0.iter().zip(x.as_chunks::<16>().0) {
        for (half, sum) in sums.iter_mut().enumerate() {
            // SAFETY: half a chunk is 8 bytes and 8 floats.
            let (bytes, x) = unsafe {
                (
                    _mm_loadl_epi64(bytes.as_ptr().add(8 * half).cast()),
                    _mm256_loadu_ps(x.as_ptr().add(8 * half)),
                )
            };
            let w = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
            *sum = _mm256_fmadd_ps(w, x, *sum);
        }
    }
    sums
}

/// 64 bytes of nibbles as 128 whole numbers.
#[inline]
#[target_feature(enable = "avx2")]
fn unpack_nibbles(nibbles: &[u8], bytes: &mut [u8; GROUP]) {
    let (low_bits, bias) = (_mm256_set1_epi8(15), _mm256_set1_epi8(8));
    for (half, bytes) in bytes.as_chunks_mut::<64>().0.iter_mut().enumerate() {
        let packed = load(nibbles, 32 * half);
        let even = _mm256_and_si256(packed, low_bits);
        let odd = _mm256_and_si256(_mm256_srli_epi16::<4>(packed), low_bits);
        let first = _mm256_sub_epi8(_mm256_unpacklo_epi8(even, odd), bias);
        let second = _mm256_sub_epi8(_mm256_unpackhi_epi8(even, odd), bias);
        // The halves of both hold, in turn, the nibbles of 8 bytes.
        let quarters = [
            _mm256_castsi256_si128(first),
            _mm256_castsi256_si128(second),
            _mm256_extracti128_si256::<1>(first),
            _mm256_extracti128_si256::<1>(second),
        ];
        for (bytes, quarter) in bytes.as_chunks_mut::<16>().0.iter_mut().zip(quarters) {
            // SAFETY: the chunk has 16 bytes.
            unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), quarter) };
        }
    }
}

/// Rows quantised in groups of 128: `group` gives the lanes' sums of a whole group, `last` those of a shorter one.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn rows_grouped(
    group_bytes: usize,
    payload: &[u8],
    scales: &[u16],
    x: &[f32],
    out: &mut [f32],
    group: impl Fn(&[u8], &[f32; GROUP]) -> [__m256; 2],
    last: impl Fn(&[u8], &[f32]) -> [f32; 16],
) {
    let groups = x.len().div_ceil(GROUP);
    let stride = groups * group_bytes;
    assert!(payload.len() >= out.len() * stride && scales.len() >= out.len() * groups);
    let (whole, rest) = x.as_chunks::<GROUP>();
    let rows = payload.chunks_exact(stride).zip(scales.chunks_exact(groups));
    for (out, (row, scales)) in out.iter_mut().zip(rows) {
        let mut total = [_mm256_setzero_ps(); 2];
        let mut add = |scale: u16, sums: [__m256; 2]| {
            let scale = widen_half(scale);
            for (total, sum) in total.iter_mut().zip(sums) {
                *total = _mm256_fmadd_ps(scale, sum, *total);
            }
        };
        for ((bytes, x), &scale) in row.chunks_exact(group_bytes).zip(whole).zip(scales) {
            for line in (0..group_bytes).step_by(64) {
                prefetch(bytes, PREFETCH + line);
            }
            add(scale, group(bytes, x));
        }
        if !rest.is_empty() {
            let lanes = last(&row[whole.len() * group_bytes..], rest);
            // SAFETY: the array has two registers' 16 lanes.
            let sums = unsafe { [_mm256_loadu_ps(lanes.as_ptr()), _mm256_loadu_ps(lanes.as_ptr().add(8))] };
            add(scales[whole.len()], sums);
        }
        *out = reduce(total);
    }
}

/// See [`Kernels::rows_q4`](super::Kernels::rows_q4).
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn rows_q4(payload: &[u8], scales: &[u16], x: &[f32], out: &mut [f32]) {
    let group = |nibbles: &[u8], x: &[f32; GROUP]| {
        let mut bytes = [0; GROUP];
        unpack_nibbles(nibbles, &mut bytes);
        dot_bytes(&bytes, x)
    };
    rows_grouped(GROUP / 2, payload, scales, x, out, group, portable::last_q4);
}

/// The sums of eight elements each of half a group: 32 bytes of nibbles, byte `at` on.
#[inline]
#[target_feature(enable = "avx2")]
fn half_group(bytes: &[u8], whole: &WholeGroup, at: usize) -> __m256i {
    let signed = |x: &[i8; GROUP / 2]| {
        let x: &[i8] = &x[at..at + 32];
        // SAFETY: the slice has 32 bytes.
        unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
    };
    let lanes: &[i32] = &whole.bias[at / 4..at / 4 + 8];
    // SAFETY: the slice has the register's 8 lanes.
    let bias = unsafe { _mm256_loadu_si256(lanes.as_ptr().cast()) };
    let (nibble, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
    let bytes = load(bytes, at);
    let even = _mm256_and_si256(bytes, nibble);
    let odd = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), nibble);
    // Four products of at most 15 · 128 fit 16 bits.
    let sum = |evens: &[i8; GROUP / 2], odds: &[i8; GROUP / 2]| {
        let pairs = _mm256_add_epi16(
            _mm256_maddubs_epi16(even, signed(evens)),
            _mm256_maddubs_epi16(odd, signed(odds)),
        );
        _mm256_madd_epi16(pairs, ones)
    };
    let high = sum(&whole.even_high, &whole.odd_high);
    let low = sum(&whole.even_low, &whole.odd_low);
    _mm256_add_epi32(_mm256_slli_epi32::<8>(high), _mm256_add_epi32(low, bias))
}

/// See [`Kernels::rows_q4_fast`](super::Kernels::rows_q4_fast).
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn rows_q4_fast(payload: &[u8], scales: &[u16], whole: &[f32], out: &mut [f32]) {
    let (wholes, units) = portable::whole_parts(whole);
    let stride = wholes.len() * GROUP / 2;
    assert!(payload.len() >= out.len() * stride && scales.len() >= out.len() * wholes.len());
    let rows = payload.chunks_exact(stride).zip(scales.chunks_exact(wholes.len()));
    for (out, (row, scales)) in out.iter_mut().zip(rows) {
        let mut total = [_mm256_setzero_ps(); 2];
        let groups = row.chunks_exact(GROUP / 2).zip(wholes).zip(units.iter().zip(scales));
        for ((bytes, whole), (&unit, &scale)) in groups {
            prefetch(bytes, PREFETCH);
            let factor = _mm256_mul_ps(widen_half(scale), _mm256_set1_ps(unit));
            for (half, total) in total.iter_mut().enumerate() {
                let sum = _mm256_cvtepi32_ps(half_group(bytes, whole, 32 * half));
                *total = _mm256_fmadd_ps(sum, factor, *total);
            }
        }
        *out = reduce(total);
    }
}

/// See [`Kernels::rows_q8_fast`](super::Kernels::rows_q8_fast).
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn rows_q8_fast(payload: &[u8], scales: &[u16], words: &[f32], out: &mut [f32]) {
    let (words, units) = portable::words_parts(words);
    let stride = words.len() * GROUP;
    assert!(payload.len() >= out.len() * stride && scales.len() >= out.len() * words.len());
    let rows = payload.chunks_exact(stride).zip(scales.chunks_exact(words.len()));
    for (out, (row, scales)) in out.iter_mut().zip(rows) {
        let mut total = [_mm256_setzero_ps(); 2];
        let groups = row.chunks_exact(GROUP).zip(words).zip(units.iter().zip(scales));
        for ((bytes, words), (&unit, &scale)) in groups {
            prefetch(bytes, PREFETCH);
            prefetch(bytes, PREFETCH + 64);
            let factor = _mm256_mul_ps(widen_half(scale), _mm256_set1_ps(unit));
            let mut sums = [_mm256_setzero_si256(); 2];
            for (i, words) in words.as_chunks::<16>().0.iter().enumerate() {
                let weights = _mm256_cvtepi8_epi16(load_half(bytes, 16 * i));
                // SAFETY: the chunk has the register's 16 words.
                let words = unsafe { _mm256_loadu_si256(words.as_ptr().cast()) };
                sums[i % 2] = _mm256_add_epi32(sums[i % 2], _mm256_madd_epi16(weights, words));
            }
            for (total, sum) in total.iter_mut().zip(sums) {
                *total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), factor, *total);
            }
        }
        *out = reduce(total);
    }
}

/// See [`Kernels::rows_q8`](super::Kernels::rows_q8).
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn rows_q8(payload: &[u8], scales: &[u16], x: &[f32], out: &mut [f32]) {
    let group = |bytes: &[u8], x: &[f32; GROUP]| dot_bytes(&bytes.as_chunks::<GROUP>().0[0], x);
    rows_grouped(GROUP, payload, scales, x, out, group, portable::last_q8);
}

/// See [`Kernels::vq_expand`](super::Kernels::vq_expand).
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn vq_expand(
    block: &[u8],
    shape: VqShape,
    first: usize,
    scales: &[u8],
    codebooks: &[f32],
    out: &mut [f32],
) {
    match (shape.stages, shape.entries, shape.packed) {
        (2, 256, false) => expand::<2>(block, shape, first, scales, codebooks, out),
        (3, 256, false) => expand::<3>(block, shape, first, scales, codebooks, out),
        (4, 64, true) => expand::<4>(block, shape, first, scales, codebooks, out),
        _ => portable::vq_expand(block, shape, first, scales, codebooks, out),
    }
}

/// [`vq_expand`] for `S` stages of 256 entries, or four of 64, packed.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn expand<const S: usize>(
    block: &[u8],
    shape: VqShape,
    first: usize,
    scales: &[u8],
    codebooks: &[f32],
    out: &mut [f32],
) {
    let (bytes, entries) = if S == 4 { (3, 64) } else { (S, 256) };
    let row_len = shape.vectors * VQ_DIM;
    assert!(codebooks.len() >= S * entries * VQ_DIM && scales.len() >= out.len() / row_len * 2);
    assert!(block.len() >= shape.block_bytes() && first + out.len() / row_len <= VQ_BLOCK);
    for (r, (row, scale)) in out.chunks_exact_mut(row_len).zip(scales.as_chunks::<2>().0).enumerate() {
        let scale = widen_half(u16::from_le_bytes(*scale));
        for (v, out) in row.as_chunks_mut::<VQ_DIM>().0.iter_mut().enumerate() {
            let i = &block[(v * VQ_BLOCK + first + r) * bytes..][..bytes];
            let mut sum = _mm256_setzero_ps();
            for s in 0..S {
                let index = match S {
                    4 => u32::from_le_bytes([i[0], i[1], i[2], 0]) as usize >> (6 * s) & 63,
                    _ => usize::from(i[s]),
                };
                // SAFETY: an index names one of `entries` entries, and the codebooks have as many for each stage.
                let entry = unsafe { codebooks.as_ptr().add((s * entries + index) * VQ_DIM) };
                // SAFETY: as above; an entry is 8 floats.
                sum = _mm256_add_ps(sum, unsafe { _mm256_loadu_ps(entry) });
            }
            // SAFETY: the chunk has the register's 8 lanes.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), _mm256_mul_ps(scale, sum)) };
        }
    }
}
