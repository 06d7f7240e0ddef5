//! The one suite that every strategy passes. It tells the author of a new strategy what they forgot.
//!
//! It calls the strategy's own functions from one thread and from several, and panics with a sentence about the first
//! promise that is broken. Call it from a test:
//!
//! ```
//! ctxalloc::strategy::conformance::check(ctxalloc::strategy::System);
//! ```
//!
//! A strategy that wraps another one passes [`check_wrapper`] too.

mod wrapper;

pub use wrapper::check_wrapper;

use super::Strategy;
use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;

/// Sizes that strategies get wrong: zero, one, and those around powers of two and around pages.
const SIZES: &[usize] = if cfg!(miri) {
    &[0, 1, 8, 15, 16, 17, 65, 129, 1023]
} else {
    &[
        0, 1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 1000, 1023, 1024, 1025, 4095, 4096, 4097, 65_535,
        65_537,
    ]
};
/// Sizes that nobody can have, among them those that overflow as they are rounded up or get a record in front.
const IMPOSSIBLE: [usize; 9] = [
    1 << 62,
    isize::MAX as usize - 4096,
    isize::MAX as usize,
    isize::MAX as usize + 1,
    usize::MAX - (4 << 20),
    usize::MAX - 65_535,
    usize::MAX - 4095,
    usize::MAX - 63,
    usize::MAX,
];
const LARGE: usize = if cfg!(miri) { 5000 } else { 3 * (1 << 20) + 5 };
const THREADS: usize = if cfg!(miri) { 3 } else { 8 };
const ROUNDS: usize = if cfg!(miri) { 12 } else { 400 };

/// Checks every promise of [`Strategy`].
///
/// # Panics
/// With a sentence that names the broken promise.
pub fn check<S: Strategy>(strategy: S) {
    let strategy = Arc::new(strategy);
    alignment_is_a_power_of_two(&*strategy);
    blocks_are_aligned_writable_and_disjoint(&*strategy);
    zeroed_blocks_are_zero_even_when_reused(&*strategy);
    resizing_keeps_the_first_bytes(&*strategy);
    impossible_sizes_fail_as_values(&*strategy);
    a_failed_resize_leaves_the_block(&*strategy);
    blocks_may_be_released_on_another_thread(&strategy);
    many_threads_may_work_at_once(&strategy);
}

/// A live block and the pattern that it was filled with. The checks below own their blocks through it.
pub(super) struct Filled {
    pub(super) block: NonNull<u8>,
    pub(super) size_bytes: usize,
    seed: u8,
}

// SAFETY: the block is plain memory that this value alone owns, and a strategy's blocks may be used on any thread.
unsafe impl Send for Filled {}

impl Filled {
    #[track_caller]
    pub(super) fn new(strategy: &impl Strategy, size_bytes: usize, seed: u8) -> Self {
        let Some(block) = strategy.allocate(size_bytes) else {
            panic!("{strategy:?} refused {size_bytes} bytes, which any machine has");
        };
        Self::of(strategy, block, size_bytes, seed)
    }

    /// A block that the strategy has just made.
    fn of(strategy: &impl Strategy, block: NonNull<u8>, size_bytes: usize, seed: u8) -> Self {
        let filled = Self { block, size_bytes, seed };
        filled.assert_aligned(strategy);
        let mut written = PERIOD.min(size_bytes);
        for index in 0..written {
            // SAFETY: the strategy promises `size_bytes` writable bytes that nobody else has.
            unsafe { block.add(index).write(pattern(seed, index)) };
        }
        while written < size_bytes {
            let more = written.min(size_bytes - written);
            // SAFETY: as above, and so many bytes are written. Whole periods, so the pattern goes on.
            unsafe { block.copy_to_nonoverlapping(block.add(written), more) };
            written += more;
        }
        filled
    }

    fn assert_aligned(&self, strategy: &impl Strategy) {
        let address = self.block.addr().get();
        assert!(
            address.is_multiple_of(strategy.alignment()),
            "{strategy:?} promised {}-byte alignment and returned {address:#x} for {} bytes",
            strategy.alignment(),
            self.size_bytes,
        );
    }

