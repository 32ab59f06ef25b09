//! Memory that cache-bypassing reads accept.

use super::ALIGNMENT;
use crate::error::{Coded, Exit};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// The unit of allocation; its type carries the alignment, so no unsafe code is needed.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C, align(4096))]
struct Page([u8; ALIGNMENT]);

/// Bytes that begin on a 4096-byte boundary and own whole pages.
pub struct AlignedBuf {
    pages: Vec<Page>,
    len: usize,
}

/// The system has no memory for a buffer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot allocate a buffer of {bytes} bytes; lower the budget")]
pub struct OutOfMemory {
    pub(super) bytes: usize,
}

impl Coded for OutOfMemory {
    fn exit(&self) -> Exit {
        Exit::Space
    }

    fn code(&self) -> &'static str {
        "out_of_memory"
    }
}

impl AlignedBuf {
    /// `len` zero bytes. The system hands out the pages as they are first touched.
    ///
    /// # Errors
    /// There is not that much memory.
    pub fn zeroed(len: usize) -> Result<AlignedBuf, OutOfMemory> {
        let pages = Page::new_vec_zeroed(len.div_ceil(ALIGNMENT)).map_err(|_| OutOfMemory { bytes: len })?;
        Ok(AlignedBuf { pages, len })
    }

    /// The length asked for, in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a buffer of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.pages.as_bytes()[..self.len]
    }

    /// The bytes, to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.pages.as_mut_bytes()[..self.len]
    }

    /// The bytes up to the end of the last page: a length that cache-bypassing reads accept.
    pub fn pages_mut(&mut self) -> &mut [u8] {
        self.pages.as_mut_bytes()
    }
}

impl std::fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AlignedBuf").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn begins_on_a_page_and_is_zero() {
        for len in [0, 1, 4095, 4096, 4097, 1 << 20] {
            let mut buffer = AlignedBuf::zeroed(len).unwrap();
            assert_eq!((buffer.len(), buffer.bytes().len(), buffer.is_empty()), (len, len, len == 0));
            assert_eq!(buffer.bytes().as_ptr().addr() % ALIGNMENT, 0);
            assert!(buffer.bytes() == vec![0; len]);
            assert_eq!(buffer.pages_mut().len(), len.next_multiple_of(ALIGNMENT));
            buffer.bytes_mut().fill(7);
            assert!(buffer.bytes() == vec![7; len]);
        }
    }

    #[test]
    fn too_much_is_an_error() {
        let error = AlignedBuf::zeroed(usize::MAX).unwrap_err();
        assert_eq!(error.exit(), Exit::Space);
    }
}
