//! What a figure was measured on.

use serde::Serialize;
use waste_common::cli::ByteSize;
use waste_common::machine::{Machine, MachineError};

/// The machine, as far as it matters for speed.
#[derive(Clone, Debug, Serialize)]
pub struct Environment {
    /// Model of the CPU; `unknown` where the system does not say.
    pub cpu: String,
    /// CPUs this process may run on.
    pub cpus: usize,
    /// RAM built in, in bytes.
    pub ram_bytes: u64,
    /// RAM this process may count on, in bytes.
    pub usable_ram_bytes: u64,
    /// `linux`, `macos`, `windows`.
    pub os: &'static str,
    /// Release of the system's kernel, where it is known.
    pub os_release: Option<String>,
    /// `x86_64`, `aarch64`.
    pub arch: &'static str,
    /// Version of the tools.
    pub version: &'static str,
    /// Whether the tools were built with optimisation for release.
    pub release_build: bool,
}

impl Environment {
    /// This machine.
    ///
    /// # Errors
    /// The size of the RAM cannot be found out.
    pub fn probe() -> Result<Environment, MachineError> {
        let machine = Machine::probe()?;
        Ok(Environment {
            cpu: cpu_model().unwrap_or_else(|| "unknown".to_owned()),
            cpus: machine.cpus,
            ram_bytes: machine.physical_ram_bytes,
            usable_ram_bytes: machine.usable_ram_bytes,
            os: std::env::consts::OS,
            os_release: os_release(),
            arch: std::env::consts::ARCH,
            version: env!("CARGO_PKG_VERSION"),
            release_build: !cfg!(debug_assertions),
        })
    }

    /// The same in a line.
    pub fn line(&self) -> String {
        let release = self.os_release.as_deref().unwrap_or("");
        let build = if self.release_build { "" } else { ", debug build" };
        format!(
            "{} ({} CPUs, {}), {} RAM, {} {release}, waste {}{build}",
            self.cpu,
            self.cpus,
            self.arch,
            ByteSize(self.ram_bytes),
            self.os,
            self.version
        )
    }
}

#[cfg(target_os = "linux")]
fn cpu_model() -> Option<String> {
    named_model(&std::fs::read_to_string("/proc/cpuinfo").ok()?)
}

#[cfg(target_vendor = "apple")]
fn cpu_model() -> Option<String> {
    ask("/usr/sbin/sysctl", &["-n", "machdep.cpu.brand_string"])
}

#[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
fn cpu_model() -> Option<String> {
    std::env::var("PROCESSOR_IDENTIFIER").ok()
}

#[cfg(target_os = "linux")]
fn os_release() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
    Some(text.trim().to_owned())
}

#[cfg(target_vendor = "apple")]
fn os_release() -> Option<String> {
    ask("/usr/bin/sw_vers", &["-productVersion"])
}

#[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
fn os_release() -> Option<String> {
    None
}

#[cfg(target_vendor = "apple")]
fn ask(tool: &str, args: &[&str]) -> Option<String> {
    let output = std::process::Command::new(tool).args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// `model name` of /proc/cpuinfo; Arm kernels give none.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
fn named_model(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    let (_, name) = line.split_once(':')?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_found_where_there_is_one() {
        assert_eq!(named_model("processor\t: 0\nmodel name\t: Some CPU\n").as_deref(), Some("Some CPU"));
        assert_eq!(named_model("processor\t: 0\nCPU part : 0xd0c\n"), None);
        assert_eq!(named_model("model name\t:\n"), None);
    }
}
