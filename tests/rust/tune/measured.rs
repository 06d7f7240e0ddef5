//! What a replay takes of its process, each measured in a process of its own: what other tests give back meanwhile
//! would be taken off, and their page faults added.

use super::child::fate_of;
use super::{HashMap, Script, What, a_thread_for_each, sums};
use ctxalloc::tune::{Choice, Plan, Replayed, replay, replay_routes};

/// Of memory, for what a replay takes itself, and the rests of huge pages.
const SOME: u64 = 8 << 20;

/// Without what a replay before left warm.
fn afresh<R>(replayed: impl FnOnce() -> R) -> R {
    ctxalloc::trim();
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    #[allow(unsafe_code, reason = "what the C heap keeps of an earlier replay would be found warm")]
    // SAFETY: any thread may call it at any time.
    unsafe {
        libc::malloc_trim(0)
    };
    replayed()
}

fn replayed(plan: &Plan, name: &str) -> Replayed {
    afresh(|| replay(plan, &Choice::named(name).unwrap()).unwrap())
}

#[test]
fn routes_are_replayed_together_each_with_its_own_strategy() {
    fate_of("measured::child_with_a_strategy_for_each_route").ended_well();
}

#[test]
#[ignore = "counts the page faults of its process"]
fn child_with_a_strategy_for_each_route() {
    let mut script = Script::default();
    for request in 1..=40 {
        let is_outer = |name| What::Begin { name, handler: 0, parent: 0 };
        script.on(0, 2 * request, is_outer(request as u32 % 2)).begin(0, 2 * request + 1, 2 * request);
        script.make(0, 2 * request + 1, request, 1_000_000, false).free(0, 2 * request + 1, request);
        let one = sums(1_000_000, 1_000_000, 1, 0);
        script.end(0, 2 * request + 1, one).end(0, 2 * request, one);
    }
    let plan = Plan::new(&script.recording(), None, true).unwrap();
    let choice = |name: &str| Choice::named(name).unwrap();
    let of = |name: &str| HashMap::from([("GET /other".to_owned(), choice(name))]);
    let faults = [of("pool"), of("guard"), HashMap::from([("no route".to_owned(), choice("guard"))])].map(|routes| {
        let found = afresh(|| replay_routes(&plan, &choice("pool"), &routes).unwrap());
        assert_eq!(found.compared, 80);
        found.faults
    });
    // A pool has its pages back warm; a guard gives each block pages of its own, fresh ones: 245 for each of twenty.
    // Inner requests are the route's.
    assert!(faults[1] > faults[0] + 4000, "{faults:?}");
    assert!(faults[2] < faults[0] + 1000, "{faults:?}");
}

#[test]
fn touched_pages_are_in_memory_and_the_next_request_has_them_warm() {
    fate_of("measured::child_that_touches_pages").ended_well();
}

#[test]
#[ignore = "measures the memory of its process"]
fn child_that_touches_pages() {
    let mut script = Script::default();
    for request in 1..=8 {
        script.begin(0, request, 0).make(0, request, request, 64 << 20, false).free(0, request, request);
        script.end(0, request, sums(64 << 20, 64 << 20, 1, 0));
    }
    let plan = Plan::new(&script.recording(), None, true).unwrap();
    let found = replayed(&plan, "pool");
    // Once each page, or each huge page, not eight times; and some of the replay itself.
    assert!(found.faults < 16_384 + 1000, "{found:?}");
    if let Some(peak) = found.peak_resident_bytes {
        assert!(((64 << 20) - SOME..(64 << 20) + SOME).contains(&peak), "{found:?}");
    }
}

#[test]
fn what_was_alive_at_one_time_is_alive_at_one_time() {
    fate_of("measured::child_with_blocks_at_one_time").ended_well();
}

#[test]
#[ignore = "measures the memory of its process"]
fn child_with_blocks_at_one_time() {
    // Larger than what glibc keeps of an earlier replay's blocks, which would not be added.
    const BYTES: u64 = 33 << 20;
    let mut script = Script::default();
    for request in 1..=6 {
        script.begin(request as u32, request, 0);
    }
    for request in 1..=6 {
        script.make(request as u32, request, request, BYTES, false);
    }
    for request in 1..=6 {
        script.free(request as u32, request, request).end(request as u32, request, sums(BYTES, BYTES, 1, 0));
    }
    let plan = Plan::new(&script.recording(), None, false).unwrap();
    for name in ["default", "pool"] {
        let found = replayed(&plan, name);
        if let Some(peak) = found.peak_resident_bytes {
            // The kernel counts pages for each processor, and adds up the rest now and then.
            assert!((6 * BYTES - SOME..6 * BYTES + SOME).contains(&peak), "{name}: {found:?}");
        }
    }
}

#[test]
fn a_thread_takes_what_the_one_before_has_given_up() {
    fate_of("measured::child_with_a_thread_for_each_request").ended_well();
}

#[test]
#[ignore = "counts the page faults of its process"]
fn child_with_a_thread_for_each_request() {
    let plan = Plan::new(&a_thread_for_each(100, 1000), None, false).unwrap();
    // 246 pages for the blocks of a thread. If all had pages of their own it would be a hundred times as many.
    for name in ["default", "pool"] {
        let found = replayed(&plan, name);
        // A thread's own stack and record take some.
        assert!(found.faults < 10_000, "{name}: {found:?}");
    }
}
