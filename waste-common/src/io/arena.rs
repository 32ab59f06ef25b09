//! One large allocation cut into slots that reads go to.

#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::{ALIGNMENT, OutOfMemory, Slab};

/// Equal slots of whole pages, side by side in one allocation, in huge pages where the system has them. A slot may be
/// read by many or written by one at a time.
pub struct Arena {
    memory: Slab,
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
        let memory = Slab::new(bytes)?;
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
        let first = self.memory.start().wrapping_add(slot * self.slot_bytes);
        std::ptr::slice_from_raw_parts_mut(first, self.slot_bytes)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_zero_aligned_and_apart() {
        let arena = Arena::new(5, 3 * ALIGNMENT - 1).unwrap();
        assert_eq!((arena.slots(), arena.slot_bytes()), (5, 3 * ALIGNMENT));
        for slot in 0..5 {
            assert!(*arena.read(slot) == [0; 3 * ALIGNMENT]);
            assert_eq!(arena.read(slot).as_ptr().addr() % ALIGNMENT, 0);
            arena.touch(slot);
            arena.write(slot).fill(slot as u8 + 1);
        }
        for slot in 0..5 {
            assert!(*arena.read(slot) == [slot as u8 + 1; 3 * ALIGNMENT]);
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
                        assert!(*read == [read[0]; 2 * ALIGNMENT]);
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
}
