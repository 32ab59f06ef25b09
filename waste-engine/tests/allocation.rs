//! Decoding allocates nothing for its experts once it is under way, and little else.
#![allow(clippy::unwrap_used)] // helpers of tests are tests too
#![allow(unsafe_code)] // an allocator that counts is one

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use waste_engine::experts::{ExpertId, ExpertSource, ExpertStore, StoreOptions};
use waste_engine::{Engine, EngineError, EngineOptions, Wanted};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all is done by the system's allocator, with what it is given.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Allocations in tokens 20 to 40 of `decode`, which is called with each token's number.
fn counted(mut decode: impl FnMut(u32)) -> usize {
    (0..20).for_each(&mut decode);
    let before = ALLOCATIONS.load(Ordering::SeqCst);
    (20..40).for_each(&mut decode);
    ALLOCATIONS.load(Ordering::SeqCst) - before
}

struct Zeros(Vec<usize>);

impl ExpertSource for Zeros {
    fn record_bytes(&self) -> usize {
        4096
    }

    fn experts(&self) -> &[usize] {
        &self.0
    }

    fn direct_io(&self) -> bool {
        false
    }

    fn read(&self, id: ExpertId, slot: &mut [u8]) -> Result<u64, EngineError> {
        slot.fill(id.expert as u8);
        Ok(4096)
    }
}

/// Misses, hits, evictions and reads ahead, in a small cache and in one that is warmed meanwhile.
fn store() {
    for slots in [16, 1000] {
        for readers in [0, 4] {
            let options = StoreOptions { slots, readers };
            let store = ExpertStore::new(Box::new(Zeros(vec![64; 4])), options).unwrap();
            store.warm(&[]);
            let count = counted(|token| {
                for moe in 0..4 {
                    let ids: [ExpertId; 8] = std::array::from_fn(|i| ExpertId {
                        moe,
                        expert: (token * 7 + moe * 3 + i as u32 * 5) % 64,
                    });
                    let ahead = ids.map(|id| ExpertId { moe: (moe + 1) % 4, ..id });
                    let issued = || store.look_ahead(ahead.into_iter().take(6).enumerate());
                    store
                        .for_each(&ids, 3, issued, |batch| {
                            for (at, record) in batch {
                                assert_eq!(u32::from(record.bytes()[0]), ids[*at].expert);
                            }
                            Ok(())
                        })
                        .unwrap();
                }
            });
            assert_eq!(count, 0, "{slots} slots, {readers} readers");
        }
    }
}

/// The thread pool gets a block for its queue now and then.
const QUEUE: usize = 4;

fn whole() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/interop/tiny-k3.waste");
    for readers in [0, 4] {
        let options =
            EngineOptions { threads: 2, cache_slots: 24, ctx: 64, readers, ..EngineOptions::default() };
        let engine = Engine::open(&dir, options).unwrap();
        let mut session = engine.session().unwrap();
        let count = counted(|token| {
            engine.forward(&mut session, &[token % 600], Wanted::Last, &mut |_, _| Ok(())).unwrap();
        });
        assert!(count <= QUEUE, "{readers} readers: {count}");
    }
}

/// One test: what another allocates would be counted too.
#[test]
fn decoding_allocates_nothing_for_experts() {
    store();
    whole();
}
