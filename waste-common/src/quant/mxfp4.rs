//! MXFP4 (OCP microscaling): E2M1 values, two per byte with the even index in the low nibble, and one E8M0 scale
//! per 32 inputs.

/// Weights that share a scale byte.
pub const BLOCK: usize = 32;

/// The value of each nibble; bit 3 is the sign.
pub const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// 2^(byte−127); byte 0 is 2^-127 like any other, 255 is NaN.
#[inline]
pub fn e8m0_to_f32(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(byte) << 23),
    }
}

/// Packed bytes of a row of `cols` weights.
pub fn row_bytes(cols: usize) -> usize {
    cols.div_ceil(2)
}

/// Scale bytes of a row of `cols` weights.
pub fn row_scales(cols: usize) -> usize {
    cols.div_ceil(BLOCK)
}

/// Decodes one row into `out`, `[cols]`. Exact; bytes 253 and 254 can overflow to infinity.
///
/// # Panics
/// If `packed` or `scales` are too short for `out.len()` weights.
pub fn decode_row(packed: &[u8], scales: &[u8], out: &mut [f32]) {
    assert!(packed.len() >= row_bytes(out.len()), "MXFP4 row of {} weights", out.len());
    for ((out, scale), packed) in out.chunks_mut(BLOCK).zip(scales).zip(packed.chunks(BLOCK / 2)) {
        let scale = e8m0_to_f32(*scale);
        for (pair, byte) in out.chunks_mut(2).zip(packed) {
            pair[0] = E2M1[usize::from(byte & 15)] * scale;
            if let [_, odd] = pair {
                *odd = E2M1[usize::from(byte >> 4)] * scale;
            }
        }
    }
    assert!(scales.len() >= row_scales(out.len()), "MXFP4 scales of {} weights", out.len());
}

/// Encodes one row whose length is a multiple of 32: returns packed bytes and scale bytes. One legal encoder among
/// many: shared exponent floor(log2 of the largest magnitude) − 2, nearest value, ties to the even code; a block
/// that is not finite becomes NaN.
///
/// # Panics
/// If the length of `src` is no multiple of 32.
pub fn encode_row(src: &[f32]) -> (Vec<u8>, Vec<u8>) {
    assert_eq!(src.len() % BLOCK, 0, "MXFP4 rows are whole blocks of 32");
    let mut packed = Vec::with_capacity(src.len() / 2);
    let mut scales = Vec::with_capacity(src.len() / BLOCK);
    for block in src.chunks_exact(BLOCK) {
        if block.iter().any(|w| !w.is_finite()) {
            scales.push(255);
            packed.extend([0; BLOCK / 2]);
            continue;
        }
        // At least 2^-120, so the exponent field is that of a normal number.
        let largest = block.iter().fold(f32::from_bits(7 << 23), |max, w| max.max(w.abs()));
        let scale = (largest.to_bits() >> 23) as u8 - 2;
        scales.push(scale);
        // In f64 the quotient by a power of two is exact, and so are the ties.
        let unit = f64::from(e8m0_to_f32(scale));
        packed.extend(
            block
                .chunks_exact(2)
                .map(|pair| nibble(f64::from(pair[0]) / unit) | nibble(f64::from(pair[1]) / unit) << 4),
        );
    }
    (packed, scales)
}

