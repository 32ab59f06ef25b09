//! Reading files: aligned buffers, and positional reads that bypass the page cache on Linux, macOS and Windows
//! behind one type.
//!
//! Experts are read past the page cache so that the RAM a budget counts is the RAM that is used: a cached copy in
//! the kernel would compete with the engine's own cache and hide its misses.

mod arena;
mod buffer;
mod cached;
mod file;
mod filesystem;
mod slab;
mod write;

pub use arena::{Arena, SlotMut, SlotRef};
pub use buffer::{AlignedBuf, OutOfMemory};
pub use file::{Bypass, PlainFile, ReadError, ReadFile};
pub use filesystem::{FileSystem, existing, filesystem};
pub use slab::Slab;
pub use write::DirectWriter;

/// The alignment of cache-bypassing reads in bytes: of the offset, the length and the buffer.
pub const ALIGNMENT: usize = 4096;
