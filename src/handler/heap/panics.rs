//! What a panic hook allocates is nobody's: std's hook prints a backtrace where `RUST_BACKTRACE` is set, for which it
//! keeps 25 MB of symbols for the whole process. What unwinds afterwards, destructors, is its request's again.

use crate::unattributed::unattributed;
use std::panic::{set_hook, take_hook};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::panicking;

/// Puts a hook around the one that is there, once. Called where a request begins in a program whose allocator counts.
/// A hook that is set later takes its place; one that calls what was there before (`take_hook`) calls it.
#[inline]
pub(super) fn attend() {
    static IS_THERE: AtomicBool = AtomicBool::new(false);
    // `set_hook` panics on a thread that panics: the next request does it.
    if !IS_THERE.load(Ordering::Relaxed) && !panicking() && !IS_THERE.swap(true, Ordering::Relaxed) {
        put_around();
    }
}

#[cold]
fn put_around() {
    let _immortal = unattributed(); // the hook itself
    let before = take_hook();
    set_hook(Box::new(move |info| {
        let _hook = unattributed();
        before(info);
    }));
}
