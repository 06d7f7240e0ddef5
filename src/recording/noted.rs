//! `Noted`: a request that is recorded. Its account changes, and its events are noted, under one lock: so their sums
//! are those of the account at any time.

use super::event::{Sums, What};
use super::recorder::{Core, Flusher, running};
use super::shard::{Shard, next_block};
use super::threads::this_thread;
use crate::os;
use crate::unattributed::unattributed;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// A request that is recorded.
#[derive(Debug, Clone)]
pub(crate) struct Noted {
    core: &'static Core,
    shard: usize,
    /// The recording: once it is over, nothing is noted.
    session: u32,
    it: Its,
    /// The recorded requests around it, the nearest first.
    around: Arc<[Its]>,
    /// What its handler promises.
    align: u32,
    /// What the process had used when it began.
    used_before: Option<(Duration, u64)>,
}

/// What numbers a request has.
#[derive(Debug, Clone, Copy)]
struct Its {
    request: u64,
    /// Its account, which no other request has.
    account: u64,
}

/// What a request is to a recording.
#[derive(Debug, Clone, Default)]
pub(crate) enum Choice {
    /// Nothing was recorded when it began.
    #[default]
    None,
    /// The recording of this number has left it out, with all requests inside of it.
    LeftOut(u32),
    Recorded(Noted),
}

impl Choice {
    /// Whether the recording knows the request as one inside of that with the account of this number.
    pub(crate) fn is_inside(&self, account: u64) -> bool {
        // The nearest first, which is the youngest and has the highest number.
        let is_around = |noted: &Noted| noted.around.binary_search_by(|one| account.cmp(&one.account)).is_ok();
        matches!(self, Self::Recorded(noted) if is_around(noted))
    }
}

/// Decides whether a request is recorded that begins now. `outer`: what the request around it is; `account`: its
/// account's number.
#[inline]
pub(crate) fn begin(
    name: Option<&str>,
    handler: impl FnOnce() -> String,
    align: usize,
    outer: &Choice,
    account: u64,
    flusher: Flusher,
) -> Choice {
    match running() {
        Some((core, session)) => {
            core.flushed_by(flusher);
            begin_in(core, session, name, handler, align, outer, account)
        }
        None => Choice::None,
    }
}

#[cold]
fn begin_in(
    core: &'static Core,
    session: u32,
    name: Option<&str>,
    handler: impl FnOnce() -> String,
    align: usize,
    outer: &Choice,
    account: u64,
) -> Choice {
    let outer = match outer {
        Choice::LeftOut(by) if *by == session => return Choice::LeftOut(session),
        Choice::Recorded(outer) if outer.session == session => Some(outer),
        _ => None,
    };
    let around: Arc<[Its]> = match outer {
        Some(outer) => core.shards[outer.shard].with(|shard| {
            let all = [outer.it].into_iter().chain(outer.around.iter().copied());
            all.filter(|one| shard.open.contains(&one.request)).collect()
        }),
        None => Arc::default(),
    };
    if around.is_empty() && !core.chooses() {
        return Choice::LeftOut(session);
    }
    let request = core.next_request();
    let shard = match outer.filter(|_| !around.is_empty()) {
        Some(outer) => outer.shard,
        None => request as usize % core.shards.len(),
    };
    let name = core.number_of(false, name.unwrap_or(""));
    let handler = core.number_of(true, &handler());
    let align = u32::try_from(align).unwrap_or(0);
    let noted = Noted { core, shard, session, it: Its { request, account }, around, align, used_before: os::used() };
    let parent = noted.around.first().map_or(0, |one| one.request);
    noted.change(
        || (),
        |shard, ()| {
            shard.open.insert(request);
            core.begun.fetch_max(request, Relaxed);
            shard.note(this_thread(shard.session), request, What::Begin { name, handler, parent });
        },
    );
    Choice::Recorded(noted)
}

impl Noted {
    /// Runs `change` and, if that says so, notes it, with nothing in between for the requests of its shard.
    fn change<R>(&self, change: impl FnOnce() -> R, note: impl FnOnce(&mut Shard, &R)) -> R {
        self.change_and_write(change, note, false)
    }

    fn change_and_write<R>(&self, change: impl FnOnce() -> R, note: impl FnOnce(&mut Shard, &R), is_end: bool) -> R {
        let _unattributed = unattributed(); // the buffers are nobody's
        self.core.settle();
        self.core.noting(self.shard, self.session, is_end, change, note)
    }

    /// Its handler has made a block; `charge` counts it.
    pub(crate) fn made(&self, address: usize, bytes: usize, zeroed: bool, charge: impl FnOnce()) {
        self.change(charge, |shard, ()| {
            let (block, bytes) = (next_block(), bytes as u64);
            shard.blocks.insert(address, block);
            self.note(shard, What::Allocate { block, bytes, align: self.align, zeroed });
        });
    }

    /// The number of a block that is about to go or to move: from then on its address may be another block's.
    pub(crate) fn lift(&self, address: usize) -> Option<u64> {
        self.core.settle();
        self.core.shards[self.shard]
            .with(|shard| if shard.session == self.session { shard.blocks.remove(&address) } else { None })
    }

    /// The block did not go.
    pub(crate) fn put_back(&self, address: usize, block: Option<u64>) {
        let Some(block) = block else { return };
        self.change(
            || (),
            |shard, ()| {
                shard.blocks.insert(address, block);
            },
        );
    }

