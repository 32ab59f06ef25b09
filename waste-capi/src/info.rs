//! What the library is, and what the machine has.
#![allow(unsafe_code)] // the border: see each function

use std::ffi::{CString, c_char};
use std::sync::OnceLock;

use waste_engine::kernels::Kernels;
use waste_engine::machine::{Machine, peak_rss_bytes, resident_bytes};

use crate::error::{Status, guard};
use crate::raw;

/// The machine, as this process may use it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MachineInfo {
    /// sizeof(waste_machine_info).
    pub size: usize,
    /// RAM built in.
    pub physical_ram_bytes: u64,
    /// RAM this process may count on: within the limits of its control groups, without what engines have reserved.
    pub usable_ram_bytes: u64,
    /// RAM that engines have reserved, those of this process too.
    pub reserved_bytes: u64,
    /// What this process has in RAM; 0 where the system does not tell.
    pub resident_bytes: u64,
    /// The most it has had; 0 where the system does not tell.
    pub peak_resident_bytes: u64,
    /// CPUs it may run on.
    pub cpus: u64,
}

raw::sized!(MachineInfo);

/// The version of the library, such as "0.1.0". It belongs to the library, for ever.
#[unsafe(no_mangle)]
pub extern "C" fn waste_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// The same as a number: 10000 · major + 100 · minor + patch.
#[unsafe(no_mangle)]
pub extern "C" fn waste_version_number() -> u32 {
    let part = |text: &str| text.parse::<u32>().unwrap_or(0);
    10_000 * part(env!("CARGO_PKG_VERSION_MAJOR"))
        + 100 * part(env!("CARGO_PKG_VERSION_MINOR"))
        + part(env!("CARGO_PKG_VERSION_PATCH"))
}

/// What was built, in a line: version, the kernel set this CPU gets, and those this build has. It
/// belongs to the library, for ever.
#[unsafe(no_mangle)]
pub extern "C" fn waste_build_info() -> *const c_char {
    static INFO: OnceLock<CString> = OnceLock::new();
    let info = INFO.get_or_init(|| {
        let text = format!(
            "waste {}, kernels {} of {}",
            env!("CARGO_PKG_VERSION"),
            Kernels::detect().name,
            Kernels::NAMES.join(" "),
        );
        CString::new(text).unwrap_or_default()
    });
    info.as_ptr()
}

/// Looks at the machine.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_machine(machine: *mut MachineInfo) -> Status {
    guard(|| {
        let found = Machine::probe()?;
        let info = MachineInfo {
            size: size_of::<MachineInfo>(),
            physical_ram_bytes: found.physical_ram_bytes,
            usable_ram_bytes: found.usable_ram_bytes,
            reserved_bytes: found.reserved_bytes,
            resident_bytes: resident_bytes().unwrap_or(0),
            peak_resident_bytes: peak_rss_bytes().unwrap_or(0),
            cpus: found.cpus as u64,
        };
        // SAFETY: the caller's promise.
        unsafe { raw::fill(machine, &info, "the machine") }
    })
}
