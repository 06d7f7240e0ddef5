//! The thread `ctxalloc-room`: looks at the queue when room came or somebody's time is over, and calls wakers.
//!
//! It is there while somebody waits, and a moment longer. Whoever gives memory back only wakes it.

use super::queue::Next;
use super::{here, kept};
use crate::error::Error;
use crate::strategy::account::{OnRoom, on_room};
use crate::sync::{Called, Made, held_across_fork};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long it stays where nobody waits any more: a burst has many who wait for a moment.
const LINGERS: Duration = Duration::from_millis(200);

fn runner() -> &'static Called {
    static RUNNER: Made<Arc<Called>> = Made::new();
    RUNNER.get_or_make(|| held_across_fork(Called::new()))
}

/// Has the queue looked at. Called by whoever gives memory back: it allocates nothing, and waits for nobody.
fn room_came() {
    if !kept::keeps() {
        call();
    }
}

/// Looks at the queue here. Called under no lock.
fn changed() {
    let (is_sooner, later) = here::give();
    later.run();
    if is_sooner {
        call();
    }
}

/// Has it look at the queue. It allocates nothing, and waits for nobody.
pub(super) fn call() {
    runner().call();
}

/// Makes sure that it runs, and looks again in time: `is_sooner` than it means to. Somebody waits from now on.
pub(super) fn there_is(is_sooner: bool) -> Result<(), Error> {
    let runner = runner(); // made before anybody calls it, who may not allocate
    on_room(OnRoom { came: room_came, changed });
    runner.start("ctxalloc-room", run).map_err(|error| Error::SystemRefused {
        call: "pthread_create",
        reason: error.to_string(),
        advice: "a request can wait for room only where a thread can be started",
    })?;
    if is_sooner {
        call();
    }
    Ok(())
}

/// Not `unattributed`: an executor may poll its task inside of the waker, which then makes blocks of its request.
fn run() {
    let mut alone_since: Option<Instant> = None;
    loop {
        runner().begins_to_look();
        let (next, later) = here::look();
        later.run();
        match next {
            Next::Call => {
                alone_since = None;
                runner().sleep(None);
            }
            Next::At(until) => {
                alone_since = None;
                runner().sleep(Some(until.saturating_duration_since(Instant::now())));
            }
            Next::Nobody => {
                let now = Instant::now();
                let since = *alone_since.get_or_insert(now);
                if now.duration_since(since) < LINGERS {
                    runner().sleep(Some(LINGERS));
                    continue;
                }
                // Whoever enters the queue after this finds that no thread runs.
                if here::if_empty(|| runner().ends()) {
                    return;
                }
            }
        }
    }
}
