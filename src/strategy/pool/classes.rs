//! Size classes of small blocks: multiples of 64 up to 512 bytes, then four per doubling up to 256 KiB. Behind these,
//! in the order of their numbers, are the *tiny* ones of 16, 32 and 48 bytes.
//!
//! Above 512 bytes a block is at most 25 % larger than requested. Every class but the tiny ones is a multiple of 64, so
//! blocks cut one after the other from an aligned span are aligned to 64. Tiny blocks are aligned to 16: they serve
//! those who need no more, and ask by [`TIGHT`].

use super::geometry::PAGE;

/// Every block's alignment, in bytes, but that of tiny ones.
pub(super) const ALIGN: usize = 64;
/// A tiny block's alignment, in bytes. The size of each block is a multiple of it.
pub(super) const TINY_ALIGN: usize = 16;
/// The largest tiny block, in bytes.
pub(super) const TINY_MAX: usize = ALIGN - TINY_ALIGN;
/// The largest small block, in bytes.
pub(super) const MAX: usize = 256 << 10;
/// The largest block that is cut from a span, in bytes. Those above are cut from the extents, as large ones: their
/// memory serves blocks of any size once they come back.
pub(super) const SPANNED: usize = 128 << 10;
/// The first tiny class, which has the number of those before it: 8 linear ones, and 4 for each of the 9 doublings from
/// 512 to 256 Ki.
pub(super) const TINY: usize = 8 + 4 * 9;
/// The number of classes.
pub(super) const COUNT: usize = TINY + TINY_MAX / TINY_ALIGN;

/// Finds the class that serves a size, for those who need each block aligned to `UNIT`.
pub(super) struct Lookup<const UNIT: usize, const LENGTH: usize>([u8; LENGTH]);

impl<const UNIT: usize, const LENGTH: usize> Lookup<UNIT, LENGTH> {
    /// The class that serves `size_bytes`, up to [`MAX`]: zero bytes take a block of the smallest. Called inside of
    /// sections, so it must not panic for any size.
    #[inline]
    pub(super) fn of(&self, size_bytes: usize) -> usize {
        debug_assert!(size_bytes <= MAX);
        if size_bytes <= TABLED { self.tabled(size_bytes.max(1)) } else { computed(size_bytes) }
    }

    /// [`of`](Self::of); `None` above [`MAX`].
    #[inline(always)]
    pub(super) fn find(&self, size_bytes: usize) -> Option<usize> {
        if is_tabled(size_bytes) {
            return Some(self.tabled(size_bytes));
        }
        (size_bytes <= MAX).then(|| if size_bytes == 0 { self.tabled(1) } else { computed(size_bytes) })
    }

    /// Of 1 to [`TABLED`] bytes.
    #[inline(always)]
    fn tabled(&self, size_bytes: usize) -> usize {
        self.0[(size_bytes - 1) / UNIT] as usize
    }
}

#[inline(always)]
pub(super) fn is_tabled(size_bytes: usize) -> bool {
    size_bytes.wrapping_sub(1) < TABLED // zero bytes are not
}

#[inline(always)]
pub(super) const fn is_tiny(class: usize) -> bool {
    class >= TINY
}

/// Up to this size the class is looked up in a table, which is faster than computing it.
const TABLED: usize = 8 << 10;

/// For those who need [`ALIGN`].
pub(super) static ALIGNED: Lookup<ALIGN, { TABLED / ALIGN }> = Lookup({
    let mut table = [0; TABLED / ALIGN];
    let mut index = 0;
    while index < table.len() {
        table[index] = if index < 512 / ALIGN { index } else { computed((index + 1) * ALIGN) } as u8;
        index += 1;
    }
    table
});

/// For those who need [`TINY_ALIGN`] at most: up to [`TINY_MAX`] bytes take a tiny block.
pub(super) static TIGHT: Lookup<TINY_ALIGN, { TABLED / TINY_ALIGN }> = Lookup({
    let mut table = [0; TABLED / TINY_ALIGN];
    let mut index = 0;
    while index < table.len() {
        let is_tiny = index < TINY_MAX / TINY_ALIGN;
        table[index] = if is_tiny { (TINY + index) as u8 } else { ALIGNED.0[index / (ALIGN / TINY_ALIGN)] };
        index += 1;
    }
    table
});

/// The class of a size above 512.
#[inline]
const fn computed(size_bytes: usize) -> usize {
    // 512 < size: the doubling it falls into, and which quarter of it.
    let doubling = (size_bytes - 1).ilog2() as usize; // 9 for 513..=1024
    let quarter = ((size_bytes - 1) >> (doubling - 2)) & 3;
    8 + (doubling - 9) * 4 + quarter
}

