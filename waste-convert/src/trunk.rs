//! The trunk: every tensor that is no routed expert's, read, encoded and written some rows at a time.

use std::path::Path;

use rayon::prelude::*;
use waste_common::checkpoint::{Dtype, TensorInfo};
use waste_common::config::ModelConfig;
use waste_common::container::writer::TrunkWriter;
use waste_common::container::{TrunkEntry, TrunkFmt, TrunkSizes};
use waste_common::quant::{Encoded, QuantError};
use waste_common::tensors;

use crate::error::ConvertError;
use crate::layer::Tick;
use crate::options::Options;
use crate::source::Source;

/// Elements of a slice; a row is never cut.
const SLICE_ELEMENTS: usize = 1 << 20;
/// Most slices in work: each takes up to 4 MiB as read, 4 widened and 1 encoded.
const SLICES: usize = 32;

/// How a tensor is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Its format.
    pub fmt: TrunkFmt,
    /// Its shape in the manifest.
    pub shape: Vec<u64>,
    /// What it takes in the file.
    pub sizes: TrunkSizes,
}

/// Decides how a tensor of the trunk is stored.
pub fn plan(
    config: &ModelConfig,
    options: &Options,
    name: &str,
    info: &TensorInfo,
) -> Result<Plan, ConvertError> {
    let mut shape: Vec<u64> = info.shape.iter().map(|dim| *dim as u64).collect();
    if shape.is_empty() {
        shape.push(1);
    }
    let elements: u64 = shape.iter().product();
    let vision = name.starts_with("vision_tower.") || name.starts_with("mm_projector.");
    let wide = name == tensors::embedding(config) || name == tensors::head(config);
    let fmt = match () {
        () if shape.len() == 1 || elements < options.trunk_min_elements => TrunkFmt::F32,
        () if vision || wide => TrunkFmt::Q8g,
        () => options.trunk_fmt(),
    };
    // A patch convolution is used as a matrix: groups run over all its inputs.
    if let (true, [out, input, height, width]) = (fmt.is_grouped(), &shape[..]) {
        shape = vec![*out, input * height * width];
    }
    let sizes = TrunkSizes::new(fmt, &shape)
        .map_err(|problem| ConvertError::Tensor { name: name.to_owned(), problem })?;
    Ok(Plan { fmt, shape, sizes })
}

/// Bytes of the whole trunk. Of a checkpoint of which only some shards are there, as the configuration tells.
pub fn trunk_bytes(source: &Source, options: &Options) -> Result<u64, ConvertError> {
    let mut total = 0;
    for name in &source.trunk {
        total += plan(&source.config, options, name, &source.checkpoint.info(name)?)?.sizes.bytes;
    }
    if source.trunk.is_empty() {
        for spec in tensors::trunk(&source.config).into_iter().chain(tensors::vision(&source.config)) {
            let info = TensorInfo { dtype: Dtype::BF16, shape: spec.shape, offset: 0, bytes: 0 };
            total += plan(&source.config, options, &spec.name, &info)?.sizes.bytes;
        }
    }
    Ok(total)
}

/// Writes `trunk.bin` of some tensors, and its index; `tick` is called with the bytes written.
///
/// # Errors
/// A tensor cannot be read or has weights that are not finite (it is named); the disk refuses; `tick` says so.
pub fn convert_trunk(
    source: &Source,
    options: &Options,
    names: &[String],
    dir: &Path,
    tick: Tick,
) -> Result<Vec<TrunkEntry>, ConvertError> {
    let mut trunk = TrunkWriter::create(dir)?;
    for name in names {
        convert_tensor(source, options, name, &mut trunk, tick)?;
    }
    Ok(trunk.finish()?)
}

fn convert_tensor(
    source: &Source,
    options: &Options,
    name: &str,
    trunk: &mut TrunkWriter,
    tick: Tick,
) -> Result<(), ConvertError> {
    let info = source.checkpoint.info(name)?;
    let plan = plan(&source.config, options, name, &info)?;
    let (rows, cols) = (plan.sizes.rows as usize, plan.sizes.cols as usize);
    // Rows of the file in one row of the container: more than one only where a tensor is flattened.
    let stored_rows = info.rows() / rows;
    let per_slice = (SLICE_ELEMENTS / cols).max(1);
    let starts: Vec<usize> = (0..rows).step_by(per_slice).collect();
    let mut tensor = trunk.tensor(name, &plan.shape, plan.fmt)?;
    for starts in starts.chunks(SLICES.min(2 * rayon::current_num_threads())) {
        let slice = |start: &usize| -> Result<Encoded, ConvertError> {
            let count = per_slice.min(rows - start);
            let weights = source.checkpoint.read_rows_f32(name, start * stored_rows, count * stored_rows)?;
            encode(plan.fmt, &weights, *start, count, cols)
                .map_err(|source| ConvertError::Weights { name: name.to_owned(), source })
        };
        let encoded = starts.par_iter().map(slice).collect::<Result<Vec<_>, ConvertError>>()?;
        for slice in &encoded {
            tensor.encoded(slice)?;
        }
        tick(encoded.iter().map(|slice| (slice.payload.len() + 2 * slice.scales.len()) as u64).sum())?;
    }
    Ok(tensor.finish()?)
}

/// Encodes rows from `start` of a tensor; the rows of an error are those of the tensor.
fn encode(
    fmt: TrunkFmt,
    weights: &[f32],
    start: usize,
    rows: usize,
    cols: usize,
) -> Result<Encoded, QuantError> {
    if let Some(at) = weights.iter().position(|weight| !weight.is_finite()) {
        let (row, col) = (start + at / cols, at % cols);
        return Err(QuantError::NotFinite { row, col, value: weights[at] });
    }
    fmt.encode_rows(weights, rows, cols)
}
