//! Making a container.
//!
//! A layer is the unit of work: its bank ([`BankWriter`]) and its part of the codebooks ([`write_codebook_part`]) are
//! durable by themselves, in any order and from several processes. The trunk is written once ([`TrunkWriter`]).
//! [`ContainerWriter::commit`] merges the codebooks, computes the checksums from what is on disk, and writes the
//! manifest last. Until then there is no container, or still the old one.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::bank::{BankFile, bank_name};
use super::codebook::{CodebookFile, codebook_bytes, encode_codebook};
use super::manifest::{
    Bank, CODEBOOKS, ExpertQuant, MANIFEST, MANIFEST_SHA256, Manifest, TRUNK, TrunkEntry, TrunkFmt,
    TrunkSizes,
};
use super::pread::{Source, check_file_name};
use super::record::{Expected, Geometry, MatrixData, RecordView, encode_record};
use super::{Container, ContainerError, integrity, layer_id};
use crate::files::{AtomicFile, DirLock, FileError, sync_dir, write_atomic};
use crate::json;
use crate::quant::{Encoded, GROUP};

/// Work file: the index of a finished trunk, until the manifest takes it over.
pub const TRUNK_INDEX: &str = "trunk-index.json";

/// Work file: the codebooks of a finished layer, until the merge.
pub fn codebook_part_name(layer: u32) -> String {
    format!("codebooks-L{layer}.bin")
}

/// A container directory being written, locked against other writers.
#[derive(Debug)]
pub struct ContainerWriter {
    dir: PathBuf,
    _lock: DirLock,
}

impl ContainerWriter {
    /// Creates the directory if need be and locks it.
    pub fn create(dir: &Path) -> Result<Self, ContainerError> {
        fs::create_dir_all(dir).map_err(FileError::io("create", dir))?;
        Ok(ContainerWriter { dir: dir.to_owned(), _lock: DirLock::acquire(dir)? })
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Writes a small file beside the others, such as `tokenizer.model`.
    pub fn sidecar(&self, name: &str, content: &[u8]) -> Result<(), ContainerError> {
        let path = self.dir.join(name);
        check_file_name(name)
            .map_err(|p| ContainerError::unusable(&self.dir, format!("the file name {name:?} {p}")))?;
        Ok(write_atomic(&path, content)?)
    }

    /// Makes the directory a container: merges the codebooks of `manifest.layers`, fills `manifest.integrity` (with a
    /// SHA-256 of each of `sidecars`), opens the result as a reader would, writes `manifest.sha256` and then
    /// `manifest.json`, and removes the work files. Returns the manifest as written.
    pub fn commit(self, mut manifest: Manifest, sidecars: &[&str]) -> Result<Manifest, ContainerError> {
        let path = self.dir.join(MANIFEST);
        let mut sums = integrity::empty();
        manifest.integrity = None;
        manifest.check(&path)?;
        if !manifest.layers.is_empty() {
            merge_codebooks(&self.dir, &manifest.layers, &manifest.expert_quant)?;
            let (inter, input) = manifest.expert_shape(&path)?;
            let geometry = Geometry::new(&manifest.expert_quant, inter, input)
                .map_err(|error| ContainerError::manifest(&path, "expert_quant", error.to_string()))?;
            let books = Source::open(&self.dir, CODEBOOKS)?;
            sums.codebooks = Some(integrity::codebooks_sum(&books)?);
            let count = CodebookFile::new(books, manifest.expert_quant.entries)?.count();
            for (layer, bank) in &manifest.layers {
                let bank = BankFile::open(&self.dir, layer_id(&path, *layer)?, bank, count, &geometry)?;
                sums.banks.insert(*layer, integrity::bank_sum(&bank)?);
            }
        }
        for name in sidecars {
            sums.files.insert((*name).to_owned(), integrity::file_sum(&Source::open(&self.dir, name)?)?);
        }
        manifest.integrity = Some(sums);
        let content = manifest
            .to_bytes()
            .map_err(|error| ContainerError::manifest(&path, "manifest", error.to_string()))?;
        if content.len() as u64 > json::MANIFEST_BYTES_MAX {
            return Err(ContainerError::manifest(&path, "manifest", "it would exceed 64 MiB"));
        }
        // What is committed must open: read it back the way every reader will.
        let reread = Manifest::parse(&path, &content)?;
        Container::with_manifest(&self.dir, reread, integrity::sha256_hex(&content))?;
        write_atomic(&self.dir.join(MANIFEST_SHA256), integrity::manifest_sidecar(&content).as_bytes())?;
        write_atomic(&path, &content)?;
        for layer in manifest.layers.keys() {
            remove_work_file(&self.dir.join(codebook_part_name(*layer)))?;
        }
        remove_work_file(&self.dir.join(TRUNK_INDEX))?;
        sync_dir(&self.dir)?;
        Ok(manifest)
    }
}

fn remove_work_file(path: &Path) -> Result<(), ContainerError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(FileError::io("remove", path)(error).into())
        }
        _ => Ok(()),
    }
}

