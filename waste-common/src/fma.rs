//! A fused multiply-add that rounds once, for a system whose library does not.
//!
//! Without FMA instructions the compiler calls the C library's `fmaf`. MinGW's computes in x87 precision and rounds
//! twice, which would give the portable kernels, of the engine too, other bits on Windows than everywhere else.
#![allow(unsafe_code)]

/// `a · b + c`, rounded once.
///
/// The product of two f32 is exact in f64; the sum is rounded to odd there (an inexact result gets its last bit
/// set), so that rounding it to f32 afterwards cannot go wrong twice.
#[cfg_attr(not(all(windows, target_env = "gnu")), cfg(test))]
fn fused(a: f32, b: f32, c: f32) -> f32 {
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = product + c;
    let c_part = sum - product;
    let error = (product - (sum - c_part)) + (c - c_part);
    let bits = sum.to_bits();
    // Neither for an exact sum nor for one that is no number.
    if error.abs() > 0.0 && bits & 1 == 0 {
        // The truth lies beyond the sum, or short of it, as seen from zero.
        let away = (error > 0.0) == (sum > 0.0);
        return f64::from_bits(if away { bits + 1 } else { bits - 1 }) as f32;
    }
    sum as f32
}

/// Takes the place of the C library's function of this name.
// SAFETY: the name and the signature are those of C's fmaf, and so is the result.
#[cfg(all(windows, target_env = "gnu"))]
#[unsafe(no_mangle)]
extern "C" fn fmaf(a: f32, b: f32, c: f32) -> f32 {
    fused(a, b, c)
}

#[cfg(test)]
mod tests {
    use super::fused;

    #[test]
    fn rounds_once() {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 32) as u32
        };
        let same = |a: f32, b: f32, c: f32| {
            let (found, expected) = (fused(a, b, c), a.mul_add(b, c));
            assert!(
                found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(),
                "{a:e} {b:e} {c:e}"
            );
        };
        for _ in 0..400_000 {
            // Any bits; then numbers of like size, whose sums cancel.
            same(f32::from_bits(next()), f32::from_bits(next()), f32::from_bits(next()));
            let near = |bits: u32| f32::from_bits(bits & 0x807f_ffff | 0x3f80_0000);
            let (a, b) = (near(next()), near(next()));
            same(a, b, near(next()));
            same(a, b, -(a * b));
            same(a, b * 1e-38, near(next()) * 1e-38);
            same(a, b, f32::from_bits(next() & 0x807f_ffff | 0x3300_0000));
        }
        for special in
            [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE, 1e-45]
        {
            for other in [0.0, -0.0, 1.0, -1.0, f32::INFINITY, f32::MAX, 1e-45] {
                same(special, other, -special);
                same(special, other, other);
                same(other, other, special);
            }
        }
    }
}
