//! Strategies for tests: one that checks its blocks, one that fails on demand, one that refuses everything, one whose
//! blocks have no alignment.

use ctxalloc::strategy::{Strategy, System};
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU64, AtomicUsize, Ordering};

/// Every block carries who made it and how large it is. A resize or release by another strategy, or of a block that
/// is dead, is counted as a fault (and the block left alone).
#[derive(Debug)]
pub(crate) struct Marked {
    owner: u64,
    live_blocks: AtomicIsize,
    live_bytes: AtomicIsize,
    made: AtomicUsize,
    faults: AtomicUsize,
}

#[repr(C, align(64))]
struct Mark {
    owner: u64,
    size_bytes: usize,
}

const MARK_BYTES: usize = size_of::<Mark>();
const DEAD: u64 = 0xDEAD_DEAD_DEAD_DEAD;

impl Marked {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            owner: 0xC0DE_0000_0000_0000 | NEXT.fetch_add(1, Ordering::Relaxed),
            live_blocks: AtomicIsize::new(0),
            live_bytes: AtomicIsize::new(0),
            made: AtomicUsize::new(0),
            faults: AtomicUsize::new(0),
        }
    }

    pub(crate) fn live_blocks(&self) -> isize {
        self.live_blocks.load(Ordering::SeqCst)
    }

    pub(crate) fn live_bytes(&self) -> isize {
        self.live_bytes.load(Ordering::SeqCst)
    }

    /// How many blocks it ever made.
    pub(crate) fn made(&self) -> usize {
        self.made.load(Ordering::SeqCst)
    }

    /// How often it was given a block that is not its own, or not alive. Zero, in a sound program.
    pub(crate) fn faults(&self) -> usize {
        self.faults.load(Ordering::SeqCst)
    }

    fn upstream() -> impl Strategy {
        ctxalloc::strategy::Aligned::CACHE_LINE
    }

    fn seal(&self, raw: NonNull<u8>, size_bytes: usize) -> NonNull<u8> {
        // SAFETY: `allocate` asked for MARK_BYTES more than the user's, at a multiple of 64.
        unsafe { raw.cast::<Mark>().write(Mark { owner: self.owner, size_bytes }) };
        self.live_blocks.fetch_add(1, Ordering::SeqCst);
        self.live_bytes.fetch_add(size_bytes as isize, Ordering::SeqCst);
        self.made.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the raw block has MARK_BYTES in front of the user's bytes.
        unsafe { raw.add(MARK_BYTES) }
    }

    /// The raw block and its size, out of the books; nothing, and a fault, where the block is not ours.
    fn unseal(&self, block: NonNull<u8>) -> Option<(NonNull<u8>, usize)> {
        // SAFETY: if the block is this strategy's, its mark lies directly before it. If it is not, the test is about to
        // fail.
        let (raw, mark) = unsafe {
            let raw = block.sub(MARK_BYTES);
            (raw, &mut *raw.cast::<Mark>().as_ptr())
        };
        if mark.owner != self.owner {
            self.faults.fetch_add(1, Ordering::SeqCst);
            return None;
        }
        mark.owner = DEAD;
        self.live_blocks.fetch_sub(1, Ordering::SeqCst);
        self.live_bytes.fetch_sub(mark.size_bytes as isize, Ordering::SeqCst);
        Some((raw, mark.size_bytes))
    }
}

// SAFETY: on `Aligned` at 64 bytes, with a mark of 64 bytes before each block.
unsafe impl Strategy for Marked {
    fn alignment(&self) -> usize {
        64
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let raw = Self::upstream().allocate(size_bytes.checked_add(MARK_BYTES)?)?;
        Some(self.seal(raw, size_bytes))
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let raw = Self::upstream().allocate_zeroed(size_bytes.checked_add(MARK_BYTES)?)?;
        Some(self.seal(raw, size_bytes))
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        let raw_bytes = new_size_bytes.checked_add(MARK_BYTES)?;
        let (raw, old_size_bytes) = self.unseal(block)?;
        // SAFETY: the block was ours, hence `raw` is upstream's.
        match unsafe { Self::upstream().resize(raw, raw_bytes) } {
            Some(moved) => Some(self.seal(moved, new_size_bytes)),
            None => {
                self.seal(raw, old_size_bytes);
                None
            }
        }
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        if let Some((raw, _)) = self.unseal(block) {
            // SAFETY: the block was ours, hence `raw` is upstream's.
            unsafe { Self::upstream().release(raw) }
        }
    }
}

