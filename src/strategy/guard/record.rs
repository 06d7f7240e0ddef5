//! The record of each guarded block: where its parts lie, and whether the bytes around it were overwritten.

use crate::os;
use crate::strategy::ledger::ProcessLedger;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// The blocks of all Guards of this process. One ledger for all, because the fault handler knows only an address.
pub(super) static BLOCKS: ProcessLedger<Record> = ProcessLedger::new();

/// Fills the bytes around a block. Unlikely as a value, as part of an address, or as a letter.
const PATTERN: u8 = 0xB7;

/// One block, alive or in quarantine.
///
/// ```text
///   mapping                     start     size_bytes
///   |<- front ->|<--- pad --->|<-------- block -------->|<- slack ->|<- guard ->|
///    unreadable                                                       unreadable
///                |<----------------- whole pages ------------------>|
/// ```
#[derive(Debug, Clone)]
pub(super) struct Record {
    pub(super) start: NonNull<u8>,
    pub(super) size_bytes: usize,
    pub(super) mapping: NonNull<u8>,
    pub(super) mapped_bytes: usize,
    pub(super) pad_bytes: usize,
    pub(super) slack_bytes: usize,
    pub(super) made_by: Thread,
    pub(super) freed_by: Option<Thread>,
    pub(super) owner: Arc<Owner>,
}

// SAFETY: the pointers are addresses in a mapping, which belongs to no thread. The Guard decides who may access it.
unsafe impl Send for Record {}

/// The Guard that made a block.
#[derive(Debug)]
pub(super) struct Owner {
    /// The Guard's Debug text, for reports.
    pub(super) text: String,
    /// Whether it reports on standard error.
    #[cfg_attr(windows, allow(dead_code, reason = "for signal handlers"))]
    pub(super) reports: bool,
    pub(super) misuses: AtomicU64,
}

/// Which bytes around a block were overwritten: their distances from the block, in bytes, from 1 up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Damage {
    pub(super) side: Side,
    pub(super) nearest: usize,
    pub(super) farthest: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Before,
    Behind,
}

impl Record {
    /// Fills the pad and the slack of a new block with the pattern.
    ///
    /// # Safety
    /// - the pages between the guard pages are mapped, and nobody else has the block.
    pub(super) unsafe fn fill(&self) {
        let (pad, slack) = self.around();
        // SAFETY: pad and slack lie in the pages between the guards, which are ours (this function's contract).
        unsafe {
            pad.write_bytes(PATTERN, self.pad_bytes);
            slack.write_bytes(PATTERN, self.slack_bytes);
        }
    }

    /// The starts of the pad and of the slack.
    fn around(&self) -> (NonNull<u8>, NonNull<u8>) {
        // SAFETY: the pad ends where the block starts, and the slack starts where the block ends, all in one mapping.
        unsafe { (self.start.sub(self.pad_bytes), self.start.add(self.size_bytes)) }
    }

    /// Where the pad and the slack were overwritten.
    ///
    /// # Safety
    /// - the pages between the guard pages are readable, and `fill` was called.
    pub(super) unsafe fn damage(&self) -> impl Iterator<Item = Damage> {
        let (pad, slack) = self.around();
        // SAFETY: `fill` initialised these bytes, and they are readable (this function's contract). The block was
        // released, so no correct program writes near it now.
        let (pad, slack) = unsafe {
            (
                std::slice::from_raw_parts(pad.as_ptr(), self.pad_bytes),
                std::slice::from_raw_parts(slack.as_ptr(), self.slack_bytes),
            )
        };
        let before =
            damaged(pad.iter().rev()).map(|(nearest, farthest)| Damage { side: Side::Before, nearest, farthest });
        let behind = damaged(slack.iter()).map(|(nearest, farthest)| Damage { side: Side::Behind, nearest, farthest });
        before.into_iter().chain(behind)
    }

    pub(super) fn owns(&self, address: usize) -> bool {
        let mapping = self.mapping.addr().get();
        (mapping..mapping + self.mapped_bytes).contains(&address)
    }
}

/// The positions of the first and the last overwritten byte, counted from one.
fn damaged<'a>(bytes: impl Iterator<Item = &'a u8>) -> Option<(usize, usize)> {
    let mut changed = bytes.enumerate().filter(|&(_, &byte)| byte != PATTERN).map(|(index, _)| index + 1);
    let first = changed.next()?;
    Some((first, changed.last().unwrap_or(first)))
}

/// A thread, as the system knows it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Thread {
    pub(super) id: u32,
    /// Terminated by a NUL.
    pub(super) name: [u8; 16],
}

impl Thread {
    /// The running thread. Safe in a signal handler.
    pub(super) fn current() -> Self {
        if cfg!(miri) {
            return Self { id: 0, name: [0; 16] };
        }
        Self { id: os::thread_number(), name: os::thread_name() }
    }
}
