//! Registers structs of NEP 49's final form, and finds handlers by name.

use super::error::answer;
use crate::error::Error;
use crate::handler::abi::{Copies, CopyFunction, PyDataMem_Handler, VERSION};
use crate::handler::{Extras, Reach, adopt, try_handler};
use std::ffi::{CStr, c_char};
use std::ptr::{NonNull, null};

/// `ctxalloc_extras`.
#[repr(C)]
pub(super) struct ExtrasInC {
    size_bytes: usize,
    alignment: usize,
    flags: usize,
    host2obj: Option<CopyFunction>,
    obj2host: Option<CopyFunction>,
    obj2obj: Option<CopyFunction>,
}

/// `CTXALLOC_ANY_THREAD`.
const ANY_THREAD: usize = 1;

/// `ctxalloc_register`.
///
/// # Safety
/// - as the header says: immortal structs, functions that keep C's contract.
pub(super) unsafe extern "C" fn register(
    c_struct: *const PyDataMem_Handler,
    extras: *const ExtrasInC,
) -> *const PyDataMem_Handler {
    answer(null(), || {
        let place = NonNull::new(c_struct.cast_mut()).ok_or(Error::NullArgument { argument: "handler" })?;
        // SAFETY: not NULL, so the caller passes a struct. Only this field is read: an event hook may write to others.
        let version = unsafe { (&raw const (*c_struct).version).read() };
        if version != VERSION {
            return Err(Error::UnknownVersion {
                what: "a handler struct",
                version: version.into(),
                known: VERSION.into(),
            }
            .into());
        }
        // SAFETY: the caller passes NULL or such a struct.
        let (reach, extras) = match unsafe { extras.as_ref() } {
            None => (Reach::WithGil, Extras::default()),
            // SAFETY: `place` is not NULL, so the caller passes a struct.
            Some(given) => unsafe { given.read(place) }?,
        };
        // SAFETY: the caller promises an immortal struct whose functions keep C's contract where its flags say.
        Ok(unsafe { adopt(place, reach, None, extras) }?.as_ptr())
    })
}

impl ExtrasInC {
    /// # Safety
    /// - `c_struct` points to a struct that is there.
    unsafe fn read(&self, c_struct: NonNull<PyDataMem_Handler>) -> Result<(Reach, Extras), Error> {
        if self.size_bytes != size_of::<Self>() {
            let (version, known) = (self.size_bytes as u64, size_of::<Self>() as u64);
            return Err(Error::UnknownVersion { what: "a ctxalloc_extras of size_bytes", version, known });
        }
        let reach = match self.flags {
            0 => Reach::WithGil,
            ANY_THREAD => Reach::AnyThread,
            other => {
                let expected = "0 or CTXALLOC_ANY_THREAD (1)";
                return Err(Error::BadOption { option: "flags", value: other.to_string(), expected });
            }
        };
        // SAFETY: the caller passes a struct. Only this field is read, to which nobody writes.
        let ctx = unsafe { (&raw const (*c_struct.as_ptr()).allocator.ctx).read() };
        let copies = Copies { ctx, host2obj: self.host2obj, obj2host: self.obj2host, obj2obj: self.obj2obj };
        // 0: nothing is promised.
        Ok((reach, Extras { alignment: self.alignment.max(1), copies }))
    }
}

/// `ctxalloc_find`.
///
/// # Safety
/// - `name` is NULL or a C string.
pub(super) unsafe extern "C" fn find(name: *const c_char) -> *const PyDataMem_Handler {
    answer(null(), || {
        if name.is_null() {
            return Err(Error::NullArgument { argument: "name" }.into());
        }
        // SAFETY: not NULL, so the caller passes a C string.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        Ok(try_handler(&name)?.as_ptr())
    })
}
