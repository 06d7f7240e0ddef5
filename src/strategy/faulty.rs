//! `Faulty`: refuses some requests for memory on purpose, to test how a program copes.

use super::{LiveBlock, Strategy};
use crate::error::Error;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Passes everything on to `upstream`, but refuses some requests for memory: every nth one, or at random with a seed.
///
/// `allocate`, `allocate_zeroed` and `resize` are counted together; `release` never fails. Whether a request fails
/// depends only on the seed and the request's number, so a single-threaded program fails at the same places each time.
///
/// ```
/// use ctxalloc::{Buffer, register, strategy::{Faulty, System}};
///
/// let faulty = register("every third fails", Faulty::every(System, 3)?)?;
/// let made: Vec<bool> = (0..6).map(|_| Buffer::zeroed_in(faulty, 100).is_ok()).collect();
/// assert_eq!(made, [true, true, false, true, true, false]);
/// # Ok::<(), ctxalloc::Error>(())
/// ```
pub struct Faulty<S> {
    upstream: S,
    when: When,
    requests: AtomicU64,
}

/// Which requests fail.
#[derive(Debug, Clone, Copy, PartialEq)]
enum When {
    Every(u64),
    Probability { threshold: u64, seed: u64 },
}

impl<S: Strategy> Faulty<S> {
    /// Refuses each request whose number is a multiple of `every`. 1 refuses all of them.
    ///
    /// # Errors
    /// [`Error::BadOption`] for zero.
    pub fn every(upstream: S, every: u64) -> Result<Self, Error> {
        if every == 0 {
            return Err(Error::BadOption { option: "every", value: "0".into(), expected: "a count from 1 up" });
        }
        Ok(Self { upstream, when: When::Every(every), requests: AtomicU64::new(0) })
    }

    /// Refuses each request with this probability.
    ///
    /// # Errors
    /// [`Error::BadOption`] unless `probability` lies between 0 and 1.
    pub fn with_probability(upstream: S, probability: f64, seed: u64) -> Result<Self, Error> {
        if !(0.0..=1.0).contains(&probability) {
            let value = probability.to_string();
            return Err(Error::BadOption { option: "probability", value, expected: "a number from 0 to 1" });
        }
        // Times 2^63, not 2^64, so that a probability of 1 does not overflow.
        let threshold = (probability * (1_u64 << 63) as f64) as u64;
        Ok(Self { upstream, when: When::Probability { threshold, seed }, requests: AtomicU64::new(0) })
    }

    /// How many requests for memory there were, including those refused.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    fn passes(&self) -> Option<()> {
        let number = self.requests.fetch_add(1, Ordering::Relaxed) + 1;
        let fails = match self.when {
            When::Every(every) => number.is_multiple_of(every),
            When::Probability { threshold, seed } => mixed(seed, number) >> 1 < threshold,
        };
        (!fails).then_some(())
    }
}

/// SplitMix64 of the request's number: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
fn mixed(seed: u64, number: u64) -> u64 {
    let state = seed.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

// SAFETY: all blocks are the upstream's, which keeps these promises; a refusal changes nothing.
unsafe impl<S: Strategy> Strategy for Faulty<S> {
    fn alignment(&self) -> usize {
        self.upstream.alignment()
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.passes()?;
        self.upstream.allocate(size_bytes)
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.passes()?;
        self.upstream.allocate_zeroed(size_bytes)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        self.passes()?;
        // SAFETY: the block is the upstream's, and the caller promises of it what the upstream wants.
        unsafe { self.upstream.resize(block, new_size_bytes) }
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: the block is the upstream's, and the caller promises of it what the upstream wants.
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

impl<S: fmt::Debug> fmt::Debug for Faulty<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Faulty");
        text.field("upstream", &self.upstream);
        match self.when {
            When::Every(every) => text.field("every", &every),
            When::Probability { threshold, seed } => {
                text.field("probability", &(threshold as f64 / (1_u64 << 63) as f64)).field("seed", &seed)
            }
        };
        text.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::{Faulty, Strategy};
    use crate::strategy::{System, conformance};

    #[test]
    fn faulty_keeps_the_strategy_contract_while_it_does_not_fail() {
        conformance::check(Faulty::with_probability(System, 0.0, 1).expect("a probability"));
        conformance::check(Faulty::every(System, u64::MAX).expect("a count"));
        conformance::check_wrapper(|upstream| Faulty::every(upstream, u64::MAX).expect("a count"));
    }

    fn failures(strategy: &Faulty<System>, requests: usize) -> Vec<usize> {
        (1..=requests)
            .filter(|_| match strategy.allocate(8) {
                // SAFETY: `strategy` has just made it.
                Some(block) => unsafe {
                    strategy.release(block);
                    false
                },
                None => true,
            })
            .collect()
    }

    #[test]
    fn every_third_request_fails() {
        assert_eq!(failures(&Faulty::every(System, 3).expect("a count"), 10), [3, 6, 9]);
    }

    #[test]
    fn a_seed_fails_at_the_same_places_and_about_as_often_as_asked() {
        let with_seed = |seed| failures(&Faulty::with_probability(System, 0.25, seed).expect("in range"), 2000);
        assert_eq!(with_seed(7), with_seed(7));
        assert_ne!(with_seed(7), with_seed(8));
        assert!((400..600).contains(&with_seed(7).len()), "{} of 2000", with_seed(7).len());
        assert_eq!(failures(&Faulty::with_probability(System, 1.0, 7).expect("in range"), 50).len(), 50);
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(Faulty::every(System, 0).is_err());
        for probability in [-0.1, 1.1, f64::NAN] {
            assert!(Faulty::with_probability(System, probability, 1).is_err(), "{probability}");
        }
    }
}
