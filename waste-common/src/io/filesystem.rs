//! What a path lies on: the kind of file system, its free space, and whether it is a poor place for a container.
#![cfg_attr(windows, allow(unsafe_code))]

use std::io;
use std::path::{Path, PathBuf};

/// The file system a path lies on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// Its name, such as `ext4` or `apfs`; `unknown` where the system does not say.
    pub kind: String,
    /// The bytes this user may still write; None where the system does not say.
    pub free_bytes: Option<u64>,
    /// Why a container should rather lie elsewhere.
    pub warning: Option<&'static str>,
}

const NETWORK: &str = "it lies on a network file system: every expert crosses the network";
#[cfg(target_os = "linux")]
const SHARED: &str = "it lies on a file system shared from the host (9p, virtiofs): reads are slow; \
                      keep the container on a disk of this system";
#[cfg(target_os = "linux")]
const ROTATIONAL: &str = "it lies on a rotating disk: random reads of experts will be very slow; use an SSD";
#[cfg(target_os = "linux")]
const USB: &str = "it lies on a USB disk: reads are several times slower than from an internal SSD";

/// The path itself, or the nearest directory above it that exists: where the path would be made.
///
/// # Errors
/// There is none, or the current directory is gone.
pub fn existing(path: &Path) -> io::Result<PathBuf> {
    let absolute = std::path::absolute(path)?;
    let found = absolute.ancestors().find(|path| path.exists());
    found.map(Path::to_owned).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Look at the file system below an existing path.
///
/// # Errors
/// The path does not exist or cannot be looked at.
pub fn filesystem(path: &Path) -> io::Result<FileSystem> {
    system::filesystem(path)
}

#[cfg(target_os = "linux")]
mod system {
    use super::{FileSystem, NETWORK, ROTATIONAL, SHARED, USB};
    use std::fs;
    use std::io;
    use std::os::unix::fs::MetadataExt;
    use std::path::{Path, PathBuf};

    /// Magic numbers of statfs(2), names, warnings.
    const KINDS: [(u64, &str, Option<&str>); 25] = [
        (0xEF53, "ext4", None),
        (0x5846_5342, "xfs", None),
        (0x9123_683E, "btrfs", None),
        (0x2FC1_2FC1, "zfs", None),
        (0xCA45_1A4E, "bcachefs", None),
        (0xF2F5_2010, "f2fs", None),
        (0x0102_1994, "tmpfs", None),
        (0x8584_58F6, "ramfs", None),
        (0x794C_7630, "overlay", None),
        (0x7371_7368, "squashfs", None),
        (0xE0F5_E1E2, "erofs", None),
        (0x7366_746E, "ntfs3", None),
        (0x4D44, "vfat", None),
        (0x2011_BAB0, "exfat", None),
        (0x482B, "hfsplus", None),
        (0x6573_5546, "fuse", None),
        (0x6969, "nfs", Some(NETWORK)),
        (0xFF53_4D42, "cifs", Some(NETWORK)),
        (0xFE53_4D42, "smb2", Some(NETWORK)),
        (0x517B, "smb", Some(NETWORK)),
        (0x00C3_6400, "ceph", Some(NETWORK)),
        (0x0BD0_0BD0, "lustre", Some(NETWORK)),
        (0x5346_414F, "afs", Some(NETWORK)),
        (0x0102_1997, "9p", Some(SHARED)),
        (0x6A65_6A63, "virtiofs", Some(SHARED)),
    ];

    pub fn filesystem(path: &Path) -> io::Result<FileSystem> {
        let space = rustix::fs::statvfs(path)?;
        // The kernel's magic numbers are 32 bits wide; the field is wider and, on some machines, signed.
        let magic = rustix::fs::statfs(path)?.f_type as u64 & 0xFFFF_FFFF;
        let (kind, warning) = name(magic);
        let device = fs::metadata(path)?.dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let numbers = if major == 0 { mounted_device(path) } else { Some((major, minor)) };
        let disk = || numbers.and_then(|(major, minor)| disk_warning(Path::new("/sys"), major, minor));
        Ok(FileSystem {
            kind,
            free_bytes: Some(space.f_bavail.saturating_mul(space.f_frsize)),
            warning: warning.or_else(disk),
        })
    }

    fn name(magic: u64) -> (String, Option<&'static str>) {
        KINDS
            .iter()
            .find(|(number, ..)| *number == magic)
            .map_or_else(|| ("unknown".to_owned(), None), |(_, name, warning)| ((*name).to_owned(), *warning))
    }

    /// The device behind a file system without one of its own (btrfs): that of the mount the path lies in.
    fn mounted_device(path: &Path) -> Option<(u32, u32)> {
        let path = fs::canonicalize(path).ok()?;
        let mounts = crate::machine::mounts(Path::new("/"));
        let mount = mounts
            .iter()
            .filter(|mount| path.starts_with(&mount.point))
            .max_by_key(|mount| mount.point.components().count())?;
        let device = fs::metadata(&mount.source).ok().filter(|_| mount.source.starts_with("/dev"))?.rdev();
        Some((rustix::fs::major(device), rustix::fs::minor(device)))
    }

    /// What sysfs says of a block device or, for a partition, of the disk it is on.
    pub(super) fn disk_warning(sys: &Path, major: u32, minor: u32) -> Option<&'static str> {
        let device = fs::canonicalize(sys.join(format!("dev/block/{major}:{minor}"))).ok()?;
        if device.components().any(|part| part.as_os_str().to_string_lossy().starts_with("usb")) {
            return Some(USB);
        }
        let rotational = |dir: PathBuf| fs::read_to_string(dir.join("queue/rotational")).ok();
        let answer = rotational(device.clone()).or_else(|| rotational(device.parent()?.to_owned()))?;
        // A virtual disk does not know what it is made of and says 1.
        let virtual_disk = device.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vd"));
        (answer.trim() == "1" && !virtual_disk).then_some(ROTATIONAL)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn magic_numbers_are_named_once() {
            for (index, (magic, kind, warning)) in KINDS.iter().enumerate() {
                assert_eq!(name(*magic), ((*kind).to_owned(), *warning));
                assert!(KINDS[..index].iter().all(|(other, ..)| other != magic), "{kind}");
            }
            assert_eq!(name(1), ("unknown".to_owned(), None));
        }

        #[test]
        fn a_partition_is_judged_by_its_disk() {
            let root = tempfile::tempdir().unwrap();
            let sys = root.path();
            fs::create_dir_all(sys.join("dev/block")).unwrap();
            let disk = |numbers: &str, place: &str, rotational: &str, partition: Option<&str>| {
                let dir = sys.join("devices").join(place);
                fs::create_dir_all(dir.join("queue")).unwrap();
                fs::write(dir.join("queue/rotational"), rotational).unwrap();
                let target = partition.map_or(dir.clone(), |name| dir.join(name));
                fs::create_dir_all(&target).unwrap();
                std::os::unix::fs::symlink(target, sys.join("dev/block").join(numbers)).unwrap();
            };
            disk("8:0", "pci/ata1/block/sda", "1\n", None);
            disk("8:1", "pci/ata1/block/sda", "1\n", Some("sda1"));
            disk("259:1", "pci/nvme/nvme0/nvme0n1", "0\n", Some("nvme0n1p1"));
            disk("8:17", "pci/usb2/2-1/block/sdb", "0\n", Some("sdb1"));
            disk("254:1", "pci/virtio/block/vda", "1\n", Some("vda1"));
            for (major, minor, warning) in [
                (8, 0, Some(ROTATIONAL)),
                (8, 1, Some(ROTATIONAL)),
                (259, 1, None),
                (8, 17, Some(USB)),
                (254, 1, None),
                (9, 9, None),
            ] {
                assert_eq!(disk_warning(sys, major, minor), warning, "{major}:{minor}");
            }
        }
    }
}

