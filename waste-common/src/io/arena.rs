//! One large allocation cut into slots that reads go to.

#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::{ALIGNMENT, OutOfMemory};

/// Equal slots of whole pages, side by side in one allocation, in huge pages where the system has them. A slot may be
/// read by many or written by one at a time.
pub struct Arena {
    memory: Memory,
    slot_bytes: usize,
    locks: Box<[RwLock<()>]>,
}

/// A slot that is read.
pub struct SlotRef<'a> {
    bytes: &'a [u8],
    _lock: RwLockReadGuard<'a, ()>,
}

/// A slot that is written.
pub struct SlotMut<'a> {
    bytes: &'a mut [u8],
    _lock: RwLockWriteGuard<'a, ()>,
}

impl Arena {
    /// `slots` slots of `slot_bytes` zero bytes, rounded up to whole pages. The system may hand out the pages only as
    /// they are first touched; see [`touch`](Self::touch).
    ///
    /// # Errors
    /// There is not that much memory.
    pub fn new(slots: usize, slot_bytes: usize) -> Result<Arena, OutOfMemory> {
        let too_much = || OutOfMemory { bytes: slot_bytes.saturating_mul(slots) };
        let slot_bytes = slot_bytes.checked_next_multiple_of(ALIGNMENT).ok_or_else(too_much)?;
        let bytes = slot_bytes.checked_mul(slots).ok_or_else(too_much)?;
        let memory = Memory::zeroed(bytes).ok_or_else(too_much)?;
        Ok(Arena { memory, slot_bytes, locks: (0..slots).map(|_| RwLock::new(())).collect() })
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.locks.len()
    }

    /// Bytes of a slot, a multiple of [`ALIGNMENT`].
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Waits until nobody writes the slot, and keeps it from being written.
    pub fn read(&self, slot: usize) -> SlotRef<'_> {
        let lock = self.locks[slot].read().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the read lock keeps writers of this slot away for as long as the reference lives.
        SlotRef { bytes: unsafe { &*self.slot(slot) }, _lock: lock }
    }

    /// Waits until nobody uses the slot, and takes it.
    pub fn write(&self, slot: usize) -> SlotMut<'_> {
        let lock = self.locks[slot].write().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the write lock keeps every other user of this slot away for as long as the reference lives.
        SlotMut { bytes: unsafe { &mut *self.slot(slot) }, _lock: lock }
    }

    /// Writes to every page of a slot whose content does not matter yet, so that the system provides them now.
    pub fn touch(&self, slot: usize) {
        for page in self.write(slot).chunks_mut(ALIGNMENT) {
            // A plain write of a zero over zeros might be left out.
            page[0] = std::hint::black_box(0);
        }
    }

    /// The bytes of a slot; panics if there is no such slot.
    fn slot(&self, slot: usize) -> *mut [u8] {
        assert!(slot < self.slots());
        let first = self.memory.cells()[slot * self.slot_bytes..].as_ptr();
        std::ptr::slice_from_raw_parts_mut(UnsafeCell::raw_get(first), self.slot_bytes)
    }
}

impl Deref for SlotRef<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

impl Deref for SlotMut<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

impl DerefMut for SlotMut<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.bytes
    }
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Arena { slot_bytes, locks, .. } = self;
        f.debug_struct("Arena").field("slots", &locks.len()).field("slot_bytes", slot_bytes).finish()
    }
}

/// Zero bytes that begin on a page, or a huge page. Shared: who hands parts of it out keeps them apart.
struct Memory {
    start: *mut u8,
    bytes: usize,
    #[cfg(target_os = "linux")]
    mapping: (*mut u8, usize),
}

// SAFETY: plain memory, of no thread.
unsafe impl Send for Memory {}
// SAFETY: its bytes are reached through cells only, by users that the arena's locks keep apart.
unsafe impl Sync for Memory {}

impl Memory {
    fn cells(&self) -> &[UnsafeCell<u8>] {
        // SAFETY: `start` points to `bytes` initialised bytes that live as long as `self`; cells lie as their bytes.
        unsafe { std::slice::from_raw_parts(self.start.cast_const().cast(), self.bytes) }
    }
}

#[cfg(target_os = "linux")]
impl Memory {
    /// The size of a huge page where pages have 4 KiB; with others the advice is at worst without effect.
    const HUGE_PAGE: usize = 2 << 20;

