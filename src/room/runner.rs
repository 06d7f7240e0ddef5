//! The thread `ctxalloc-room`: looks at the queue when room came or somebody's time is over, and calls wakers.
//!
//! It is there while somebody waits, and a moment longer. Whoever gives memory back only wakes it.

use super::ending;
use super::queue::{self, Next};
use crate::error::Error;
use crate::strategy::account::on_room;
use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, held_across_fork};
use crate::unattributed::unattributed;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// How long it stays where nobody waits any more: a burst has many who wait for a moment.
const LINGERS: Duration = Duration::from_millis(200);

/// Whether somebody has called it since it last began to look. AcqRel: who finds it set came before that look.
static IS_CALLED: AtomicBool = AtomicBool::new(false);

/// The thread that runs, and which process it belongs to.
struct Running(Locked<Option<(u32, Option<Thread>)>>);

impl HeldAcrossFork for Running {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.0.lock());
    }
}

fn running() -> &'static Running {
    static RUNNING: Made<Arc<Running>> = Made::new();
    RUNNING.get_or_make(|| held_across_fork(Running(Locked::new(None))))
}

/// Has the queue looked at. Called by whoever gives memory back: it allocates nothing, and waits for nobody.
fn room_came() {
    if !ending::keeps() {
        call();
    }
}

/// Has it look at the queue. It allocates nothing, and waits for nobody.
pub(super) fn call() {
    if !IS_CALLED.swap(true, Ordering::AcqRel) {
        wake();
    }
}

fn wake() {
    running().0.with(|running| {
        if let Some((_, Some(thread))) = running {
            thread.unpark();
        }
    });
}

/// Makes sure that it runs, and looks again in time: `is_sooner` than it means to. Somebody waits from now on.
pub(super) fn there_is(is_sooner: bool) -> Result<(), Error> {
    on_room(room_came);
    let _unattributed = unattributed();
    let (starts, _gone) = running().0.with(|running| match running {
        Some((process_id, _)) if *process_id == process::id() => (false, None),
        _ => (true, running.replace((process::id(), None))),
    });
    if !starts {
        if is_sooner {
            call();
        }
        return Ok(());
    }
    IS_CALLED.store(true, Ordering::Release); // it looks first
    let started = thread::Builder::new().name("ctxalloc-room".to_owned()).spawn(run);
    let thread = match started {
        Ok(thread) => thread.thread().clone(),
        Err(error) => {
            drop(running().0.with(Option::take));
            return Err(Error::SystemRefused {
                call: "pthread_create",
                reason: error.to_string(),
                advice: "a request can wait for room only where a thread can be started",
            });
        }
    };
    let _before = running().0.with(|running| match running {
        Some((_, known)) => known.replace(thread),
        None => None, // it has come to its end already
    });
    wake(); // whoever called before it was known here
    Ok(())
}

/// Not `unattributed`: an executor may poll its task inside of the waker, which then makes blocks of its request.
fn run() {
    let mut alone_since: Option<Instant> = None;
    loop {
        // Before the look: whoever gives memory back after it calls again.
        IS_CALLED.swap(false, Ordering::AcqRel);
        let (next, later) = queue::look();
        later.run();
        match next {
            Next::Call => {
                alone_since = None;
                thread::park();
            }
            Next::At(until) => {
                alone_since = None;
                thread::park_timeout(until.saturating_duration_since(Instant::now()));
            }
            Next::Nobody => {
                let now = Instant::now();
                let since = *alone_since.get_or_insert(now);
                if now.duration_since(since) < LINGERS {
                    thread::park_timeout(LINGERS);
                    continue;
                }
                let mut own = None;
                // Whoever enters the queue after this finds that no thread runs.
                if queue::if_empty(|| own = running().0.with(Option::take)) {
                    drop(own);
                    return;
                }
            }
        }
    }
}
