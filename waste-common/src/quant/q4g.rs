//! Q4G: 4-bit weights, −8…7, stored biased by 8, groups of 128. The even index lies in the low nibble.

use super::grouped::{self, GROUP, Levels, padded};
use super::half::f16_to_f32;
use super::{Encoded, QuantError};

const LEVELS: Levels = Levels { divisor: 7.0, lowest: -8.0, highest: 7.0 };
const BIAS: i8 = 8;

/// Bytes of one row; `None` on overflow.
pub fn row_bytes(cols: u64) -> Option<u64> {
    Some(padded(cols)? / 2)
}

/// Bytes of the weights of `rows` rows, without scales; `None` on overflow.
pub fn payload_bytes(rows: u64, cols: u64) -> Option<u64> {
    rows.checked_mul(row_bytes(cols)?)
}

/// Quantises `src`, `[rows, cols]`.
///
/// # Panics
/// If `src` does not hold `rows * cols` weights.
pub fn encode_rows(src: &[f32], rows: usize, cols: usize) -> Result<Encoded, QuantError> {
    grouped::encode(src, rows, cols, &LEVELS, |row, payload| {
        payload
            .extend(row.chunks_exact(2).map(|pair| (pair[0] + BIAS) as u8 | ((pair[1] + BIAS) as u8) << 4));
    })
}

/// Decodes one row into `out`, `[cols]`: integer times scale, in f32.
///
/// # Panics
/// If `payload` or `scales` are too short for `out.len()` weights.
pub fn decode_row(payload: &[u8], scales: &[u16], out: &mut [f32]) {
    assert!(payload.len() >= out.len().div_ceil(GROUP) * GROUP / 2, "Q4G row of {} weights", out.len());
    for (group, out) in out.chunks_mut(GROUP).enumerate() {
        let scale = f16_to_f32(scales[group]);
        let bytes = &payload[group * GROUP / 2..];
        for (i, value) in out.iter_mut().enumerate() {
            let nibble = bytes[i / 2] >> (i % 2 * 4) & 15;
            *value = f32::from(nibble as i8 - BIAS) * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::golden::trunk_vectors;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn golden_vectors() {
        trunk_vectors("q4", encode_rows, decode_row, payload_bytes);
    }

    proptest! {
        #[test]
        fn what_was_encoded_decodes_within_half_a_step(
            cols in 1usize..300, rows in 0usize..4, seed in any::<u64>(), exponent in -30i32..15,
        ) {
            super::super::golden::round_trip(rows, cols, seed, exponent, 7.0, 7.0, encode_rows, decode_row, payload_bytes)?;
        }
    }

    #[test]
    fn every_nibble_is_biased_not_two_s_complement() {
        let payload: Vec<u8> = (0..64).map(|i: u8| (i % 16) | (15 - i % 16) << 4).collect();
        let mut out = [0.0; 128];
        decode_row(&payload, &[0x3c00], &mut out);
        for i in 0..64 {
            assert_eq!(out[2 * i], (i % 16) as f32 - 8.0);
            assert_eq!(out[2 * i + 1], 7.0 - (i % 16) as f32);
        }
    }
}
