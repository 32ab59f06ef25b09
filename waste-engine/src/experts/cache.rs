//! Which expert lives in which slot: the bookkeeping of the expert cache, without I/O and without threads.
//!
//! A slot is claimed for an expert, filled by a reader, used while pinned, and given to another expert when it is
//! worth the least of a small random sample. Slots that are pinned, or being filled, are never victims.
//!
//! An expert's worth is how often it was used, uses of long ago counting less: a slow average over some hundred tokens
//! and a quick one over the last few (`QUICK` of it). It is remembered of all experts, cached or not, so that one that
//! comes back need not begin anew. Layers come round in order, so what the layers just done hold is needed last and
//! counts less than what the layers next in turn hold (`TURN`). On recorded routes this keeps more than least
//! recently used, least frequently used and their mixtures at every size; `waste-bench cache` prints how much.

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
const SAMPLE: usize = 64;
/// Tokens after which a use counts half, in the slow average and in the quick one.
const HALF_LIVES: [f64; 2] = [64.0, 3.0];
/// Weight of the quick average.
const QUICK: f32 = 8.0;
/// Worth of what is needed a whole round of layers later, against what is needed at once.
const TURN: f64 = 0.75;
/// Tokens after which an expert's age is no longer told apart.
const AGES: usize = 1024;
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
    /// Read ahead of a demand, and not demanded yet.
    ahead: Option<Ahead>,
}

/// A guess that an expert will be demanded.
#[derive(Clone, Copy, Debug)]
struct Ahead {
    /// How sure the guess was: 0 for the surest.
    rank: usize,
    /// The token that is expected to demand it.
    token: u32,
}

/// What is known of an expert, cached or not.
#[derive(Clone, Copy, Debug)]
struct Known {
    slot: u32,
    /// Token of the last use.
    used: u32,
    /// Decayed uses as of then: slow, quick.
    uses: [f32; 2],
    /// All uses.
    demands: u32,
}

/// What became of a demand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demand {
    /// The expert was there.
    Hit(Slot),
    /// A lookahead had asked for it already, as its guess of this rank; this is its first use.
    Ahead(Slot, usize),
    /// The slot is claimed: it must be filled.
    Miss(Slot),
    /// Every slot is pinned or being filled.
    Full,
}

/// The slots and what they hold.
#[derive(Debug)]
pub struct Cache {
    entries: Vec<Entry>,
    /// By layer.
    known: Vec<Vec<Known>>,
    empty: Vec<Slot>,
    /// Tokens begun, and the layer whose turn it is.
    token: u32,
    moe: usize,
    /// What is left of a use after so many tokens: slow, quick.
    decay: Vec<[f32; 2]>,
    /// Weight of what is needed so many layers later.
    turn: Vec<f32>,
    random: u64,
}

impl Cache {
    /// A cache of `slots` slots for layers with so many experts each.
    pub fn new(slots: usize, experts: &[usize]) -> Self {
        let nothing = Entry { id: ExpertId { moe: 0, expert: 0 }, phase: Phase::Empty, pins: 0, ahead: None };
        let unknown = Known { slot: NOWHERE, used: 0, uses: [0.0; 2], demands: 0 };
        let layers = experts.len();
        let left = |half_life: f64, age: usize| (-(age as f64) / half_life).exp2() as f32;
        Cache {
            entries: vec![nothing; slots],
            known: experts.iter().map(|&n| vec![unknown; n]).collect(),
            empty: (0..slots).rev().collect(),
            token: 0,
            moe: layers,
            decay: (0..AGES).map(|age| HALF_LIVES.map(|half_life| left(half_life, age))).collect(),
            turn: (0..=layers).map(|later| TURN.powf(later as f64 / layers as f64) as f32).collect(),
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
        let place = self.known(id).slot;
        (place != NOWHERE).then_some(place as usize)
    }

    /// It is a layer's turn; layers come in order, and begin again with the next token.
    pub fn begin(&mut self, moe: u32) {
        let moe = moe as usize;
        self.token = self.token.wrapping_add(u32::from(moe <= self.moe));
        self.moe = moe;
    }

    /// Asks for an expert and pins its slot.
    pub fn demand(&mut self, id: ExpertId) -> Demand {
        let found = self.find(id);
        let demand = match found {
            Some(slot) => {
                let entry = &mut self.entries[slot];
                entry.pins += 1;
                entry.ahead.take().map_or(Demand::Hit(slot), |ahead| Demand::Ahead(slot, ahead.rank))
            }
            None => match self.claim(id) {
                Some(slot) => {
                    self.entries[slot].pins = 1;
                    Demand::Miss(slot)
                }
                // It will be asked for again, so this was no use yet.
                None => return Demand::Full,
            },
        };
        self.count(id);
        demand
    }

    /// Claims a slot for an expert that may be needed when its layer's turn comes; `None` if it is there already or
    /// no slot is free.
    pub fn ahead(&mut self, id: ExpertId, rank: usize) -> Option<Slot> {
        if self.find(id).is_some() {
            return None;
        }
        let slot = self.claim(id)?;
        let token = self.token.wrapping_add(u32::from(id.moe as usize <= self.moe));
        self.entries[slot].ahead = Some(Ahead { rank, token });
        Some(slot)
    }

    /// Claims an empty slot for an expert that nobody has asked for; `None` if it is there already or no slot is
    /// empty.
    pub fn warm(&mut self, id: ExpertId) -> Option<Slot> {
        if self.find(id).is_some() || self.is_full() {
            return None;
        }
        self.claim(id)
    }

    /// Whether every slot is claimed.
    pub fn is_full(&self) -> bool {
        self.empty.is_empty()
    }

    /// Tokens begun.
    pub fn tokens(&self) -> u32 {
        self.token
    }

    /// How often each expert was demanded, if it ever was.
    pub fn uses(&self) -> impl Iterator<Item = (ExpertId, u32)> + '_ {
        (0u32..).zip(&self.known).flat_map(|(moe, known)| {
            let uses =
                (0u32..).zip(known).map(move |(expert, known)| (ExpertId { moe, expert }, known.demands));
            uses.filter(|&(_, uses)| uses > 0)
        })
    }

