//! The expert store: reader threads that fill cache slots, and the one consumer that uses them.
//!
//! All experts a layer needs are demanded at once, then taken in the order in which their reads end. Without
//! reader threads the taker reads them itself. Demands are read first, then what a lookahead asked for, then what warms
//! the cache. Once the store is open, it allocates nothing and starts no thread.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use arrayvec::ArrayVec;
use waste_common::io::{Arena, SlotRef};

use super::cache::{Cache, Demand, ExpertId, Phase, Slot};
use super::source::ExpertSource;
use super::stats::{RANKS, ReadStats};
use crate::error::EngineError;

/// How the store reads.
#[derive(Clone, Copy, Debug)]
pub struct StoreOptions {
    /// Cache slots; at least one.
    pub slots: usize,
    /// Reader threads, and so reads in flight; 0 reads in the consumer's thread.
    pub readers: usize,
}

/// Most experts that are handed out together.
const BATCH: usize = 64;

struct Shared {
    source: Box<dyn ExpertSource>,
    slots: Arena,
    state: Mutex<State>,
    /// A read has ended.
    ended: Condvar,
    /// There is something to read.
    work: Condvar,
}

struct State {
    cache: Cache,
    demanded: VecDeque<Job>,
    ahead: VecDeque<Job>,
    /// What the cache is to be warmed with, the most used last.
    warm: Vec<ExpertId>,
    /// Reads ahead, and reads that warm, that have not ended.
    ahead_in_flight: usize,
    warm_in_flight: usize,
    /// The last lookahead.
    guess: Guess,
    /// Readers that have not yet touched their share of the slots.
    touching: usize,
    /// The demands of a consumer, kept for the next one.
    spare: Vec<(usize, Slot)>,
    errors: Vec<Option<EngineError>>,
    stats: ReadStats,
    closing: bool,
}

#[derive(Clone, Copy)]
struct Job {
    slot: Slot,
    why: Why,
}

/// Why a record is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Why {
    Demand,
    Ahead,
    Warm,
}

/// The surest experts of a lookahead.
#[derive(Clone, Copy, Default)]
struct Guess {
    ids: [Option<ExpertId>; RANKS],
}

impl Guess {
    /// Counts which of the guesses were right, now that a layer's experts are known.
    fn judge(&mut self, ids: &[ExpertId], stats: &mut ReadStats) {
        let Some(first) = self.ids[0] else { return };
        if ids.first().is_some_and(|id| id.moe == first.moe) {
            for (rank, id) in self.ids.iter().flatten().enumerate() {
                stats.rank(rank).guessed += 1;
                stats.rank(rank).right += u64::from(ids.contains(id));
            }
        }
        *self = Guess::default();
    }
}

/// A source of experts behind a bounded cache.
///
/// It has one consumer at a time: [`for_each`](Self::for_each) of two threads at once would take slots from each
/// other and could fail with [`EngineError::NoSlot`]. Readers are its own.
pub struct ExpertStore {
    shared: Arc<Shared>,
    readers: Vec<JoinHandle<()>>,
}

/// A pinned expert: its record cannot be evicted while this lives.
pub struct ExpertRef<'a> {
    shared: &'a Shared,
    slot: Slot,
    record: SlotRef<'a>,
}

impl ExpertRef<'_> {
    /// The record, as its source laid it out.
    pub fn bytes(&self) -> &[u8] {
        &self.record
    }
}

impl Drop for ExpertRef<'_> {
    fn drop(&mut self) {
        self.shared.lock().cache.unpin(self.slot);
    }
}

