//! `Guard`: an electric fence around each block. Code that accesses memory past a block's end, or after it was freed,
//! faults at that instruction.
//!
//! ```text
//!   |<- front, if asked ->|<- pad ->|<------ block ------>|<- slack ->|<- guard page ->|
//!        unreadable                                        < align       unreadable
//! ```
//! The records are apart from the blocks, in one ledger for all Guards of the process (`record`). The fault handler
//! (`fault`) looks a faulting address up there, and `report` says which block it was.

#[cfg(unix)]
mod fault;
mod record;
mod report;

use super::Strategy;
use crate::error::Error;
use crate::source::pages;
use crate::sync::{ForkLock, HeldAcrossFork, Locked, held_across_fork};
use crate::trace;
use crate::unattributed::unattributed;
use record::{BLOCKS, Owner, Record, Thread};
use report::{Finding, Text};
use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Blocks that end at an unreadable page, to find code that reads or writes where it must not.
///
/// What it finds, and when:
///
/// | misuse | found when |
/// | --- | --- |
/// | access past the end | at that access, by SIGSEGV. A write to the first `align - 1` bytes past it: when the block is freed |
/// | write before the start | when the block is freed, if it is in the block's first page; with `underrun`, an access before that page at once |
/// | access after free | at that access, while the block is in quarantine |
/// | double free; free of a pointer into a block, or of a foreign pointer | at that call, which does nothing |
///
/// With `report`, a few lines on standard error say which address was accessed, how far from which block, and which
/// threads allocated and freed it. Then the process gets the signal as it would without Guard (Python's `faulthandler`
/// prints its traceback, the process ends). For this the first block installs a handler of SIGSEGV and SIGBUS for the
/// whole process, which passes every signal on to the previous handler. A system call on guarded memory fails with
/// EFAULT instead of faulting.
///
/// Each block costs system calls (some microseconds), at least one page of memory and two pages of addresses. Freed
/// memory is reused only when the quarantine is full. Before Linux 6.13 each block takes two mappings, of which a
/// process may have 65530 unless `vm.max_map_count` says otherwise; beyond that allocations fail, and standard error
/// says why, once. A resize always moves the block.
///
/// Clones are the same Guard, and cloning is cheap.
#[derive(Clone)]
pub struct Guard {
    inner: Arc<Inner>,
}

/// Options of a [`Guard`].
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct GuardOptions {
    /// Every block's alignment in bytes, and the unit that its size is rounded up to before the guard page. By default
    /// 64, so up to 63 bytes past the end can be read unnoticed, and writes to them are found when the block is freed.
    /// With 1 the block ends exactly at the guard page, and it is aligned only as its size is: code that relies on C's
    /// 16 bytes (SIMD) fails on odd sizes then.
    pub align: usize,
    /// Whether a page before the block's first one is unreadable too.
    pub underrun: bool,
    /// How many bytes of freed blocks' mappings stay unreadable; the oldest go first. They take addresses, not memory.
    /// By default 256 MiB, which is 32768 small blocks.
    pub quarantine_bytes: usize,
    /// Whether faults and misuse are reported on standard error. (Misuse is counted and a `tracing` event in any case.)
    pub report: bool,
}

impl Default for GuardOptions {
    fn default() -> Self {
        Self { align: 64, underrun: false, quarantine_bytes: 256 << 20, report: true }
    }
}

struct Inner {
    options: GuardOptions,
    owner: Arc<Owner>,
    quarantine: Locked<Quarantine>,
}

/// Freed blocks with the lengths of their mappings, the oldest first, and the sum of these lengths.
#[derive(Debug, Default)]
struct Quarantine {
    blocks: VecDeque<(NonNull<u8>, usize)>,
    bytes: usize,
}

// SAFETY: addresses only; nobody accesses the blocks.
unsafe impl Send for Quarantine {}

impl Guard {
    /// The largest alignment in bytes: a page.
    pub const MAX_ALIGN: usize = 4096;

    /// A Guard with these options.
    ///
    /// # Errors
    /// [`Error::BadAlignment`] unless `align` is a power of two from 1 to 4096.
    pub fn new(options: GuardOptions) -> Result<Self, Error> {
        let align = options.align;
        if !align.is_power_of_two() || align > Self::MAX_ALIGN {
            return Err(Error::BadAlignment { align, min: 1, max: Self::MAX_ALIGN });
        }
        let owner = Arc::new(Owner { text: describe(&options), reports: options.report, misuses: AtomicU64::new(0) });
        Ok(Self { inner: held_across_fork(Inner { options, owner, quarantine: Locked::new(Quarantine::default()) }) })
    }