    /// A block is gone; `give_back` counts that. The request may be gone afterwards: this is a copy of its
    /// own.
    pub(crate) fn freed<R>(self, block: Option<u64>, give_back: impl FnOnce() -> R) -> R {
        self.change(give_back, |shard, _| {
            if let Some(block) = block {
                self.note(shard, What::Free { block });
            }
        })
    }

    /// A block has another size; `charge` counts that.
    pub(crate) fn resized(&self, block: Option<u64>, was: usize, is: usize, bytes: usize, charge: impl FnOnce()) {
        self.change(charge, |shard, ()| {
            if let Some(block) = block {
                shard.blocks.insert(is, block);
                self.note(shard, What::Resize { block, bytes: bytes as u64, moved: was != is });
            }
        });
    }

    /// The request is refused so many bytes by the account of this number; `count` counts it.
    pub(crate) fn refused<R>(&self, bytes: usize, by: Option<u64>, count: impl FnOnce() -> R) -> R {
        self.change(count, |shard, _| self.note_refusal(shard, bytes, by))
    }

    fn note(&self, shard: &mut Shard, what: What) {
        shard.note(this_thread(shard.session), self.it.request, what);
    }

    /// Beside the request that asked the one whose limit it was: that is the one to raise.
    fn note_refusal(&self, shard: &mut Shard, bytes: usize, by: Option<u64>) {
        let mut all = [self.it].into_iter().chain(self.around.iter().copied());
        let by = all.find(|one| by == Some(one.account)).map_or(0, |one| one.request);
        self.note(shard, What::Refused { bytes: bytes as u64, by });
    }

    /// Bytes that its handler did not make are charged, if `charge` says so; their number.
    pub(crate) fn charged<R>(&self, bytes: usize, charge: impl FnOnce() -> (R, bool)) -> (R, Option<u64>) {
        let block = next_block();
        let (done, is_charged) = self.change(charge, |shard, (_, is_charged)| {
            if *is_charged {
                self.note(shard, What::Allocate { block, bytes: bytes as u64, align: 0, zeroed: false });
            }
        });
        (done, is_charged.then_some(block))
    }

    /// What was [`charged`](Self::charged) has another size, if `charge` says so.
    pub(crate) fn recharged<E>(
        &self,
        block: Option<u64>,
        bytes: usize,
        charge: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        self.change(charge, |shard, charged| {
            if let (Some(block), Ok(())) = (block, charged) {
                self.note(shard, What::Resize { block, bytes: bytes as u64, moved: false });
            }
        })
    }

    /// The request ends: `end` says so to its account.
    pub(crate) fn end<R>(&self, end: impl FnOnce() -> (R, Sums)) -> R {
        let used = self.used_before.zip(os::used()).map(|((time, faults), (now, faults_now))| {
            (now.saturating_sub(time).as_nanos() as u64, faults_now.saturating_sub(faults))
        });
        let (processor_ns, page_faults) = used.unzip();
        let (done, _) = self.change_and_write(
            end,
            |shard, (_, sums)| {
                shard.open.remove(&self.it.request);
                self.note(shard, What::End { sums: *sums, page_faults, processor_ns });
            },
            true,
        );
        done
    }
}

/// What a whole request counts beside arrays. Blocks of one size are not told apart, since nobody keeps their numbers.
#[cfg(ctxalloc_whole)]
impl Noted {
    /// Something is charged, if `charge` says so. `by`: the number of the account that refused last.
    pub(crate) fn weighed(
        &self,
        bytes: usize,
        charge: impl FnOnce() -> bool,
        by: impl FnOnce() -> Option<u64>,
    ) -> bool {
        self.change(charge, |shard, is_charged| {
            if !is_charged {
                return self.note_refusal(shard, bytes, by());
            }
            let (block, bytes) = (next_block(), bytes as u64);
            shard.weights.entry((self.it.request, bytes)).or_default().push(block);
            self.note(shard, What::Allocate { block, bytes, align: 0, zeroed: false });
        })
    }

    /// Something weighs `new` bytes instead, if `charge` says so. `by`: the number of the account that refused last.
    pub(crate) fn reweighed(
        &self,
        old: usize,
        new: usize,
        charge: impl FnOnce() -> bool,
        by: impl FnOnce() -> Option<u64>,
    ) -> bool {
        self.change(charge, |shard, is_charged| {
            if !is_charged {
                return self.note_refusal(shard, new.saturating_sub(old), by());
            }
            if let Some(block) = unweighed(shard, self.it.request, old) {
                let bytes = new as u64;
                shard.weights.entry((self.it.request, bytes)).or_default().push(block);
                self.note(shard, What::Resize { block, bytes, moved: false });
            }
        })
    }

    /// Something is gone; `give_back` counts that. The request may be gone afterwards.
    pub(crate) fn lightened<R>(self, bytes: usize, give_back: impl FnOnce() -> R) -> R {
        self.change(give_back, |shard, _| {
            if let Some(block) = unweighed(shard, self.it.request, bytes) {
                self.note(shard, What::Free { block });
            }
        })
    }
}

/// The number of a block of so many bytes, which has that size no longer.
#[cfg(ctxalloc_whole)]
fn unweighed(shard: &mut Shard, request: u64, bytes: usize) -> Option<u64> {
    let key = (request, bytes as u64);
    let blocks = shard.weights.get_mut(&key)?;
    let block = blocks.pop();
    if blocks.is_empty() {
        shard.weights.remove(&key);
    }
    block
}
