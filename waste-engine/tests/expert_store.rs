//! The expert store with a source that fails and dawdles: every demand gets its own record or an error.
#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

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

    fn read(&self, id: ExpertId, slot: &mut [u8]) -> Result<u64, EngineError> {
        self.0.reads.fetch_add(1, Ordering::Relaxed);
        if id.expert.is_multiple_of(5) {
            std::thread::sleep(Duration::from_micros(300));
        }
        let panics = self.0.panicking.lock().unwrap().take_if(|panicking| *panicking == id).is_some();
        assert!(!panics, "the read of {id:?} panics");
        if self.0.failing.lock().unwrap().contains(&id) {
            // Half a record, as a real short read leaves it.
            slot[..RECORD / 2].fill(0xee);
            let source = Box::new(EngineError::Sink("short read".to_owned()));
            return Err(EngineError::Expert { layer: id.moe as usize, expert: id.expert as usize, source });
        }
        slot.fill((id.moe * 32 + id.expert) as u8);
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
                store.look_ahead(ids((round + 1) % 3, 0..6).into_iter().enumerate());
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
            assert!(reads <= stats.misses + stats.ahead_reads + stats.warm_reads, "{reads} {stats:?}");
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
        store.look_ahead([bad].into_iter().enumerate());
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
    store.look_ahead(ids(2, [1]).into_iter().enumerate());
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

/// Waits for what is read in the background.
fn wait_until(done: impl Fn() -> bool) {
    while !done() {
        std::thread::yield_now();
    }
}

#[test]
fn if_all_experts_fit_they_are_read_once_in_the_background() {
    let (fake, store) = store(96, 2);
    store.warm(&[]);
    // Demands meanwhile are met in time.
    visit(&store, &ids(2, 16..32)).unwrap();
    wait_until(|| store.stats().bytes_read == 96 * RECORD as u64);
    let before = store.stats();
    assert_eq!(before.misses + before.warm_reads, 96);
    for round in 0..6 {
        visit(&store, &ids(round % 3, 0..32)).unwrap();
    }
    let stats = store.stats().since(&before);
    assert_eq!((stats.hits, stats.misses, stats.bytes_read), (6 * 32, 0, 0));
    assert_eq!(fake.reads.load(Ordering::Relaxed), 96);
}

#[test]
fn the_most_used_experts_warm_a_small_cache() {
    let (_, store) = store(4, 2);
    let shares: Vec<_> = (0..32)
        .map(|expert| (ExpertId { moe: 1, expert }, 1.0 - (expert as f32 - 20.0).abs() / 40.0))
        .collect();
    store.warm(&shares);
    wait_until(|| store.stats().bytes_read == 4 * RECORD as u64);
    visit(&store, &ids(1, [19, 20, 21])).unwrap();
    let stats = store.stats();
    assert_eq!((stats.warm_reads, stats.hits, stats.misses), (4, 3, 0));
    // The cache is for what is used: warming never evicts, and is over.
    visit(&store, &ids(0, 0..32)).unwrap();
    assert_eq!(store.stats().warm_reads, 4);
}

/// Neither a failure nor a panic while the cache is warmed is heard of, but by who demands that expert.
#[test]
fn warming_that_fails_costs_nothing() {
    let (fake, store) = store(96, 1);
    *fake.panicking.lock().unwrap() = Some(ExpertId { moe: 0, expert: 3 });
    fake.failing.lock().unwrap().extend(ids(0, 10..20));
    store.warm(&[]);
    wait_until(|| store.stats().warm_reads == 96);
    fake.failing.lock().unwrap().clear();
    let mut met = 0;
    for moe in 0..3 {
        for expert in 0..32 {
            met += usize::from(visit(&store, &ids(moe, [expert])).is_ok());
        }
    }
    // The last read may have been under way.
    assert!(met >= 95, "{met}");
}

#[test]
fn guesses_are_judged_by_rank() {
    let (_, store) = store(32, 1);
    visit(&store, &ids(1, [4])).unwrap();
    visit(&store, &ids(0, 0..4)).unwrap();
    let before = store.stats();
    store.look_ahead(ids(1, [7, 4, 9]).into_iter().enumerate());
    visit(&store, &ids(1, [9, 4, 2])).unwrap();
    // Nobody guessed this layer.
    visit(&store, &ids(2, [1])).unwrap();
    let stats = store.stats().since(&before);
    let rank = |rank: usize| {
        let rank = stats.ranks[rank];
        [rank.guessed, rank.right, rank.read, rank.used]
    };
    // The expert of rank 1 was there already.
    assert_eq!([rank(0), rank(1), rank(2), rank(3)], [[1, 0, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0; 4]]);
    assert_eq!((stats.hits, stats.ahead_hits, stats.misses, stats.ahead_reads), (1, 1, 2, 2));
}

/// Reads that fail, are short or slow at random: every demand gets its record or an error that names an expert of
/// the demand, and the counters agree.
#[test]
fn a_bad_disk_never_gives_a_wrong_record() {
    for (slots, readers) in [(2, 0), (2, 2), (8, 1), (24, 4), (96, 4)] {
        let (fake, store) = store(slots, readers);
        store.warm(&[]);
        let (mut state, mut failed, mut met) = (slots as u64, 0, 0);
        for round in 0..400u32 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let moe = round % 3;
            let wanted = ids(moe, (0..6).map(|i| ((state >> (8 * i)) as u32 % 5 + 5 * i) % 32));
            let mut failing = fake.failing.lock().unwrap();
            failing.clear();
            failing.extend(ids(moe, [(state >> 50) as u32 % 32, (state >> 55) as u32 % 32]));
            drop(failing);
            store.look_ahead(ids((moe + 1) % 3, (0..6).map(|i| 5 * i + 1)).into_iter().enumerate());
            match visit(&store, &wanted) {
                Ok(()) => met += wanted.len() as u64,
                Err(EngineError::Expert { layer, expert, .. }) => {
                    assert!(wanted.contains(&ExpertId { moe: layer as u32, expert: expert as u32 }));
                    failed += 1;
                }
                Err(error) => panic!("{error}"),
            }
        }
        let stats = store.stats();
        assert!(failed > 0 && met > 0, "{slots} slots, {readers} readers: {failed} failed, {met} met");
        assert!(stats.hits + stats.ahead_hits + stats.misses >= met, "{stats:?}");
        assert!(
            stats.ranks.iter().all(|rank| rank.right <= rank.guessed && rank.used <= rank.read),
            "{stats:?}"
        );
        assert_eq!(stats.ranks.iter().map(|rank| rank.read).sum::<u64>(), stats.ahead_reads);
        assert_eq!(stats.ranks.iter().map(|rank| rank.used).sum::<u64>(), stats.ahead_hits);
        // Nothing stays pinned or lost: all is well as soon as the disk is.
        fake.failing.lock().unwrap().clear();
        (0..3).for_each(|moe| {
            let _ = visit(&store, &ids(moe, 0..32));
            visit(&store, &ids(moe, 0..32)).unwrap();
        });
    }
}
