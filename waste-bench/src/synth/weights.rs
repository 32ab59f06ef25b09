//! Random weights that keep a model sane: every matrix has unit gain, norms are about 1, what layers add to the stream
//! is small enough that a token stays recognisable, and the router prefers some experts as much as real ones do.
//!
//! Large tensors are made as quantised bytes, without a detour over floats.

use rayon::prelude::*;
use waste_common::config::ModelConfig;
use waste_common::container::{ExpertQuant, Geometry, Kind, TrunkFmt};
use waste_common::quant::half::f32_to_f16;
use waste_common::quant::mxfp4;
use waste_common::quant::vq::{Layout, ROW_BLOCK};
use waste_common::quant::{Encoded, GROUP, QuantError};
use waste_common::tensors;

use super::popularity::Popularity;
use crate::random::Random;

/// Weights of a piece: memory and granularity of the work.
const PIECE: usize = 1 << 20;
/// Standard deviation of a random nibble of Q4G: -7 to 7, 0 twice.
const Q4_SPREAD: f32 = 4.183_3;
/// Standard deviation of a random byte of Q8G: -127 to 127, 0 twice.
const Q8_SPREAD: f32 = 73.467;
/// Standard deviation of a random MXFP4 code.
const MXFP4_SPREAD: f32 = 2.926;

/// The gain of matrices whose output is added to the stream: all of them together add as much as the embedding is.
pub fn stream_gain(config: &ModelConfig) -> f32 {
    1.0 / (2.0 * config.layers() as f32).sqrt()
}

/// The gain of the experts' down matrices: with a latent, what adds to the stream is the projection behind them.
pub fn down_gain(config: &ModelConfig) -> f32 {
    if config.moe.as_ref().is_some_and(|moe| moe.latent) { 1.0 } else { stream_gain(config) }
}

fn adds_to_stream(name: &str) -> bool {
    let tails = [".o_proj.weight", ".down_proj.weight", ".routed_expert_up_proj.weight"];
    tails.iter().any(|tail| name.ends_with(tail))
}

/// What the weights of a tensor are drawn from.
#[derive(Clone, Debug)]
pub enum Values {
    /// Uniform around a centre.
    Uniform {
        /// The mean.
        centre: f32,
        /// The standard deviation.
        spread: f32,
    },
    /// The router's bias.
    Popularity(Popularity),
}

impl Values {
    /// The values of a tensor of the model.
    pub fn of(config: &ModelConfig, popularity: &Popularity, name: &str, shape: &[usize]) -> Values {
        let (centre, spread) = match shape {
            _ if name.ends_with("e_score_correction_bias") => return Values::Popularity(popularity.clone()),
            [_] if name.contains("norm") => (1.0, 0.05),
            [_] => (0.0, 0.05),
            _ if name == tensors::embedding(config) => (0.0, 1.0),
            [_, inputs @ ..] => {
                let unit = 1.0 / (inputs.iter().product::<usize>() as f32).sqrt();
                (0.0, unit * if adds_to_stream(name) { stream_gain(config) } else { 1.0 })
            }
            [] => (0.0, 0.0),
        };
        Values::Uniform { centre, spread }
    }

    /// `count` values.
    pub fn draw(&self, random: &mut Random, count: usize) -> Vec<f32> {
        match self {
            Values::Uniform { centre, spread } => {
                let reach = spread * 3f32.sqrt();
                (0..count).map(|_| centre + reach * random.float()).collect()
            }
            Values::Popularity(popularity) => popularity.draw(random, count),
        }
    }
}

/// Makes `pieces` pieces in parallel and hands them on in order; only a few are in memory at a time.
///
/// # Errors
/// What `take` returns.
pub fn in_order<T: Send, E>(
    pieces: usize,
    make: impl Fn(usize) -> T + Sync,
    mut take: impl FnMut(T) -> Result<(), E>,
) -> Result<(), E> {
    let batch = 2 * rayon::current_num_threads();
    for start in (0..pieces).step_by(batch) {
        let made: Vec<T> = (start..pieces.min(start + batch)).into_par_iter().map(&make).collect();
        made.into_iter().try_for_each(&mut take)?;
    }
    Ok(())
}

/// Rows of a piece of a tensor with so many columns.
pub fn piece_rows(cols: usize) -> usize {
    (PIECE / cols.max(1)).max(1)
}

/// Random rows of a trunk tensor.
///
/// # Errors
/// None but for a bug in the scales.
pub fn trunk_rows(
    fmt: TrunkFmt,
    values: &Values,
    random: &mut Random,
    rows: usize,
    cols: usize,
) -> Result<Encoded, QuantError> {
    let whole_groups = cols.is_multiple_of(GROUP);
    match (fmt, values) {
        (TrunkFmt::Q4g, Values::Uniform { spread, .. }) if whole_groups => {
            let payload = random.bytes(rows * cols / 2, no_lowest_nibble);
            Ok(Encoded { payload, scales: vec![f32_to_f16(spread / Q4_SPREAD); rows * cols / GROUP] })
        }
        (TrunkFmt::Q8g, Values::Uniform { spread, .. }) if whole_groups => {
            let payload = random.bytes(rows * cols, no_lowest_byte);
            Ok(Encoded { payload, scales: vec![f32_to_f16(spread / Q8_SPREAD); rows * cols / GROUP] })
        }
        _ => fmt.encode_rows(&values.draw(random, rows * cols), rows, cols),
    }
}

/// Nibbles 0 (the weight -8) become 8 (the weight 0), so that the mean is 0.
fn no_lowest_nibble(x: u64) -> u64 {
    let pairs = x | x >> 1;
    let zero = !(pairs | pairs >> 2) & 0x1111_1111_1111_1111;
    x | zero << 3
}

