//! What no request is charged, by who made it: the main thread, threads of Python, and the threads of each library,
//! which have the name that it gave them, or else its own.
//!
//! Groups are only ever added, without a lock: a child of `fork` may find one half made, which nobody uses then.

use super::python::Python;
use super::shared::Thread;
use super::walk::outermost;
use crate::sync::Made;
use crate::unattributed::{GROUPS, join_nobodys, nobodys_of};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// The longest name in bytes; a longer one is cut.
const MAX_NAME: usize = 64;

/// What comes from threads that are in no other group is the first one's.
struct Group {
    /// [`NONE`], then [`BEGUN`] by one thread, then [`DONE`].
    state: AtomicU8,
    name: [AtomicU64; MAX_NAME / 8],
}

const NONE: u8 = 0;
const BEGUN: u8 = 1;
const DONE: u8 = 2;

static ALL: [Group; GROUPS] =
    [const { Group { state: AtomicU8::new(NONE), name: [const { AtomicU64::new(0) }; MAX_NAME / 8] } }; GROUPS];

const OTHER: &str = "other threads";

/// What the system calls the thread that began it, and so every thread that nobody gave a name.
static USUAL: Made<SystemName> = Made::new();

type SystemName = [u8; 16];

fn system_name() -> SystemName {
    let mut name = [0; 16];
    // SAFETY: room for the 16 bytes that a thread's name has at most, with its end.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    name
}

/// Called once, before any other.
pub(super) fn begin() {
    USUAL.get_or_make(system_name);
}

/// This thread asked for so many bytes while no request was selected on it. Without a lock.
pub(super) fn add(thread: &mut Thread, bytes: usize, python: Option<&Python>) {
    thread.nobodys.get_or_insert_with(|| find_own(python)).fetch_add(bytes as u64, Ordering::Relaxed);
}

#[cold]
fn find_own(python: Option<&Python>) -> &'static AtomicU64 {
    join_nobodys(name_of_own(python).map_or(0, |name| find(&name)))
}

/// A name that is being put together. Not a String: nothing here allocates.
struct Name {
    bytes: [u8; MAX_NAME],
    used: usize,
}

impl Name {
    fn push(&mut self, text: &[u8]) {
        let part = &text[..text.len().min(MAX_NAME - self.used)];
        self.bytes[self.used..][..part.len()].copy_from_slice(part);
        self.used += part.len();
    }

    fn words(&self) -> [u64; MAX_NAME / 8] {
        std::array::from_fn(|at| {
            let mut word = [0; 8];
            word.copy_from_slice(&self.bytes[at * 8..][..8]);
            u64::from_le_bytes(word)
        })
    }
}

/// What the group of this thread is called; `None`: nothing is known of it.
fn name_of_own(python: Option<&Python>) -> Option<Name> {
    let mut name = Name { bytes: [0; MAX_NAME], used: 0 };
    // SAFETY: both functions take nothing and only return a number.
    if unsafe { libc::gettid() == libc::getpid() } {
        name.push(b"the main thread");
        return Some(name);
    }
    let given = system_name();
    let is_named = USUAL.get().is_some_and(|usual| *usual != given);
    let library = outermost();
    if library.is_some_and(|library| python.is_some_and(|python| python.file == library.file())) {
        // From 3.14 on Python gives the system its threads' names: "Thread-7 (work)", one for each.
        let is_counted =
            given.strip_prefix(b"Thread-").is_some_and(|rest| rest.first().is_some_and(u8::is_ascii_digit));
        name.push(if is_named && !is_counted { pool(&given) } else { b"threads of Python" });
        return Some(name);
    }
    match (is_named, library) {
        (true, Some(library)) => {
            name.push(pool(&given));
            name.push(b" in ");
            name.push(library.name());
        }
        (true, None) => name.push(pool(&given)),
        (false, Some(library)) => name.push(library.name()),
        (false, None) => return None,
    }
    Some(name)
}

/// The name of a thread without its number.
fn pool(given: &SystemName) -> &[u8] {
    let end = given.iter().position(|byte| *byte == 0).unwrap_or(given.len());
    let is_of_number = |byte: &u8| byte.is_ascii_digit() || b"-_#:. ".contains(byte);
    let kept = given[..end].iter().rposition(|byte| !is_of_number(byte)).map_or(end, |last| last + 1);
    &given[..kept]
}

/// The group of this name, which is made if it must be.
fn find(name: &Name) -> usize {
    let words = name.words();
    for (at, group) in ALL.iter().enumerate().skip(1) {
        let state = group.state.compare_exchange(NONE, BEGUN, Ordering::Acquire, Ordering::Acquire);
        match state {
            Ok(_) => {
                group.name.iter().zip(words).for_each(|(to, word)| to.store(word, Ordering::Relaxed));
                // Release pairs with the Acquire above and in `by_group`.
                group.state.store(DONE, Ordering::Release);
                return at;
            }
            Err(DONE) if group.name.iter().zip(words).all(|(one, word)| one.load(Ordering::Relaxed) == word) => {
                return at;
            }
            // Another name's, or one that another thread is making, perhaps of the same name: `by_group` adds them up.
            Err(_) => {}
        }
    }
    0
}

/// How many bytes each group asked for while no request was selected.
pub(crate) fn by_group() -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    for (at, group) in ALL.iter().enumerate() {
        let bytes = nobodys_of(at);
        if bytes == 0 {
            continue;
        }
        let name = if at == 0 {
            OTHER.to_owned()
        } else if group.state.load(Ordering::Acquire) == DONE {
            let bytes: Vec<u8> =
                group.name.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
            let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
            String::from_utf8_lossy(&bytes[..end]).into_owned()
        } else {
            continue;
        };
        *found.entry(name).or_default() += bytes;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pools_name_is_a_threads_without_its_number() {
        let named = |text: &str| {
            let mut name = [0; 16];
            name[..text.len()].copy_from_slice(text.as_bytes());
            String::from_utf8_lossy(pool(&name)).into_owned()
        };
        assert_eq!(
            ["polars-12", "io 3", "jemalloc_bg_thd", "12"].map(named),
            ["polars", "io", "jemalloc_bg_thd", "12"]
        );
    }
}
