//! Into the table: structs of NEP 49's final form, and look-ups by name.

use super::error::answer;
use crate::error::Error;
use crate::handler::abi::{Copies, CopyFunction, PyDataMem_Handler, VERSION};
use crate::handler::{Extras, Reach, adopt, handler, unknown};
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
    face: *const PyDataMem_Handler,
    extras: *const ExtrasInC,
) -> *const PyDataMem_Handler {
    answer(null(), || {
        let place = NonNull::new(face.cast_mut()).ok_or(Error::NullArgument { argument: "handler" })?;
        // SAFETY: not NULL; a struct, says the caller.
        let version = unsafe { &raw const (*face).version };
        // SAFETY: as above. Only this field: an event hook may write to others.
        let version = unsafe { version.read() };
        if version != VERSION {
            return Err(Error::UnknownVersion {
                what: "a handler struct",
                version: version.into(),
                known: VERSION.into(),
            }
            .into());
        }
        // SAFETY: NULL or such a struct, says the caller.
        let (reach, extras) = match unsafe { extras.as_ref() } {
            None => (Reach::WithGil, Extras::default()),
            Some(given) => given.read(place)?,
        };
        // SAFETY: passed on from the caller.
        Ok(unsafe { adopt(place, reach, None, extras) }?.as_ptr())
    })
}

impl ExtrasInC {
    fn read(&self, face: NonNull<PyDataMem_Handler>) -> Result<(Reach, Extras), Error> {
        if self.size_bytes != size_of::<Self>() {
            let (version, known) = (self.size_bytes as u64, size_of::<Self>() as u64);
            return Err(Error::UnknownVersion { what: "a ctxalloc_extras of size_bytes", version, known });
        }
        let reach = match self.flags {
            0 => Reach::WithGil,
            ANY_THREAD => Reach::AnyThread,
            other => {
                let wanted = "0 or CTXALLOC_ANY_THREAD (1)";
                return Err(Error::BadOption { option: "flags", value: other.to_string(), wanted });
            }
        };
        // SAFETY: a struct, says who called `register`.
        let ctx = unsafe { &raw const (*face.as_ptr()).allocator.ctx };
        // SAFETY: as above. Nobody writes to its context.
        let ctx = unsafe { ctx.read() };
        let copies = Copies { ctx, host2obj: self.host2obj, obj2host: self.obj2host, obj2obj: self.obj2obj };
        // 0: nothing said.
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
        // SAFETY: a C string, says the caller.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        Ok(handler(&name).ok_or_else(|| unknown(&name))?.as_ptr())
    })
}
