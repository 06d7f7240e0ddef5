//! The system's pages: private anonymous mappings, which are zero when new.
//!
//! Nothing here uses the C heap. A hint like MADV_HUGEPAGE on a mapping of its own does not stay on memory that others
//! get later, as it does on pages of a heap (NumPy issue 31590).
#![allow(unsafe_code, reason = "the only door to mmap")]

use crate::error::Error;
use crate::os;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The size of a huge page in bytes, on x86-64 and on aarch64 with 4 KiB pages.
pub const HUGE_PAGE: usize = 2 << 20;

/// The system's page size in bytes.
#[must_use]
pub fn page_bytes() -> usize {
    static KNOWN: AtomicUsize = AtomicUsize::new(0);
    // Relaxed: every thread finds the same value.
    match KNOWN.load(Ordering::Relaxed) {
        0 => {
            let page = os::page_bytes();
            KNOWN.store(page, Ordering::Relaxed);
            page
        }
        page => page,
    }
}

/// How much memory the machine has, in bytes; 0 if the system does not say.
#[must_use]
pub fn physical_bytes() -> usize {
    if cfg!(miri) {
        return 1 << 30; // Miri does not say
    }
    static KNOWN: AtomicUsize = AtomicUsize::new(0);
    // Relaxed: every thread finds the same value.
    match KNOWN.load(Ordering::Relaxed) {
        0 => {
            let bytes = os::physical_bytes();
            KNOWN.store(bytes, Ordering::Relaxed);
            bytes
        }
        bytes => bytes,
    }
}

/// Maps zero pages for `size_bytes`, the last one whole, at a multiple of `align`. A page takes memory when it is first
/// touched.
///
/// # Errors
/// [`Error::BadAlignment`] unless `align` is a power of two, from the page size on; [`Error::BadOption`] for
/// zero bytes; [`Error::OutOfMemory`] if the system has no such pages.
pub fn map(size_bytes: usize, align: usize) -> Result<NonNull<u8>, Error> {
    let page = page_bytes();
    if !align.is_power_of_two() || align < page {
        return Err(Error::BadAlignment { align, min: page, max: 1 << (usize::BITS - 2) });
    }
    if size_bytes == 0 {
        return Err(Error::BadOption { option: "size_bytes", value: "0".into(), expected: "at least one byte" });
    }
    let mapped = size_bytes.checked_next_multiple_of(page).and_then(|whole_bytes| mapped(whole_bytes, align));
    mapped.ok_or(Error::OutOfMemory { handler: "the system's pages".into(), requested_bytes: size_bytes })
}

/// Whether what is mapped takes no memory before it is touched. It does where the process locks all that it maps
/// (`mlockall(MCL_FUTURE)`), which may change at any time. Where the system does not say, it is taken to be so.
pub(crate) fn are_mapped_lazily() -> bool {
    if cfg!(miri) {
        return true; // which cannot be asked there
    }
    let Ok(probe) = map(page_bytes(), page_bytes()) else { return true };
    let resident_bytes = os::resident_within(probe.addr().get(), page_bytes());
    // SAFETY: the mapping that was just made.
    unsafe { unmap(probe, page_bytes()) };
    resident_bytes.is_none_or(|bytes| bytes == 0)
}

/// Moves what is in a block to another one by parts, and returns the memory behind each part of the old one that was
/// moved to the system.
///
/// # Safety
/// - both have so many bytes and do not overlap; `from` is the start of a page from [`map`]; nobody else has them, and
///   nobody needs what is in the old one afterwards.
pub(crate) unsafe fn relocate(to: NonNull<u8>, from: NonNull<u8>, size_bytes: usize) {
    const PART: usize = 2 << 20; // a multiple of every system's pages
    for at in (0..size_bytes).step_by(PART) {
        let bytes = PART.min(size_bytes - at);
        // SAFETY: both have these bytes and do not overlap (this function's contract).
        unsafe { to.add(at).copy_from_nonoverlapping(from.add(at), bytes) };
        let pages = bytes / page_bytes() * page_bytes();
        if pages > 0 {
            // SAFETY: whole pages of the old block, since it starts with one and so does each part; what they had is in
            // the new one. Where the system refuses, they stay as they are.
            let _ = unsafe { discard(from.add(at), pages) };
        }
    }
}

#[cfg(not(miri))]
fn mapped(size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
    if align > page_bytes() { os::map_aligned(size_bytes, align) } else { os::map(size_bytes) }
}

/// Unmaps a mapping, or, except on Windows, some pages of one.
///
/// # Safety
/// - `start` and `size_bytes` name whole pages from [`map`] that nobody uses any more; on Windows all of one mapping.
#[cfg(not(miri))]
pub unsafe fn unmap(start: NonNull<u8>, size_bytes: usize) {
    // SAFETY: whole pages of `map` that nobody uses (this function's contract).
    unsafe { os::unmap(start, size_bytes) }
}

