//! Expert records: a 48-byte header, packed indices of three matrices, f16 scales, zeros up to the next 4 KiB.
//!
//! Where everything lies follows from the manifest; a header is compared with that, never believed.

use std::fmt::Display;
use std::path::Path;

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::ContainerError;
use super::manifest::{ExpertFmt, ExpertQuant};
use crate::quant::QuantError;
use crate::quant::vq::{IndexBits, Layout, Matrix};

/// Bytes `WEXP`.
pub const RECORD_MAGIC: u32 = 0x5058_4557;
/// Bytes of a record header.
pub const HEADER_BYTES: usize = 48;
/// Records start at, and are, multiples of this many bytes.
pub const RECORD_ALIGN: u64 = 4096;

pub use crate::tensors::ExpertKind as Kind;

/// The header as it lies in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Header {
    pub magic: U32,
    pub layer: U16,
    pub expert_id: U16,
    pub fmt: u8,
    pub flags: u8,
    pub codebook_id: U16,
    pub lowrank_id: U16,
    pub reserved: U16,
    pub rec_4k_blocks: U32,
    pub gate_off: U32,
    pub up_off: U32,
    pub down_off: U32,
    pub chan_corr_off: U32,
    pub crc32: U32,
    pub reserved_end: [U32; 2],
}

/// Where everything lies in a record of a given expert shape and quantisation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    fmt: ExpertFmt,
    layouts: [Layout; 3],
    /// Offsets of gate, up and down indices, then of the scales.
    offsets: [u32; 4],
    end: u32,
    record_bytes: u32,
}

impl Geometry {
    /// The record of an expert with gate and up `[inter, input]` and down `[input, inter]`. Both must be multiples
    /// of 8; the record must stay below 4 GiB.
    pub fn new(quant: &ExpertQuant, inter: u64, input: u64) -> Result<Self, QuantError> {
        let layout = |rows, cols| Layout::new(rows, cols, quant.stages, quant.entries, quant.bits());
        let wide = layout(inter, input)?;
        let layouts = [wide, wide, layout(input, inter)?];
        let too_large = || QuantError::Layout {
            rows: inter,
            cols: input,
            stages: quant.stages,
            entries: quant.entries,
            bits: quant.bits().bits(),
            problem: "an expert record must stay below 4 GiB",
        };
        let mut position = HEADER_BYTES as u64;
        let mut offsets = [0; 4];
        for (offset, layout) in offsets.iter_mut().zip(&layouts) {
            *offset = u32::try_from(position).map_err(|_| too_large())?;
            position += layout.payload_bytes() as u64;
        }
        offsets[3] = u32::try_from(position).map_err(|_| too_large())?;
        let scales: u64 = layouts.iter().map(|layout| 2 * layout.rows() as u64).sum();
        let end = position + scales;
        let record_bytes = u32::try_from(end.next_multiple_of(RECORD_ALIGN)).map_err(|_| too_large())?;
        Ok(Geometry { fmt: quant.fmt, layouts, offsets, end: end as u32, record_bytes })
    }

    /// The expert format.
    pub fn fmt(&self) -> ExpertFmt {
        self.fmt
    }

    /// Shape and index layout of a matrix.
    pub fn layout(&self, kind: Kind) -> &Layout {
        &self.layouts[kind as usize]
    }

    /// Where the indices of a matrix begin.
    pub fn offset(&self, kind: Kind) -> usize {
        self.offsets[kind as usize] as usize
    }

    /// Where the scales begin: gate rows, up rows, down rows.
    pub fn scales_offset(&self) -> usize {
        self.offsets[3] as usize
    }

    /// Where the scales end and the padding begins.
    pub fn payload_end(&self) -> usize {
        self.end as usize
    }

    /// The bank's stride, a multiple of 4096.
    pub fn record_bytes(&self) -> usize {
        self.record_bytes as usize
    }

    /// The packed indices of a matrix, as a range of the record.
    pub fn indices(&self, kind: Kind) -> std::ops::Range<usize> {
        let start = self.offset(kind);
        start..start + self.layout(kind).payload_bytes()
    }

    /// The scales of a matrix, as a range of the record.
    pub fn scales(&self, kind: Kind) -> std::ops::Range<usize> {
        let before: usize = self.layouts[..kind as usize].iter().map(Layout::rows).sum();
        let start = self.scales_offset() + 2 * before;
        start..start + 2 * self.layout(kind).rows()
    }

