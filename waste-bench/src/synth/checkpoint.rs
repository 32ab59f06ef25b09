//! A synthetic checkpoint in the layout of the hub: one shard for the tensors outside the layers, one for each layer.

use std::path::Path;

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde_json::{Map, Value, json};
use waste_common::cli::Failure;
use waste_common::config::ModelConfig;
use waste_common::files::{AtomicFile, DirLock, FileError, write_atomic};
use waste_common::quant::half::f32_to_bf16;
use waste_common::quant::mxfp4;
use waste_common::tensors::{self, ExpertKind};

use super::popularity::Popularity;
use super::sidecars;
use super::weights::{self, Values, in_order};
use crate::random::Random;

/// What to write.
#[derive(Clone, Debug)]
pub struct CheckpointSpec<'a> {
    /// Its `config.json`.
    pub config: &'a Value,
    /// The same, read.
    pub model: &'a ModelConfig,
    /// Seed of all weights.
    pub seed: u64,
    /// How skewed the routing is.
    pub popularity: Popularity,
    /// Packed experts are of normally distributed weights instead of random codes.
    pub gaussian: bool,
}

/// A tensor to be written.
struct Item {
    name: String,
    shape: Vec<usize>,
    fill: Fill,
}

enum Fill {
    F32(Values),
    Bf16(Values),
    /// MXFP4 codes of rows with so many columns.
    Codes(usize),
    /// Their scales, all alike.
    Scales(u8),
    /// One half of rows of normally distributed weights in MXFP4.
    Gaussian(Gaussian, Half),
}

/// A matrix of normally distributed weights.
#[derive(Clone)]
struct Gaussian {
    name: String,
    cols: usize,
    deviation: f32,
}

#[derive(Clone, Copy)]
enum Half {
    Codes,
    Scales,
}

impl Gaussian {
    fn row(&self, seed: u64, row: usize) -> (Vec<u8>, Vec<u8>) {
        let mut random = Random::of_piece(seed, &self.name, row as u64);
        // Four sums of twelve, so that the tails are near enough to the true ones.
        let mut normal = || 0.5 * (0..4).map(|_| random.normal()).sum::<f32>();
        let row: Vec<f32> = (0..self.cols).map(|_| self.deviation * normal()).collect();
        mxfp4::encode_row(&row)
    }
}

impl Item {
    fn plain(name: String, shape: Vec<usize>, spec: &CheckpointSpec<'_>) -> Item {
        let values = Values::of(spec.model, &spec.popularity, &name, &shape);
        // What the release keeps in f32.
        let wide = ["A_log", "dt_bias", "e_score_correction_bias", "conv1d.weight"];
        let fill =
            if wide.iter().any(|tail| name.ends_with(tail)) { Fill::F32(values) } else { Fill::Bf16(values) };
        Item { name, shape, fill }
    }

    fn dtype(&self) -> Dtype {
        match self.fill {
            Fill::F32(_) => Dtype::F32,
            Fill::Bf16(_) => Dtype::BF16,
            Fill::Codes(_) | Fill::Scales(_) | Fill::Gaussian(..) => Dtype::U8,
        }
    }

    fn width(&self) -> usize {
        match self.fill {
            Fill::F32(_) => 4,
            Fill::Bf16(_) => 2,
            Fill::Codes(_) | Fill::Scales(_) | Fill::Gaussian(..) => 1,
        }
    }

    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.width()
    }

    /// Rows `first..first + rows`.
    fn rows(&self, seed: u64, piece: usize, rows: usize) -> Vec<u8> {
        let mut random = Random::of_piece(seed, &self.name, piece as u64);
        let count = rows * self.cols();
        match &self.fill {
            Fill::F32(values) => {
                values.draw(&mut random, count).into_iter().flat_map(f32::to_le_bytes).collect()
            }
            Fill::Bf16(values) => {
                let values = values.draw(&mut random, count).into_iter();
                values.flat_map(|value| f32_to_bf16(value).to_le_bytes()).collect()
            }
            Fill::Codes(cols) => weights::mxfp4_codes(&mut random, rows, *cols),
            Fill::Scales(scale) => vec![*scale; count],
            Fill::Gaussian(matrix, half) => {
                let first = piece * weights::piece_rows(self.cols());
                let row = |row| match (matrix.row(seed, row), half) {
                    ((codes, _), Half::Codes) => codes,
                    ((_, scales), Half::Scales) => scales,
                };
                (first..first + rows).flat_map(row).collect()
            }
        }
    }

    fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1).max(1)
    }
}

/// Bytes of all shards' tensors.
pub fn bytes(spec: &CheckpointSpec<'_>) -> u64 {
    (0..=spec.model.layers()).flat_map(|shard| items(spec, shard)).map(|item| item.bytes() as u64).sum()
}