/// Writes the bank of one layer, expert by expert.
#[derive(Debug)]
pub struct BankWriter {
    file: AtomicFile,
    layer: u16,
    codebook_base: u16,
    geometry: Geometry,
    experts: u32,
}

impl BankWriter {
    /// Starts `experts-L{layer}.bin` in `dir`.
    pub fn create(
        dir: &Path,
        layer: u16,
        codebook_base: u16,
        geometry: &Geometry,
    ) -> Result<Self, ContainerError> {
        let file = AtomicFile::create(&dir.join(bank_name(layer.into())))?;
        Ok(BankWriter { file, layer, codebook_base, geometry: geometry.clone(), experts: 0 })
    }

    /// Appends the next expert: ids count from 0.
    ///
    /// # Panics
    /// If a length disagrees with the geometry.
    pub fn push(&mut self, matrices: [MatrixData; 3]) -> Result<(), ContainerError> {
        let record = encode_record(self.layer, self.next()?, self.codebook_base, &self.geometry, matrices);
        self.push_record(&record)
    }

    /// Appends the record of the next expert, as [`encode_record`] made it.
    pub fn push_record(&mut self, record: &[u8]) -> Result<(), ContainerError> {
        let expected = Expected {
            file: self.file.path(),
            layer: self.layer,
            expert: self.next()?,
            codebook_base: self.codebook_base,
            codebook_count: u32::MAX,
            geometry: &self.geometry,
        };
        RecordView::check(record, &expected)?;
        self.file.append(record)?;
        self.experts += 1;
        Ok(())
    }

    fn next(&self) -> Result<u16, ContainerError> {
        u16::try_from(self.experts)
            .map_err(|_| ContainerError::unusable(self.file.path(), "a bank holds at most 65536 experts"))
    }

    /// Makes the bank durable under its name; returns its manifest entry.
    pub fn finish(self) -> Result<Bank, ContainerError> {
        if self.experts == 0 {
            return Err(ContainerError::unusable(self.file.path(), "a bank needs at least one expert"));
        }
        self.file.commit()?;
        Ok(bank_entry(self.layer, self.experts, self.codebook_base, &self.geometry))
    }
}

/// The manifest entry of a layer's bank.
pub fn bank_entry(layer: u16, experts: u32, codebook_base: u16, geometry: &Geometry) -> Bank {
    Bank {
        file: bank_name(layer.into()),
        experts,
        bytes: u64::from(experts) * geometry.record_bytes() as u64,
        codebook_base,
        extra: Default::default(),
    }
}

/// Writes a layer's codebooks: `books` holds f16 bits, `[entries * 8]` each, in the order kind, stage.
///
/// # Panics
/// If the number of codebooks or a length is not what `quant` says.
pub fn write_codebook_part<B: AsRef<[u16]>>(
    dir: &Path,
    layer: u16,
    codebook_base: u16,
    quant: &ExpertQuant,
    books: &[B],
) -> Result<(), ContainerError> {
    assert_eq!(books.len(), quant.codebooks_per_layer() as usize, "codebooks of a layer");
    let path = dir.join(codebook_part_name(layer.into()));
    let mut content = Vec::new();
    for (i, book) in books.iter().enumerate() {
        let id = u16::try_from(usize::from(codebook_base) + i)
            .map_err(|_| ContainerError::unusable(&path, "codebook ids end at 65535"))?;
        let record = encode_codebook(id, book.as_ref());
        assert_eq!(
            record.len() as u64,
            codebook_bytes(quant.entries),
            "codebook of {} entries",
            quant.entries
        );
        content.extend(record);
    }
    Ok(write_atomic(&path, &content)?)
}

