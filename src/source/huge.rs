//! Huge pages of 2 MiB behind large blocks; ordinary ones behind everything else.
//!
//! One TLB entry then covers 2 MiB instead of 4 KiB, and one page fault does the work of 512. A small block gains
//! nothing from that and would take 2 MiB of memory.
#![allow(unsafe_code, reason = "maps pages")]

use super::Pages;
use super::pages::{self, HUGE_PAGE};
use crate::error::Error;
use crate::os;
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
    /// Transparent huge pages (MADV_HUGEPAGE), if the kernel has some. They need no privilege, and their lack is no
    /// failure.
    ///
    /// Blocks of 2 MiB and more start at a multiple of 2 MiB and take whole huge pages, up to 2 MiB more than
    /// requested. If `/sys/kernel/mm/transparent_hugepage/enabled` says `never`, or memory is too fragmented, they get
    /// ordinary pages.
    #[must_use]
    pub const fn transparent() -> Self {
        Self { reserved: false }
    }

    /// Huge pages that the administrator reserved (MAP_HUGETLB), which are never swapped or split.
    ///
    /// Blocks take whole huge pages, up to 2 MiB more than requested. When all are in use, an allocation of 2 MiB or
    /// more fails. Do not fork while such blocks are alive: a child that writes to one needs a huge page of its own and
    /// gets a SIGBUS if there is none.
    ///
    /// # Errors
    /// [`Error::NoHugePages`] if none is free now; [`Error::SystemRefused`] except on Linux.
    pub fn reserved() -> Result<Self, Error> {
        if cfg!(not(target_os = "linux")) {
            return Err(os::lacks("MAP_HUGETLB", "do without reserved=True, or use Pool"));
        }
        let Some(trial) = map_reserved(HUGE_PAGE, HUGE_PAGE) else {
            let read =
                |path: &str| std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<usize>().ok());
            let number = |name| read(&format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}")).unwrap_or(0);
            return Err(Error::NoHugePages {
                reserved_pages: read("/proc/sys/vm/nr_hugepages").unwrap_or(0),
                // Pages that are promised to a mapping count as free until they are touched.
                free_pages: number("free_hugepages").saturating_sub(number("resv_hugepages")),
            });
        };
        // SAFETY: this mapping was just made, and nobody else has it.
        unsafe { pages::unmap(trial, HUGE_PAGE) };
        Ok(Self { reserved: true })
    }
}

/// `size_bytes` of reserved huge pages at a multiple of `align`, both multiples of [`HUGE_PAGE`].
#[cfg(all(target_os = "linux", not(miri)))]
fn map_reserved(size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
    for _ in 0..RACES {
        // A mapping of ordinary pages finds an aligned address range. (Cutting an aligned part out of huge pages would
        // need more of them than the block has, and there may not be more.)
        let place = pages::map(size_bytes, align).ok()?;
        // SAFETY: this mapping was just made, and nobody else has it.
        unsafe { pages::unmap(place, size_bytes) };
        // Without MAP_NORESERVE: the pages are reserved for this mapping, so touching them cannot fail.
        let there = flags | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: MAP_FIXED_NOREPLACE replaces no mapping: if another thread has mapped something there, the call
        // fails.
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

/// How often another thread may take the address range before this gives up.
#[cfg(all(target_os = "linux", not(miri)))]
const RACES: usize = 16;

/// Miri has no huge pages, and only Linux reserves them.
#[cfg(not(all(target_os = "linux", not(miri))))]
fn map_reserved(_size_bytes: usize, _align: usize) -> Option<NonNull<u8>> {
    None
}

// SAFETY: private anonymous mappings belong to this process alone and are zero when new and after MADV_DONTNEED
// (mmap(2), madvise(2)).
unsafe impl Pages for HugePages {
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        pages::map(size_bytes, align).ok()
    }

    fn maps_lazily(&self) -> bool {
        pages::are_mapped_lazily()
    }

    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize) {
        // SAFETY: a whole mapping of `pages::map`, not used any more (this function's contract).
        unsafe { pages::unmap(start, size_bytes) }
    }

    unsafe fn discard(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: pages of `pages::map` whose contents nobody needs (this function's contract).
        unsafe { pages::discard(start, size_bytes) }
    }

    fn huge(&self) -> Option<Arc<dyn Pages>> {
        Some(if self.reserved { Arc::new(Reserved) } else { Arc::new(Transparent) })
    }
}

/// The pages of large blocks for [`HugePages::transparent`].
#[derive(Debug)]
struct Transparent;

// SAFETY: private anonymous mappings, as for `HugePages`; the hint changes no contents.
unsafe impl Pages for Transparent {
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        let start = pages::map(size_bytes, align).ok()?;
        // SAFETY: the whole mapping that was just made.
        unsafe { pages::prefer_huge(start, size_bytes) };
        Some(start)
    }

    fn maps_lazily(&self) -> bool {
        pages::are_mapped_lazily()
    }

    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize) {
        // SAFETY: a whole mapping of `pages::map`, not used any more (this function's contract).
        unsafe { pages::unmap(start, size_bytes) }
    }

    unsafe fn discard(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: pages of `pages::map` whose contents nobody needs (this function's contract).
        unsafe { pages::discard(start, size_bytes) }
    }
}

/// The pages of large blocks for [`HugePages::reserved`].
#[derive(Debug)]
struct Reserved;

// SAFETY: private anonymous mappings belong to this process alone and are zero when new (mmap(2)).
unsafe impl Pages for Reserved {
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        map_reserved(size_bytes, align)
    }

    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize) {
        // SAFETY: a whole mapping of `map`, not used any more (this function's contract); its size is a multiple of a
        // huge page, as munmap(2) wants it.
        unsafe { pages::unmap(start, size_bytes) }
    }

    /// Does nothing: the pages would go to another process, and touching them again could fail.
    unsafe fn discard(&self, _start: NonNull<u8>, _size_bytes: usize) -> bool {
        false
    }
}
