//! What the three trunk formats share: a row is padded with zeros to whole groups of 128 weights, and each
//! group has one f16 scale.

use super::QuantError;
use super::half::f32_to_f16;

/// Weights that share a scale.
pub const GROUP: usize = 128;

/// Quantised rows, as they lie in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// Row after row, each `row_bytes(cols)` long.
    pub payload: Vec<u8>,
    /// f16 bits, `[rows][groups(cols)]`.
    pub scales: Vec<u16>,
}

/// Groups in a row of `cols` weights.
pub fn groups(cols: u64) -> u64 {
    cols.div_ceil(GROUP as u64)
}

/// Weights in a row after padding to whole groups; `None` on overflow.
pub fn padded(cols: u64) -> Option<u64> {
    groups(cols).checked_mul(GROUP as u64)
}

/// Scales of `rows` rows; `None` on overflow.
pub fn scale_count(rows: u64, cols: u64) -> Option<u64> {
    rows.checked_mul(groups(cols))
}

/// The integer levels of a format.
pub(super) struct Levels {
    /// The scale is the largest magnitude of a group over this.
    pub divisor: f32,
    pub lowest: f32,
    pub highest: f32,
}

/// Quantises `rows` rows; `pack` appends one padded row of integers to the payload.
pub(super) fn encode(
    src: &[f32],
    rows: usize,
    cols: usize,
    levels: &Levels,
    pack: impl Fn(&[i8], &mut Vec<u8>),
) -> Result<Encoded, QuantError> {
    assert_eq!(Some(src.len()), rows.checked_mul(cols), "weights of a {rows} x {cols} matrix");
    let mut encoded = Encoded { payload: Vec::new(), scales: Vec::new() };
    let mut integers = vec![0i8; cols.div_ceil(GROUP) * GROUP];
    for row in 0..rows {
        let weights = &src[row * cols..][..cols];
        for (group, (weights, integers)) in
            weights.chunks(GROUP).zip(integers.chunks_exact_mut(GROUP)).enumerate()
        {
            if let Some(at) = weights.iter().position(|w| !w.is_finite()) {
                return Err(QuantError::NotFinite { row, col: group * GROUP + at, value: weights[at] });
            }
            let largest = weights.iter().fold(1e-8f32, |max, w| max.max(w.abs()));
            let scale = largest / levels.divisor;
            let stored = f32_to_f16(scale);
            if stored == 0x7c00 {
                return Err(QuantError::ScaleTooLarge { row, group, scale });
            }
            encoded.scales.push(stored);
            // Divided by the unrounded scale, as every v0 writer does.
            for (integer, weight) in integers.iter_mut().zip(weights) {
                *integer = round_even(weight / scale).clamp(levels.lowest, levels.highest) as i8;
            }
        }
        pack(&integers, &mut encoded.payload);
    }
    Ok(encoded)
}

/// Nearest integer, ties to even, for |x| < 2^22: adding 1.5·2^23 makes the FPU round at the units. Vectorises on
/// every CPU, where `round_ties_even` may be a call per weight.
fn round_even(x: f32) -> f32 {
    const UNITS: f32 = 12_582_912.0;
    (x + UNITS) - UNITS
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn round_even_is_round_ties_even(x in -4000.0f32..4000.0, half in -200i32..200) {
            prop_assert_eq!(round_even(x), x.round_ties_even());
            let tie = half as f32 + 0.5;
            prop_assert_eq!(round_even(tie), tie.round_ties_even());
        }
    }

    #[test]
    fn sizes_do_not_overflow() {
        assert_eq!(padded(u64::MAX), None);
        assert_eq!(scale_count(u64::MAX, 129), None);
        assert_eq!(scale_count(3, 129), Some(6));
        assert_eq!(groups(0), 0);
    }
}
