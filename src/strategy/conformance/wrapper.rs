//! What a strategy promises beside that wraps another one.

use super::{Filled, SIZES, pattern};
use crate::strategy::{LiveBlock, Strategy, System};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// Checks what a strategy promises that wraps another one: that it passes on what it is asked, and that it writes to
/// no block that a device may still read. `wrap` puts it around the strategy that it is given; it is called twice.
///
/// [`check`](super::check) has the promises of every strategy.
///
/// ```
/// use ctxalloc::strategy::{Faulty, conformance};
///
/// conformance::check_wrapper(|upstream| Faulty::every(upstream, u64::MAX).expect("a count"));
/// ```
///
/// # Panics
/// With a sentence that names the broken promise.
pub fn check_wrapper<S: Strategy>(wrap: impl Fn(Arc<dyn Strategy>) -> S) {
    for is_read_after_release in [false, true] {
        let upstream = Arc::new(Upstream::new(is_read_after_release));
        let strategy = wrap(Arc::clone(&upstream) as Arc<dyn Strategy>);
        asks_are_passed_on(&strategy, &upstream);
        if is_read_after_release {
            released_blocks_are_not_written_to(&strategy, &upstream);
        }
    }
}

/// The system's blocks, under a strategy that says whatever the check wants.
#[derive(Debug)]
struct Upstream {
    is_read_after_release: bool,
    trims: AtomicUsize,
    /// The sizes of live blocks, by address.
    sizes: Mutex<HashMap<usize, usize>>,
    /// What released blocks had in them when they came back.
    released: Mutex<Vec<Vec<u8>>>,
}

/// What the upstream says a trim returned: the bytes are told, so any number does.
const TRIMMED_BYTES: usize = 4096;

impl Upstream {
    fn new(is_read_after_release: bool) -> Self {
        Self { is_read_after_release, trims: AtomicUsize::new(0), sizes: Mutex::default(), released: Mutex::default() }
    }

    fn made(&self, block: Option<NonNull<u8>>, size_bytes: usize) -> Option<NonNull<u8>> {
        let block = block?;
        self.sizes.lock().unwrap_or_else(PoisonError::into_inner).insert(block.addr().get(), size_bytes);
        Some(block)
    }

    fn gone(&self, block: NonNull<u8>) -> usize {
        let size = self.sizes.lock().unwrap_or_else(PoisonError::into_inner).remove(&block.addr().get());
        size.unwrap_or_else(|| panic!("a wrapper gave back {block:?}, which is no live block of its upstream"))
    }
}

// SAFETY: every block is the system's, which keeps these promises.
unsafe impl Strategy for Upstream {
    fn alignment(&self) -> usize {
        System.alignment()
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        // Zeroed, so that all of it can be looked at when it comes back.
        self.made(System.allocate_zeroed(size_bytes), size_bytes)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the block is the system's, and the caller promises of it what the system wants.
        let moved = unsafe { System.resize(block, new_size_bytes) }?;
        let size = self.gone(block);
        if new_size_bytes > size {
            // SAFETY: the block has `new_size_bytes` now, and what was added is nobody's yet.
            unsafe { moved.add(size).write_bytes(0, new_size_bytes - size) };
        }
        self.made(Some(moved), new_size_bytes)
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        let size = self.gone(block);
        // SAFETY: the block has `size` bytes, which `allocate` and `resize` made initialised; it is still live.
        let bytes = unsafe { std::slice::from_raw_parts(block.as_ptr(), size) }.to_vec();
        self.released.lock().unwrap_or_else(PoisonError::into_inner).push(bytes);
        // SAFETY: the block is the system's, and the caller promises of it what the system wants.
        unsafe { System.release(block) }
    }

    fn trim(&self) -> usize {
        self.trims.fetch_add(1, Relaxed);
        TRIMMED_BYTES
    }

    fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        Some(Vec::new())
    }

    fn is_read_after_release(&self) -> bool {
        self.is_read_after_release
    }
}

fn asks_are_passed_on(strategy: &impl Strategy, upstream: &Upstream) {
    let trimmed = strategy.trim();
    assert!(
        upstream.trims.load(Relaxed) > 0 && trimmed >= TRIMMED_BYTES,
        "{strategy:?} does not pass `trim` on to its upstream, or does not say what that returned: warm memory below it \
         is never given back",
    );
    assert!(
        strategy.live_blocks().is_some(),
        "{strategy:?} does not pass `live_blocks` on to its upstream, which knows them",
    );
    assert_eq!(
        strategy.is_read_after_release(),
        upstream.is_read_after_release,
        "{strategy:?} does not pass `is_read_after_release` on to its upstream: a strategy around this one would write \
         to blocks that a device still reads",
    );
}

fn released_blocks_are_not_written_to(strategy: &impl Strategy, upstream: &Upstream) {
    let seeds = 1..=SIZES.len() as u8;
    let sizes: Vec<(usize, u8)> = SIZES.iter().copied().zip(seeds).filter(|&(size, _)| size >= 63).collect();
    for &(size, seed) in &sizes {
        // A wrapper may refuse: it hands out nothing then that could be written to.
        if let Some(block) = strategy.allocate(size) {
            Filled::of(strategy, block, size, seed).release(strategy);
        }
    }
    // One that keeps blocks has not released all of them.
    for block in upstream.released.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        let is_as_it_was = |&(size, seed): &(usize, u8)| {
            let filled: Vec<u8> = (0..size).map(|index| pattern(seed, index)).collect();
            block.windows(size).any(|part| part == filled)
        };
        assert!(
            sizes.iter().any(is_as_it_was),
            "{strategy:?} wrote to a block of {} bytes at its release, which a device may read then",
            block.len(),
        );
    }
}
