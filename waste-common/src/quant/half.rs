//! IEEE binary16 and bfloat16. The only decoder of the project: a second one, elsewhere, would be the one that
//! flushes subnormals (about 1 % of the trunk scales of a real model are subnormal).

/// The value of an f16 bit pattern; exact for subnormals, infinities and NaNs (payload kept).
#[inline]
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff);
    if magnitude >= 0x7c00 {
        return f32::from_bits(sign | 0x7f80_0000 | ((magnitude & 0x3ff) << 13));
    }
    if magnitude >= 0x400 {
        // Same fraction, exponent rebased from 15 to 127.
        return f32::from_bits(sign | ((magnitude << 13) + (112 << 23)));
    }
    // Zero and subnormals count in units of 2^-24: the product is exact.
    let value = magnitude as f32 * f32::from_bits((127 - 24) << 23);
    f32::from_bits(sign | value.to_bits())
}

/// The f16 bit pattern nearest to `value`, ties to even; overflows to infinity, keeps NaN a NaN.
#[inline]
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | 0x7e00 | (magnitude >> 13 & 0x3ff) as u16;
    }
    // 65520 is halfway between the largest f16 and what would follow it: it and all above round to infinity.
    if magnitude >= 0x477f_f000 {
        return sign | 0x7c00;
    }
    // From 2^-14 on normal: rebase the exponent, then round the 13 dropped bits.
    if magnitude >= 0x3880_0000 {
        let rebased = magnitude - (112 << 23);
        return sign | ((rebased + 0xfff + (rebased >> 13 & 1)) >> 13) as u16;
    }
    // Subnormal: adding 0.5 leaves, in the low bits of the sum, the value in units of 2^-24, rounded by the FPU.
    let sum = f32::from_bits(magnitude) + 0.5;
    sign | (sum.to_bits() - 0x3f00_0000) as u16
}

/// The value of a bf16 bit pattern.
#[inline]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The bf16 bit pattern nearest to `value`, ties to even; overflows to infinity, keeps NaN a NaN.
#[inline]
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// Decodes little-endian f16 bytes. `bytes` holds exactly `2 * out.len()` bytes.
///
/// # Panics
/// If the lengths disagree.
pub fn f16_bytes_to_f32(bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), 2 * out.len(), "f16 bytes");
    for (pair, value) in bytes.chunks_exact(2).zip(out) {
        *value = f16_to_f32(u16::from_le_bytes([pair[0], pair[1]]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition of binary16, in f64 arithmetic.
    fn reference(bits: u16) -> f64 {
        let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
        let exponent = i32::from(bits >> 10 & 31);
        let fraction = f64::from(bits & 0x3ff);
        sign * match exponent {
            0 => fraction * 2f64.powi(-24),
            31 if fraction == 0.0 => f64::INFINITY,
            31 => f64::NAN,
            _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
        }
    }

    #[test]
    fn every_f16_pattern_decodes_exactly_and_encodes_back() {
        for bits in 0..=u16::MAX {
            let value = f16_to_f32(bits);
            let expected = reference(bits);
            if expected.is_nan() {
                assert!(value.is_nan(), "{bits:#06x}");
                assert!(f16_to_f32(f32_to_f16(value)).is_nan());
            } else {
                assert_eq!(f64::from(value).to_bits(), expected.to_bits(), "{bits:#06x}");
                assert_eq!(f32_to_f16(value), bits);
            }
        }
    }

    #[test]
    fn between_two_f16_the_nearest_wins_and_a_tie_goes_to_the_even_one() {
        for low in 0..0x7bffu16 {
            let middle = ((reference(low) + reference(low + 1)) / 2.0) as f32;
            for sign in [0u16, 0x8000] {
                let signed = |v: f32| if sign == 0 { v } else { -v };
                assert_eq!(f32_to_f16(signed(middle)), sign | (low + (low & 1)));
                assert_eq!(f32_to_f16(signed(middle.next_down())), sign | low);
                assert_eq!(f32_to_f16(signed(middle.next_up())), sign | (low + 1));
            }
        }
        assert_eq!(f32_to_f16(65519.996), 0x7bff);
        assert_eq!(f32_to_f16(65520.0), 0x7c00);
        assert_eq!(f32_to_f16(f32::MAX), 0x7c00);
        assert_eq!(f32_to_f16(f32::NEG_INFINITY), 0xfc00);
        assert_eq!(f32_to_f16(f32::from_bits(1)), 0);
    }

    #[test]
    fn every_bf16_pattern_round_trips_and_ties_go_to_even() {
        for bits in 0..=u16::MAX {
            let value = bf16_to_f32(bits);
            assert_eq!(value.to_bits(), u32::from(bits) << 16);
            if value.is_nan() {
                assert!(bf16_to_f32(f32_to_bf16(value)).is_nan());
                continue;
            }
            assert_eq!(f32_to_bf16(value), bits);
            if value.is_finite() {
                let tie = u32::from(bits) << 16 | 0x8000;
                assert_eq!(f32_to_bf16(f32::from_bits(tie)), bits + (bits & 1));
                assert_eq!(f32_to_bf16(f32::from_bits(tie - 1)), bits);
                assert_eq!(f32_to_bf16(f32::from_bits(tie + 1)), bits + 1);
            }
        }
    }
}
