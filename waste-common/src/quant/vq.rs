//! Residual vector quantisation: eight consecutive weights of a row are `scale[row]` times a sum of codebook
//! entries, one per stage.
//!
//! Indices lie `[row block of 64][vector][row within the block][stage]`, the last block padded with zero indices:
//! a kernel walks 64 rows with one table of products per vector. A vector's indices are one byte per stage, or,
//! at 6 bits, four fields in three bytes.

use super::QuantError;
use super::half::f16_to_f32;

/// Weights per codebook entry.
pub const VEC_DIM: usize = 8;
/// Rows per index block.
pub const ROW_BLOCK: usize = 64;
/// Most stages a reader accepts.
pub const STAGES_MAX: usize = 8;
/// Most codebook entries: what a byte can name.
pub const ENTRIES_MAX: usize = 256;

/// Width of one index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexBits {
    /// One byte per stage.
    Eight,
    /// Four stages in three bytes (VQ4P).
    Six,
}

impl IndexBits {
    /// 8 or 6.
    pub fn bits(self) -> u32 {
        match self {
            IndexBits::Eight => 8,
            IndexBits::Six => 6,
        }
    }
}

/// The index layout of one matrix, `[rows, cols]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    rows: usize,
    cols: usize,
    stages: usize,
    entries: usize,
    bits: IndexBits,
}

impl Layout {
    /// Checks the bounds: `cols` a multiple of 8, stages 1–8, entries 1–256, 6 bits only with 4 stages of at most
    /// 64 entries, and a payload that fits in memory addresses.
    pub fn new(rows: u64, cols: u64, stages: u32, entries: u32, bits: IndexBits) -> Result<Self, QuantError> {
        let fail = |problem| QuantError::Layout { rows, cols, stages, entries, bits: bits.bits(), problem };
        if stages < 1 || stages as usize > STAGES_MAX {
            return Err(fail("stages must be 1 to 8"));
        }
        if entries < 1 || entries as usize > ENTRIES_MAX {
            return Err(fail("entries must be 1 to 256"));
        }
        if bits == IndexBits::Six && (stages != 4 || entries > 64) {
            return Err(fail("6-bit indices need 4 stages of at most 64 entries"));
        }
        if rows == 0 || cols == 0 || !cols.is_multiple_of(VEC_DIM as u64) {
            return Err(fail("rows must be at least 1 and columns a multiple of 8"));
        }
        let bytes = payload_bytes(rows, cols, stages, bits).and_then(|bytes| isize::try_from(bytes).ok());
        let weights = rows.checked_mul(cols).and_then(|weights| isize::try_from(weights).ok());
        match (bytes, weights, usize::try_from(rows), usize::try_from(cols)) {
            (Some(_), Some(_), Ok(rows), Ok(cols)) => {
                Ok(Layout { rows, cols, stages: stages as usize, entries: entries as usize, bits })
            }
            _ => Err(fail("the matrix is too large")),
        }
    }

    /// Output rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs per row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Codebooks summed for a vector.
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// Entries of each codebook.
    pub fn entries(&self) -> usize {
        self.entries
    }

    /// Width of an index.
    pub fn bits(&self) -> IndexBits {
        self.bits
    }

    /// Vectors of 8 weights in a row.
    pub fn vectors(&self) -> usize {
        self.cols / VEC_DIM
    }

    /// Blocks of 64 rows, the last one possibly padded.
    pub fn blocks(&self) -> usize {
        self.rows.div_ceil(ROW_BLOCK)
    }

    /// Bytes of the indices of one vector.
    pub fn vector_bytes(&self) -> usize {
        vector_bytes(self.stages, self.bits)
    }

    /// Bytes of all indices, padding rows included.
    pub fn payload_bytes(&self) -> usize {
        self.blocks() * ROW_BLOCK * self.vectors() * self.vector_bytes()
    }

    /// Where the indices of `vector` of `row` begin in the payload.
    pub fn offset(&self, row: usize, vector: usize) -> usize {
        let position = (row / ROW_BLOCK * self.vectors() + vector) * ROW_BLOCK + row % ROW_BLOCK;
        position * self.vector_bytes()
    }

