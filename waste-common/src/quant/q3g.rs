//! Q3G: 3-bit weights, −4…3, stored biased by 4, weight i at bit 3·i of its row, LSB first. A row has one slack byte,
//! so that a decoder may always load two bytes. Read for the sake of existing containers: models collapse at it.

use super::grouped::{self, GROUP, Levels, padded};
use super::half::f16_to_f32;
use super::{Encoded, QuantError};

const LEVELS: Levels = Levels { divisor: 3.0, lowest: -4.0, highest: 3.0 };
const BIAS: i8 = 4;

/// Bytes of one row, slack byte included; `None` on overflow.
pub fn row_bytes(cols: u64) -> Option<u64> {
    padded(cols)?.checked_mul(3)?.div_ceil(8).checked_add(1)
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
        for eight in row.chunks_exact(8) {
            let bits = eight.iter().rev().fold(0u32, |bits, q| bits << 3 | (q + BIAS) as u32);
            payload.extend_from_slice(&bits.to_le_bytes()[..3]);
        }
        payload.push(0);
    })
}

/// Decodes one row into `out`, `[cols]`: integer times scale, in f32.
///
/// # Panics
/// If `payload` or `scales` are too short for `out.len()` weights.
pub fn decode_row(payload: &[u8], scales: &[u16], out: &mut [f32]) {
    assert!(payload.len() > out.len().div_ceil(GROUP) * GROUP / 8 * 3, "Q3G row of {} weights", out.len());
    for (i, value) in out.iter_mut().enumerate() {
        let (byte, shift) = (3 * i / 8, 3 * i % 8);
        let bits = u16::from_le_bytes([payload[byte], payload[byte + 1]]) >> shift & 7;
        *value = f32::from(bits as i8 - BIAS) * f16_to_f32(scales[i / GROUP]);
    }
}

#[cfg(test)]
mod tests {
    use super::super::golden::trunk_vectors;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn golden_vectors() {
        trunk_vectors("q3", encode_rows, decode_row, payload_bytes);
    }

    proptest! {
        #[test]
        fn what_was_encoded_decodes_within_half_a_step(
            cols in 1usize..300, rows in 0usize..4, seed in any::<u64>(), exponent in -30i32..15,
        ) {
            super::super::golden::round_trip(rows, cols, seed, exponent, 3.0, 3.0, encode_rows, decode_row, payload_bytes)?;
        }
    }

    #[test]
    fn rows_are_padded_one_by_one_and_end_in_a_slack_byte() {
        assert_eq!(row_bytes(1), Some(49));
        assert_eq!(row_bytes(129), Some(97));
        assert_eq!(payload_bytes(5, 129), Some(485));
        assert_eq!(row_bytes(u64::MAX), None);
    }
}