impl Shared {
    /// A panic elsewhere cannot leave the bookkeeping half done, so a poisoned lock is still good.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_into(&self, slot: Slot, id: ExpertId) -> Result<u64, EngineError> {
        self.source.read(id, &mut self.slots.write(slot))
    }

    /// Reads a claimed slot and says so, even if the source panics.
    fn fill(&self, job: Job) {
        let id = self.lock().cache.expert(job.slot);
        let panicked = Err(EngineError::ReadPanicked { moe: id.moe, expert: id.expert });
        let mut filling = Filling { shared: self, job, result: panicked };
        filling.result = self.read_into(job.slot, id);
    }

    /// Touches one reader's share of the slots, so that no read has to wait for the system to provide a page.
    fn touch(&self, reader: usize, readers: usize) {
        for slot in (reader..self.slots.slots()).step_by(readers) {
            if self.lock().closing {
                return;
            }
            self.slots.touch(slot);
        }
        self.lock().touching -= 1;
        self.work.notify_all();
    }

    /// What a reader is to do next; `None` when the store closes. At most `warming` reads warm the cache at a time, so
    /// that a demand finds a reader at once.
    fn next_job(&self, warming: usize) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if state.closing {
                return None;
            }
            if state.touching == 0 {
                let State { demanded, ahead, .. } = &mut *state;
                let job = demanded.pop_front().or_else(|| ahead.pop_front());
                if let Some(job) = job.or_else(|| state.warm(warming)) {
                    return Some(job);
                }
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl State {
    /// The next read that warms the cache, while there are empty slots.
    fn warm(&mut self, most: usize) -> Option<Job> {
        while self.warm_in_flight < most && !self.cache.is_full() {
            if let Some(slot) = self.cache.warm(self.warm.pop()?) {
                self.warm_in_flight += 1;
                self.stats.warm_reads += 1;
                return Some(Job { slot, why: Why::Warm });
            }
        }
        None
    }
}

/// A read under way; its end is recorded when this is dropped, so that nobody waits for a read that unwound.
struct Filling<'a> {
    shared: &'a Shared,
    job: Job,
    result: Result<u64, EngineError>,
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        let Job { slot, why } = self.job;
        let mut state = self.shared.lock();
        state.ahead_in_flight -= usize::from(why == Why::Ahead);
        state.warm_in_flight -= usize::from(why == Why::Warm);
        match std::mem::replace(&mut self.result, Ok(0)) {
            Ok(bytes) => {
                state.stats.bytes_read += bytes;
                state.cache.filled(slot, true);
            }
            Err(error) => {
                state.errors[slot] = Some(error);
                state.cache.filled(slot, false);
            }
        }
        self.shared.ended.notify_all();
    }
}

impl ExpertStore {
    /// Opens a store; its slots are allocated once, here, and touched by the readers before they read.
    pub fn new(source: Box<dyn ExpertSource>, options: StoreOptions) -> Result<Self, EngineError> {
        let StoreOptions { slots, readers: reader_count } = options;
        let slots = slots.max(1);
        let experts: Vec<usize> = source.experts().to_vec();
        let arena = Arena::new(slots, source.record_bytes())?;
        if reader_count == 0 {
            (0..slots).for_each(|slot| arena.touch(slot));
        }
        let shared = Arc::new(Shared {
            source,
            slots: arena,
            state: Mutex::new(State {
                cache: Cache::new(slots, &experts),
                demanded: VecDeque::with_capacity(slots),
                ahead: VecDeque::with_capacity(slots),
                warm: Vec::new(),
                ahead_in_flight: 0,
                warm_in_flight: 0,
                guess: Guess::default(),
                touching: reader_count,
                spare: Vec::with_capacity((slots / 2).max(1)),
                errors: (0..slots).map(|_| None).collect(),
                stats: ReadStats::default(),
                closing: false,
            }),
            ended: Condvar::new(),
            work: Condvar::new(),
        });
        // Closes what was begun if a thread cannot be had.
        let mut store = ExpertStore { shared, readers: Vec::with_capacity(reader_count) };
        for number in 0..reader_count {
            let shared = Arc::clone(&store.shared);
            let reader = std::thread::Builder::new()
                .name(format!("waste-read-{number}"))
                .spawn(move || {
                    shared.touch(number, reader_count);
                    while let Some(job) = shared.next_job((reader_count / 2).max(1)) {
                        // A panic was said by the hook and recorded as a failure; later reads need this thread.
                        let _ = catch_unwind(AssertUnwindSafe(|| shared.fill(job)));
                    }
                })
                .map_err(|source| EngineError::Thread { what: "an expert reader", source })?;
            store.readers.push(reader);
        }
        Ok(store)
    }

