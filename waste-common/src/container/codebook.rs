//! `codebooks.bin`: equal records of a 16-byte header and `entries * 8` f16 values; a codebook's id is its place.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::ContainerError;
use super::manifest::ExpertQuant;
use super::pread::Source;
use super::record::Kind;
use crate::quant::half::f16_bytes_to_f32;
use crate::quant::vq::VEC_DIM;

/// Bytes `WCBK`.
pub const CODEBOOK_MAGIC: u32 = 0x4b42_4357;
const HEADER_BYTES: usize = 16;
/// Always written, ignored on reading.
const FMT: u8 = 4;

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    magic: U32,
    id: U16,
    fmt: u8,
    vec_dim: u8,
    entries: U32,
    reserved: U32,
}

/// Bytes of a codebook record.
pub fn codebook_bytes(entries: u32) -> u64 {
    HEADER_BYTES as u64 + u64::from(entries) * VEC_DIM as u64 * 2
}

/// The codebooks of one layer, decoded.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerCodebooks {
    stages: usize,
    entries: usize,
    /// `[kind][stage][entries * 8]`
    values: Vec<f32>,
}

impl LayerCodebooks {
    /// Sums per vector.
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// Entries per codebook.
    pub fn entries(&self) -> usize {
        self.entries
    }

    /// The codebook of a matrix kind and stage, `[entries * 8]`.
    pub fn table(&self, kind: Kind, stage: usize) -> &[f32] {
        let len = self.entries * VEC_DIM;
        &self.values[(kind as usize * self.stages + stage) * len..][..len]
    }

    /// The codebooks of a matrix kind, stage by stage, as [`Matrix::decode`](crate::quant::vq::Matrix::decode)
    /// takes them.
    pub fn tables(&self, kind: Kind) -> Vec<&[f32]> {
        (0..self.stages).map(|stage| self.table(kind, stage)).collect()
    }
}

/// An opened `codebooks.bin` (or a layer's part of it).
#[derive(Debug)]
pub struct CodebookFile {
    source: Source,
    entries: u32,
    /// Id of the first record: not 0 in a part.
    first: u32,
}

impl CodebookFile {
    /// Takes a file whose size must be a whole number of records.
    pub fn new(source: Source, entries: u32) -> Result<Self, ContainerError> {
        Self::part(source, entries, 0)
    }

    /// As [`CodebookFile::new`], for a part whose first record has the id `first`.
    pub fn part(source: Source, entries: u32, first: u16) -> Result<Self, ContainerError> {
        let record = codebook_bytes(entries);
        if !source.bytes().is_multiple_of(record) || source.bytes() / record > 1 << 16 {
            return Err(ContainerError::Size {
                file: source.path().to_owned(),
                what: format!("a whole number of codebooks ({record} bytes each, at most 65536)"),
                expected: (source.bytes() / record).clamp(1, 1 << 16) * record,
                found: source.bytes(),
            });
        }
        Ok(CodebookFile { source, entries, first: first.into() })
    }

    /// Records in the file.
    pub fn count(&self) -> u32 {
        (self.source.bytes() / codebook_bytes(self.entries)) as u32
    }

    /// The file.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// The bytes of record `id`.
    pub fn read(&self, id: u32) -> Result<Vec<u8>, ContainerError> {
        let record = codebook_bytes(self.entries);
        let mut bytes = vec![0; record as usize];
        let at = id.checked_sub(self.first).map_or(u64::MAX, |at| u64::from(at) * record);
        self.source.read_at(at, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads and decodes the codebooks of a layer.
    pub fn read_layer(&self, base: u16, quant: &ExpertQuant) -> Result<LayerCodebooks, ContainerError> {
        let owned = quant.codebooks_per_layer();
        let end = u32::from(base) + owned;
        if end > self.first + self.count() {
            return Err(ContainerError::Size {
                file: self.source.path().to_owned(),
                what: format!("the codebooks {base} to {}", end - 1),
                expected: u64::from(end - self.first.min(end)) * codebook_bytes(self.entries),
                found: self.source.bytes(),
            });
        }
        let mut values = Vec::with_capacity((owned * self.entries) as usize * VEC_DIM);
        for id in u32::from(base)..end {
            let bytes = self.read(id)?;
            self.check(id, &bytes)?;
            let start = values.len();
            values.resize(start + self.entries as usize * VEC_DIM, 0.0);
            f16_bytes_to_f32(&bytes[HEADER_BYTES..], &mut values[start..]);
        }
        Ok(LayerCodebooks { stages: quant.stages as usize, entries: self.entries as usize, values })
    }

    /// Checks the header of a record that a layer names.
    pub fn check(&self, id: u32, bytes: &[u8]) -> Result<(), ContainerError> {
        let fail = |field, expected: String, found: String| {
            let file = self.source.path().to_owned();
            Err(ContainerError::Codebook { file, id, field, expected, found })
        };
        let record = codebook_bytes(self.entries);
        let header = match Header::ref_from_prefix(bytes) {
            Ok((header, _)) if bytes.len() as u64 == record => header,
            _ => return fail("record length", record.to_string(), bytes.len().to_string()),
        };
        if header.magic.get() != CODEBOOK_MAGIC {
            let hex = |magic: u32| format!("{magic:#010x}");
            return fail("magic", hex(CODEBOOK_MAGIC), hex(header.magic.get()));
        }
        for (field, expected, found) in [
            ("codebook_id", id, u32::from(header.id.get())),
            ("vec_dim", VEC_DIM as u32, header.vec_dim.into()),
            ("n_entries", self.entries, header.entries.get()),
            ("reserved", 0, header.reserved.get()),
        ] {
            if expected != found {
                return fail(field, expected.to_string(), found.to_string());
            }
        }
        Ok(())
    }

    /// Checks a record that no layer names: all zero, or (unless `strict`, as where our checksums are present) a
    /// codebook of its own.
    pub fn check_unnamed(&self, id: u32, bytes: &[u8], strict: bool) -> Result<(), ContainerError> {
        let Some(byte) = bytes.iter().find(|byte| **byte != 0) else { return Ok(()) };
        if strict {
            return Err(ContainerError::Codebook {
                file: self.source.path().to_owned(),
                id,
                field: "padding slot",
                expected: "zeros".to_owned(),
                found: byte.to_string(),
            });
        }
        self.check(id, bytes)
    }
}

/// Builds a codebook record from f16 bits, `[entries * 8]`.
pub fn encode_codebook(id: u16, values: &[u16]) -> Vec<u8> {
    let header = Header {
        magic: CODEBOOK_MAGIC.into(),
        id: id.into(),
        fmt: FMT,
        vec_dim: VEC_DIM as u8,
        entries: ((values.len() / VEC_DIM) as u32).into(),
        reserved: 0.into(),
    };
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    bytes
}
