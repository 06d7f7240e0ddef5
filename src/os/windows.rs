//! What Windows does. Type-checked only (`make check-platforms`); docs/decisions/0027 says what is missing.

use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::windows::fs::FileExt;
use std::ptr::{NonNull, null};
use windows_sys::Win32::System::Memory::{
    MEM_COMMIT, MEM_RELEASE, MEM_RESERVE, MEMORY_BASIC_INFORMATION, PAGE_EXECUTE_READWRITE, PAGE_NOACCESS,
    PAGE_READWRITE, PAGE_WRITECOPY, VirtualAlloc, VirtualFree, VirtualProtect, VirtualQuery,
};
use windows_sys::Win32::System::SystemInformation::{
    GetSystemInfo, GetTickCount64, GlobalMemoryStatusEx, MEMORYSTATUSEX, SYSTEM_INFO,
};
use windows_sys::Win32::System::Threading::GetCurrentThreadId;

/// The size of a page in bytes.
pub(crate) fn page_bytes() -> usize {
    // SAFETY: a plain C struct for which zeros are valid; the call fills it in.
    let info = unsafe {
        let mut info: SYSTEM_INFO = std::mem::zeroed();
        GetSystemInfo(&raw mut info);
        info
    };
    info.dwPageSize as usize
}

/// How much memory the machine has, in bytes; 0 if the system does not say.
pub(crate) fn physical_bytes() -> usize {
    // SAFETY: a plain C struct for which zeros are valid, with its own size in it, as the call wants it.
    let (succeeded, status) = unsafe {
        let mut status: MEMORYSTATUSEX = std::mem::zeroed();
        status.dwLength = size_of::<MEMORYSTATUSEX>() as u32;
        (GlobalMemoryStatusEx(&raw mut status), status)
    };
    if succeeded == 0 { 0 } else { status.ullTotalPhys.try_into().unwrap_or(usize::MAX) }
}

/// Maps private zero pages, which take memory when they are first touched. `None` if there are none.
pub(crate) fn map(size_bytes: usize) -> Option<NonNull<u8>> {
    map_at(null(), size_bytes)
}

fn map_at(place: *const c_void, size_bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: new pages at an address of the system's choice, or at `place` if nothing is there.
    NonNull::new(unsafe { VirtualAlloc(place, size_bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE) }.cast())
}

/// Maps private zero pages at a multiple of `align`, which is a power of two and no smaller than a page.
pub(crate) fn map_aligned(size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
    /// How often another thread may take the address range before this gives up.
    const RACES: usize = 16;
    let slack = size_bytes.checked_add(align)?;
    for _ in 0..RACES {
        // A part of a reservation cannot be released: find a range that is large enough, and reserve the aligned part
        // of it.
        // SAFETY: new pages at an address of the system's choice.
        let range = NonNull::new(unsafe { VirtualAlloc(null(), slack, MEM_RESERVE, PAGE_NOACCESS) }.cast::<u8>())?;
        let place = range.as_ptr().wrapping_add(crate::layout::padding(range.addr().get(), align));
        // SAFETY: the whole range, which nobody else has.
        unsafe { unmap(range, slack) };
        if let Some(start) = map_at(place.cast(), size_bytes) {
            return Some(start);
        }
    }
    None
}

/// Unmaps a mapping.
///
/// # Safety
/// - `start` is from [`map`] or [`map_aligned`], `size_bytes` is the size of the whole mapping, and nobody uses it any
///   more.
pub(crate) unsafe fn unmap(start: NonNull<u8>, _size_bytes: usize) {
    // SAFETY: a whole mapping that nobody uses (this function's contract).
    let _ = unsafe { VirtualFree(start.as_ptr().cast(), 0, MEM_RELEASE) };
}

/// Does nothing, and says so: no single call returns pages, keeps them usable and cannot fail half-way.
///
/// # Safety
/// - none.
pub(crate) unsafe fn discard(_start: NonNull<u8>, _size_bytes: usize) -> bool {
    false
}

/// Makes pages inaccessible. Their memory stays until they are unmapped. Returns whether it could.
///
/// # Safety
/// - `start` and `size_bytes` name whole pages from [`map`] whose contents nobody needs any more.
pub(crate) unsafe fn forbid(start: NonNull<u8>, size_bytes: usize) -> bool {
    let mut before = 0;
    // SAFETY: whole pages of `map` whose contents nobody needs (this function's contract).
    unsafe { VirtualProtect(start.as_ptr().cast(), size_bytes, PAGE_NOACCESS, &raw mut before) != 0 }
}

