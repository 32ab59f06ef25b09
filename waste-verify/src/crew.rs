//! The threads: each takes the next piece of work and has one aligned buffer of its own.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rayon::{ThreadPool, ThreadPoolBuilder};
use waste_common::cli::{Failure, Interrupt, Progress};
use waste_common::io::{ALIGNMENT, AlignedBuf, ReadFile};

use crate::report::Halt;

/// Bytes read at once from the disk where there are no records.
const PIECE: u64 = 4 << 20;
/// Bytes read at once from the page cache: they are still in the CPU's cache when they are looked at. Twice as many are
/// no faster.
const CACHED_PIECE: usize = 256 << 10;

/// A pool of threads that stops when it is told to.
pub(crate) struct Crew<'a> {
    pool: ThreadPool,
    interrupt: &'a Interrupt,
}

impl<'a> Crew<'a> {
    pub fn new(threads: usize, interrupt: &'a Interrupt) -> Result<Self, Failure> {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build();
        let pool =
            pool.map_err(|error| Failure::internal(format!("cannot start {threads} threads: {error}")))?;
        Ok(Crew { pool, interrupt })
    }

    /// Does `work` for every number below `count`, in order of beginning; ends early with its first failure.
    pub fn each(
        &self,
        count: usize,
        progress: &Progress,
        work: impl Fn(usize, &mut Worker) -> Result<(), Failure> + Sync,
    ) -> Result<(), Failure> {
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let results = self.pool.broadcast(|_| {
            let mut worker = Worker { interrupt: self.interrupt, progress, buffer: None, piece: None };
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                if at >= count || stop.load(Ordering::Relaxed) {
                    return Ok(());
                }
                let done = self.interrupt.check().and_then(|()| work(at, &mut worker));
                if done.is_err() {
                    stop.store(true, Ordering::Relaxed);
                    return done;
                }
            }
        });
        results.into_iter().collect()
    }
}

/// One of the threads.
pub(crate) struct Worker<'a> {
    interrupt: &'a Interrupt,
    progress: &'a Progress,
    buffer: Option<AlignedBuf>,
    /// What is read at once from the page cache.
    piece: Option<AlignedBuf>,
}

/// So many bytes of a buffer, which grows where it must.
fn room(buffer: &mut Option<AlignedBuf>, bytes: usize) -> Result<&mut [u8], Failure> {
    if buffer.as_ref().is_none_or(|buffer| buffer.len() < bytes) {
        *buffer = None;
        *buffer = Some(AlignedBuf::zeroed(bytes.next_multiple_of(ALIGNMENT))?);
    }
    match buffer {
        Some(buffer) => Ok(&mut buffer.bytes_mut()[..bytes]),
        None => Err(Failure::internal("a buffer has gone")),
    }
}

impl Worker<'_> {
    /// For the safe points of long work.
    pub fn check(&self) -> Result<(), Failure> {
        self.interrupt.check()
    }

    /// A few bytes of the buffer, for a read of another kind.
    pub fn small(&mut self, bytes: usize) -> Result<&mut [u8], Failure> {
        self.progress.add(bytes as u64);
        room(&mut self.buffer, bytes)
    }

    /// Counts bytes that were looked at.
    pub fn advance(&self, bytes: u64) {
        self.progress.add(bytes);
    }

    /// Reads `bytes` (whole pages) from `offset` (a page's). `piece` sees all of it in order, as soon as it is there; of
    /// what is returned only the ranges `kept` are sure to be it. From the page cache nothing else is copied twice: a
    /// record does not stay in the cache of the CPU, the pieces do.
    pub fn read(
        &mut self,
        file: &ReadFile,
        offset: u64,
        bytes: usize,
        kept: &[Range<usize>],
        mut piece: impl FnMut(&[u8]),
    ) -> Result<&[u8], Halt> {
        let progress = self.progress;
        let buffer = room(&mut self.buffer, bytes)?;
        if file.in_cache(offset, bytes) {
            for at in (0..bytes).step_by(CACHED_PIECE) {
                let part = room(&mut self.piece, CACHED_PIECE.min(bytes - at))?;
                file.read_at(offset + at as u64, part)?;
                piece(part);
                for range in kept {
                    let (from, to) = (range.start.max(at), range.end.min(at + part.len()));
                    if from < to {
                        buffer[from..to].copy_from_slice(&part[from - at..to - at]);
                    }
                }
            }
        } else {
            file.read_at(offset, buffer)?;
            piece(buffer);
        }
        progress.add(bytes as u64);
        Ok(buffer)
    }

    /// Reads `[offset, offset + len)` in pieces of some MiB, past the page cache where the system lets us.
    pub fn stream(
        &mut self,
        file: &ReadFile,
        offset: u64,
        len: u64,
        mut piece: impl FnMut(&[u8]),
    ) -> Result<(), Halt> {
        let (interrupt, progress) = (self.interrupt, self.progress);
        let end = offset + len;
        let mut at = offset;
        while at < end {
            interrupt.check()?;
            let start = at - at % ALIGNMENT as u64;
            let step = if file.in_cache(start, PIECE as usize) { CACHED_PIECE as u64 } else { PIECE };
            let stop = end.min(start + step);
            let wanted = (stop - start) as usize;
            let buffer = room(&mut self.buffer, wanted.next_multiple_of(ALIGNMENT))?;
            let got = file.read_tail(start, buffer)?;
            if got < wanted {
                return Err(Halt::Read(waste_common::io::ReadError::Truncated {
                    file: file.path().to_owned(),
                    offset: start,
                    expected: wanted,
                    got,
                }));
            }
            piece(&buffer[(at - start) as usize..wanted]);
            progress.add(stop - at);
            at = stop;
        }
        Ok(())
    }
}
