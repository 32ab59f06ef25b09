//! Whether a part of a file lies in the page cache: Linux 6.5 and later say it, without reading anything.
#![allow(unsafe_code)]

use std::fs::File;

/// `cachestat` has this number on every architecture; libc does not name it everywhere.
#[cfg(target_os = "linux")]
const CACHESTAT: libc::c_long = 451;

/// The range that is asked about.
#[cfg(target_os = "linux")]
#[repr(C)]
struct Range {
    offset: u64,
    bytes: u64,
}

/// The answer, in pages.
#[cfg(target_os = "linux")]
#[repr(C)]
#[derive(Default)]
struct Pages {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Whether all of `[offset, offset + bytes)` is there. No, if nobody says it.
#[cfg(target_os = "linux")]
pub(super) fn all_cached(file: &File, offset: u64, bytes: u64) -> bool {
    use std::os::fd::AsRawFd;
    let page = rustix::param::page_size() as u64;
    let Some(end) = offset.checked_add(bytes).filter(|end| *end <= i64::MAX as u64) else { return false };
    // A length of 0 would ask about the rest of the file.
    if bytes == 0 {
        return false;
    }
    let (range, mut pages) = (Range { offset, bytes }, Pages::default());
    // SAFETY: the descriptor is `file`'s, and both structures are those of the kernel's interface and outlive the call;
    // all three are ours to guarantee.
    let told = unsafe {
        libc::syscall(CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut pages, 0 as libc::c_uint)
    };
    told == 0 && pages.cached >= end.div_ceil(page) - offset / page
}

#[cfg(not(target_os = "linux"))]
pub(super) fn all_cached(_: &File, _: u64, _: u64) -> bool {
    false
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn only_what_is_there_as_a_whole_counts() {
        let page = rustix::param::page_size() as u64;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![7; 64 * page as usize + 1]).unwrap();
        let file = File::open(&path).unwrap();
        file.sync_all().unwrap();
        // Just written, unless the kernel does not say it (or, on a file system of its own cache, knows better).
        if !all_cached(&file, 0, 64 * page + 1) {
            return;
        }
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
        if all_cached(&file, 0, 64 * page) {
            return; // a file system in memory
        }
        file.read_exact_at(&mut [0], 5 * page).unwrap();
        assert!(all_cached(&file, 5 * page, page) && all_cached(&file, 5 * page + 7, 1));
        assert!(!all_cached(&file, 5 * page, page + 1) && !all_cached(&file, 5 * page - 1, 2));
        for (offset, bytes) in [(0, 0), (0, u64::MAX), (u64::MAX, 1), (1 << 50, page)] {
            assert!(!all_cached(&file, offset, bytes), "{offset} {bytes}");
        }
    }
}
