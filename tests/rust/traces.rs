//! What `tracing` hears of requests, refusals and blocks.
#![allow(clippy::unwrap_used, reason = "a test that unwraps nothing has failed")]

#[path = "support/hearing.rs"]
mod hearing;

use ctxalloc::strategy::{Arena, Pool, Traced};
use ctxalloc::{Buffer, request};
use hearing::hearing;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// What was said, and its fields.
type Said = (String, BTreeMap<String, String>);

/// Everything that was said, in order.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<Said>>>);

#[derive(Default)]
struct Fields(BTreeMap<String, String>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }
}

impl Heard {
    fn note(&self, what: String, record: impl FnOnce(&mut dyn Visit)) {
        let mut fields = Fields::default();
        record(&mut fields);
        // A subscriber that allocates in the very request that it hears of.
        drop(Buffer::zeroed(100));
        self.0.lock().unwrap().push((what, fields.0));
    }

    fn all(&self, what: &str) -> Vec<BTreeMap<String, String>> {
        let heard = self.0.lock().unwrap();
        heard.iter().filter(|(known, _)| known == what).map(|(_, fields)| fields.clone()).collect()
    }
}

impl Subscriber for Heard {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, span: &Attributes<'_>) -> Id {
        assert_eq!((span.metadata().target(), *span.metadata().level()), ("ctxalloc", Level::DEBUG));
        self.note(format!("span {}", span.metadata().name()), |visit| span.record(visit));
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, values: &Record<'_>) {
        self.note("record".to_owned(), |visit| values.record(visit));
    }
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        self.note(format!("{} {}", metadata.level(), metadata.target()), |visit| event.record(visit));
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn a_span_has_the_numbers_of_its_request_once_it_has_ended() {
    let heard = Heard::default();
    hearing(heard.clone(), || {
        let request = request().name("upload").limit_bytes(1000).begin().unwrap();
        let kept = request.run(|| Buffer::zeroed(600)).unwrap();
        assert!(heard.all("record").is_empty());
        request.end();
        drop(kept);
    });
    assert_eq!(heard.all("span request")[0]["name"], "\"upload\"");
    let recorded: BTreeMap<_, _> = heard.all("record").into_iter().flatten().collect();
    let expected = [("escaped", "1"), ("peak_bytes", "600"), ("refused", "0"), ("total_blocks", "1")];
    assert_eq!(recorded, expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
}

#[test]
fn a_refusal_is_one_event_though_whoever_hears_it_is_refused_too() {
    let heard = Heard::default();
    hearing(heard.clone(), || {
        let request = request().name("upload").limit_bytes(50).begin().unwrap();
        assert!(request.run(|| Buffer::zeroed(600)).is_err());
    });
    let events = heard.all("WARN ctxalloc");
    assert_eq!(events.len(), 1, "{events:?}");
    assert!(events[0]["error"].contains("budget 'upload' has no room for 600 more bytes"), "{events:?}");
}

#[test]
fn a_subscriber_that_panics_hears_of_the_next_refusal() {
    /// Panics at the first event.
    struct Panicking(Arc<AtomicUsize>);
    impl Subscriber for Panicking {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.is_event()
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, _: &Event<'_>) {
            assert!(self.0.fetch_add(1, Ordering::Relaxed) > 0, "standard output is gone");
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }
    let heard = Arc::new(AtomicUsize::new(0));
    hearing(Panicking(Arc::clone(&heard)), || {
        let request = request().limit_bytes(50).begin().unwrap();
        let refused = || request.run(|| Buffer::zeroed(600).is_err());
        assert!(refused() && refused() && refused(), "what it panics about is no caller's");
    });
    assert_eq!(heard.load(Ordering::Relaxed), 3);
}

#[test]
fn blocks_are_told_of_where_that_is_asked_for_and_nowhere_else() {
    let heard = Heard::default();
    hearing(heard.clone(), || {
        let silent = request().begin().unwrap();
        drop(silent.run(|| Buffer::zeroed(10)));
        assert!(heard.all("TRACE ctxalloc::blocks").is_empty());
        let traced = request().strategy(Traced::new(Arena::over(Pool::shared()))).begin().unwrap();
        traced.run(|| {
            let mut buffer = Buffer::zeroed(100).unwrap();
            buffer.resize(100_000).unwrap();
        });
    });
    let seen: Vec<_> =
        heard.all("TRACE ctxalloc::blocks").into_iter().map(|event| event["operation"].clone()).collect();
    assert_eq!(seen, ["\"made\"", "\"resized\"", "\"released\""]);
}
