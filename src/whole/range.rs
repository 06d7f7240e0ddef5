//! Ranges of addresses that are reserved for ever, as a source of a pool's pages: whether a block is ours is a question
//! about its address.

use super::apart;
use crate::source::{Pages, pages};
use crate::sync::{ForkLock, HeldAcrossFork, Locked, held_across_fork};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// The size of a range: `RANGE_BITS` of `preload.c`.
pub(super) const BYTES: usize = 1 << 38;
/// What a pool maps at a time is a multiple of this.
pub(super) const UNIT: usize = 4 << 20;
const UNITS: usize = BYTES / UNIT;
/// Where the ranges are to be: below what the system gives programs, whose freed blocks then cost one comparison, and
/// above the heap of a program that is no PIE.
const LOW: usize = 1 << 40;
/// Of the table of records that lie apart: so many bytes for a unit.
const UNITS_ENTRIES: usize = UNIT / apart::FROM * apart::ENTRY_BYTES;

/// A range. Clones are the same one.
#[derive(Debug, Clone)]
pub(super) struct Range {
    base: usize,
    /// Its part of the table.
    entries: usize,
    state: Arc<State>,
}

/// Which units are in use.
#[derive(Debug)]
struct State(Locked<Box<[bool]>>);

impl HeldAcrossFork for State {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.0.lock());
    }
}

/// Maps addresses: in a place if there is one, for use or only reserved. For use as malloc does, so that the system
/// refuses what it would refuse that: a block larger than all memory.
fn map(at: *mut u8, size_bytes: usize, protection: i32, flags: i32) -> Option<NonNull<u8>> {
    let reserved = if protection == libc::PROT_NONE { libc::MAP_NORESERVE } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | reserved | flags;
    // SAFETY: a new mapping, or (MAP_FIXED) one in the place of units of a range that nobody uses.
    let start = unsafe { libc::mmap(at.cast(), size_bytes, protection, flags, -1, 0) };
    if start == libc::MAP_FAILED { None } else { NonNull::new(start.cast()) }
}

/// From so many bytes on the system is asked whether it would give a block.
pub(super) const ASKED_FROM: usize = 64 << 20;

/// Whether the system would give so many bytes in one piece, now. Smaller blocks are not asked about.
#[inline]
pub(super) fn may_be_had(size_bytes: usize) -> bool {
    size_bytes < ASKED_FROM || is_given(size_bytes)
}

#[cold]
#[inline(never)]
fn is_given(size_bytes: usize) -> bool {
    let Some(start) = map(null_mut(), size_bytes, libc::PROT_READ | libc::PROT_WRITE, 0) else { return false };
    // SAFETY: mapped above, and nobody has it.
    unsafe { libc::munmap(start.as_ptr().cast(), size_bytes) };
    true
}

impl Range {
    /// So many, one behind the other.
    pub(super) fn reserve<const COUNT: usize>() -> Option<[Self; COUNT]> {
        // A wish, which the system need not grant: see `preload.c`.
        let start = map(std::ptr::without_provenance_mut(LOW), BYTES * COUNT + UNIT, libc::PROT_NONE, 0)?;
        let base = start.as_ptr().expose_provenance().next_multiple_of(UNIT);
        let table = map(null_mut(), UNITS * UNITS_ENTRIES * COUNT, libc::PROT_NONE, 0)?;
        let table = table.as_ptr().expose_provenance();
        Some(std::array::from_fn(|number| {
            let state = held_across_fork(State(Locked::new(vec![false; UNITS].into())));
            Self { base: base + number * BYTES, entries: table + number * UNITS * UNITS_ENTRIES, state }
        }))
    }

    pub(super) fn base(&self) -> usize {
        self.base
    }

    /// Where its part of the table begins, which has memory for the units that are in use.
    pub(super) fn entries(&self) -> usize {
        self.entries
    }

    /// Gives units memory and their part of the table, or takes both.
    fn remap(&self, first: usize, units: usize, protection: i32) -> Option<NonNull<u8>> {
        let entries = std::ptr::with_exposed_provenance_mut(self.entries + first * UNITS_ENTRIES);
        let mapped = map(self.place(first), units * UNIT, protection, libc::MAP_FIXED)?;
        map(entries, units * UNITS_ENTRIES, protection, libc::MAP_FIXED).map(|_| mapped)
    }

    fn place(&self, unit: usize) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.base + unit * UNIT)
    }

    fn set(&self, first: usize, units: usize, is_used: bool) {
        self.state.0.with(|used| used[first..first + units].fill(is_used));
    }
}

/// The first run of so many unused units.
fn free_run(used: &[bool], units: usize) -> Option<usize> {
    let mut start = 0;
    for (unit, &is_used) in used.iter().enumerate() {
        if is_used {
            start = unit + 1;
        } else if unit + 1 - start == units {
            return Some(start);
        }
    }
    None
}

// SAFETY: a unit is marked as used while it is mapped, so no other mapping lies there. New pages are zero.
unsafe impl Pages for Range {
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        if align > UNIT {
            return None;
        }
        let units = size_bytes.div_ceil(UNIT);
        let first = self.state.0.with(|used| {
            let first = free_run(used, units)?;
            used[first..first + units].fill(true);
            Some(first)
        })?;
        let mapped = self.remap(first, units, libc::PROT_READ | libc::PROT_WRITE);
        if mapped.is_none() && self.remap(first, units, libc::PROT_NONE).is_some() {
            self.set(first, units, false);
        }
        mapped
    }

    fn maps_lazily(&self) -> bool {
        pages::are_mapped_lazily()
    }

    unsafe fn relocate(&self, to: NonNull<u8>, from: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: two blocks in private anonymous pages, of which nobody needs the old one afterwards (this function's
        // contract).
        unsafe { pages::relocate(to, from, size_bytes) };
        true
    }

    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize) {
        let (first, units) = ((start.addr().get() - self.base) / UNIT, size_bytes.div_ceil(UNIT));
        // Reserved again: the memory goes back, the addresses stay ours. Where the system does not, they stay mapped
        // and are never used again.
        if self.remap(first, units, libc::PROT_NONE).is_some() {
            self.set(first, units, false);
        }
    }

    unsafe fn discard(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: private anonymous pages whose contents nobody needs (this function's contract).
        unsafe { pages::discard(start, size_bytes) }
    }
}
