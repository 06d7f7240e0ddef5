//! The process's budget: one, whose limit follows the memory that the process may have.
//!
//! The thread that gives old memory back (`pool::decay`) reads the control groups again, since it is there already,
//! ends before a fork, and starts again in the child. What limits say is in `os::control_groups`; what becomes of it is
//! here.

use super::Budget;
use super::account::UNLIMITED;
use super::pool::{Keeper, Registration, allow, clock, look, pool_resident_bytes, register, trim_pools};
use crate::error::Error;
use crate::os;
use crate::os::control_groups::Memory;
use crate::source::heap;
use crate::source::pages::physical_bytes;
use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, held_across_fork};
use crate::unattributed::unattributed;
#[cfg(feature = "python")]
use std::path::Path;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// What limit the process's budget has.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum ProcessLimit {
    /// `Share(0.8)`. The fifth that is left is for what no account counts: a pool's blocks are up to a quarter larger
    /// than what was asked for, it keeps pages warm, the kernel charges a group for its page tables and sockets, and
    /// what is not ours may grow before it is measured again.
    Auto,
    /// This part of the memory that the process may have, above 0 and up to 1, less what is not ours. Where four
    /// processes serve in one control group, `Share(0.2)` for each.
    Share(f64),
    /// So many bytes, whatever the system says.
    Bytes(usize),
}

/// The part that [`ProcessLimit::Auto`] takes.
const AUTO_SHARE: f64 = 0.8;
/// How often the limit is read while something is charged, and while nothing is.
const BUSY: Duration = Duration::from_millis(250);
const IDLE: Duration = Duration::from_secs(5);
/// So many times as long as the last reading took: finding out which pages are in memory takes a millisecond for some
/// gigabytes, and no more than a fiftieth of a processor is to be spent on it.
const REST: u32 = 50;
/// The part of the time for which tasks wait for memory that is a sign to give some back: 70 ms in 2 s, which GLib's
/// `GMemoryMonitor` calls low.
const STALLED: f64 = 0.035;
/// Memory is given back at a sign, at most so often.
const TRIMS: Duration = Duration::from_secs(2);

impl Budget {
    /// The budget of the process: one, under the name `process`. It is meant to be the parent of all others.
    ///
    /// With [`ProcessLimit::Auto`] or a [`Share`](ProcessLimit::Share), its limit is that part of the smallest limit of
    /// the control groups that the process is in (`memory.max` of version 2, `memory.limit_in_bytes` of version 1), or
    /// of the machine's memory where that is less; minus what is not ours, which is the resident memory of the process
    /// that is in no pool of this crate: code, Python's objects, the C heap, other libraries. What is charged and is
    /// not in a pool is therefore counted twice, which errs on the safe side. Both are read again, every 250 ms while
    /// something is charged to it or waits for it, and every 5 s else. Where a system does not say how much a process
    /// has in memory (macOS, Windows), nothing is taken off.
    ///
    /// Two signs have pools give their unused memory back, at most every two seconds: a group went above its
    /// `memory.high`, or tasks of the group waited for memory for more than 3.5 % of the time (PSI).
    ///
    /// Called at the start of the program, it also has the pools keep an eighth of that memory warm at most, and not of
    /// the machine's (`CTXALLOC_WARM_BYTES`).
    ///
    /// A later call returns the same budget, with the limit that it names. One that is set by
    /// [`set_limit_bytes`](Self::set_limit_bytes) stays too: it follows nothing. A child of `fork` has it too; in Rust it
    /// reads the limits again once it has called this, or given memory back to a pool.
    ///
    /// ```
    /// use ctxalloc::strategy::{Budget, ProcessLimit};
    ///
    /// let process = Budget::process(ProcessLimit::Auto)?;
    /// let tenant = process.child("tenant", Some(64 << 20));
    /// assert!(process.limit_bytes().is_some() && tenant.is_under(&process));
    /// # Ok::<(), ctxalloc::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::BadOption`] for a share that is none, and where the system does not say how much memory there is.
    pub fn process(limit: ProcessLimit) -> Result<Self, Error> {
        static PROCESS: Made<(Arc<Process>, Registration)> = Made::new();
        let share = match limit {
            ProcessLimit::Auto => Some(AUTO_SHARE),
            ProcessLimit::Share(share) if share > 0.0 && share <= 1.0 => Some(share),
            ProcessLimit::Share(share) => {
                let expected = "a part of the memory, a number above 0 and up to 1";
                return Err(Error::BadOption { option: "share", value: share.to_string(), expected });
            }
            ProcessLimit::Bytes(_) => None,
        };
        let (process, _) = PROCESS.get_or_make(|| {
            let process = held_across_fork(Process::new(PathBuf::from("/")));
            let registration = register(Arc::downgrade(&process) as Weak<dyn Keeper>);
            (process, registration)
        });
        let _unattributed = unattributed();
        process.follow(share)?;
        match limit {
            ProcessLimit::Bytes(bytes) => process.budget.set_limit_bytes(Some(bytes)),
            _ => {
                whole_bytes(&Memory::read(&process.root)).into_iter().for_each(allow);
                look();
            }
        }
        Ok(process.budget.clone())
    }
}

