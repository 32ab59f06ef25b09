//! Memory limits of control groups: the tightest one on the way from this process's group up to the mounted root.

use super::mounts::{Mount, mounts};
use super::{Limit, small_file};
use std::path::{Component, Path, PathBuf};

/// One of the two kinds of hierarchy.
struct Hierarchy {
    /// The files that set a limit.
    files: &'static [&'static str],
    /// Where it is mounted when the table of mounts does not say.
    usual: &'static str,
    /// Is it mounted there?
    mounted: fn(&Mount) -> bool,
    /// Does this line of `proc/self/cgroup` (number, controllers) belong to it?
    line: fn(&str, &str) -> bool,
}

const UNIFIED: Hierarchy = Hierarchy {
    files: &["memory.max", "memory.high"],
    usual: "/sys/fs/cgroup",
    mounted: |mount| mount.kind == "cgroup2",
    line: |number, controllers| number == "0" && controllers.is_empty(),
};

const LEGACY: Hierarchy = Hierarchy {
    files: &["memory.limit_in_bytes"],
    usual: "/sys/fs/cgroup/memory",
    mounted: |mount| mount.kind == "cgroup" && mount.options.split(',').any(|option| option == "memory"),
    line: |_, controllers| controllers.split(',').any(|controller| controller == "memory"),
};

/// Version 1 says "no limit" with the largest multiple of a page; nothing this large is a limit.
const UNLIMITED: u64 = 1 << 60;

/// The tightest limit on this process, of the system under `root`. Both hierarchies count where both exist.
pub(super) fn limit(root: &Path) -> Option<Limit> {
    let groups = small_file(&root.join("proc/self/cgroup"))?;
    let mounts = mounts(root);
    let limits =
        [UNIFIED, LEGACY].into_iter().flat_map(|hierarchy| limits(root, &groups, &mounts, &hierarchy));
    limits.min_by_key(|limit| limit.bytes)
}

/// Every finite limit of one hierarchy, from the process's own group upwards.
fn limits(root: &Path, groups: &str, mounts: &[Mount], hierarchy: &Hierarchy) -> Vec<Limit> {
    let path = groups.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        (hierarchy.line)(number, controllers).then_some(Path::new(path))
    });
    let Some(path) = path else { return Vec::new() };
    let mount = mounts.iter().find(|mount| (hierarchy.mounted)(mount));
    let point = mount.map_or(Path::new(hierarchy.usual), |mount| &mount.point);
    let mounted_part = mount.map_or(Path::new("/"), |mount| &mount.root);
    // A step upwards means that the group lies outside what is mounted here; its limits cannot be seen.
    if path.components().any(|part| part == Component::ParentDir) || !path.has_root() {
        return Vec::new();
    }
    let top = under(root, point);
    // In a container the mounted root may be the group itself, or a group the path does not know of.
    let own = path.strip_prefix(mounted_part).or_else(|_| path.strip_prefix("/")).unwrap_or(Path::new(""));
    own.ancestors()
        .map(|group| if group.as_os_str().is_empty() { top.clone() } else { top.join(group) })
        .flat_map(|group| hierarchy.files.iter().map(move |file| group.join(file)))
        .filter_map(|source| {
            let bytes = small_file(&source)?.trim().parse().ok().filter(|bytes| *bytes < UNLIMITED)?;
            Some(Limit { bytes, source })
        })
        .collect()
}

/// An absolute path of the system, moved under `root`.
fn under(root: &Path, path: &Path) -> PathBuf {
    path.components()
        .filter(|part| matches!(part, Component::Normal(_)))
        .fold(root.to_owned(), |all, part| all.join(part))
}

#[cfg(test)]
mod tests {
    use crate::machine::Machine;
    use std::fs;
    use std::path::Path;
    use tempfile::TempDir;

    const GIB: u64 = 1 << 30;

    /// A system with 64 GiB, these groups and these mounts.
    struct Fake(TempDir);

    impl Fake {
        fn new(cgroup: &str, mountinfo: &str) -> Fake {
            let fake = Fake(tempfile::tempdir().unwrap());
            fake.put("proc/meminfo", "MemTotal:       67108864 kB\n").put("proc/self/cgroup", cgroup);
            if mountinfo.is_empty() { fake } else { fake.and("proc/self/mountinfo", mountinfo) }
        }

        fn put(&self, path: &str, text: &str) -> &Fake {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
            self
        }

        fn and(self, path: &str, text: impl ToString) -> Fake {
            self.put(path, &text.to_string());
            self
        }

        /// The limit and the file that sets it, relative to the fake root.
        fn limit(&self) -> Option<(u64, String)> {
            let machine = Machine::probe_in(self.0.path()).unwrap();
            assert_eq!(machine.physical_ram_bytes, 64 * GIB);
            let bytes = machine.limit.as_ref().map_or(64 * GIB, |limit| limit.bytes);
            assert_eq!(machine.usable_ram_bytes, bytes.min(64 * GIB));
            let name =
                |path: &Path| path.strip_prefix(self.0.path()).unwrap().to_string_lossy().replace('\\', "/");
            machine.limit.map(|limit| (limit.bytes, name(&limit.source)))
        }
    }

    fn some(bytes: u64, source: &str) -> Option<(u64, String)> {
        Some((bytes, source.to_owned()))
    }

    #[test]
    fn without_groups_there_is_no_limit() {
        assert_eq!(Fake::new("", "").limit(), None);
        assert_eq!(Fake::new("0::/a\n", "").limit(), None);
    }

