//! Vector-quantised matrices: tables of partial dot products, look-ups in them, expansion.

use waste_common::quant::half::f16_to_f32;

/// Dimensions of a VQ vector.
pub const VQ_DIM: usize = 8;
/// Rows of a block of VQ indices.
pub const VQ_BLOCK: usize = 64;
/// Vectors of the quantised tables that share one scale.
pub const FAST_VECTORS: usize = 32;

/// Blocks of rows that pass over a vector's quantised tables together.
const FAST_BLOCKS: usize = 8;
/// Largest magnitude of a quantised table entry. (8 bits for the last of three stages make the gather 22 % faster with
/// AVX-512, but put the logits 0.8 to 1.5e-4 nats from the exact ones, where 1e-4 are allowed.)
const FAST_MAX: f32 = 32767.0;
/// A block whose entries are all below this counts as zero: its scale would not be a normal number.
const FAST_TINY: f32 = 1e-30;
/// Adding it leaves the nearest whole number, ties to even, in the low bits of the sum.
pub const ROUND: f32 = 12_582_912.0;
/// Entries that go together when tables are built.
const TILE: usize = 32;

/// How a VQ matrix is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VqShape {
    /// Codebooks summed for a vector.
    pub stages: usize,
    /// Entries of a codebook.
    pub entries: usize,
    /// Indices of 6 bits, four in three bytes, instead of a byte each.
    pub packed: bool,
    /// Vectors of a row: columns / 8.
    pub vectors: usize,
}

impl VqShape {
    /// Bytes of one vector's indices.
    pub fn index_bytes(self) -> usize {
        if self.packed { 3 } else { self.stages }
    }

    /// Bytes of a block of 64 rows.
    pub fn block_bytes(self) -> usize {
        self.vectors * VQ_BLOCK * self.index_bytes()
    }

    /// Elements of one input's tables.
    pub fn table_len(self) -> usize {
        self.vectors * self.stages * self.entries
    }

    /// Elements of one kind's codebooks.
    pub fn codebook_len(self) -> usize {
        self.stages * self.entries * VQ_DIM
    }

    /// Blocks of vectors that share one scale in the quantised tables.
    pub fn fast_blocks(self) -> usize {
        self.vectors.div_ceil(FAST_VECTORS)
    }

    /// Bytes of one input's quantised tables.
    pub fn fast_len(self) -> usize {
        2 * self.table_len()
    }

    /// Elements of scratch that [`vq_tables_fast`] works in.
    pub fn fast_scratch_len(self) -> usize {
        self.vectors.min(FAST_VECTORS) * self.stages * self.entries
    }

    #[inline(always)]
    fn indices(self, bytes: &[u8]) -> [usize; 8] {
        let mut indices = [0; 8];
        if self.packed {
            let word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], 0]);
            for (s, index) in indices.iter_mut().take(4).enumerate() {
                *index = (word >> (6 * s) & 63) as usize;
            }
        } else {
            for (index, &byte) in indices.iter_mut().zip(bytes) {
                *index = usize::from(byte);
            }
        }
        indices
    }
}

/// Builds `tables[v][stage][entry] = Σ_d codebook[stage][d][entry] · x[8v + d]`.
///
/// `codebooks` is [stages, 8, entries]: transposed, so that entries are the vector lanes. A tile of entries stays in
/// registers while the vectors pass.
#[inline(always)]
pub fn vq_tables(codebooks: &[f32], shape: VqShape, x: &[f32], tables: &mut [f32]) {
    let VqShape { stages, entries, .. } = shape;
    let per_vector = stages * entries;
    let blocks = tables.chunks_mut(FAST_VECTORS * per_vector);
    for (tables, x) in blocks.zip(x.chunks(FAST_VECTORS * VQ_DIM)) {
        for (s, book) in codebooks.chunks_exact(VQ_DIM * entries).take(stages).enumerate() {
            for first in (0..entries).step_by(TILE) {
                let width = TILE.min(entries - first);
                let mut tile = [[0.0f32; TILE]; VQ_DIM];
                for (tile, book) in tile.iter_mut().zip(book.chunks_exact(entries)) {
                    tile[..width].copy_from_slice(&book[first..first + width]);
                }
                let rows = tables.chunks_exact_mut(per_vector);
                for (table, x) in rows.zip(x.chunks_exact(VQ_DIM)) {
                    let mut sum = [0.0f32; TILE];
                    for d in 0..VQ_DIM {
                        for e in 0..TILE {
                            sum[e] = tile[d][e].mul_add(x[d], sum[e]);
                        }
                    }
                    let out = &mut table[s * entries + first..][..width];
                    if width == TILE {
                        out.copy_from_slice(&sum);
                    } else {
                        out.copy_from_slice(&sum[..width]);
                    }
                }
            }
        }
    }
}

