//! What each thread counts for the request that is selected on it, and the heap's operations in these terms.

use super::record::{Done, Record, Refused};
use crate::unattributed;
use std::cell::Cell;
use std::ptr::{null, without_provenance};

/// By how many bytes a thread's tally grows or falls before it is added to its request's record. A block, or the growth
/// of one, that is as large is in the record's `live_bytes` at once: other threads must see it.
const QUANTUM: usize = 64 << 10;

/// The owner on a thread that has not allocated yet. The thread's first block replaces it by NULL, and notes that there
/// is an allocator which counts. So a block that belongs to no request costs one test of one word.
const UNSEEN: *const Record = without_provenance(1);

/// What a thread did for one request since it last added it to the request's record.
///
/// No two fields that one block changes are neighbours: the compiler would load both as one word of 16 bytes, and that
/// load would wait for the two earlier stores of 8 bytes.
#[repr(C)]
struct Tally {
    /// The record of the request that is selected; NULL, or [`UNSEEN`].
    owner: Cell<*const Record>,
    /// Made less freed.
    live_bytes: Cell<isize>,
    /// How large `live_bytes` may become before the tally is flushed and the limit checked.
    ceiling_bytes: Cell<isize>,
    made_bytes: Cell<u64>,
    /// The largest `live_bytes` since then from which it has fallen.
    high_bytes: Cell<isize>,
    made_blocks: Cell<u64>,
    _apart: u64,
    freed_blocks: Cell<u64>,
}

thread_local! {
    /// Without a destructor, because a thread allocates and frees until its very end. The next selection adds what is
    /// here.
    static TALLY: Tally = const {
        Tally {
            owner: Cell::new(UNSEEN),
            made_blocks: Cell::new(0),
            _apart: 0,
            made_bytes: Cell::new(0),
            freed_blocks: Cell::new(0),
            live_bytes: Cell::new(0),
            high_bytes: Cell::new(0),
            ceiling_bytes: Cell::new(0),
        }
    };
}

/// Counts for `owner` on this thread from now on. Called at each selection once blocks are attributed.
#[inline]
pub(in crate::handler) fn select(owner: Option<&'static Record>) {
    TALLY.with(|tally| {
        tally.flush();
        tally.owner.set(owner.map_or(null(), std::ptr::from_ref));
    });
}

/// Adds what this thread has counted for `owner` to it.
pub(super) fn flush(owner: &'static Record) {
    TALLY.with(|tally| {
        if tally.is_for(owner) {
            tally.flush();
        }
    });
}

/// Counts a new block of so many bytes, before it is allocated, unless it `is_nobodys`. Returns the request's record
/// that it belongs to, if any.
///
/// # Errors
/// [`Refused`] by that request's limit; nothing is counted then.
#[inline]
pub(crate) fn made(bytes: usize, is_nobodys: impl FnOnce() -> bool) -> Result<Option<&'static Record>, Refused> {
    TALLY.with(|tally| if tally.owner.get().is_null() { Ok(None) } else { tally.made(bytes, is_nobodys) })
}

/// Counts that a block of `owner` is freed.
#[inline]
pub(crate) fn freed(owner: &'static Record, bytes: usize) {
    TALLY.with(|tally| {
        if !tally.is_for(owner) {
            return owner.freed_elsewhere(bytes);
        }
        tally.freed_blocks.set(tally.freed_blocks.get() + 1);
        tally.shrink(bytes);
    });
}

/// Undoes [`made`] for a block that could not be allocated.
#[cold]
#[inline(never)]
pub(crate) fn not_made(owner: Option<&'static Record>, bytes: usize) {
    let Some(owner) = owner else { return };
    TALLY.with(|tally| {
        if !tally.is_for(owner) {
            return owner.freed_elsewhere(bytes); // upstream has selected something else meanwhile
        }
        tally.made_blocks.set(tally.made_blocks.get().wrapping_sub(1));
        tally.take_back(owner, bytes);
    });
}

/// Counts the resize of a block of `owner`, before it is tried.
///
/// # Errors
/// [`Refused`] by the request's limit; nothing is counted then.
#[inline]
pub(crate) fn resized(owner: &'static Record, old_bytes: usize, new_bytes: usize) -> Result<(), Refused> {
    TALLY.with(|tally| match (tally.is_for(owner), new_bytes.checked_sub(old_bytes)) {
        (true, Some(growth)) => tally.grow(owner, growth),
        (true, None) => {
            tally.shrink(old_bytes - new_bytes);
            Ok(())
        }
        (false, Some(growth)) => owner.grown_elsewhere(growth),
        (false, None) => {
            owner.shrunk_elsewhere(old_bytes - new_bytes);
            Ok(())
        }
    })
}

