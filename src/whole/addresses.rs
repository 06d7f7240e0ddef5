//! The addresses of Arrow's pools: one for each request that uses Arrow, never used for another one.
//!
//! Whoever was given a pool may use it for ever: a file that stays open, a static in Arrow. So no address is ever
//! given up, and that an object of 16 bytes stays for each request would be a leak. But all of these objects are equal:
//! they are one file of memory, mapped again and again. The number of a pool (a request's ticket; 0 is nobody's) says
//! where it is, and a table has the request's handler until the request can be reached no more.

use super::shared::{handler_of, word_of};
use crate::handler::Handler;
use crate::sync::{ForkLock, HeldAcrossFork, Locked, held_across_fork, is_forking};
use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{null_mut, with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// An object: its table of functions, and the word behind that.
const OBJECT: usize = 16;
/// How many objects the file has, all of them equal.
const IN_FILE: usize = 1 << 16;
/// How often it is mapped at most: the system allows some 65,000 mappings.
const MAX_FILES: usize = 1 << 14;
const FILE_BYTES: usize = IN_FILE * OBJECT;
const WORD_BYTES: usize = size_of::<AtomicU64>();

pub(super) struct Addresses {
    /// Where the pool with the number 0 is.
    base: usize,
    /// The handlers, as words; 0: nobody's.
    words: usize,
    file: OwnedFd,
    next: AtomicU32,
    mapped: Arc<Mapped>,
    /// How many numbers of each file are not used any more.
    given_back: Box<[AtomicU32]>,
}

/// How often the file is mapped.
struct Mapped(Locked<usize>);

impl HeldAcrossFork for Mapped {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.0.lock());
    }
}

/// Maps addresses without memory that may be written to, or (`PROT_NONE`) only reserves them.
fn reserve(size_bytes: usize, protection: i32) -> Option<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the system's choice.
    let start = unsafe { libc::mmap(null_mut(), size_bytes, protection, flags, -1, 0) };
    (start != libc::MAP_FAILED).then(|| start.expose_provenance())
}

/// A file of memory that is full of this object.
fn file_of(object: [usize; 2]) -> Option<OwnedFd> {
    // SAFETY: a static C string, and a flag by value.
    let fd = unsafe { libc::memfd_create(c"ctxalloc-arrow".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return None;
    }
    // SAFETY: a new descriptor that nobody else has.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    let content = vec![object; IN_FILE];
    // SAFETY: a live descriptor, and `FILE_BYTES` bytes that are there.
    let written = unsafe { libc::pwrite(file.as_raw_fd(), content.as_ptr().cast(), FILE_BYTES, 0) };
    (usize::try_from(written) == Ok(FILE_BYTES)).then_some(file)
}

impl Addresses {
    /// Addresses of objects that are these two words. `None`: the system does not give what it takes.
    pub(super) fn of(object: [usize; 2]) -> Option<Self> {
        let base = reserve(FILE_BYTES * MAX_FILES, libc::PROT_NONE)?;
        let words = reserve(IN_FILE * MAX_FILES * WORD_BYTES, libc::PROT_READ | libc::PROT_WRITE)?;
        let made = Self {
            base,
            words,
            file: file_of(object)?,
            next: AtomicU32::new(1),
            mapped: held_across_fork(Mapped(Locked::new(0))),
            given_back: (0..MAX_FILES).map(|_| AtomicU32::new(0)).collect(),
        };
        made.map_up_to(0).then_some(made)
    }

    /// The pool with this number, which was taken, or is 0.
    pub(super) fn at(&self, number: u32) -> *mut c_void {
        with_exposed_provenance_mut(self.base + number as usize * OBJECT)
    }

    /// The request of the pool that is here; `None`: nobody's, or it can be reached no more.
    pub(super) fn handler(&self, pool: *const c_void) -> Option<Handler> {
        let number = pool.addr().wrapping_sub(self.base) / OBJECT;
        // Acquire pairs with the Release in `take`.
        (number < IN_FILE * MAX_FILES).then(|| self.word(number).load(Ordering::Acquire)).and_then(handler_of)
    }

    fn word(&self, number: usize) -> &AtomicU64 {
        debug_assert!(number < IN_FILE * MAX_FILES);
        // SAFETY: a word of the table, which has so many, is never unmapped, and is zero at first.
        unsafe { &*with_exposed_provenance::<AtomicU64>(self.words + number * WORD_BYTES) }
    }

    /// A number for a request. `None`: all have been used, or this thread forks.
    pub(super) fn take(&self, handler: Handler) -> Option<u32> {
        if is_forking() || self.next.load(Ordering::Relaxed) as usize >= IN_FILE * MAX_FILES {
            return None;
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let at = number as usize;
        if at >= IN_FILE * MAX_FILES || !self.map_up_to(at / IN_FILE) {
            return None;
        }
        // Release pairs with the Acquire in `handler`.
        self.word(at).store(word_of(handler), Ordering::Release);
        Some(number)
    }

    /// The pool stays where it is, and is nobody's from now on.
    pub(super) fn give_back(&self, number: u32) {
        let at = number as usize;
        self.word(at).store(0, Ordering::Release);
        let (file, bytes) = (at / IN_FILE, IN_FILE * WORD_BYTES);
        // AcqRel: whoever is last sees that all others have written their zeros.
        if self.given_back[file].fetch_add(1, Ordering::AcqRel) as usize + 1 == IN_FILE {
            // SAFETY: this file's words, which are all zero and stay so: their memory goes back, and they read as zero.
            unsafe {
                libc::madvise(with_exposed_provenance_mut(self.words + file * bytes), bytes, libc::MADV_DONTNEED)
            };
        }
    }

    /// Maps the file this often, and once more. False: the system refuses.
    fn map_up_to(&self, file: usize) -> bool {
        self.mapped.0.with(|mapped| {
            while *mapped <= file {
                let place = with_exposed_provenance_mut(self.base + *mapped * FILE_BYTES);
                let (flags, fd) = (libc::MAP_SHARED | libc::MAP_FIXED, self.file.as_raw_fd());
                // SAFETY: a part of the reserved addresses that nobody was given yet.
                let start = unsafe { libc::mmap(place, FILE_BYTES, libc::PROT_READ, flags, fd, 0) };
                if start == libc::MAP_FAILED {
                    return false;
                }
                *mapped += 1;
            }
            true
        })
    }
}
