//! The event hook, with the signature that NumPy gave it.

use super::Selection;
use super::error::answer;
use crate::handler::events::{EventHook, Hook, set_event_hook as set};
use std::ffi::c_void;
use std::ptr::null_mut;

/// `ctxalloc_set_event_hook`.
///
/// # Safety
/// - the hook is as [`set_event_hook`](set) wants it; `old_data` is NULL or has room for a pointer.
pub(super) unsafe extern "C" fn set_event_hook<S: Selection>(
    hook: Option<EventHook>,
    user_data: *mut c_void,
    old_data: *mut *mut c_void,
) -> Option<EventHook> {
    answer(None, || {
        // This adopts a foreign handler that C selected: the hook is to hear of it.
        S::current()?;
        // SAFETY: the caller passes a hook as `set_event_hook` wants it.
        let before = unsafe { set(hook.map(|function| Hook { function, user_data })) };
        if !old_data.is_null() {
            // SAFETY: not NULL, so the caller passes room for a pointer.
            unsafe { *old_data = before.map_or(null_mut(), |before| before.user_data) };
        }
        Ok(before.map(|before| before.function))
    })
}