/// The budget and how it is followed.
struct Process {
    budget: Budget,
    /// Where the system's files are.
    root: PathBuf,
    followed: Locked<Followed>,
}

#[derive(Default)]
struct Followed {
    /// `None` where the limit is not the system's.
    share: Option<f64>,
    /// The limit that was set by it; `None`: none yet.
    limit_bytes: Option<usize>,
    /// What was read last, and when.
    seen: Option<(Memory, Duration)>,
    /// When memory was given back last.
    trimmed: Option<Duration>,
}

impl HeldAcrossFork for Process {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.followed.lock());
    }
}

impl Process {
    fn new(root: PathBuf) -> Self {
        Self { budget: Budget::new("process", None), root, followed: Locked::new(Followed::default()) }
    }

    /// Follows this part of the memory from now on; `None` follows nothing.
    fn follow(&self, share: Option<f64>) -> Result<(), Error> {
        if share.is_some() && whole_bytes(&Memory::read(&self.root)).is_none() {
            let expected = "a number of bytes: this system does not say how much memory there is";
            return Err(Error::BadOption { option: "limit", value: "auto".to_owned(), expected });
        }
        self.followed.with(|followed| (followed.share, followed.limit_bytes) = (share, None));
        self.read(clock::now());
        Ok(())
    }

    /// Reads the limits and sets the budget's. Returns whether it is time to give memory back.
    fn read(&self, now: Duration) -> bool {
        let memory = Memory::read(&self.root);
        let not_ours = not_ours_bytes();
        let (limit, before, is_short) = self.followed.with(|followed| {
            let Some(share) = followed.share else { return (None, None, false) };
            let before = followed.seen.replace((memory, now));
            let is_rested = followed.trimmed.is_none_or(|last| now.saturating_sub(last) >= TRIMS);
            let is_short = is_rested && before.is_some_and(|before| is_getting_short(before, (memory, now)));
            if is_short {
                followed.trimmed = Some(now);
            }
            let limit = limit_bytes(&memory, share, not_ours);
            (limit, std::mem::replace(&mut followed.limit_bytes, limit), is_short)
        });
        match (limit, before) {
            (Some(limit), None) => self.budget.set_limit_bytes(Some(limit)),
            (Some(limit), Some(before)) if !self.budget.account().replace_limit_bytes(before, limit) => {
                self.followed.with(|followed| followed.share = None); // somebody has set it since
            }
            _ => {}
        }
        is_short
    }

    /// Whether somebody uses it.
    fn is_busy(&self) -> bool {
        self.budget.in_use_bytes() > 0 || self.budget.reserved_bytes() > 0 || self.budget.waiting() > 0
    }
}