/// Returns the memory behind pages to the system and keeps their addresses. They are zero when touched again. Returns
/// whether it could.
///
/// # Safety
/// - `start` and `size_bytes` name whole pages from [`map`] whose contents nobody needs any more.
#[cfg(not(miri))]
pub unsafe fn discard(start: NonNull<u8>, size_bytes: usize) -> bool {
    // SAFETY: whole pages of `map` whose contents nobody needs (this function's contract).
    unsafe { os::discard(start, size_bytes) }
}

/// Makes pages inaccessible and returns their memory to the system: an access is a SIGSEGV (EFAULT in a system call)
/// until they are unmapped. Returns whether it could.
///
/// From Linux 6.13 on this only marks the pages (MADV_GUARD_INSTALL), and any number of them may be in one mapping.
/// Before, each run of such pages is a mapping of its own, of which a process may have 65530 (`vm.max_map_count`).
///
/// # Safety
/// - `start` and `size_bytes` name whole pages from [`map`] whose contents nobody needs any more.
#[cfg(not(miri))]
#[must_use]
pub unsafe fn guard(start: NonNull<u8>, size_bytes: usize) -> bool {
    // SAFETY: whole pages of `map` whose contents nobody needs (this function's contract).
    unsafe { os::forbid(start, size_bytes) }
}

/// Brings pages into memory and locks them there, so that they are never swapped out.
///
/// # Errors
/// The system's error, if it could not; then none of them is locked.
///
/// # Safety
/// - `start` and `size_bytes` name whole pages from [`map`].
#[cfg(not(miri))]
pub unsafe fn lock(start: NonNull<u8>, size_bytes: usize) -> std::io::Result<()> {
    // SAFETY: whole pages of `map` (this function's contract); no contents change.
    unsafe { os::lock(start, size_bytes) }.inspect_err(|_| {
        // If memory ran out half-way, some pages are locked.
        // SAFETY: the same whole pages of `map` (this function's contract).
        unsafe { unlock(start, size_bytes) };
    })
}

/// Undoes a [`lock`].
///
/// # Safety
/// - `start` and `size_bytes` name whole pages from [`map`].
#[cfg(not(miri))]
pub unsafe fn unlock(start: NonNull<u8>, size_bytes: usize) {
    // SAFETY: whole pages of `map` (this function's contract); no contents change.
    unsafe { os::unlock(start, size_bytes) };
}

/// Asks for huge pages behind memory. A hint: if the system has none, it uses ordinary pages.
///
/// # Safety
/// - `start` is where a page begins.
/// - all pages of the next `size_bytes` are mapped: by [`map`], or for a block of the C heap. The last one may be in
///   part somebody else's.
pub unsafe fn prefer_huge(start: NonNull<u8>, size_bytes: usize) {
    #[cfg(not(miri))]
    // SAFETY: mapped pages (this function's contract); the hint changes no contents.
    unsafe {
        os::prefer_huge(start, size_bytes);
    }
    #[cfg(miri)]
    let _ = (start, size_bytes);
}

/// Miri supports neither madvise nor munmap of a part of a mapping. There pages are heap blocks, so that it can check
/// pools.
#[cfg(miri)]
mod under_miri {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::ptr::NonNull;

    const ALIGN: usize = 4 << 20;

    /// See the other `mapped`.
    pub(super) fn mapped(size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        assert!(align <= ALIGN);
        // A real system refuses more than it has; Miri would try.
        let layout = Layout::from_size_align(size_bytes, ALIGN).ok().filter(|layout| layout.size() < 1 << 32)?;
        // SAFETY: the size is not zero: callers ask for at least a page.
        NonNull::new(unsafe { alloc_zeroed(layout) })
    }

    /// See the other `unmap`.
    ///
    /// # Safety
    /// - as for that one.
    pub unsafe fn unmap(start: NonNull<u8>, size_bytes: usize) {
        let Ok(layout) = Layout::from_size_align(size_bytes, ALIGN) else { return };
        // SAFETY: `map` allocated it with this layout, and nobody uses it (this function's contract).
        unsafe { dealloc(start.as_ptr(), layout) }
    }

    /// See the other `discard`.
    ///
    /// # Safety
    /// - as for that one.
    pub unsafe fn discard(start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: pages of `map` whose contents nobody needs (this function's contract).
        unsafe { start.write_bytes(0, size_bytes) };
        true
    }

    /// See the other `guard`. Does nothing: Miri itself finds accesses outside of blocks.
    ///
    /// # Safety
    /// - as for that one.
    #[must_use]
    pub unsafe fn guard(_start: NonNull<u8>, _size_bytes: usize) -> bool {
        true
    }

    /// See the other `lock`.
    ///
    /// # Safety
    /// - as for that one.
    pub unsafe fn lock(_start: NonNull<u8>, _size_bytes: usize) -> std::io::Result<()> {
        Ok(())
    }

    /// See the other `unlock`.
    ///
    /// # Safety
    /// - as for that one.
    pub unsafe fn unlock(_start: NonNull<u8>, _size_bytes: usize) {}
}
#[cfg(miri)]
use under_miri::mapped;
#[cfg(miri)]
pub use under_miri::{discard, guard, lock, unlock, unmap};
