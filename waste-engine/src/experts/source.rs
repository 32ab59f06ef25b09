//! Where experts come from: a container's banks, or a checkpoint's shards decoded to f32.

use waste_common::checkpoint::Checkpoint;
use waste_common::config::ModelConfig;
use waste_common::container::{Bank, Container, Expected, Geometry, LayerCodebooks, RecordView};
use waste_common::io::{Bypass, ReadFile};
use waste_common::plan::scratch::ExpertStorage;
use waste_common::quant::vq::IndexBits;
use waste_common::tensors::ExpertKind;
use zerocopy::{FromBytes, IntoBytes};

use super::cache::ExpertId;
use crate::error::EngineError;
use crate::kernels::portable::{VQ_DIM, VqShape};

/// Reads whole experts into cache slots.
pub trait ExpertSource: Send + Sync {
    /// Bytes of the largest record, a multiple of 4096.
    fn record_bytes(&self) -> usize;

    /// Experts of each MoE layer.
    fn experts(&self) -> &[usize];

    /// Whether reads go past the page cache.
    fn direct_io(&self) -> bool;

    /// Fills a slot, [record_bytes] from a page on, with an expert's record and checks it; returns the bytes read.
    fn read(&self, id: ExpertId, slot: &mut [u8]) -> Result<u64, EngineError>;
}

/// How a record holds its three matrices.
pub enum ExpertFormat {
    /// f32 gate, up and down, one after the other.
    Dense {
        /// Elements of one matrix.
        elements: usize,
    },
    /// Vector quantised, as in a container.
    Vq {
        /// Where everything lies in a record.
        geometry: Box<Geometry>,
        /// Layout of gate, up and down.
        shapes: [VqShape; 3],
    },
}

impl ExpertFormat {
    /// The format of a container's experts.
    pub fn of(geometry: &Geometry) -> Self {
        let shape = |kind: ExpertKind| {
            let layout = geometry.layout(kind);
            let packed = layout.bits() == IndexBits::Six;
            VqShape {
                stages: layout.stages(),
                // Whatever an index can name has a table entry, so that a damaged index cannot reach beyond it.
                entries: if packed { 64 } else { 256 },
                packed,
                vectors: layout.vectors(),
            }
        };
        ExpertFormat::Vq { geometry: Box::new(geometry.clone()), shapes: ExpertKind::ALL.map(shape) }
    }

    /// What the sizes of working buffers depend on.
    pub fn storage(&self) -> ExpertStorage {
        match self {
            ExpertFormat::Dense { .. } => ExpertStorage::Dense,
            ExpertFormat::Vq { shapes: [gate, ..], .. } => {
                ExpertStorage::Vq { stages: gate.stages, entries: gate.entries }
            }
        }
    }

    /// A matrix of a dense record; empty for any other.
    pub fn dense<'a>(&self, record: &'a [u8], kind: ExpertKind) -> &'a [f32] {
        let ExpertFormat::Dense { elements } = self else { return &[] };
        let start = 4 * elements * kind as usize;
        // Slots are page-aligned and matrices whole floats, so this always succeeds.
        <[f32]>::ref_from_bytes(&record[start..start + 4 * elements]).unwrap_or(&[])
    }
}

/// A layer's codebooks in the two orders in which they are used, padded with zeros to all nameable entries.
pub struct Codebooks {
    /// gate, up, down: [stages, entries, 8]
    by_entry: [Vec<f32>; 3],
    /// gate, up, down: [stages, 8, entries]
    by_dimension: [Vec<f32>; 3],
}

impl Codebooks {
    /// Arranges a layer's codebooks for the shapes of its matrices.
    pub fn new(layer: &LayerCodebooks, shapes: &[VqShape; 3]) -> Self {
        let mut books =
            Codebooks { by_entry: [const { Vec::new() }; 3], by_dimension: [const { Vec::new() }; 3] };
        for kind in ExpertKind::ALL {
            let VqShape { stages, entries, .. } = shapes[kind as usize];
            let mut by_entry = vec![0.0; stages * entries * VQ_DIM];
            let mut by_dimension = vec![0.0; stages * entries * VQ_DIM];
            for stage in 0..stages {
                let base = stage * entries * VQ_DIM;
                for (e, vector) in layer.table(kind, stage).chunks_exact(VQ_DIM).enumerate() {
                    by_entry[base + e * VQ_DIM..][..VQ_DIM].copy_from_slice(vector);
                    for (d, &value) in vector.iter().enumerate() {
                        by_dimension[base + d * entries + e] = value;
                    }
                }
            }
            books.by_entry[kind as usize] = by_entry;
            books.by_dimension[kind as usize] = by_dimension;
        }
        books
    }

