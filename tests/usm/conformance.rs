//! Strategies and handlers over USM, on a real SYCL runtime: `make test-usm` names dpctl's library in CTXALLOC_DPCTL
//! and the OpenCL runtime in OCL_ICD_FILENAMES. Without the feature `usm` there is nothing here to run.

#[path = "../rust/support/errors.rs"]
mod errors;

use ctxalloc::memory::DeviceBuffer;
use ctxalloc::source::{Queue, RowAxis, Runtime, UsmKind, UsmPages};
use ctxalloc::strategy::{Arena, Budget, Budgeted, Pool, PoolOptions, Strategy, Tracked, conformance};
use ctxalloc::{Buffer, ContextAlloc, Handler, handler::register_usm};
use errors::{error, refusal};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

#[allow(unsafe_code, reason = "names the library")]
fn runtime() -> &'static Runtime {
    let path = std::env::var_os("CTXALLOC_DPCTL").expect("CTXALLOC_DPCTL is dpctl's library: run `make test-usm`");
    // SAFETY: dpctl's, says who runs this.
    unsafe { Runtime::load(path.as_ref()) }.expect("dpctl's library")
}

/// One test at a time: what one freed is nobody's until it has looked.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn queue() -> Queue {
    Queue::open(runtime(), None).expect("a device: OCL_ICD_FILENAMES names intel-opencl-rt's libintelocl.so")
}

fn pool(kind: UsmKind) -> Pool<UsmPages> {
    Pool::over(UsmPages::new(&queue(), kind).expect("a device with such memory"), PoolOptions::default())
}

fn handler(kind: UsmKind) -> Handler {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let name = format!("usm {} {}", kind.name(), NUMBER.fetch_add(1, Ordering::Relaxed));
    register_usm(&name, &queue(), kind).expect("a device with such memory")
}

const ALL: [UsmKind; 3] = [UsmKind::Host, UsmKind::Shared, UsmKind::Device];

#[test]
fn usm_that_the_host_reads_keeps_the_strategy_contract() {
    let _turn = alone();
    for kind in [UsmKind::Host, UsmKind::Shared] {
        conformance::check(pool(kind));
        conformance::check(Arena::over(&pool(kind)));
        conformance::check(Budgeted::new(pool(kind), Budget::new("all", None)));
        conformance::check(Tracked::new(pool(kind)).expect("not tracked"));
    }
}

#[test]
#[allow(unsafe_code, reason = "blocks")]
fn blocks_of_a_pool_are_usm_of_its_kind_and_go_back_when_it_is_dropped() {
    let _turn = alone();
    for kind in [UsmKind::Host, UsmKind::Shared] {
        let (queue, pool) = (queue(), pool(kind));
        for size_bytes in [1, 5000, 3 << 20, 40 << 20] {
            let block = pool.allocate(size_bytes).expect("memory");
            assert_eq!(queue.kind_of(block.addr().get()), Some(kind), "{size_bytes} bytes");
            assert_eq!(queue.kind_of(block.addr().get() + size_bytes - 1), Some(kind), "{size_bytes} bytes");
            // SAFETY: live, from this pool.
            unsafe { pool.release(block) };
        }
    }
}

#[test]
fn no_strategy_stands_on_memory_that_the_host_cannot_read() {
    let _turn = alone();
    let refused = UsmPages::new(&queue(), UsmKind::Device).expect_err("the host cannot read it");
    assert!(refused.to_string().contains("'device' cannot be read by the host"), "{refused}");
}

#[test]
fn bytes_go_to_a_device_and_come_back() {
    let _turn = alone();
    for kind in ALL {
        let handler = handler(kind);
        for length in [0, 1, 100, 5000, 70_000, 3 << 20] {
            let bytes: Vec<u8> = (0..length).map(|index| (index % 251) as u8).collect();
            let there = DeviceBuffer::copy_from_slice_in(handler, &bytes).expect("memory");
            let twin = there.try_clone().expect("memory");
            drop(there);
            let mut back = vec![0; length];
            twin.copy_to_slice(&mut back).expect("copied");
            assert!(back == bytes, "{length} bytes in {kind:?}");
        }
    }
}