    /// Number of cache slots.
    pub fn slots(&self) -> usize {
        self.shared.slots.slots()
    }

    /// Whether there is a slot for every expert.
    pub fn holds_all(&self) -> bool {
        self.shared.source.experts().iter().sum::<usize>() <= self.slots()
    }

    /// Counters since open.
    pub fn stats(&self) -> ReadStats {
        self.shared.lock().stats
    }

    /// Whether reads go past the page cache.
    pub fn direct_io(&self) -> bool {
        self.shared.source.direct_io()
    }

    /// Says which shares of all tokens used experts before, and fills the empty slots with the most used ones in the
    /// background; with all experts if they fit. Nothing waits for it, so without reader threads nothing is read.
    pub fn warm(&self, shares: &[(ExpertId, f32)]) {
        let experts = self.shared.source.experts();
        let mut order = shares.to_vec();
        order.sort_by(|a, b| b.1.total_cmp(&a.1).then((a.0.moe, a.0.expert).cmp(&(b.0.moe, b.0.expert))));
        let mut warm: Vec<ExpertId> = order.iter().map(|&(id, _)| id).collect();
        if self.holds_all() {
            warm.extend(
                (0u32..)
                    .zip(experts)
                    .flat_map(|(moe, &count)| (0..count as u32).map(move |expert| ExpertId { moe, expert })),
            );
        }
        warm.reverse();
        let mut state = self.shared.lock();
        for &(id, share) in shares {
            state.cache.recall(id, share);
        }
        state.warm = warm;
        self.shared.work.notify_all();
    }

    /// Tokens, and how often each expert was demanded by them, since open: a chunk of a prompt counts as one token.
    pub fn uses(&self) -> (u32, Vec<(ExpertId, u32)>) {
        let state = self.shared.lock();
        (state.cache.tokens(), state.cache.uses().collect())
    }

    /// Asks for experts that will probably be needed, without pinning them; at most a quarter of the slots is
    /// given to them at a time. Each comes with its rank among its token's; of several of a rank the first is the one that
    /// is judged. Nothing waits for them, so without reader threads nothing is read.
    pub fn look_ahead(&self, ids: impl Iterator<Item = (usize, ExpertId)>) {
        if self.readers.is_empty() {
            return;
        }
        let mut state = self.shared.lock();
        state.guess = Guess::default();
        for (rank, id) in ids {
            if let Some(guess) = state.guess.ids.get_mut(rank) {
                guess.get_or_insert(id);
            }
            if state.ahead_in_flight < self.slots() / 4
                && let Some(slot) = state.cache.ahead(id, rank)
            {
                state.ahead.push_back(Job { slot, why: Why::Ahead });
                state.ahead_in_flight += 1;
                state.stats.ahead_reads += 1;
                state.stats.rank(rank).read += 1;
                self.shared.work.notify_one();
            }
        }
    }

    /// Demands experts of a layer and hands them to `use_experts`, each with its position in `ids`, in the order in which
    /// they arrive: as many at a time as are there, but no more than `most`. `issued` runs once, when the first reads are
    /// on their way. At most half of the slots are in flight at a time. Stops at the first failure.
    pub fn for_each(
        &self,
        ids: &[ExpertId],
        most: usize,
        issued: impl FnOnce(),
        mut use_experts: impl FnMut(&[(usize, ExpertRef)]) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let window = (self.slots() / 2).max(1);
        let mut pending = self.begin(ids);
        let mut batch = ArrayVec::<_, BATCH>::new();
        let most = most.min(BATCH);
        let mut next = 0;
        let mut issued = Some(issued);
        loop {
            while next < ids.len() && pending.demands.len() < window && pending.demand(next, ids[next]) {
                next += 1;
            }
            if let Some(issued) = issued.take() {
                issued();
            }
            match pending.take(true)? {
                Some(expert) => {
                    batch.push(expert);
                    while batch.len() < most
                        && let Some(expert) = pending.take(false)?
                    {
                        batch.push(expert);
                    }
                    use_experts(&batch)?;
                    batch.clear();
                }
                None if next == ids.len() => return Ok(()),
                None => self.wait_for_room()?,
            }
        }
    }

