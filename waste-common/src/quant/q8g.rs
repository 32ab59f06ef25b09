//! Q8G: int8 weights, −127…127, groups of 128.

use super::grouped::{self, GROUP, Levels, padded};
use super::half::f16_to_f32;
use super::{Encoded, QuantError};

const LEVELS: Levels = Levels { divisor: 127.0, lowest: -127.0, highest: 127.0 };

/// Bytes of one row; `None` on overflow.
pub fn row_bytes(cols: u64) -> Option<u64> {
    padded(cols)
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
    grouped::encode(src, rows, cols, &LEVELS, |row, payload| payload.extend(row.iter().map(|q| *q as u8)))
}

/// Decodes one row into `out`, `[cols]`: integer times scale, in f32.
///
/// # Panics
/// If `payload` or `scales` are too short for `out.len()` weights.
pub fn decode_row(payload: &[u8], scales: &[u16], out: &mut [f32]) {
    assert!(payload.len() >= out.len().div_ceil(GROUP) * GROUP, "Q8G row of {} weights", out.len());
    for (group, out) in out.chunks_mut(GROUP).enumerate() {
        let scale = f16_to_f32(scales[group]);
        for (value, byte) in out.iter_mut().zip(&payload[group * GROUP..]) {
            *value = f32::from(*byte as i8) * scale;
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
        trunk_vectors("q8", encode_rows, decode_row, payload_bytes);
    }

    proptest! {
        #[test]
        fn what_was_encoded_decodes_within_half_a_step(
            cols in 1usize..300, rows in 0usize..4, seed in any::<u64>(), exponent in -30i32..18,
        ) {
            super::super::golden::round_trip(rows, cols, seed, exponent, 127.0, 127.0, encode_rows, decode_row, payload_bytes)?;
        }
    }

    #[test]
    fn what_f16_or_an_integer_cannot_hold_is_refused() {
        let mut weights = vec![1.0f32; 300];
        weights[257] = f32::NAN;
        assert!(matches!(encode_rows(&weights, 2, 150), Err(QuantError::NotFinite { row: 1, col: 107, .. })));
        weights[257] = 1e30;
        assert!(matches!(
            encode_rows(&weights, 1, 300),
            Err(QuantError::ScaleTooLarge { row: 0, group: 2, .. })
        ));
    }
}
