//! The C functions of a handler with a [`Strategy`] behind it.
//!
//! They turn C's calls into what a strategy is promised: a size of zero becomes one, absurd sizes and overflowing
//! products fail, `realloc(NULL)` allocates, `free(NULL)` does nothing, and the size given to `free` is dropped. They
//! take no lock, know no Python, and let no panic out. They report to the event hook, if there is one: a free before it
//! is done, all else after.

use super::abi::Functions;
use super::call::{Answer, Call, functions};
use super::entry::Draft;
use super::events::is_silent;
use super::name::Name;
use crate::layout;
use crate::strategy::{Kept, LiveBlock, Strategy};
use crate::survived::survived;
use crate::trace;
use crate::unattributed::unattributed;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr::{NonNull, null_mut};

/// A handler of our own, which makes its strategy immortal when it is registered.
pub(super) fn draft<S: Strategy>(name: Name<'_>, strategy: S) -> Draft<'_> {
    draft_by::<S, Behind<S>>(name, strategy)
}

/// The same of a strategy that has blocks at hand.
pub(super) fn draft_at_hand<S: AtHand>(name: Name<'_>, strategy: S) -> Draft<'_> {
    draft_by::<S, Near<S>>(name, strategy)
}

/// `A` answers behind the address of an immortal `S`.
fn draft_by<S: Strategy, A: Answer>(name: Name<'_>, strategy: S) -> Draft<'_> {
    Draft {
        alignment: strategy.alignment(),
        trim: Some(trim::<S>),
        live_blocks: Some(live_blocks::<S>),
        ..Draft::new(name, format!("{strategy:?}"), move || {
            let _immortal = unattributed();
            let strategy: &'static S = Box::leak(Box::new(strategy));
            functions::<A>(std::ptr::from_ref(strategy).cast_mut().cast())
        })
    }
}

/// The functions of an immortal strategy that has blocks at hand. The strategy itself may be made later, before the
/// first call.
///
/// # Safety
/// - `strategy` stays valid for ever from the first call of any of them on.
pub(super) unsafe fn functions_at<S: AtHand>(strategy: *const S) -> Functions {
    functions::<Near<S>>(strategy.cast_mut().cast())
}

/// The same of any strategy.
///
/// # Safety
/// - as for [`functions_at`].
#[cfg(all(test, not(ctxalloc_loom)))]
pub(super) unsafe fn functions_behind<S: Strategy>(strategy: *const S) -> Functions {
    functions::<Behind<S>>(strategy.cast_mut().cast())
}

/// A strategy that has small blocks at hand: on the way to them nothing can panic, nothing is allocated, and no code of
/// a user's runs. Where any of that is to be done, nothing is, and the strategy does it.
pub(super) trait AtHand: Strategy {
    /// A block of `size_bytes`, from 1 to [`Kept::MAX_BYTES`].
    fn take(&'static self, size_bytes: usize) -> Option<NonNull<u8>>;

    /// Takes a block back; false if that is to be done the long way.
    ///
    /// # Safety
    /// - `block` is a live block of this strategy; after `true` it is not used again.
    unsafe fn put_back(&'static self, block: NonNull<u8>) -> bool;
}

/// What NumPy is shown where it could not write to the blocks: functions that give it no memory.
#[cfg(feature = "usm")]
pub(super) fn refusing() -> Functions {
    struct Nothing;
    impl Answer for Nothing {
        unsafe fn answer(_ctx: *mut c_void, _call: Call) -> *mut c_void {
            null_mut()
        }
    }
    functions::<Nothing>(null_mut())
}

/// Runs `operation`; a panic is reported and becomes `None`.
#[inline]
fn shielded<R>(name: &'static str, operation: impl FnOnce() -> Option<R>) -> Option<R> {
    survived(operation).unwrap_or_else(|| {
        trace::strategy_panicked(name);
        None
    })
}

fn to_c(block: Option<NonNull<u8>>) -> *mut c_void {
    block.map_or(null_mut(), |block| block.as_ptr().cast())
}

/// # Safety
/// - `ctx` is that of [`functions_at::<S>`](functions_at). So for all functions below, which are called with it.
unsafe fn strategy<'a, S: Strategy>(ctx: *mut c_void) -> &'a S {
    debug_assert!(!ctx.is_null());
    // SAFETY: `functions_at` was promised an `S` that is valid for ever.
    unsafe { &*ctx.cast::<S>() }
}

/// A strategy, behind its address.
struct Behind<S>(PhantomData<S>);

impl<S: Strategy> Answer for Behind<S> {
    #[inline(always)]
    unsafe fn answer(ctx: *mut c_void, call: Call) -> *mut c_void {
        // SAFETY: the caller passes the context that belongs to these functions.
        let strategy = unsafe { strategy::<S>(ctx) };
        let telling = call.begin();
        let unattributed = unattributed(); // a strategy's own bookkeeping is charged to no request
        let block = match call {
            Call::Malloc { size } => shielded("malloc", || strategy.allocate(layout::request(size)?)),
            Call::Calloc { nelem, elsize } => {
                shielded("calloc", || strategy.allocate_zeroed(layout::request(layout::array(nelem, elsize)?)?))
            }
            Call::Realloc { ptr, new_size } => shielded("realloc", || {
                let size_bytes = layout::request(new_size)?;
                match NonNull::new(ptr.cast::<u8>()) {
                    None => strategy.allocate(size_bytes),
                    // SAFETY: the caller passes a live block of this strategy, and gives it up where this succeeds.
                    Some(block) => unsafe { strategy.resize(block, size_bytes) },
                }
            }),
            Call::Free { ptr, .. } => shielded("free", || {
                // SAFETY: the caller passes a live block of this strategy, and gives it up.
                unsafe { strategy.release(NonNull::new(ptr.cast::<u8>())?) };
                None
            }),
        };
        drop(unattributed);
        telling.done(to_c(block))
    }
}

/// The same, by the short way if nobody listens and there is a block at hand.
struct Near<S>(PhantomData<S>);

impl<S: AtHand> Answer for Near<S> {
    #[inline(always)]
    unsafe fn answer(ctx: *mut c_void, call: Call) -> *mut c_void {
        if is_silent() {
            // SAFETY: the caller passes the context that belongs to these functions.
            let strategy: &'static S = unsafe { strategy(ctx) };
            match call {
                Call::Malloc { size } => {
                    if size <= Kept::MAX_BYTES
                        && let Some(block) = strategy.take(size.max(1))
                    {
                        return block.as_ptr().cast();
                    }
                }
                Call::Calloc { nelem, elsize } => {
                    // What overflows is larger than all blocks at hand.
                    let size_bytes = layout::array(nelem, elsize).unwrap_or(usize::MAX);
                    if size_bytes <= Kept::MAX_BYTES
                        && let Some(block) = strategy.take(size_bytes.max(1))
                    {
                        // SAFETY: a new block with at least so many bytes, which nobody else has.
                        unsafe { block.write_bytes(0, size_bytes) };
                        return block.as_ptr().cast();
                    }
                }
                // The size is a guess, which only says where to look first.
                Call::Free { ptr, size } if size <= Kept::MAX_BYTES => {
                    // SAFETY: the caller passes a live block of this strategy, and gives it up.
                    if NonNull::new(ptr.cast()).is_some_and(|block| unsafe { strategy.put_back(block) }) {
                        return null_mut();
                    }
                }
                Call::Free { .. } | Call::Realloc { .. } => {}
            }
        }
        // Functions of their own: these here need no registers saved.
        // SAFETY: the caller passes the context that belongs to these functions, and what the call needs.
        unsafe { functions::<Behind<S>>(ctx).call(call) }
    }
}

/// # Safety
/// - `ctx` as for [`strategy`].
pub(super) unsafe extern "C" fn trim<S: Strategy>(ctx: *mut c_void) -> usize {
    // SAFETY: the caller passes the context that belongs to this function.
    let strategy = unsafe { strategy::<S>(ctx) };
    shielded("trim", || Some(strategy.trim())).unwrap_or(0)
}

/// # Safety
/// - `ctx` as for [`strategy`].
pub(super) unsafe fn live_blocks<S: Strategy>(ctx: *mut c_void) -> Option<Vec<LiveBlock>> {
    // SAFETY: the caller passes the context that belongs to this function.
    let strategy = unsafe { strategy::<S>(ctx) };
    shielded("live_blocks", || strategy.live_blocks())
}

#[cfg(all(test, not(ctxalloc_loom)))]
mod tests {
    use crate::handler::call::Call;
    use crate::handler::requests::{Prepared, Terms};
    use crate::handler::{Handler, handler};
    use std::ptr::null_mut;

    /// Calls its C functions with all sizes about the largest that is at hand, and a wrong size for each `free`.
    fn check(handler: Handler) {
        // SAFETY: each block is one of the handler's, as large as was asked for, and freed once.
        let call = |call| unsafe { handler.entry().functions.call(call) };
        for size in [0, 1, 15, 16, 1000, 4096, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, 1 << 20] {
            for wrong_size in [0, size, 1, usize::MAX] {
                let block = call(Call::Malloc { size }).cast::<u8>();
                assert!(!block.is_null(), "{size} bytes");
                // SAFETY: the handler was asked for so many bytes, and gave the block.
                unsafe { block.write_bytes(0xAB, size) };
                call(Call::Free { ptr: block.cast(), size: wrong_size });
                let block = call(Call::Calloc { nelem: size, elsize: 1 }).cast::<u8>();
                // SAFETY: as many bytes, written by `calloc`.
                let bytes = unsafe { std::slice::from_raw_parts(block, size) };
                assert!(bytes.iter().all(|byte| *byte == 0), "{size} bytes are zero");
                call(Call::Free { ptr: block.cast(), size: wrong_size });
            }
        }
        assert!(call(Call::Calloc { nelem: usize::MAX, elsize: 2 }).is_null(), "it overflows");
        assert!(call(Call::Malloc { size: usize::MAX }).is_null(), "nothing is so large");
        call(Call::Free { ptr: null_mut(), size: 8 });
    }

    #[test]
    fn blocks_at_hand_keep_the_contract_of_c() {
        check(handler("pool").expect("built in"));
    }

    #[test]
    fn a_requests_blocks_at_hand_are_counted() {
        let begun = Prepared::new(Terms { is_of_this_thread: true, ..Terms::default() }).expect("in range").begin();
        check(begun.handler());
        let stats = begun.stats();
        assert_eq!((stats.live_blocks, stats.live_bytes), (0, 0));
        assert_eq!(stats.peak_bytes, 1 << 20);
    }
}