/// A block of `owner` was resized. Growth on a thread that has not selected `owner` becomes part of the peak only now:
/// upstream might have refused it.
#[inline]
pub(crate) fn has_resized(owner: &'static Record) {
    if !TALLY.with(|tally| tally.is_for(owner)) {
        owner.has_resized_elsewhere();
    }
}

/// Undoes [`resized`] for a resize that failed.
#[cold]
pub(crate) fn not_resized(owner: &'static Record, old_bytes: usize, new_bytes: usize) {
    TALLY.with(|tally| match (tally.is_for(owner), new_bytes.checked_sub(old_bytes)) {
        (true, Some(growth)) => tally.take_back(owner, growth),
        (true, None) => tally.live_bytes.set(tally.live_bytes.get() + (old_bytes - new_bytes) as isize),
        (false, Some(growth)) => owner.not_grown_elsewhere(growth),
        (false, None) => owner.not_shrunk_elsewhere(old_bytes - new_bytes),
    })
}

impl Tally {
    #[inline]
    fn is_for(&self, owner: &'static Record) -> bool {
        std::ptr::eq(self.owner.get(), owner)
    }

    #[inline]
    fn owner(&self) -> Option<&'static Record> {
        let owner = self.owner.get();
        // SAFETY: NULL, or from `select`, which is given immortal records.
        if std::ptr::eq(owner, UNSEEN) { None } else { unsafe { owner.as_ref() } }
    }

    #[inline]
    fn made(&self, bytes: usize, is_nobodys: impl FnOnce() -> bool) -> Result<Option<&'static Record>, Refused> {
        let Some(owner) = self.owner() else {
            self.first_block();
            return Ok(None);
        };
        if unattributed::is_paused() || is_nobodys() {
            return Ok(None);
        }
        self.grow(owner, bytes)?;
        self.made_blocks.set(self.made_blocks.get() + 1);
        Ok(Some(owner))
    }

    /// Notes that there is a global allocator which counts.
    #[cold]
    fn first_block(&self) {
        unattributed::activate();
        self.owner.set(null());
    }

    #[inline]
    fn grow(&self, owner: &'static Record, bytes: usize) -> Result<(), Refused> {
        let live = self.live_bytes.get().saturating_add(bytes as isize); // no layout has more than `isize::MAX` bytes
        if live > self.ceiling_bytes.get() || bytes >= QUANTUM {
            return self.grow_slowly(owner, bytes);
        }
        self.live_bytes.set(live);
        self.made_bytes.set(self.made_bytes.get() + bytes as u64);
        Ok(())
    }

    /// `live_bytes` is compared with its largest value here and when it is flushed, not when it grows: what `upstream`
    /// then refuses was never live.
    #[inline]
    fn shrink(&self, bytes: usize) {
        let live = self.live_bytes.get();
        if live > self.high_bytes.get() {
            self.high_bytes.set(live);
        }
        let live = live - bytes as isize;
        self.live_bytes.set(live);
        if live <= -QUANTUM.cast_signed() {
            self.flush(); // there is room for other threads
        }
    }

    /// Undoes `grow`.
    #[cold]
    fn take_back(&self, owner: &'static Record, bytes: usize) {
        if bytes >= QUANTUM {
            owner.not_grown(bytes);
        } else {
            self.live_bytes.set(self.live_bytes.get() - bytes as isize);
        }
        self.made_bytes.set(self.made_bytes.get().wrapping_sub(bytes as u64));
    }

    /// Flushes the tally, and finds out how far it may grow until the next time. Past the limit each growth comes here.
    #[cold]
    #[inline(never)]
    fn grow_slowly(&self, owner: &'static Record, bytes: usize) -> Result<(), Refused> {
        self.flush();
        if bytes >= QUANTUM {
            owner.grow(bytes)?;
        } else {
            let room = owner.room();
            if bytes.cast_signed() > room {
                owner.exceed(bytes)?;
            }
            self.live_bytes.set(bytes.cast_signed());
            self.ceiling_bytes.set(room.min(QUANTUM.cast_signed()));
        }
        self.made_bytes.set(bytes as u64);
        Ok(())
    }

    #[inline]
    fn flush(&self) {
        if self.made_bytes.get() | self.freed_blocks.get() != 0 || self.live_bytes.get() != 0 {
            self.flush_slowly();
        }
        self.ceiling_bytes.set(isize::MIN);
    }

    #[cold]
    fn flush_slowly(&self) {
        let live_bytes = self.live_bytes.replace(0);
        let done = Done {
            made_blocks: self.made_blocks.replace(0),
            freed_blocks: self.freed_blocks.replace(0),
            made_bytes: self.made_bytes.replace(0),
            live_bytes,
            high_bytes: self.high_bytes.replace(0).max(live_bytes),
        };
        if let Some(owner) = self.owner() {
            owner.add(&done);
        }
    }
}
