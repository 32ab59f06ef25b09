//! Vector-quantised matrices: tables of partial dot products, look-ups in them, expansion.

use std::ops::Range;

use waste_common::quant::half::f16_to_f32;

/// Dimensions of a VQ vector.
pub const VQ_DIM: usize = 8;
/// Rows of a block of VQ indices.
pub const VQ_BLOCK: usize = 64;
/// Vectors of the quantised tables that share one scale.
pub const FAST_VECTORS: usize = 32;

/// Blocks of rows that pass over a vector's quantised tables together.
const FAST_BLOCKS: usize = 8;
/// Largest magnitude of a quantised table entry of 16 bits.
pub const WIDE_MAX: f32 = 32767.0;
/// Largest magnitude of a quantised table entry of 8 bits.
pub const NARROW_MAX: f32 = 127.0;
/// The most narrow stages: of eight stages.
const MAX_NARROW: usize = 2;
/// Bits of a word for the sum of the wide stages: 6 stages × 32 vectors × 65535 < 2²⁵.
const WIDE_BITS: usize = 25;
/// Bits of it for the sum of each narrow stage: 32 vectors × 255 < 2¹³.
const NARROW_BITS: usize = 13;
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

    /// Blocks of vectors that share their units in the quantised tables.
    pub fn fast_blocks(self) -> usize {
        self.vectors.div_ceil(FAST_VECTORS)
    }

    /// Stages whose quantised entries have 8 bits, a third of them: the last ones, whose entries are small. The others
    /// have 16. (Half of them would have been 5 % faster, but twice as far from the exact logits.)
    pub const fn narrow(self) -> usize {
        self.stages / 3
    }

    /// Stages whose quantised entries have 16 bits.
    pub const fn wide(self) -> usize {
        self.stages - self.narrow()
    }

    /// Bytes of one vector's quantised tables: two planes of bytes a wide stage, one a narrow stage.
    pub const fn vector_planes(self) -> usize {
        (2 * self.wide() + self.narrow()) * self.entries
    }

    /// Units of a block of vectors: one for the wide stages, one for each narrow stage.
    pub const fn block_units(self) -> usize {
        1 + self.narrow()
    }

    /// Bytes of one input's quantised tables.
    pub fn fast_len(self) -> usize {
        self.vectors * self.vector_planes()
    }

    /// Units of one input's quantised tables.
    pub fn fast_units(self) -> usize {
        self.fast_blocks() * self.block_units()
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
    /// [vectors, planes, entries]. A wide stage has two planes, the low bytes of its entries plus 32768 and the high
    /// ones; a narrow stage has one, the entries plus 128.
    pub planes: &'a [u8],
    /// [vectors / 32, rounded up; 1 + narrow stages]: what one is worth in each block of 32 vectors, of the wide
    /// stages and of each narrow one.
    pub units: &'a [f32],
}

/// Builds the tables of [`vq_tables`] and rounds them, block by block of 32 vectors: `entry = round(t · M / m)`, ties
/// to even, `unit = m / M`. The wide stages go together with M = 32767, a narrow stage goes alone with M = 127; `m`
/// is their largest magnitude in the block.
///
/// A block with an infinite or undefined entry gets undefined units, so that it shows in every row. `planes`
/// ([`VqShape::fast_len`]) and `units` ([`VqShape::fast_units`]) are as in [`FastTables`]; `scratch` has
/// [`VqShape::fast_scratch_len`] elements. Blocks are independent: `shape.vectors` may be a share of the input that
/// begins at a multiple of 32.
#[inline(always)]
pub fn vq_tables_fast(
    codebooks: &[f32],
    shape: VqShape,
    x: &[f32],
    scratch: &mut [f32],
    planes: &mut [u8],
    units: &mut [f32],
) {
    check_tables_fast(codebooks, shape, x, planes, units);
    let (per_vector, wide) = (shape.stages * shape.entries, shape.wide() * shape.entries);
    let blocks = planes.chunks_mut(FAST_VECTORS * shape.vector_planes());
    let blocks = blocks.zip(units.chunks_exact_mut(shape.block_units()));
    for ((planes, units), x) in blocks.zip(x.chunks(FAST_VECTORS * VQ_DIM)) {
        let tables = &mut scratch[..x.len() / VQ_DIM * per_vector];
        vq_tables(codebooks, shape, x, tables);
        let factors = fast_units(shape, units, |range| {
            // As whole numbers the magnitudes of floats keep their order, and NaN is the largest.
            let rows = tables.chunks_exact(per_vector).flat_map(|table| &table[range.clone()]);
            rows.fold(0, |m, t| m.max(t.to_bits() & 0x7fff_ffff))
        });
        if units[0].is_nan() {
            tables.fill(0.0);
        }
        let vectors = planes.chunks_exact_mut(shape.vector_planes());
        for (planes, table) in vectors.zip(tables.chunks_exact(per_vector)) {
            let (wide_planes, narrow_planes) = planes.split_at_mut(2 * wide);
            let (wide, narrow) = table.split_at(wide);
            let stages =
                wide_planes.chunks_exact_mut(2 * shape.entries).zip(wide.chunks_exact(shape.entries));
            for (planes, table) in stages {
                let (low, high) = planes.split_at_mut(shape.entries);
                for ((low, high), t) in low.iter_mut().zip(high).zip(table) {
                    let bits = (t * factors[0] + ROUND).to_bits();
                    *low = bits as u8;
                    *high = (bits >> 8) as u8 ^ 0x80;
                }
            }
            let stages =
                narrow_planes.chunks_exact_mut(shape.entries).zip(narrow.chunks_exact(shape.entries));
            for ((plane, table), factor) in stages.zip(&factors[1..]) {
                for (entry, t) in plane.iter_mut().zip(table) {
                    *entry = (t * factor + ROUND).to_bits() as u8 ^ 0x80;
                }
            }
        }
    }
}