    /// Whether the strategy had so many bytes. If not, the block stays as it is. Bytes that are new are not written.
    pub(super) fn resize(&mut self, strategy: &impl Strategy, size_bytes: usize) -> bool {
        // SAFETY: the block is live and from this strategy; after a success its old address is overwritten.
        let Some(moved) = (unsafe { strategy.resize(self.block, size_bytes) }) else { return false };
        (self.block, self.size_bytes) = (moved, size_bytes);
        true
    }

    /// Asserts that the first `length` bytes still hold the pattern.
    #[track_caller]
    pub(super) fn assert_kept(&self, strategy: &impl Strategy, length: usize) {
        // SAFETY: the block is live, and `new` wrote at least `length` bytes, which resizes keep.
        let bytes = unsafe { std::slice::from_raw_parts(self.block.as_ptr(), length) };
        // The first period byte by byte, the rest by what stands a period before it: one comparison for megabytes.
        let is_kept = |(index, &byte): (usize, &u8)| byte == pattern(self.seed, index);
        let (first, rest) = bytes.split_at(PERIOD.min(length));
        assert!(
            first.iter().enumerate().all(is_kept) && rest == &bytes[..rest.len()],
            "{strategy:?} lost byte {} of a block of {} bytes: another block overlaps it, or a resize did not copy",
            bytes.iter().enumerate().take_while(|&at| is_kept(at)).count(),
            self.size_bytes,
        );
    }

    fn release(self, strategy: &impl Strategy) {
        // SAFETY: the block is live, from this strategy, and consumed with `self`.
        unsafe { strategy.release(self.block) }
    }
}

/// After so many bytes the pattern begins anew. A prime, so that no two places in a row of pages look the same.
const PERIOD: usize = 251;

fn pattern(seed: u8, index: usize) -> u8 {
    seed.wrapping_mul(31).wrapping_add((index % PERIOD) as u8)
}

fn alignment_is_a_power_of_two(strategy: &impl Strategy) {
    let align = strategy.alignment();
    assert!(align.is_power_of_two(), "{strategy:?} says its alignment is {align}, which is no power of two");
}

fn blocks_are_aligned_writable_and_disjoint(strategy: &impl Strategy) {
    let blocks: Vec<Filled> = SIZES
        .iter()
        .chain(SIZES)
        .chain(&[LARGE])
        .enumerate()
        .map(|(index, &size)| Filled::new(strategy, size, index as u8))
        .collect();
    for block in &blocks {
        block.assert_kept(strategy, block.size_bytes);
    }
    for block in blocks {
        block.release(strategy);
    }
}

fn zeroed_blocks_are_zero_even_when_reused(strategy: &impl Strategy) {
    for &size in SIZES.iter().chain(&[LARGE]) {
        Filled::new(strategy, size, 0xA5).release(strategy); // dirt for the next one to find
        let Some(block) = strategy.allocate_zeroed(size) else {
            panic!("{strategy:?} refused {size} zeroed bytes, which any machine has");
        };
        let zeroed = Filled { block, size_bytes: size, seed: 0 };
        zeroed.assert_aligned(strategy);
        // SAFETY: the strategy promises `size` initialised bytes that nobody else has.
        let bytes = unsafe { std::slice::from_raw_parts(block.as_ptr(), size) };
        let dirty = bytes.iter().position(|&byte| byte != 0);
        assert_eq!(dirty, None, "{strategy:?} returned a zeroed block of {size} bytes with dirt in it");
        zeroed.release(strategy);
    }
}

fn resizing_keeps_the_first_bytes(strategy: &impl Strategy) {
    let targets: &[usize] = if cfg!(miri) { &[0, 1, 100, LARGE] } else { &[0, 1, 8, 100, 4096, 10_000, LARGE] };
    for &from in targets {
        for &to in targets {
            let mut filled = Filled::new(strategy, from, 7);
            assert!(filled.resize(strategy, to), "{strategy:?} refused to resize {from} bytes to {to}");
            filled.assert_aligned(strategy);
            filled.assert_kept(strategy, from.min(to));
            if to > 0 {
                // SAFETY: the strategy promises `to` bytes now. Writing to the last one tests that.
                unsafe { filled.block.add(to - 1).write(1) };
            }
            filled.release(strategy);
        }
    }
}

