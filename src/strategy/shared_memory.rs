//! `SharedMemory`: each block in a file of memory of its own, which another process can map without a copy.
//!
//! The records stand apart, for all of the process together: the block is found by any address inside of it, so a view
//! of an array leads to its descriptor and offset.

use super::Strategy;
use super::ledger::ProcessLedger;
use crate::source::{Shared, grow_shared, map_shared};
use crate::trace;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::NonNull;

/// Blocks that can be handed to another process: [`locate`](SharedMemory::locate) tells the descriptor, the other side
/// maps it (received over a Unix socket, inherited, or opened in `/proc/PID/fd`).
///
/// Each block is a `memfd` of its own, whole pages of it: whoever gets a descriptor sees this block and no other. It
/// cannot be shortened (F_SEAL_SHRINK), so nobody can take pages away from under the others. Blocks start at a page.
///
/// The cost: five system calls for each block (some 10 microseconds), at least a page of memory, and a descriptor while
/// it lives: with `ulimit -n` at 1024 there is room for about a thousand blocks. Past it allocations fail, and a `tracing`
/// event says why. For a few large arrays, not for all of a program.
///
/// Dangers: after `fork` parent and child write to the *same* memory, other than with every other strategy; each may
/// release its own mapping. Memory is taken when it is touched: where the machine has none left then, the process is
/// ended. A [`resize`](Strategy::resize) may move a block to another descriptor (when it shrinks to less than half, or in
/// a child of `fork`); ask again after it.
#[derive(Debug, Clone, Copy, Default)]
pub struct SharedMemory;

/// Where another process finds a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharedBlock {
    /// The descriptor in this process. It is the block's: open while that lives, closed with it. Duplicate it to keep it.
    pub descriptor: RawFd,
    /// How far behind the block's start (the file's) the address lies.
    pub offset_bytes: usize,
    /// How many bytes the block has, from the file's start; the file is as many whole pages.
    pub size_bytes: usize,
}

#[derive(Debug)]
struct Record {
    shared: Shared,
    size_bytes: usize,
    /// The process that made it: a child of `fork` must not lengthen what its parent may lengthen too.
    made_in: u32,
}

// SAFETY: a mapping and its descriptor, which the record owns alone in this process.
unsafe impl Send for Record {}

static BLOCKS: ProcessLedger<Record> = ProcessLedger::new();

impl SharedMemory {
    /// Where another process finds what lies at an address: anywhere inside of a live block of any `SharedMemory` of
    /// this process. Nothing for other addresses.
    #[must_use]
    pub fn locate(address: usize) -> Option<SharedBlock> {
        BLOCKS.if_made()?.near(address, |start, record| {
            let offset_bytes = address.checked_sub(start).filter(|&offset| offset < record.size_bytes)?;
            let descriptor = record.shared.descriptor.as_raw_fd();
            Some(SharedBlock { descriptor, offset_bytes, size_bytes: record.size_bytes })
        })
    }
}

