//! A program whose global allocator is a pool: what the pool itself allocates comes back to it, in the middle of its
//! work.
#![cfg(not(miri))]
#![allow(unsafe_code, reason = "a global allocator; fork")]

use ctxalloc::strategy::{Arena, Pool, Strategy};
use ctxalloc::{Settings, configure};
use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

/// The pool, once there is one, and the C heap before, and for what is aligned to more than a pool does. The first
/// bytes of each block say whose it is.
struct Global;

static POOL: OnceLock<Pool> = OnceLock::new();
const HEAD: usize = 64;

// SAFETY: blocks of a pool or of the C heap, with room for `HEAD` bytes more, which no block is aligned beyond.
unsafe impl GlobalAlloc for Global {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let inner = Layout::from_size_align(layout.size() + HEAD, HEAD).expect("small");
        if layout.align() > HEAD {
            // SAFETY: the layout has a size above zero (`GlobalAlloc`'s contract).
            return unsafe { System.alloc(layout) };
        }
        let pool = POOL.get(); // asked once: another thread may be setting it
        let block = match pool {
            Some(pool) => pool.allocate(inner.size()).map_or(std::ptr::null_mut(), NonNull::as_ptr),
            // SAFETY: not of size zero.
            None => unsafe { System.alloc(inner) },
        };
        if block.is_null() {
            return block;
        }
        // SAFETY: a new block with room for it.
        unsafe { block.write(u8::from(pool.is_some())) };
        // SAFETY: inside of the block.
        unsafe { block.add(HEAD) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if layout.align() > HEAD {
            // SAFETY: `alloc` got blocks of this alignment from System, with this layout.
            return unsafe { System.dealloc(block, layout) };
        }
        // SAFETY: made by `alloc`.
        let block = unsafe { block.sub(HEAD) };
        // SAFETY: written by `alloc`.
        let is_pools = unsafe { block.read() } == 1;
        match (POOL.get(), NonNull::new(block)) {
            // SAFETY: made by the pool, and given up by the caller.
            (Some(pool), Some(block)) if is_pools => unsafe { pool.release(block) },
            // SAFETY: made by the C heap with this layout.
            _ => unsafe {
                System.dealloc(block, Layout::from_size_align(layout.size() + HEAD, HEAD).expect("small"));
            },
        }
    }
}

#[global_allocator]
static GLOBAL: Global = Global;

#[test]
fn a_pool_may_be_the_global_allocator() {
    // SAFETY: sets a timer of this process, whose signal nobody handles: it ends a program that hangs.
    unsafe { libc::alarm(60) };
    let mut settings = Settings::default();
    settings.decay = Some(Duration::from_millis(1)); // memory goes back all the while
    configure(settings).expect("nothing was used so far");
    let pool = Pool::new();
    assert!(POOL.set(pool).is_ok());
    let work = |number: usize| {
        for round in 0..200 {
            // Lists, trees and caches of pools grow while they are at work.
            let mut kept: Vec<Vec<u8>> = (0..200).map(|size| vec![1; size * 50 + round]).collect();
            kept.push(vec![1; (1 + number) * 300_000]);
            let own = Pool::new();
            let arena = Arena::over(&own);
            let block = arena.allocate(1000).expect("memory");
            // SAFETY: live, from this arena.
            unsafe { arena.release(block) };
        }
    };
    thread::scope(|threads| {
        for number in 0..3 {
            threads.spawn(move || work(number));
        }
        for _ in 0..20 {
            // SAFETY: the child allocates, which works after fork, and ends.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                // SAFETY: a timer of the child.
                unsafe { libc::alarm(20) };
                work(0);
                // SAFETY: ends the child.
                unsafe { libc::_exit(0) };
            }
            let mut status = -1;
            // SAFETY: our child, and a place for its status.
            assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
            assert_eq!(status, 0, "a child hung or crashed");
        }
    });
    ctxalloc::trim();
}
