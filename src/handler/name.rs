//! Names: what may be in NEP 49's `char name[127]`. Checked once, here.

use super::abi::NAME_BYTES;
use crate::error::Error;
use std::ffi::c_char;

/// A checked handler name: one to 126 bytes of UTF-8 without a NUL.
#[derive(Debug, Clone, Copy)]
pub(super) struct Name<'a>(&'a str);

impl<'a> Name<'a> {
    /// Checks `name`.
    pub(super) fn new(name: &'a str) -> Result<Self, Error> {
        if name.is_empty() {
            return Err(Error::NameEmpty);
        }
        if name.len() >= NAME_BYTES {
            return Err(Error::NameTooLong { name: name.into(), length_bytes: name.len() });
        }
        if let Some(position) = name.bytes().position(|byte| byte == 0) {
            return Err(Error::NameHasNul { name: name.into(), position });
        }
        Ok(Self(name))
    }

    /// The name in a foreign handler's field.
    pub(super) fn read(field: &'a [c_char; NAME_BYTES]) -> Result<Self, Error> {
        let bytes: &[u8; NAME_BYTES] = bytes_of(field);
        let text = std::ffi::CStr::from_bytes_until_nul(bytes).map_err(|_| Error::NameUnreadable)?;
        Self::new(text.to_str().map_err(|_| Error::NameUnreadable)?)
    }

    /// The name as it is in the struct: padded with NULs, at least one.
    pub(super) fn field(self) -> [c_char; NAME_BYTES] {
        let mut field = [0; NAME_BYTES];
        for (place, byte) in field.iter_mut().zip(self.0.bytes()) {
            *place = byte as c_char;
        }
        field
    }

    /// The name as text.
    pub(super) fn as_str(self) -> &'a str {
        self.0
    }
}

/// Writes `request`, with this number: what requests without a name are called.
pub(super) fn number(field: &mut [c_char; NAME_BYTES], mut number: u64) {
    let mut digits = [0; 20];
    let mut first = digits.len();
    loop {
        first -= 1;
        digits[first] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    const WORD: &[u8] = b"request ";
    let digits = &digits[first..];
    let mut text = [0; WORD.len() + 20 + 1];
    text[..WORD.len()].copy_from_slice(WORD);
    text[WORD.len()..WORD.len() + digits.len()].copy_from_slice(digits);
    for (place, byte) in field.iter_mut().zip(text) {
        *place = byte as c_char;
    }
}

/// Any text as it can be in the struct: without NULs, cut off where a character begins.
pub(super) fn field_of(text: &str) -> [c_char; NAME_BYTES] {
    let end = (0..NAME_BYTES.min(text.len() + 1)).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    let mut field = [0; NAME_BYTES];
    for (place, byte) in field.iter_mut().zip(text[..end].bytes()) {
        *place = if byte == 0 { b'_' as c_char } else { byte as c_char };
    }
    field
}

/// A name that no other handler has, for one whose own is taken: its struct is at this address for ever.
#[cfg(any(feature = "capi", feature = "python"))]
pub(crate) fn name_at(name: &str, address: usize) -> String {
    let suffix = format!("@{address:#x}");
    let room = NAME_BYTES - 1 - suffix.len();
    let end = (0..=room.min(name.len())).rev().find(|&end| name.is_char_boundary(end)).unwrap_or(0);
    format!("{}{suffix}", &name[..end])
}

#[allow(unsafe_code, reason = "c_char is i8 on some targets and u8 on others; bytes are bytes")]
fn bytes_of(field: &[c_char; NAME_BYTES]) -> &[u8; NAME_BYTES] {
    // SAFETY: c_char is i8 or u8: same size, same alignment, every bit pattern valid.
    unsafe { &*std::ptr::from_ref(field).cast() }
}