    /// Packs indices, `[rows][vectors][stages]`, into a payload.
    ///
    /// # Panics
    /// If `indices` has another length.
    pub fn pack(&self, indices: &[u8]) -> Result<Vec<u8>, QuantError> {
        assert_eq!(indices.len(), self.rows * self.vectors() * self.stages, "indices of {self:?}");
        let mut payload = vec![0; self.payload_bytes()];
        for (at, fields) in indices.chunks_exact(self.stages).enumerate() {
            let (row, vector) = (at / self.vectors(), at % self.vectors());
            self.check_fields(row, vector, fields)?;
            let offset = self.offset(row, vector);
            let bytes = &mut payload[offset..][..self.vector_bytes()];
            match self.bits {
                IndexBits::Eight => bytes.copy_from_slice(fields),
                IndexBits::Six => {
                    bytes.copy_from_slice(&pack_six([fields[0], fields[1], fields[2], fields[3]]))
                }
            }
        }
        Ok(payload)
    }

    /// The indices of one vector; those past the last stage are 0. Not checked against `entries`.
    ///
    /// # Panics
    /// If `row` or `vector` is out of range or `payload` too short.
    #[inline]
    pub fn indices(&self, payload: &[u8], row: usize, vector: usize) -> [u8; STAGES_MAX] {
        assert!(row < self.blocks() * ROW_BLOCK && vector < self.vectors(), "row {row}, vector {vector}");
        let bytes = &payload[self.offset(row, vector)..][..self.vector_bytes()];
        let mut fields = [0; STAGES_MAX];
        match self.bits {
            IndexBits::Eight => fields[..self.stages].copy_from_slice(bytes),
            IndexBits::Six => fields[..4].copy_from_slice(&unpack_six([bytes[0], bytes[1], bytes[2]])),
        }
        fields
    }

    /// Unpacks a payload to `[rows][vectors][stages]`. Not checked against `entries`.
    ///
    /// # Panics
    /// If `payload` is too short.
    pub fn unpack(&self, payload: &[u8]) -> Vec<u8> {
        let mut indices = Vec::with_capacity(self.rows * self.vectors() * self.stages);
        for row in 0..self.rows {
            for vector in 0..self.vectors() {
                indices.extend_from_slice(&self.indices(payload, row, vector)[..self.stages]);
            }
        }
        indices
    }

    /// The first block with anything to [check](Self::check_indices).
    fn first_doubtful(&self) -> usize {
        let any_index_is_valid = self.entries == 1 << self.bits.bits();
        if any_index_is_valid { self.rows / ROW_BLOCK } else { 0 }
    }

    /// The bytes of the payload that [`check_indices`](Self::check_indices) looks at.
    pub fn doubtful(&self) -> std::ops::Range<usize> {
        self.offset(self.first_doubtful() * ROW_BLOCK, 0)..self.payload_bytes()
    }

    /// Checks that every index names an entry and that the padding rows are zero. Full blocks whose indices cannot be
    /// out of range are not even looked at.
    ///
    /// # Panics
    /// If `payload` is too short.
    pub fn check_indices(&self, payload: &[u8]) -> Result<(), QuantError> {
        for block in self.first_doubtful()..self.blocks() {
            for vector in 0..self.vectors() {
                for row in block * ROW_BLOCK..(block + 1) * ROW_BLOCK {
                    let fields = self.indices(payload, row, vector);
                    if row >= self.rows && fields != [0; STAGES_MAX] {
                        return Err(QuantError::Padding { row, vector });
                    }
                    self.check_fields(row, vector, &fields[..self.stages])?;
                }
            }
        }
        Ok(())
    }

    fn check_fields(&self, row: usize, vector: usize, fields: &[u8]) -> Result<(), QuantError> {
        match fields.iter().position(|index| usize::from(*index) >= self.entries) {
            None => Ok(()),
            Some(stage) => {
                let found = fields[stage];
                Err(QuantError::Index { row, vector, stage, found, entries: self.entries })
            }
        }
    }
}

/// Bytes of the indices of a `[rows, cols]` matrix; `None` on overflow. Columns beyond a multiple of 8 don't count.
pub fn payload_bytes(rows: u64, cols: u64, stages: u32, bits: IndexBits) -> Option<u64> {
    let rows = rows.div_ceil(ROW_BLOCK as u64).checked_mul(ROW_BLOCK as u64)?;
    let vectors = rows.checked_mul(cols / VEC_DIM as u64)?;
    vectors.checked_mul(vector_bytes(stages as usize, bits) as u64)
}

fn vector_bytes(stages: usize, bits: IndexBits) -> usize {
    match bits {
        IndexBits::Eight => stages,
        IndexBits::Six => 3,
    }
}