/// The size of a block of `class`, in bytes.
#[inline]
pub(super) const fn bytes(class: usize) -> usize {
    if is_tiny(class) {
        return (class - TINY + 1) * TINY_ALIGN;
    }
    if class < 8 {
        return (class + 1) * ALIGN;
    }
    let (doubling, quarter) = ((class - 8) / 4 + 9, (class - 8) % 4);
    (1 << doubling) + ((quarter + 1) << (doubling - 2))
}

/// Whether a pool's blocks of `class` are cut from its extents, and not from spans. An arena's all lie in spans.
#[inline]
pub(super) const fn is_joined(class: usize) -> bool {
    bytes(class) > SPANNED
}

/// The number of pages in a span of `class`: room for at least four blocks, with at most an eighth wasted.
pub(super) const fn span_pages(class: usize) -> usize {
    let mut pages = (bytes(class) * 4).div_ceil(PAGE);
    while (pages * PAGE % bytes(class)) * 8 > pages * PAGE {
        pages += 1;
    }
    pages
}

/// The number of blocks in a span of `class`.
pub(super) const fn span_blocks(class: usize) -> usize {
    span_pages(class) * PAGE / bytes(class)
}

/// The largest number of blocks that a span of any class has.
pub(super) const MAX_BLOCKS: usize = {
    let (mut max, mut class) = (0, 0);
    while class < COUNT {
        if span_blocks(class) > max {
            max = span_blocks(class);
        }
        class += 1;
    }
    max
};

/// 2^32 divided by the size of a block of `class` in units of [`TINY_ALIGN`], rounded up: for [`index_by`].
pub(super) const fn divisor(class: usize) -> u64 {
    (1_u64 << 32).div_ceil((bytes(class) / TINY_ALIGN) as u64)
}

/// The index of the block that starts `offset_bytes` behind the start of its span. Divides by multiplying, which is
/// exact because offset times size, in units of [`TINY_ALIGN`], is less than 2^32.
#[inline]
pub(super) const fn index_by(divisor: u64, offset_bytes: usize) -> usize {
    (((offset_bytes / TINY_ALIGN) as u64 * divisor) >> 32) as usize
}

#[cfg(test)]
mod tests {
    use super::{
        ALIGN, ALIGNED, COUNT, MAX, PAGE, TIGHT, TINY, TINY_ALIGN, TINY_MAX, bytes, divisor, index_by, is_joined,
        is_tiny, span_blocks, span_pages,
    };

    fn sizes() -> impl Iterator<Item = usize> {
        let step = if cfg!(miri) { 997 } else { 1 };
        (0..200).chain((200..MAX).step_by(step)).chain([MAX])
    }

    #[test]
    fn every_size_gets_the_smallest_class_that_holds_it() {
        for size in sizes() {
            let class = ALIGNED.of(size);
            assert!(!is_tiny(class), "{size}");
            assert!(bytes(class) >= size, "{size} in a class of {}", bytes(class));
            assert!(class == 0 || bytes(class - 1) < size, "{size} fits class {} too", class - 1);
            assert_eq!(ALIGNED.find(size), Some(class));
        }
        assert_eq!((ALIGNED.of(0), ALIGNED.of(MAX), ALIGNED.find(MAX + 1)), (0, TINY - 1, None));
        assert_eq!(bytes(TINY - 1), MAX);
    }

    #[test]
    fn who_needs_16_bytes_gets_the_smallest_of_all_classes() {
        for size in sizes() {
            let smallest = (0..COUNT).filter(|&class| bytes(class) >= size).min_by_key(|&class| bytes(class));
            assert_eq!(Some(TIGHT.of(size)), smallest, "{size}");
            assert_eq!((TIGHT.find(size), is_tiny(TIGHT.of(size))), (smallest, size <= TINY_MAX), "{size}");
        }
        assert_eq!(TIGHT.find(MAX + 1), None);
    }

    #[test]
    fn the_block_at_each_offset_is_found_without_a_division() {
        for class in 0..COUNT {
            for index in 0..span_blocks(class) {
                assert_eq!(index_by(divisor(class), index * bytes(class)), index, "class {class}");
            }
        }
    }

    #[test]
    fn classes_keep_alignment_and_waste_little() {
        for class in 0..COUNT {
            assert_eq!(bytes(class) % if is_tiny(class) { TINY_ALIGN } else { ALIGN }, 0);
            let span = span_pages(class) * PAGE;
            assert!(span / bytes(class) >= 4, "class {class}");
            assert!((span % bytes(class)) * 8 <= span, "class {class} wastes more than an eighth of its span");
            assert!(!is_tiny(class) || (span == PAGE && !is_joined(class)), "class {class}");
        }
    }
}
