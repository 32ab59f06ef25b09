//! The generator behind every random choice of a conversion: SplitMix64, so that a container is the same for ever.

/// SplitMix64 (Steele, Lea, Flood 2014): state += 0x9e3779b97f4a7c15, then two xor-shift-multiply rounds.
#[derive(Debug, Clone)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// A stream of its own for each sequence of numbers, such as (seed, layer, kind).
    pub fn of(numbers: &[u64]) -> Self {
        let mut state = 0;
        for number in numbers {
            state = SplitMix64(state ^ number).draw();
        }
        SplitMix64(state)
    }

    /// The next 64 bits.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound` (which is not 0), by the high half of a product.
    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(bound)) >> 64) as u64
    }

    /// `count` numbers below `n`, ascending and distinct: one drawn from each of `count` equal strata. All of
    /// `0..n` if that is fewer.
    pub fn spread(&mut self, n: usize, count: usize) -> Vec<usize> {
        if count >= n {
            return (0..n).collect();
        }
        let edge = |i: usize| (i as u128 * n as u128 / count as u128) as u64;
        (0..count)
            .map(|i| {
                let (start, end) = (edge(i), edge(i + 1));
                (start + self.below(end - start)) as usize
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_published_sequence() {
        let mut random = SplitMix64(1234567);
        let drawn: Vec<u64> = (0..3).map(|_| random.draw()).collect();
        assert_eq!(drawn, [6457827717110365317, 3203168211198807973, 9817491932198370423]);
    }

    #[test]
    fn streams_differ() {
        let first = |numbers: &[u64]| SplitMix64::of(numbers).draw();
        assert_ne!(first(&[1, 2, 3]), first(&[1, 3, 2]));
        assert_ne!(first(&[1, 0]), first(&[1]));
    }

    proptest! {
        #[test]
        fn spread_is_ascending_distinct_and_in_range(n in 0usize..5000, count in 0usize..6000, seed: u64) {
            let picked = SplitMix64(seed).spread(n, count);
            prop_assert_eq!(picked.len(), count.min(n));
            prop_assert!(picked.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(picked.last().is_none_or(|last| *last < n));
        }
    }
}