fn impossible_sizes_fail_as_values(strategy: &impl Strategy) {
    if cfg!(miri) {
        return; // Miri's malloc ends the run where a real one returns NULL
    }
    for size in IMPOSSIBLE {
        // Hidden from the optimizer, which takes a `malloc` out whose memory nobody uses, and says that it succeeded.
        let (block, zeroed) = (black_box(strategy.allocate(size)), black_box(strategy.allocate_zeroed(size)));
        assert!(block.is_none(), "{strategy:?} claims to have allocated {size} bytes");
        assert!(zeroed.is_none(), "{strategy:?} claims to have allocated {size} zeroed bytes");
    }
}

fn a_failed_resize_leaves_the_block(strategy: &impl Strategy) {
    if cfg!(miri) {
        return; // Miri's malloc ends the run where a real one returns NULL
    }
    for &size in &[0, 1, 100, 5000, LARGE] {
        let mut filled = Filled::new(strategy, size, 99);
        for impossible in IMPOSSIBLE {
            let is_grown = filled.resize(strategy, impossible);
            assert!(!is_grown, "{strategy:?} claims to have grown a block to {impossible} bytes");
            filled.assert_kept(strategy, size);
        }
        filled.release(strategy);
    }
}

fn blocks_may_be_released_on_another_thread<S: Strategy>(strategy: &Arc<S>) {
    let blocks: Vec<Filled> = SIZES.iter().map(|&size| Filled::new(&**strategy, size, 3)).collect();
    let here = Arc::clone(strategy);
    let elsewhere = thread::spawn(move || {
        for block in blocks {
            block.assert_kept(&*here, block.size_bytes);
            block.release(&*here);
        }
    });
    assert!(elsewhere.join().is_ok(), "{strategy:?} failed when its blocks were released on another thread");
    // A block outlives the thread that allocated it.
    let there = Arc::clone(strategy);
    let made = thread::spawn(move || Filled::new(&*there, 1000, 5)).join();
    let Ok(block) = made else { panic!("{strategy:?} failed on a second thread") };
    block.assert_kept(&**strategy, 1000);
    block.release(&**strategy);
}

fn many_threads_may_work_at_once<S: Strategy>(strategy: &Arc<S>) {
    // A ring: each thread allocates blocks and passes them to its neighbour, which checks and releases them.
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| mpsc::channel::<Filled>()).unzip();
    let mut senders: Vec<Option<mpsc::Sender<Filled>>> = senders.into_iter().map(Some).collect();
    senders.rotate_left(1);
    let workers: Vec<_> = receivers
        .into_iter()
        .zip(&mut senders)
        .enumerate()
        .map(|(number, (receiver, sender))| {
            let strategy = Arc::clone(strategy);
            let sender = sender.take();
            thread::spawn(move || {
                let strategy = &*strategy;
                for round in 0..ROUNDS {
                    let size = SIZES[(round * 7 + number) % SIZES.len()];
                    let mut filled = Filled::new(strategy, size, (number * 40 + round) as u8);
                    if round % 3 == 0 {
                        let to = SIZES[(round * 5 + number) % SIZES.len()].min(size);
                        filled.resize(strategy, to);
                    }
                    if let Some(sender) = &sender
                        && let Err(refused) = sender.send(filled)
                    {
                        refused.0.release(strategy);
                    }
                    while let Ok(received) = receiver.try_recv() {
                        received.assert_kept(strategy, received.size_bytes);
                        received.release(strategy);
                    }
                }
                drop(sender);
                for received in receiver {
                    received.assert_kept(strategy, received.size_bytes);
                    received.release(strategy);
                }
            })
        })
        .collect();
    drop(senders);
    for worker in workers {
        assert!(worker.join().is_ok(), "{strategy:?} broke a promise under {THREADS} threads");
    }
}
