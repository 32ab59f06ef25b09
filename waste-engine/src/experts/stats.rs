//! What the expert store has done.

use serde::Serialize;

/// Guesses of a lookahead that are told apart, the surest first; the last entry is for all beyond.
pub const RANKS: usize = 16;

/// How good a lookahead's guesses of one rank are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Rank {
    /// Experts guessed whose layer then had its turn.
    pub guessed: u64,
    /// Of these, the router chose so many.
    pub right: u64,
    /// Records read ahead because of such a guess: those guessed that were not in the cache.
    pub read: u64,
    /// Of these, so many were demanded before they were evicted.
    pub used: u64,
}

impl std::ops::AddAssign for Rank {
    fn add_assign(&mut self, other: Rank) {
        self.guessed += other.guessed;
        self.right += other.right;
        self.read += other.read;
        self.used += other.used;
    }
}

/// Counters of an expert store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadStats {
    /// Demands met by the cache.
    pub hits: u64,
    /// Demands met by a record that a lookahead had asked for.
    pub ahead_hits: u64,
    /// Demands that had to be read.
    pub misses: u64,
    /// Records read ahead of a demand.
    pub ahead_reads: u64,
    /// Records read to warm the cache.
    pub warm_reads: u64,
    /// Bytes read from the source.
    pub bytes_read: u64,
    /// Nanoseconds the consumer waited for reads.
    pub stall_nanos: u64,
    /// The lookahead's guesses, by rank.
    pub ranks: [Rank; RANKS],
}

impl ReadStats {
    /// What was done since these counters stood as they did `before`.
    #[must_use]
    pub fn since(&self, before: &ReadStats) -> ReadStats {
        ReadStats {
            hits: self.hits - before.hits,
            ahead_hits: self.ahead_hits - before.ahead_hits,
            misses: self.misses - before.misses,
            ahead_reads: self.ahead_reads - before.ahead_reads,
            warm_reads: self.warm_reads - before.warm_reads,
            bytes_read: self.bytes_read - before.bytes_read,
            stall_nanos: self.stall_nanos - before.stall_nanos,
            ranks: std::array::from_fn(|rank| {
                let (now, then) = (self.ranks[rank], before.ranks[rank]);
                Rank {
                    guessed: now.guessed - then.guessed,
                    right: now.right - then.right,
                    read: now.read - then.read,
                    used: now.used - then.used,
                }
            }),
        }
    }

    /// The ranks that a lookahead has guessed.
    pub fn guessed_ranks(&self) -> &[Rank] {
        let used = self.ranks.iter().rposition(|rank| *rank != Rank::default());
        &self.ranks[..used.map_or(0, |last| last + 1)]
    }

    /// Counters of the rank of a guess.
    pub(super) fn rank(&mut self, rank: usize) -> &mut Rank {
        &mut self.ranks[rank.min(RANKS - 1)]
    }
}
