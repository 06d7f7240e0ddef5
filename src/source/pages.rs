//! Pages of the system: private anonymous mappings, zero when fresh, given back as they came.
//!
//! Nothing here touches the C heap. A hint like MADV_HUGEPAGE on a mapping of our own cannot stick to memory that
//! others get later, as it does on a heap's pages (NumPy issue 31590).
#![allow(unsafe_code, reason = "the only door to mmap")]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The size of a huge page on x86-64 and on aarch64 with 4 KiB pages.
pub const HUGE_PAGE: usize = 2 << 20;

/// The system's page size in bytes.
#[must_use]
pub fn page_bytes() -> usize {
    static KNOWN: AtomicUsize = AtomicUsize::new(0);
    // Relaxed: every thread finds the same value.
    match KNOWN.load(Ordering::Relaxed) {
        0 => {
            // SAFETY: sysconf may be asked anything.
            let asked = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
            let page = usize::try_from(asked).ok().filter(|page| page.is_power_of_two()).unwrap_or(4096);
            KNOWN.store(page, Ordering::Relaxed);
            page
        }
        page => page,
    }
}

/// How much memory the machine has, in bytes; 0 where the system does not say.
#[must_use]
pub fn physical_bytes() -> usize {
    if cfg!(miri) {
        return 1 << 30; // Miri does not say
    }
    static KNOWN: AtomicUsize = AtomicUsize::new(0);
    // Relaxed: every thread finds the same value.
    match KNOWN.load(Ordering::Relaxed) {
        0 => {
            // SAFETY: sysconf may be asked anything.
            let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
            let bytes = usize::try_from(pages).unwrap_or(0).saturating_mul(page_bytes());
            KNOWN.store(bytes, Ordering::Relaxed);
            bytes
        }
        bytes => bytes,
    }
}

/// `size_bytes` of zero pages at a multiple of `align`, or nothing. Both are multiples of the page size, `align` a
/// power of two. No memory is used until it is touched.
#[must_use]
#[cfg(not(miri))]
pub fn map(size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
    debug_assert!(align.is_power_of_two() && size_bytes > 0);
    let slack = if align > page_bytes() { align } else { 0 };
    let start = map_anywhere(size_bytes.checked_add(slack)?)?;
    if slack == 0 {
        return Some(start);
    }
    let before = crate::layout::padding(start.addr().get(), align);
    // SAFETY: before < align = slack, so `size_bytes` bytes behind it lie in the mapping.
    let aligned = unsafe { start.add(before) };
    if before > 0 {
        // SAFETY: the part before the aligned start; nobody knows it yet.
        unsafe { unmap(start, before) };
    }
    if slack > before {
        // SAFETY: inside of the mapping, as above.
        let behind = unsafe { aligned.add(size_bytes) };
        // SAFETY: the part behind; nobody knows it yet.
        unsafe { unmap(behind, slack - before) };
    }
    Some(aligned)
}

#[cfg(not(miri))]
fn map_anywhere(size_bytes: usize) -> Option<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new anonymous mapping, wherever the system likes.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), size_bytes, protection, flags, -1, 0) };
    if start == libc::MAP_FAILED { None } else { NonNull::new(start.cast()) }
}

/// Gives a mapping, or some pages of one, back to the system.
///
/// # Safety
/// - `start` and `size_bytes` name whole pages from [`map`] that nobody uses any more.
#[cfg(not(miri))]
pub unsafe fn unmap(start: NonNull<u8>, size_bytes: usize) {
    // SAFETY: the caller vouches for the pages. It fails only where the system has no room for one more mapping
    // (when a part is cut out); then the pages stay mapped, unused.
    let _ = unsafe { libc::munmap(start.as_ptr().cast(), size_bytes) };
}

/// Gives the memory behind pages back to the system and keeps their addresses; they are zero when touched again.
/// Says whether it could.
///
/// # Safety
/// - `start` and `size_bytes` name whole pages from [`map`] whose contents nobody needs any more.
#[cfg(not(miri))]
pub unsafe fn discard(start: NonNull<u8>, size_bytes: usize) -> bool {
    // SAFETY: the caller vouches for the pages; private anonymous memory reads as zero afterwards (madvise(2)).
    unsafe { libc::madvise(start.as_ptr().cast(), size_bytes, libc::MADV_DONTNEED) == 0 }
}

