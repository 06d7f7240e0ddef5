//! What is known of each guarded block, where its parts lie, and whether the bytes around it are as they were.

use crate::strategy::ledger::ProcessLedger;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// The blocks of all Guards of this process, for the fault handler knows an address and nothing else.
pub(super) static BLOCKS: ProcessLedger<Record> = ProcessLedger::new();

/// What stands in the bytes around a block. Unlikely as a value, an address or a letter.
const PATTERN: u8 = 0xB7;

/// One block, alive or freed not long ago.
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

// SAFETY: pointers to a mapping that the record stands for; who may touch it is the Guard's matter.
unsafe impl Send for Record {}

/// The Guard that made a block.
#[derive(Debug)]
pub(super) struct Owner {
    /// Its Debug text, for reports.
    pub(super) text: String,
    /// Whether it reports on standard error.
    pub(super) reports: bool,
    pub(super) misuses: AtomicU64,
}

/// Which bytes around a block were overwritten: distances from it, in bytes, from 1 up.
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
    /// Fills pad and slack of a new block.
    ///
    /// # Safety
    /// - the whole pages are readable, and nobody else has the block.
    pub(super) unsafe fn fill(&self) {
        let (pad, slack) = self.around();
        // SAFETY: these bytes lie in the whole pages.
        unsafe { pad.write_bytes(PATTERN, self.pad_bytes) };
        // SAFETY: as above.
        unsafe { slack.write_bytes(PATTERN, self.slack_bytes) };
    }

    /// Where pad and slack begin.
    fn around(&self) -> (NonNull<u8>, NonNull<u8>) {
        // SAFETY: the pad ends where the block starts, in the same mapping.
        let pad = unsafe { self.start.sub(self.pad_bytes) };
        // SAFETY: the slack begins where the block ends, in the same mapping.
        (pad, unsafe { self.start.add(self.size_bytes) })
    }

    /// What became of pad and slack.
    ///
    /// # Safety
    /// - the whole pages are readable.
    pub(super) unsafe fn damage(&self) -> impl Iterator<Item = Damage> {
        let (pad, slack) = self.around();
        // SAFETY: filled by `fill`; users have no business there.
        let pad = unsafe { std::slice::from_raw_parts(pad.as_ptr(), self.pad_bytes) };
        // SAFETY: as above.
        let slack = unsafe { std::slice::from_raw_parts(slack.as_ptr(), self.slack_bytes) };
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

/// The places of the first and the last byte that is not as it was, counted from one.
fn damaged<'a>(bytes: impl Iterator<Item = &'a u8>) -> Option<(usize, usize)> {
    let mut changed = bytes.enumerate().filter(|&(_, &byte)| byte != PATTERN).map(|(index, _)| index + 1);
    let first = changed.next()?;
    Some((first, changed.last().unwrap_or(first)))
}

/// A thread, as the system knows it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Thread {
    pub(super) id: i32,
    /// With a NUL behind it.
    pub(super) name: [u8; 16],
}

impl Thread {
    /// The running one. May be asked in a signal handler.
    pub(super) fn current() -> Self {
        let mut name = [0; 16];
        if cfg!(miri) {
            return Self { id: 0, name };
        }
        // SAFETY: writes at most 16 bytes with a NUL at the end (prctl(2)).
        let _ = unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
        // SAFETY: takes nothing, never fails.
        Self { id: unsafe { libc::gettid() }, name }
    }
}
