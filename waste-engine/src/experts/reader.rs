//! The expert store: reader threads that fill cache slots, and the one consumer that uses them.
//!
//! All experts a layer needs are demanded at once, then taken in the order in which their reads end. Without
//! reader threads the taker reads them itself.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::thread::JoinHandle;

use waste_common::io::{AlignedBuf, OutOfMemory};

use super::cache::{Cache, Demand, ExpertId, Phase, Slot};
use super::source::ExpertSource;
use crate::error::EngineError;

/// How the store reads.
#[derive(Clone, Copy, Debug)]
pub struct StoreOptions {
    /// Cache slots; at least one.
    pub slots: usize,
    /// Reader threads, and so reads in flight; 0 reads in the consumer's thread.
    pub readers: usize,
}

/// What the store has done so far.
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
    /// Bytes read from the source.
    pub bytes_read: u64,
    /// Nanoseconds the consumer waited for reads.
    pub stall_nanos: u64,
}

struct Shared {
    source: Box<dyn ExpertSource>,
    slots: Box<[RwLock<AlignedBuf>]>,
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
    /// Reads ahead that have not ended.
    ahead_in_flight: usize,
    errors: Vec<Option<EngineError>>,
    stats: ReadStats,
    closing: bool,
}

#[derive(Clone, Copy)]
struct Job {
    slot: Slot,
    ahead: bool,
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
    record: RwLockReadGuard<'a, AlignedBuf>,
}

impl ExpertRef<'_> {
    /// The record, as its source laid it out.
    pub fn bytes(&self) -> &[u8] {
        self.record.bytes()
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
        let mut buffer = self.slots[slot].write().unwrap_or_else(PoisonError::into_inner);
        self.source.read(id, &mut buffer)
    }

    /// Reads a claimed slot and says so, even if the source panics.
    fn fill(&self, job: Job) {
        let id = self.lock().cache.expert(job.slot);
        let panicked = Err(EngineError::ReadPanicked { moe: id.moe, expert: id.expert });
        let mut filling = Filling { shared: self, job, result: panicked };
        filling.result = self.read_into(job.slot, id);
    }

    fn next_job(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if state.closing {
                return None;
            }
            let State { demanded, ahead, .. } = &mut *state;
            if let Some(job) = demanded.pop_front().or_else(|| ahead.pop_front()) {
                return Some(job);
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
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
        let Job { slot, ahead } = self.job;
        let mut state = self.shared.lock();
        state.ahead_in_flight -= usize::from(ahead);
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
    /// Opens a store; its slots are allocated once, here.
    pub fn new(source: Box<dyn ExpertSource>, options: StoreOptions) -> Result<Self, EngineError> {
        let slots = options.slots.max(1);
        let record = source.record_bytes();
        let experts: Vec<usize> = source.experts().to_vec();
        let buffers: Result<_, OutOfMemory> =
            (0..slots).map(|_| AlignedBuf::zeroed(record).map(RwLock::new)).collect();
        let shared = Arc::new(Shared {
            source,
            slots: buffers?,
            state: Mutex::new(State {
                cache: Cache::new(slots, &experts),
                demanded: VecDeque::with_capacity(slots),
                ahead: VecDeque::with_capacity(slots),
                ahead_in_flight: 0,
                errors: (0..slots).map(|_| None).collect(),
                stats: ReadStats::default(),
                closing: false,
            }),
            ended: Condvar::new(),
            work: Condvar::new(),
        });
        let mut readers = Vec::with_capacity(options.readers);
        for number in 0..options.readers {
            let shared = Arc::clone(&shared);
            let reader = std::thread::Builder::new()
                .name(format!("waste-read-{number}"))
                .spawn(move || {
                    while let Some(job) = shared.next_job() {
                        // A panic was said by the hook and recorded as a failure; later reads need this thread.
                        let _ = catch_unwind(AssertUnwindSafe(|| shared.fill(job)));
                    }
                })
                .map_err(|source| EngineError::Thread { what: "an expert reader", source })?;
            readers.push(reader);
        }
        Ok(ExpertStore { shared, readers })
    }

    /// Number of cache slots.
    pub fn slots(&self) -> usize {
        self.shared.slots.len()
    }

    /// Counters since open.
    pub fn stats(&self) -> ReadStats {
        self.shared.lock().stats
    }

    /// Whether reads go past the page cache.
    pub fn direct_io(&self) -> bool {
        self.shared.source.direct_io()
    }

    /// Asks for experts that will probably be needed, without pinning them; at most a quarter of the slots is
    /// given to them at a time. Nothing waits for them, so without reader threads nothing is read.
    pub fn look_ahead(&self, ids: impl Iterator<Item = ExpertId>) {
        if self.readers.is_empty() {
            return;
        }
        let mut state = self.shared.lock();
        for (rank, id) in ids.enumerate() {
            if state.ahead_in_flight >= self.slots() / 4 {
                return;
            }
            if let Some(slot) = state.cache.ahead(id, rank) {
                state.ahead.push_back(Job { slot, ahead: true });
                state.ahead_in_flight += 1;
                state.stats.ahead_reads += 1;
                self.shared.work.notify_one();
            }
        }
    }

    /// Demands experts of a layer and hands them to `use_experts`, each with its position in `ids`, in the order in which they
    /// arrive: as many at a time as are there, but no more than `most`. `issued` runs once, when the first reads are on
    /// their way. At most half of the slots are in flight at a time. Stops at the first failure.
    pub fn for_each(
        &self,
        ids: &[ExpertId],
        most: usize,
        issued: impl FnOnce(),
        mut use_experts: impl FnMut(&[(usize, ExpertRef)]) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let window = (self.slots() / 2).max(1);
        let mut pending = Pending { store: self, demands: Vec::with_capacity(window.min(ids.len())) };
        let mut batch = Vec::with_capacity(most.min(ids.len()));
        if let Some(first) = ids.first() {
            self.shared.lock().cache.begin(first.moe);
        }
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

    /// Nothing is demanded, yet no slot was free: only reads ahead hold them, and they end by themselves.
    fn wait_for_room(&self) -> Result<(), EngineError> {
        let state = self.shared.lock();
        if state.ahead_in_flight == 0 {
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
            Demand::Ahead(slot, _) => {
                state.stats.ahead_hits += 1;
                // Still waiting behind others: it is a demand now.
                if let Some(at) = state.ahead.iter().position(|job| job.slot == slot) {
                    state.ahead.remove(at);
                    state.demanded.push_back(Job { slot, ahead: true });
                }
                slot
            }
            Demand::Miss(slot) => {
                state.stats.misses += 1;
                state.demanded.push_back(Job { slot, ahead: false });
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
                let record = shared.slots[slot].read().unwrap_or_else(PoisonError::into_inner);
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
    }
}

fn elapsed_nanos(since: std::time::Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
