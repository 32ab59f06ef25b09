//! `trunk.bin`: finding and decoding tensors.

use std::collections::HashMap;
use std::path::Path;

use zerocopy::IntoBytes;

use super::ContainerError;
use super::manifest::{TrunkEntry, TrunkSizes};
use super::pread::Source;

/// An opened trunk with its index.
#[derive(Debug)]
pub struct Trunk {
    source: Source,
    entries: Vec<TrunkEntry>,
    by_name: HashMap<String, usize>,
}

/// Stored bytes of some rows while they are decoded; kept by who decodes rows often.
#[derive(Debug, Default)]
pub struct RowBuffer {
    payload: Vec<u8>,
    scales: Vec<u16>,
}

impl Trunk {
    /// Takes checked entries; each must lie within the file.
    pub fn new(source: Source, entries: Vec<TrunkEntry>) -> Result<Self, ContainerError> {
        let mut by_name = HashMap::with_capacity(entries.len());
        for (i, entry) in entries.iter().enumerate() {
            let end = entry.off.checked_add(entry.bytes);
            if end.is_none_or(|end| end > source.bytes()) {
                return Err(ContainerError::Size {
                    file: source.path().to_owned(),
                    what: format!("tensor {}", entry.name),
                    expected: end.unwrap_or(u64::MAX),
                    found: source.bytes(),
                });
            }
            by_name.insert(entry.name.clone(), i);
        }
        Ok(Trunk { source, entries, by_name })
    }

    /// All tensors, in manifest order.
    pub fn entries(&self) -> &[TrunkEntry] {
        &self.entries
    }

    /// The file.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// The tensor of this name, if there is one.
    pub fn get(&self, name: &str) -> Option<&TrunkEntry> {
        self.by_name.get(name).map(|i| &self.entries[*i])
    }

    /// The tensor of this name.
    pub fn require(&self, name: &str) -> Result<&TrunkEntry, ContainerError> {
        self.get(name).ok_or_else(|| fail(self.source.path(), name, "the model needs it, but it is missing"))
    }

    /// The sizes of a tensor.
    pub fn sizes(&self, entry: &TrunkEntry) -> Result<TrunkSizes, ContainerError> {
        entry.sizes().map_err(|problem| fail(self.source.path(), &entry.name, &problem))
    }

    /// Fills `out` from the tensor's weight bytes, from byte `start` of them.
    pub fn read_payload(&self, entry: &TrunkEntry, start: u64, out: &mut [u8]) -> Result<(), ContainerError> {
        let sizes = self.sizes(entry)?;
        if start.checked_add(out.len() as u64).is_none_or(|end| end > sizes.payload_bytes) {
            let problem = format!("{} bytes at {start} exceed its {}", out.len(), sizes.payload_bytes);
            return Err(fail(self.source.path(), &entry.name, &problem));
        }
        self.source.read_at(entry.off + start, out)
    }

    /// Reads `count` scales from scale number `start`, over what `out` held.
    pub fn read_scales(
        &self,
        entry: &TrunkEntry,
        start: u64,
        count: u64,
        out: &mut Vec<u16>,
    ) -> Result<(), ContainerError> {
        let sizes = self.sizes(entry)?;
        if start.checked_add(count).is_none_or(|end| end > sizes.scales) {
            let problem = format!("{count} scales at {start} exceed its {}", sizes.scales);
            return Err(fail(self.source.path(), &entry.name, &problem));
        }
        out.resize(count as usize, 0);
        if count > 0 {
            self.source.read_at(entry.off + sizes.payload_bytes + 2 * start, out.as_mut_bytes())?;
            out.iter_mut().for_each(|scale| *scale = u16::from_le(*scale));
        }
        Ok(())
    }

    /// Decodes a whole tensor, `[rows, cols]`, some megabytes at a time.
    pub fn decode(&self, entry: &TrunkEntry) -> Result<Vec<f32>, ContainerError> {
        let sizes = self.sizes(entry)?;
        if sizes.bytes > self.source.bytes() {
            return Err(fail(self.source.path(), &entry.name, "it is larger than the file"));
        }
        let mut out = vec![0.0; (sizes.rows * sizes.cols) as usize];
        let rows_at_once = (4u64 << 20).div_ceil(sizes.row_bytes);
        let piece = rows_at_once.min(sizes.rows) * sizes.cols;
        let mut buffer = RowBuffer::default();
        for (i, out) in out.chunks_mut(piece as usize).enumerate() {
            let rows = out.len() as u64 / sizes.cols;
            self.decode_rows(entry, i as u64 * rows_at_once, rows, out, &mut buffer)?;
        }
        Ok(out)
    }

    /// Decodes `rows` rows from row `row` into `out`, `[rows, cols]`; `buffer` holds their stored bytes meanwhile.
    ///
    /// # Panics
    /// If `out` has another length.
    pub fn decode_rows(
        &self,
        entry: &TrunkEntry,
        row: u64,
        rows: u64,
        out: &mut [f32],
        buffer: &mut RowBuffer,
    ) -> Result<(), ContainerError> {
        let sizes = self.sizes(entry)?;
        if row.checked_add(rows).is_none_or(|end| end > sizes.rows) {
            let problem = format!("row {row} was asked for, it has {}", sizes.rows);
            return Err(fail(self.source.path(), &entry.name, &problem));
        }
        assert_eq!(out.len() as u64, rows * sizes.cols, "weights of {rows} rows of {}", entry.name);
        if sizes.bytes > self.source.bytes() {
            return Err(fail(self.source.path(), &entry.name, "it is larger than the file"));
        }
        let RowBuffer { payload, scales } = buffer;
        payload.resize((rows * sizes.row_bytes) as usize, 0);
        self.read_payload(entry, row * sizes.row_bytes, payload)?;
        let groups = (sizes.scales / sizes.rows) as usize;
        self.read_scales(entry, row * groups as u64, rows * groups as u64, scales)?;
        let row_bytes = sizes.row_bytes as usize;
        for (i, out) in out.chunks_exact_mut(sizes.cols as usize).enumerate() {
            let scales = &scales[i * groups..][..groups];
            entry.fmt.decode_row(&payload[i * row_bytes..][..row_bytes], scales, out);
        }
        Ok(())
    }
}

fn fail(file: &Path, tensor: &str, problem: &str) -> ContainerError {
    ContainerError::Tensor { file: file.to_owned(), tensor: tensor.to_owned(), problem: problem.to_owned() }
}