/// The codebook base of a layer whose bank and codebook part are both finished, else `None`. It is read from the
/// files, so that resuming never renumbers what is already on disk.
pub fn finished_layer(
    dir: &Path,
    layer: u16,
    experts: u32,
    geometry: &Geometry,
    quant: &ExpertQuant,
) -> Result<Option<u16>, ContainerError> {
    let size = |name: &str| fs::metadata(dir.join(name)).ok().map(|meta| meta.len());
    let part = codebook_part_name(layer.into());
    let part_bytes = u64::from(quant.codebooks_per_layer()) * codebook_bytes(quant.entries);
    let mut bank = bank_entry(layer, experts, 0, geometry);
    if size(&part) != Some(part_bytes) || size(&bank.file) != Some(bank.bytes) || experts == 0 {
        return Ok(None);
    }
    let header = BankFile::open(dir, layer, &bank, u32::MAX, geometry)?.read_header(0)?;
    bank.codebook_base = u16::from_le_bytes([header[10], header[11]]);
    let file = BankFile::open(dir, layer, &bank, u32::MAX, geometry)?;
    let mut buffer = vec![0; geometry.record_bytes()];
    let bank_fits = file.read(0, &mut buffer).is_ok() && file.read((experts - 1) as u16, &mut buffer).is_ok();
    let books = CodebookFile::part(Source::open(dir, &part)?, quant.entries, bank.codebook_base)?;
    let fits = bank_fits && books.read_layer(bank.codebook_base, quant).is_ok();
    Ok(fits.then_some(bank.codebook_base))
}

/// Merges the parts of all `layers` into `codebooks.bin`, each at its base, gaps zero. A layer without a part keeps
/// what `codebooks.bin` already holds for it.
pub fn merge_codebooks(
    dir: &Path,
    layers: &BTreeMap<u32, Bank>,
    quant: &ExpertQuant,
) -> Result<(), ContainerError> {
    let record = codebook_bytes(quant.entries);
    let owned = quant.codebooks_per_layer();
    let mut order: Vec<(u32, u32)> =
        layers.iter().map(|(layer, bank)| (bank.codebook_base.into(), *layer)).collect();
    order.sort_unstable();
    let mut merged = AtomicFile::create(&dir.join(CODEBOOKS))?;
    let mut next = 0;
    for (base, layer) in order {
        if base < next {
            let problem = format!("the codebooks of layer {layer} from {base} overlap those below {next}");
            return Err(ContainerError::unusable(merged.path(), problem));
        }
        for _ in next..base {
            merged.append(&vec![0; record as usize])?;
        }
        let part = codebook_part_name(layer);
        let books = if dir.join(&part).exists() {
            CodebookFile::part(Source::open(dir, &part)?, quant.entries, base as u16)?
        } else {
            CodebookFile::new(Source::open(dir, CODEBOOKS)?, quant.entries)?
        };
        for id in base..base + owned {
            let bytes = books.read(id)?;
            books.check(id, &bytes)?;
            merged.append(&bytes)?;
        }
        next = base + owned;
    }
    Ok(merged.commit()?)
}

/// Writes `trunk.bin`, tensor after tensor.
#[derive(Debug)]
pub struct TrunkWriter {
    dir: PathBuf,
    file: AtomicFile,
    offset: u64,
    entries: Vec<TrunkEntry>,
}

impl TrunkWriter {
    /// Starts the trunk of the container in `dir`.
    pub fn create(dir: &Path) -> Result<Self, ContainerError> {
        // An index describes one trunk only.
        remove_work_file(&dir.join(TRUNK_INDEX))?;
        let file = AtomicFile::create(&dir.join(TRUNK))?;
        Ok(TrunkWriter { dir: dir.to_owned(), file, offset: 0, entries: Vec::new() })
    }

    /// Writes a whole tensor.
    ///
    /// # Panics
    /// If `data` holds no whole number of rows.
    pub fn push_tensor(
        &mut self,
        name: &str,
        shape: &[u64],
        fmt: TrunkFmt,
        data: &[f32],
    ) -> Result<(), ContainerError> {
        let mut tensor = self.tensor(name, shape, fmt)?;
        tensor.rows(data)?;
        tensor.finish()
    }