/// The lengths every version of [`vq_tables_fast`] relies on.
#[inline(always)]
pub fn check_tables_fast(codebooks: &[f32], shape: VqShape, x: &[f32], planes: &[u8], units: &[f32]) {
    assert!(codebooks.len() >= shape.codebook_len() && x.len() == shape.vectors * VQ_DIM);
    assert!(planes.len() == shape.fast_len() && units.len() == shape.fast_units());
}

/// Sets the units of a block and returns what its entries are multiplied by before they are rounded.
///
/// `largest` finds the largest magnitude, as bits, among a range of every vector's entries.
#[inline(always)]
pub fn fast_units(
    shape: VqShape,
    units: &mut [f32],
    largest: impl Fn(Range<usize>) -> u32,
) -> [f32; 1 + MAX_NARROW] {
    let wide = shape.wide();
    let mut factors = [0.0; 1 + MAX_NARROW];
    (units[0], factors[0]) = fast_unit(largest(0..wide * shape.entries), WIDE_MAX);
    for (n, unit) in units[1..].iter_mut().enumerate() {
        let stage = wide + n;
        let largest = largest(stage * shape.entries..(stage + 1) * shape.entries);
        (*unit, factors[1 + n]) = fast_unit(largest, NARROW_MAX);
    }
    if units.iter().any(|unit| unit.is_nan()) {
        units.fill(f32::NAN);
    }
    factors
}

/// The unit and its inverse for numbers up to `max` whose largest magnitude has these bits.
#[inline(always)]
fn fast_unit(largest: u32, max: f32) -> (f32, f32) {
    let largest = f32::from_bits(largest);
    if !largest.is_finite() {
        (f32::NAN, 0.0)
    } else if largest < FAST_TINY {
        (0.0, 0.0)
    } else {
        (largest / max, max / largest)
    }
}

/// Row blocks by quantised table look-up: within a block of 32 vectors the entries that share a unit are summed as
/// whole numbers, exactly; the sums are combined in order, first the wide stages', then each narrow stage's,
/// `acc = fma(sum, unit, acc)`, and the row's scale comes last.
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
    assert!(tables.planes.len() == shape.fast_len() && tables.units.len() == shape.fast_units());
}

#[inline(always)]
fn rows_by_planes(shape: VqShape, indices: &[u8], scales: &[u8], tables: FastTables, out: &mut [f32]) {
    let (bytes, block_bytes, wide) = (shape.index_bytes(), shape.block_bytes(), shape.wide());
    let groups = indices.chunks(FAST_BLOCKS * block_bytes).zip(scales.chunks(2 * FAST_BLOCKS * VQ_BLOCK));
    // A word has a field for the sum of the wide stages and one for each narrow stage's.
    let mut table = [[0u64; 256]; 8];
    for (out, (indices, scales)) in out.chunks_mut(FAST_BLOCKS * VQ_BLOCK).zip(groups) {
        let blocks = out.len().div_ceil(VQ_BLOCK);
        let mut acc = [[0.0f32; VQ_BLOCK]; FAST_BLOCKS];
        let mut first = 0;
        let vectors = tables.planes.chunks(FAST_VECTORS * shape.vector_planes());
        for (planes, units) in vectors.zip(tables.units.chunks_exact(shape.block_units())) {
            let mut sums = [[0u64; VQ_BLOCK]; FAST_BLOCKS];
            let count = planes.len() / shape.vector_planes();
            for (v, planes) in planes.chunks_exact(shape.vector_planes()).enumerate() {
                // A vector's tables are joined to words for several blocks of rows at once.
                let (wide_planes, narrow_planes) = planes.split_at(2 * wide * shape.entries);
                let (wide_table, narrow_table) = table.split_at_mut(wide);
                for (table, planes) in wide_table.iter_mut().zip(wide_planes.chunks_exact(2 * shape.entries))
                {
                    let (low, high) = planes.split_at(shape.entries);
                    for ((entry, &low), &high) in table.iter_mut().zip(low).zip(high) {
                        *entry = u64::from(u16::from_le_bytes([low, high]));
                    }
                }
                let stages = narrow_table.iter_mut().zip(narrow_planes.chunks_exact(shape.entries));
                for (n, (table, plane)) in stages.enumerate() {
                    for (entry, &byte) in table.iter_mut().zip(plane) {
                        *entry = u64::from(byte) << (WIDE_BITS + n * NARROW_BITS);
                    }
                }
                for (b, sums) in sums.iter_mut().enumerate().take(blocks) {
                    let rows = b * block_bytes + (first + v) * VQ_BLOCK * bytes;
                    let rows = &indices[rows..][..VQ_BLOCK * bytes];
                    for (sum, index) in sums.iter_mut().zip(rows.chunks_exact(bytes)) {
                        let indices = shape.indices(index);
                        for s in 0..shape.stages {
                            *sum += table[s][indices[s]];
                        }
                    }
                }
            }
            first += count;
            let field = |sum: u64, place: usize, bits: usize, bias: usize| {
                ((sum >> place & ((1 << bits) - 1)) as i32 - bias as i32) as f32
            };
            for (acc, sum) in acc.as_flattened_mut().iter_mut().zip(sums.as_flattened()) {
                *acc = field(*sum, 0, WIDE_BITS, 32768 * wide * count).mul_add(units[0], *acc);
                for (n, unit) in units[1..].iter().enumerate() {
                    let sum = field(*sum, WIDE_BITS + n * NARROW_BITS, NARROW_BITS, 128 * count);
                    *acc = sum.mul_add(*unit, *acc);
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
