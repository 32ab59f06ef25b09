//! A synthetic container, written through the writer that conversions use.

use std::path::Path;

use serde_json::Value;
use waste_common::config::ModelConfig;
use waste_common::container::writer::{BankWriter, ContainerWriter, TrunkWriter, write_codebook_part};
use waste_common::container::{
    ContainerError, ExpertQuant, Geometry, Kind, MANIFEST, MANIFEST_SHA256, Manifest, MatrixData, TrunkFmt,
    encode_record,
};
use waste_common::files::{FileError, write_atomic};
use waste_common::plan::usual_format;
use waste_common::tensors;

use super::popularity::Popularity;
use super::shape::container_config;
use super::sidecars;
use super::weights::{self, ExpertMatrix, Values, in_order};
use crate::random::Random;

/// What to write.
#[derive(Clone, Debug)]
pub struct ContainerSpec<'a> {
    /// A checkpoint's `config.json`.
    pub config: &'a Value,
    /// The same, read.
    pub model: &'a ModelConfig,
    /// How experts are stored.
    pub quant: ExpertQuant,
    /// Seed of all weights.
    pub seed: u64,
    /// How skewed the routing is.
    pub popularity: Popularity,
    /// Whether to add the checksums that go beyond format v0.
    pub checksums: bool,
}

/// A manifest without files.
pub fn empty_manifest(config: &Value, model: &ModelConfig, quant: &ExpertQuant) -> Manifest {
    Manifest {
        arch: model.arch.to_owned(),
        tensor_prefix: model.tensor_prefix.to_owned(),
        config: container_config(config),
        expert_quant: quant.clone(),
        layers: Default::default(),
        trunk: Vec::new(),
        integrity: None,
        extra: Default::default(),
    }
}

/// Every tensor of the trunk with its format and its shape there.
pub fn trunk(model: &ModelConfig) -> impl Iterator<Item = (String, TrunkFmt, Vec<u64>)> + '_ {
    tensors::trunk(model).into_iter().chain(tensors::vision(model)).map(|spec| {
        let mut shape: Vec<u64> = spec.shape.iter().map(|&d| d as u64).collect();
        // A convolution over patches is used, and stored, as a matrix.
        if shape.len() == 4 {
            shape = vec![shape[0], shape[1..].iter().product()];
        }
        let fmt = usual_format(&spec, model);
        (spec.name, fmt, shape)
    })
}

/// The layout of the experts' records; `None` without MoE layers.
///
/// # Errors
/// The experts cannot be laid out.
pub fn geometry(model: &ModelConfig, quant: &ExpertQuant) -> Result<Option<Geometry>, ContainerError> {
    let Some(moe) = model.moe.as_ref().filter(|_| model.moe_layers().next().is_some()) else {
        return Ok(None);
    };
    let geometry = Geometry::new(quant, moe.intermediate as u64, moe.input as u64);
    geometry
        .map(Some)
        .map_err(|source| ContainerError::Quant { what: "the layout of experts".to_owned(), source })
}

/// Writes the container; `progress` is told of bytes as they are written.
///
/// # Errors
/// The directory cannot be written.
pub fn write(
    dir: &Path,
    spec: &ContainerSpec<'_>,
    progress: &dyn Fn(u64),
) -> Result<Manifest, ContainerError> {
    let writer = ContainerWriter::create(dir)?;
    let mut manifest = empty_manifest(spec.config, spec.model, &spec.quant);
    write_trunk(dir, spec, &mut manifest, progress)?;
    if let (Some(geometry), Some(moe)) = (geometry(spec.model, &spec.quant)?, &spec.model.moe) {
        for (number, layer) in spec.model.moe_layers().enumerate() {
            let base = number as u32 * spec.quant.codebooks_per_layer();
            let place = Place { dir, layer: layer as u16, base: base as u16 };
            write_layer(&place, spec, &geometry, moe.experts, &mut manifest, progress)?;
        }
    }
    writer.sidecar("tokenizer.model", sidecars::ranks().as_bytes())?;
    writer.sidecar("specials.json", sidecars::container_specials().to_string().as_bytes())?;
    let mut names = vec!["tokenizer.model", "specials.json"];
    if let Some(vision) = sidecars::container_vision(spec.config) {
        writer.sidecar("vision.json", format!("{vision:#}\n").as_bytes())?;
        names.push("vision.json");
    }
    let manifest = writer.commit(manifest, &names)?;
    if spec.checksums { Ok(manifest) } else { without_checksums(dir, manifest) }
}