    fn zeroed(bytes: usize) -> Option<Memory> {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

        // Room to begin on a huge page; what is never touched takes no memory.
        let mapped = bytes.checked_add(Self::HUGE_PAGE)?;
        isize::try_from(mapped).ok()?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new private mapping at an address of the system's choice overlaps nothing.
        let mapping = unsafe { mmap_anonymous(std::ptr::null_mut(), mapped, access, MapFlags::PRIVATE) };
        let mapping = mapping.ok()?.cast::<u8>();
        let start = mapping.wrapping_add(mapping.align_offset(Self::HUGE_PAGE));
        // Whole huge pages only: one begun at the end would take more memory than was asked for.
        let huge = bytes - bytes % Self::HUGE_PAGE;
        // SAFETY: the range lies in the mapping made above, and the advice changes no content. Where there are no
        // huge pages it fails, and small ones do.
        let _ = unsafe { madvise(start.cast(), huge, Advice::LinuxHugepage) };
        Some(Memory { start, bytes, mapping: (mapping, mapped) })
    }
}

#[cfg(target_os = "linux")]
impl Drop for Memory {
    fn drop(&mut self) {
        let (start, bytes) = self.mapping;
        // SAFETY: the mapping is this one's own, and nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(start.cast(), bytes) };
    }
}

#[cfg(not(target_os = "linux"))]
impl Memory {
    fn zeroed(bytes: usize) -> Option<Memory> {
        let layout = Self::layout(bytes)?;
        // SAFETY: the layout has a size above 0.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        (!start.is_null()).then_some(Memory { start, bytes })
    }

    fn layout(bytes: usize) -> Option<std::alloc::Layout> {
        std::alloc::Layout::from_size_align(bytes.max(1), ALIGNMENT).ok()
    }
}

#[cfg(not(target_os = "linux"))]
impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.bytes) {
            // SAFETY: it was allocated with the same layout, and nothing refers to it any more.
            unsafe { std::alloc::dealloc(self.start, layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_zero_aligned_and_apart() {
        let arena = Arena::new(5, 3 * ALIGNMENT - 1).unwrap();
        assert_eq!((arena.slots(), arena.slot_bytes()), (5, 3 * ALIGNMENT));
        for slot in 0..5 {
            assert!(arena.read(slot).iter().all(|&byte| byte == 0));
            assert_eq!(arena.read(slot).as_ptr().addr() % ALIGNMENT, 0);
            arena.touch(slot);
            arena.write(slot).fill(slot as u8 + 1);
        }
        for slot in 0..5 {
            assert_eq!(arena.read(slot).len(), 3 * ALIGNMENT);
            assert!(arena.read(slot).iter().all(|&byte| byte == slot as u8 + 1));
        }
    }

    #[test]
    #[should_panic]
    fn there_is_no_slot_beyond_the_last() {
        let arena = Arena::new(2, ALIGNMENT).unwrap();
        arena.touch(2);
    }

    #[test]
    fn threads_fill_and_read_slots_at_once() {
        let arena = Arena::new(3, 2 * ALIGNMENT).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let arena = &arena;
                scope.spawn(move || {
                    for round in 0..200 {
                        let slot = (round + thread as usize) % 3;
                        arena.write(slot).fill(thread);
                        let read = arena.read(slot);
                        assert!(read.iter().all(|&byte| byte == read[0]));
                    }
                });
            }
        });
    }

    #[test]
    fn too_much_is_an_error_and_nothing_is_none() {
        for (slots, bytes) in [(1, usize::MAX), (usize::MAX, 1), (1 << 20, 1 << 44), (3, usize::MAX / 2)] {
            assert!(Arena::new(slots, bytes).is_err(), "{slots} {bytes}");
        }
        assert_eq!(Arena::new(0, ALIGNMENT).unwrap().slots(), 0);
        assert_eq!(Arena::new(2, 0).unwrap().slot_bytes(), 0);
    }

    /// Huge pages must not make more memory resident than was asked for.
    #[test]
    #[cfg(target_os = "linux")]
    fn no_more_is_resident_than_was_asked_for() {
        let bytes = (8 << 20) + ALIGNMENT;
        let arena = Arena::new(3, bytes).unwrap();
        (0..3).for_each(|slot| arena.touch(slot));
        let start = arena.memory.mapping.0.addr();
        let Ok(maps) = std::fs::read_to_string("/proc/self/smaps") else { return };
        let (mut inside, mut resident) = (false, 0);
        for line in maps.lines() {
            if let Some((from, rest)) = line.split_once('-')
                && let Ok(from) = usize::from_str_radix(from, 16)
            {
                let to = rest.split_whitespace().next().and_then(|to| usize::from_str_radix(to, 16).ok());
                // The mapping is in several pieces, some advised; a neighbour may have been merged to one of them.
                inside = from < start + arena.memory.mapping.1 && to.is_some_and(|to| to > start);
            } else if let (true, Some(size)) = (inside, line.strip_prefix("Rss:")) {
                resident += size.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10;
            }
        }
        // An emulator keeps the mappings its own way.
        if resident > 0 {
            assert!(
                resident >= 3 * bytes && resident <= 3 * bytes + (1 << 20),
                "{resident} of {}",
                3 * bytes
            );
        }
    }
}
