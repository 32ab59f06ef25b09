//! What the x86-64 kernels share.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

/// How far ahead of their use indices and weights are asked for, in bytes.
pub(super) const PREFETCH: usize = 4096;

/// Asks for the cache line `at` bytes on, which may lie beyond the slice.
#[inline(always)]
pub(super) fn prefetch(bytes: &[u8], at: usize) {
    // SAFETY: a hint, which may name any address.
    #[allow(unused_unsafe, reason = "an unsafe function for older compilers")]
    unsafe {
        _mm_prefetch::<_MM_HINT_T1>(bytes.as_ptr().wrapping_add(at).cast());
    }
}