impl Keeper for Process {
    fn decay(&self, now: Duration) -> Option<Duration> {
        let _unattributed = unattributed();
        let (share, seen) = self.followed.with(|followed| (followed.share, followed.seen));
        share?;
        let rest = if self.is_busy() { BUSY } else { IDLE };
        // The thread comes by for its pools too.
        if let Some((_, read)) = seen
            && now < read + rest
        {
            return Some(read + rest);
        }
        if self.read(now) {
            trim_pools();
            heap::trim();
        }
        let ended = clock::now();
        Some(ended + rest.max(ended.saturating_sub(now) * REST))
    }
}

/// What the process has in memory beside pools; 0 where the system does not say.
fn not_ours_bytes() -> usize {
    let Some(resident) = os::resident_bytes() else { return 0 };
    resident.saturating_sub(pool_resident_bytes().unwrap_or(0))
}

/// What there is for all processes of the group.
fn whole_bytes(memory: &Memory) -> Option<usize> {
    memory.whole_bytes().or_else(|| Some(physical_bytes()).filter(|&bytes| bytes > 0 && bytes < UNLIMITED))
}

/// The budget's limit, in whole MiB: else each page that comes or goes would change it.
fn limit_bytes(memory: &Memory, share: f64, not_ours_bytes: usize) -> Option<usize> {
    const MIB: usize = 1 << 20;
    let part = (whole_bytes(memory)? as f64 * share) as usize;
    Some(part.saturating_sub(not_ours_bytes) / MIB * MIB)
}

/// Whether what was read since says that memory is getting short.
fn is_getting_short((before, then): (Memory, Duration), (memory, now): (Memory, Duration)) -> bool {
    // A counter that falls is another group's.
    let stalled = Duration::from_micros(memory.stalled_micros.saturating_sub(before.stalled_micros));
    let time = now.saturating_sub(then);
    memory.high_events > before.high_events || stalled.as_secs_f64() > STALLED * time.as_secs_f64()
}