/// Row blocks by table look-up: `out[r] = scale[r] · Σ_v (Σ_s tables[v][s][index[r, v, s]])`.
///
/// `indices` are whole blocks of 64 rows, `scales` the little-endian f16 of the rows in `out`, which may end
/// inside the last block.
#[inline(always)]
pub fn vq_rows(indices: &[u8], shape: VqShape, scales: &[u8], tables: &[f32], out: &mut [f32]) {
    // One copy of the loop per layout, so that the usual ones have constant strides.
    match (shape.stages, shape.entries, shape.packed) {
        (3, 256, false) => rows_by_table(
            VqShape { stages: 3, entries: 256, packed: false, ..shape },
            indices,
            scales,
            tables,
            out,
        ),
        (2, 256, false) => rows_by_table(
            VqShape { stages: 2, entries: 256, packed: false, ..shape },
            indices,
            scales,
            tables,
            out,
        ),
        (4, 64, true) => rows_by_table(
            VqShape { stages: 4, entries: 64, packed: true, ..shape },
            indices,
            scales,
            tables,
            out,
        ),
        _ => rows_by_table(shape, indices, scales, tables, out),
    }
}

#[inline(always)]
fn rows_by_table(shape: VqShape, indices: &[u8], scales: &[u8], tables: &[f32], out: &mut [f32]) {
    let per_vector = shape.stages * shape.entries;
    let bytes = shape.index_bytes();
    let blocks = indices.chunks_exact(shape.block_bytes());
    for ((out, scales), block) in out.chunks_mut(VQ_BLOCK).zip(scales.chunks(2 * VQ_BLOCK)).zip(blocks) {
        let mut acc = [0.0f32; VQ_BLOCK];
        for (table, rows) in tables.chunks_exact(per_vector).zip(block.chunks_exact(VQ_BLOCK * bytes)) {
            for (acc, index) in acc.iter_mut().zip(rows.chunks_exact(bytes)) {
                let indices = shape.indices(index);
                let mut sum = 0.0;
                for s in 0..shape.stages {
                    sum += table[s * shape.entries + indices[s]];
                }
                *acc += sum;
            }
        }
        scale_rows(&acc, scales, out);
    }
}

/// Decodes rows `first ..` of one block of 64 to f32: `out[r, 8v..8v+8] = scale[r] · Σ_s codebook[s][index[r, v, s]]`.
///
/// `codebooks` is [stages, entries, 8]; `block` one block's indices; `scales` and `out` ([rows, 8 · vectors]) begin
/// with row `first`.
#[inline(always)]
pub fn vq_expand(
    block: &[u8],
    shape: VqShape,
    first: usize,
    scales: &[u8],
    codebooks: &[f32],
    out: &mut [f32],
) {
    let (cols, bytes) = (shape.vectors * VQ_DIM, shape.index_bytes());
    for (r, (row, scale)) in out.chunks_exact_mut(cols).zip(scales.chunks_exact(2)).enumerate() {
        let scale = f16_to_f32(u16::from_le_bytes([scale[0], scale[1]]));
        for (v, out) in row.chunks_exact_mut(VQ_DIM).enumerate() {
            let indices = shape.indices(&block[(v * VQ_BLOCK + first + r) * bytes..][..bytes]);
            let mut sum = [0.0f32; VQ_DIM];
            for s in 0..shape.stages {
                let entry = &codebooks[(s * shape.entries + indices[s]) * VQ_DIM..][..VQ_DIM];
                for d in 0..VQ_DIM {
                    sum[d] += entry[d];
                }
            }
            for d in 0..VQ_DIM {
                out[d] = scale * sum[d];
            }
        }
    }
}