fn make(size_bytes: usize) -> Option<NonNull<u8>> {
    let shared = match map_shared(size_bytes) {
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

// SAFETY: each block is the start of a mapping of its own, page-aligned, zero when fresh; it is unmapped when its record
// is dropped, which is when it was released or moved.
unsafe impl Strategy for SharedMemory {
    /// Any system's page is at least that.
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
        let needed = new_size_bytes.checked_next_multiple_of(page)?;
        let ledger = BLOCKS.get();
        // Out of the ledger while it changes, so that nobody is told of what is not there any more.
        let Some(mut record) = ledger.remove(block) else {
            unknown("resize", block);
            return None;
        };
        let mapped = record.shared.mapped_bytes;
        let stays = needed <= mapped && needed >= mapped / 2;
        let grows = needed > mapped && record.made_in == std::process::id();
        // SAFETY: mapped, and the caller uses the new address after success.
        if stays || (grows && unsafe { grow_shared(&mut record.shared, needed) }.is_ok()) {
            let start = record.shared.start;
            record.size_bytes = new_size_bytes;
            ledger.insert(start, record);
            return Some(start);
        }
        let moved = make(new_size_bytes);
        if let Some(moved) = moved {
            // SAFETY: both are mapped and disjoint; each has the lesser of the two sizes.
            unsafe { moved.copy_from_nonoverlapping(block, record.size_bytes.min(new_size_bytes)) };
        } else {
            ledger.insert(block, record); // as it was: a failed `grow_shared` changed nothing here
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
    use crate::strategy::{Strategy, conformance};

    #[test]
    fn shared_memory_keeps_the_strategy_contract() {
        conformance::check(SharedMemory);
    }

    #[test]
    fn a_block_is_located_by_every_address_inside_of_it() {
        let block = SharedMemory.allocate(10_000).expect("memory");
        let start = block.addr().get();
        let whole = SharedMemory::locate(start).expect("a live block");
        assert_eq!((whole.offset_bytes, whole.size_bytes), (0, 10_000));
        for offset in [1, 4096, 9999] {
            let inside = SharedMemory::locate(start + offset).expect("inside");
            assert_eq!((inside.descriptor, inside.offset_bytes), (whole.descriptor, offset));
        }
        assert_eq!(SharedMemory::locate(start + 10_000), None);
        assert_eq!(SharedMemory::locate(&raw const start as usize), None, "the stack is not shared");
        // SAFETY: live.
        unsafe { SharedMemory.release(block) };
        assert_eq!(SharedMemory::locate(start).map(|found| found.descriptor == whole.descriptor), None);
    }

    #[test]
    fn growing_keeps_the_descriptor_and_shrinking_far_gives_memory_back() {
        let block = SharedMemory.allocate(5000).expect("memory");
        let descriptor = |block: std::ptr::NonNull<u8>| SharedMemory::locate(block.addr().get()).expect("live");
        let first = descriptor(block);
        // SAFETY: live; here and below the newest pointer is used.
        let block = unsafe { SharedMemory.resize(block, 1 << 20) }.expect("memory");
        assert_eq!((descriptor(block).descriptor, descriptor(block).size_bytes), (first.descriptor, 1 << 20));
        // SAFETY: as above.
        let block = unsafe { SharedMemory.resize(block, (1 << 20) - 100) }.expect("memory");
        assert_eq!(descriptor(block).size_bytes, (1 << 20) - 100);
        // SAFETY: as above.
        let block = unsafe { SharedMemory.resize(block, 100) }.expect("memory");
        let file = descriptor(block).descriptor;
        // SAFETY: an all-zero stat is a place for one.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: a live descriptor, and a place for the answer.
        assert_eq!(unsafe { libc::fstat(file, &raw mut stat) }, 0);
        assert_eq!(stat.st_size, 4096, "a file of its own, one page");
        // SAFETY: live.
        unsafe { SharedMemory.release(block) };
    }

    #[test]
    fn nobody_can_shorten_the_file_under_the_block() {
        let block = SharedMemory.allocate(10_000).expect("memory");
        let file = SharedMemory::locate(block.addr().get()).expect("live").descriptor;
        // SAFETY: a live descriptor.
        assert_eq!(unsafe { libc::ftruncate(file, 0) }, -1);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EPERM));
        // SAFETY: live.
        unsafe { SharedMemory.release(block) };
    }

    #[test]
    fn what_is_no_live_block_is_left_alone() {
        let block = SharedMemory.allocate(100).expect("memory");
        // SAFETY: inside of the block.
        let inside = unsafe { block.add(8) };
        // SAFETY: no block's start: looked up and left alone.
        unsafe { SharedMemory.release(inside) };
        // SAFETY: as above.
        assert!(unsafe { SharedMemory.resize(inside, 10) }.is_none());
        // SAFETY: live still.
        unsafe { block.write_bytes(1, 100) };
        // SAFETY: live.
        unsafe { SharedMemory.release(block) };
    }
}
