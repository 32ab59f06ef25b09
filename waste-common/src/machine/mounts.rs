//! The table of mounts of a Linux system.

use super::small_file;
use std::path::{Path, PathBuf};

/// One line of `proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Which part of the file system is mounted: `/` for all of it.
    pub root: PathBuf,
    /// Where it is mounted.
    pub point: PathBuf,
    /// The type, such as `ext4` or `cgroup2`.
    pub kind: String,
    /// The device or other source.
    pub source: PathBuf,
    /// The options of the file system, comma-separated.
    pub options: String,
}

/// The mounts of the system whose `proc` lies under `root`; none where there is no such table.
pub fn mounts(root: &Path) -> Vec<Mount> {
    small_file(&root.join("proc/self/mountinfo")).unwrap_or_default().lines().filter_map(parse).collect()
}

/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`
fn parse(line: &str) -> Option<Mount> {
    let (mount, file_system) = line.split_once(" - ")?;
    let mut mount = mount.split(' ').skip(3);
    let (root, point) = (mount.next()?, mount.next()?);
    let mut file_system = file_system.split(' ');
    Some(Mount {
        root: unescape(root).into(),
        point: unescape(point).into(),
        kind: file_system.next()?.to_owned(),
        source: unescape(file_system.next()?).into(),
        options: file_system.next().unwrap_or_default().to_owned(),
    })
}

/// Spaces, tabs, line ends and backslashes stand there as three octal digits: `\040`.
fn unescape(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(text.to_owned(), |text, (escape, plain)| text.replace(escape, plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_understood_whatever_its_optional_fields() {
        for optional in ["", " shared:5", " shared:5 master:1"] {
            let line = format!(
                r"36 35 0:30 /a /mnt/my\040disk\134x rw,noatime{optional} - cgroup2 /dev/sd\011 rw,nsdelegate"
            );
            let mount = parse(&line).unwrap();
            assert_eq!((mount.root, mount.point), ("/a".into(), PathBuf::from(r"/mnt/my disk\x")));
            assert_eq!((mount.kind.as_str(), mount.options.as_str()), ("cgroup2", "rw,nsdelegate"));
            assert_eq!(mount.source, PathBuf::from("/dev/sd\t"));
        }
        for bad in ["", "36 35 0:30 / /mnt rw", "36 35 - ext4 /dev/x rw", "1 2 3 / /mnt rw - ext4"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
