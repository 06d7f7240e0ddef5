//! What a selection costs in Rust: a poll in a context against tokio's `task_local!` and tracing's `Instrumented`;
//! scopes; tasks; blocks against the heap they come from. Run by `make bench`.
#![allow(unsafe_code, reason = "the C heap is a peer")]

mod interleaved;

use ctxalloc::{Buffer, Context, WithHandler, current, enter, handler, reset, scope, set, task};
use interleaved::{Group, keep};
use std::future::Future;
use std::hint::black_box;
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll, Waker};
use tracing::instrument::Instrument;

tokio::task_local! {
    static CHOICE: u64;
}

/// Never ready: each poll is one poll.
struct Pending;

impl Future for Pending {
    type Output = ();

    #[inline(never)]
    fn poll(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<()> {
        black_box(cx);
        Poll::Pending
    }
}

fn polled(future: impl Future<Output = ()> + 'static) -> impl FnMut() {
    let mut future = Box::pin(future);
    move || {
        let poll = future.as_mut().poll(&mut TaskContext::from_waker(Waker::noop()));
        assert!(black_box(poll).is_pending());
    }
}

fn polls() -> String {
    let aligned = handler("aligned64").expect("built in");
    // A span that is enabled costs what its subscriber does with it; this one does nothing.
    let enabled = {
        let _listening = tracing::subscriber::set_default(Deaf);
        tracing::info_span!("span")
    };
    Group::new("one poll of a future", 20_000)
        .add("the future alone", polled(Pending))
        .add("ctxalloc: .with_handler()", polled(Pending.with_handler(aligned)))
        .add("tokio: task_local!, .scope()", polled(CHOICE.scope(1, Pending)))
        .add("tracing: Instrumented, no subscriber", polled(Pending.instrument(tracing::info_span!("span"))))
        .add("tracing: Instrumented, idle subscriber", polled(Pending.instrument(enabled)))
        .run()
}

/// A subscriber that takes every span and does nothing.
struct Deaf;

impl tracing::Subscriber for Deaf {
    fn enabled(&self, _metadata: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _span: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _span: &tracing::span::Id, _values: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _span: &tracing::span::Id, _follows: &tracing::span::Id) {}
    fn event(&self, _event: &tracing::Event<'_>) {}
    fn enter(&self, _span: &tracing::span::Id) {}
    fn exit(&self, _span: &tracing::span::Id) {}
}

fn scopes() -> String {
    let aligned = handler("aligned64").expect("built in");
    let mut context = Context::with_handler(aligned);
    Group::new("a scope", 50_000)
        .add("enter and drop of the guard", move || drop(enter(black_box(aligned))))
        .add("scope(handler, closure)", move || scope(black_box(aligned), || black_box(())))
        .add("set and reset", move || {
            let token = set(black_box(aligned));
            black_box(reset(&token)).expect("its own context");
        })
        .add("Context::run", move || context.run(|| black_box(())))
        .add("current()", || {
            black_box(current());
        })
        .add("handler(name), the look-up", || {
            black_box(handler(black_box("aligned64")));
        })
        .add("tokio: task_local!, .sync_scope()", || CHOICE.sync_scope(black_box(1), || black_box(())))
        .run()
}

fn tasks() -> String {
    let runtime = || tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let (ours, tokios) = (runtime(), runtime());
    Group::new("a task, spawned and joined (current_thread)", 200)
        .add("tokio::spawn", move || tokios.block_on(async { tokio::spawn(async {}).await.expect("no panic") }))
        .add("ctxalloc::task::spawn", move || ours.block_on(async { task::spawn(async {}).await.expect("no panic") }))
        .run()
}

fn blocks(size: usize, name: &'static str) -> String {
    let [system, aligned, pool] = ["system", "aligned64", "pool"].map(|name| handler(name).expect("built in"));
    Group::new(name, 2000)
        .add("malloc and free", move || {
            // SAFETY: malloc takes any size.
            let block = unsafe { libc::malloc(black_box(size)) };
            // SAFETY: live, freed once.
            unsafe { libc::free(black_box(block)) }
        })
        .add("system: allocate and release", move || {
            let block = system.allocate(black_box(size)).expect("memory");
            // SAFETY: live, from this handler, once.
            unsafe { system.release(black_box(block), size) }
        })
        .add("aligned64: allocate and release", move || {
            let block = aligned.allocate(black_box(size)).expect("memory");
            // SAFETY: live, from this handler, once.
            unsafe { aligned.release(black_box(block), size) }
        })
        .add("pool: allocate and release", move || {
            let block = pool.allocate(black_box(size)).expect("memory");
            // SAFETY: live, from this handler, once.
            unsafe { pool.release(black_box(block), size) }
        })
        .add("Buffer::zeroed_in(pool)", move || drop(black_box(Buffer::zeroed_in(pool, black_box(size)))))
        .run()
}

fn main() -> std::io::Result<()> {
    // `cargo test --benches` runs this too: it asks whether there are tests, and there are none.
    if std::env::args().any(|argument| argument == "--test" || argument == "--list") {
        return Ok(());
    }
    let mut rows = polls() + &scopes() + &tasks();
    rows += &blocks(64, "a block of 64 bytes");
    rows += &blocks(4096, "a block of 4 KiB");
    rows += &blocks(1 << 20, "a block of 1 MiB");
    keep("selection-rust", &rows)
}
