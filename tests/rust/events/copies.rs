//! Copy functions: into a block, out of one, and from one to another.

use super::errors::{error, refusal};
use super::{Hearing, Turn, adopted};
use ctxalloc::handler::abi::Copies;
use ctxalloc::{Buffer, handler};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many bytes went in, out, and across.
#[derive(Default)]
struct Copied([AtomicUsize; 3]);

impl Copied {
    fn copies(&'static self) -> Copies {
        Copies::new(std::ptr::from_ref(self).cast_mut().cast())
            .with_host2obj(copy::<0>)
            .with_obj2host(copy::<1>)
            .with_obj2obj(copy::<2>)
    }

    fn seen(&self) -> [usize; 3] {
        self.0.each_ref().map(|bytes| bytes.load(Ordering::SeqCst))
    }
}

unsafe extern "C" fn copy<const WHICH: usize>(
    ctx: *mut c_void,
    dst: *mut c_void,
    src: *const c_void,
    size: usize,
) -> *mut c_void {
    // SAFETY: the context that `copies` put there.
    let copied: &Copied = unsafe { &*ctx.cast() };
    copied.0[WHICH].fetch_add(size, Ordering::SeqCst);
    if size == 13 {
        return null_mut(); // unlucky
    }
    // SAFETY: passed on from the caller.
    unsafe { libc::memcpy(dst, src, size) }
}

#[test]
fn buffers_are_copied_by_the_handlers_own_functions() {
    let _turn = Turn::take(); // nobody hears of these
    let copied: &'static Copied = Box::leak(Box::default());
    let handler = adopted("copies by itself", copied.copies());
    let buffer = Buffer::copy_from_slice_in(handler, b"0123456789").expect("10 bytes");
    assert_eq!((&buffer[..], copied.seen()), (&b"0123456789"[..], [10, 0, 0]));
    let twin = buffer.try_clone().expect("10 bytes");
    assert_eq!((&twin[..], copied.seen()), (&b"0123456789"[..], [10, 0, 10]));
    let mut bytes = [0; 10];
    twin.copy_to_slice(&mut bytes).expect("10 bytes");
    assert_eq!((&bytes, copied.seen()), (b"0123456789", [10, 10, 10]));
    let empty = Buffer::copy_from_slice_in(handler, b"").expect("nothing").try_clone().expect("nothing");
    empty.copy_to_slice(&mut []).expect("nothing");
    assert_eq!(copied.seen(), [10, 10, 10], "nothing is not copied");
}

#[test]
fn a_copy_that_fails_is_an_error_and_nothing_is_lost() {
    let copied: &'static Copied = Box::leak(Box::default());
    let handler = adopted("fails over 13 bytes", copied.copies());
    let failed = |function| error!(CopyFailed { handler: "fails over 13 bytes", function: function, size_bytes: 13 });
    let hearing = Hearing::begin();
    assert_eq!(refusal(Buffer::copy_from_slice_in(handler, &[1; 13]).map(drop)), failed("host2obj"));
    let heard = hearing.heard();
    assert_eq!((heard.len(), heard[0].1), (2, heard[1].0), "the block was given back: {heard:?}");
    let buffer = Buffer::zeroed_in(handler, 13).expect("13 bytes");
    assert_eq!(refusal(buffer.try_clone().map(drop)), failed("obj2obj"));
    assert_eq!(refusal(buffer.copy_to_slice(&mut [0; 13])), failed("obj2host"));
    assert_eq!(&buffer[..], [0; 13]);
}

#[test]
fn without_functions_of_their_own_buffers_are_copied_all_the_same() {
    let _turn = Turn::take(); // as above
    let buffer = Buffer::copy_from_slice_in(handler("pool").expect("built in"), b"plain").expect("5 bytes");
    let mut bytes = [0; 5];
    buffer.try_clone().expect("5 bytes").copy_to_slice(&mut bytes).expect("5 bytes");
    assert_eq!(&bytes, b"plain");
}