/// Four 6-bit fields in three bytes, LSB first.
#[inline]
pub fn pack_six(fields: [u8; 4]) -> [u8; 3] {
    let [s0, s1, s2, s3] = fields;
    [s0 | s1 << 6, s1 >> 2 | s2 << 4, s2 >> 4 | s3 << 2]
}

/// The inverse of [`pack_six`].
#[inline]
pub fn unpack_six(bytes: [u8; 3]) -> [u8; 4] {
    let [b0, b1, b2] = bytes;
    [b0 & 63, (b0 >> 6 | b1 << 2) & 63, (b1 >> 4 | b2 << 4) & 63, b2 >> 2]
}

/// One quantised matrix in memory: its layout, its indices and its f16 row scales, borrowed from a record.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    layout: Layout,
    indices: &'a [u8],
    scales: &'a [u8],
}

impl<'a> Matrix<'a> {
    /// `indices` holds [`Layout::payload_bytes`], `scales` the rows' f16 scales, little-endian.
    ///
    /// # Panics
    /// If a length disagrees with `layout`.
    pub fn new(layout: Layout, indices: &'a [u8], scales: &'a [u8]) -> Self {
        assert_eq!(indices.len(), layout.payload_bytes(), "index bytes of {layout:?}");
        assert_eq!(scales.len(), 2 * layout.rows, "scale bytes of {layout:?}");
        Matrix { layout, indices, scales }
    }

