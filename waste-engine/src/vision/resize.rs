//! Pillow's bicubic resize of 8-bit images, to the bit.

use super::decode::Bitmap;

/// Fraction bits of a tap.
const BITS: u32 = 22;

/// The source samples of one output sample, weighted.
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

/// Resizes to `width` x `height`: across first, rounded to bytes, then down; a pass that changes nothing is skipped.
/// Colours of an image with alpha are weighted by it.
pub fn resize(mut image: Bitmap, width: usize, height: usize) -> Bitmap {
    if (image.width, image.height) == (width, height) {
        return image;
    }
    let alpha = image.channels == 4;
    if alpha {
        image.data.chunks_exact_mut(4).for_each(premultiply);
    }
    if image.width != width {
        image = if alpha { across::<4>(&image, width) } else { across::<3>(&image, width) };
    }
    if image.height != height {
        image = down(&image, height);
    }
    if alpha {
        image.data.chunks_exact_mut(4).for_each(divide);
    }
    image
}

fn premultiply(pixel: &mut [u8]) {
    let alpha = u32::from(pixel[3]);
    for c in &mut pixel[..3] {
        let t = u32::from(*c) * alpha + 128;
        *c = (((t >> 8) + t) >> 8) as u8;
    }
}

fn divide(pixel: &mut [u8]) {
    let alpha = u32::from(pixel[3]);
    if alpha == 0 || alpha == 255 {
        return;
    }
    for c in &mut pixel[..3] {
        *c = (255 * u32::from(*c) / alpha).min(255) as u8;
    }
}

fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

/// Taps of every output sample. The positive weights of a sample sum to less than 2, so a sum of 255 times the
/// weights fits 32 bits.
fn taps(from: usize, to: usize) -> Vec<Taps> {
    let scale = from as f64 / to as f64;
    let stretch = scale.max(1.0);
    let support = 2.0 * stretch;
    let tap = |x: usize| {
        let centre = (x as f64 + 0.5) * scale;
        let first = (centre - support + 0.5).max(0.0) as usize;
        let end = ((centre + support + 0.5) as usize).min(from);
        let weight = |i: usize| cubic((i as f64 - centre + 0.5) * (1.0 / stretch));
        let sum: f64 = (first..end).map(weight).sum();
        let whole = |w: f64| {
            let w = if sum == 0.0 { w } else { w / sum } * f64::from(1u32 << BITS);
            (w + 0.5f64.copysign(w)) as i32
        };
        Taps { first, weights: (first..end).map(weight).map(whole).collect() }
    };
    (0..to).map(tap).collect()
}

fn byte(sum: i32) -> u8 {
    (sum >> BITS).clamp(0, 255) as u8
}

fn across<const C: usize>(image: &Bitmap, width: usize) -> Bitmap {
    let taps = taps(image.width, width);
    let mut data = vec![0; width * image.height * C];
    let rows = image.data.chunks_exact(image.width * C).zip(data.chunks_exact_mut(width * C));
    for (row, out) in rows {
        for (taps, out) in taps.iter().zip(out.chunks_exact_mut(C)) {
            let mut sums = [1i32 << (BITS - 1); C];
            for (pixel, weight) in row[taps.first * C..].chunks_exact(C).zip(&taps.weights) {
                for c in 0..C {
                    sums[c] += i32::from(pixel[c]) * weight;
                }
            }
            for c in 0..C {
                out[c] = byte(sums[c]);
            }
        }
    }
    Bitmap { width, data, ..*image }
}

fn down(image: &Bitmap, height: usize) -> Bitmap {
    let stride = image.width * image.channels;
    let mut data = vec![0; height * stride];
    let mut sums = vec![0i32; stride];
    for (taps, out) in taps(image.height, height).iter().zip(data.chunks_exact_mut(stride)) {
        sums.fill(1 << (BITS - 1));
        for (row, weight) in image.data[taps.first * stride..].chunks_exact(stride).zip(&taps.weights) {
            for (sum, &value) in sums.iter_mut().zip(row) {
                *sum += i32::from(value) * weight;
            }
        }
        for (out, &sum) in out.iter_mut().zip(&sums) {
            *out = byte(sum);
        }
    }
    Bitmap { height, data, ..*image }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_taps_fit_and_are_one() {
        for from in (1..200).chain([255, 1023, 4099, 16_384]) {
            for to in (1..=from).step_by(1 + from / 60) {
                for taps in taps(from, to) {
                    assert!(!taps.weights.is_empty() && taps.first + taps.weights.len() <= from);
                    let positive: i64 = taps.weights.iter().filter(|&&w| w > 0).map(|&w| i64::from(w)).sum();
                    assert!(255 * positive + (1 << 21) < i64::from(i32::MAX), "{from} to {to}");
                    let sum: i64 = taps.weights.iter().map(|&w| i64::from(w)).sum();
                    assert!((sum - (1 << BITS)).abs() <= taps.weights.len() as i64, "{from} to {to}");
                }
            }
        }
    }

    #[test]
    fn one_colour_stays_one_colour() {
        for channels in [3, 4] {
            let pixel = [200, 3, 255, 255];
            let (width, height) = (61, 47);
            let data = pixel[..channels].iter().copied().cycle().take(channels * width * height).collect();
            let small = resize(Bitmap { width, height, channels, data }, 17, 5);
            assert_eq!((small.width, small.height, small.data.len()), (17, 5, 17 * 5 * channels));
            assert!(small.data.chunks_exact(channels).all(|p| p == &pixel[..channels]));
        }
    }
}