/// One input's tables as whole numbers: the *fast* arithmetic.
#[derive(Clone, Copy)]
pub struct FastTables<'a> {
    /// [vectors, stages, 2, entries]: the low bytes of a stage's entries, then the high ones. The 16 bits are the
    /// entry plus 32768.
    pub planes: &'a [u8],
    /// [vectors / 32, rounded up]: what one unit is worth in each block of 32 vectors.
    pub scales: &'a [f32],
}

/// Builds the tables of [`vq_tables`] and rounds them, block by block of 32 vectors, to 16 bits:
/// `entry = round(t · 32767 / m)`, ties to even, `scale = m / 32767`, `m` the block's largest magnitude.
///
/// A block with an infinite or undefined entry gets an undefined scale, so that it shows in every row. `planes`
/// ([`VqShape::fast_len`]) and `scales` ([`VqShape::fast_blocks`]) are as in [`FastTables`]; `scratch` has
/// [`VqShape::fast_scratch_len`] elements. Blocks are independent: `shape.vectors` may be a share of the input that
/// begins at a multiple of 32.
#[inline(always)]
pub fn vq_tables_fast(
    codebooks: &[f32],
    shape: VqShape,
    x: &[f32],
    scratch: &mut [f32],
    planes: &mut [u8],
    scales: &mut [f32],
) {
    let VqShape { stages, entries, vectors, .. } = shape;
    let per_vector = stages * entries;
    assert!(codebooks.len() >= shape.codebook_len() && x.len() >= vectors * VQ_DIM);
    assert!(planes.len() == shape.fast_len() && scales.len() == shape.fast_blocks());
    let blocks = planes.chunks_mut(2 * FAST_VECTORS * per_vector).zip(scales);
    for ((planes, scale), x) in blocks.zip(x.chunks(FAST_VECTORS * VQ_DIM)) {
        let tables = &mut scratch[..planes.len() / 2];
        vq_tables(codebooks, shape, x, tables);
        // As whole numbers the magnitudes of floats keep their order, and NaN is the largest.
        let largest = tables.iter().fold(0, |m, t| m.max(t.to_bits() & 0x7fff_ffff));
        let factor;
        (*scale, factor) = fast_unit(largest);
        if scale.is_nan() {
            tables.fill(0.0);
        }
        for (planes, table) in planes.chunks_exact_mut(2 * entries).zip(tables.chunks_exact(entries)) {
            let (low, high) = planes.split_at_mut(entries);
            for ((low, high), t) in low.iter_mut().zip(high).zip(table) {
                let bits = (t * factor + ROUND).to_bits();
                *low = bits as u8;
                *high = (bits >> 8) as u8 ^ 0x80;
            }
        }
    }
}

/// The scale and its inverse of a block whose largest magnitude has these bits.
#[inline(always)]
pub fn fast_unit(largest: u32) -> (f32, f32) {
    let largest = f32::from_bits(largest);
    if !largest.is_finite() {
        (f32::NAN, 0.0)
    } else if largest < FAST_TINY {
        (0.0, 0.0)
    } else {
        (largest / FAST_MAX, FAST_MAX / largest)
    }
}