/// The C heap, until somebody says that it shall fail, or panic.
#[derive(Debug, Default)]
pub(crate) struct Switched {
    pub(crate) refuses: AtomicBool,
    pub(crate) panics: AtomicBool,
    pub(crate) calls: AtomicUsize,
    pub(crate) live_blocks: AtomicIsize,
}

impl Switched {
    pub(crate) fn refuse(&self, refuse: bool) {
        self.refuses.store(refuse, Ordering::SeqCst);
    }

    pub(crate) fn panic(&self, panic: bool) {
        self.panics.store(panic, Ordering::SeqCst);
    }

    fn agrees(&self) -> bool {
        self.calls.fetch_add(1, Ordering::SeqCst);
        assert!(!self.panics.load(Ordering::SeqCst), "a strategy that panics on demand");
        !self.refuses.load(Ordering::SeqCst)
    }

    fn count<T>(&self, made: Option<T>) -> Option<T> {
        self.live_blocks.fetch_add(isize::from(made.is_some()), Ordering::SeqCst);
        made
    }
}

// SAFETY: everything goes to `System` or fails without having done anything.
unsafe impl Strategy for Switched {
    fn alignment(&self) -> usize {
        System.alignment()
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.agrees().then(|| self.count(System.allocate(size_bytes)))?
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.agrees().then(|| self.count(System.allocate_zeroed(size_bytes)))?
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: passed on.
        self.agrees().then(|| unsafe { System.resize(block, new_size_bytes) })?
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        self.agrees();
        self.live_blocks.fetch_sub(1, Ordering::SeqCst);
        // SAFETY: passed on.
        unsafe { System.release(block) }
    }
}

/// Blocks at odd addresses: aligned to nothing.
#[derive(Debug)]
pub(crate) struct Odd;

const ODD_OFFSET: usize = 33;

// SAFETY: each block lies in one of `System`, 33 bytes in.
unsafe impl Strategy for Odd {
    fn alignment(&self) -> usize {
        1
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let raw = System.allocate(size_bytes.checked_add(ODD_OFFSET)?)?;
        // SAFETY: it has that many bytes more.
        Some(unsafe { raw.add(ODD_OFFSET) })
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        let raw_bytes = new_size_bytes.checked_add(ODD_OFFSET)?;
        // SAFETY: `allocate` went that far in.
        let raw = unsafe { block.sub(ODD_OFFSET) };
        // SAFETY: a block of `System`.
        let moved = unsafe { System.resize(raw, raw_bytes) }?;
        // SAFETY: as in `allocate`.
        Some(unsafe { moved.add(ODD_OFFSET) })
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: `allocate` went that far in.
        let raw = unsafe { block.sub(ODD_OFFSET) };
        // SAFETY: a block of `System`, given up by the caller.
        unsafe { System.release(raw) }
    }
}

/// Refuses all memory. For tests of what is said about a strategy: its alignment, or its Debug text.
pub(crate) struct Refusing {
    pub(crate) alignment: usize,
    pub(crate) debug: fn(&mut fmt::Formatter<'_>) -> fmt::Result,
}

impl Refusing {
    pub(crate) fn aligned_to(alignment: usize) -> Self {
        Self { alignment, debug: |f| f.write_str("Refusing") }
    }
}

impl fmt::Debug for Refusing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (self.debug)(f)
    }
}

// SAFETY: it never hands out a block.
unsafe impl Strategy for Refusing {
    fn alignment(&self) -> usize {
        self.alignment
    }

    fn allocate(&self, _size_bytes: usize) -> Option<NonNull<u8>> {
        None
    }

    unsafe fn resize(&self, _block: NonNull<u8>, _new_size_bytes: usize) -> Option<NonNull<u8>> {
        None
    }

    unsafe fn release(&self, _block: NonNull<u8>) {}
}
