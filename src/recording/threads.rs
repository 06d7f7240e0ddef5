//! The numbers of the threads of which a recording has events, and the ends of those threads.

use super::recorder::at_work;
use crate::os;
use crate::unattributed::unattributed;
use std::cell::Cell;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

thread_local! {
    /// This thread's number; 0: it has none yet. Without a destructor: a thread frees blocks until its very end.
    static THREAD: Cell<u32> = const { Cell::new(0) };
    /// The recording that has events of this thread.
    static SESSION: Cell<u32> = const { Cell::new(0) };
    /// Its destructor says that the thread ends.
    static LEAVER: Leaver = const { Leaver };
}

struct Leaver;

impl Drop for Leaver {
    fn drop(&mut self) {
        let _unattributed = unattributed();
        if let Some(core) = at_work() {
            let (thread, session) = (THREAD.get(), SESSION.get());
            let shard = thread as usize % core.shards.len();
            core.noting(shard, session, false, || (), |shard, ()| shard.note_thread_end(thread));
        }
    }
}

/// The number of a process's main thread, on Linux: glibc's heap serves it in other ways than all others.
pub(crate) const MAIN: u32 = 1;

fn is_main() -> bool {
    cfg!(target_os = "linux") && os::thread_number() == process::id()
}

/// This thread's number, for an event of this recording.
#[inline]
pub(super) fn this_thread(session: u32) -> u32 {
    static THREADS: AtomicU32 = AtomicU32::new(MAIN);
    if THREAD.get() == 0 {
        let number = if is_main() { MAIN } else { THREADS.fetch_add(1, Ordering::Relaxed).wrapping_add(1) };
        THREAD.set(number);
        let _ = LEAVER.try_with(|_| ());
    }
    SESSION.set(session);
    THREAD.get()
}
