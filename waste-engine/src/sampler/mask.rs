//! Sets of allowed tokens.

/// Which ids of a vocabulary may be chosen, as a bit set: id `i` is bit `i % 32` of word `i / 32`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mask {
    words: Vec<u32>,
    vocab: usize,
}

impl Mask {
    /// Every id of a vocabulary of `vocab` tokens is allowed.
    pub fn all(vocab: usize) -> Mask {
        Mask { words: vec![u32::MAX; vocab.div_ceil(32)], vocab }
    }

    /// No id is allowed.
    pub fn none(vocab: usize) -> Mask {
        Mask { words: vec![0; vocab.div_ceil(32)], vocab }
    }

    /// These ids alone.
    pub fn only(vocab: usize, ids: &[u32]) -> Mask {
        let mut mask = Mask::none(vocab);
        ids.iter().for_each(|id| mask.allow(*id));
        mask
    }

    /// All ids but these. Ids outside the vocabulary are ignored: they cannot be chosen anyway.
    pub fn without(vocab: usize, banned: &[u32]) -> Mask {
        let mut mask = Mask::all(vocab);
        for id in banned {
            mask.ban(*id);
        }
        mask
    }

    /// The number of ids, allowed or not.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Allows an id; outside the vocabulary without effect.
    pub fn allow(&mut self, id: u32) {
        if let Some(word) = self.words.get_mut(id as usize / 32) {
            *word |= 1 << (id % 32);
        }
    }

    /// Bans an id; outside the vocabulary without effect.
    pub fn ban(&mut self, id: u32) {
        if let Some(word) = self.words.get_mut(id as usize / 32) {
            *word &= !(1 << (id % 32));
        }
    }

    /// Whether an id is in the vocabulary and allowed.
    pub fn allows(&self, id: u32) -> bool {
        (id as usize) < self.vocab && self.words[id as usize / 32] >> (id % 32) & 1 == 1
    }

    /// Whether no id is allowed.
    pub fn is_empty(&self) -> bool {
        (0..self.vocab as u32).all(|id| !self.allows(id))
    }

    /// Keeps what `other` allows too. A smaller vocabulary allows nothing beyond its end.
    pub fn intersect(&mut self, other: &Mask) {
        let others = other.words.iter().copied().chain(std::iter::repeat(0));
        for (word, other) in self.words.iter_mut().zip(others) {
            *word &= other;
        }
    }

    /// The bit set, `vocab.div_ceil(32)` words; bits beyond the vocabulary have no meaning.
    pub fn words_mut(&mut self) -> &mut [u32] {
        &mut self.words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_at_the_edges() {
        let mut mask = Mask::without(65, &[0, 31, 32, 64, 65, u32::MAX]);
        let allowed = |mask: &Mask| (0..100).filter(|id| mask.allows(*id)).count();
        assert_eq!(allowed(&mask), 61);
        assert!(!mask.allows(64) && !mask.allows(65) && !mask.allows(u32::MAX) && mask.allows(63));
        mask.allow(64);
        assert!(mask.allows(64));
        mask.intersect(&Mask::without(65, &[1]));
        assert_eq!(allowed(&mask), 61);
        mask.intersect(&Mask::all(30));
        assert_eq!((mask.allows(40), mask.allows(2)), (false, true));
        assert_eq!(allowed(&Mask::none(65)), 0);
        mask.words_mut()[1] = 1;
        assert!(mask.allows(32));
    }
}
