//! The expert store with a source that fails and dawdles: every demand gets its own record or an error.
#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use waste_common::io::AlignedBuf;
use waste_engine::EngineError;
use waste_engine::experts::{ExpertId, ExpertRef, ExpertSource, ExpertStore, StoreOptions};

const RECORD: usize = 4096;

/// Fills a record with its expert's number; fails for some experts; takes its time for some others.
struct Fake {
    experts: Vec<usize>,
    failing: Mutex<HashSet<ExpertId>>,
    /// The next read of this one panics.
    panicking: Mutex<Option<ExpertId>>,
    reads: AtomicU64,
}

impl Fake {
    fn new() -> Self {
        Fake {
            experts: vec![32, 32, 32],
            failing: Mutex::default(),
            panicking: Mutex::default(),
            reads: AtomicU64::new(0),
        }
    }
}

struct Shared(std::sync::Arc<Fake>);

impl ExpertSource for Shared {
    fn record_bytes(&self) -> usize {
        RECORD
    }

    fn experts(&self) -> &[usize] {
        &self.0.experts
    }

    fn direct_io(&self) -> bool {
        false
    }

    fn read(&self, id: ExpertId, slot: &mut AlignedBuf) -> Result<u64, EngineError> {
        self.0.reads.fetch_add(1, Ordering::Relaxed);
        if id.expert.is_multiple_of(5) {
            std::thread::sleep(Duration::from_micros(300));
        }
        let panics = self.0.panicking.lock().unwrap().take_if(|panicking| *panicking == id).is_some();
        assert!(!panics, "the read of {id:?} panics");
        if self.0.failing.lock().unwrap().contains(&id) {
            // Half a record, as a real short read leaves it.
            slot.bytes_mut()[..RECORD / 2].fill(0xee);
            let source = Box::new(EngineError::Sink("short read".to_owned()));
            return Err(EngineError::Expert { layer: id.moe as usize, expert: id.expert as usize, source });
        }
        slot.bytes_mut().fill((id.moe * 32 + id.expert) as u8);
        Ok(RECORD as u64)
    }
}

fn store(slots: usize, readers: usize) -> (std::sync::Arc<Fake>, ExpertStore) {
    let fake = std::sync::Arc::new(Fake::new());
    let source = Box::new(Shared(std::sync::Arc::clone(&fake)));
    (fake, ExpertStore::new(source, StoreOptions { slots, readers }).unwrap())
}

fn ids(moe: u32, experts: impl IntoIterator<Item = u32>) -> Vec<ExpertId> {
    experts.into_iter().map(|expert| ExpertId { moe, expert }).collect()
}

/// Uses every expert once and checks that each position got its own record.
fn visit(store: &ExpertStore, ids: &[ExpertId]) -> Result<(), EngineError> {
    let most = 1 + ids.len() % 4;
    let mut seen = vec![false; ids.len()];
    let mut issued = 0;
    store.for_each(
        ids,
        most,
        || issued += 1,
        |batch| {
            assert!((1..=most).contains(&batch.len()));
            for (position, record) in batch {
                let expected = (ids[*position].moe * 32 + ids[*position].expert) as u8;
                assert!(record.bytes().iter().all(|&byte| byte == expected), "position {position}");
                assert!(!std::mem::replace(&mut seen[*position], true));
            }
            Ok(())
        },
    )?;
    assert!(seen.iter().all(|&seen| seen) && issued == 1);
    Ok(())
}

#[test]
fn every_demand_gets_its_own_record() {
    for slots in [1, 2, 3, 8, 96] {
        for readers in [0, 1, 4] {
            let (fake, store) = store(slots, readers);
            let mut state = 7u64;
            let mut demands = 0;
            for round in 0..200u32 {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let wanted = ids(round % 3, (0..8).map(|i| ((state >> (8 * i)) as u32 % 4 + 4 * i) % 32));
                store.look_ahead(ids((round + 1) % 3, 0..6).into_iter());
                visit(&store, &wanted).unwrap();
                demands += wanted.len() as u64;
            }
            let stats = store.stats();
            assert_eq!(
                stats.hits + stats.ahead_hits + stats.misses,
                demands,
                "{slots} slots, {readers} readers"
            );
            drop(store);
            let reads = fake.reads.load(Ordering::Relaxed);
            assert!(reads <= stats.misses + stats.ahead_reads, "{reads} {stats:?}");
            if slots == 96 {
                assert!(reads <= 96, "everything fits: each expert is read once, not {reads} times");
            }
        }
    }
}

#[test]
fn a_failed_read_is_an_error_that_names_the_expert_and_nothing_stays_pinned() {
    for readers in [0, 1, 3] {
        let (fake, store) = store(4, readers);
        let bad = ExpertId { moe: 1, expert: 7 };
        fake.failing.lock().unwrap().insert(bad);
        for _ in 0..20 {
            let error = visit(&store, &ids(1, 4..12)).unwrap_err();
            assert!(error.to_string().contains("layer 1, expert 7"), "{error}");
        }
        store.look_ahead([bad].into_iter());
        visit(&store, &ids(0, 0..32)).unwrap();
        // The disk is well again: so is the store.
        fake.failing.lock().unwrap().clear();
        visit(&store, &ids(1, 0..32)).unwrap();
    }
}

/// The bug behind it: the slot stayed as if being filled, and the consumer waited for it for ever.
#[test]
fn a_read_that_panics_is_an_error_and_the_readers_go_on() {
    let (fake, store) = store(8, 1);
    for bad in 10..14 {
        *fake.panicking.lock().unwrap() = Some(ExpertId { moe: 0, expert: bad });
        let error = visit(&store, &ids(0, [bad])).unwrap_err();
        assert!(matches!(error, EngineError::ReadPanicked { moe: 0, expert } if expert == bad), "{error}");
        visit(&store, &ids(0, 0..4)).unwrap();
        visit(&store, &ids(1, 0..32)).unwrap();
    }
    // Ahead of demand: nobody hears of it but who demands the expert meanwhile.
    *fake.panicking.lock().unwrap() = Some(ExpertId { moe: 2, expert: 1 });
    store.look_ahead(ids(2, [1]).into_iter());
    while fake.panicking.lock().unwrap().is_some() {
        std::thread::yield_now();
    }
    let _ = visit(&store, &ids(2, [1]));
    visit(&store, &ids(2, 0..8)).unwrap();
}

#[test]
fn a_consumer_that_gives_up_leaves_the_store_usable() {
    let (_, store) = store(4, 2);
    for _ in 0..20 {
        let stop = |_: &[(usize, ExpertRef)]| Err(EngineError::Interrupted);
        assert!(store.for_each(&ids(2, 0..8), 3, || (), stop).is_err());
    }
    visit(&store, &ids(2, 0..32)).unwrap();
}

#[test]
fn two_stores_alternate_without_mixing() {
    let (_, a) = store(3, 2);
    let (_, b) = store(5, 1);
    for round in 0..100 {
        visit(&a, &ids(round % 3, 0..8)).unwrap();
        visit(&b, &ids(2 - round % 3, 8..16)).unwrap();
    }
}
