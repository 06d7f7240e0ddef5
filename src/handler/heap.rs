//! What Rust's own heap holds for each request: [`GlobalScoped`](crate::GlobalScoped) counts here.
//!
//! ```text
//!   block ── word before it ──► Record (immortal, recycled)  ◄── State (one request's own, while anybody can reach it)
//!                                   ▲ flush
//!   thread: Tally { owner, what it made and freed since }
//! ```
//! A thread counts for the request that is selected on it in a `Tally` of its own, without an atomic, and adds that
//! to the request's [`Record`] when it selects something else, and each time it has grown by 64 KiB. When a thread
//! frees a block of another request, that request's record is changed at once. Nothing here allocates, except for
//! [`HeapRecord::new`].

mod panics;
mod record;
mod tally;

use crate::unattributed::{is_active, unattributed};

pub use record::HeapStats;
pub(crate) use record::{Record, Refused};
pub(super) use tally::select;
pub(crate) use tally::{freed, has_resized, made, not_made, not_resized, resized};

/// A request's record. Dropped when nothing can reach the request any more, except for blocks of Rust's heap.
pub(super) struct HeapRecord(&'static Record);

impl HeapRecord {
    /// A record with this limit; none if the program's allocator does not count.
    pub(super) fn new(limit_bytes: Option<usize>, refuses: bool) -> Option<Self> {
        is_active().then(|| {
            panics::attend();
            Self::take(limit_bytes, refuses)
        })
    }

    fn take(limit_bytes: Option<usize>, refuses: bool) -> Self {
        let record = record::take().unwrap_or_else(grow);
        record.begin(limit_bytes, refuses);
        Self(record)
    }

    /// The record itself, for a thread that holds the request.
    pub(super) fn get(&self) -> &'static Record {
        self.0
    }

    /// Its numbers, with those of this thread.
    pub(super) fn stats(&self) -> HeapStats {
        tally::flush(self.0);
        self.0.stats()
    }

    /// How many refusals its limit is among those of the request.
    pub(super) fn refusals(&self) -> u64 {
        self.0.refusals()
    }

    /// Its limit, what was live then, and what was asked for, when its limit was last exceeded.
    pub(super) fn exceeded(&self) -> Option<(usize, usize, usize)> {
        self.0.exceeded()
    }
}

impl Drop for HeapRecord {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Makes more records, and returns one of them.
#[cold]
fn grow() -> &'static Record {
    const CHUNK: usize = 32;
    let _immortal = unattributed(); // attributed to no request, whatever is selected here
    let chunk = Box::leak((0..CHUNK).map(|_| Record::fresh()).collect::<Box<[_]>>());
    let (first, others) = chunk.split_first().expect("a chunk is not empty");
    others.iter().for_each(record::push);
    first
}

#[cfg(all(test, not(ctxalloc_loom)))]
mod tests {
    use super::record::Done;
    use super::*;
    use std::thread;

    const ONE_BLOCK: Done = Done { made_blocks: 1, freed_blocks: 0, made_bytes: 0, live_bytes: 0, high_bytes: 0 };

    /// Under Miri with the stale values that a weakly ordered machine shows: `make miri-seeds`.
    #[test]
    fn a_record_is_one_requests_at_a_time() {
        thread::scope(|scope| {
            for thread in 0..3 {
                scope.spawn(move || {
                    for round in 0..6 {
                        let own = thread * 100 + round;
                        let request = HeapRecord::take(Some(own), true);
                        let record = request.get();
                        record.add(&ONE_BLOCK); // it outlives the request
                        thread::yield_now();
                        drop(request);
                        thread::yield_now();
                        assert_eq!(record.room(), own.cast_signed(), "it was given to another request");
                        record.freed_elsewhere(0);
                    }
                });
            }
        });
    }
}
