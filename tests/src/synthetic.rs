//! Containers of any shape, made up: sparse ones as large as a real one, or small ones of random weights.
//!
//! Everything that a reader checks is valid; the weights mean nothing.

use std::fs::File;
use std::io::{Result, Seek, SeekFrom, Write};
use std::path::Path;

use serde_json::Value;
use waste_bench::synth::{self, ContainerSpec};
use waste_common::config::ModelConfig;
use waste_common::container::writer::bank_entry;
use waste_common::container::{
    CODEBOOKS, ExpertQuant, Geometry, Kind, MANIFEST, Manifest, MatrixData, TRUNK, TrunkEntry, TrunkSizes,
    encode_codebook, encode_record,
};
use waste_common::plan::usual_quant;
use waste_common::quant::GROUP;

pub use waste_bench::synth::shape::cut;

/// What the weights of a synthetic container are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Holes. Not even record headers are written: enough to open a container and to plan it, and almost no disk.
    Holes,
    /// Zeros, with a valid header for each record: 4 KiB of disk an expert.
    Zeros,
    /// Random weights from a seed, small enough that activations stay finite. All bytes are written.
    Random(u64),
}

/// Makes a container in `dir` with the usual formats, from a checkpoint's `config.json` and VQ3R experts.
///
/// # Panics
/// The configuration cannot be used. (Tests only.)
pub fn container(dir: &Path, config: &Value, fill: Fill) -> Result<Manifest> {
    container_with(dir, config, &usual_quant(), fill)
}

/// [`container`] with another format of experts.
///
/// # Panics
/// As there.
pub fn container_with(dir: &Path, config: &Value, quant: &ExpertQuant, fill: Fill) -> Result<Manifest> {
    let model = ModelConfig::from_checkpoint(config).unwrap_or_else(|error| panic!("{error}"));
    let mut manifest = synth::container::empty_manifest(config, &model, quant);
    std::fs::create_dir_all(dir)?;
    match fill {
        Fill::Random(seed) => {
            let (quant, popularity) = (quant.clone(), synth::Popularity::NONE);
            let spec = ContainerSpec { config, model: &model, quant, seed, popularity, checksums: true };
            synth::container::write(dir, &spec, &|_| ())
                .map_err(|error| std::io::Error::other(error.to_string()))
        }
        Fill::Holes | Fill::Zeros => {
            sparse(dir, &model, &mut manifest, fill == Fill::Zeros)?;
            std::fs::write(dir.join(MANIFEST), manifest.to_bytes()?)?;
            Ok(manifest)
        }
    }
}

fn geometry(model: &ModelConfig, quant: &ExpertQuant) -> Option<Geometry> {
    synth::container::geometry(model, quant).unwrap_or_else(|error| panic!("{error}"))
}

fn create(path: &Path, bytes: u64) -> Result<File> {
    let file = File::create(path)?;
    file.set_len(bytes)?;
    Ok(file)
}

fn sparse(dir: &Path, model: &ModelConfig, manifest: &mut Manifest, headers: bool) -> Result<()> {
    let mut off = 0;
    for (name, fmt, shape) in synth::container::trunk(model) {
        let sizes = TrunkSizes::new(fmt, &shape).unwrap_or_else(|error| panic!("{name}: {error}"));
        manifest.trunk.push(TrunkEntry {
            name,
            fmt,
            off,
            shape,
            group: fmt.is_grouped().then_some(GROUP as u64),
            scale_off: fmt.is_grouped().then_some(off + sizes.payload_bytes),
            bytes: sizes.bytes,
            crc32: None,
            extra: Default::default(),
        });
        off += sizes.bytes;
    }
    create(&dir.join(TRUNK), off)?;
    let quant = &manifest.expert_quant;
    let (Some(geometry), Some(moe)) = (geometry(model, quant), &model.moe) else { return Ok(()) };
    let mut codebooks = Vec::new();
    let zeros = vec![0u16; quant.entries as usize * 8];
    let mut header = zero_record(&geometry);
    for (i, layer) in model.moe_layers().enumerate() {
        let base = i as u32 * quant.codebooks_per_layer();
        for id in base..base + quant.codebooks_per_layer() {
            codebooks.extend(encode_codebook(id as u16, &zeros));
        }
        let bank = bank_entry(layer as u16, moe.experts as u32, base as u16, &geometry);
        let mut file = create(&dir.join(&bank.file), bank.bytes)?;
        if headers {
            header[4..6].copy_from_slice(&(layer as u16).to_le_bytes());
            header[10..12].copy_from_slice(&(base as u16).to_le_bytes());
            for expert in 0..moe.experts {
                header[6..8].copy_from_slice(&(expert as u16).to_le_bytes());
                file.seek(SeekFrom::Start(expert as u64 * geometry.record_bytes() as u64))?;
                file.write_all(&header)?;
            }
        }
        manifest.layers.insert(layer as u32, bank);
    }
    std::fs::write(dir.join(CODEBOOKS), codebooks)
}

/// The 48 bytes before an expert of zeros, checksum included.
fn zero_record(geometry: &Geometry) -> Vec<u8> {
    let indices = Kind::ALL.map(|kind| vec![0; geometry.layout(kind).payload_bytes()]);
    let scales = Kind::ALL.map(|kind| vec![0; geometry.layout(kind).rows()]);
    let data = |kind: Kind| MatrixData { indices: &indices[kind as usize], scales: &scales[kind as usize] };
    let mut record = encode_record(0, 0, 0, geometry, Kind::ALL.map(data));
    record.truncate(48);
    record
}
