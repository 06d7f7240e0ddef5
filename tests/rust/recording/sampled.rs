//! Which requests are recorded: one in so many, with all that is inside of it.

use super::{Folder, all_of, everything, in_turn};
use ctxalloc::recording::{Event, Recording, What, record};
use ctxalloc::{Buffer, request};
use std::collections::HashMap;

#[test]
fn one_request_in_so_many_is_recorded_with_all_inside_of_it() {
    let _turn = in_turn();
    let folder = Folder::new("sampled");
    let mut options = everything();
    options.one_in = 10;
    let recorder = record(folder.file(), options).unwrap();
    for _ in 0..2000 {
        let outer = request().root().name("outer").begin().unwrap();
        let inner = outer.run(|| request().name("inner").begin()).unwrap();
        drop(Buffer::zeroed_in(inner.handler(), 100).unwrap());
        inner.end();
        outer.end();
    }
    recorder.stop().unwrap();
    let recording = Recording::open(folder.file()).unwrap();
    let count = |wanted: &str| {
        let is_it = |event: &Event| match event.what {
            What::Begin { name, parent, .. } => {
                assert_eq!(parent > 0, recording.names()[name as usize] == "inner");
                recording.names()[name as usize] == wanted
            }
            _ => false,
        };
        all_of(&recording).filter(is_it).count()
    };
    assert_eq!(count("outer"), count("inner"));
    assert!((120..300).contains(&count("outer")), "{} of 2000", count("outer"));
    assert_eq!(recording.header().one_in, 10);
}

/// Work that goes on in the Context of a request that is over is inside of nothing: it is chosen as roots are.
#[test]
fn requests_begun_after_an_ended_one_are_recorded_as_often_as_others() {
    let _turn = in_turn();
    let folder = Folder::new("goes-on");
    let mut options = everything();
    options.one_in = 4;
    let recorder = record(folder.file(), options).unwrap();
    let begin = |name, handler| ctxalloc::scope(handler, || request().name(name).begin()).unwrap();
    let mut keeps = Vec::new();
    for _ in 0..2000 {
        let around = request().root().name("around").begin().unwrap();
        let ended = around.run(|| request().name("ended").begin()).unwrap();
        let handler = ended.handler();
        keeps.push(Buffer::zeroed_in(handler, 100).unwrap()); // so that it stays a request's
        ended.end();
        begin("in time", handler).end();
        around.end();
        begin("later", handler).end();
    }
    // And in one Context, whatever was chosen for what ended there.
    let ended = request().root().name("first").begin().unwrap();
    let handler = ended.handler();
    keeps.push(Buffer::zeroed_in(handler, 100).unwrap());
    ended.end();
    (0..2000).for_each(|_| drop(begin("again", handler).end()));
    recorder.stop().unwrap();
    let recording = Recording::open(folder.file()).unwrap();
    let mut counts: HashMap<&str, u32> = HashMap::new();
    for event in all_of(&recording) {
        if let What::Begin { name, .. } = event.what {
            *counts.entry(&recording.names()[name as usize]).or_default() += 1;
        }
    }
    assert!(["around", "later", "again"].iter().all(|name| (400..600).contains(&counts[name])), "{counts:?}");
    assert_eq!((counts["ended"], counts["in time"]), (counts["around"], counts["around"]));
}