fn write_trunk(
    dir: &Path,
    spec: &ContainerSpec<'_>,
    manifest: &mut Manifest,
    progress: &dyn Fn(u64),
) -> Result<(), ContainerError> {
    let mut out = TrunkWriter::create(dir)?;
    for (name, fmt, shape) in trunk(spec.model) {
        let dims: Vec<usize> = shape.iter().map(|&d| d as usize).collect();
        let values = Values::of(spec.model, &spec.popularity, &name, &dims);
        let cols = dims.last().copied().unwrap_or(1);
        let rows = dims.iter().product::<usize>() / cols.max(1);
        let step = weights::piece_rows(cols);
        let mut tensor = out.tensor(&name, &shape, fmt)?;
        in_order(
            rows.div_ceil(step),
            |piece| {
                let mut random = Random::of_piece(spec.seed, &name, piece as u64);
                let rows = step.min(rows - piece * step);
                weights::trunk_rows(fmt, &values, &mut random, rows, cols)
            },
            |rows| {
                let rows = rows.map_err(|source| ContainerError::Quant { what: name.clone(), source })?;
                progress((rows.payload.len() + 2 * rows.scales.len()) as u64);
                tensor.encoded(&rows)
            },
        )?;
        tensor.finish()?;
    }
    manifest.trunk = out.finish()?;
    Ok(())
}

struct Place<'a> {
    dir: &'a Path,
    layer: u16,
    base: u16,
}

fn write_layer(
    place: &Place<'_>,
    spec: &ContainerSpec<'_>,
    geometry: &Geometry,
    experts: usize,
    manifest: &mut Manifest,
    progress: &dyn Fn(u64),
) -> Result<(), ContainerError> {
    let &Place { dir, layer, base } = place;
    let mut random = Random::of_piece(spec.seed, "codebooks", u64::from(layer));
    let books: Vec<_> =
        (0..spec.quant.codebooks_per_layer()).map(|_| weights::codebook(&spec.quant, &mut random)).collect();
    write_codebook_part(dir, layer, base, &spec.quant, &books)?;
    let down_gain = weights::down_gain(spec.model);
    let mut bank = BankWriter::create(dir, layer, base, geometry)?;
    in_order(
        experts,
        |expert| {
            let mut random = Random::of_piece(spec.seed, "expert", u64::from(layer) << 32 | expert as u64);
            let matrices = weights::expert(geometry, down_gain, &mut random)?;
            let data = Kind::ALL.map(|kind| {
                let ExpertMatrix { indices, scales } = &matrices[kind as usize];
                MatrixData { indices, scales }
            });
            Ok(encode_record(layer, expert as u16, base, geometry, data))
        },
        |record| {
            let record: Vec<u8> =
                record.map_err(|source| ContainerError::Quant { what: format!("layer {layer}"), source })?;
            progress(record.len() as u64);
            bank.push_record(&record)
        },
    )?;
    manifest.layers.insert(layer.into(), bank.finish()?);
    Ok(())
}

/// The container as format v0 had it: only the records carry checksums.
fn without_checksums(dir: &Path, mut manifest: Manifest) -> Result<Manifest, ContainerError> {
    manifest.integrity = None;
    for entry in &mut manifest.trunk {
        entry.crc32 = None;
    }
    let path = dir.join(MANIFEST);
    let content = manifest.to_bytes().map_err(|error| FileError::io("encode", &path)(error.into()))?;
    let sidecar = dir.join(MANIFEST_SHA256);
    std::fs::remove_file(&sidecar).map_err(FileError::io("remove", &sidecar))?;
    write_atomic(&path, &content)?;
    Ok(manifest)
}