/// Makes pages unreadable and gives their memory back: whoever touches them gets SIGSEGV (and a system call EFAULT),
/// until they are unmapped. Says whether it could.
///
/// From Linux 6.13 on this marks the pages alone (MADV_GUARD_INSTALL), so that any number of them may lie in one mapping.
/// Before, each stretch of such pages is a mapping of its own, of which a process has 65530 (`vm.max_map_count`).
///
/// # Safety
/// - `start` and `size_bytes` name whole pages from [`map`] whose contents nobody needs any more.
#[cfg(not(miri))]
#[must_use]
pub unsafe fn guard(start: NonNull<u8>, size_bytes: usize) -> bool {
    /// From linux/mman.h; older than its entry in the libc crate.
    const MADV_GUARD_INSTALL: libc::c_int = 102;
    // SAFETY: the caller vouches for the pages.
    if unsafe { libc::madvise(start.as_ptr().cast(), size_bytes, MADV_GUARD_INSTALL) } == 0 {
        return true;
    }
    // SAFETY: the caller vouches for the pages.
    if unsafe { libc::mprotect(start.as_ptr().cast(), size_bytes, libc::PROT_NONE) } != 0 {
        return false;
    }
    // SAFETY: as above. What it cannot give back stays, unreadable.
    let _ = unsafe { discard(start, size_bytes) };
    true
}

/// Brings pages into memory and keeps them there: they are never swapped out. Says why where it could not; then none of
/// them is locked.
///
/// # Safety
/// - `start` and `size_bytes` name whole pages from [`map`].
#[cfg(not(miri))]
pub unsafe fn lock(start: NonNull<u8>, size_bytes: usize) -> std::io::Result<()> {
    // SAFETY: the caller vouches for the pages; no contents change.
    match unsafe { libc::mlock(start.as_ptr().cast(), size_bytes) } {
        0 => Ok(()),
        _ => {
            let error = std::io::Error::last_os_error();
            // Where memory ran short half-way, some are.
            // SAFETY: as above.
            unsafe { unlock(start, size_bytes) };
            Err(error)
        }
    }
}

/// Takes back a [`lock`].
///
/// # Safety
/// - `start` and `size_bytes` name whole pages from [`map`].
#[cfg(not(miri))]
pub unsafe fn unlock(start: NonNull<u8>, size_bytes: usize) {
    // SAFETY: the caller vouches for the pages; no contents change.
    let _ = unsafe { libc::munlock(start.as_ptr().cast(), size_bytes) };
}

/// Asks for huge pages behind a mapping. A hint: where the system has none, ordinary pages do.
///
/// # Safety
/// - `start` and `size_bytes` name whole pages from [`map`].
pub unsafe fn prefer_huge(start: NonNull<u8>, size_bytes: usize) {
    #[cfg(not(miri))]
    // SAFETY: the caller vouches for the pages; the hint changes no contents.
    let _ = unsafe { libc::madvise(start.as_ptr().cast(), size_bytes, libc::MADV_HUGEPAGE) };
    #[cfg(miri)]
    let _ = (start, size_bytes);
}

/// Miri knows no munmap of a part and no madvise: there pages are heap blocks, so that it can follow the pools.
#[cfg(miri)]
mod under_miri {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::ptr::NonNull;

    const ALIGN: usize = 4 << 20;

    /// See the other `map`.
    pub fn map(size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        assert!(align <= ALIGN);
        // What no machine has fails in a system; Miri would try.
        let layout = Layout::from_size_align(size_bytes, ALIGN).ok().filter(|layout| layout.size() < 1 << 32)?;
        // SAFETY: the size is not zero.
        NonNull::new(unsafe { alloc_zeroed(layout) })
    }

    /// See the other `unmap`.
    ///
    /// # Safety
    /// - as there.
    pub unsafe fn unmap(start: NonNull<u8>, size_bytes: usize) {
        let Ok(layout) = Layout::from_size_align(size_bytes, ALIGN) else { return };
        // SAFETY: a whole mapping of `map`, says the caller.
        unsafe { dealloc(start.as_ptr(), layout) }
    }

    /// See the other `discard`.
    ///
    /// # Safety
    /// - as there.
    pub unsafe fn discard(start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: the caller vouches for the pages.
        unsafe { start.write_bytes(0, size_bytes) };
        true
    }

    /// See the other `guard`; Miri itself notices who goes where nothing is.
    ///
    /// # Safety
    /// - as there.
    #[must_use]
    pub unsafe fn guard(_start: NonNull<u8>, _size_bytes: usize) -> bool {
        true
    }

    /// See the other `lock`.
    ///
    /// # Safety
    /// - as there.
    pub unsafe fn lock(_start: NonNull<u8>, _size_bytes: usize) -> std::io::Result<()> {
        Ok(())
    }

    /// See the other `unlock`.
    ///
    /// # Safety
    /// - as there.
    pub unsafe fn unlock(_start: NonNull<u8>, _size_bytes: usize) {}
}
#[cfg(miri)]
pub use under_miri::{discard, guard, lock, map, unlock, unmap};