/// The limits that the system sets, for those who show them: the machine's memory, the groups' limit, and where they
/// are slowed down; below `root`.
#[cfg(feature = "python")]
pub(crate) fn system_limits(root: &Path) -> [Option<usize>; 3] {
    let memory = Memory::read(root);
    [memory.machine_bytes, memory.max_bytes, memory.high_bytes]
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::{BUSY, Budget, IDLE, Memory, Process, ProcessLimit, is_getting_short, limit_bytes};
    use crate::error::Error;
    use crate::os::control_groups::trees::Tree;
    use crate::strategy::pool::Keeper;
    use std::time::Duration;

    const MIB: usize = 1 << 20;
    const GIB: usize = 1 << 30;
    const MAX: &str = "sys/fs/cgroup/memory.max";

    fn tree() -> Tree {
        Tree::new(&[("proc/self/cgroup", "0::/\n"), (MAX, "max\n"), ("proc/meminfo", "MemTotal: 1073741824 kB\n")])
    }

    #[test]
    fn the_limit_is_a_share_of_the_whole_less_what_is_not_ours() {
        let memory = Memory { machine_bytes: Some(8 * GIB), max_bytes: Some(GIB), ..Memory::default() };
        assert_eq!(limit_bytes(&memory, 0.5, 0), Some(512 * MIB));
        assert_eq!(limit_bytes(&memory, 0.5, 100 * MIB + 1), Some(411 * MIB));
        assert_eq!(limit_bytes(&memory, 0.5, GIB), Some(0));
        let without = Memory { max_bytes: None, ..memory };
        assert_eq!(limit_bytes(&without, 0.5, 0), Some(4 * GIB));
        let more_than_there_is = Memory { max_bytes: Some(usize::MAX - 1), ..memory };
        assert_eq!(limit_bytes(&more_than_there_is, 1.0, 0), Some(8 * GIB));
    }

    #[test]
    fn the_limit_follows_the_control_group() {
        let tree = tree();
        let process = Process::new(tree.root().to_owned());
        process.follow(Some(0.5)).expect("there is a machine");
        let of_machine = process.budget.limit_bytes().expect("a limit");
        assert!(of_machine > 500 * GIB && of_machine <= 512 * GIB, "{of_machine}");
        tree.write(MAX, &(64 * GIB).to_string());
        let first = process.followed.with(|followed| followed.seen).expect("it was read").1;
        let next = process.decay(first + IDLE / 2).expect("it is followed");
        assert_eq!(next, first + IDLE, "nobody uses it");
        assert_eq!(process.budget.limit_bytes(), Some(of_machine));
        let charge = process.budget.charge(1).expect("room");
        assert_eq!(process.decay(first + BUSY / 2), Some(first + BUSY), "somebody does");
        process.decay(first + BUSY);
        let lower = process.budget.limit_bytes().expect("a limit");
        assert!(lower > 20 * GIB && lower <= 32 * GIB, "{lower}");
        drop(charge);
        tree.write(MAX, "garbage");
        process.decay(first + BUSY + IDLE);
        assert!(process.budget.limit_bytes() > Some(lower), "there is none any more");
    }

    #[test]
    fn a_limit_of_its_own_follows_nothing() {
        let tree = tree();
        let process = Process::new(tree.root().to_owned());
        process.follow(None).expect("nothing is asked");
        assert_eq!((process.decay(Duration::from_secs(99)), process.budget.limit_bytes()), (None, None));
    }

    #[test]
    fn a_limit_that_is_set_by_hand_stays() {
        let tree = tree();
        let process = Process::new(tree.root().to_owned());
        process.follow(Some(0.5)).expect("there is a machine");
        process.budget.set_limit_bytes(Some(MIB));
        process.read(super::clock::now());
        assert_eq!(process.budget.limit_bytes(), Some(MIB));
        assert_eq!(process.decay(Duration::from_secs(99)), None, "it follows nothing");
        process.follow(Some(0.5)).expect("there is a machine");
        assert!(process.budget.limit_bytes() > Some(GIB));
    }

    #[test]
    fn going_above_high_and_waiting_for_memory_are_signs() {
        let second = Duration::from_secs(1);
        let calm = Memory { high_events: 3, stalled_micros: 1000, ..Memory::default() };
        let is_short = |after: Memory| is_getting_short((calm, second), (after, 3 * second));
        assert!(!is_short(calm));
        assert!(is_short(Memory { high_events: 4, ..calm }));
        assert!(!is_short(Memory { stalled_micros: 1000 + 69_000, ..calm }));
        assert!(is_short(Memory { stalled_micros: 1000 + 71_000, ..calm }));
        assert!(!is_short(Memory { high_events: 0, stalled_micros: 0, ..calm }), "another group's counters");
    }

    #[test]
    fn memory_goes_back_at_a_sign_and_not_all_the_time() {
        let tree = tree();
        let process = Process::new(tree.root().to_owned());
        process.follow(Some(0.5)).expect("there is a machine");
        let began = process.followed.with(|followed| followed.seen).expect("it was read").1;
        let at = |seconds: u64, events: u32| {
            tree.write("sys/fs/cgroup/memory.events", &format!("high {events}\n"));
            process.read(began + Duration::from_secs(seconds))
        };
        assert!(!at(1, 0));
        assert!(at(2, 1));
        assert!(!at(3, 2), "a moment ago");
        assert!(!at(9, 2), "it was quiet since");
        assert!(at(10, 3));
    }

    #[test]
    fn a_share_that_is_none_is_refused() {
        for share in [0.0, -1.0, 1.01, f64::NAN, f64::INFINITY] {
            let refused = Budget::process(ProcessLimit::Share(share)).expect_err("it is none");
            assert!(matches!(refused, Error::BadOption { option: "share", .. }), "{refused}");
        }
    }
}
