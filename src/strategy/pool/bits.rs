//! Runs of pages in the 64 pages of a region, as bits of one word: bit `i` stands for page `i`.

use super::geometry::PAGES;

const _: () = assert!(PAGES == u64::BITS as usize);

/// The bits of `pages` pages from `first` on. `pages` is at least 1.
pub(super) const fn mask(first: usize, pages: usize) -> u64 {
    (u64::MAX >> (64 - pages)) << first
}

/// The runs of set bits, from the lowest up: where each begins, and how many pages it has.
pub(super) fn runs(bits: u64) -> impl Iterator<Item = (usize, usize)> {
    let mut left = bits;
    std::iter::from_fn(move || {
        if left == 0 {
            return None;
        }
        let first = left.trailing_zeros() as usize;
        let pages = (left >> first).trailing_ones() as usize;
        left &= !mask(first, pages);
        Some((first, pages))
    })
}

/// Where the lowest run of at least `pages` set bits begins. `pages` is from 1 to 64.
pub(super) fn first_run(bits: u64, pages: usize) -> Option<usize> {
    debug_assert!((1..=64).contains(&pages));
    // Bit i of `starts` says that the bits from i to i + length - 1 are set; the length doubles as far as it can.
    let (mut starts, mut length) = (bits, 1);
    while length < pages {
        let step = length.min(pages - length);
        starts &= starts >> step;
        length += step;
    }
    (starts != 0).then(|| starts.trailing_zeros() as usize)
}

#[cfg(test)]
mod tests {
    use super::{first_run, mask, runs};

    #[test]
    fn the_first_run_is_found_or_there_is_none() {
        for pages in 1..=64 {
            assert_eq!(first_run(u64::MAX, pages), Some(0));
            for first in 0..=64 - pages {
                assert_eq!(first_run(mask(first, pages), pages), Some(first), "{pages} pages from {first}");
                if pages < 64 {
                    assert_eq!(first_run(mask(first, pages), pages + 1), None);
                }
            }
        }
        assert_eq!(first_run(0b0110_1110, 3), Some(1));
        assert_eq!(first_run(0b0110_0110, 3), None);
    }

    #[test]
    fn the_runs_of_a_word_are_all_its_bits_in_order() {
        assert_eq!(runs(0).next(), None);
        assert_eq!(runs(u64::MAX).collect::<Vec<_>>(), [(0, 64)]);
        assert_eq!(runs(0b0110_1110 | 1 << 63).collect::<Vec<_>>(), [(1, 3), (5, 2), (63, 1)]);
    }
}
