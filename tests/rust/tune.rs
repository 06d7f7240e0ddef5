//! Replays of recordings that are made here: their accounts are the recording's, on as many threads, and in order.
#![allow(clippy::unwrap_used, reason = "a test that unwraps nothing has failed")]

#[path = "support/child.rs"]
mod child;
#[cfg(not(miri))]
#[path = "tune/measured.rs"]
mod measured;

use ctxalloc::recording::{Event, Recording, Sums, What};
use ctxalloc::tune::{Choice, Plan, Replayed, replay, routes};
use std::collections::HashMap;

const ALL: [&str; 6] = ["default", "pool", "arena", "hugepages", "aligned64", "tracked"];

fn sums(peak_bytes: u64, total_bytes: u64, blocks: u64, live_bytes: u64) -> Sums {
    let mut sums = Sums::default();
    (sums.peak_bytes, sums.total_bytes, sums.blocks, sums.live_bytes) = (peak_bytes, total_bytes, blocks, live_bytes);
    sums
}

/// Where a test writes a plan.
struct Written(std::path::PathBuf);

impl Drop for Written {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn a_plan_that_was_written_is_replayed_as_it_was() {
    let file = Written(std::env::temp_dir().join(format!("ctxalloc-plan-{}", std::process::id())));
    for recording in [nested(), passed_on(5, 60, 20)] {
        for on_one_thread in [false, true] {
            let plan = Plan::new(&recording, None, on_one_thread).unwrap();
            plan.write(&file.0).unwrap();
            let read = Plan::read(&file.0).unwrap();
            read.write(&file.0).unwrap();
            assert_eq!(replayed(&read, "pool").compared, replayed(&plan, "pool").compared);
            assert_eq!(format!("{:?}", Plan::read(&file.0).unwrap()), format!("{read:?}"), "nothing is lost");
        }
    }
    let bytes = std::fs::read(&file.0).unwrap();
    let says = |bytes: &[u8]| {
        std::fs::write(&file.0, bytes).unwrap();
        Plan::read(&file.0).unwrap_err().to_string()
    };
    assert!(says(&bytes[..bytes.len() / 2]).contains("this is no plan"));
    assert!(says(b"").contains("this is no plan"));
    for at in [0, 40, bytes.len() / 2, bytes.len() - 1] {
        let mut damaged = bytes.clone();
        damaged[at] ^= 4;
        assert!(says(&damaged).contains("this is no plan"), "byte {at}");
    }
    assert!(Plan::read("/no/such/plan").unwrap_err().to_string().contains("/no/such/plan"));
}

fn replayed(plan: &Plan, name: &str) -> Replayed {
    replay(plan, &Choice::named(name).unwrap()).unwrap()
}

/// Events in their order, a microsecond apart.
#[derive(Default)]
struct Script(Vec<Event>);

impl Script {
    fn on(&mut self, thread: u32, request: u64, what: What) -> &mut Self {
        self.0.push(Event::new(self.0.len() as u64 * 1000, thread, request, what));
        self
    }

    fn begin(&mut self, thread: u32, request: u64, parent: u64) -> &mut Self {
        self.on(thread, request, What::Begin { name: 0, handler: 0, parent })
    }

    fn make(&mut self, thread: u32, request: u64, block: u64, bytes: u64, zeroed: bool) -> &mut Self {
        self.on(thread, request, What::Allocate { block, bytes, align: 16, zeroed })
    }

    fn free(&mut self, thread: u32, request: u64, block: u64) -> &mut Self {
        self.on(thread, request, What::Free { block })
    }

    fn end(&mut self, thread: u32, request: u64, sums: Sums) -> &mut Self {
        self.on(thread, request, What::End { sums, page_faults: None, processor_ns: None })
    }

