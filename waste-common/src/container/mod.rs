//! The `.waste` container, format version 0.
//!
//! [`Container::open`] checks everything that can be known from the manifest and the file sizes, and reads nothing
//! but the manifest. Records are checked against the manifest on every read ([`record`]), checksums on request
//! ([`integrity`]). [`writer`] makes containers, layer by layer.

mod bank;
mod codebook;
mod error;
pub mod integrity;
pub mod manifest;
mod pread;
pub mod record;
mod schema;
mod trunk;
pub mod writer;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

pub use bank::{BankFile, bank_name};
pub use codebook::{CODEBOOK_MAGIC, CodebookFile, LayerCodebooks, codebook_bytes, encode_codebook};
pub use error::ContainerError;
pub use manifest::{
    Bank, CODEBOOKS, ExpertFmt, ExpertQuant, MANIFEST, MANIFEST_SHA256, Manifest, TRUNK, TrunkEntry,
    TrunkFmt, TrunkSizes,
};
pub use pread::{Source, check_file_name};
pub use record::{Expected, Geometry, Kind, MatrixData, RecordView, encode_record};
pub use trunk::{RowBuffer, Trunk};

use crate::json;

/// An opened container.
#[derive(Debug)]
pub struct Container {
    dir: PathBuf,
    manifest: Manifest,
    geometry: Option<Geometry>,
    trunk: Trunk,
    codebooks: Option<CodebookFile>,
    manifest_sha256: String,
}

impl Container {
    /// Opens a container: parses the manifest and compares it with `manifest.sha256` if there is one, checks every
    /// name, every bound, and every size against the files.
    pub fn open(dir: &Path) -> Result<Self, ContainerError> {
        let source = Source::open(dir, MANIFEST)?;
        let content = json::read_bounded(source.path(), json::MANIFEST_BYTES_MAX)?;
        integrity::check_manifest_sidecar(dir, &content)?;
        let manifest = Manifest::parse(source.path(), &content)?;
        Self::with_manifest(dir, manifest, integrity::sha256_hex(&content))
    }

    fn with_manifest(
        dir: &Path,
        manifest: Manifest,
        manifest_sha256: String,
    ) -> Result<Self, ContainerError> {
        let file = dir.join(MANIFEST);
        let trunk = Trunk::new(Source::open(dir, TRUNK)?, manifest.trunk.clone())?;
        let (mut geometry, mut codebooks) = (None, None);
        if !manifest.layers.is_empty() {
            let (inter, input) = manifest.expert_shape(&file)?;
            let layout = Geometry::new(&manifest.expert_quant, inter, input);
            let layout =
                layout.map_err(|error| ContainerError::manifest(&file, "expert_quant", error.to_string()))?;
            let books = CodebookFile::new(Source::open(dir, CODEBOOKS)?, manifest.expert_quant.entries)?;
            let count = books.count();
            for (layer, bank) in &manifest.layers {
                let end = u32::from(bank.codebook_base) + manifest.expert_quant.codebooks_per_layer();
                if end > count {
                    return Err(ContainerError::Size {
                        file: books.source().path().to_owned(),
                        what: format!("the codebooks of layer {layer} up to {}", end - 1),
                        expected: u64::from(end) * codebook_bytes(manifest.expert_quant.entries),
                        found: books.source().bytes(),
                    });
                }
                BankFile::open(dir, layer_id(&file, *layer)?, bank, count, &layout)?;
            }
            (geometry, codebooks) = (Some(layout), Some(books));
        }
        Ok(Container { dir: dir.to_owned(), manifest, geometry, trunk, codebooks, manifest_sha256 })
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// SHA-256 of `manifest.json`, lower-case hex.
    pub fn manifest_sha256(&self) -> &str {
        &self.manifest_sha256
    }

    /// The layout of expert records; `None` without MoE layers.
    pub fn geometry(&self) -> Option<&Geometry> {
        self.geometry.as_ref()
    }

    /// The tensors that are no routed experts.
    pub fn trunk(&self) -> &Trunk {
        &self.trunk
    }

    /// The codebook file; `None` without MoE layers.
    pub fn codebooks(&self) -> Option<&CodebookFile> {
        self.codebooks.as_ref()
    }

    /// Opens the bank of a MoE layer.
    pub fn bank(&self, layer: u32) -> Result<BankFile<'_>, ContainerError> {
        let (bank, geometry, codebooks) = self.layer(layer)?;
        let id = layer_id(&self.dir.join(MANIFEST), layer)?;
        BankFile::open(&self.dir, id, bank, codebooks.count(), geometry)
    }

    /// Reads and decodes the codebooks of a MoE layer.
    pub fn layer_codebooks(&self, layer: u32) -> Result<LayerCodebooks, ContainerError> {
        let (bank, _, codebooks) = self.layer(layer)?;
        codebooks.read_layer(bank.codebook_base, &self.manifest.expert_quant)
    }

    fn layer(&self, layer: u32) -> Result<(&Bank, &Geometry, &CodebookFile), ContainerError> {
        match (self.manifest.layers.get(&layer), &self.geometry, &self.codebooks) {
            (Some(bank), Some(geometry), Some(codebooks)) => Ok((bank, geometry, codebooks)),
            _ => {
                let file = self.dir.join(MANIFEST);
                Err(ContainerError::manifest(&file, format!("layers.{layer}"), "the layer is missing"))
            }
        }
    }

    /// Checks the headers of all codebooks, named by a layer or not; see [`CodebookFile::check_unnamed`].
    pub fn check_codebook_headers(&self) -> Result<(), ContainerError> {
        let Some(books) = &self.codebooks else { return Ok(()) };
        let owned = self.manifest.expert_quant.codebooks_per_layer();
        let mut named = vec![false; books.count() as usize];
        for bank in self.manifest.layers.values() {
            named[usize::from(bank.codebook_base)..][..owned as usize].fill(true);
        }
        let strict = self.manifest.integrity.is_some();
        for (id, named) in (0..).zip(named) {
            let bytes = books.read(id)?;
            if named { books.check(id, &bytes)? } else { books.check_unnamed(id, &bytes, strict)? }
        }
        Ok(())
    }
}

fn layer_id(file: &Path, layer: u32) -> Result<u16, ContainerError> {
    u16::try_from(layer)
        .map_err(|_| ContainerError::manifest(file, format!("layers.{layer}"), "layer numbers end at 65535"))
}
