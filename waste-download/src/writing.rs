//! Writing past the page cache while more comes: the disk answers such a write only when it has done it.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use waste_common::io::{ALIGNMENT, AlignedBuf, DirectWriter, OutOfMemory};

/// What has come, but is not in the file and its journal yet; a killed process loses no more. Full, it is a range of the
/// journal.
pub(crate) struct Held {
    buffer: AlignedBuf,
    /// Where in the file it begins.
    pub start: u64,
    bytes: usize,
}

impl Held {
    pub fn new(bytes_max: usize) -> Result<Held, OutOfMemory> {
        Ok(Held { buffer: AlignedBuf::zeroed(bytes_max)?, start: 0, bytes: 0 })
    }

    pub fn content(&self) -> &[u8] {
        &self.buffer.bytes()[..self.bytes]
    }

    pub fn end(&self) -> u64 {
        self.start + self.bytes as u64
    }

    /// Bytes until it is full, which it is where a page of the file ends.
    pub fn room(&self) -> usize {
        self.buffer.len() - (self.start % ALIGNMENT as u64) as usize - self.bytes
    }

    /// Takes bytes there is room for.
    pub fn take(&mut self, bytes: &[u8]) {
        self.buffer.bytes_mut()[self.bytes..][..bytes.len()].copy_from_slice(bytes);
        self.bytes += bytes.len();
    }

    /// Empty, at another place.
    pub fn begin(&mut self, start: u64) {
        (self.start, self.bytes) = (start, 0);
    }
}

/// A thread that writes one after the other.
pub(crate) struct Writing {
    wanted: SyncSender<Held>,
    written: Receiver<(Held, io::Result<u32>)>,
    under_way: bool,
}

impl Writing {
    pub fn start(mut direct: DirectWriter) -> Writing {
        let (wanted, receiver) = sync_channel::<Held>(1);
        let (sender, written) = sync_channel(1);
        std::thread::spawn(move || {
            for held in receiver {
                let content = held.content();
                let done = direct.write_at(held.start, content).map(|()| crc32fast::hash(content));
                if sender.send((held, done)).is_err() {
                    return;
                }
            }
        });
        Writing { wanted, written, under_way: false }
    }

    /// Gives it something to write. Nothing is under way.
    pub fn give(&mut self, held: Held) {
        // A thread that is gone is noticed when it is waited for.
        let _ = self.wanted.send(held);
        self.under_way = true;
    }

    /// What was given last, once it has been written; its crc32, if it has. None, if nothing is under way.
    pub fn wait(&mut self) -> io::Result<Option<(Held, io::Result<u32>)>> {
        if !self.under_way {
            return Ok(None);
        }
        let died = |_| io::Error::other("the thread that writes has died");
        let done = self.written.recv().map_err(died)?;
        self.under_way = false;
        Ok(Some(done))
    }
}