/// The code nearest to `value`, ties to the even code.
fn nibble(value: f64) -> u8 {
    // Halfway points between neighbours; an odd code loses its ties on both sides.
    const HALFWAY: [f64; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
    let magnitude = value.abs();
    let above = |(code, half): (usize, &f64)| magnitude > *half || (magnitude == *half && code % 2 == 1);
    let code = HALFWAY.iter().enumerate().filter(|at| above(*at)).count() as u8;
    if value < 0.0 && code > 0 { code | 8 } else { code }
}

#[cfg(test)]
mod tests {
    use super::super::golden::{components, f32s, f64s, noise};
    use super::super::half::bf16_to_f32;
    use super::*;
    use proptest::prelude::*;
    use safetensors::SafeTensors;

    fn decode_all(packed: &[u8], scales: &[u8], rows: usize, cols: usize) -> Vec<f32> {
        let mut out = vec![0.0; rows * cols];
        for row in 0..rows {
            decode_row(
                &packed[row * cols / 2..][..cols / 2],
                &scales[row * cols / 32..][..cols / 32],
                &mut out[row * cols..][..cols],
            );
        }
        out
    }

    fn same(found: f32, expected: f32) -> bool {
        found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan())
    }

    #[test]
    fn golden_vectors_decode_exactly() {
        let file = components("mxfp4.safetensors");
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let bytes = |name: &str| tensors.tensor(name).unwrap().data();
        let found = decode_all(bytes("packed"), bytes("scale"), 8, 512);
        let (expected, exact) = (f32s(&tensors, "value_f32"), f64s(&tensors, "value_f64"));
        let bf16: Vec<f32> = bytes("value_bf16")
            .chunks_exact(2)
            .map(|b| bf16_to_f32(u16::from_le_bytes([b[0], b[1]])))
            .collect();
        for i in 0..found.len() {
            assert!(same(found[i], expected[i]), "{i}: {} {}", found[i], expected[i]);
            assert!(same(found[i], bf16[i]), "{i}: {} {}", found[i], bf16[i]);
            assert!(found[i].is_infinite() || same(found[i], exact[i] as f32));
        }
    }

    #[test]
    fn every_scale_byte_is_a_power_of_two_but_the_last() {
        for byte in 0..255u8 {
            assert_eq!(f64::from(e8m0_to_f32(byte)), 2f64.powi(i32::from(byte) - 127));
        }
        let mut out = [0.0; 2];
        decode_row(&[0x10], &[0], &mut out);
        assert_eq!(out.map(f64::from), [0.0, 2f64.powi(-128)]);
        decode_row(&[0xf0], &[255], &mut out);
        assert!(out.iter().all(|v| v.is_nan()));
    }

    #[test]
    fn golden_source_encodes_to_the_same_bytes() {
        let file = components("mxfp4.safetensors");
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let source = f32s(&tensors, "src_f32");
        let (mut packed, mut scales) = (Vec::new(), Vec::new());
        for row in source.chunks_exact(96) {
            let (p, s) = encode_row(row);
            packed.extend(p);
            scales.extend(s);
        }
        assert_eq!(packed, tensors.tensor("src_packed").unwrap().data());
        assert_eq!(scales, tensors.tensor("src_scale").unwrap().data());
        assert_eq!(decode_all(&packed, &scales, 6, 96), f32s(&tensors, "src_value_f32"));
    }

    proptest! {
        #[test]
        fn a_decoded_row_encodes_to_itself(blocks in 1usize..4, seed in any::<u64>(), exponent in -100i32..100) {
            let source: Vec<f32> = noise(seed, blocks * BLOCK).iter().map(|w| w * 2f32.powi(exponent)).collect();
            let (packed, scales) = encode_row(&source);
            let mut once = vec![0.0; source.len()];
            decode_row(&packed, &scales, &mut once);
            let (packed, scales) = encode_row(&once);
            let mut twice = vec![0.0; source.len()];
            decode_row(&packed, &scales, &mut twice);
            prop_assert_eq!(&once, &twice);
            let largest = source.iter().fold(0f32, |m, w| m.max(w.abs()));
            for (a, b) in source.iter().zip(&once) {
                prop_assert!((a - b).abs() <= largest / 4.0);
            }
        }
    }

    #[test]
    fn a_block_that_is_not_finite_is_nan_as_a_whole() {
        let mut source = [1.0f32; 64];
        source[3] = f32::INFINITY;
        let (packed, scales) = encode_row(&source);
        let mut out = [0.0; 64];
        decode_row(&packed, &scales, &mut out);
        assert!(out[..32].iter().all(|v| v.is_nan()) && out[32..] == source[32..]);
    }
}
