//! Containers of any shape, made up: sparse ones as large as a real one, or small ones of random weights.
//!
//! Everything that a reader checks is valid; the weights mean nothing.

use std::fs::File;
use std::io::{Result, Seek, SeekFrom, Write};
use std::path::Path;

use serde_json::{Value, json};
use waste_common::config::ModelConfig;
use waste_common::container::writer::{
    BankWriter, ContainerWriter, TrunkWriter, bank_entry, write_codebook_part,
};
use waste_common::container::{
    CODEBOOKS, ExpertQuant, Geometry, Kind, MANIFEST, Manifest, MatrixData, TRUNK, TrunkEntry, TrunkFmt,
    TrunkSizes, encode_codebook, encode_record,
};
use waste_common::plan::{usual_format, usual_quant};
use waste_common::quant::GROUP;
use waste_common::quant::half::f32_to_f16;
use waste_common::tensors;

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
    let mut manifest = Manifest {
        arch: model.arch.to_owned(),
        tensor_prefix: model.tensor_prefix.to_owned(),
        config: container_config(config),
        expert_quant: quant.clone(),
        layers: Default::default(),
        trunk: Vec::new(),
        integrity: None,
        extra: Default::default(),
    };
    std::fs::create_dir_all(dir)?;
    match fill {
        Fill::Random(seed) => random(dir, &model, manifest, seed),
        Fill::Holes | Fill::Zeros => {
            sparse(dir, &model, &mut manifest, fill == Fill::Zeros)?;
            std::fs::write(dir.join(MANIFEST), manifest.to_bytes()?)?;
            Ok(manifest)
        }
    }
}

/// The first `layers` layers of a model: the same configuration, cut short.
///
/// # Panics
/// The configuration has no layers. (Tests only.)
pub fn cut(config: &Value, layers: u64) -> Value {
    let mut config = config.clone();
    let text = match config.get_mut("text_config") {
        Some(_) => &mut config["text_config"],
        None => &mut config,
    };
    text["num_hidden_layers"] = json!(layers);
    for list in ["kda_layers", "full_attn_layers"] {
        let kept = text["linear_attn_config"][list].as_array_mut();
        let kept = kept.unwrap_or_else(|| panic!("{list} is missing"));
        kept.retain(|layer| layer.as_u64().is_some_and(|layer| layer <= layers));
    }
    config
}

/// A checkpoint's configuration as a manifest keeps it: the decoder's object, the rest of the outer one inside.
fn container_config(config: &Value) -> Value {
    let Some(text) = config.get("text_config") else { return config.clone() };
    let (mut text, mut outer) = (text.clone(), config.clone());
    if let Some(outer) = outer.as_object_mut() {
        outer.remove("text_config");
    }
    text["_outer"] = outer;
    text
}

fn geometry(model: &ModelConfig, quant: &ExpertQuant) -> Option<Geometry> {
    let moe = model.moe.as_ref()?;
    let geometry = Geometry::new(quant, moe.intermediate as u64, moe.input as u64);
    Some(geometry.unwrap_or_else(|error| panic!("{error}")))
}

/// Every tensor of the trunk with its format and its shape there.
fn trunk(model: &ModelConfig) -> impl Iterator<Item = (String, TrunkFmt, Vec<u64>)> + '_ {
    tensors::trunk(model).into_iter().chain(tensors::vision(model)).map(|spec| {
        let mut shape: Vec<u64> = spec.shape.iter().map(|&d| d as u64).collect();
        if shape.len() == 4 {
            shape = vec![shape[0], shape[1..].iter().product()];
        }
        let fmt = usual_format(&spec, model);
        (spec.name, fmt, shape)
    })
}

fn create(path: &Path, bytes: u64) -> Result<File> {
    let file = File::create(path)?;
    file.set_len(bytes)?;
    Ok(file)
}

fn sparse(dir: &Path, model: &ModelConfig, manifest: &mut Manifest, headers: bool) -> Result<()> {
    let mut off = 0;
    for (name, fmt, shape) in trunk(model) {
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

fn random(dir: &Path, model: &ModelConfig, mut manifest: Manifest, seed: u64) -> Result<Manifest> {
    let failed = |error| std::io::Error::other(format!("{error}"));
    let mut random = Random(seed);
    let writer = ContainerWriter::create(dir).map_err(failed)?;
    let mut out = TrunkWriter::create(dir).map_err(failed)?;
    for (name, fmt, shape) in trunk(model) {
        let elements: u64 = shape.iter().product();
        // Rows of unit gain, norms around 1, everything else small.
        let cols = shape.last().copied().unwrap_or(1) as f32;
        let (centre, spread) = match shape.len() {
            1 if name.contains("norm") => (1.0, 0.1),
            1 => (0.0, 0.1),
            _ => (0.0, (3.0 / cols).sqrt()),
        };
        let data: Vec<f32> = (0..elements).map(|_| centre + spread * random.float()).collect();
        out.push_tensor(&name, &shape, fmt, &data).map_err(failed)?;
    }
    manifest.trunk = out.finish().map_err(failed)?;
    if let (Some(geometry), Some(moe)) = (geometry(model, &manifest.expert_quant), &model.moe) {
        for (i, layer) in model.moe_layers().enumerate() {
            let quant = &manifest.expert_quant;
            let base = (i as u32 * quant.codebooks_per_layer()) as u16;
            let book = |random: &mut Random| -> Vec<u16> {
                (0..quant.entries * 8).map(|_| f32_to_f16(0.5 * random.float())).collect()
            };
            let books: Vec<_> = (0..quant.codebooks_per_layer()).map(|_| book(&mut random)).collect();
            write_codebook_part(dir, layer as u16, base, quant, &books).map_err(failed)?;
            let mut bank = BankWriter::create(dir, layer as u16, base, &geometry).map_err(failed)?;
            for _ in 0..moe.experts {
                let indices = Kind::ALL.map(|kind| random_indices(&geometry, kind, quant, &mut random));
                let scales = Kind::ALL.map(|kind| {
                    let layout = geometry.layout(kind);
                    let scale = (3.0 / (8 * layout.vectors()) as f32).sqrt();
                    vec![f32_to_f16(scale); layout.rows()]
                });
                let data = |kind: Kind| MatrixData {
                    indices: &indices[kind as usize],
                    scales: &scales[kind as usize],
                };
                bank.push(Kind::ALL.map(data)).map_err(failed)?;
            }
            manifest.layers.insert(layer as u32, bank.finish().map_err(failed)?);
        }
    }
    writer.commit(manifest, &[]).map_err(failed)
}

/// Indices below `entries`; packed by the codec, so that padding rows stay zero.
fn random_indices(geometry: &Geometry, kind: Kind, quant: &ExpertQuant, random: &mut Random) -> Vec<u8> {
    let layout = geometry.layout(kind);
    let count = layout.rows() * layout.vectors() * layout.stages();
    let indices: Vec<u8> = (0..count).map(|_| (random.next() % u64::from(quant.entries)) as u8).collect();
    layout.pack(&indices).unwrap_or_else(|error| panic!("{error}"))
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From -1 to 1.
    fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }
}
