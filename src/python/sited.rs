//! Which code made what a request holds, at its peak and at its end: for one request in so many of a service.
//!
//! `Sited` is a strategy around the request's own, so that a request without it pays nothing. It runs inside of
//! allocations and runs no Python code: `tracked::attribution` reads the frames.
#![allow(unsafe_code, reason = "a strategy around another one")]

use super::sums::{Part, Profile, SiteNumbers, SumNumbers};
use super::tracked::attribution;
use crate::handler::requests::record_bytes;
use crate::strategy::{Attribution, LiveBlock, Pool, Strategy};
use crate::sync::{ForkLock, HeldAcrossFork, HeldUntilDropped, Locked, Made, hold_across_fork_until};
use crate::unattributed::unattributed;
use pyo3::prelude::*;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// How many of the innermost calls a site has: with a server's and a framework's own.
const FRAMES: usize = 64;

type Attribute = Arc<dyn Fn() -> Attribution + Send + Sync>;

/// What has been seen of one request.
pub(super) struct Seen {
    profile: Locked<Profile>,
    _held: HeldUntilDropped,
}

impl HeldAcrossFork for Seen {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.profile.lock());
    }
}

/// Passes everything on to `upstream`, and notes which code made each block.
struct Sited {
    upstream: Arc<dyn Strategy>,
    attribute: Attribute,
    seen: Arc<Seen>,
    /// What a request asks for beside a block's own bytes.
    record_bytes: usize,
}

impl fmt::Debug for Sited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sited {{ upstream: {:?} }}", self.upstream)
    }
}

/// A strategy for one request around its own one (the process's pool where it has none), and what will be seen.
pub(super) fn sited(py: Python<'_>, upstream: Option<Arc<dyn Strategy>>) -> PyResult<(Arc<dyn Strategy>, Arc<Seen>)> {
    /// One for all, so that each place is kept once.
    static ATTRIBUTE: Made<Attribute> = Made::new();
    let attribute = match ATTRIBUTE.get() {
        Some(attribute) => attribute,
        None => {
            let made: Attribute = Arc::new(attribution(py, FRAMES, false)?);
            ATTRIBUTE.get_or_make(|| made)
        }
    };
    let upstream = upstream.unwrap_or_else(|| Arc::new(Pool::shared().clone()));
    let seen = Arc::<Seen>::new_cyclic(|seen| Seen {
        profile: Locked::new(Profile::default()),
        _held: hold_across_fork_until(seen.clone()),
    });
    let record_bytes = record_bytes(upstream.alignment());
    let sited = Sited { upstream, attribute: Arc::clone(attribute), seen: Arc::clone(&seen), record_bytes };
    Ok((Arc::new(sited), seen))
}

impl Sited {
    fn made(&self, block: Option<NonNull<u8>>, size_bytes: usize) -> Option<NonNull<u8>> {
        let _unattributed = unattributed();
        let Some(block) = block else {
            self.seen.profile.with(|profile| profile.refused += 1);
            return None;
        };
        let place = match (self.attribute)() {
            Attribution::Origin(origin) => origin.place.clone(),
            _ => None,
        };
        let bytes = size_bytes.saturating_sub(self.record_bytes);
        self.seen.profile.with(|profile| {
            let (site, handler) = (profile.site(place, Part::Array), profile.handler(String::new()));
            profile.add(block.addr().get(), bytes, 1, site, handler);
        });
        Some(block)
    }
}

// SAFETY: all blocks are the upstream's, which keeps these promises.
unsafe impl Strategy for Sited {
    fn alignment(&self) -> usize {
        self.upstream.alignment()
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.made(self.upstream.allocate(size_bytes), size_bytes)
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.made(self.upstream.allocate_zeroed(size_bytes), size_bytes)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        let _unattributed = unattributed();
        // Before the resize: from then on the address may be that of another block.
        let known = self.seen.profile.with(|profile| profile.blocks.remove(&block.addr().get()));
        // SAFETY: the caller passes a live block, which the upstream made.
        let moved = unsafe { self.upstream.resize(block, new_size_bytes) };
        if let Some(known) = known {
            let bytes = new_size_bytes.saturating_sub(self.record_bytes);
            self.seen.profile.with(|profile| match moved {
                Some(moved) => profile.resize(known, moved.addr().get(), bytes),
                None => drop(profile.blocks.insert(block.addr().get(), known)),
            });
        }
        moved
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        let _unattributed = unattributed();
        // Before the release: from then on the address may be that of another block.
        self.seen.profile.with(|profile| {
            if let Some(known) = profile.blocks.remove(&block.addr().get()) {
                profile.subtract(&known);
            }
        });
        // SAFETY: the caller gives up a live block, which the upstream made.
        unsafe { self.upstream.release(block) }
    }

    fn is_read_after_release(&self) -> bool {
        self.upstream.is_read_after_release()
    }

    fn trim(&self) -> usize {
        self.upstream.trim()
    }

    fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        self.upstream.live_blocks()
    }
}

impl Seen {
    /// The sums of all, how many blocks the strategy had no memory for, and the sites.
    pub(super) fn numbers(&self) -> (SumNumbers, u64, Vec<SiteNumbers>) {
        let _unattributed = unattributed();
        self.profile.with(|profile| (profile.all(), profile.refused, profile.sites()))
    }
}

/// Chooses one of every so many: each in its turn at random, so that no period of the work hides from it.
#[pyclass(frozen, name = "_Sampler", module = "ctxalloc._native")]
pub(super) struct Sampler {
    every: u64,
    /// The position in the present round, and the position of its choice.
    turn: Mutex<(u64, u64)>,
}

#[pymethods]
impl Sampler {
    #[new]
    #[pyo3(signature = (every, /))]
    fn new(every: u64) -> Self {
        Self { every: every.max(1), turn: Mutex::new((0, 0)) }
    }

    /// Whether this one is chosen.
    pub(super) fn is_due(&self) -> bool {
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, chosen) = &mut *turn;
        if *at == 0 {
            *chosen = RandomState::new().hash_one(0) % self.every;
        }
        let is_due = at == chosen;
        *at = (*at + 1) % self.every;
        is_due
    }
}
