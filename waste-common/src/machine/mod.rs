//! The machine: how much RAM this process may count on, and how many CPUs.
//!
//! Only capacity is asked for, never how busy the machine is at the moment, so the same command gives the same
//! budget. Linux says it in `/proc` and the cgroup tree. macOS and Windows say it only through calls that need
//! unsafe code; there a system tool is asked (`sysctl`, `wmic`, PowerShell), and if that fails too the error asks
//! for `--ram`.

mod cgroup;
mod cpus;
mod memory;
mod mounts;
mod paging;
mod reservation;

pub use cpus::CpuList;
pub use memory::{major_faults, peak_rss_bytes, resident_bytes, storage_bytes_read};
pub use mounts::{Mount, mounts};
pub use paging::{Paging, PagingWatch};
pub use reservation::{Reservation, ReservationError, ReservationInfo, reserved};

use crate::error::{Coded, Exit};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// What a plan needs to know of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// The RAM built in, in bytes.
    pub physical_ram_bytes: u64,
    /// What this process may count on: the physical RAM or the limit if that is less, without what running
    /// engines have reserved. In bytes.
    pub usable_ram_bytes: u64,
    /// The tightest limit set on this process's control group or one above it.
    pub limit: Option<Limit>,
    /// What engines in other processes have reserved, in bytes; already taken off `usable_ram_bytes`.
    pub reserved_bytes: u64,
    /// The CPUs this process may run on.
    pub cpus: usize,
}

/// A limit on the memory of a control group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Limit {
    /// In bytes.
    pub bytes: u64,
    /// The file that sets it.
    pub source: PathBuf,
}

/// The machine does not say how much RAM it has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot find out how much RAM this machine has: {reason}; say it with --ram, for example --ram 64GiB"
)]
pub struct MachineError {
    reason: String,
}

impl Coded for MachineError {
    fn exit(&self) -> Exit {
        Exit::Data
    }

    fn code(&self) -> &'static str {
        "unknown_ram"
    }
}

impl Machine {
    /// This machine, less what engines in other processes have reserved.
    ///
    /// # Errors
    /// The size of the RAM cannot be found out.
    pub fn probe() -> Result<Machine, MachineError> {
        let physical = memory::physical_ram().map_err(|reason| MachineError { reason })?;
        let limit = if cfg!(target_os = "linux") { cgroup::limit(Path::new("/")) } else { None };
        // Reservations are a courtesy between engines: where they cannot be read there are none.
        let own = std::process::id();
        let others = reserved().unwrap_or_default().into_iter().filter(|info| info.pid != own);
        let reserved = others.fold(0, |sum: u64, info| sum.saturating_add(info.bytes));
        Ok(Machine::new(physical, limit, reserved))
    }

    /// The Linux machine whose `proc` and `sys` lie under `root`. Reservations are not looked at.
    ///
    /// # Errors
    /// `proc/meminfo` does not say how much RAM there is.
    pub fn probe_in(root: &Path) -> Result<Machine, MachineError> {
        let physical = memory::meminfo(root).map_err(|reason| MachineError { reason })?;
        Ok(Machine::new(physical, cgroup::limit(root), 0))
    }

    /// A machine with so much RAM, for planning with `--ram`: no limit, no reservations, the CPUs of this one.
    pub fn with_ram(bytes: u64) -> Machine {
        Machine::new(bytes, None, 0)
    }

    /// What the process could count on if no other engine ran: the physical RAM, or the limit if that is less.
    pub fn unreserved_bytes(&self) -> u64 {
        self.limit.as_ref().map_or(self.physical_ram_bytes, |limit| self.physical_ram_bytes.min(limit.bytes))
    }

    fn new(physical: u64, limit: Option<Limit>, reserved: u64) -> Machine {
        let allowed = limit.as_ref().map_or(physical, |limit| physical.min(limit.bytes));
        Machine {
            physical_ram_bytes: physical,
            usable_ram_bytes: allowed.saturating_sub(reserved),
            limit,
            reserved_bytes: reserved,
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// The text of a small file of the system; None if it cannot be read.
fn small_file(path: &Path) -> Option<String> {
    use std::io::Read;
    let mut text = String::new();
    std::fs::File::open(path).ok()?.take(4 << 20).read_to_string(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_ram_or_asks_for_it() {
        match Machine::probe() {
            Ok(machine) => {
                assert!(machine.physical_ram_bytes >= 64 << 20 && machine.cpus > 0);
                assert!(machine.usable_ram_bytes <= machine.physical_ram_bytes);
            }
            Err(error) => {
                assert!(!cfg!(target_os = "linux") && error.to_string().contains("--ram"), "{error}")
            }
        }
    }

    #[test]
    fn the_limit_counts_before_reservations_are_taken_off() {
        let limit = |bytes| Some(Limit { bytes, source: "memory.max".into() });
        assert_eq!(Machine::new(64, None, 0).usable_ram_bytes, 64);
        assert_eq!(Machine::new(64, limit(32), 10).usable_ram_bytes, 22);
        assert_eq!(Machine::new(64, limit(128), 100).usable_ram_bytes, 0);
        assert_eq!(Machine::with_ram(64).physical_ram_bytes, 64);
    }
}
