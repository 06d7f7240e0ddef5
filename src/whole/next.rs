//! How the allocator behind the library rounds small blocks up: glibc's, or another one that is preloaded. A sample
//! lies elsewhere, and is to be resized as if it lay there.

use super::sampling::{EXACT_FROM, taken};
use super::shared::Kind;
use std::ffi::c_void;

/// Each allocator's sizes are multiples of this.
const STEP: usize = 8;
/// A block below [`EXACT_FROM`] has less than so many bytes.
const MOST: usize = EXACT_FROM + 32;
/// Probed at once for each size: a block of glibc's may have a rest that is too small for another one.
const TRIES: usize = 3;

#[derive(Debug)]
pub(super) struct Next {
    /// How many bytes a block has that was asked for with so many steps.
    usable: [u16; MOST / STEP + 1],
    /// Whether a block that shrinks to no less than half of what it has keeps all of that, and so may grow again.
    keeps_half: bool,
}

fn of_glibc(size_bytes: usize) -> usize {
    taken(Kind::Native, size_bytes) - size_of::<usize>()
}

impl Next {
    /// Asks it for blocks of all small sizes. Before the library decides about any.
    pub(super) fn probed() -> Self {
        let probed = |size_bytes| probe(size_bytes).max(size_bytes).try_into().unwrap_or(u16::MAX);
        let usable = std::array::from_fn(|steps| probed((steps * STEP).max(1)));
        Self { usable, keeps_half: keeps_half() }
    }

    /// How many bytes it has for a block of so many.
    #[inline]
    pub(super) fn usable(&self, size_bytes: usize) -> usize {
        self.usable.get(size_bytes.div_ceil(STEP)).map_or(size_bytes, |&usable| usable.into())
    }

    /// Whether a block of `old_bytes` that shrinks to `new_bytes` has as many as before.
    pub(super) fn keeps(&self, old_bytes: usize, new_bytes: usize) -> bool {
        self.keeps_half && new_bytes < old_bytes && new_bytes >= self.usable(old_bytes).div_ceil(2)
    }
}

/// The least of what some blocks of so many bytes have.
fn probe(size_bytes: usize) -> usize {
    // SAFETY: `malloc_usable_size` is asked of blocks that are live, or NULL, and each is given up once.
    unsafe {
        let blocks = [(); TRIES].map(|()| libc::malloc(size_bytes));
        let usable = blocks.map(|block| if block.is_null() { of_glibc(size_bytes) } else { usable(block) });
        blocks.into_iter().for_each(|block| libc::free(block));
        usable.into_iter().min().unwrap_or(size_bytes)
    }
}

fn keeps_half() -> bool {
    const OLD: usize = 1000;
    const NEW: usize = 600;
    // SAFETY: a live block, or NULL, for which `realloc` makes a new one; it is given up once.
    unsafe {
        let block = libc::malloc(OLD);
        let resized = libc::realloc(block, NEW);
        let keeps = !resized.is_null() && usable(resized) >= OLD;
        libc::free(if resized.is_null() { block } else { resized });
        keeps
    }
}

/// # Safety
/// - a live block of malloc's.
unsafe fn usable(block: *mut c_void) -> usize {
    // SAFETY: a live block (this function's contract).
    unsafe { libc::malloc_usable_size(block) }
}

#[cfg(test)]
mod tests {
    use super::{EXACT_FROM, MOST, Next, of_glibc};

    /// Tests are run with glibc's malloc.
    #[test]
    fn glibc_has_what_it_says_and_keeps_nothing_of_what_shrinks() {
        let next = Next::probed();
        for size_bytes in 1..=MOST {
            assert_eq!(next.usable(size_bytes), of_glibc(size_bytes), "{size_bytes}");
        }
        assert_eq!((next.usable(MOST + 8), next.usable(5 * EXACT_FROM)), (MOST + 8, 5 * EXACT_FROM));
        assert!(!next.keeps(1000, 600));
    }

    #[test]
    fn what_shrinks_to_half_stays_where_the_allocator_keeps_it() {
        let mut next = Next::probed();
        next.keeps_half = true;
        next.usable = std::array::from_fn(|steps| (steps as u16 * 8).next_power_of_two());
        assert!(next.keeps(900, 899) && next.keeps(900, 512));
        assert!(!next.keeps(900, 511) && !next.keeps(900, 900) && !next.keeps(900, 1000));
    }
}
