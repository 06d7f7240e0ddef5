//! How much memory the machine and this process's control groups allow, and whether it is getting short. Read from
//! files below a root, which is `/` but in tests. Only Linux has these files; elsewhere nothing is found.
//!
//! Control groups are looked for where systems mount them: version 2 at `/sys/fs/cgroup`, the memory controller of
//! version 1 at `/sys/fs/cgroup/memory`. A container may see its own group as the root, while the path in
//! `/proc/self/cgroup` is that of the host: so every folder from that path up to the root is looked at, and those that
//! are not there say nothing.

use std::fs;
use std::path::{Component, Path, PathBuf};

/// What was read. `None` and 0 where a file is missing, says `max`, or cannot be understood.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Memory {
    /// What the machine has, in bytes.
    pub(crate) machine_bytes: Option<usize>,
    /// The smallest limit of the process's control group and those above it: `memory.max`, `memory.limit_in_bytes`.
    pub(crate) max_bytes: Option<usize>,
    /// The smallest `memory.high`, above which the kernel slows processes down. Version 1 has none.
    pub(crate) high_bytes: Option<usize>,
    /// How often the groups were above it so far (`memory.events`).
    pub(crate) high_events: u64,
    /// For how many microseconds some task of the group, or of the machine, has waited for memory so far (PSI,
    /// `memory.pressure`: the total of `some`).
    pub(crate) stalled_micros: u64,
}

/// Version 1 says "no limit" by a number close to the largest one.
const NO_LIMIT: usize = 1 << 60;

impl Memory {
    /// Reads the files below `root`.
    pub(crate) fn read(root: &Path) -> Self {
        let machine_bytes = text(&root.join("proc/meminfo")).and_then(|text| memory_total(&text));
        let mut memory = Self { machine_bytes, ..Self::default() };
        let mut stalled = None;
        for group in groups(root) {
            for folder in group.folders() {
                let limit = |name: &str| text(&folder.join(name)).and_then(|text| bytes(&text));
                memory.max_bytes = smaller(memory.max_bytes, limit(group.limit_file));
                if group.is_unified {
                    memory.high_bytes = smaller(memory.high_bytes, limit("memory.high"));
                    let events = text(&folder.join("memory.events"));
                    let count = events.and_then(|text| field(&text, "high")).unwrap_or(0);
                    memory.high_events = memory.high_events.saturating_add(count);
                    // Of the innermost group that has it: those around it have tasks of others.
                    stalled = stalled.or_else(|| text(&folder.join("memory.pressure")).and_then(|text| total(&text)));
                }
            }
        }
        let of_machine = || text(&root.join("proc/pressure/memory")).and_then(|text| total(&text));
        memory.stalled_micros = stalled.or_else(of_machine).unwrap_or(0);
        memory
    }

    /// How much there is for all processes of the group, or of the machine: the smaller of both.
    pub(crate) fn whole_bytes(&self) -> Option<usize> {
        smaller(self.machine_bytes, self.max_bytes)
    }
}

fn smaller(one: Option<usize>, other: Option<usize>) -> Option<usize> {
    [one, other].into_iter().flatten().min()
}

/// The control group of this process in one hierarchy.
struct Group {
    mount: PathBuf,
    /// Below the mount.
    path: PathBuf,
    limit_file: &'static str,
    is_unified: bool,
}

impl Group {
    /// From the innermost one up to the root of the hierarchy.
    fn folders(&self) -> impl Iterator<Item = PathBuf> {
        self.path.ancestors().map(|path| self.mount.join(path))
    }
}

