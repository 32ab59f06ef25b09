//! Kernels written for AVX2 and FMA.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::portable::{self, FAST_VECTORS, FastTables, VQ_BLOCK, VqShape};

/// Blocks of rows that pass over a vector's tables together.
const BLOCKS: usize = 4;
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

/// Takes every `S`-th byte of `16 · S` bytes in each half of the registers.
struct Pull<const S: usize> {
    positions: [[__m256i; S]; S],
}

impl<const S: usize> Pull<S> {
    #[inline]
    #[target_feature(enable = "avx2")]
    fn new() -> Self {
        let positions = std::array::from_fn(|stage| {
            std::array::from_fn(|register| {
                let mut positions = [0x80u8; 32];
                for (lane, position) in positions.iter_mut().enumerate() {
                    let byte = lane % 16 * S + stage;
                    if byte / 16 == register {
                        *position = (byte % 16) as u8;
                    }
                }
                load(&positions, 0)
            })
        });
        Pull { positions }
    }

    /// The `S` bytes of each of 32 rows.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn rows(&self, bytes: &[u8]) -> [__m256i; S] {
        let raw: [__m256i; S] = std::array::from_fn(|i| {
            _mm256_set_m128i(load_half(bytes, 16 * (S + i)), load_half(bytes, 16 * i))
        });
        std::array::from_fn(|stage| {
            let mut all = _mm256_setzero_si256();
            for (raw, positions) in raw.into_iter().zip(self.positions[stage]) {
                all = _mm256_or_si256(all, _mm256_shuffle_epi8(raw, positions));
            }
            all
        })
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

/// A plane of a table for [`look_up`]: its first 16 entries, then each 16 xor the 16 before, anew at every 128.
#[inline]
#[target_feature(enable = "avx2")]
fn chain(plane: &[u8], chain: &mut [u8]) {
    for (chain, plane) in chain.chunks_mut(128).zip(plane.chunks(128)) {
        chain[..16].copy_from_slice(&plane[..16]);
        for i in 16..plane.len() {
            chain[i] = plane[i] ^ plane[i - 16];
        }
    }
}

/// `table[index]` in two planes of up to 128 entries, given as [`chain`]s. Indices are below 128.
///
/// `pshufb` finds an entry among 16 by an index's low bits, and gives 0 where the top bit is set: where less than
/// the place of the 16 has been reached. The entry is the xor of all it finds.
#[inline]
#[target_feature(enable = "avx2")]
fn look_up<const TABLES: usize>(low: &[u8], high: &[u8], index: [__m256i; 2]) -> [[__m256i; 2]; 2] {
    let mut index = index;
    let mut found = [[_mm256_setzero_si256(); 2]; 2];
    let (low, high) = (&low[..16 * TABLES], &high[..16 * TABLES]);
    for t in 0..TABLES {
        let low = _mm256_broadcastsi128_si256(load_half(low, 16 * t));
        let high = _mm256_broadcastsi128_si256(load_half(high, 16 * t));
        for half in 0..2 {
            if t > 0 {
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
    macro_rules! groups {
        ($kernel:expr) => {{
            let groups = indices.chunks(BLOCKS * shape.block_bytes());
            let groups = groups.zip(scales.chunks(2 * BLOCKS * VQ_BLOCK));
            for (out, (indices, scales)) in out.chunks_mut(BLOCKS * VQ_BLOCK).zip(groups) {
                $kernel(indices, shape, scales, tables, out);
            }
        }};
    }
    match (shape.stages, shape.entries, shape.packed) {
        (2, 256, false) => groups!(bytes::<2>),
        (3, 256, false) => groups!(bytes::<3>),
        (4, 64, true) => groups!(packed),
        _ => portable::vq_rows_fast(indices, shape, scales, tables, out),
    }
}

/// Up to [`BLOCKS`] blocks of rows with an index of one byte for each of `S` stages of 256 entries.
#[target_feature(enable = "avx2,fma,f16c")]
fn bytes<const S: usize>(indices: &[u8], shape: VqShape, scales: &[u8], tables: FastTables, out: &mut [f32]) {
    let (pull, low_bits) = (Pull::<S>::new(), _mm256_set1_epi8(0x7f));
    let mut sums = [[RowSums::zero(); 2]; BLOCKS];
    let sums = &mut sums[..out.len().div_ceil(VQ_BLOCK)];
    let mut chains = [[[0u8; 256]; 2]; S];
    let mut v = 0;
    for (planes, &scale) in tables.planes.chunks(FAST_VECTORS * S * 512).zip(tables.scales) {
        let vectors = planes.len() / (S * 512);
        for planes in planes.chunks_exact(S * 512) {
            for (chains, planes) in chains.iter_mut().zip(planes.chunks_exact(512)) {
                chain(&planes[..256], &mut chains[0]);
                chain(&planes[256..], &mut chains[1]);
            }
            for (b, sums) in sums.iter_mut().enumerate() {
                let rows = &indices[b * shape.block_bytes() + v * VQ_BLOCK * S..][..VQ_BLOCK * S];
                let index = [pull.rows(&rows[..ROWS * S]), pull.rows(&rows[ROWS * S..])];
                for (s, [low, high]) in chains.iter().enumerate() {
                    let index = [index[0][s], index[1][s]];
                    let within = [_mm256_and_si256(index[0], low_bits), _mm256_and_si256(index[1], low_bits)];
                    let lower = look_up::<8>(&low[..128], &high[..128], within);
                    let upper = look_up::<8>(&low[128..], &high[128..], within);
                    for half in 0..2 {
                        let pick = |p: usize| _mm256_blendv_epi8(lower[half][p], upper[half][p], index[half]);
                        sums[half].low.add(pick(0));
                        sums[half].high.add(pick(1));
                    }
                }
            }
            v += 1;
        }
        for sums in sums.as_flattened_mut() {
            sums.finish(vectors * S, scale);
        }
    }
    let rows = out.chunks_mut(ROWS).zip(scales.chunks(2 * ROWS));
    for (sums, (out, scales)) in sums.as_flattened().iter().zip(rows) {
        sums.store(scales, out);
    }
}

/// Up to [`BLOCKS`] blocks of rows with four indices of 6 bits in three bytes.
#[target_feature(enable = "avx2,fma,f16c")]
fn packed(indices: &[u8], shape: VqShape, scales: &[u8], tables: FastTables, out: &mut [f32]) {
    let pull = Pull::<3>::new();
    let (six_bits, two_bits, four_bits) =
        (_mm256_set1_epi8(0x3f), _mm256_set1_epi8(0x03), _mm256_set1_epi8(0x0f));
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
                let rows = &indices[b * shape.block_bytes() + v * VQ_BLOCK * 3..][..VQ_BLOCK * 3];
                let index: [[__m256i; 4]; 2] = std::array::from_fn(|half| {
                    let [x, y, z] = pull.rows(&rows[half * ROWS * 3..][..ROWS * 3]);
                    let pick = |mask, a, b| {
                        let both = _mm256_or_si256(_mm256_and_si256(a, mask), _mm256_andnot_si256(mask, b));
                        _mm256_and_si256(both, six_bits)
                    };
                    [
                        _mm256_and_si256(x, six_bits),
                        pick(two_bits, _mm256_srli_epi16::<6>(x), _mm256_slli_epi16::<2>(y)),
                        pick(four_bits, _mm256_srli_epi16::<4>(y), _mm256_slli_epi16::<4>(z)),
                        _mm256_and_si256(_mm256_srli_epi16::<2>(z), six_bits),
                    ]
                });
                for (s, [low, high]) in chains.iter().enumerate() {
                    let found = look_up::<4>(low, high, [index[0][s], index[1][s]]);
                    for (sums, found) in sums.iter_mut().zip(found) {
                        sums.low.add(found[0]);
                        sums.high.add(found[1]);
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
