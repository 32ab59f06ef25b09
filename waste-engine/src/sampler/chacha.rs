//! The random numbers of the sampler: ChaCha8, written out so that a seed means the same for ever.
//!
//! State, as sixteen little-endian 32-bit words: the four constants `expand 32-byte k`, eight key words (the
//! seed in the first two, low word first, the rest zero), a 64-bit block counter, a 64-bit nonce of zero. Eight
//! rounds (four column and four diagonal rounds), then the initial state is added. A block gives eight 64-bit
//! numbers, low word first.

const CONSTANTS: [u32; 4] = [0x6170_7865, 0x3320_646e, 0x7962_2d32, 0x6b20_6574];

/// The `index`-th number of a seed, uniform in [0, 1): the upper 53 bits of a 64-bit word times 2^-53.
pub fn uniform(seed: u64, index: u64) -> f64 {
    let mut key = [0; 8];
    (key[0], key[1]) = (seed as u32, (seed >> 32) as u32);
    let words = block(&key, index / 8);
    let first = (index % 8) as usize * 2;
    let number = u64::from(words[first]) | u64::from(words[first + 1]) << 32;
    (number >> 11) as f64 / (1u64 << 53) as f64
}

/// One block of the key stream.
fn block(key: &[u32; 8], counter: u64) -> [u32; 16] {
    let mut initial = [0; 16];
    initial[..4].copy_from_slice(&CONSTANTS);
    initial[4..12].copy_from_slice(key);
    (initial[12], initial[13]) = (counter as u32, (counter >> 32) as u32);
    let mut state = initial;
    for _ in 0..4 {
        for column in 0..4 {
            quarter(&mut state, column, 4 + column, 8 + column, 12 + column);
        }
        for diagonal in 0..4 {
            let [b, c, d] = [1, 2, 3].map(|row| 4 * row + (diagonal + row) % 4);
            quarter(&mut state, diagonal, b, c, d);
        }
    }
    for (word, start) in state.iter_mut().zip(initial) {
        *word = word.wrapping_add(start);
    }
    state
}

fn quarter(state: &mut [u32; 16], a: usize, b: usize, c: usize, d: usize) {
    for (sum, turned, distance) in [(a, d, 16), (c, b, 12), (a, d, 8), (c, b, 7)] {
        let added = if sum == a { b } else { d };
        state[sum] = state[sum].wrapping_add(state[added]);
        state[turned] = (state[turned] ^ state[sum]).rotate_left(distance);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(words: &[u32]) -> String {
        words.iter().flat_map(|word| word.to_le_bytes()).map(|byte| format!("{byte:02x}")).collect()
    }

    /// draft-strombergson-chacha-test-vectors-01, ChaCha8 with a 256-bit key: TC1 (all zero) and TC2 (key 01 00 …).
    #[test]
    fn the_published_blocks() {
        assert_eq!(
            hex(&block(&[0; 8], 0)),
            "3e00ef2f895f40d67f5bb8e81f09a5a12c840ec3ce9a7f3b181be188ef711a1e\
             984ce172b9216f419f445367456d5619314a42a3da86b001387bfdb80e0cfe42"
        );
        assert_eq!(
            hex(&block(&[0; 8], 1)),
            "d2aefa0deaa5c151bf0adb6c01f2a5adc0fd581259f9a2aadcf20f8fd566a26b\
             5032ec38bbc5da98ee0c6f568b872a65a08abf251deb21bb4b56e5d8821e68aa"
        );
        let key = [1, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(hex(&block(&key, 0))[..32], *"cf5ee9a0494aa9613e05d5ed725b804b");
    }

    #[test]
    fn numbers_are_low_word_first_and_cross_blocks() {
        // First eight bytes of the all-zero stream, and of its second block.
        assert_eq!(uniform(0, 0), (0xd640_5f89_2fef_003e_u64 >> 11) as f64 / 2f64.powi(53));
        assert_eq!(uniform(0, 8), (0x51c1_a5ea_0dfa_aed2_u64 >> 11) as f64 / 2f64.powi(53));
        assert_ne!(uniform(1, 0), uniform(1 << 32, 0));
        let mean = (0..4000).map(|index| uniform(7, index)).sum::<f64>() / 4000.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
        assert!((0..4000).all(|index| (0.0..1.0).contains(&uniform(u64::MAX, u64::MAX - index))));
    }
}
