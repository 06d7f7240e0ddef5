//! Huge pages of 2 MiB behind large blocks; ordinary ones behind everything else.
//!
//! One entry of the processor's address cache (TLB) covers 2 MiB instead of 4 KiB, and one page fault does the work of
//! 512. A small block has nothing of that, and would hold 2 MiB of memory for itself.
#![allow(unsafe_code, reason = "maps pages")]

use super::Pages;
use super::pages::{self, HUGE_PAGE};
use crate::error::Error;
use std::ptr::NonNull;
use std::sync::Arc;

/// Pages for a pool whose blocks of 2 MiB and more lie on huge pages.
///
/// ```
/// use ctxalloc::source::HugePages;
/// use ctxalloc::strategy::{Pool, PoolOptions, Strategy};
///
/// let pool = Pool::over(HugePages::transparent(), PoolOptions::default());
/// let block = pool.allocate(64 << 20).expect("memory");
/// assert!(block.addr().get().is_multiple_of(2 << 20));
/// // SAFETY: the block is live and from this pool.
/// unsafe { pool.release(block) };
/// ```
#[derive(Debug, Clone, Copy)]
pub struct HugePages {
    reserved: bool,
}

impl HugePages {
    /// Huge pages as the kernel finds them (MADV_HUGEPAGE): needs no privilege and never fails for want of them.
    ///
    /// Blocks of 2 MiB and more start at a multiple of 2 MiB and take whole huge pages, up to 2 MiB more than asked for.
    /// Where `/sys/kernel/mm/transparent_hugepage/enabled` says `never`, or no 2 MiB of memory lie together, all are.
    #[must_use]
    pub const fn transparent() -> Self {
        Self { reserved: false }
    }

    /// Huge pages that the administrator set aside (MAP_HUGETLB): there or refused, never swapped, never split.
    ///
    /// Blocks take whole huge pages, up to 2 MiB more than asked for. When all are in use, an allocation of 2 MiB or
    /// more fails. Do not fork while such blocks are alive: a child that writes to one needs a huge page of its own, and
    /// is killed (SIGBUS) where there is none.
    ///
    /// # Errors
    /// [`Error::NoHugePages`] where none is free now.
    pub fn reserved() -> Result<Self, Error> {
        let Some(trial) = map_reserved(HUGE_PAGE, HUGE_PAGE) else {
            let read =
                |path: &str| std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<usize>().ok());
            let number = |name| read(&format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}")).unwrap_or(0);
            return Err(Error::NoHugePages {
                reserved_pages: read("/proc/sys/vm/nr_hugepages").unwrap_or(0),
                // Those that were promised to a mapping count as free there until they are touched.
                free_pages: number("free_hugepages").saturating_sub(number("resv_hugepages")),
            });
        };
        // SAFETY: just mapped, and nobody has it.
        unsafe { pages::unmap(trial, HUGE_PAGE) };
        Ok(Self { reserved: true })
    }
}

/// `size_bytes` of reserved huge pages at a multiple of `align`, both multiples of [`HUGE_PAGE`].
#[cfg(not(miri))]
fn map_reserved(size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
    for _ in 0..RACES {
        // Ordinary pages can be had at any multiple: they find a place. (Cutting huge pages to the multiple would need
        // more of them than the block has, and those may be all there are.)
        let place = pages::map(size_bytes, align)?;
        // SAFETY: just mapped, and nobody has it.
        unsafe { pages::unmap(place, size_bytes) };
        // Without MAP_NORESERVE: the pages are this mapping's from now on, and touching them cannot fail.
        let there = flags | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: a new mapping, where nothing is: if somebody was faster there, it fails.
        let start = unsafe { libc::mmap(place.as_ptr().cast(), size_bytes, protection, there, -1, 0) };
        if start != libc::MAP_FAILED {
            return NonNull::new(start.cast());
        }
        if std::io::Error::last_os_error().raw_os_error() != Some(libc::EEXIST) {
            return None;
        }
    }
    None
}

/// How often another thread may take the place that was found before we give up.
#[cfg(not(miri))]
const RACES: usize = 16;

/// Miri has none.
#[cfg(miri)]
fn map_reserved(_size_bytes: usize, _align: usize) -> Option<NonNull<u8>> {
    None
}

// SAFETY: private anonymous mappings, zero when fresh and after MADV_DONTNEED, ours alone (mmap(2), madvise(2)).
unsafe impl Pages for HugePages {
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        pages::map(size_bytes, align)
    }

    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize) {
        // SAFETY: the caller's promises are the same.
        unsafe { pages::unmap(start, size_bytes) }
    }

    unsafe fn discard(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: the caller's promises are the same.
        unsafe { pages::discard(start, size_bytes) }
    }

    fn huge(&self) -> Option<Arc<dyn Pages>> {
        Some(if self.reserved { Arc::new(Reserved) } else { Arc::new(Transparent) })
    }
}

/// What [`HugePages::transparent`] puts behind large blocks.
#[derive(Debug)]
struct Transparent;

// SAFETY: as `HugePages`; the hint changes no contents.
unsafe impl Pages for Transparent {
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        let start = pages::map(size_bytes, align)?;
        // SAFETY: the mapping just made.
        unsafe { pages::prefer_huge(start, size_bytes) };
        Some(start)
    }

    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize) {
        // SAFETY: the caller's promises are the same.
        unsafe { pages::unmap(start, size_bytes) }
    }

    unsafe fn discard(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: the caller's promises are the same.
        unsafe { pages::discard(start, size_bytes) }
    }
}

/// What [`HugePages::reserved`] puts behind large blocks.
#[derive(Debug)]
struct Reserved;

// SAFETY: private anonymous mappings, zero when fresh, ours alone (mmap(2)).
unsafe impl Pages for Reserved {
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        map_reserved(size_bytes, align)
    }

    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize) {
        // SAFETY: the caller's promises are the same; the size is a multiple of a huge page's, as munmap(2) wants it.
        unsafe { pages::unmap(start, size_bytes) }
    }

    /// They would go to whoever asks next, and touching ours again could fail.
    unsafe fn discard(&self, _start: NonNull<u8>, _size_bytes: usize) -> bool {
        false
    }
}
