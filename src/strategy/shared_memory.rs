//! `SharedMemory`: each block in a memory file (memfd) of its own, which another process can map without a copy.
//!
//! One ledger of the process has all records. It finds a block by any address inside, so the address of an array's view
//! leads to a descriptor and an offset.

use super::Strategy;
use super::ledger::ProcessLedger;
use crate::error::Error;
use crate::source::{Shared, can_share, grow_shared, map_shared};
use crate::trace;
use std::ffi::c_int;
use std::io;
use std::ptr::NonNull;

/// Blocks that another process can map: [`locate`](SharedMemory::locate) returns a block's descriptor, which the other
/// process receives over a Unix socket, inherits, or opens in `/proc/PID/fd`.
///
/// Each block is a `memfd` of its own and takes whole pages, so a descriptor gives access to this block and no other.
/// The file cannot be shortened (F_SEAL_SHRINK), so no process can take pages away from the others. Blocks start at a
/// page.
///
/// Each block costs five system calls (some 10 microseconds), at least a page of memory, and a descriptor while it is
/// alive: with `ulimit -n` at 1024 there is room for about a thousand blocks. Beyond that allocations fail, and a
/// `tracing` event says why. Use it for a few large arrays, not for a whole program.
///
/// Unlike with any other strategy, parent and child write to the *same* memory after `fork`; each may release its own
/// mapping. Memory is taken when it is first touched: if the machine has none left then, the kernel ends the process. A
/// [`resize`](Strategy::resize) may move a block to another descriptor (if it shrinks to less than half, or in a child
/// of `fork`), so locate it again afterwards.
#[derive(Debug, Clone, Copy, Default)]
#[allow(clippy::exhaustive_structs, reason = "its name is its value")]
pub struct SharedMemory;

/// Where a block is, for another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharedBlock {
    /// The descriptor in this process. It is closed when the block is released; duplicate it to keep it.
    pub descriptor: c_int,
    /// The distance in bytes from the start of the block, which is that of the file, to the address.
    pub offset_bytes: usize,
    /// The block's size in bytes, from the start of the file. The file is rounded up to whole pages.
    pub size_bytes: usize,
}

#[derive(Debug)]
struct Record {
    shared: Shared,
    size_bytes: usize,
    /// The process that made it. A child of `fork` must not lengthen a file that its parent may lengthen too.
    made_in: u32,
}

// SAFETY: the record alone owns the mapping and the descriptor in this process; neither is bound to a thread.
unsafe impl Send for Record {}

static BLOCKS: ProcessLedger<Record> = ProcessLedger::new();

impl SharedMemory {
    /// The strategy, if the system can have it: Linux. (The unit struct can be written anywhere; elsewhere it refuses
    /// every block.)
    ///
    /// # Errors
    /// [`Error::SystemRefused`] on other systems.
    pub fn new() -> Result<Self, Error> {
        can_share().map(|()| Self)
    }

    /// Finds the block that an address lies in: any address inside a live block of any `SharedMemory` of this process.
    /// `None` for other addresses.
    #[must_use]
    pub fn locate(address: usize) -> Option<SharedBlock> {
        BLOCKS.if_made()?.near(address, |start, record| {
            let offset_bytes = address.checked_sub(start).filter(|&offset| offset < record.size_bytes)?;
            let descriptor = record.shared.descriptor();
            Some(SharedBlock { descriptor, offset_bytes, size_bytes: record.size_bytes })
        })
    }
}

fn make(size_bytes: usize) -> Option<NonNull<u8>> {
    // No mapping is empty: zero bytes are a block like another one.
    let shared = match map_shared(size_bytes.max(1)) {
        Ok(shared) => shared,
        Err(error) => {
            refused(&error);
            return None;
        }
    };
    let start = shared.start;
    BLOCKS.get().insert(start, Record { shared, size_bytes, made_in: std::process::id() });
    Some(start)
}

#[cold]
fn refused(error: &io::Error) {
    let advice = match error.raw_os_error() {
        Some(libc::EMFILE) => {
            "each block needs a descriptor: raise the limit (`ulimit -n`), or make fewer and larger blocks"
        }
        Some(libc::ENFILE) => "each block needs a descriptor, and the machine has none left (fs.file-max)",
        Some(libc::EPERM | libc::ENOSYS) => "memfd_create is forbidden here (a container's seccomp profile?)",
        _ => "free something, or ask for less",
    };
    trace::system_refused("SharedMemory", error, advice);
}

