//! `Reservation`: what a request reserved of the accounts above it; and whom to call when room came. What it is all
//! for: `reservation.rs`.

use crate::sync::Made;
use std::ops::Deref;
use std::sync::atomic::{
    AtomicBool, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};

/// What a request reserved. Changed under the locks of the accounts above, and under its own once it has begun.
#[derive(Debug, Default)]
pub(super) struct Reservation {
    /// 0 before it is admitted and after its end.
    pub(super) bytes: AtomicUsize,
    /// What is in use of it, or beyond it, by chains that it covers.
    pub(super) covered_bytes: AtomicUsize,
    /// What it passes on of the change that is under way. Means nothing without the lock.
    pub(super) step: AtomicUsize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    Growth,
    Shrinkage,
}

/// What reservations mean to one account of a chain.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cover {
    /// The position of the outermost account below it whose reservation this chain draws on, or [`NOBODY`].
    pub(super) under: u32,
    /// Whether this chain draws on its own reservation.
    pub(super) is_drawn_on: bool,
}

pub(super) const NOBODY: u32 = u32::MAX;

/// What reservations mean to each account of a chain.
#[derive(Debug)]
pub(super) enum Covers {
    /// Only the own account has one, and so many are above it: what most requests with a reservation have. It needs no
    /// memory of its own.
    Own(u8),
    Each(Box<[Cover]>),
}

impl Covers {
    /// The most accounts of a chain that is an [`Own`](Self::Own).
    pub(super) const MAX_OWN: usize = 16;

    /// Where only the first of so many accounts has a reservation, if they are few.
    pub(super) fn own(accounts: usize) -> Option<Self> {
        let above = accounts.checked_sub(1).filter(|_| accounts <= Self::MAX_OWN)?;
        u8::try_from(above).ok().map(Self::Own)
    }

    /// Whether the own account alone has a reservation: then each account above changes by what goes beyond that.
    pub(super) fn is_own(&self) -> bool {
        matches!(self, Self::Own(_))
    }
}

impl Deref for Covers {
    type Target = [Cover];

    #[inline]
    fn deref(&self) -> &[Cover] {
        const OWN: [Cover; Covers::MAX_OWN] = {
            let mut covers = [Cover { under: 0, is_drawn_on: false }; Covers::MAX_OWN];
            covers[0] = Cover { under: NOBODY, is_drawn_on: true };
            covers
        };
        match self {
            Self::Own(above) => &OWN[..=usize::from(*above)],
            Self::Each(covers) => covers,
        }
    }
}

impl Reservation {
    /// What accounts above change by when the use below changes so.
    pub(super) fn passes_on(&self, change: Change, bytes: usize) -> usize {
        let (reserved, before) = (self.bytes.load(Relaxed), self.covered_bytes.load(Relaxed));
        let after = match change {
            Change::Growth => before.saturating_add(bytes),
            Change::Shrinkage => before.saturating_sub(bytes),
        };
        reserved.max(after).abs_diff(reserved.max(before))
    }
}

/// Who is called, on whatever thread.
pub(crate) struct OnRoom {
    /// When memory came back to an account that is wanted.
    pub(crate) came: fn(),
    /// When a limit was lowered for which somebody waits, or a guarantee changed: before whoever changed that goes on,
    /// so that nobody gets in ahead of those who wait.
    pub(crate) changed: fn(),
}

static ON_ROOM: Made<OnRoom> = Made::new();

/// Has these called. Only the first ones are.
pub(crate) fn on_room(calls: OnRoom) {
    ON_ROOM.get_or_make(|| calls);
}

/// Whether less can ever be had than before, since somebody asked. Kept here, since the first one that waits stands in
/// the queue before anybody is called.
static SHRANK: AtomicBool = AtomicBool::new(false);

/// For an account for which somebody waits, perhaps in vain from now on: its limit was lowered, or a guarantee of it or
/// to it changed.
#[cold]
pub(super) fn room_shrank() {
    SHRANK.store(true, Release); // pairs with the Acquire in `shrank`
    if let Some(calls) = ON_ROOM.get() {
        (calls.changed)();
    }
}

/// Whether some who wait may wait in vain. Once.
pub(crate) fn shrank() -> bool {
    SHRANK.load(Relaxed) && SHRANK.swap(false, Acquire)
}

#[cold]
pub(super) fn room_came() {
    if let Some(calls) = ON_ROOM.get() {
        (calls.came)();
    }
}