    fn recording(&self) -> Recording {
        Recording::from_events(vec!["GET /".to_owned(), "GET /other".to_owned()], self.0.clone())
    }
}

/// A request with a resize, a zeroed block that escapes and is freed by another thread, and one inside of it.
fn nested() -> Recording {
    let mut script = Script::default();
    script.begin(0, 1, 0).make(0, 1, 1, 10_000, false).begin(0, 2, 1).make(0, 2, 2, 300_000, true);
    script.on(0, 1, What::Resize { block: 1, bytes: 20_000, moved: true });
    script.on(0, 1, What::Resize { block: 1, bytes: 5_000, moved: false });
    script.end(0, 2, sums(300_000, 300_000, 1, 300_000)).free(0, 1, 1);
    script.end(0, 1, sums(320_000, 320_000, 2, 300_000)).free(1, 2, 2);
    script.recording()
}

#[test]
fn a_replay_makes_the_sums_of_its_recording() {
    for name in ALL {
        for on_one_thread in [false, true] {
            let plan = Plan::new(&nested(), None, on_one_thread).unwrap();
            let facts = plan.facts();
            assert_eq!((facts.requests, facts.blocks, facts.freed_elsewhere, facts.left_out), (1, 2, 1, 0));
            assert_eq!((facts.peak_live_bytes, facts.live_at_end_bytes), (320_000, 0));
            assert_eq!(facts.threads, if on_one_thread { 1 } else { 2 });
            let found = replayed(&plan, name);
            assert_eq!(found.compared, 2, "{name}");
        }
    }
}

#[test]
fn what_came_from_elsewhere_is_charged_and_not_made() {
    let mut script = Script::default();
    script.begin(0, 1, 0).on(0, 1, What::Allocate { block: 1, bytes: 1 << 40, align: 0, zeroed: false });
    script.make(0, 1, 2, 8, false).free(0, 1, 1).end(0, 1, sums((1 << 40) + 8, (1 << 40) + 8, 2, 8));
    let plan = Plan::new(&script.recording(), None, false).unwrap();
    assert_eq!(plan.facts().peak_live_bytes, 8);
    assert_eq!(replayed(&plan, "default").compared, 1);
    assert_eq!(routes(&script.recording()).unwrap()[0].total_bytes, 8);
}

/// As a whole request's lists and buffers do it: in place, elsewhere, after an inner end, on another thread.
#[test]
fn what_was_charged_is_resized_as_it_was() {
    let mut script = Script::default();
    let charge = |block, bytes| What::Allocate { block, bytes, align: 0, zeroed: false };
    let resize = |block, bytes| What::Resize { block, bytes, moved: false };
    script.begin(0, 1, 0).on(0, 1, charge(1, 1 << 40)).on(0, 1, resize(1, 3 << 40)).make(0, 1, 2, 8, false);
    script.begin(0, 2, 1).on(0, 2, charge(3, 5000)).on(1, 2, resize(3, 9000)).on(1, 2, resize(3, 2000));
    script.end(0, 2, sums(9000, 9000, 1, 2000)).on(1, 2, resize(3, 100_000)).on(0, 1, resize(1, 16));
    script.free(1, 2, 3).on(0, 1, resize(1, 48)).end(0, 1, sums((3 << 40) + 100_008, (3 << 40) + 107_040, 3, 56));
    script.on(0, 1, resize(1, 1 << 30)).free(1, 1, 1);
    for name in ALL {
        for on_one_thread in [false, true] {
            let plan = Plan::new(&script.recording(), None, on_one_thread).unwrap();
            assert_eq!((plan.facts().peak_live_bytes, plan.facts().live_at_end_bytes), (8, 8), "nothing else is made");
            assert_eq!(replayed(&plan, name).compared, 2, "{name}");
        }
    }
}

#[test]
fn a_recording_whose_sums_are_not_those_of_its_events_is_refused() {
    for (wrong, word) in [(sums(9, 8, 1, 8), "8 bytes, 9 at the peak"), (sums(8, 9, 1, 8), "1 block of 9 bytes")] {
        let mut script = Script::default();
        script.begin(0, 1, 0).make(0, 1, 1, 8, false).end(0, 1, wrong);
        let error = Plan::new(&script.recording(), None, false).unwrap_err().to_string();
        assert!(error.contains("contradicts itself: request 1") && error.contains(word), "{error}");
    }
}

/// Nobody knows what others had, so only what is known is made, and compared with nothing.
#[test]
fn sums_that_include_others_are_not_compared() {
    let with_others = |sums| {
        let mut sums: Sums = sums;
        sums.includes_others = true;
        sums
    };
    let mut script = Script::default();
    script.begin(0, 1, 0).make(0, 1, 1, 100_000, false).begin(0, 2, 1).make(0, 2, 2, 8, false);
    script.begin(1, 3, 0).make(1, 3, 3, 50_000, true).free(1, 3, 3).end(1, 3, sums(50_000, 50_000, 1, 0));
    script.end(0, 2, with_others(sums(50_008, 50_008, 2, 8))).free(0, 1, 1);
    script.end(0, 1, with_others(sums(150_008, 150_008, 3, 8))).free(0, 2, 2);
    for on_one_thread in [false, true] {
        let plan = Plan::new(&script.recording(), None, on_one_thread).unwrap();
        let facts = plan.facts();
        assert_eq!((facts.requests, facts.with_others, facts.torn, facts.unordered_peaks), (2, 2, 0, 0));
        assert_eq!((facts.blocks, facts.peak_live_bytes), (3, 150_008));
        let file = Written(std::env::temp_dir().join(format!("ctxalloc-others-{}", std::process::id())));
        plan.write(&file.0).unwrap();
        for name in ALL {
            assert_eq!(replayed(&Plan::read(&file.0).unwrap(), name).compared, 1, "{name}");
        }
    }
    let route = &routes(&script.recording()).unwrap()[0];
    assert_eq!(route.peak_bytes, [50_000, 150_008], "a limit holds for what others had too");
}

/// A task that goes on after its own request's end: what it makes is charged to the request around it.
#[test]
fn what_is_made_after_an_inner_end_is_the_outer_ones() {
    let mut script = Script::default();
    script.begin(0, 1, 0).begin(0, 2, 1).end(0, 2, sums(0, 0, 0, 0)).make(1, 2, 1, 100_000, false).free(0, 2, 1);
    script.make(1, 2, 2, 50_000, false).end(0, 1, sums(100_000, 150_000, 2, 50_000)).make(1, 2, 3, 10, false);
    for on_one_thread in [false, true] {
        let plan = Plan::new(&script.recording(), None, on_one_thread).unwrap();
        let facts = plan.facts();
        assert_eq!((facts.requests, facts.blocks, facts.left_out, facts.peak_live_bytes), (1, 3, 0, 100_000));
        assert_eq!(replayed(&plan, "pool").compared, 2);
    }
}

/// A function that was wrapped in a request, and is called when the request is over.
#[test]
fn what_is_made_after_the_end_of_all_is_made_and_charged_to_nobody() {
    let mut script = Script::default();
    script.begin(0, 1, 0).begin(0, 2, 1).end(0, 2, sums(0, 0, 0, 0)).end(0, 1, sums(0, 0, 0, 0));
    for block in 0..50 {
        let thread = block as u32 % 2;
        script.make(thread, 1 + block % 2, block, 200_000, false);
        script.on(thread, 1 + block % 2, What::Resize { block, bytes: 300_000, moved: true });
        if block % 5 > 0 {
            script.free(1 - thread, 1 + block % 2, block);
        }
    }
    script.on(0, 1, What::Allocate { block: 99, bytes: 7, align: 0, zeroed: false });
    for on_one_thread in [false, true] {
        let plan = Plan::new(&script.recording(), None, on_one_thread).unwrap();
        let facts = plan.facts();
        assert_eq!((facts.blocks, facts.left_out, facts.live_at_end_bytes), (50, 1, 3_000_000), "a charge is no block");
        assert!(facts.peak_live_bytes >= 3_000_000);
        for name in ALL {
            assert_eq!(replayed(&plan, name).compared, 2);
        }
    }
}

#[test]
fn what_makes_no_sense_is_an_error_or_left_out() {
    let mut twice = Script::default();
    twice.begin(0, 1, 0).make(0, 1, 1, 8, false).make(0, 1, 1, 8, false);
    assert!(Plan::new(&twice.recording(), None, false).unwrap_err().to_string().contains("block 1 is made twice"));
    let mut again = Script::default();
    again.begin(0, 1, 0).begin(0, 1, 0);
    assert!(Plan::new(&again.recording(), None, false).unwrap_err().to_string().contains("request 1 begins twice"));
    let mut cut = Script::default();
    cut.free(0, 7, 7).end(0, 7, Sums::default()).make(0, 7, 8, 8, false).begin(0, 1, 0).make(0, 1, 1, 8, false);
    let plan = Plan::new(&cut.recording(), None, false).unwrap();
    assert_eq!((plan.facts().left_out, plan.facts().unfinished, plan.facts().live_at_end_bytes), (3, 1, 8));
    assert_eq!(replayed(&plan, "pool").compared, 0);
}

/// Many requests that overlap, each block freed by the next thread.
fn passed_on(threads: u32, requests: u64, blocks: u64) -> Recording {
    let mut script = Script::default();
    for request in 1..=requests {
        let thread = request as u32 % threads;
        script.begin(thread, request, 0);
        for block in 0..blocks {
            script.make(thread, request, request * blocks + block, 1000 + block, block % 3 == 0);
        }
        if let Some(earlier) = request.checked_sub(2).filter(|&earlier| earlier > 0) {
            script.end((earlier + 1) as u32 % threads, earlier, whole(blocks));
            for block in 0..blocks {
                script.free((earlier + 1) as u32 % threads, earlier, earlier * blocks + block);
            }
        }
    }
    script.recording()
}

fn whole(blocks: u64) -> Sums {
    let bytes = (0..blocks).map(|block| 1000 + block).sum();
    sums(bytes, bytes, blocks, bytes)
}

#[test]
fn blocks_pass_between_threads_without_a_step_out_of_order() {
    for name in ["default", "pool", "arena"] {
        let plan = Plan::new(&passed_on(5, 60, 20), None, false).unwrap();
        assert_eq!((plan.facts().threads, plan.facts().freed_elsewhere), (5, 58 * 20));
        assert_eq!(replayed(&plan, name).compared, 58, "{name}");
    }
}

#[test]
fn a_route_is_replayed_alone() {
    let mut script = Script::default();
    for request in 1..=10 {
        script.on(0, request, What::Begin { name: request as u32 % 2, handler: 0, parent: 0 });
        script.make(0, request, request, 1 << request, false).free(0, request, request);
        script.end(0, request, sums(1 << request, 1 << request, 1, 0));
    }
    let plan = Plan::new(&script.recording(), Some("GET /other"), false).unwrap();
    assert_eq!((plan.facts().requests, plan.facts().peak_live_bytes, plan.facts().left_out), (5, 512, 0));
    assert_eq!(replayed(&plan, "pool").compared, 5);
}

#[test]
fn what_the_step_that_ends_a_request_still_holds_has_not_escaped() {
    let mut script = Script::default();
    for request in 1..=2 {
        script.begin(0, request, 0).make(0, request, request, 1000, false);
        script.end(0, request, sums(1000, 1000, 1, 1000)).free(0, request, request);
    }
    for route in routes(&script.recording()).unwrap() {
        assert_eq!((route.requests, route.escaped_blocks, route.escaped_ns.len()), (2, 0, 0));
    }
}

#[test]
fn what_a_request_makes_after_its_end_is_in_its_peak_and_has_not_escaped() {
    let mut script = Script::default();
    for request in 1..=2 {
        script.begin(0, request, 0).make(0, request, 10 * request, 1000, false).free(0, request, 10 * request);
        script.end(0, request, sums(1000, 1000, 1, 0));
    }
    // Both have ended, and the thread has gone on: of what one makes 7000 bytes are alive at most.
    script.begin(0, 3, 0).end(0, 3, sums(0, 0, 0, 0));
    script.make(0, 1, 11, 4000, false).make(0, 1, 12, 3000, false).free(0, 1, 11).make(0, 1, 13, 1000, false);
    script.free(0, 1, 12).free(0, 1, 13);
    for route in routes(&script.recording()).unwrap() {
        assert_eq!(route.peak_bytes, [7000, 1000, 0]);
        assert_eq!((route.escaped_blocks, route.escaped_ns.len(), route.blocks), (0, 0, 5));
    }
}

#[test]
fn a_summary_says_how_requests_are_and_when_they_come() {
    let mut script = Script::default();
    for request in 1..=3 {
        script.begin(0, request, 0);
        if request > 1 {
            script.free(0, request - 1, 2 * request - 2); // which outlived it: the thread has gone on
        }
        script.make(0, request, 2 * request, 1000, true).make(1, request, 2 * request + 1, 5, false);
        script.free(2, request, 2 * request + 1).end(0, request, sums(1005, 1005, 2, 1000));
    }
    let found = routes(&script.recording()).unwrap();
    assert_eq!(found.iter().map(|route| route.name.as_str()).collect::<Vec<_>>(), ["GET /", ""]);
    for route in found {
        assert_eq!((route.requests, route.blocks, route.total_bytes, route.zeroed_bytes), (3, 6, 3015, 3000));
        assert_eq!((route.escaped_blocks, route.escaped_bytes, route.freed_elsewhere), (3, 3000, 3));
        assert_eq!(route.escaped_ns, [2000; 2]);
        assert_eq!(route.gaps_ns, [1000; 2]);
        assert_eq!((route.peak_bytes, route.duration_ns), (vec![1005; 3], 4000 + 2 * 5000));
        assert_eq!(route.sizes.into_iter().collect::<Vec<_>>(), [(3, 3), (10, 3)]);
        assert_eq!((route.max_concurrent, route.peak_live_bytes), (1, 1005));
        assert_eq!((route.alone_ns, route.alone_processor_ns), (vec![4000, 5000, 5000], vec![]));
        assert_eq!((route.lasting_blocks, route.open_processor_ns), (0, None));
    }
}

#[test]
fn an_unknown_strategy_is_named_with_those_that_there_are() {
    let error = Choice::named("best").unwrap_err().to_string();
    assert!(error.contains("strategy=best") && error.contains("hugepages"), "{error}");
}

/// As a server does it that has a thread for each request: requests one after the other, with blocks that stay in a
/// thread's cache until it ends.
fn a_thread_for_each(requests: u64, blocks: u64) -> Recording {
    let mut script = Script::default();
    for request in 1..=requests {
        let thread = request as u32;
        script.begin(thread, request, 0);
        for block in 0..blocks {
            script.make(thread, request, request * blocks + block, 1000, false);
        }
        for block in 0..blocks {
            script.free(thread, request, request * blocks + block);
        }
        script.end(thread, request, sums(blocks * 1000, blocks * 1000, blocks, 0));
    }
    script.recording()
}

/// Some overlap, and some begin when others have ended: there are never more than there were.
#[test]
fn threads_overlap_as_they_did() {
    let mut script = Script::default();
    let three = 1500;
    for thread in 0..three {
        let request = u64::from(thread) + 1;
        script.begin(thread, request, 0).make(thread, request, request, 1 << 20, false);
        if let Some(earlier) = thread.checked_sub(2) {
            let request = u64::from(earlier) + 1;
            script.free(earlier, request, request).end(earlier, request, sums(1 << 20, 1 << 20, 1, 0));
        }
    }
    let plan = Plan::new(&script.recording(), None, false).unwrap();
    assert_eq!((plan.facts().threads, plan.facts().threads_at_once), (three as usize, 3));
    assert_eq!(replayed(&plan, "pool").compared, u64::from(three) - 2);
}

/// Threads that came one after the other do so again: `measured` has what each takes of the one before.
#[test]
fn a_thread_ends_before_those_begin_that_came_after_it() {
    let requests = 3000;
    let plan = Plan::new(&a_thread_for_each(requests, 2), None, false).unwrap();
    assert_eq!((plan.facts().threads, plan.facts().threads_at_once), (requests as usize, 1));
    assert_eq!(replayed(&plan, "arena").compared, requests);
    let plan = Plan::new(&a_thread_for_each(100, 1000), None, true).unwrap();
    assert_eq!((plan.facts().threads, plan.facts().threads_at_once), (1, 1));
}
