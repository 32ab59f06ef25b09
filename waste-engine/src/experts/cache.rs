//! Which expert lives in which slot: the bookkeeping of the expert cache, without I/O and without threads.
//!
//! A slot is claimed for an expert, filled by a reader, used while pinned, and given to another expert when it is
//! the least frequently used of a small random sample (recency breaks ties). Slots that are pinned, or being
//! filled, are never victims.

/// A layer's expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertId {
    /// Number of the MoE layer among the MoE layers, from 0.
    pub moe: u32,
    /// Number of the expert within the layer.
    pub expert: u32,
}

/// Number of a slot.
pub type Slot = usize;

/// Victims looked at before one is chosen.
const SAMPLE: usize = 16;
const NOWHERE: u32 = u32::MAX;

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Nothing.
    Empty,
    /// Claimed; the read has not ended.
    Filling,
    /// A whole, checked record.
    Ready,
    /// The read failed; the slot is freed by whoever waited for it.
    Failed,
}

#[derive(Clone, Debug)]
struct Entry {
    id: ExpertId,
    phase: Phase,
    pins: u32,
    hits: u32,
    last_used: u64,
    /// Read ahead of a demand, and not demanded yet.
    ahead: bool,
}

/// What became of a demand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demand {
    /// The expert was there.
    Hit(Slot),
    /// A lookahead had asked for it already; this is its first use.
    Ahead(Slot),
    /// The slot is claimed: it must be filled.
    Miss(Slot),
    /// Every slot is pinned or being filled.
    Full,
}

/// The slots and what they hold.
#[derive(Debug)]
pub struct Cache {
    entries: Vec<Entry>,
    /// Slot of each expert, by layer.
    places: Vec<Vec<u32>>,
    empty: Vec<Slot>,
    clock: u64,
    random: u64,
}