    /// Starts a tensor that is written some rows at a time. One that is not finished spoils the trunk.
    pub fn tensor(
        &mut self,
        name: &str,
        shape: &[u64],
        fmt: TrunkFmt,
    ) -> Result<TensorWriter<'_>, ContainerError> {
        let sizes = TrunkSizes::new(fmt, shape).map_err(|problem| ContainerError::Tensor {
            file: self.file.path().to_owned(),
            tensor: name.to_owned(),
            problem,
        })?;
        let (entry_off, shape, name) = (self.offset, shape.to_vec(), name.to_owned());
        let entry = TrunkEntry {
            name,
            fmt,
            off: entry_off,
            shape,
            group: fmt.is_grouped().then_some(GROUP as u64),
            scale_off: fmt.is_grouped().then_some(entry_off + sizes.payload_bytes),
            bytes: sizes.bytes,
            crc32: None,
            extra: Default::default(),
        };
        let crc = crc32fast::Hasher::new();
        Ok(TensorWriter { trunk: self, entry, sizes, crc, payload: 0, scales: Vec::new() })
    }

    /// Makes the trunk durable, then its index as a work file; returns the index.
    pub fn finish(self) -> Result<Vec<TrunkEntry>, ContainerError> {
        let written: u64 = self.entries.iter().map(|entry| entry.bytes).sum();
        if written != self.offset {
            return Err(ContainerError::unusable(self.file.path(), "a tensor was begun and not finished"));
        }
        self.file.commit()?;
        let path = self.dir.join(TRUNK_INDEX);
        let index = serde_json::to_vec(&self.entries)
            .map_err(|error| ContainerError::unusable(&path, error.to_string()))?;
        write_atomic(&path, &index)?;
        Ok(self.entries)
    }
}

/// The index of a trunk that was finished before the container was committed, if there is one and it fits the file.
pub fn finished_trunk(dir: &Path) -> Result<Option<Vec<TrunkEntry>>, ContainerError> {
    let path = dir.join(TRUNK_INDEX);
    let bytes = |name| fs::metadata(dir.join(name)).ok().map(|meta: fs::Metadata| meta.len());
    if bytes(TRUNK_INDEX).is_none() {
        return Ok(None);
    }
    let value = json::read(&path, json::MANIFEST_BYTES_MAX)?;
    let Ok(entries) = serde_json::from_value::<Vec<TrunkEntry>>(value) else { return Ok(None) };
    let end = entries.iter().try_fold(0u64, |end, entry| end.checked_add(entry.bytes));
    Ok((end.is_some() && end == bytes(TRUNK)).then_some(entries))
}

/// A tensor being written: its rows, then its scales.
#[derive(Debug)]
pub struct TensorWriter<'a> {
    trunk: &'a mut TrunkWriter,
    entry: TrunkEntry,
    sizes: TrunkSizes,
    crc: crc32fast::Hasher,
    payload: u64,
    scales: Vec<u16>,
}

impl TensorWriter<'_> {
    /// Encodes and appends some rows, `[rows, cols]`.
    ///
    /// # Panics
    /// If `data` holds no whole number of rows.
    pub fn rows(&mut self, data: &[f32]) -> Result<(), ContainerError> {
        let cols = self.sizes.cols as usize;
        assert_eq!(data.len() % cols, 0, "whole rows of {}", self.entry.name);
        // In pieces, so that the encoded copy stays small.
        for piece in data.chunks((1usize << 20).div_ceil(cols) * cols) {
            let encoded = self.entry.fmt.encode_rows(piece, piece.len() / cols, cols);
            let encoded = encoded.map_err(|source| ContainerError::Quant {
                what: format!("tensor {}, from row {}", self.entry.name, self.payload / self.sizes.row_bytes),
                source,
            })?;
            self.encoded(&encoded)?;
        }
        Ok(())
    }

    /// Appends rows that [`TrunkFmt::encode_rows`] has encoded, perhaps on another thread.
    pub fn encoded(&mut self, rows: &Encoded) -> Result<(), ContainerError> {
        self.append(&rows.payload)?;
        self.payload += rows.payload.len() as u64;
        self.scales.extend_from_slice(&rows.scales);
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), ContainerError> {
        self.crc.update(bytes);
        self.trunk.file.append(bytes)?;
        self.trunk.offset += bytes.len() as u64;
        Ok(())
    }

    /// Appends the scales and enters the tensor into the index.
    pub fn finish(mut self) -> Result<(), ContainerError> {
        let found = (self.payload, self.scales.len() as u64);
        if found != (self.sizes.payload_bytes, self.sizes.scales) {
            return Err(ContainerError::Tensor {
                file: self.trunk.file.path().to_owned(),
                tensor: self.entry.name,
                problem: format!(
                    "{} weight bytes and {} scales were written, its shape needs {} and {}",
                    found.0, found.1, self.sizes.payload_bytes, self.sizes.scales
                ),
            });
        }
        let scales: Vec<u8> =
            std::mem::take(&mut self.scales).iter().flat_map(|scale| scale.to_le_bytes()).collect();
        self.append(&scales)?;
        self.entry.crc32 = Some(self.crc.finalize());
        self.trunk.entries.push(self.entry);
        Ok(())
    }
}