    /// How often misuse of this Guard's memory was found: double frees, foreign pointers, overwritten bytes. Faults are
    /// not counted, since they end the process.
    #[must_use]
    pub fn misuses(&self) -> u64 {
        self.inner.owner.misuses.load(Ordering::Relaxed)
    }

    fn make(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let inner = &*self.inner;
        let page = pages::page_bytes();
        let front = if inner.options.underrun { page } else { 0 };
        let fenced = size_bytes.max(1).checked_next_multiple_of(inner.options.align)?;
        let readable = fenced.checked_next_multiple_of(page)?;
        let mapped_bytes = readable.checked_add(front + page).filter(|&bytes| isize::try_from(bytes).is_ok())?;
        if inner.options.report {
            #[cfg(unix)]
            fault::install();
        }
        // If the system has no mapping left, those in quarantine can go.
        let mapped = || pages::map(mapped_bytes, page).ok();
        let mapping = mapped().or_else(|| if inner.empty_quarantine(0) { mapped() } else { None });
        let Some(mapping) = mapping else {
            inner.explain_refusal(size_bytes);
            return None;
        };
        // SAFETY: the last page of the new mapping, and its first one if there is a front. Nobody uses them yet.
        let fenced_in = unsafe {
            pages::guard(mapping.add(front + readable), page) && (front == 0 || pages::guard(mapping, front))
        };
        if !fenced_in {
            // SAFETY: this mapping was just made, and nobody else has it.
            unsafe { pages::unmap(mapping, mapped_bytes) };
            inner.explain_refusal(size_bytes);
            return None;
        }
        let pad_bytes = readable - fenced;
        // SAFETY: `front + pad_bytes` is at most `front + readable`, inside the mapping.
        let start = unsafe { mapping.add(front + pad_bytes) };
        let record = Record {
            start,
            size_bytes,
            mapping,
            mapped_bytes,
            pad_bytes,
            slack_bytes: fenced - size_bytes,
            made_by: Thread::current(),
            freed_by: None,
            owner: Arc::clone(&inner.owner),
        };
        // SAFETY: the pages between the guards are mapped, and nobody else has the block yet.
        unsafe { record.fill() };
        BLOCKS.get().insert(start, record);
        Some(start)
    }

    /// The record of a live block of this Guard as it was before `change`. If `block` is no such block, reports it and
    /// returns `None`.
    fn known(&self, operation: &'static str, block: NonNull<u8>, change: impl FnOnce(&mut Record)) -> Option<Record> {
        let inner = &*self.inner;
        let record = BLOCKS.get().with(block, |record| {
            let record = record?;
            let fine = record.freed_by.is_none() && Arc::ptr_eq(&record.owner, &inner.owner);
            let before = record.clone();
            if fine {
                change(record);
            }
            Some((fine, before))
        });
        match &record {
            Some((true, record)) => return Some(record.clone()),
            Some((false, record)) if record.freed_by.is_some() => inner.report(&Finding::Freed { operation, record }),
            Some((false, record)) => inner.report(&Finding::Elsewhere { operation, record }),
            None => {
                let address = block.addr().get();
                let near = BLOCKS.get().near(address, |_, record| record.owns(address).then(|| record.clone()));
                match &near {
                    Some(record) => inner.report(&Finding::Inside { operation, address, record }),
                    None => inner.report(&Finding::Foreign { operation, address }),
                }
            }
        }
        None
    }
}

impl Inner {
    /// Counts a misuse and reports it. Called without a lock held.
    #[cold]
    fn report(&self, finding: &Finding<'_>) {
        self.owner.misuses.fetch_add(1, Ordering::Relaxed);
        let mut text = Text::new();
        finding.write_to(Thread::current(), &mut text);
        trace::misuse(text.as_str());
        if self.options.report {
            text.print();
        }
    }

