//! The size of the RAM, and what this process has used of it.

use super::small_file;
use std::path::Path;

/// `MemTotal` of `proc/meminfo` under `root`, in bytes.
pub(super) fn meminfo(root: &Path) -> Result<u64, String> {
    let path = root.join("proc/meminfo");
    let text = small_file(&path).ok_or_else(|| format!("cannot read {}", path.display()))?;
    kibibytes(&text, "MemTotal:")
        .filter(|bytes| *bytes > 0)
        .ok_or_else(|| format!("{} has no proper MemTotal", path.display()))
}

/// The value of a line such as `MemTotal:  65536 kB`, in bytes.
fn kibibytes(text: &str, key: &str) -> Option<u64> {
    let mut words = text.lines().find_map(|line| line.strip_prefix(key))?.split_whitespace();
    let value: u64 = words.next()?.parse().ok()?;
    (words.next() == Some("kB")).then_some(value)?.checked_mul(1024)
}

/// The size of the RAM, in bytes.
#[cfg(target_os = "linux")]
pub(super) fn physical_ram() -> Result<u64, String> {
    meminfo(Path::new("/"))
}

/// The size of the RAM, in bytes.
#[cfg(target_vendor = "apple")]
pub(super) fn physical_ram() -> Result<u64, String> {
    ask(Path::new("/usr/sbin/sysctl"), &["-n", "hw.memsize"])
}

/// The size of the RAM, in bytes. `wmic` is quick but missing from new systems; PowerShell is always there.
#[cfg(windows)]
pub(super) fn physical_ram() -> Result<u64, String> {
    let root = std::env::var_os("SystemRoot").unwrap_or_else(|| r"C:\Windows".into());
    let system = Path::new(&root).join("System32");
    ask(&system.join(r"wbem\wmic.exe"), &["ComputerSystem", "get", "TotalPhysicalMemory", "/value"]).or_else(
        |_| {
            let query = "(Get-CimInstance Win32_ComputerSystem).TotalPhysicalMemory";
            let shell = system.join(r"WindowsPowerShell\v1.0\powershell.exe");
            ask(&shell, &["-NoProfile", "-NonInteractive", "-Command", query])
        },
    )
}

/// The size of the RAM, in bytes.
#[cfg(not(any(target_os = "linux", target_vendor = "apple", windows)))]
pub(super) fn physical_ram() -> Result<u64, String> {
    Err("this system is not known".to_owned())
}

/// The number a system tool prints. It is asked once: the answer is what is built in.
#[cfg(any(windows, target_vendor = "apple"))]
fn ask(tool: &Path, args: &[&str]) -> Result<u64, String> {
    static ANSWER: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
    if let Some(&answer) = ANSWER.get() {
        return Ok(answer);
    }
    let output = std::process::Command::new(tool)
        .args(args)
        .stdin(std::process::Stdio::null())
        .output()
        .map_err(|error| format!("cannot run {}: {error}", tool.display()))?;
    let answer = first_number(&output.stdout).ok_or_else(|| format!("{} gives no number", tool.display()))?;
    Ok(*ANSWER.get_or_init(|| answer))
}

/// The first positive number among the words of a tool's answer. `wmic` answers in UTF-16 when piped.
#[cfg_attr(not(any(windows, target_vendor = "apple")), allow(dead_code))]
fn first_number(answer: &[u8]) -> Option<u64> {
    let ascii: Vec<u8> = answer.iter().copied().filter(|byte| byte.is_ascii() && *byte != 0).collect();
    let text = String::from_utf8(ascii).ok()?;
    let mut words = text.split(|c: char| c.is_whitespace() || c == '=');
    words.find_map(|word| word.parse().ok().filter(|number| *number > 0))
}

/// The most RAM this process has had resident, in bytes. None where the system tells it only to unsafe code (all but
/// Linux).
pub fn peak_rss_bytes() -> Option<u64> {
    if cfg!(target_os = "linux") {
        kibibytes(&small_file(Path::new("/proc/self/status"))?, "VmHWM:")
    } else {
        None
    }
}