/// Writes the checkpoint; `progress` is told of bytes as they are written. Returns the number of shards.
///
/// # Errors
/// The directory cannot be written.
pub fn write(dir: &Path, spec: &CheckpointSpec<'_>, progress: &dyn Fn(u64)) -> Result<usize, Failure> {
    std::fs::create_dir_all(dir).map_err(FileError::io("create", dir))?;
    let _lock = DirLock::acquire(dir)?;
    let shards = spec.model.layers() + 1;
    let (mut map, mut total) = (Map::new(), 0);
    for shard in 0..shards {
        let items = items(spec, shard);
        let file = format!("model-{:05}-of-{shards:05}.safetensors", shard + 1);
        write_shard(&dir.join(&file), &items, spec.seed, progress)?;
        for item in items {
            total += item.bytes() as u64;
            map.insert(item.name, file.clone().into());
        }
    }
    map.sort_keys();
    let index = json!({"metadata": {"total_size": total}, "weight_map": map});
    let generation: Map<String, Value> = sidecars::TOKEN_IDS
        .iter()
        .filter(|(key, _)| !key.starts_with("media"))
        .map(|(key, id)| ((*key).to_owned(), json!(id)))
        .collect();
    if spec.model.vision.is_some() {
        write_atomic(&dir.join("preprocessor_config.json"), sidecars::PREPROCESSOR.as_bytes())?;
    }
    for (name, content) in [
        ("tiktoken.model", sidecars::ranks()),
        ("tokenizer_config.json", sidecars::checkpoint_specials().to_string()),
        ("generation_config.json", Value::from(generation).to_string()),
        ("model.safetensors.index.json", index.to_string()),
        ("config.json", format!("{:#}\n", spec.config)),
    ] {
        write_atomic(&dir.join(name), content.as_bytes())?;
    }
    Ok(shards)
}

/// The tensors of a shard: 0 holds what is outside the layers, `n` holds layer `n - 1`.
fn items(spec: &CheckpointSpec<'_>, shard: usize) -> Vec<Item> {
    let model = spec.model;
    let place = shard.checked_sub(1);
    let all = tensors::trunk(model).into_iter().chain(tensors::vision(model));
    let mut items: Vec<Item> = all
        .filter(|tensor| layer_of(&tensor.name) == place)
        .map(|tensor| Item::plain(tensor.name, tensor.shape, spec))
        .collect();
    let packed = spec.config.get("text_config").unwrap_or(spec.config).get("quantization_config");
    let packed = packed.is_some_and(|quantization| !quantization.is_null());
    if let Some((layer, moe)) = place.and_then(|layer| Some((layer, model.moe_of(layer)?))) {
        for expert in 0..moe.experts {
            for kind in ExpertKind::ALL {
                let name = tensors::expert(model, layer, expert, kind);
                let (rows, cols, gain) = match kind {
                    ExpertKind::Down => (moe.input, moe.intermediate, weights::down_gain(model)),
                    ExpertKind::Gate | ExpertKind::Up => (moe.intermediate, moe.input, 1.0),
                };
                if packed {
                    let (codes, scales) = if spec.gaussian {
                        let deviation = gain / (cols as f32).sqrt();
                        let matrix = Gaussian { name: name.clone(), cols, deviation };
                        (Fill::Gaussian(matrix.clone(), Half::Codes), Fill::Gaussian(matrix, Half::Scales))
                    } else {
                        (Fill::Codes(cols), Fill::Scales(weights::mxfp4_scale(cols, gain)))
                    };
                    items.push(Item {
                        name: format!("{name}.weight_packed"),
                        shape: vec![rows, mxfp4::row_bytes(cols)],
                        fill: codes,
                    });
                    items.push(Item {
                        name: format!("{name}.weight_scale"),
                        shape: vec![rows, mxfp4::row_scales(cols)],
                        fill: scales,
                    });
                } else {
                    let values = Values::Uniform { centre: 0.0, spread: gain / (cols as f32).sqrt() };
                    let name = format!("{name}.weight");
                    items.push(Item { name, shape: vec![rows, cols], fill: Fill::Bf16(values) });
                }
            }
        }
    }
    // The format wants wide types first, so that everything stays aligned.
    items.sort_by_key(|item| std::cmp::Reverse(item.width()));
    items
}

fn layer_of(name: &str) -> Option<usize> {
    let (_, tail) = name.split_once("model.layers.")?;
    tail.split('.').next()?.parse().ok()
}

fn write_shard(path: &Path, items: &[Item], seed: u64, progress: &dyn Fn(u64)) -> Result<(), Failure> {
    let mut end = 0;
    let tensors = items.iter().map(|item| {
        let start = end;
        end += item.bytes();
        let info = TensorInfo { dtype: item.dtype(), shape: item.shape.clone(), data_offsets: (start, end) };
        (item.name.clone(), info)
    });
    let format = [("format".to_owned(), "pt".to_owned())].into();
    let bug = |error: String| Failure::internal(format!("the header of {}: {error}", path.display()));
    let metadata = Metadata::new(Some(format), tensors.collect()).map_err(|error| bug(error.to_string()))?;
    let mut header = serde_json::to_vec(&metadata).map_err(|error| bug(error.to_string()))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = AtomicFile::create(path)?;
    file.append(&(header.len() as u64).to_le_bytes())?;
    file.append(&header)?;
    for item in items {
        let rows = item.shape.iter().product::<usize>() / item.cols();
        let step = weights::piece_rows(item.cols());
        in_order(
            rows.div_ceil(step),
            |piece| item.rows(seed, piece, step.min(rows - piece * step)),
            |bytes| {
                progress(bytes.len() as u64);
                file.append(&bytes)
            },
        )?;
    }
    Ok(file.commit()?)
}