#[test]
fn zeroed_memory_of_a_device_is_zero_even_when_reused() {
    let _turn = alone();
    let handler = handler(UsmKind::Device);
    for length in [1, 100, 5000, 300_000, 3 << 20] {
        drop(DeviceBuffer::copy_from_slice_in(handler, &vec![0xA5; length]).expect("memory"));
        let zeroed = DeviceBuffer::zeroed_in(handler, length).expect("memory");
        let mut back = vec![1; length];
        zeroed.copy_to_slice(&mut back).expect("copied");
        assert!(back.iter().all(|&byte| byte == 0), "{length} bytes");
    }
}

#[test]
#[allow(unsafe_code, reason = "blocks")]
fn a_block_of_a_device_is_resized_with_its_bytes() {
    let _turn = alone();
    let handler = handler(UsmKind::Device);
    let bytes: Vec<u8> = (0..=255).collect();
    let block = handler.allocate(256).expect("memory");
    // SAFETY: a live block of 256 bytes, and so below.
    unsafe { handler.copy_in(block, bytes.as_ptr(), 256) }.expect("copied");
    // SAFETY: live; the old pointer is not used again.
    let block = unsafe { handler.resize(block, 1 << 20) }.expect("memory");
    let mut back = [0; 256];
    // SAFETY: its first 256 bytes were kept.
    unsafe { handler.copy_out(back.as_mut_ptr(), block, 256) }.expect("copied");
    assert_eq!(&back[..], &bytes[..]);
    // SAFETY: the resize above made the block, and nothing uses it from here on.
    unsafe { handler.release(block, 1 << 20) };
}

#[test]
#[allow(unsafe_code, reason = "NumPy's struct")]
fn rust_and_numpy_are_refused_what_they_could_not_read() {
    let _turn = alone();
    let device = handler(UsmKind::Device);
    assert!(!device.is_host_accessible());
    let expected = error!(NotHostAccessible { handler: device.name() });
    assert_eq!(refusal(Buffer::zeroed_in(device, 10)), expected);
    assert_eq!(refusal(Buffer::copy_from_slice_in(device, b"bytes")), expected);
    let mut vec = allocator_api2::vec::Vec::<u8, _>::new_in(ContextAlloc::with_handler(device));
    assert!(vec.try_reserve(10).is_err());
    // SAFETY: the struct of a registered handler is never freed or moved.
    let c_struct = unsafe { &*device.as_ptr() }.allocator;
    // SAFETY: any size, with their own context.
    assert!(unsafe { (c_struct.malloc.expect("all are there"))(c_struct.ctx, 10) }.is_null());
    // SAFETY: any number and size, with their own context.
    assert!(unsafe { (c_struct.calloc.expect("all are there"))(c_struct.ctx, 10, 1) }.is_null());
    assert!(handler(UsmKind::Shared).is_host_accessible());
}

#[test]
#[allow(unsafe_code, reason = "what must not be freed")]
fn what_would_end_the_process_is_an_error() {
    let _turn = alone();
    let queue = queue();
    let mut plain = [0_u8; 64];
    // SAFETY: not USM: refused before it is touched.
    let refused = unsafe { queue.release(NonNull::from(&mut plain).cast()) }.expect_err("not USM");
    assert!(refused.to_string().contains("is no USM of this queue's context"), "{refused}");
    let block = queue.allocate(UsmKind::Shared, 1 << 20, 64).expect("memory");
    // SAFETY: from this queue.
    unsafe { queue.release(block) }.expect("USM");
    // SAFETY: not USM any more: refused. Nobody else allocates meanwhile.
    unsafe { queue.release(block) }.expect_err("freed already");
    assert!(queue.allocate(UsmKind::Shared, 1 << 62, 64).is_none());
    assert_eq!((queue.kind_of(0), queue.kind_of(usize::MAX)), (None, None));
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let _turn = alone();
    for filter in ["gpu:7", "nonsense", "no\0pe"] {
        let refused = Queue::open(runtime(), Some(filter)).expect_err("no such device");
        assert!(refused.to_string().contains(filter), "{refused}");
    }
    // SAFETY: 0 is the address of no queue, and is refused before anything is read there.
    #[allow(unsafe_code, reason = "no queue")]
    let refused = unsafe { Queue::share(runtime(), 0) }.expect_err("no queue");
    assert!(refused.to_string().contains("cannot be shared"), "{refused}");
}

