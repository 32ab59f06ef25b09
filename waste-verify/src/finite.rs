//! Looking for infinities and NaNs in stored numbers, whatever pieces they come in.

/// The number of the first f16 that is not finite, little-endian.
pub(crate) fn first_f16(bytes: &[u8]) -> Option<usize> {
    bytes.chunks_exact(2).position(|pair| pair[1] & 0x7c == 0x7c)
}

/// The width of the numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    F16,
    F32,
}

/// Watches a stream of numbers that may be cut anywhere.
#[derive(Debug)]
pub(crate) struct Watch {
    width: Width,
    /// Bytes seen, and the last of them.
    seen: u64,
    last: u8,
    first: Option<u64>,
}

impl Watch {
    pub fn new(width: Width) -> Self {
        Watch { width, seen: 0, last: 0, first: None }
    }

    /// Takes the next bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.first.is_none() {
            let size: u64 = if self.width == Width::F16 { 2 } else { 4 };
            // The byte with the sign ends each number; the exponent lies in it and, in an f32, in the top bit before.
            let start = (size - 1 - self.seen % size) as usize;
            let bad = |at: usize| match self.width {
                Width::F16 => bytes[at] & 0x7c == 0x7c,
                Width::F32 => {
                    let before = if at == 0 { self.last } else { bytes[at - 1] };
                    bytes[at] & 0x7f == 0x7f && before & 0x80 != 0
                }
            };
            let found = (start..bytes.len()).step_by(size as usize).find(|at| bad(*at));
            self.first = found.map(|at| (self.seen + at as u64) / size);
        }
        self.seen += bytes.len() as u64;
        self.last = bytes.last().copied().unwrap_or(self.last);
    }

    /// The number of the first value that is not finite.
    pub fn first(&self) -> Option<u64> {
        self.first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infinities_and_nans_are_found_however_the_stream_is_cut() {
        for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let mut values = [1.5f32, -f32::MAX, f32::MIN_POSITIVE, 0.0, -0.0, 1e-40];
            let fine: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            values[4] = bad;
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            for cut in 1..9 {
                let first = |bytes: &[u8]| {
                    let mut watch = Watch::new(Width::F32);
                    bytes.chunks(cut).for_each(|piece| watch.push(piece));
                    watch.first()
                };
                assert_eq!((first(&fine), first(&bytes)), (None, Some(4)), "{cut}");
            }
        }
    }

    #[test]
    fn every_f16_is_judged_right() {
        for bits in 0..=u16::MAX {
            let bad = bits & 0x7c00 == 0x7c00;
            let mut watch = Watch::new(Width::F16);
            for byte in [0, 0].into_iter().chain(bits.to_le_bytes()) {
                watch.push(&[byte]);
            }
            assert_eq!(watch.first(), bad.then_some(1));
            assert_eq!(first_f16(&bits.to_le_bytes()), bad.then_some(0));
        }
    }
}