/// Bytes 0x80 (the weight -128) become 0.
fn no_lowest_byte(x: u64) -> u64 {
    u64::from_le_bytes(x.to_le_bytes().map(|byte| if byte == 0x80 { 0 } else { byte }))
}

/// A matrix of an expert.
#[derive(Clone, Debug)]
pub struct ExpertMatrix {
    /// Packed indices.
    pub indices: Vec<u8>,
    /// A f16 scale a row.
    pub scales: Vec<u16>,
}

/// A random matrix of an expert.
///
/// # Errors
/// None but for a bug: indices are below the number of entries.
pub fn expert_matrix(layout: &Layout, gain: f32, random: &mut Random) -> Result<ExpertMatrix, QuantError> {
    let scales = vec![f32_to_f16(gain / ((8 * layout.vectors()) as f32).sqrt()); layout.rows()];
    // Where every bit pattern is an index, and there is no padding, random bytes will do.
    let any = layout.rows().is_multiple_of(ROW_BLOCK) && layout.entries() == 1 << layout.bits().bits();
    if any {
        return Ok(ExpertMatrix { indices: random.bytes(layout.payload_bytes(), |x| x), scales });
    }
    let count = layout.rows() * layout.vectors() * layout.stages();
    let entries = layout.entries() as u64;
    let indices: Vec<u8> = (0..count).map(|_| random.below(entries) as u8).collect();
    Ok(ExpertMatrix { indices: layout.pack(&indices)?, scales })
}

/// A codebook such that the sum of all stages has unit variance: f16 bits, [entries * 8].
pub fn codebook(quant: &ExpertQuant, random: &mut Random) -> Vec<u16> {
    let reach = (3.0 / quant.stages as f32).sqrt();
    (0..quant.entries * 8).map(|_| f32_to_f16(reach * random.float())).collect()
}

/// The three matrices of an expert.
///
/// # Errors
/// As [`expert_matrix`].
pub fn expert(
    geometry: &Geometry,
    down_gain: f32,
    random: &mut Random,
) -> Result<[ExpertMatrix; 3], QuantError> {
    let mut matrix = |kind: Kind| {
        let gain = if kind == Kind::Down { down_gain } else { 1.0 };
        expert_matrix(geometry.layout(kind), gain, random)
    };
    Ok([matrix(Kind::Gate)?, matrix(Kind::Up)?, matrix(Kind::Down)?])
}

/// MXFP4 codes of rows of unit gain.
pub fn mxfp4_codes(random: &mut Random, rows: usize, cols: usize) -> Vec<u8> {
    random.bytes(rows * mxfp4::row_bytes(cols), |x| x)
}

/// The exponent that gives such codes a gain, nearly: it is a power of two.
pub fn mxfp4_scale(cols: usize, gain: f32) -> u8 {
    let exponent = (gain / ((cols as f32).sqrt() * MXFP4_SPREAD)).log2().round();
    (127.0 + exponent).clamp(1.0, 254.0) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(values: &[f32]) -> (f32, f32) {
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / values.len() as f32;
        (mean, variance.sqrt())
    }

    #[test]
    fn quantised_rows_have_the_spread_asked_for() {
        let values = Values::Uniform { centre: 0.0, spread: 0.25 };
        for fmt in [TrunkFmt::Q4g, TrunkFmt::Q8g, TrunkFmt::Q3g, TrunkFmt::F32] {
            for cols in [256, 200] {
                let rows = trunk_rows(fmt, &values, &mut Random::new(3), 64, cols).unwrap();
                let row_bytes = fmt.row_bytes(cols as u64).unwrap() as usize;
                let scales = rows.scales.len() / 64;
                let mut decoded = vec![0.0; 64 * cols];
                for (i, out) in decoded.chunks_exact_mut(cols).enumerate() {
                    let payload = &rows.payload[i * row_bytes..][..row_bytes];
                    fmt.decode_row(payload, &rows.scales[i * scales..][..scales], out);
                }
                let (mean, deviation) = spread(&decoded);
                assert!(mean.abs() < 0.01, "{fmt:?} {cols}: mean {mean}");
                assert!((deviation - 0.25).abs() < 0.03, "{fmt:?} {cols}: {deviation}");
            }
        }
    }

    #[test]
    fn the_lowest_codes_are_avoided() {
        assert_eq!(no_lowest_nibble(0x0123_4567_89ab_cde0), 0x8123_4567_89ab_cde8);
        assert_eq!(no_lowest_byte(0x80_0180), 0x00_0100);
    }

    #[test]
    fn mxfp4_has_unit_gain() {
        let (rows, cols) = (64, 1024);
        let codes = mxfp4_codes(&mut Random::new(5), rows, cols);
        let scales = vec![mxfp4_scale(cols, 1.0); mxfp4::row_scales(cols)];
        let mut values = vec![0.0; cols];
        mxfp4::decode_row(&codes[..mxfp4::row_bytes(cols)], &scales, &mut values);
        let (_, deviation) = spread(&values);
        let gain = deviation * (cols as f32).sqrt();
        assert!((0.65..1.5).contains(&gain), "{gain}");
    }

    #[test]
    fn pieces_come_in_order() {
        let mut seen = Vec::new();
        let mut push = |i| {
            seen.push(i);
            Ok::<_, ()>(())
        };
        in_order(100, |i| i, &mut push).unwrap();
        assert_eq!(seen, (0..100).collect::<Vec<_>>());
        assert_eq!(in_order(3, |i| i, |i| if i == 1 { Err(i) } else { Ok(()) }), Err(1));
    }
}