    /// The shape and index layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The packed indices.
    pub fn indices(&self) -> &'a [u8] {
        self.indices
    }

    /// The f16 scales, little-endian, one per row.
    pub fn scale_bytes(&self) -> &'a [u8] {
        self.scales
    }

    /// The scale of a row.
    pub fn scale(&self, row: usize) -> f32 {
        f16_to_f32(u16::from_le_bytes([self.scales[2 * row], self.scales[2 * row + 1]]))
    }

    /// Decodes one row into `out`, `[cols]`. This is the definition: the entries of the stages are summed in order in
    /// f32, then multiplied by the scale. `codebooks` holds one table of `entries * 8` values per stage.
    ///
    /// # Panics
    /// If `row` is out of range, or a length is not what the layout says.
    pub fn decode_row(&self, row: usize, codebooks: &[&[f32]], out: &mut [f32]) -> Result<(), QuantError> {
        let Layout { rows, cols, stages, entries, .. } = self.layout;
        assert!(
            row < rows && out.len() == cols && codebooks.len() == stages,
            "row {row} of {:?}",
            self.layout
        );
        assert!(codebooks.iter().all(|book| book.len() >= entries * VEC_DIM), "codebook length");
        let scale = self.scale(row);
        for (vector, out) in out.chunks_exact_mut(VEC_DIM).enumerate() {
            let fields = self.layout.indices(self.indices, row, vector);
            self.layout.check_fields(row, vector, &fields[..stages])?;
            let entry = |stage: usize| &codebooks[stage][usize::from(fields[stage]) * VEC_DIM..][..VEC_DIM];
            out.copy_from_slice(entry(0));
            for stage in 1..stages {
                for (sum, term) in out.iter_mut().zip(entry(stage)) {
                    *sum += term;
                }
            }
            for value in out {
                *value *= scale;
            }
        }
        Ok(())
    }

    /// Decodes the whole matrix into `out`, `[rows, cols]`; see [`Matrix::decode_row`].
    ///
    /// # Panics
    /// If a length is not what the layout says.
    pub fn decode(&self, codebooks: &[&[f32]], out: &mut [f32]) -> Result<(), QuantError> {
        assert_eq!(out.len(), self.layout.rows * self.layout.cols, "weights of {:?}", self.layout);
        for (row, out) in out.chunks_exact_mut(self.layout.cols).enumerate() {
            self.decode_row(row, codebooks, out)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn six_bit_fields_fill_all_24_bits() {
        for value in 0..1u32 << 24 {
            let [b0, b1, b2, _] = value.to_le_bytes();
            let fields = unpack_six([b0, b1, b2]);
            for (i, field) in fields.into_iter().enumerate() {
                assert_eq!(u32::from(field), value >> (6 * i) & 63);
            }
            assert_eq!(pack_six(fields), [b0, b1, b2]);
        }
    }

    fn layouts() -> impl Strategy<Value = Layout> {
        let eight =
            (1u64..200, 1u64..12, 1u32..=8, 1u32..=256).prop_map(|(rows, vectors, stages, entries)| {
                Layout::new(rows, vectors * 8, stages, entries, IndexBits::Eight).unwrap()
            });
        let six = (1u64..200, 1u64..12, 1u32..=64).prop_map(|(rows, vectors, entries)| {
            Layout::new(rows, vectors * 8, 4, entries, IndexBits::Six).unwrap()
        });
        prop_oneof![eight, six]
    }

    proptest! {
        #[test]
        fn packed_indices_unpack(layout in layouts(), seed in any::<u64>()) {
            let count = layout.rows() * layout.vectors() * layout.stages();
            let noise = super::super::golden::noise(seed, count);
            let indices: Vec<u8> = noise
                .iter()
                .map(|x| ((x.abs() * layout.entries() as f32) as usize).min(layout.entries() - 1) as u8)
                .collect();
            let payload = layout.pack(&indices).unwrap();
            prop_assert_eq!(payload.len(), layout.payload_bytes());
            prop_assert_eq!(
                payload_bytes(
                    layout.rows() as u64, layout.cols() as u64, layout.stages() as u32, layout.bits()
                ),
                Some(payload.len() as u64)
            );
            prop_assert_eq!(layout.unpack(&payload), indices);
            layout.check_indices(&payload).unwrap();
        }

        #[test]
        fn any_payload_decodes_or_names_its_bad_index(layout in layouts(), seed in any::<u64>()) {
            let noise = super::super::golden::noise(seed, layout.payload_bytes());
            let payload: Vec<u8> = noise.iter().map(|x| (x.abs() * 256.0) as u8).collect();
            let scales = vec![0x3c; 2 * layout.rows()];
            let book = vec![1.0; layout.entries() * VEC_DIM];
            let books = vec![&book[..]; layout.stages()];
            let matrix = Matrix::new(layout, &payload, &scales);
            let mut out = vec![0.0; layout.rows() * layout.cols()];
            let decoded = matrix.decode(&books, &mut out);
            let in_range = layout.unpack(&payload).iter().all(|i| usize::from(*i) < layout.entries());
            prop_assert_eq!(decoded.is_ok(), in_range);
        }
    }

    #[test]
    fn the_definition_by_hand() {
        let layout = Layout::new(65, 16, 2, 3, IndexBits::Eight).unwrap();
        let mut indices = vec![0; 65 * 2 * 2];
        indices[(64 * 2 + 1) * 2..].copy_from_slice(&[2, 1]);
        let payload = layout.pack(&indices).unwrap();
        // Second block, second vector, first row.
        assert_eq!(payload[(2 * 64 + 64) * 2..][..2], [2, 1]);
        let book: Vec<f32> = (0..24).map(|i| i as f32).collect();
        let scales: Vec<u8> = (0..65).flat_map(|_| 0x3800u16.to_le_bytes()).collect();
        let mut out = [0.0; 16];
        Matrix::new(layout, &payload, &scales).decode_row(64, &[&book, &book], &mut out).unwrap();
        let expected: Vec<f32> =
            (0..8).map(|i| i as f32).chain((0..8).map(|i| (16 + i + 8 + i) as f32 * 0.5)).collect();
        assert_eq!(out[..], expected[..]);
    }

    #[test]
    fn impossible_layouts_are_refused() {
        for (rows, cols, stages, entries, bits) in [
            (1, 12, 3, 256, IndexBits::Eight),
            (0, 8, 3, 256, IndexBits::Eight),
            (1, 8, 0, 256, IndexBits::Eight),
            (1, 8, 9, 256, IndexBits::Eight),
            (1, 8, 3, 0, IndexBits::Eight),
            (1, 8, 3, 257, IndexBits::Eight),
            (1, 8, 3, 64, IndexBits::Six),
            (1, 8, 4, 65, IndexBits::Six),
            (u64::MAX, 8, 3, 256, IndexBits::Eight),
            (1 << 40, 1 << 40, 3, 256, IndexBits::Eight),
        ] {
            assert!(
                Layout::new(rows, cols, stages, entries, bits).is_err(),
                "{rows} {cols} {stages} {entries}"
            );
        }
    }

    #[test]
    fn nonzero_padding_is_found() {
        let layout = Layout::new(63, 8, 3, 256, IndexBits::Eight).unwrap();
        let mut payload = layout.pack(&[1; 63 * 3]).unwrap();
        payload[63 * 3] = 1;
        assert_eq!(layout.check_indices(&payload), Err(QuantError::Padding { row: 63, vector: 0 }));
    }
}