#[cfg(target_vendor = "apple")]
mod system {
    use super::{FileSystem, NETWORK};
    use std::io;
    use std::path::Path;

    const MNT_LOCAL: u32 = 0x1000;

    pub fn filesystem(path: &Path) -> io::Result<FileSystem> {
        let stat = rustix::fs::statfs(path)?;
        let name: Vec<u8> = stat.f_fstypename.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
        Ok(FileSystem {
            kind: String::from_utf8_lossy(&name).into_owned(),
            free_bytes: Some(stat.f_bavail.saturating_mul(u64::from(stat.f_bsize))),
            warning: (stat.f_flags & MNT_LOCAL == 0).then_some(NETWORK),
        })
    }
}

#[cfg(all(unix, not(target_os = "linux"), not(target_vendor = "apple")))]
mod system {
    use super::FileSystem;
    use std::io;
    use std::path::Path;

    pub fn filesystem(path: &Path) -> io::Result<FileSystem> {
        let space = rustix::fs::statvfs(path)?;
        let free_bytes = Some(space.f_bavail.saturating_mul(space.f_frsize));
        Ok(FileSystem { kind: "unknown".to_owned(), free_bytes, warning: None })
    }
}

#[cfg(windows)]
mod system {
    use super::{FileSystem, NETWORK};
    use std::io;
    use std::os::windows::ffi::OsStrExt;
    use std::path::{Component, Path, Prefix};
    use windows_sys::Win32::Storage::FileSystem::GetDiskFreeSpaceExW;

    pub fn filesystem(path: &Path) -> io::Result<FileSystem> {
        let path = std::fs::canonicalize(path)?;
        let shared = matches!(
            path.components().next(),
            Some(Component::Prefix(prefix)) if matches!(prefix.kind(), Prefix::UNC(..) | Prefix::VerbatimUNC(..))
        );
        let dir = if path.is_dir() { &path } else { path.parent().unwrap_or(&path) };
        Ok(FileSystem {
            kind: "unknown".to_owned(),
            free_bytes: free_bytes(dir).ok(),
            warning: shared.then_some(NETWORK),
        })
    }

    /// What this user may still write, quotas minded.
    fn free_bytes(dir: &Path) -> io::Result<u64> {
        // Shares must end with a backslash, other directories may.
        let mut name: Vec<u16> = dir.join("").as_os_str().encode_wide().collect();
        name.push(0);
        let mut available = 0u64;
        // SAFETY: `name` is a string that ends with 0 and, like `available`, outlives the call (ours to guarantee);
        // both other results may be null.
        let told = unsafe {
            GetDiskFreeSpaceExW(name.as_ptr(), &mut available, std::ptr::null_mut(), std::ptr::null_mut())
        };
        if told == 0 { Err(io::Error::last_os_error()) } else { Ok(available) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_described_and_a_missing_one_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let found = filesystem(dir.path()).unwrap();
        assert!(!found.kind.is_empty());
        assert!(found.free_bytes.is_some_and(|bytes| bytes > 0));
        let file = dir.path().join("file");
        std::fs::write(&file, "x").unwrap();
        assert!(filesystem(&file).unwrap().free_bytes.is_some_and(|bytes| bytes > 0));
        assert!(filesystem(&dir.path().join("missing")).is_err());
    }
}