#[test]
#[allow(unsafe_code, reason = "copies")]
fn a_submitted_copy_is_there_when_its_event_is_over() {
    let _turn = alone();
    let queue = queue();
    let there = queue.allocate(UsmKind::Device, 1 << 20, 64).expect("memory");
    let (from, mut to) = (vec![7_u8; 1 << 20], vec![0_u8; 1 << 20]);
    // SAFETY: all three have that many bytes, and live until the events are over.
    unsafe { queue.submit_copy(there.as_ptr(), from.as_ptr(), 1 << 20) }.expect("submitted").wait();
    // SAFETY: `there` and `to` have that many bytes and live until the event is over; the first copy has ended.
    unsafe { queue.submit_copy(to.as_mut_ptr(), there.as_ptr(), 1 << 20) }.expect("submitted").wait();
    assert!(to == from);
    // SAFETY: from this queue, and nothing uses it any more.
    unsafe { queue.release(there) }.expect("USM");
}

#[test]
#[allow(unsafe_code, reason = "blocks")]
fn handlers_of_one_context_and_device_share_one_pool() {
    let _turn = alone();
    for kind in ALL {
        let (one, two) = (handler(kind), handler(kind));
        assert_ne!(one, two);
        let block = one.allocate(40 << 20).expect("memory");
        // SAFETY: live, from this handler.
        unsafe { one.release(block, 40 << 20) };
        let again = two.allocate(40 << 20).expect("memory");
        assert_eq!(again, block, "the other handler is given the block that came back");
        // SAFETY: live, from this handler.
        unsafe { two.release(again, 40 << 20) };
    }
    let (one, two) = (queue(), queue());
    assert!(one.shares_memory_with(&two) && one.shares_memory_with(&one.clone()));
}

#[test]
#[allow(unsafe_code, reason = "copies")]
fn rows_are_copied_and_what_lies_between_is_not_touched() {
    let _turn = alone();
    let queue = queue();
    let there = queue.allocate(UsmKind::Device, 6000, 64).expect("memory");
    // SAFETY: that many bytes of this queue, which nobody else has.
    unsafe { queue.fill(there, 9, 6000) }.expect("filled");
    let from: Vec<u8> = (0..120).collect();
    // Two planes of five rows of three bytes each; the rows backwards where they are read.
    let axes = [RowAxis::new(2, 3000, 60), RowAxis::new(5, 7, -10)];
    // SAFETY: the rows lie in both; the last byte that is read is 60 + 40 + 2, the last that is written 3000 + 28 + 2.
    unsafe { queue.copy_rows(there.as_ptr(), from.as_ptr().wrapping_add(40), 3, &axes) }.expect("copied");
    let mut wanted = vec![9_u8; 6000];
    for (plane, row) in (0..2).flat_map(|plane| (0..5).map(move |row| (plane, row))) {
        let (to, at) = (3000 * plane + 7 * row, 40 + 60 * plane - 10 * row);
        wanted[to..to + 3].copy_from_slice(&from[at..at + 3]);
    }
    let mut back = vec![0_u8; 6000];
    // SAFETY: as many bytes on both sides.
    unsafe { queue.copy(back.as_mut_ptr(), there.as_ptr(), 6000) }.expect("copied");
    assert_eq!(back, wanted);
    let many = [RowAxis::new(6000, 1, 0)];
    // SAFETY: one byte is read again and again; each is written once.
    unsafe { queue.copy_rows(there.as_ptr(), from.as_ptr().wrapping_add(77), 1, &many) }.expect("copied");
    // SAFETY: as many bytes on both sides.
    unsafe { queue.copy(back.as_mut_ptr(), there.as_ptr(), 6000) }.expect("copied");
    assert!(back.iter().all(|&byte| byte == 77));
    let none = [RowAxis::new(0, 1, 1)];
    // SAFETY: with no row, nothing is read or written.
    unsafe { queue.copy_rows(there.as_ptr(), from.as_ptr(), 1, &none) }.expect("nothing to do");
    // SAFETY: from this queue, and nothing uses it any more.
    unsafe { queue.release(there) }.expect("USM");
}