    fn header(&self, layer: u16, expert: u16, codebook_base: u16, crc32: u32) -> Header {
        let [gate_off, up_off, down_off, chan_corr_off] = self.offsets.map(U32::new);
        Header {
            magic: RECORD_MAGIC.into(),
            layer: layer.into(),
            expert_id: expert.into(),
            fmt: self.fmt.code(),
            flags: 0,
            codebook_id: codebook_base.into(),
            lowrank_id: 0.into(),
            reserved: 0.into(),
            rec_4k_blocks: (self.record_bytes / RECORD_ALIGN as u32).into(),
            gate_off,
            up_off,
            down_off,
            chan_corr_off,
            crc32: crc32.into(),
            reserved_end: [0.into(); 2],
        }
    }
}

/// What a record that is about to be used must be.
#[derive(Debug, Clone, Copy)]
pub struct Expected<'a> {
    /// The bank, for messages.
    pub file: &'a Path,
    /// The layer asked for.
    pub layer: u16,
    /// The expert asked for.
    pub expert: u16,
    /// The layer's first codebook.
    pub codebook_base: u16,
    /// Codebooks there are.
    pub codebook_count: u32,
    /// The record's layout.
    pub geometry: &'a Geometry,
}

impl Expected<'_> {
    fn fail(&self, field: &'static str, expected: impl Display, found: impl Display) -> ContainerError {
        ContainerError::Record {
            file: self.file.to_owned(),
            layer: self.layer.into(),
            expert: self.expert.into(),
            field,
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }
}

/// A record whose header has been checked.
#[derive(Debug, Clone, Copy)]
pub struct RecordView<'a> {
    bytes: &'a [u8],
    header: &'a Header,
    geometry: &'a Geometry,
}

impl<'a> RecordView<'a> {
    /// Checks all that must hold on every read; costs nothing beside the read. The payload's checksum is
    /// [`RecordView::verify_crc`].
    ///
    /// # Errors
    /// Names file, layer, expert and field.
    pub fn check(bytes: &'a [u8], expected: &Expected<'a>) -> Result<Self, ContainerError> {
        let geometry = expected.geometry;
        if bytes.len() != geometry.record_bytes() {
            return Err(expected.fail("record length", geometry.record_bytes(), bytes.len()));
        }
        let header = Self::check_header(bytes, expected)?;
        Ok(RecordView { bytes, header, geometry })
    }

