#![allow(clippy::unwrap_used, reason = "a test that unwraps nothing has failed")]

use super::walk::{Before, Walk, class_of};
use super::{Export, Info, Perfetto, Pprof, Rmm};
use crate::recording::{Event, Recording, Sums, What};
use std::collections::HashMap;
use std::sync::Arc;

/// Requests that overlap, whose blocks are resized and freed in any order, some after their request and some never.
fn recording(seed: u64, steps: u64) -> Arc<Recording> {
    let mut random = seed * 2 + 1;
    let mut below = |end: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % end
    };
    let (mut events, mut live, mut open): (Vec<Event>, Vec<(u64, u64)>, Vec<u64>) = Default::default();
    let (mut requests, mut blocks) = (0, 0);
    for at in 0..steps {
        let thread = below(3) as u32;
        let of = |open: &[u64], at: u64| open[at as usize % open.len()];
        let (request, what) = match below(10) {
            0 | 1 => {
                requests += 1;
                let parent = if open.is_empty() { 0 } else { of(&open, below(9)) * below(2) };
                open.push(requests);
                (requests, What::Begin { name: below(3) as u32, handler: 0, parent })
            }
            2 if !open.is_empty() => {
                let request = open.swap_remove(below(open.len() as u64) as usize);
                let sums = Sums { peak_bytes: below(100_000), live_bytes: below(500), ..Sums::default() };
                (request, What::End { sums, page_faults: None, processor_ns: None })
            }
            3 if !open.is_empty() => (of(&open, below(9)), What::Refused { bytes: below(99), by: below(2) * open[0] }),
            4 if !live.is_empty() => {
                let (block, request) = live[below(live.len() as u64) as usize];
                (request, What::Resize { block, bytes: below(9000), moved: below(2) == 0 })
            }
            5 | 6 if !live.is_empty() => {
                let (block, request) = live.swap_remove(below(live.len() as u64) as usize);
                (request, What::Free { block })
            }
            _ if !open.is_empty() => {
                blocks += 1;
                let request = of(&open, below(9));
                live.push((blocks, request));
                (request, What::Allocate { block: blocks, bytes: below(5000), align: 16, zeroed: below(2) == 0 })
            }
            _ => continue,
        };
        events.push(Event::new(at * 777, thread, request, what));
    }
    Arc::new(Recording::from_events(vec!["one".to_owned(), String::new(), "unnamed".to_owned()], events))
}

#[test]
fn a_walk_knows_each_block_however_few_it_keeps() {
    for seed in 0..8 {
        let recording = recording(seed, 600);
        for keeps in [1, 3, 50, 10_000] {
            let (mut walk, mut live, mut made) = (Walk::keeping(&recording, keeps), HashMap::new(), 0);
            for event in recording.events().map(Result::unwrap) {
                let before = match event.what {
                    What::Allocate { block, bytes, .. } => {
                        made += 1;
                        let (class, at_ns, thread) = (class_of(bytes), event.at_ns, event.thread);
                        live.insert(block, Before { bytes, at_ns, made, thread, class });
                        Before::default()
                    }
                    What::Resize { block, bytes, .. } => {
                        made += 1;
                        let before = live[&block];
                        live.insert(block, Before { bytes, made, ..before });
                        before
                    }
                    What::Free { block } => live.remove(&block).unwrap(),
                    _ => Before::default(),
                };
                assert_eq!(walk.next().unwrap(), Some((event, before)), "seed {seed}, {keeps} kept");
            }
            assert_eq!(walk.next().unwrap(), None);
        }
    }
}

fn all(mut export: impl Export) -> Vec<u8> {
    let (mut out, mut part) = (Vec::new(), Vec::new());
    while export.more(&mut part).unwrap() {
        out.append(&mut part);
    }
    out.append(&mut part);
    out
}

#[test]
fn exports_have_a_line_for_each_event() {
    let recording = recording(7, 2000);
    let count =
        |want: fn(&What) -> bool| recording.events().filter(|event| want(&event.as_ref().unwrap().what)).count();
    let resizes = count(|what| matches!(what, What::Resize { .. }));
    let blocks = count(|what| matches!(what, What::Allocate { .. } | What::Free { .. })) + 2 * resizes;
    let rmm = String::from_utf8(all(Rmm::new(&recording))).unwrap();
    assert_eq!(rmm.lines().count(), blocks + 1);
    let perfetto = String::from_utf8(all(Perfetto::new(&recording))).unwrap();
    assert_eq!(perfetto.lines().count(), recording.events().count() + 2);
    assert!(!all(Pprof::new(&recording, (0..=64).map(|log| format!("up to 2^{log}")).collect())).is_empty());
}

/// What is alive of it has escaped, and what others charged to it has not.
#[test]
fn what_others_had_has_not_escaped() {
    for (includes_others, escaped_bytes) in [(true, 900), (false, 76_800)] {
        let sums = Sums { live_bytes: 77_000, includes_others, ..Sums::default() };
        let make = |block, bytes| What::Allocate { block, bytes, align: 8, zeroed: false };
        let whats = [
            (1, What::Begin { name: 0, handler: 0, parent: 0 }),
            (2, What::Begin { name: 1, handler: 0, parent: 1 }),
            (1, make(1, 400)),
            (2, make(2, 500)),
            (1, make(3, 5000)),
            (2, What::Resize { block: 2, bytes: 800, moved: true }),
            (1, What::Resize { block: 1, bytes: 200, moved: false }),
            (1, What::Free { block: 3 }),
            (1, make(4, 100)),
            (1, What::End { sums, page_faults: None, processor_ns: None }),
            (1, What::Free { block: 1 }),
            (2, make(5, 10_000)),
            (1, What::Free { block: 4 }),
        ];
        let events = whats.iter().zip(0..).map(|(&(request, what), at)| Event::new(at, 0, request, what)).collect();
        let mut info = Info::new(&Arc::new(Recording::from_events(vec!["one".into(), "inner".into()], events)));
        while info.read().unwrap() {}
        let row = &info.rows()[0];
        assert_eq!((row.with_others, row.ended(), row.requests), (u64::from(includes_others), 1, 1));
        // Freed by the step that ended it: the first one. Then it goes on.
        assert_eq!((row.escaped, row.escaped_bytes), (2, escaped_bytes));
    }
}

/// Chains of requests of which none ends: each block is counted in all of them.
#[test]
fn requests_inside_of_each_other_beyond_reason_are_an_error() {
    let nested = |depth: u64| {
        let begin = |at| What::Begin { name: 0, handler: 0, parent: at - 1 };
        let mut events: Vec<_> = (1..=depth).map(|at| Event::new(at, 0, at, begin(at))).collect();
        let made = What::Allocate { block: 1, bytes: 1, align: 8, zeroed: false };
        events.push(Event::new(depth + 1, 0, depth, made));
        let mut info = Info::new(&Arc::new(Recording::from_events(vec!["deep".to_owned()], events)));
        info.read().map(|_| info.rows()[0].blocks).map_err(|error| error.to_string())
    };
    assert_eq!(nested(4000), Ok(1));
    assert!(nested(5000).unwrap_err().contains("nested deeper"));
}
