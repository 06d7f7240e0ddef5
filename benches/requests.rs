//! What a request costs in Rust: blocks made and dropped inside of one, against the C heap, the pool and mimalloc, on
//! one thread and on several at once; a request with nothing in it; an escape. Run by `make bench`.

mod interleaved;

use ctxalloc::strategy::Budget;
use ctxalloc::{Buffer, Handler, Request, handler, request};
use interleaved::{Group, keep};
use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Barrier;
use std::thread;

/// Blocks alive at one time.
const BLOCKS: usize = 1000;

/// So many blocks made, and then all dropped, as a request does it.
fn blocks(handler: Handler, size: usize) {
    let kept: Vec<_> = (0..BLOCKS).map(|_| handler.allocate(black_box(size)).expect("memory")).collect();
    for block in black_box(kept) {
        // SAFETY: live, from this handler, once.
        #[allow(unsafe_code, reason = "what a Buffer does at its end, without its tracing")]
        unsafe {
            handler.release(block, size);
        }
    }
}

/// `rounds` times on so many threads at once, each under what `with` makes for it.
fn on_threads(threads: usize, rounds: usize, size: usize, with: impl Fn() -> Under + Sync) -> impl FnMut() {
    move || {
        let barrier = Barrier::new(threads);
        thread::scope(|scope| {
            let work = || {
                let under = with();
                barrier.wait();
                under.run(|handler| (0..rounds).for_each(|_| blocks(handler, size)));
            };
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            // Joined one by one: a scope alone does not wait until its threads are gone.
            threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        });
    }
}

enum Under {
    Named(Handler),
    Own(Request),
    Shared(Handler),
}

impl Under {
    fn run(&self, work: impl FnOnce(Handler)) {
        match self {
            Self::Named(handler) | Self::Shared(handler) => ctxalloc::scope(*handler, || work(*handler)),
            Self::Own(request) => request.run(|| work(request.handler())),
        }
    }
}

fn under(name: &str) -> Under {
    Under::Named(handler(name).expect("built in"))
}

fn own() -> Under {
    Under::Own(request().begin().expect("memory"))
}

fn many_blocks(threads: usize, size: usize) -> String {
    const ROUNDS: usize = 20;
    let tenant = Budget::new("tenant", None);
    let one = request().begin().expect("memory");
    let shared = one.handler();
    let on = |with: Box<dyn Fn() -> Under + Sync>| on_threads(threads, ROUNDS, size, with);
    Group::new(format!("{BLOCKS} blocks of {size} B, made and dropped, {threads} threads"), 1)
        .per(ROUNDS * BLOCKS)
        .add("system: malloc, free", on(Box::new(|| under("system"))))
        .add("pool", on(Box::new(|| under("pool"))))
        .add("request(), one for each thread", on(Box::new(own)))
        .add("request() under a budget of all threads", {
            let tenant = tenant.clone();
            on(Box::new(move || Under::Own(request().budget(&tenant).begin().expect("memory"))))
        })
        .add("one request() of all threads", on(Box::new(move || Under::Shared(shared))))
        .run()
}

fn nothing_in_it() -> String {
    let tenant = Budget::new("tenant", Some(1 << 40));
    let mut cache = VecDeque::with_capacity(1001);
    Group::new("a request".to_owned(), 1000)
        .add("begin, end", || drop(black_box(request().begin().expect("memory"))))
        .add("with a name, by which it is counted", || {
            drop(black_box(request().name("/route/{id}").begin().expect("memory")))
        })
        .add("under a budget", {
            let tenant = tenant.clone();
            move || drop(black_box(request().budget(&tenant).begin().expect("memory")))
        })
        .add("under a budget, with a reservation", move || {
            drop(black_box(request().budget(&tenant).reserve_bytes(1000).begin().expect("room")))
        })
        .add("with one block of 80 bytes", || {
            let request = request().begin().expect("memory");
            drop(request.run(|| Buffer::zeroed(80)));
        })
        .add("with one that escapes, to a cache of 1000", move || {
            let request = request().begin().expect("memory");
            cache.push_back(request.run(|| Buffer::zeroed(80)));
            drop(request);
            if cache.len() > 1000 {
                cache.pop_front();
            }
        })
        .run()
}

fn main() -> std::io::Result<()> {
    // `cargo test --benches` runs this too: it asks whether there are tests, and there are none.
    if std::env::args().any(|argument| argument == "--test" || argument == "--list") {
        return Ok(());
    }
    let mut rows = nothing_in_it();
    for threads in [1, 2, 4] {
        for size in [16, 64, 256, 1024] {
            rows += &many_blocks(threads, size);
        }
    }
    keep("requests-rust", &rows)
}
