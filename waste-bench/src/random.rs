//! Random numbers that are the same for ever, and the same whatever the number of threads.

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of a seed.
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// The sequence of one piece of a whole: independent of the pieces made before it.
    pub fn of_piece(seed: u64, name: &str, piece: u64) -> Self {
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Random(mix(mix(seed ^ hash).wrapping_add(piece)))
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// From -1 to 1.
    pub fn float(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    /// Mean 0, standard deviation 1: the sum of twelve uniform numbers is close enough.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.float()).sum::<f32>() / 2.0
    }

    /// A number below `end`, which is above 0.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(end)) >> 64) as u64
    }

    /// Random bytes, each group of eight changed by `change`.
    pub fn bytes(&mut self, count: usize, change: impl Fn(u64) -> u64) -> Vec<u8> {
        let mut bytes = vec![0; count];
        let mut groups = bytes.chunks_exact_mut(8);
        for group in &mut groups {
            group.copy_from_slice(&change(self.bits()).to_le_bytes());
        }
        let rest = groups.into_remainder();
        let last = change(self.bits()).to_le_bytes();
        rest.copy_from_slice(&last[..rest.len()]);
        bytes
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_their_distributions() {
        let mut random = Random::new(1);
        let normals: Vec<f32> = (0..20_000).map(|_| random.normal()).collect();
        let mean = normals.iter().sum::<f32>() / 20_000.0;
        let variance = normals.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / 20_000.0;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
        assert!((0..1000).all(|_| random.below(7) < 7));
        assert_eq!(random.bytes(13, |x| x).len(), 13);
    }

    #[test]
    fn pieces_differ() {
        let first = |name, piece| Random::of_piece(7, name, piece).bits();
        assert_ne!(first("a", 0), first("a", 1));
        assert_ne!(first("a", 0), first("b", 0));
        assert_eq!(first("a", 3), first("a", 3));
    }
}