    /// [stages, entries, 8]
    pub fn by_entry(&self, kind: ExpertKind) -> &[f32] {
        &self.by_entry[kind as usize]
    }

    /// [stages, 8, entries]
    pub fn by_dimension(&self, kind: ExpertKind) -> &[f32] {
        &self.by_dimension[kind as usize]
    }
}

/// A container's banks.
pub struct BankSource {
    banks: Vec<(u32, Bank, ReadFile)>,
    experts: Vec<usize>,
    geometry: Geometry,
    codebook_count: u32,
    verify: bool,
}

impl BankSource {
    /// Opens the banks of a container; `None` if it has no MoE layer. `verify` checks every record's payload
    /// checksum as it is read.
    pub fn open(container: &Container, bypass: Bypass, verify: bool) -> Result<Option<Self>, EngineError> {
        let (Some(geometry), Some(codebooks)) = (container.geometry(), container.codebooks()) else {
            return Ok(None);
        };
        let mut banks = Vec::new();
        let mut experts = Vec::new();
        for (&layer, bank) in &container.manifest().layers {
            let file = ReadFile::open(&container.dir().join(&bank.file), bypass)?;
            experts.push(bank.experts as usize);
            banks.push((layer, bank.clone(), file));
        }
        Ok(Some(BankSource {
            banks,
            experts,
            geometry: geometry.clone(),
            codebook_count: codebooks.count(),
            verify,
        }))
    }
}

impl ExpertSource for BankSource {
    fn record_bytes(&self) -> usize {
        self.geometry.record_bytes()
    }

    fn experts(&self) -> &[usize] {
        &self.experts
    }

    fn direct_io(&self) -> bool {
        self.banks.iter().all(|(.., file)| file.bypass())
    }

    fn read(&self, id: ExpertId, slot: &mut [u8]) -> Result<u64, EngineError> {
        let (layer, bank, file) = &self.banks[id.moe as usize];
        let locate = |source: EngineError| EngineError::Expert {
            layer: *layer as usize,
            expert: id.expert as usize,
            source: Box::new(source),
        };
        let offset = u64::from(id.expert) * self.record_bytes() as u64;
        file.read_at(offset, slot).map_err(|error| locate(error.into()))?;
        let expected = Expected {
            file: file.path(),
            layer: *layer as u16,
            expert: id.expert as u16,
            codebook_base: bank.codebook_base,
            codebook_count: self.codebook_count,
            geometry: &self.geometry,
        };
        let record = RecordView::check(slot, &expected)?;
        if self.verify {
            record.verify_crc(&expected)?;
        }
        Ok(self.record_bytes() as u64)
    }
}

/// A checkpoint's experts, decoded to f32 as they are needed.
pub struct CheckpointSource {
    checkpoint: std::sync::Arc<Checkpoint>,
    config: ModelConfig,
    /// Layer numbers of the MoE layers.
    layers: Vec<usize>,
    experts: Vec<usize>,
    elements: usize,
}

impl CheckpointSource {
    /// The experts of a checkpoint; `elements` of one matrix.
    pub fn new(checkpoint: std::sync::Arc<Checkpoint>, config: &ModelConfig) -> Self {
        let layers: Vec<usize> = config.moe_layers().collect();
        let moe = config.moe.as_ref();
        let experts = vec![moe.map_or(0, |moe| moe.experts); layers.len()];
        let elements = moe.map_or(0, |moe| moe.input * moe.intermediate);
        CheckpointSource { checkpoint, config: config.clone(), layers, experts, elements }
    }
}

impl ExpertSource for CheckpointSource {
    fn record_bytes(&self) -> usize {
        (12 * self.elements).next_multiple_of(4096)
    }

    fn experts(&self) -> &[usize] {
        &self.experts
    }

    fn direct_io(&self) -> bool {
        false
    }

    fn read(&self, id: ExpertId, slot: &mut [u8]) -> Result<u64, EngineError> {
        let layer = self.layers[id.moe as usize];
        let matrices = slot.chunks_exact_mut(4 * self.elements);
        for (kind, out) in ExpertKind::ALL.into_iter().zip(matrices) {
            let values = self.checkpoint.read_expert(&self.config, layer, id.expert as usize, kind)?;
            out.copy_from_slice(values.as_bytes());
        }
        Ok(12 * self.elements as u64)
    }
}
