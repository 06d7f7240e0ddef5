//! What blocks promise, through the C functions, as NumPy calls them: NULLs, zeros, wrong sizes, failures, panics.

use crate::support::errors::{error, refusal};
use crate::support::{marked, switched};
use ctxalloc::handler::abi::PyDataMemAllocator;
use ctxalloc::{Buffer, Error, Handler, handler};
use std::ffi::{CStr, c_void};
use std::mem::offset_of;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

/// The functions of a handler as C sees them, each call one line.
struct C(PyDataMemAllocator);

impl C {
    fn of(handler: Handler) -> Self {
        // SAFETY: the struct of a registered handler is never freed or moved.
        Self(unsafe { *handler.as_ptr() }.allocator)
    }

    fn malloc(&self, size: usize) -> *mut c_void {
        // SAFETY: its own context; any size.
        unsafe { self.0.malloc.expect("filled in")(self.0.ctx, size) }
    }

    fn calloc(&self, nelem: usize, elsize: usize) -> *mut c_void {
        // SAFETY: its own context; any sizes.
        unsafe { self.0.calloc.expect("filled in")(self.0.ctx, nelem, elsize) }
    }

    fn realloc(&self, block: *mut c_void, new_size: usize) -> *mut c_void {
        // SAFETY: its own context; the tests pass live blocks or NULL.
        unsafe { self.0.realloc.expect("filled in")(self.0.ctx, block, new_size) }
    }

    fn free(&self, block: *mut c_void, size: usize) {
        // SAFETY: its own context; the tests pass live blocks or NULL.
        unsafe { self.0.free.expect("filled in")(self.0.ctx, block, size) }
    }
}

fn bytes<'a>(block: *mut c_void, size: usize) -> &'a mut [u8] {
    assert!(!block.is_null());
    // SAFETY: the tests pass live blocks of that size, initialised or written before they are read.
    unsafe { std::slice::from_raw_parts_mut(block.cast(), size) }
}

fn built_ins() -> [Handler; 2] {
    ["system", "aligned64"].map(|name| handler(name).expect("built in"))
}

#[test]
fn the_struct_is_laid_out_as_numpy_reads_it() {
    use ctxalloc::handler::abi::PyDataMem_Handler as CStruct;
    assert_eq!(
        (offset_of!(CStruct, name), offset_of!(CStruct, version), offset_of!(CStruct, allocator)),
        (0, 127, 128)
    );
    for handler in built_ins() {
        let start = handler.as_ptr().cast::<u8>();
        // SAFETY: the name is NUL-terminated within 127 bytes.
        let name = unsafe { CStr::from_ptr(start.cast()) };
        assert_eq!(name.to_str(), Ok(&*handler.name()));
        // SAFETY: inside of the struct.
        let version = unsafe { start.add(127) };
        // SAFETY: the struct is immortal, and `version` points to a byte of it.
        assert_eq!(unsafe { version.read() }, 1);
    }
}

#[test]
fn zero_bytes_give_a_block_that_can_be_resized_and_freed() {
    for handler in built_ins() {
        let c = C::of(handler);
        for block in [c.malloc(0), c.calloc(0, 8), c.calloc(8, 0), c.realloc(null_mut(), 0)] {
            assert!(!block.is_null());
            let block = c.realloc(block, 0);
            assert!(!block.is_null(), "realloc to nothing does not free");
            bytes(block, 1)[0] = 1;
            c.free(block, 0);
        }
    }
}

#[test]
fn calloc_gives_zeros_and_refuses_a_product_that_overflows() {
    for handler in built_ins() {
        let c = C::of(handler);
        let block = c.calloc(33, 3);
        assert!(bytes(block, 99).iter().all(|&byte| byte == 0));
        c.free(block, 99);
        for (nelem, elsize) in [(usize::MAX, 2), (2, usize::MAX), (1 << 32, 1 << 32), (usize::MAX, usize::MAX)] {
            assert!(c.calloc(nelem, elsize).is_null(), "{nelem} * {elsize}");
        }
    }
}

#[test]
fn impossible_sizes_give_null_and_leave_the_block() {
    for handler in built_ins() {
        let c = C::of(handler);
        let block = c.malloc(4);
        bytes(block, 4).copy_from_slice(b"kept");
        for size in [isize::MAX as usize + 1, usize::MAX - 64, usize::MAX] {
            assert!(c.malloc(size).is_null());
            assert!(c.calloc(size, 1).is_null());
            assert!(c.realloc(block, size).is_null());
            assert_eq!(bytes(block, 4), b"kept");
        }
        c.free(block, 4);
    }
}

