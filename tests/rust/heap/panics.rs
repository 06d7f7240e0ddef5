//! Whose the memory of a panic is. In processes of their own: the panic hook and std's cache of symbols are the
//! process's.

use crate::child;
use ctxalloc::request;
use std::backtrace::Backtrace;
use std::hint::black_box;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};

const BACKTRACE: [(&str, &str); 1] = [("RUST_BACKTRACE", "1")];

/// Kept after the panic, by whoever unwinds.
struct Keeps<'a>(&'a mut Vec<u8>);

impl Drop for Keeps<'_> {
    fn drop(&mut self) {
        self.0.extend([7; 5000]);
    }
}

#[test]
fn what_the_panic_hook_keeps_is_nobodys_and_what_unwinds_is_the_requests() {
    let fate = child::fate_in("panics::child_that_catches_panics", &BACKTRACE);
    fate.says("stack backtrace").says("the first panic").says("the second panic").ended_well();
}

#[test]
#[ignore = "a child of what_the_panic_hook_keeps_is_nobodys_and_what_unwinds_is_the_requests"]
fn child_that_catches_panics() {
    for panic in ["the first panic", "the second panic"] {
        for refuses in [false, true] {
            let terms = request().root().heap_limit_bytes(100_000);
            let own = if refuses { terms.heap_refuses() } else { terms }.begin().unwrap();
            let mut kept = Vec::new();
            let payload = own.run(|| {
                catch_unwind(AssertUnwindSafe(|| {
                    let _keeps = Keeps(&mut kept);
                    panic!("{}", black_box(panic));
                }))
                .unwrap_err()
            });
            let heap = own.heap().unwrap();
            assert_eq!((heap.live_blocks, heap.live_bytes, heap.exceeded), (1, 5000, 0), "{heap:?}");
            drop((kept, payload));
            assert_eq!(own.heap().unwrap().live_blocks, 0);
        }
    }
}

#[test]
fn a_hook_that_was_there_before_and_one_that_calls_ours_are_nobodys_too() {
    child::fate_in("panics::child_with_hooks_of_its_own", &BACKTRACE).says("stack backtrace").ended_well();
}

#[test]
#[ignore = "a child of a_hook_that_was_there_before_and_one_that_calls_ours_are_nobodys_too"]
fn child_with_hooks_of_its_own() {
    static KEPT: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    fn chained(hears: fn()) {
        let before = take_hook();
        set_hook(Box::new(move |info| {
            hears();
            before(info);
        }));
    }
    chained(|| drop(KEPT.set(black_box(vec![0_u8; 50_000]))));
    let own = request().root().begin().unwrap(); // the first one
    chained(|| {}); // around ours
    own.run(|| catch_unwind(|| panic!("caught")).unwrap_err());
    let heap = own.heap().unwrap();
    assert_eq!((heap.live_blocks, heap.peak_bytes < 1000), (0, true), "{heap:?}");
}

#[test]
fn a_request_begun_while_a_panic_unwinds_leaves_the_hook_to_the_next() {
    let child = "panics::child_whose_first_request_begins_while_a_panic_unwinds";
    child::fate_in(child, &BACKTRACE).says("stack backtrace").ended_well();
}

#[test]
#[ignore = "a child of a_request_begun_while_a_panic_unwinds_leaves_the_hook_to_the_next"]
fn child_whose_first_request_begins_while_a_panic_unwinds() {
    struct Begins;
    impl Drop for Begins {
        fn drop(&mut self) {
            request().root().begin().unwrap().end();
        }
    }
    catch_unwind(|| {
        let _begins = Begins;
        panic!("the first");
    })
    .unwrap_err();
    let own = request().root().begin().unwrap();
    own.run(|| catch_unwind(|| panic!("the second")).unwrap_err());
    assert_eq!(own.heap().unwrap().live_blocks, 0);
    assert!(own.heap().unwrap().peak_bytes < 1000);
}

#[test]
fn a_backtrace_that_is_shown_outside_of_the_request_is_nobodys() {
    child::fate_of("panics::child_that_shows_a_backtrace").ended_well();
}

#[test]
#[ignore = "a child of a_backtrace_that_is_shown_outside_of_the_request_is_nobodys"]
fn child_that_shows_a_backtrace() {
    let own = request().root().begin().unwrap();
    own.run(|| {
        let captured = Backtrace::force_capture();
        let shown = ctxalloc::Context::new().run(|| captured.to_string());
        assert!(shown.contains("child_that_shows_a_backtrace"));
    });
    let heap = own.heap().unwrap();
    assert!(heap.peak_bytes < 200_000, "{heap:?}");
}
