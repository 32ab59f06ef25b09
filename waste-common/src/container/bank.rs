//! `experts-L{n}.bin`: the records of one layer.

use std::path::Path;

use super::ContainerError;
use super::manifest::Bank;
use super::pread::Source;
use super::record::{Expected, Geometry, HEADER_BYTES, RecordView};

/// The bank's usual name.
pub fn bank_name(layer: u32) -> String {
    format!("experts-L{layer}.bin")
}

/// An opened bank.
#[derive(Debug)]
pub struct BankFile<'a> {
    source: Source,
    layer: u16,
    experts: u32,
    codebook_base: u16,
    codebook_count: u32,
    geometry: &'a Geometry,
}

impl<'a> BankFile<'a> {
    /// Opens a layer's bank and compares its size with what manifest and geometry say.
    pub fn open(
        dir: &Path,
        layer: u16,
        bank: &Bank,
        codebook_count: u32,
        geometry: &'a Geometry,
    ) -> Result<Self, ContainerError> {
        let source = Source::open(dir, &bank.file)?;
        let expected = u64::from(bank.experts) * geometry.record_bytes() as u64;
        for (what, expected) in [
            (format!("its entry layers.{layer} in the manifest"), bank.bytes),
            (format!("{} records of {} bytes", bank.experts, geometry.record_bytes()), expected),
        ] {
            if source.bytes() != expected {
                let file = source.path().to_owned();
                return Err(ContainerError::Size { file, what, expected, found: source.bytes() });
            }
        }
        let (experts, codebook_base) = (bank.experts, bank.codebook_base);
        Ok(BankFile { source, layer, experts, codebook_base, codebook_count, geometry })
    }

    /// Records in it.
    pub fn experts(&self) -> u32 {
        self.experts
    }

    /// The file.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Where a record begins.
    pub fn offset(&self, expert: u16) -> u64 {
        u64::from(expert) * self.geometry.record_bytes() as u64
    }

    /// What the record of `expert` must be.
    pub fn expected(&self, expert: u16) -> Expected<'_> {
        Expected {
            file: self.source.path(),
            layer: self.layer,
            expert,
            codebook_base: self.codebook_base,
            codebook_count: self.codebook_count,
            geometry: self.geometry,
        }
    }

    /// Reads the record of `expert` into `buffer`, `[record_bytes]`, and checks its header.
    pub fn read<'b>(&'b self, expert: u16, buffer: &'b mut [u8]) -> Result<RecordView<'b>, ContainerError> {
        self.source.read_at(self.offset(expert), buffer)?;
        RecordView::check(buffer, &self.expected(expert))
    }

    /// Reads the header bytes of a record, unchecked.
    pub fn read_header(&self, expert: u16) -> Result<[u8; HEADER_BYTES], ContainerError> {
        let mut header = [0; HEADER_BYTES];
        self.source.read_at(self.offset(expert), &mut header)?;
        Ok(header)
    }
}
