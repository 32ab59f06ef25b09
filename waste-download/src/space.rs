//! Room on the disk: what the files under way still need is spoken for, and a reserve is left alone.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use waste_common::io::filesystem;

use crate::error::DownloadError;
use crate::talk::Talk;
use crate::wait::Stop;

/// Bytes between two looks at the disk.
const LOOK_EVERY: u64 = 16 << 20;
/// Time between two looks while waiting.
const WAIT: Duration = Duration::from_secs(1);

/// The free bytes of a directory's disk; None where the system does not say.
type Free = dyn Fn(&Path) -> Option<u64> + Send + Sync;

pub(crate) struct Space<'a> {
    dir: PathBuf,
    reserve: u64,
    /// Wait for room instead of giving up.
    wait: bool,
    free: Box<Free>,
    /// What the files under way still need.
    spoken_for: Mutex<u64>,
    stop: &'a Stop,
    talk: &'a Talk,
}

impl<'a> Space<'a> {
    pub fn new(dir: &Path, reserve: u64, wait: bool, stop: &'a Stop, talk: &'a Talk) -> Space<'a> {
        let free = Box::new(|dir: &Path| filesystem(dir).ok()?.free_bytes);
        Space { dir: dir.to_owned(), reserve, wait, free, spoken_for: Mutex::new(0), stop, talk }
    }

    /// Whether so many bytes more fit, before anything is fetched. Who waits for room need not have all of it now.
    pub fn demand(&self, bytes: u64) -> Result<(), DownloadError> {
        match (self.free)(&self.dir) {
            Some(free) if bytes > 0 && !self.wait && free < bytes.saturating_add(self.reserve) => {
                Err(self.full(bytes, free))
            }
            _ => Ok(()),
        }
    }

    /// Speaks for the bytes a file still needs, once they are there.
    pub fn admit(&self, bytes: u64) -> Result<Room<'_, 'a>, DownloadError> {
        self.until(|spoken_for, free| {
            let fits = free >= spoken_for.saturating_add(bytes).saturating_add(self.reserve);
            if fits || !self.wait {
                // Without waiting all was demanded at once before.
                *spoken_for = spoken_for.saturating_add(bytes);
            }
            if fits || !self.wait { Ok(()) } else { Err(bytes) }
        })?;
        Ok(Room { space: self, left: bytes, unseen: 0 })
    }

    /// The system says the disk is full: the error for it, or a wait until there is room for some of `left` bytes.
    fn exhausted(&self, left: u64) -> Result<(), DownloadError> {
        if !self.wait {
            let needed = *self.spoken_for.lock().unwrap_or_else(PoisonError::into_inner);
            return Err(self.full(needed, (self.free)(&self.dir).unwrap_or(0)));
        }
        let enough = left.min(LOOK_EVERY).saturating_add(self.reserve);
        self.until(|_, free| if free >= enough { Ok(()) } else { Err(0) })
    }

    /// Whether the reserve is still there.
    fn look(&self) -> Result<(), DownloadError> {
        self.until(|_, free| if free >= self.reserve { Ok(()) } else { Err(0) })
    }

    /// Asks `enough` (of what is spoken for, and what is free) until it is content, or gives up.
    fn until(&self, enough: impl Fn(&mut u64, u64) -> Result<(), u64>) -> Result<(), DownloadError> {
        let mut told = false;
        loop {
            let free = (self.free)(&self.dir).unwrap_or(u64::MAX);
            let (answer, spoken_for) = {
                let mut spoken_for = self.spoken_for.lock().unwrap_or_else(PoisonError::into_inner);
                let answer = enough(&mut spoken_for, free);
                (answer, *spoken_for)
            };
            let Err(more) = answer else { return Ok(()) };
            let error = self.full(spoken_for.saturating_add(more), free);
            if !self.wait {
                return Err(error);
            }
            if !told {
                self.talk.event("waiting_for_space", None, &format!("waiting for room: {error}"));
                told = true;
            }
            self.stop.sleep_until(Instant::now() + WAIT)?;
        }
    }

    fn full(&self, needed: u64, free: u64) -> DownloadError {
        DownloadError::Space {
            dir: self.dir.clone(),
            needed_bytes: needed,
            reserve_bytes: self.reserve,
            free_bytes: free,
        }
    }
}

/// The room of one file.
pub(crate) struct Room<'s, 'a> {
    space: &'s Space<'a>,
    left: u64,
    unseen: u64,
}

impl Room<'_, '_> {
    /// So many bytes have been written.
    pub fn spend(&mut self, bytes: u64) -> Result<(), DownloadError> {
        let spent = bytes.min(self.left);
        self.left -= spent;
        *self.space.spoken_for.lock().unwrap_or_else(PoisonError::into_inner) -= spent;
        self.unseen += bytes;
        if self.unseen >= LOOK_EVERY {
            self.unseen = 0;
            self.space.look()?;
        }
        Ok(())
    }

    /// The system says the disk is full: the error for it, or a wait until it is not.
    pub fn exhausted(&self) -> Result<(), DownloadError> {
        self.space.exhausted(self.left)
    }
}

impl Drop for Room<'_, '_> {
    fn drop(&mut self) {
        *self.space.spoken_for.lock().unwrap_or_else(PoisonError::into_inner) -= self.left;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn with(free: u64, wait: bool, test: impl FnOnce(&Space, &AtomicU64)) {
        let (stop, talk) = (Stop::default(), Talk::silent());
        let disk = Arc::new(AtomicU64::new(free));
        let mut space = Space::new(Path::new("d"), 100, wait, &stop, &talk);
        let shown = Arc::clone(&disk);
        space.free = Box::new(move |_| Some(shown.load(Ordering::Relaxed)));
        test(&space, &disk);
    }

    #[test]
    fn the_reserve_is_left_alone_before_and_during() {
        with(1000, false, |space, disk| {
            assert!(space.demand(900).is_ok());
            let error = space.demand(901).unwrap_err();
            assert!(matches!(
                error,
                DownloadError::Space { needed_bytes: 901, free_bytes: 1000, reserve_bytes: 100, .. }
            ));
            assert!(space.demand(0).is_ok());
            let mut room = space.admit(900).unwrap();
            disk.store(99, Ordering::Relaxed);
            assert!(room.spend(1).is_ok());
            assert!(room.spend(LOOK_EVERY).unwrap_err().is_full());
        });
    }

    #[test]
    fn who_waits_takes_files_one_after_another_as_room_is_made() {
        with(1000, true, |space, disk| {
            assert!(space.demand(u64::MAX).is_ok());
            let first = space.admit(600).unwrap();
            std::thread::scope(|scope| {
                let second = scope.spawn(|| space.admit(600).map(drop));
                std::thread::sleep(Duration::from_millis(20));
                assert!(!second.is_finished());
                disk.store(1300, Ordering::Relaxed);
                second.join().unwrap().unwrap();
            });
            drop(first);
            assert_eq!(*space.spoken_for.lock().unwrap(), 0);
        });
    }
}