/// What this process has in RAM now. Linux only.
pub fn resident_bytes() -> Option<u64> {
    if cfg!(target_os = "linux") {
        kibibytes(&small_file(Path::new("/proc/self/status"))?, "VmRSS:")
    } else {
        None
    }
}

/// The page faults of this process that had to read from disk: above a few, the machine pages. Linux only.
pub fn major_faults() -> Option<u64> {
    if cfg!(target_os = "linux") {
        stat_major_faults(&small_file(Path::new("/proc/self/stat"))?)
    } else {
        None
    }
}

/// `majflt`, field 12 of proc/self/stat. The name, field 2, stands in parentheses and may contain anything.
pub(super) fn stat_major_faults(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_whitespace().nth(9)?.parse().ok()
}

/// The bytes this process has made the storage layer read: what the page cache served does not count. Linux only.
pub fn storage_bytes_read() -> Option<u64> {
    if cfg!(target_os = "linux") { io_read_bytes(&small_file(Path::new("/proc/self/io"))?) } else { None }
}

/// `read_bytes` of proc/self/io.
fn io_read_bytes(io: &str) -> Option<u64> {
    io.lines().find_map(|line| line.strip_prefix("read_bytes:"))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_strictly() {
        let dir = tempfile::tempdir().unwrap();
        assert!(meminfo(dir.path()).unwrap_err().contains("meminfo"));
        std::fs::create_dir(dir.path().join("proc")).unwrap();
        let with = |text: &str| {
            std::fs::write(dir.path().join("proc/meminfo"), text).unwrap();
            meminfo(dir.path())
        };
        assert_eq!(with("MemTotal:       65536 kB\nMemFree: 1 kB\n"), Ok(64 << 20));
        assert_eq!(with("X: 1 kB\nMemTotal: 1 kB\n"), Ok(1024));
        for bad in [
            "",
            "MemTotal:",
            "MemTotal: x kB",
            "MemTotal: 5 MB",
            "MemTotal: 0 kB",
            "MemTotal: -1 kB",
            "MemTotal: 18446744073709551615 kB",
        ] {
            assert!(with(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_answers_of_system_tools_are_understood() {
        assert_eq!(first_number(b"68719476736\n"), Some(68_719_476_736));
        assert_eq!(first_number(b"\r\n\r\nTotalPhysicalMemory=17179869184\r\n\r\n"), Some(17_179_869_184));
        let wide: Vec<u8> = "\u{feff}TotalPhysicalMemory\r\n8589934592  \r\n"
            .encode_utf16()
            .flat_map(u16::to_le_bytes)
            .collect();
        assert_eq!(first_number(&wide), Some(8_589_934_592));
        for bad in ["", "0", "no", "-5", "99999999999999999999"] {
            assert_eq!(first_number(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn major_faults_are_found_behind_any_name() {
        let stat = "7 (a) b) c) S 1 2 3 4 5 6 70 80 9 100 11 12";
        assert_eq!(stat_major_faults(stat), Some(9));
        assert_eq!(stat_major_faults("7 (a"), None);
        assert_eq!(major_faults().is_some(), cfg!(target_os = "linux"));
    }

    #[test]
    fn read_bytes_are_found() {
        assert_eq!(io_read_bytes("rchar: 5\nread_bytes: 4096\nwrite_bytes: 1\n"), Some(4096));
        assert_eq!(io_read_bytes("rchar: 5\n"), None);
        assert!(storage_bytes_read().is_none() || cfg!(target_os = "linux"));
    }

    #[test]
    fn the_peak_grows_with_what_is_touched() {
        assert_eq!(peak_rss_bytes().is_some(), cfg!(target_os = "linux"));
        let Some(before) = peak_rss_bytes() else { return };
        let touched = std::hint::black_box(vec![1u8; 128 << 20]);
        let after = peak_rss_bytes().unwrap();
        assert!(after >= touched.len() as u64 && after >= before, "{before} {after}");
    }
}