    /// It is the turn of a layer that needs these experts.
    fn begin(&self, ids: &[ExpertId]) -> Pending<'_> {
        let mut state = self.shared.lock();
        let State { cache, guess, stats, spare, .. } = &mut *state;
        if let Some(first) = ids.first() {
            cache.begin(first.moe);
        }
        guess.judge(ids, stats);
        Pending { store: self, demands: std::mem::take(spare) }
    }

    /// Nothing is demanded, yet no slot was free: only reads that nobody waits for hold them, and they end by
    /// themselves.
    fn wait_for_room(&self) -> Result<(), EngineError> {
        let state = self.shared.lock();
        if state.ahead_in_flight + state.warm_in_flight == 0 {
            return Err(EngineError::NoSlot { slots: self.slots() });
        }
        drop(self.shared.ended.wait(state).unwrap_or_else(PoisonError::into_inner));
        Ok(())
    }
}

impl Drop for ExpertStore {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.work.notify_all();
        for reader in self.readers.drain(..) {
            // A reader that panicked has nothing left to clean up.
            let _ = reader.join();
        }
    }
}

/// Demands that have not been taken; whatever is left is unpinned when this is dropped.
struct Pending<'a> {
    store: &'a ExpertStore,
    demands: Vec<(usize, Slot)>,
}

impl<'a> Pending<'a> {
    /// Demands one expert; false if no slot can be had before another is given back.
    fn demand(&mut self, position: usize, id: ExpertId) -> bool {
        let shared = &self.store.shared;
        let mut state = shared.lock();
        let slot = match state.cache.demand(id) {
            Demand::Hit(slot) => {
                state.stats.hits += 1;
                slot
            }
            Demand::Ahead(slot, rank) => {
                state.stats.ahead_hits += 1;
                state.stats.rank(rank).used += 1;
                // Still waiting behind others: it is a demand now.
                if let Some(at) = state.ahead.iter().position(|job| job.slot == slot) {
                    state.ahead.remove(at);
                    state.demanded.push_back(Job { slot, why: Why::Ahead });
                }
                slot
            }
            Demand::Miss(slot) => {
                state.stats.misses += 1;
                state.demanded.push_back(Job { slot, why: Why::Demand });
                shared.work.notify_one();
                slot
            }
            Demand::Full => return false,
        };
        self.demands.push((position, slot));
        true
    }

    /// Whichever demand is met first; `None` if there is none, or none yet and it is not to `wait`.
    fn take(&mut self, wait: bool) -> Result<Option<(usize, ExpertRef<'a>)>, EngineError> {
        let shared = &*self.store.shared;
        if self.demands.is_empty() {
            return Ok(None);
        }
        let mut state = shared.lock();
        let mut waiting_since = None;
        loop {
            let ended = self.demands.iter().position(|&(_, slot)| state.cache.phase(slot) != Phase::Filling);
            if let Some(at) = ended {
                if let Some(since) = waiting_since {
                    state.stats.stall_nanos += elapsed_nanos(since);
                }
                let (position, slot) = self.demands.remove(at);
                if state.cache.phase(slot) == Phase::Failed {
                    let error = state.errors[slot].take();
                    state.cache.unpin(slot);
                    return Err(error.unwrap_or(EngineError::NoSlot { slots: self.store.slots() }));
                }
                drop(state);
                let record = shared.slots.read(slot);
                return Ok(Some((position, ExpertRef { shared, slot, record })));
            }
            if !wait {
                return Ok(None);
            }
            waiting_since.get_or_insert_with(std::time::Instant::now);
            if self.store.readers.is_empty() {
                let job = state.demanded.pop_front();
                drop(state);
                if let Some(job) = job {
                    shared.fill(job);
                }
                state = shared.lock();
            } else {
                state = shared.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        let mut state = self.store.shared.lock();
        for &(_, slot) in &self.demands {
            state.cache.unpin(slot);
        }
        self.demands.clear();
        state.spare = std::mem::take(&mut self.demands);
    }
}

fn elapsed_nanos(since: std::time::Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