#[test]
fn realloc_of_null_allocates_and_free_of_null_does_nothing() {
    let (owner, strategy) = marked("null is welcome");
    let c = C::of(owner);
    let block = c.realloc(null_mut(), 100);
    bytes(block, 100).fill(7);
    assert_eq!(strategy.live_bytes(), 100);
    for size in [0, 1, usize::MAX] {
        c.free(null_mut(), size); // NumPy does so, with a size
    }
    assert_eq!(strategy.live_blocks(), 1);
    c.free(block, 100);
    assert_eq!(strategy.live_blocks(), 0);
}

#[test]
fn the_size_given_to_free_is_never_believed() {
    let (owner, strategy) = marked("free lies");
    for handler in [owner, built_ins()[0], built_ins()[1]] {
        let c = C::of(handler);
        for lie in [0, 1, 99, 101, 1 << 40, usize::MAX] {
            let block = c.malloc(100);
            bytes(block, 100).fill(1);
            c.free(block, lie);
        }
    }
    assert_eq!((strategy.live_blocks(), strategy.live_bytes(), strategy.made()), (0, 0, 6));
}

#[test]
fn the_tests_own_strategy_knows_a_block_that_is_not_its_own() {
    // What the rest of the suite relies on: `faults` does not stay at zero by itself.
    let ((one, owner), (other, stranger)) = (marked("the owner"), marked("a stranger"));
    let block = C::of(one).malloc(10);
    C::of(other).free(block, 10);
    assert!(C::of(other).realloc(block, 20).is_null());
    assert_eq!((owner.faults(), stranger.faults()), (0, 2));
    assert_eq!((owner.live_blocks(), stranger.live_blocks()), (1, 0));
    C::of(one).free(block, 10);
    assert_eq!(owner.live_blocks(), 0);
}

#[test]
fn a_failing_strategy_gives_null_and_an_error_with_the_numbers() {
    let (owner, strategy) = switched("refuses");
    let c = C::of(owner);
    let block = c.malloc(4);
    bytes(block, 4).copy_from_slice(b"kept");
    strategy.refuse(true);
    assert!(c.malloc(10).is_null() && c.calloc(10, 1).is_null() && c.realloc(block, 10).is_null());
    assert_eq!(refusal(owner.allocate(123)), error!(OutOfMemory { handler: "refuses", requested_bytes: 123 }));
    let text = owner.allocate_zeroed(123).expect_err("it refuses").to_string();
    assert!(text.contains("'refuses'") && text.contains("123 bytes"), "{text}");
    strategy.refuse(false);
    assert_eq!(bytes(block, 4), b"kept");
    c.free(block, 4);
    assert_eq!(strategy.live_blocks.load(Ordering::SeqCst), 0);
}

#[test]
fn a_panicking_strategy_gives_null_and_nothing_unwinds_through_c() {
    let (owner, strategy) = switched("panics");
    let c = C::of(owner);
    let block = c.malloc(4);
    bytes(block, 4).copy_from_slice(b"kept");
    strategy.panic(true);
    // Were one of them to unwind, `extern "C"` would abort the process: reaching the end is the proof.
    assert!(c.malloc(10).is_null());
    assert!(c.calloc(10, 1).is_null());
    assert!(c.realloc(null_mut(), 10).is_null());
    assert!(c.realloc(block, 10).is_null());
    assert!(matches!(owner.allocate(10), Err(Error::OutOfMemory { requested_bytes: 10, .. })));
    assert!(Buffer::zeroed_in(owner, 10).is_err());
    assert_eq!(bytes(block, 4), b"kept", "the block survived a resize that panicked");
    c.free(block, 4); // leaks it, as the strategy's contract says
    assert_eq!(strategy.calls.load(Ordering::SeqCst), 8);
    strategy.panic(false);
    c.free(block, 4); // still alive, since the panic came before anything was done
    assert_eq!(strategy.live_blocks.load(Ordering::SeqCst), 0);
}

#[test]
fn a_panic_payload_that_panics_when_it_is_dropped_does_no_harm() {
    use ctxalloc::strategy::Strategy;
    use std::ptr::NonNull;
    struct Grenade;
    impl Drop for Grenade {
        fn drop(&mut self) {
            std::panic::resume_unwind(Box::new(()));
        }
    }
    #[derive(Debug)]
    struct Throws;
    // SAFETY: never returns a block.
    unsafe impl Strategy for Throws {
        fn alignment(&self) -> usize {
            1
        }
        fn allocate(&self, _: usize) -> Option<NonNull<u8>> {
            std::panic::resume_unwind(Box::new(Grenade));
        }
        unsafe fn resize(&self, _: NonNull<u8>, _: usize) -> Option<NonNull<u8>> {
            None
        }
        unsafe fn release(&self, _: NonNull<u8>) {}
    }
    let owner = ctxalloc::register("throws", Throws).expect("a name of its own");
    assert!(C::of(owner).malloc(1).is_null());
}