// SAFETY: each block is the start of a mapping of its own, which is page-aligned and zero when new. It is unmapped when
// its record is dropped: after it was released or moved.
unsafe impl Strategy for SharedMemory {
    /// Blocks start at a page, and no system's page is smaller.
    fn alignment(&self) -> usize {
        4096
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        make(size_bytes)
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        make(size_bytes)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        let page = crate::source::pages::page_bytes();
        let needed = new_size_bytes.max(1).checked_next_multiple_of(page)?;
        let ledger = BLOCKS.get();
        // Removed while it changes, so that `locate` finds no block that has moved.
        let Some(mut record) = ledger.remove(block) else {
            unknown("resize", block);
            return None;
        };
        let mapped = record.shared.mapped_bytes;
        let stays = needed <= mapped && needed >= mapped / 2;
        let grows = needed > mapped && record.made_in == std::process::id();
        // SAFETY: the record's mapping is alive, and `needed` is a larger multiple of the page size. After success the
        // caller uses only the new address (this function's contract).
        if stays || (grows && unsafe { grow_shared(&mut record.shared, needed) }.is_ok()) {
            let start = record.shared.start;
            record.size_bytes = new_size_bytes;
            ledger.insert(start, record);
            return Some(start);
        }
        let moved = make(new_size_bytes);
        if let Some(moved) = moved {
            // SAFETY: two mappings, hence disjoint, each with at least the smaller of the two sizes.
            unsafe { moved.copy_from_nonoverlapping(block, record.size_bytes.min(new_size_bytes)) };
        } else {
            ledger.insert(block, record); // a failed `grow_shared` changed nothing
        }
        moved
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        if BLOCKS.get().remove(block).is_none() {
            unknown("free", block);
        }
    }
}

#[cold]
fn unknown(operation: &str, block: NonNull<u8>) {
    trace::misuse(&format!("SharedMemory: {operation} of {block:p}, where no live block starts; nothing was done"));
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::SharedMemory;
    use crate::strategy::live::Live;
    use crate::strategy::{Strategy, conformance};

    #[test]
    fn shared_memory_keeps_the_strategy_contract() {
        conformance::check(SharedMemory);
    }

    #[test]
    fn a_block_is_located_by_every_address_inside_of_it() {
        let block = Live::of(&SharedMemory, 10_000);
        let start = block.address();
        let whole = SharedMemory::locate(start).expect("a live block");
        assert_eq!((whole.offset_bytes, whole.size_bytes), (0, 10_000));
        for offset in [1, 4096, 9999] {
            let inside = SharedMemory::locate(start + offset).expect("inside");
            assert_eq!((inside.descriptor, inside.offset_bytes), (whole.descriptor, offset));
        }
        assert_eq!(SharedMemory::locate(start + 10_000), None);
        assert_eq!(SharedMemory::locate(&raw const start as usize), None, "the stack is not shared");
        block.release();
        assert_eq!(SharedMemory::locate(start).map(|found| found.descriptor == whole.descriptor), None);
    }

    #[test]
    fn growing_keeps_the_descriptor_and_shrinking_far_gives_memory_back() {
        let mut block = Live::of(&SharedMemory, 5000);
        let descriptor = |block: &Live<SharedMemory>| SharedMemory::locate(block.address()).expect("live");
        let first = descriptor(&block);
        assert!(block.resize(1 << 20));
        assert_eq!((descriptor(&block).descriptor, descriptor(&block).size_bytes), (first.descriptor, 1 << 20));
        assert!(block.resize((1 << 20) - 100));
        assert_eq!(descriptor(&block).size_bytes, (1 << 20) - 100);
        assert!(block.resize(100));
        let file = descriptor(&block).descriptor;
        // SAFETY: zeros are a valid stat, which fstat overwrites.
        let (status, stat) = unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            (libc::fstat(file, &raw mut stat), stat)
        };
        assert_eq!(status, 0);
        assert_eq!(stat.st_size, 4096, "a file of its own, one page");
        block.release();
    }

    #[test]
    fn nobody_can_shorten_the_file_under_the_block() {
        let block = Live::of(&SharedMemory, 10_000);
        let file = SharedMemory::locate(block.address()).expect("live").descriptor;
        // SAFETY: the descriptor is open while the block lives, and the kernel refuses.
        assert_eq!(unsafe { libc::ftruncate(file, 0) }, -1);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EPERM));
        block.release();
    }

    #[test]
    fn what_is_no_live_block_is_left_alone() {
        let mut block = Live::of(&SharedMemory, 100);
        // SAFETY: the eighth of a hundred bytes.
        let inside = unsafe { block.start().add(8) };
        // SAFETY: no block starts there: the strategy finds no record and leaves it alone.
        unsafe { SharedMemory.release(inside) };
        // SAFETY: no block starts there: the strategy finds no record and leaves it alone.
        assert!(unsafe { SharedMemory.resize(inside, 10) }.is_none());
        block.fill(1); // it is live still
        block.release();
    }
}
