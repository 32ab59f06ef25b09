//! One large allocation.

#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};

use super::OutOfMemory;

/// Bytes that begin on a page, in huge pages where the system has them: a third less time for what streams through
/// gigabytes of them.
pub struct Slab {
    start: *mut u8,
    bytes: usize,
    #[cfg(target_os = "linux")]
    mapping: (*mut u8, usize),
}

// SAFETY: plain memory, of no thread.
unsafe impl Send for Slab {}
// SAFETY: a shared slab is only read, or its owner hands out parts and keeps their users apart.
unsafe impl Sync for Slab {}

impl Slab {
    /// `bytes` zero bytes. The system may hand out the pages only as they are first touched.
    ///
    /// # Errors
    /// There is not that much memory.
    pub fn new(bytes: usize) -> Result<Slab, OutOfMemory> {
        Slab::zeroed(bytes).ok_or(OutOfMemory { bytes })
    }

    /// The first byte, for an owner that never dereferences the slab and keeps the users of each part apart.
    pub(super) fn start(&self) -> *mut u8 {
        self.start
    }
}

impl Deref for Slab {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` points to `bytes` initialised bytes that live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }
}

impl DerefMut for Slab {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else has them.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl std::fmt::Debug for Slab {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slab").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

#[cfg(target_os = "linux")]
impl Slab {
    /// The size of a huge page where pages have 4 KiB; with others the advice is at worst without effect.
    const HUGE_PAGE: usize = 2 << 20;

    fn zeroed(bytes: usize) -> Option<Slab> {
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
        // Miri has no advice to give.
        if cfg!(not(miri)) {
            // SAFETY: the range lies in the mapping made above, and the advice changes no content. Where there are no
            // huge pages it fails, and small ones do.
            let _ = unsafe { madvise(start.cast(), huge, Advice::LinuxHugepage) };
        }
        Some(Slab { start, bytes, mapping: (mapping, mapped) })
    }
}

#[cfg(target_os = "linux")]
impl Drop for Slab {
    fn drop(&mut self) {
        let (start, bytes) = self.mapping;
        // SAFETY: the mapping is this one's own, and nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(start.cast(), bytes) };
    }
}

#[cfg(not(target_os = "linux"))]
impl Slab {
    fn zeroed(bytes: usize) -> Option<Slab> {
        let layout = Self::layout(bytes)?;
        // SAFETY: the layout has a size above 0.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        (!start.is_null()).then_some(Slab { start, bytes })
    }

    fn layout(bytes: usize) -> Option<std::alloc::Layout> {
        std::alloc::Layout::from_size_align(bytes.max(1), super::ALIGNMENT).ok()
    }
}

#[cfg(not(target_os = "linux"))]
impl Drop for Slab {
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
    use crate::io::ALIGNMENT;

    #[test]
    fn is_zero_aligned_and_its_own() {
        for bytes in [0, 1, 4096, (2 << 20) + 5] {
            let mut slab = Slab::new(bytes).unwrap();
            assert_eq!((slab.len(), slab.as_ptr().addr() % ALIGNMENT), (bytes, 0));
            assert!(*slab == vec![0; bytes]);
            slab.fill(7);
            assert!(*slab == vec![7; bytes]);
        }
        assert_eq!(Slab::new(usize::MAX).unwrap_err(), OutOfMemory { bytes: usize::MAX });
    }

    /// Huge pages must not make more memory resident than was asked for.
    #[test]
    #[cfg(target_os = "linux")]
    #[cfg_attr(miri, ignore)] // it knows nothing of pages
    fn no_more_is_resident_than_was_asked_for() {
        let bytes = (24 << 20) + ALIGNMENT;
        let mut slab = Slab::new(bytes).unwrap();
        slab.fill(1);
        let start = slab.mapping.0.addr();
        let Ok(maps) = std::fs::read_to_string("/proc/self/smaps") else { return };
        let (mut inside, mut resident) = (false, 0);
        for line in maps.lines() {
            if let Some((from, rest)) = line.split_once('-')
                && let Ok(from) = usize::from_str_radix(from, 16)
            {
                let to = rest.split_whitespace().next().and_then(|to| usize::from_str_radix(to, 16).ok());
                // The mapping is in several pieces, some advised; a neighbour may have been merged to one of them.
                inside = from < start + slab.mapping.1 && to.is_some_and(|to| to > start);
            } else if let (true, Some(size)) = (inside, line.strip_prefix("Rss:")) {
                resident += size.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10;
            }
        }
        // An emulator keeps the mappings its own way.
        if resident > 0 {
            assert!(resident >= bytes && resident <= bytes + (1 << 20), "{resident} of {bytes}");
        }
    }
}