    #[test]
    fn the_tightest_ancestor_counts() {
        let fake = Fake::new("0::/user.slice/a.scope\n", "")
            .and("sys/fs/cgroup/user.slice/a.scope/memory.max", "max\n")
            .and("sys/fs/cgroup/user.slice/a.scope/memory.high", 48 * GIB)
            .and("sys/fs/cgroup/user.slice/memory.max", format!("{}\n", 32 * GIB))
            .and("sys/fs/cgroup/user.slice/memory.high", "max");
        assert_eq!(fake.limit(), some(32 * GIB, "sys/fs/cgroup/user.slice/memory.max"));
        fake.put("sys/fs/cgroup/user.slice/a.scope/memory.high", "1073741824");
        assert_eq!(fake.limit(), some(GIB, "sys/fs/cgroup/user.slice/a.scope/memory.high"));
        fake.put("sys/fs/cgroup/memory.max", "1024");
        assert_eq!(fake.limit(), some(1024, "sys/fs/cgroup/memory.max"));
    }

    #[test]
    fn siblings_and_children_do_not_count() {
        let fake = Fake::new("0::/a\n", "")
            .and("sys/fs/cgroup/ab/memory.max", GIB)
            .and("sys/fs/cgroup/a/b/memory.max", GIB)
            .and("memory.max", GIB)
            .and("sys/fs/memory.max", GIB);
        assert_eq!(fake.limit(), None);
    }

    #[test]
    fn malformed_limits_are_none() {
        for text in ["max", "", "-1", "1G", "0x10", "1 2", "99999999999999999999999", "9223372036854771712"] {
            let fake = Fake::new("0::/a\n", "").and("sys/fs/cgroup/a/memory.max", text);
            assert_eq!(fake.limit(), None, "{text}");
        }
        let above = Fake::new("0::/a\n", "").and("sys/fs/cgroup/a/memory.max", 128 * GIB);
        assert_eq!(above.limit(), some(128 * GIB, "sys/fs/cgroup/a/memory.max"));
    }

    #[test]
    fn steps_upwards_are_refused() {
        for path in ["/../a", "/a/../..", "/..", "a", ""] {
            let fake = Fake::new(&format!("0::{path}\n"), "")
                .and("sys/fs/cgroup/a/memory.max", GIB)
                .and("sys/fs/a/memory.max", GIB)
                .and("sys/fs/cgroup/memory.max", GIB);
            assert_eq!(fake.limit(), None, "{path}");
        }
    }

    #[test]
    fn the_mount_may_lie_elsewhere() {
        let mountinfo = "25 20 0:22 / /proc rw - proc proc rw\n30 20 0:26 / /mnt/my\\040groups rw shared:4 - cgroup2 none rw\n";
        let fake = Fake::new("0::/a\n", mountinfo)
            .and("mnt/my groups/a/memory.max", 8 * GIB)
            .and("sys/fs/cgroup/a/memory.max", GIB);
        assert_eq!(fake.limit(), some(8 * GIB, "mnt/my groups/a/memory.max"));
    }

    /// A container without a group namespace: the path is the host's, the mount shows only the container's part.
    #[test]
    fn a_mounted_part_is_taken_off_the_path() {
        let mountinfo = "30 20 0:26 /docker/c1 /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        let fake = Fake::new("0::/docker/c1/job\n", mountinfo)
            .and("sys/fs/cgroup/memory.max", 16 * GIB)
            .and("sys/fs/cgroup/job/memory.high", 12 * GIB);
        assert_eq!(fake.limit(), some(12 * GIB, "sys/fs/cgroup/job/memory.high"));
        // With a namespace the path starts anew, and the mount shows where it starts.
        let fake = Fake::new("0::/\n", mountinfo).and("sys/fs/cgroup/memory.max", 16 * GIB);
        assert_eq!(fake.limit(), some(16 * GIB, "sys/fs/cgroup/memory.max"));
    }

    #[test]
    fn version_1_and_its_huge_numbers() {
        let groups = "12:cpu,cpuacct:/x\n4:memory:/docker/c1\n1:name=systemd:/y\n";
        let fake = Fake::new(groups, "")
            .and("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
            .and("sys/fs/cgroup/memory/docker/memory.limit_in_bytes", 20 * GIB)
            .and("sys/fs/cgroup/memory/docker/c1/memory.limit_in_bytes", 24 * GIB)
            .and("sys/fs/cgroup/memory/x/memory.limit_in_bytes", GIB);
        assert_eq!(fake.limit(), some(20 * GIB, "sys/fs/cgroup/memory/docker/memory.limit_in_bytes"));
    }

    #[test]
    fn hybrid_systems_count_both() {
        let groups = "9:memory:/a\n0::/b\n";
        let mountinfo = "30 20 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
                         31 20 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                         32 20 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
        let fake = Fake::new(groups, mountinfo)
            .and("sys/fs/cgroup/memory/a/memory.limit_in_bytes", 20 * GIB)
            .and("sys/fs/cgroup/unified/b/memory.max", 24 * GIB);
        assert_eq!(fake.limit(), some(20 * GIB, "sys/fs/cgroup/memory/a/memory.limit_in_bytes"));
        fake.put("sys/fs/cgroup/unified/b/memory.high", "1024");
        assert_eq!(fake.limit(), some(1024, "sys/fs/cgroup/unified/b/memory.high"));
    }
}