impl Cache {
    /// A cache of `slots` slots for layers with so many experts each.
    pub fn new(slots: usize, experts: &[usize]) -> Self {
        let nothing = Entry {
            id: ExpertId { moe: 0, expert: 0 },
            phase: Phase::Empty,
            pins: 0,
            hits: 0,
            last_used: 0,
            ahead: false,
        };
        Cache {
            entries: vec![nothing; slots],
            places: experts.iter().map(|&n| vec![NOWHERE; n]).collect(),
            empty: (0..slots).rev().collect(),
            clock: 0,
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.entries.len()
    }

    /// What a slot is doing.
    pub fn phase(&self, slot: Slot) -> Phase {
        self.entries[slot].phase
    }

    /// The expert a slot was claimed for.
    pub fn expert(&self, slot: Slot) -> ExpertId {
        self.entries[slot].id
    }

    /// Where an expert is or is being read to.
    pub fn find(&self, id: ExpertId) -> Option<Slot> {
        let place = self.places[id.moe as usize][id.expert as usize];
        (place != NOWHERE).then_some(place as usize)
    }

    /// Asks for an expert and pins its slot.
    pub fn demand(&mut self, id: ExpertId) -> Demand {
        self.clock += 1;
        if let Some(slot) = self.find(id) {
            let entry = &mut self.entries[slot];
            entry.pins += 1;
            entry.hits = entry.hits.saturating_add(1);
            entry.last_used = self.clock;
            return if std::mem::take(&mut entry.ahead) { Demand::Ahead(slot) } else { Demand::Hit(slot) };
        }
        match self.claim(id) {
            Some(slot) => {
                self.entries[slot].pins = 1;
                Demand::Miss(slot)
            }
            None => Demand::Full,
        }
    }

    /// Claims a slot for an expert that may be needed soon; `None` if it is there already or no slot is free.
    pub fn ahead(&mut self, id: ExpertId) -> Option<Slot> {
        if self.find(id).is_some() {
            return None;
        }
        self.clock += 1;
        let slot = self.claim(id)?;
        self.entries[slot].ahead = true;
        Some(slot)
    }

    /// Ends the filling of a slot.
    pub fn filled(&mut self, slot: Slot, whole: bool) {
        self.entries[slot].phase = if whole { Phase::Ready } else { Phase::Failed };
        if !whole && self.entries[slot].pins == 0 {
            self.free(slot);
        }
    }

    /// Gives one pin back; a failed slot is freed with its last pin.
    pub fn unpin(&mut self, slot: Slot) {
        let entry = &mut self.entries[slot];
        entry.pins = entry.pins.saturating_sub(1);
        if entry.pins == 0 && entry.phase == Phase::Failed {
            self.free(slot);
        }
    }

    fn free(&mut self, slot: Slot) {
        let id = self.entries[slot].id;
        self.places[id.moe as usize][id.expert as usize] = NOWHERE;
        self.entries[slot].phase = Phase::Empty;
        self.empty.push(slot);
    }

    fn claim(&mut self, id: ExpertId) -> Option<Slot> {
        let slot = match self.empty.pop() {
            Some(slot) => slot,
            None => {
                let slot = self.victim()?;
                let old = self.entries[slot].id;
                self.places[old.moe as usize][old.expert as usize] = NOWHERE;
                slot
            }
        };
        self.places[id.moe as usize][id.expert as usize] = slot as u32;
        self.entries[slot] =
            Entry { id, phase: Phase::Filling, pins: 0, hits: 1, last_used: self.clock, ahead: false };
        Some(slot)
    }

    fn victim(&mut self) -> Option<Slot> {
        let sampled: [Slot; SAMPLE] = std::array::from_fn(|_| self.random_slot());
        self.best_victim(sampled.into_iter()).or_else(|| self.best_victim(0..self.entries.len()))
    }

    fn best_victim(&self, slots: impl Iterator<Item = Slot>) -> Option<Slot> {
        slots
            .filter(|&slot| self.entries[slot].phase == Phase::Ready && self.entries[slot].pins == 0)
            .min_by_key(|&slot| (self.entries[slot].hits, self.entries[slot].last_used))
    }

    /// xorshift64*: only speed depends on it, never a result.
    fn random_slot(&mut self) -> Slot {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        let draw = self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
        ((draw * self.entries.len() as u64) >> 32) as Slot
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id(expert: u32) -> ExpertId {
        ExpertId { moe: 0, expert }
    }

    fn fill(cache: &mut Cache, expert: u32) -> Slot {
        let Demand::Miss(slot) = cache.demand(id(expert)) else { panic!("expert {expert} was no miss") };
        cache.filled(slot, true);
        cache.unpin(slot);
        slot
    }

    #[test]
    fn the_least_used_goes_first() {
        let mut cache = Cache::new(2, &[8]);
        fill(&mut cache, 0);
        let rare = fill(&mut cache, 1);
        let Demand::Hit(slot) = cache.demand(id(0)) else { panic!() };
        cache.unpin(slot);
        assert_eq!(fill(&mut cache, 2), rare);
        assert!(cache.find(id(0)).is_some() && cache.find(id(1)).is_none());
    }

    #[test]
    fn pinned_and_filling_slots_are_never_victims() {
        let mut cache = Cache::new(2, &[8]);
        let Demand::Miss(a) = cache.demand(id(0)) else { panic!() };
        let b = cache.ahead(id(1)).unwrap();
        assert_eq!(cache.demand(id(2)), Demand::Full);
        cache.filled(a, true);
        assert_eq!(cache.demand(id(2)), Demand::Full, "still pinned");
        cache.filled(b, true);
        assert_eq!(cache.demand(id(2)), Demand::Miss(b));
    }

    #[test]
    fn a_read_ahead_is_no_plain_hit() {
        let mut cache = Cache::new(2, &[8]);
        let slot = cache.ahead(id(3)).unwrap();
        assert_eq!(cache.ahead(id(3)), None);
        assert_eq!(cache.demand(id(3)), Demand::Ahead(slot));
        assert_eq!(cache.demand(id(3)), Demand::Hit(slot));
    }

    #[test]
    fn a_failed_read_frees_its_slot() {
        let mut cache = Cache::new(1, &[8]);
        let Demand::Miss(slot) = cache.demand(id(0)) else { panic!() };
        cache.filled(slot, false);
        assert_eq!(cache.phase(slot), Phase::Failed);
        cache.unpin(slot);
        assert_eq!(cache.find(id(0)), None);
        fill(&mut cache, 1);
        let ahead = cache.ahead(id(2)).unwrap();
        cache.filled(ahead, false);
        assert_eq!(cache.find(id(2)), None);
    }

    proptest! {
        #[test]
        fn experts_and_slots_stay_one_to_one(
            slots in 1usize..12,
            steps in proptest::collection::vec((0u32..3, 0u32..10, 0u8..4), 1..400),
        ) {
            let mut cache = Cache::new(slots, &[10, 10, 10]);
            let mut pinned: Vec<Slot> = Vec::new();
            let mut filling: Vec<Slot> = Vec::new();
            for (moe, expert, action) in steps {
                let id = ExpertId { moe, expert };
                match action {
                    0 => match cache.demand(id) {
                        Demand::Miss(slot) => { filling.push(slot); pinned.push(slot); }
                        Demand::Hit(slot) | Demand::Ahead(slot) => pinned.push(slot),
                        Demand::Full => prop_assert!((0..slots).all(|s| pinned.contains(&s) || filling.contains(&s))),
                    },
                    1 => if let Some(slot) = cache.ahead(id) { filling.push(slot) },
                    2 => if let Some(slot) = filling.pop() { cache.filled(slot, expert % 4 != 0) },
                    _ => if let Some(slot) = pinned.pop() { cache.unpin(slot) },
                }
                for slot in 0..slots {
                    if cache.phase(slot) != Phase::Empty {
                        prop_assert_eq!(cache.find(cache.expert(slot)), Some(slot));
                    }
                }
                for &slot in &pinned {
                    prop_assert!(cache.phase(slot) != Phase::Empty);
                }
            }
        }
    }
}