    /// As [`RecordView::check`], for the first 48 bytes (or more) of a record.
    pub fn check_header(bytes: &'a [u8], expected: &Expected<'a>) -> Result<&'a Header, ContainerError> {
        let geometry = expected.geometry;
        let Ok((header, _)) = Header::ref_from_prefix(bytes) else {
            return Err(expected.fail("record length", HEADER_BYTES, bytes.len()));
        };
        let fail = |field, wanted: u32, found: u32| Err(expected.fail(field, wanted, found));
        if header.magic.get() != RECORD_MAGIC {
            let (wanted, found) = (RECORD_MAGIC, header.magic.get());
            return Err(expected.fail(
                "magic",
                format_args!("{wanted:#010x}"),
                format_args!("{found:#010x}"),
            ));
        }
        let fmt_fits = match geometry.layouts[0].bits() {
            // Published VQ2R banks say 4.
            IndexBits::Eight => matches!(header.fmt, 4 | 5),
            IndexBits::Six => header.fmt == 8,
        };
        if !fmt_fits {
            return fail("fmt", geometry.fmt.code().into(), header.fmt.into());
        }
        let wanted = geometry.header(expected.layer, expected.expert, expected.codebook_base, 0);
        for (field, wanted, found) in [
            ("layer", u32::from(wanted.layer.get()), u32::from(header.layer.get())),
            ("expert_id", wanted.expert_id.get().into(), header.expert_id.get().into()),
            ("codebook_id", wanted.codebook_id.get().into(), header.codebook_id.get().into()),
            ("lowrank_id", 0, header.lowrank_id.get().into()),
            ("reserved (offset 14)", 0, header.reserved.get().into()),
            ("rec_4k_blocks", wanted.rec_4k_blocks.get(), header.rec_4k_blocks.get()),
            ("gate_off", wanted.gate_off.get(), header.gate_off.get()),
            ("up_off", wanted.up_off.get(), header.up_off.get()),
            ("down_off", wanted.down_off.get(), header.down_off.get()),
            ("chan_corr_off", wanted.chan_corr_off.get(), header.chan_corr_off.get()),
            ("reserved (offset 40)", 0, header.reserved_end[0].get()),
            ("reserved (offset 44)", 0, header.reserved_end[1].get()),
        ] {
            if wanted != found {
                return fail(field, wanted, found);
            }
        }
        let owned = 3 * geometry.layouts[0].stages() as u32;
        if u32::from(expected.codebook_base) + owned > expected.codebook_count {
            let wanted =
                format_args!("at most {}", expected.codebook_count.saturating_sub(owned)).to_string();
            return Err(expected.fail("codebook_id", wanted, expected.codebook_base));
        }
        Ok(header)
    }

    /// A record whose header is not believed and not checked, for a verifier that goes on after a bad one; `None`
    /// if the length is not the bank's stride.
    pub fn unchecked(bytes: &'a [u8], geometry: &'a Geometry) -> Option<Self> {
        let (header, _) = Header::ref_from_prefix(bytes).ok()?;
        (bytes.len() == geometry.record_bytes()).then_some(RecordView { bytes, header, geometry })
    }

    /// Compares the payload's CRC-32 with the header's.
    pub fn verify_crc(&self, expected: &Expected) -> Result<(), ContainerError> {
        self.compare_crc(expected, crc32fast::hash(&self.bytes[HEADER_BYTES..self.geometry.payload_end()]))
    }

    /// The same for who has computed the checksum already: of the bytes behind the header, up to the padding.
    ///
    /// # Errors
    /// It is not what the header says.
    pub fn compare_crc(&self, expected: &Expected, found: u32) -> Result<(), ContainerError> {
        if found != self.header.crc32.get() {
            return Err(expected.fail("crc32", self.header.crc32.get(), found));
        }
        Ok(())
    }

    /// Checks that the bytes behind the scales are zero.
    pub fn verify_padding(&self, expected: &Expected) -> Result<(), ContainerError> {
        match self.bytes[self.geometry.payload_end()..].iter().find(|byte| **byte != 0) {
            Some(byte) => Err(expected.fail("padding", 0, byte)),
            None => Ok(()),
        }
    }

    /// Checks that every index names a codebook entry and that the padding rows of the index blocks are zero.
    pub fn verify_indices(&self, expected: &Expected) -> Result<(), ContainerError> {
        for kind in Kind::ALL {
            let checked = self.geometry.layout(kind).check_indices(self.indices(kind));
            checked.map_err(|source| ContainerError::Quant {
                what: format!(
                    "{}, layer {}, expert {}, {}",
                    expected.file.display(),
                    expected.layer,
                    expected.expert,
                    kind.name()
                ),
                source,
            })?;
        }
        Ok(())
    }

    /// The header.
    pub fn header(&self) -> &'a Header {
        self.header
    }

    /// The whole record.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The packed indices of a matrix.
    pub fn indices(&self, kind: Kind) -> &'a [u8] {
        &self.bytes[self.geometry.indices(kind)]
    }

    /// The f16 row scales of a matrix, little-endian.
    pub fn scale_bytes(&self, kind: Kind) -> &'a [u8] {
        &self.bytes[self.geometry.scales(kind)]
    }

    /// One matrix, ready to be decoded.
    pub fn matrix(&self, kind: Kind) -> Matrix<'a> {
        Matrix::new(*self.geometry.layout(kind), self.indices(kind), self.scale_bytes(kind))
    }
}

/// One encoded matrix: packed indices and f16 row scales.
#[derive(Debug, Clone, Copy)]
pub struct MatrixData<'a> {
    /// [`Layout::payload_bytes`] bytes.
    pub indices: &'a [u8],
    /// f16 bits, one per row.
    pub scales: &'a [u16],
}

/// Builds the record of an expert from its gate, up and down matrices.
///
/// # Panics
/// If a length disagrees with the geometry.
pub fn encode_record(
    layer: u16,
    expert: u16,
    codebook_base: u16,
    geometry: &Geometry,
    matrices: [MatrixData; 3],
) -> Vec<u8> {
    let mut record = vec![0; geometry.record_bytes()];
    for (kind, data) in Kind::ALL.into_iter().zip(matrices) {
        let layout = geometry.layout(kind);
        assert_eq!(data.indices.len(), layout.payload_bytes(), "{} index bytes", kind.name());
        assert_eq!(data.scales.len(), layout.rows(), "{} scales", kind.name());
        record[geometry.offset(kind)..][..data.indices.len()].copy_from_slice(data.indices);
        for (bytes, scale) in record[geometry.scales(kind)].chunks_exact_mut(2).zip(data.scales) {
            bytes.copy_from_slice(&scale.to_le_bytes());
        }
    }
    let crc32 = crc32fast::hash(&record[HEADER_BYTES..geometry.payload_end()]);
    let header = geometry.header(layer, expert, codebook_base, crc32);
    record[..HEADER_BYTES].copy_from_slice(header.as_bytes());
    record
}
