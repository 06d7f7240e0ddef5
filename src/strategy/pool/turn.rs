//! Giving memory back in turns. What a thread gives back is in no list for a moment: another one that trims waits for
//! it, and so does a fork, which holds the locks of all turns.
//!
//! In a turn anything of a user's source may run, also a panic: what is not given back yet goes back then. No lock but
//! those of turns is held meanwhile.

use crate::sync::ForkLock;
use std::cell::Cell;

/// Runs `work` while no other thread has its turn with `lock`. A thread that has a turn already waits for no other one:
/// a pool may end with what is given back, its source may do anything, and turns that waited for each other would wait
/// for ever.
pub(super) fn in_turn<R>(lock: &ForkLock, work: impl FnOnce() -> R) -> R {
    thread_local! {
        static HAS_TURN: Cell<bool> = const { Cell::new(false) };
    }
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            HAS_TURN.set(false);
        }
    }
    if HAS_TURN.replace(true) {
        return work();
    }
    let _end = End;
    lock.with(work)
}

#[cfg(all(test, not(ctxalloc_loom)))]
mod tests {
    use super::in_turn;
    use crate::sync::ForkLock;

    #[test]
    fn a_turn_within_a_turn_waits_for_nobody_and_the_next_one_does() {
        let lock = ForkLock::new();
        assert!(in_turn(&lock, || in_turn(&lock, || !lock.try_acquire())), "it is taken");
        assert!(std::panic::catch_unwind(|| in_turn(&lock, || panic!("a source"))).is_err());
        assert!(in_turn(&lock, || !lock.try_acquire()), "a new turn");
        assert!(lock.try_acquire(), "and its end");
    }
}
