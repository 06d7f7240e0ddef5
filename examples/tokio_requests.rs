//! tokio: every request runs in a handler of its own, on whatever worker, through awaits, tasks and blocking work.
//!
//! `cargo run --example tokio_requests` prints
//! ```text
//! request 0 /thumbnail  asked for aligned64, found aligned64 on 4 of 4 buffers
//! request 1 /resize     asked for pool,      found pool      on 4 of 4 buffers
//! request 2 /health     asked for nothing,   found system    on 4 of 4 buffers
//! request 3 /thumbnail  asked for aligned64, found aligned64 on 4 of 4 buffers
//! request 4 /resize     asked for pool,      found pool      on 4 of 4 buffers
//! request 5 /health     asked for nothing,   found system    on 4 of 4 buffers
//! the server's own task is still in system
//! ```

use ctxalloc::{Buffer, Handler, WithHandler, current, handler, task};
use std::error::Error;
use std::io::{self, Write};
use std::sync::Arc;
use tokio::sync::Barrier;

const ROUTES: [(&str, Option<&str>); 3] =
    [("/thumbnail", Some("aligned64")), ("/resize", Some("pool")), ("/health", None)];
const REQUESTS: usize = 6;

fn main() -> Result<(), Box<dyn Error>> {
    run(&mut io::stdout())
}

fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(4).build()?.block_on(serve(out))
}

async fn serve(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    // All requests are under way at the same time: each waits here for all others before it goes on.
    let all_started = Arc::new(Barrier::new(REQUESTS));
    let mut running = Vec::new();
    for number in 0..REQUESTS {
        let (path, wanted) = ROUTES[number % ROUTES.len()];
        let request = serve_one(Arc::clone(&all_started));
        // The one line that matters: the request's future gets a context of its own.
        let request = match wanted.and_then(handler) {
            Some(chosen) => tokio::spawn(request.with_handler(chosen)),
            None => task::spawn(request), // a copy of this task's context
        };
        running.push((path, wanted, request));
    }
    for (number, (path, wanted, request)) in running.into_iter().enumerate() {
        let found = request.await??;
        let expected = wanted.unwrap_or("system");
        let right = found.iter().filter(|handler| handler.name() == expected).count();
        assert_eq!(right, found.len(), "request {number} wanted {expected} and found {found:?}");
        let wanted = format!("{},", wanted.unwrap_or("nothing"));
        writeln!(
            out,
            "request {number} {path:<11} asked for {wanted:<10} found {expected:<9} on {right} of {} buffers",
            found.len()
        )?;
    }
    writeln!(out, "the server's own task is still in {}", current())?;
    Ok(())
}

/// Allocates at the start, after an await, in a task of its own and on a blocking thread; says by whom.
async fn serve_one(all_started: Arc<Barrier>) -> Result<Vec<Handler>, ctxalloc::Error> {
    let body = Buffer::copy_from_slice(b"pixels")?;
    all_started.wait().await; // perhaps on another worker from here on
    let decoded = Buffer::zeroed(body.len() * 100)?;
    let in_a_task = task::spawn(async { Buffer::zeroed(64) });
    let on_a_thread = task::spawn_blocking(|| Buffer::zeroed(64));
    let in_a_task = in_a_task.await.expect("it does not panic")?;
    let on_a_thread = on_a_thread.await.expect("it does not panic")?;
    Ok([body, decoded, in_a_task, on_a_thread].iter().map(Buffer::handler).collect())
}

#[cfg(test)]
#[path = "../tests/examples/said.rs"]
mod said;

#[test]
fn it_prints_what_its_first_lines_say() {
    said::check(include_str!("tokio_requests.rs"), run);
}
