//! The resident trunk: its bytes are read once, in the order of the file and past the page cache, into memory in huge
//! pages; matrices are views of it.

use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use waste_common::container::Trunk;
use waste_common::io::{ALIGNMENT, ReadError, ReadFile, Slab};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::error::EngineError;
use crate::options::{EngineOptions, Event};

/// Bytes of one read: enough for any disk's bandwidth, few enough to stop soon.
const PIECE: usize = 4 << 20;

#[cfg(target_endian = "big")]
compile_error!("weights are used as they are stored: little-endian");

/// Numbers of a weight tensor, [count]: of their own, or a view of the resident trunk.
pub enum Weights<T> {
    /// Of their own.
    Own(Vec<T>),
    /// Bytes `range` of a slab, which are a whole number of aligned values.
    View {
        /// The memory.
        slab: Arc<Slab>,
        /// The bytes.
        range: Range<usize>,
    },
}

impl<T: FromBytes + Immutable + KnownLayout> Deref for Weights<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Weights::Own(weights) => weights,
            // Length and alignment were seen to when the view was made.
            Weights::View { slab, range } => <[T]>::ref_from_bytes(&slab[range.clone()]).unwrap_or_default(),
        }
    }
}

impl<T> From<Vec<T>> for Weights<T> {
    fn from(weights: Vec<T>) -> Self {
        Weights::Own(weights)
    }
}

/// Ranges of the trunk file in memory.
pub struct Resident {
    /// Where each begins in the file, ascending.
    runs: Vec<(u64, Arc<Slab>)>,
}

impl Resident {
    /// Reads the ranges `spans` of the trunk file, and no page of it twice; tells `options.watch` of it.
    ///
    /// # Errors
    /// A range ends beyond the file, there is not that much memory, a read fails, or it was cancelled.
    pub fn load(
        trunk: &Trunk,
        spans: Vec<Range<u64>>,
        options: &EngineOptions,
    ) -> Result<Resident, EngineError> {
        let file = ReadFile::open(trunk.source().path(), options.bypass)?;
        let mut runs = Vec::new();
        for run in merged(spans) {
            // What no address reaches no memory holds.
            let bytes = usize::try_from(run.end - run.start).unwrap_or(usize::MAX);
            runs.push((run.start, Slab::new(bytes)?));
        }
        let of = runs.iter().map(|(_, slab)| slab.len() as u64).sum();
        let pieces = runs.iter_mut().flat_map(|(start, slab)| {
            let offsets = (*start..).step_by(PIECE);
            offsets.zip(slab.chunks_mut(PIECE))
        });
        let (pieces, done, failed) = (Mutex::new(pieces), Mutex::new(0), AtomicBool::new(false));
        let read_all = || -> Result<(), EngineError> {
            loop {
                let next = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((offset, piece)) = next.filter(|_| !failed.load(Ordering::Relaxed)) else {
                    return Ok(());
                };
                if options.cancelled.load(Ordering::Relaxed) {
                    return Err(EngineError::Interrupted);
                }
                let got = file.read_tail(offset, piece)?;
                // The last page of a file need not be whole.
                let expected = trunk.source().bytes().saturating_sub(offset).min(piece.len() as u64) as usize;
                if got < expected {
                    let file = file.path().to_owned();
                    return Err(ReadError::Truncated { file, offset, expected, got }.into());
                }
                // Told under the lock, so that it only grows.
                let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
                *done += piece.len() as u64;
                options.watch.tell(Event::Loaded { bytes: *done, of });
            }
        };
        // One that fails stops the others.
        let read = || read_all().inspect_err(|_| failed.store(true, Ordering::Relaxed));
        let threads = options.readers.max(1);
        std::thread::scope(|scope| {
            let thread = |source| EngineError::Thread { what: "a reader of the trunk", source };
            // Those that cannot be started are not missed: this one reads all that nobody else does.
            let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, read).ok();
            let others: Vec<_> = (1..threads).filter_map(spawn).collect();
            let mut outcome = read();
            for other in others {
                let panicked = |_| Err(thread(std::io::Error::other("it panicked")));
                outcome = outcome.and(other.join().unwrap_or_else(panicked));
            }
            outcome
        })?;
        Ok(Resident { runs: runs.into_iter().map(|(start, slab)| (start, Arc::new(slab))).collect() })
    }

    /// The `count` values at `offset` of the file; a copy if they are not aligned there. `None` for what was not read.
    pub fn weights<T>(&self, offset: u64, count: u64) -> Option<Weights<T>>
    where
        T: FromBytes + FromZeros + IntoBytes + Immutable + KnownLayout + Clone,
    {
        let (start, slab) = self.runs.iter().rev().find(|(start, _)| *start <= offset)?;
        let first = usize::try_from(offset - start).ok()?;
        let bytes = usize::try_from(count).ok()?.checked_mul(size_of::<T>())?;
        let range = first..first.checked_add(bytes)?;
        let stored = slab.get(range.clone())?;
        if <[T]>::ref_from_bytes(stored).is_ok() {
            return Some(Weights::View { slab: Arc::clone(slab), range });
        }
        let mut own = vec![T::new_zeroed(); count as usize];
        own.as_mut_bytes().copy_from_slice(stored);
        Some(Weights::Own(own))
    }
}

/// Whole pages that cover the ranges, ascending, with those that touch made one.
fn merged(mut spans: Vec<Range<u64>>) -> Vec<Range<u64>> {
    let page = ALIGNMENT as u64;
    spans.sort_by_key(|span| span.start);
    let mut runs: Vec<Range<u64>> = Vec::new();
    for span in spans {
        let span = span.start / page * page..span.end.next_multiple_of(page);
        match runs.last_mut() {
            Some(last) if span.start <= last.end => last.end = last.end.max(span.end),
            _ => runs.push(span),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_become_whole_pages_and_no_page_is_read_twice() {
        assert_eq!(merged(vec![5000..5001, 0..10, 4096..8192, 20_000..20_480]), [0..8192, 16_384..20_480]);
        assert_eq!(merged(vec![1..2, 4095..4097, 12_288..12_289]), [0..8192, 12_288..16_384]);
        assert!(merged(vec![]).is_empty());
    }

    #[test]
    fn views_are_what_was_read_and_unaligned_values_are_copied() {
        let mut slab = Slab::new(4096).unwrap();
        slab.iter_mut().enumerate().for_each(|(i, byte)| *byte = i as u8);
        let resident = Resident { runs: vec![(8192, Arc::new(slab))] };
        let halves: Weights<u16> = resident.weights(8192 + 2, 3).unwrap();
        assert!(matches!(halves, Weights::View { .. }));
        assert_eq!(*halves, [0x0302, 0x0504, 0x0706]);
        let odd: Weights<u16> = resident.weights(8192 + 1, 2).unwrap();
        assert!(matches!(odd, Weights::Own(_)));
        assert_eq!(*odd, [0x0201, 0x0403]);
        assert!(resident.weights::<u8>(8191, 1).is_none());
        assert!(resident.weights::<u8>(8192, 4097).is_none());
        assert!(resident.weights::<f32>(8192, u64::MAX).is_none());
        assert_eq!(resident.weights::<f32>(8192 + 4096, 0).unwrap().len(), 0);
    }
}