    /// Says how often an expert was used before this cache was, as a share of all tokens.
    pub fn recall(&mut self, id: ExpertId, share: f32) {
        // The slow average of an expert that every token uses.
        let always = 1.0 / (1.0 - self.decay[1][0]);
        self.known[id.moe as usize][id.expert as usize].uses[0] = share * always;
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

    fn known(&self, id: ExpertId) -> &Known {
        &self.known[id.moe as usize][id.expert as usize]
    }

    fn place(&mut self, id: ExpertId, slot: u32) {
        self.known[id.moe as usize][id.expert as usize].slot = slot;
    }

    fn free(&mut self, slot: Slot) {
        self.place(self.entries[slot].id, NOWHERE);
        self.entries[slot].phase = Phase::Empty;
        self.empty.push(slot);
    }

    fn claim(&mut self, id: ExpertId) -> Option<Slot> {
        let slot = match self.empty.pop() {
            Some(slot) => slot,
            None => {
                let slot = self.victim()?;
                self.place(self.entries[slot].id, NOWHERE);
                slot
            }
        };
        self.place(id, slot as u32);
        self.entries[slot] = Entry { id, phase: Phase::Filling, pins: 0, ahead: None };
        Some(slot)
    }

    /// What is left of an expert's uses: slow, quick.
    fn left(&self, known: &Known) -> [f32; 2] {
        let age = self.token.wrapping_sub(known.used) as usize;
        let decay = self.decay[age.min(AGES - 1)];
        [known.uses[0] * decay[0], known.uses[1] * decay[1]]
    }

    /// Counts a use.
    fn count(&mut self, id: ExpertId) {
        let [slow, quick] = self.left(self.known(id));
        let token = self.token;
        let known = &mut self.known[id.moe as usize][id.expert as usize];
        known.used = token;
        known.uses = [slow + 1.0, quick + 1.0];
        known.demands = known.demands.saturating_add(1);
    }

    /// What is lost with a slot's expert.
    fn worth(&self, slot: Slot) -> f32 {
        let Entry { id, ahead, .. } = &self.entries[slot];
        let moe = id.moe as usize;
        if ahead.is_some_and(|ahead| (ahead.token, moe) >= (self.token, self.moe)) {
            return f32::INFINITY;
        }
        let [slow, quick] = self.left(self.known(*id));
        let later = if moe > self.moe { moe - self.moe } else { moe + self.known.len() - self.moe };
        (slow + QUICK * quick) * self.turn[later]
    }

    fn victim(&mut self) -> Option<Slot> {
        if self.slots() <= SAMPLE {
            return self.least(0..self.slots());
        }
        let sampled: [Slot; SAMPLE] = std::array::from_fn(|_| self.random_slot());
        self.least(sampled.into_iter()).or_else(|| self.least(0..self.slots()))
    }

    /// The slot worth least of those that may be taken.
    fn least(&self, slots: impl Iterator<Item = Slot>) -> Option<Slot> {
        slots
            .filter(|&slot| self.entries[slot].phase == Phase::Ready && self.entries[slot].pins == 0)
            .map(|slot| (self.worth(slot), slot))
            .min_by(|a, b| a.0.total_cmp(&b.0))
            .map(|(_, slot)| slot)
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

    /// The uses of an expert that was evicted count when it comes back, and uses of long ago count less.
    #[test]
    fn uses_are_remembered_and_fade() {
        let mut cache = Cache::new(2, &[8]);
        let tokens = |cache: &mut Cache, experts: &[u32]| {
            for &expert in experts {
                cache.begin(0);
                match cache.demand(id(expert)) {
                    Demand::Miss(slot) => {
                        cache.filled(slot, true);
                        cache.unpin(slot);
                    }
                    Demand::Hit(slot) => cache.unpin(slot),
                    other => panic!("{other:?}"),
                }
            }
        };
        tokens(&mut cache, &[0, 0, 0, 1, 1, 1, 1, 2, 0, 3]);
        // 0 was evicted for 2, came back, and is worth more than 2, though used as long ago as 2 when 3 came.
        assert!(cache.find(id(0)).is_none() != cache.find(id(1)).is_none());
        assert!(cache.find(id(2)).is_none());
        // Whatever was, what is used now for long enough stays.
        tokens(&mut cache, &[4, 5].repeat(200));
        assert!(cache.find(id(4)).is_some() && cache.find(id(5)).is_some());
    }

    #[test]
    fn what_is_needed_last_goes_first() {
        let mut cache = Cache::new(3, &[8, 8, 8]);
        for moe in 0..3 {
            cache.begin(moe);
            let Demand::Miss(slot) = cache.demand(ExpertId { moe, expert: 0 }) else { panic!() };
            cache.filled(slot, true);
            cache.unpin(slot);
        }
        cache.begin(0);
        let Demand::Miss(slot) = cache.demand(ExpertId { moe: 0, expert: 1 }) else { panic!() };
        assert!(cache.find(ExpertId { moe: 0, expert: 0 }).is_none());
        cache.filled(slot, true);
        cache.unpin(slot);
        cache.begin(1);
        // Of layer 0 and layer 1 itself, not of layer 2, which comes next; the older use goes.
        let Demand::Miss(_) = cache.demand(ExpertId { moe: 1, expert: 1 }) else { panic!() };
        assert!(cache.find(ExpertId { moe: 2, expert: 0 }).is_some());
        assert!(cache.find(ExpertId { moe: 1, expert: 0 }).is_none());
    }

    /// A guess stays until its layer has had its turn, and no longer.
    #[test]
    fn what_was_read_ahead_waits_for_its_turn() {
        let mut cache = Cache::new(2, &[8, 8]);
        cache.begin(0);
        let guess = ExpertId { moe: 1, expert: 7 };
        let ahead = cache.ahead(guess, 0).unwrap();
        cache.filled(ahead, true);
        for expert in 0..4 {
            fill(&mut cache, expert);
            assert!(cache.find(guess).is_some());
        }
        cache.begin(1);
        assert!(cache.find(guess).is_some());
        cache.begin(0);
        fill(&mut cache, 5);
        assert!(cache.find(guess).is_none());
    }

    #[test]
    fn warming_takes_empty_slots_only_and_recalls_uses() {
        let mut cache = Cache::new(2, &[8]);
        cache.recall(id(0), 0.5);
        cache.recall(id(1), 0.1);
        for expert in [0, 1] {
            let slot = cache.warm(id(expert)).unwrap();
            cache.filled(slot, true);
        }
        assert_eq!((cache.warm(id(0)), cache.warm(id(2))), (None, None));
        cache.begin(0);
        fill(&mut cache, 3);
        assert!(cache.find(id(0)).is_some() && cache.find(id(1)).is_none());
    }

    #[test]
    fn pinned_and_filling_slots_are_never_victims() {
        let mut cache = Cache::new(2, &[8]);
        let Demand::Miss(a) = cache.demand(id(0)) else { panic!() };
        let b = cache.ahead(id(1), 0).unwrap();
        assert_eq!(cache.demand(id(2)), Demand::Full);
        cache.filled(a, true);
        assert_eq!(cache.demand(id(2)), Demand::Full, "still pinned");
        cache.filled(b, true);
        assert_eq!(cache.demand(id(2)), Demand::Miss(b));
    }

    #[test]
    fn a_read_ahead_is_no_plain_hit() {
        let mut cache = Cache::new(2, &[8]);
        let slot = cache.ahead(id(3), 5).unwrap();
        assert_eq!(cache.ahead(id(3), 5), None);
        assert_eq!(cache.demand(id(3)), Demand::Ahead(slot, 5));
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
        let ahead = cache.ahead(id(2), 0).unwrap();
        cache.filled(ahead, false);
        assert_eq!(cache.find(id(2)), None);
    }

    proptest! {
        #[test]
        fn experts_and_slots_stay_one_to_one(
            slots in 1usize..12,
            steps in proptest::collection::vec((0u32..3, 0u32..10, 0u8..6), 1..400),
        ) {
            let mut cache = Cache::new(slots, &[10, 10, 10]);
            let mut pinned: Vec<Slot> = Vec::new();
            let mut filling: Vec<Slot> = Vec::new();
            for (moe, expert, action) in steps {
                let id = ExpertId { moe, expert };
                match action {
                    0 => match cache.demand(id) {
                        Demand::Miss(slot) => { filling.push(slot); pinned.push(slot); }
                        Demand::Hit(slot) | Demand::Ahead(slot, _) => pinned.push(slot),
                        Demand::Full => prop_assert!((0..slots).all(|s| pinned.contains(&s) || filling.contains(&s))),
                    },
                    1 => if let Some(slot) = cache.ahead(id, 0) { filling.push(slot) },
                    4 => if let Some(slot) = cache.warm(id) { filling.push(slot) },
                    5 => cache.begin(moe),
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