    /// If the failure is for want of mappings rather than of memory, says so, once in a process: users see a
    /// MemoryError and wonder, since they have memory.
    #[cold]
    fn explain_refusal(&self, size_bytes: usize) {
        static SAID: AtomicBool = AtomicBool::new(false);
        let page = pages::page_bytes();
        // There is always memory for a single page; with a guard page it needs two mappings.
        if let Ok(trial) = pages::map(2 * page, page) {
            // SAFETY: the first page of a new mapping, and then all of it; nobody else has it.
            let fits = unsafe {
                let fits = pages::guard(trial, page);
                pages::unmap(trial, 2 * page);
                fits
            };
            if fits {
                return;
            }
        }
        if SAID.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut text = Text::new();
        // A Text takes what fits and never fails.
        let _ = writeln!(
            text,
            "ctxalloc Guard: a block of {size_bytes} bytes is refused: the process has no mapping left (vm.max_map_count; \
             before Linux 6.13 each guarded block is two of them). Raise it (as root: sysctl vm.max_map_count=1000000), or \
             guard fewer blocks. Said once."
        );
        trace::misuse(text.as_str());
        if self.options.report {
            text.print();
        }
    }

    /// Unmaps the oldest blocks until at most `max_bytes` are left; returns whether there was one.
    fn empty_quarantine(&self, max_bytes: usize) -> bool {
        let mut any = false;
        while let Some((block, mapped_bytes)) = self.quarantine.with(|quarantine| quarantine.pop_over(max_bytes)) {
            any = true;
            // The record is removed first: once unmapped, the addresses may be those of the next block at once.
            if let Some(record) = BLOCKS.get().remove(block) {
                // SAFETY: the freed block's own mapping. Nobody may use a freed block, and its record is gone.
                unsafe { pages::unmap(record.mapping, mapped_bytes) };
            }
        }
        any
    }
}

impl Quarantine {
    /// Takes out the oldest block, with its mapping's length, if there are more than `max_bytes`.
    fn pop_over(&mut self, max_bytes: usize) -> Option<(NonNull<u8>, usize)> {
        if self.bytes <= max_bytes {
            return None;
        }
        let oldest = self.blocks.pop_front()?;
        self.bytes -= oldest.1;
        Some(oldest)
    }
}

impl HeldAcrossFork for Inner {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.quarantine.lock());
    }
}

impl Drop for Inner {
    /// Live blocks stay valid.
    fn drop(&mut self) {
        self.empty_quarantine(0);
    }
}

// SAFETY: each block has pages of its own from `make` to `release`. It is aligned: the guard page starts at a multiple
// of the page size, and the block `fenced` bytes before it, a multiple of the alignment. New pages are zero, and only
// pad and slack are written to.
unsafe impl Strategy for Guard {
    fn alignment(&self) -> usize {
        self.inner.options.align
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.make(size_bytes)
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.make(size_bytes)
    }

    /// Always moves, so that the use of old pointers is found.
    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        let old = self.known("resize", block, |_| ())?;
        let moved = self.make(new_size_bytes)?;
        // SAFETY: both blocks are live, hence disjoint, and have at least the smaller of the two sizes. The old one is
        // released once; the caller uses the new one from here on.
        unsafe {
            moved.copy_from_nonoverlapping(block, old.size_bytes.min(new_size_bytes));
            self.release(block);
        }
        Some(moved)
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        let freed_by = Thread::current();
        let Some(record) = self.known("free", block, |record| record.freed_by = Some(freed_by)) else { return };
        // SAFETY: `make` called `fill`, and the pages between the guards are readable until they are guarded below.
        for damage in unsafe { record.damage() } {
            self.inner.report(&Finding::Damaged { damage, record: &record });
        }
        // If the system cannot (it has no mapping left), the block waits in quarantine readable.
        // SAFETY: the whole mapping of a block that is not used again (this function's contract).
        let _ = unsafe { pages::guard(record.mapping, record.mapped_bytes) };
        let unattributed = unattributed();
        self.inner.quarantine.with(|quarantine| {
            quarantine.blocks.push_back((block, record.mapped_bytes));
            quarantine.bytes += record.mapped_bytes;
        });
        drop(unattributed);
        self.inner.empty_quarantine(self.inner.options.quarantine_bytes);
    }
}

fn describe(options: &GuardOptions) -> String {
    let GuardOptions { align, underrun, quarantine_bytes, report } = options;
    format!("Guard {{ align: {align}, underrun: {underrun}, quarantine_bytes: {quarantine_bytes}, report: {report} }}")
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.inner.owner.text)
    }
}

#[cfg(test)]
mod tests {
    use super::{Error, Guard, GuardOptions};
    use crate::strategy::live::Live;
    use crate::strategy::{Strategy, System, conformance};
    use std::ptr::NonNull;

