//! Which requests are recorded: one in so many, with all that is inside of it.

use super::{all_of, begun, with_one_in};
use ctxalloc::recording::What;
use ctxalloc::{Buffer, request};

#[test]
fn one_request_in_so_many_is_recorded_with_all_inside_of_it() {
    let program = || {
        for _ in 0..2000 {
            let outer = request().root().name("outer").begin().unwrap();
            let inner = outer.run(|| request().name("inner").begin()).unwrap();
            drop(Buffer::zeroed_in(inner.handler(), 100).unwrap());
            inner.end();
            outer.end();
        }
    };
    with_one_in(10, program, |recording| {
        for event in all_of(recording) {
            if let What::Begin { name, parent, .. } = event.what {
                assert_eq!(parent > 0, recording.names()[name as usize] == "inner");
            }
        }
        let counts = begun(recording);
        assert_eq!(counts["outer"], counts["inner"]);
        assert!((120..300).contains(&counts["outer"]), "{} of 2000", counts["outer"]);
        assert_eq!(recording.header().one_in, 10);
    });
}

/// Work that goes on in the Context of a request that is over is inside of nothing: it is chosen as roots are.
#[test]
fn requests_begun_after_an_ended_one_are_recorded_as_often_as_others() {
    let begin = |name, handler| ctxalloc::scope(handler, || request().name(name).begin()).unwrap();
    let mut keeps = Vec::new();
    let program = || {
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
    };
    with_one_in(4, program, |recording| {
        let counts = begun(recording);
        assert!(["around", "later", "again"].iter().all(|name| (400..600).contains(&counts[name])), "{counts:?}");
        assert_eq!((counts["ended"], counts["in time"]), (counts["around"], counts["around"]));
    });
}