/// An error: pages are not locked here.
///
/// # Safety
/// - none.
pub(crate) unsafe fn lock(_start: NonNull<u8>, _size_bytes: usize) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Does nothing, as nothing is locked.
///
/// # Safety
/// - none.
pub(crate) unsafe fn unlock(_start: NonNull<u8>, _size_bytes: usize) {}

/// There is no such limit.
pub(crate) fn lock_limit_bytes() -> Option<usize> {
    None
}

/// Does nothing: large pages need a privilege, and are not a hint.
///
/// # Safety
/// - none.
pub(crate) unsafe fn prefer_huge(_start: NonNull<u8>, _size_bytes: usize) {}

/// The seconds and nanoseconds since an arbitrary moment, accurate to some 16 milliseconds. Cheap.
#[inline]
pub(crate) fn clock() -> (u64, u32) {
    // SAFETY: takes nothing and never fails.
    let milliseconds = unsafe { GetTickCount64() };
    (milliseconds / 1000, (milliseconds % 1000) as u32 * 1_000_000)
}

/// The running thread's number in the system.
pub(crate) fn thread_number() -> u32 {
    // SAFETY: takes nothing and never fails.
    unsafe { GetCurrentThreadId() }
}

/// No name.
pub(crate) fn thread_name() -> [u8; 16] {
    [0; 16]
}

/// True: nothing forks here.
pub(crate) fn at_fork(
    _before: Option<unsafe extern "C" fn()>,
    _in_parent: Option<unsafe extern "C" fn()>,
    _in_child: Option<unsafe extern "C" fn()>,
) -> bool {
    true
}

/// Writes zeros that are not optimised away, though nobody reads them.
///
/// # Safety
/// - `size_bytes` bytes from `start` on are writable, and nobody else uses them.
pub(crate) unsafe fn wipe(start: NonNull<u8>, size_bytes: usize) {
    for offset in 0..size_bytes {
        // SAFETY: one of the bytes that are ours to write (this function's contract).
        unsafe { start.add(offset).write_volatile(0) };
    }
}

/// Whether the byte at `address` can be written to.
///
/// # Safety
/// - there is memory at `address`.
pub(crate) unsafe fn can_write(address: *mut u8) -> bool {
    const WRITABLE: u32 = PAGE_READWRITE | PAGE_WRITECOPY | PAGE_EXECUTE_READWRITE;
    // SAFETY: a plain C struct for which zeros are valid, and its size.
    let (written, info) = unsafe {
        let mut info: MEMORY_BASIC_INFORMATION = std::mem::zeroed();
        (VirtualQuery(address.cast(), &raw mut info, size_of::<MEMORY_BASIC_INFORMATION>()), info)
    };
    written != 0 && info.State == MEM_COMMIT && info.Protect & WRITABLE != 0
}

/// Writes to standard error, without buffers. `None` if it could not.
pub(crate) fn print_error(bytes: &[u8]) -> Option<usize> {
    let length = bytes.len().try_into().unwrap_or(u32::MAX);
    // SAFETY: a live slice, and the C library's descriptor of standard error.
    let written = unsafe { libc::write(2, bytes.as_ptr().cast(), length) };
    usize::try_from(written).ok()
}

/// Files have their folder's rights here.
pub(crate) fn only_for_its_owner(options: &mut OpenOptions) -> &mut OpenOptions {
    options
}

/// No file is a FIFO here.
pub(crate) fn without_waiting(options: &mut OpenOptions) -> &mut OpenOptions {
    options
}

/// Reads what a file has from a place on, as much as the system gives at once.
pub(crate) fn read_at(file: &File, into: &mut [u8], offset: u64) -> io::Result<usize> {
    file.seek_read(into, offset)
}

/// An error: files are not mapped here.
pub(crate) fn map_file(_file: &File, _size_bytes: usize, _is_writable: bool) -> io::Result<NonNull<u8>> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Not known.
pub(crate) fn process_started(_pid: u32) -> Option<u64> {
    None
}

/// Not known.
pub(crate) fn used() -> Option<(std::time::Duration, u64)> {
    None
}

/// Not known.
pub(crate) fn resident_bytes() -> Option<usize> {
    None
}

/// Not known.
pub(crate) fn resident_within(_start: usize, _size_bytes: usize) -> Option<usize> {
    None
}