    /// Without reports, since these tests misuse memory on purpose.
    fn options(align: usize, underrun: bool, quarantine_bytes: usize) -> GuardOptions {
        GuardOptions { align, underrun, quarantine_bytes, report: false }
    }

    fn guard(align: usize) -> Guard {
        Guard::new(options(align, true, 1 << 20)).expect("in range")
    }

    #[test]
    fn guard_keeps_the_strategy_contract() {
        let guard = Guard::new(GuardOptions::default()).expect("in range");
        conformance::check(guard.clone());
        assert_eq!(guard.misuses(), 0);
        for (align, underrun, quarantine_bytes) in [(1, true, 0), (16, false, 100_000), (4096, true, 1 << 20)] {
            let guard = Guard::new(options(align, underrun, quarantine_bytes)).expect("in range");
            conformance::check(guard.clone());
            assert_eq!(guard.misuses(), 0, "{guard:?}");
        }
    }

    #[test]
    fn an_alignment_out_of_range_is_refused_with_the_range() {
        for align in [0, 3, 24, 8192, usize::MAX] {
            let expected = Error::BadAlignment { align, min: 1, max: 4096 };
            assert_eq!(Guard::new(options(align, false, 0)).expect_err("out of range"), expected);
        }
    }

    #[test]
    fn a_second_free_is_counted_and_does_nothing() {
        let guard = guard(64);
        let live = Live::of(&guard, 100);
        let block = live.start();
        live.release();
        assert_eq!(guard.misuses(), 0);
        // SAFETY: not live: Guard looks at its records and accesses nothing.
        unsafe { guard.release(block) };
        assert_eq!(guard.misuses(), 1);
        // SAFETY: not live: Guard looks at its records and accesses nothing.
        assert!(unsafe { guard.resize(block, 10) }.is_none());
        assert_eq!(guard.misuses(), 2);
        Live::of(&guard, 100).release();
        assert_eq!(guard.misuses(), 2, "what came after is as it must be");
    }

    #[test]
    fn foreign_and_inner_pointers_are_counted_and_left_alone() {
        let (guard, other) = (guard(64), guard(64));
        let (mut block, foreign) = (Live::of(&guard, 100), Live::of(&System, 100));
        // SAFETY: the eighth of a hundred bytes.
        let inner = unsafe { block.start().add(8) };
        for pointer in [inner, foreign.start(), NonNull::<u64>::dangling().cast()] {
            // SAFETY: no block starts there: Guard looks at its records and accesses nothing.
            unsafe { guard.release(pointer) };
        }
        assert_eq!(guard.misuses(), 3);
        // SAFETY: another Guard's block: this one finds no record and accesses nothing.
        unsafe { other.release(block.start()) };
        assert_eq!((guard.misuses(), other.misuses()), (3, 1));
        block.fill(7);
        block.release();
        foreign.release();
        assert_eq!(guard.misuses(), 3);
    }

    #[test]
    fn bytes_overwritten_around_a_block_are_noticed_when_it_is_freed() {
        let guard = guard(64);
        let noticed = |size_bytes: usize, at: isize| {
            let before = guard.misuses();
            let block = Live::of(&guard, size_bytes);
            // SAFETY: in the pages of the block's own mapping, which are writable.
            unsafe { block.start().offset(at).write(0) };
            block.release();
            guard.misuses() - before
        };
        assert_eq!((noticed(100, 99), noticed(100, 0)), (0, 0), "the block's own bytes");
        assert_eq!((noticed(100, 100), noticed(100, 127), noticed(1, 63)), (1, 1, 1), "behind");
        assert_eq!((noticed(100, -1), noticed(100, -500)), (1, 1), "before");
    }

    #[test]
    fn the_quarantine_keeps_what_it_may_and_no_more() {
        let page = crate::source::pages::page_bytes();
        // Two small blocks: a page and its guard each.
        let guard = Guard::new(options(64, false, 4 * page)).expect("in range");
        let live: Vec<_> = (0..5).map(|_| Live::of(&guard, 100)).collect();
        let blocks: Vec<_> = live.iter().map(Live::start).collect();
        drop(live);
        let kept =
            guard.inner.quarantine.with(|quarantine| quarantine.blocks.iter().map(|kept| kept.0).collect::<Vec<_>>());
        assert_eq!(kept, blocks[3..], "the oldest went first");
    }
}
