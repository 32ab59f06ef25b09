//! Golden vectors (`tests/golden`, from an f64 reference) and the round-trip property shared by the codec tests.

use std::path::PathBuf;

use proptest::prelude::*;
use safetensors::SafeTensors;

use super::half::f16_to_f32;
use super::{Encoded, GROUP, QuantError, groups};

pub type Encode = fn(&[f32], usize, usize) -> Result<Encoded, QuantError>;
pub type Decode = fn(&[u8], &[u16], &mut [f32]);
pub type Bytes = fn(u64, u64) -> Option<u64>;

/// A file of `tests/` at the root of the project.
pub fn path(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/")).join(name)
}

pub fn components(name: &str) -> Vec<u8> {
    std::fs::read(path("golden/components").join(name)).unwrap()
}

pub fn f32s(tensors: &SafeTensors, name: &str) -> Vec<f32> {
    let bytes = tensors.tensor(name).unwrap().data();
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

pub fn f64s(tensors: &SafeTensors, name: &str) -> Vec<f64> {
    let bytes = tensors.tensor(name).unwrap().data();
    bytes.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect()
}

/// Payload and scales to the bit, values to the bit, and the f64 product with a vector.
pub fn trunk_vectors(format: &str, encode: Encode, decode: Decode, payload_bytes: Bytes) {
    let file = components("trunk_quant.safetensors");
    let tensors = SafeTensors::deserialize(&file).unwrap();
    for (rows, cols) in [(3usize, 96usize), (5, 256), (7, 200)] {
        let case = format!("{rows}x{cols}");
        let name = |part: &str| format!("{case}.{format}.{part}");
        let encoded = encode(&f32s(&tensors, &format!("{case}.x")), rows, cols).unwrap();
        assert_eq!(encoded.payload, tensors.tensor(&name("payload")).unwrap().data(), "{case} payload");
        assert_eq!(payload_bytes(rows as u64, cols as u64), Some(encoded.payload.len() as u64));
        let scale_bytes: Vec<u8> = encoded.scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        assert_eq!(scale_bytes, tensors.tensor(&name("scale")).unwrap().data(), "{case} scale");

        let decoded = decode_all(&encoded, rows, cols, decode);
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&decoded), bits(&f32s(&tensors, &name("value"))), "{case} value");

        let act = f32s(&tensors, &format!("{case}.act"));
        for (row, expected) in f64s(&tensors, &name("matvec_f64")).into_iter().enumerate() {
            let terms = decoded[row * cols..][..cols].iter().zip(&act);
            let found: f64 = terms.map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            assert!((found - expected).abs() <= 1e-9 * expected.abs().max(1.0), "{case} matvec");
        }
    }
}

fn decode_all(encoded: &Encoded, rows: usize, cols: usize, decode: Decode) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows * cols];
    let groups = groups(cols as u64) as usize;
    for row in 0..rows {
        let stride = encoded.payload.len() / rows;
        decode(
            &encoded.payload[row * stride..][..stride],
            &encoded.scales[row * groups..][..groups],
            &mut out[row * cols..][..cols],
        );
    }
    out
}

/// Reproducible noise in −1…1.
pub fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = move || {
        // splitmix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// Every decoded weight lies within half a step (and what rounding the scale to f16 adds) of its source.
#[allow(clippy::too_many_arguments)]
pub fn round_trip(
    rows: usize,
    cols: usize,
    seed: u64,
    exponent: i32,
    divisor: f32,
    levels: f32,
    encode: Encode,
    decode: Decode,
    payload_bytes: Bytes,
) -> Result<(), TestCaseError> {
    let weights: Vec<f32> = noise(seed, rows * cols).iter().map(|w| w * 2f32.powi(exponent)).collect();
    let encoded = encode(&weights, rows, cols).unwrap();
    prop_assert_eq!(payload_bytes(rows as u64, cols as u64), Some(encoded.payload.len() as u64));
    if rows == 0 {
        return Ok(());
    }
    let decoded = decode_all(&encoded, rows, cols, decode);
    for row in 0..rows {
        for (group, source) in weights[row * cols..][..cols].chunks(GROUP).enumerate() {
            let scale = source.iter().fold(1e-8f32, |m, w| m.max(w.abs())) / divisor;
            let stored = f16_to_f32(encoded.scales[row * groups(cols as u64) as usize + group]);
            let slack = (stored - scale).abs() * levels + scale * 1e-4;
            for (i, source) in source.iter().enumerate() {
                let found = decoded[row * cols + group * GROUP + i];
                prop_assert!((found - source).abs() <= scale / 2.0 + slack, "{found} for {source}");
            }
        }
    }
    Ok(())
}