fn groups(root: &Path) -> Vec<Group> {
    let text = text(&root.join("proc/self/cgroup")).unwrap_or_default();
    let group = |line: &str| {
        // A path may contain colons.
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let is_unified = controllers.is_empty();
        if !is_unified && !controllers.split(',').any(|controller| controller == "memory") {
            return None;
        }
        let (mount, limit_file) = match is_unified {
            true => ("sys/fs/cgroup", "memory.max"),
            false => ("sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        };
        // `..`: the group is outside of what this process's namespace shows.
        let inside = Path::new(path).components().filter(|part| matches!(part, Component::Normal(_))).collect();
        Some(Group { mount: root.join(mount), path: inside, limit_file, is_unified })
    };
    text.lines().filter_map(group).collect()
}

fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// A number of bytes; `None` for `max` and for what is none.
fn bytes(text: &str) -> Option<usize> {
    text.trim().parse().ok().filter(|&bytes| bytes < NO_LIMIT)
}

/// The number behind a name: `high 12`.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// The total of `some avg10=0.00 avg60=0.00 avg300=0.00 total=0`.
fn total(text: &str) -> Option<u64> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split_whitespace().find_map(|word| word.strip_prefix("total=")?.parse().ok())
}

/// The bytes of `MemTotal:  16384 kB`.
fn memory_total(text: &str) -> Option<usize> {
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kilobytes: usize = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

/// Made-up trees of files.
#[cfg(test)]
pub(crate) mod trees {
    use std::fs;
    use std::path::{Path, PathBuf};
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A folder that is removed when this is dropped.
    pub(crate) struct Tree(PathBuf);

    impl Tree {
        pub(crate) fn new(files: &[(&str, &str)]) -> Self {
            static TREES: AtomicUsize = AtomicUsize::new(0);
            let number = TREES.fetch_add(1, Ordering::Relaxed);
            let root = std::env::temp_dir().join(format!("ctxalloc-tree-{}-{number}", std::process::id()));
            let tree = Self(root);
            files.iter().for_each(|(path, text)| tree.write(path, text));
            tree
        }

        pub(crate) fn write(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().expect("it is in a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        }

        pub(crate) fn root(&self) -> &Path {
            &self.0
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::Memory;
    use super::trees::Tree;

    const MIB: usize = 1 << 20;

    #[test]
    fn the_smallest_limit_up_the_groups_counts() {
        let tree = Tree::new(&[
            ("proc/self/cgroup", "0::/pod/box:1/app\n"),
            ("proc/meminfo", "MemTotal:        4096 kB\nMemFree: 1 kB\n"),
            ("sys/fs/cgroup/pod/box:1/app/memory.max", "max\n"),
            ("sys/fs/cgroup/pod/box:1/memory.max", "1048576\n"),
            ("sys/fs/cgroup/pod/memory.max", "2097152\n"),
            ("sys/fs/cgroup/pod/memory.high", "1572864\n"),
            ("sys/fs/cgroup/pod/box:1/app/memory.high", "max\n"),
            ("sys/fs/cgroup/pod/memory.events", "low 1\nhigh 12\nmax 3\n"),
            (
                "sys/fs/cgroup/pod/box:1/app/memory.pressure",
                "some avg10=1.00 avg60=0 avg300=0 total=77\nfull total=5\n",
            ),
            ("sys/fs/cgroup/pod/memory.pressure", "some avg10=1.00 total=99\n"),
        ]);
        let memory = Memory::read(tree.root());
        let expected = Memory {
            machine_bytes: Some(4 * MIB),
            max_bytes: Some(MIB),
            high_bytes: Some(1_572_864),
            high_events: 12,
            stalled_micros: 77,
        };
        assert_eq!(memory, expected);
        assert_eq!(memory.whole_bytes(), Some(MIB));
    }

    #[test]
    fn a_container_that_sees_its_own_group_as_the_root_is_limited() {
        for path in ["/kubepods/of/the/host", "/", "/../../elsewhere"] {
            let tree = Tree::new(&[
                ("proc/self/cgroup", &format!("0::{path}\n")),
                ("sys/fs/cgroup/memory.max", "1048576\n"),
                ("elsewhere/memory.max", "1\n"),
            ]);
            assert_eq!(Memory::read(tree.root()).max_bytes, Some(MIB), "{path}");
        }
    }

    #[test]
    fn version_1_has_its_own_files_and_a_number_for_no_limit() {
        let tree = Tree::new(&[
            ("proc/self/cgroup", "5:cpu,cpuacct:/cpu\n4:memory:/docker/abc\n0::/unified\n"),
            ("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/docker/memory.limit_in_bytes", "2097152\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/cpu/memory.limit_in_bytes", "1\n"),
            ("proc/pressure/memory", "some avg10=0.00 avg60=0.00 avg300=0.00 total=123\n"),
        ]);
        let memory = Memory::read(tree.root());
        assert_eq!((memory.max_bytes, memory.stalled_micros), (Some(2 * MIB), 123));
    }

    #[test]
    fn what_is_missing_or_no_number_says_nothing() {
        assert_eq!(Memory::read(Tree::new(&[]).root()), Memory::default());
        let tree = Tree::new(&[
            ("proc/self/cgroup", "garbage\n0:\n:\n0::/a\n"),
            ("proc/meminfo", "MemTotal: many kB\n"),
            ("sys/fs/cgroup/a/memory.max", "-1\n"),
            ("sys/fs/cgroup/memory.max", ""),
            ("sys/fs/cgroup/a/memory.high", "1e9"),
            ("sys/fs/cgroup/a/memory.events", "highest 3\nhigh x\n"),
            ("sys/fs/cgroup/a/memory.pressure", "full total=5\n"),
        ]);
        assert_eq!(Memory::read(tree.root()), Memory::default());
    }
}
