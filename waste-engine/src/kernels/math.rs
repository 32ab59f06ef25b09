//! The one implementation of exp, ln, tanh, sigmoid and softplus: Cody–Waite reduction and the classic Cephes
//! polynomials, branch-free so that loops over them vectorise, the same bits on every machine.
// The constants are given to the digits of their source.
#![allow(clippy::excessive_precision)]

const LN2_HIGH: f32 = 0.693_359_375;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Adding and subtracting it rounds to the nearest whole number.
const ROUND: f32 = 12_582_912.0;

/// `2^n` for whole `n` in −126 ..= 127.
#[inline(always)]
fn power_of_two(n: f32) -> f32 {
    f32::from_bits(((n as i32 + 127) as u32) << 23)
}

/// `e^x`; infinity above 88.7, 0 below −104, NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let bounded = x.clamp(-105.0, 89.0);
    let n = (bounded * std::f32::consts::LOG2_E + ROUND) - ROUND;
    let r = (-n).mul_add(LN2_LOW, (-n).mul_add(LN2_HIGH, bounded));
    let mut p = 1.987_569_1e-4f32;
    p = p.mul_add(r, 1.398_199_9e-3);
    p = p.mul_add(r, 8.333_452e-3);
    p = p.mul_add(r, 4.166_579_6e-2);
    p = p.mul_add(r, 1.666_666_5e-1);
    p = p.mul_add(r, 0.5);
    let y = p.mul_add(r * r, r) + 1.0;
    // Two steps, because the result may be subnormal or the factor beyond the largest exponent.
    let half = ((n * 0.5) + ROUND) - ROUND;
    y * power_of_two(half) * power_of_two(n - half)
}

/// `ln x` for positive, normal `x`.
#[inline(always)]
fn ln(x: f32) -> f32 {
    let bits = x.to_bits() as i32;
    // Split into 2^e · m with m in [√½, √2).
    let e = (bits - 0x3f35_04f3) >> 23;
    let m = f32::from_bits((bits - (e << 23)) as u32);
    let e = e as f32;
    let t = m - 1.0;
    let z = t * t;
    let mut p = 7.037_683_6e-2f32;
    p = p.mul_add(t, -1.151_461e-1);
    p = p.mul_add(t, 1.167_699_9e-1);
    p = p.mul_add(t, -1.242_014_1e-1);
    p = p.mul_add(t, 1.424_932_3e-1);
    p = p.mul_add(t, -1.666_805_8e-1);
    p = p.mul_add(t, 2.000_071_5e-1);
    p = p.mul_add(t, -2.499_999_4e-1);
    p = p.mul_add(t, 3.333_333e-1);
    let y = e.mul_add(LN2_LOW, p * t * z);
    let y = z.mul_add(-0.5, y);
    e.mul_add(LN2_HIGH, t + y)
}

/// `1 / (1 + e^−x)`.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Hyperbolic tangent, accurate relative to its own size near 0.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let a = x.abs();
    let z = x * x;
    let mut p = -5.704_988_7e-3f32;
    p = p.mul_add(z, 2.063_908_9e-2);
    p = p.mul_add(z, -5.373_971_6e-2);
    p = p.mul_add(z, 1.333_144_2e-1);
    p = p.mul_add(z, -3.333_328_2e-1);
    let small = (p * z).mul_add(x, x);
    let large = (1.0 - 2.0 / (exp(a + a) + 1.0)).copysign(x);
    if a < 0.625 { small } else { large }
}

/// `ln(1 + e^x)`, `x` itself above 20.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    let y = exp(x.min(20.0));
    let u = 1.0 + y;
    // The rounding of 1 + y is divided out again.
    let log = if u == 1.0 { y } else { ln(u) * y / (u - 1.0) };
    if x > 20.0 { x } else { log }
}

/// The error function, a ratio of polynomials; ±1 beyond 3.84.
#[inline(always)]
fn erf(x: f32) -> f32 {
    let x = x.clamp(-3.832_506_9, 3.832_506_9);
    let z = x * x;
    let mut p = 2.290_506_5e-4f32;
    p = p.mul_add(z, 3.408_291e-3);
    p = p.mul_add(z, 5.095_569_5e-2);
    p = p.mul_add(z, 1.852_083_2e-1);
    p = p.mul_add(z, std::f32::consts::FRAC_2_SQRT_PI);
    let mut q = -1.179_160_3e-7f32;
    q = q.mul_add(z, 2.354_796_6e-5);
    q = q.mul_add(z, 1.017_962_6e-3);
    q = q.mul_add(z, 1.407_047e-2);
    q = q.mul_add(z, 1.109_850_5e-1);
    q = q.mul_add(z, 4.974_692_5e-1);
    q = q.mul_add(z, 1.0);
    x * p / q
}

/// `x/2 · (1 + erf(x/√2))`.
#[inline(always)]
pub fn gelu_erf(x: f32) -> f32 {
    0.5 * x * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2))
}

/// `x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`.
#[inline(always)]
pub fn gelu_tanh(x: f32) -> f32 {
    const ROOT: f32 = 0.797_884_6;
    let cubed = (0.044_715 * x * x).mul_add(x, x);
    0.5 * x * (1.0 + tanh(ROOT * cubed))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, f: fn(f32) -> f32, truth: fn(f64) -> f64, relative: f64, absolute: f64) {
        for i in -200_000..=200_000 {
            let x = i as f32 * 5e-4;
            let (found, expected) = (f64::from(f(x)), truth(f64::from(x)));
            let error = (found - expected).abs();
            let subnormal = expected.abs() < f64::from(f32::MIN_POSITIVE);
            assert!(
                error <= relative * expected.abs() + absolute || subnormal && error < 2e-44,
                "{name}({x}) = {found}, expected {expected}"
            );
        }
    }

    #[test]
    fn functions_agree_with_f64() {
        fn finite_exp(x: f32) -> f32 {
            exp(x.min(88.0))
        }
        check("exp", finite_exp, |x| x.min(88.0).exp(), 2e-7, 0.0);
        check("sigmoid", sigmoid, |x| 1.0 / (1.0 + (-x).exp()), 4e-7, 1e-38);
        check("tanh", tanh, f64::tanh, 2.5e-7, 0.0);
        check("softplus", softplus, |x| if x > 20.0 { x } else { x.exp().ln_1p() }, 4e-7, 1e-38);
    }

    #[test]
    fn the_ends_of_the_range() {
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan() && tanh(f32::NAN).is_nan() && sigmoid(f32::NAN).is_nan());
        assert_eq!((sigmoid(-200.0), sigmoid(200.0)), (0.0, 1.0));
        assert_eq!((tanh(-100.0), tanh(100.0), tanh(0.0)), (-1.0, 1.0, 0.0));
        assert_eq!((softplus(1e30), softplus(-200.0)), (1e30, 0.0));
    }
}