/// Row blocks by quantised table look-up: within a block of 32 vectors the entries are summed as whole numbers,
/// exactly; the blocks' sums are combined in order, `acc = fma(sum, block scale, acc)`, and the row's scale comes last.
///
/// Arguments as for [`vq_rows`].
#[inline(always)]
pub fn vq_rows_fast(indices: &[u8], shape: VqShape, scales: &[u8], tables: FastTables, out: &mut [f32]) {
    check_fast(indices, shape, scales, tables, out);
    match (shape.stages, shape.entries, shape.packed) {
        (3, 256, false) => rows_by_planes(
            VqShape { stages: 3, entries: 256, packed: false, ..shape },
            indices,
            scales,
            tables,
            out,
        ),
        (2, 256, false) => rows_by_planes(
            VqShape { stages: 2, entries: 256, packed: false, ..shape },
            indices,
            scales,
            tables,
            out,
        ),
        (4, 64, true) => rows_by_planes(
            VqShape { stages: 4, entries: 64, packed: true, ..shape },
            indices,
            scales,
            tables,
            out,
        ),
        _ => rows_by_planes(shape, indices, scales, tables, out),
    }
}

/// The lengths every version of [`vq_rows_fast`] relies on, and the largest sum: 8 stages × 32 vectors × 255 < 2¹⁶.
#[inline(always)]
pub fn check_fast(indices: &[u8], shape: VqShape, scales: &[u8], tables: FastTables, out: &[f32]) {
    assert!(
        shape.stages <= 8
            && shape.entries <= 256
            && (!shape.packed || shape.stages <= 4 && shape.entries >= 64)
    );
    assert!(indices.len() >= out.len().div_ceil(VQ_BLOCK) * shape.block_bytes());
    assert!(scales.len() >= 2 * out.len());
    assert!(tables.planes.len() == shape.fast_len() && tables.scales.len() == shape.fast_blocks());
}

#[inline(always)]
fn rows_by_planes(shape: VqShape, indices: &[u8], scales: &[u8], tables: FastTables, out: &mut [f32]) {
    let per_vector = shape.stages * shape.entries;
    let (bytes, block_bytes) = (shape.index_bytes(), shape.block_bytes());
    let groups = indices.chunks(FAST_BLOCKS * block_bytes).zip(scales.chunks(2 * FAST_BLOCKS * VQ_BLOCK));
    for (out, (indices, scales)) in out.chunks_mut(FAST_BLOCKS * VQ_BLOCK).zip(groups) {
        let blocks = out.len().div_ceil(VQ_BLOCK);
        let mut acc = [[0.0f32; VQ_BLOCK]; FAST_BLOCKS];
        let mut v = 0;
        for (planes, scale) in tables.planes.chunks(2 * FAST_VECTORS * per_vector).zip(tables.scales) {
            let mut sums = [[0i32; VQ_BLOCK]; FAST_BLOCKS];
            for planes in planes.chunks_exact(2 * per_vector) {
                // A vector's tables are joined to whole numbers for several blocks of rows at once.
                let mut table = [[0i32; 256]; 8];
                for (table, planes) in table.iter_mut().zip(planes.chunks_exact(2 * shape.entries)) {
                    let (low, high) = planes.split_at(shape.entries);
                    for ((entry, &low), &high) in table.iter_mut().zip(low).zip(high) {
                        *entry = i32::from(u16::from_le_bytes([low, high])) - 32768;
                    }
                }
                for (b, sums) in sums.iter_mut().enumerate().take(blocks) {
                    let rows = &indices[b * block_bytes + v * VQ_BLOCK * bytes..][..VQ_BLOCK * bytes];
                    for (sum, index) in sums.iter_mut().zip(rows.chunks_exact(bytes)) {
                        let indices = shape.indices(index);
                        for s in 0..shape.stages {
                            *sum += table[s][indices[s]];
                        }
                    }
                }
                v += 1;
            }
            for (acc, sums) in acc.iter_mut().zip(sums) {
                for (acc, sum) in acc.iter_mut().zip(sums) {
                    *acc = (sum as f32).mul_add(*scale, *acc);
                }
            }
        }
        scale_rows(acc.as_flattened(), scales, out);
    }
}

/// `out[r] = scale[r] · acc[r]`, the scales as little-endian f16.
#[inline(always)]
pub fn scale_rows(acc: &[f32], scales: &[u8], out: &mut [f32]) {
    for ((out, acc), scale) in out.iter_mut().zip(acc).zip(scales.chunks_exact(2)) {
        *out = f16_to_f32(u16::from_le_bytes([scale[0], scale[1]])) * acc;
    }
}
