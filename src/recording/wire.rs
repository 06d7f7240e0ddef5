//! How a recording's files are made of bytes: numbers as LEB128, and frames, each with its length and checksums.
//!
//! ```text
//!   file:   MAGIC  frame  frame  ...
//!   frame:  length of the body (u32) | checksum of the length (u32) | checksum of the body (u32) | body
//! ```
//! Numbers of a frame's head are little-endian, checksums CRC-32. The length has one of its own so that a file that
//! ends early can be told from one that is damaged.

/// What each file begins with. The last number is the version of the format.
pub(super) const MAGIC: [u8; 8] = *b"\x89CTXREC\x01";

/// The bytes of a frame before its body.
pub(super) const HEAD_BYTES: usize = 12;

/// The longest body.
pub(super) const MAX_BODY_BYTES: usize = 1 << 20;

/// No event has more: its first byte, and up to eight numbers.
pub(super) const MAX_EVENT_BYTES: usize = 1 + 8 * 10;

/// Mixed into the checksum of a length, so that zeros are none.
const SALT: &[u8] = b"ctxalloc";

/// Appends a number: seven bits a byte, the lowest first, each but the last with the highest bit set.
pub(super) fn put(bytes: &mut Vec<u8>, mut number: u64) {
    while number > 0x7f {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

/// Appends a difference: small ones of either sign are short.
pub(super) fn put_change(bytes: &mut Vec<u8>, from: u64, to: u64) {
    let change = to.wrapping_sub(from) as i64;
    put(bytes, (change << 1 ^ change >> 63) as u64);
}

/// Appends a text and its length.
pub(super) fn put_text(bytes: &mut Vec<u8>, text: &str) {
    put(bytes, text.len() as u64);
    bytes.extend_from_slice(text.as_bytes());
}

fn head_checksum(length: [u8; 4]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(SALT);
    hasher.update(&length);
    hasher.finalize()
}

/// What a frame of this length begins with; the checksum of the body follows.
pub(super) fn head(length: u32) -> [u8; 8] {
    let length = length.to_le_bytes();
    let [[a, b, c, d], [e, f, g, h]] = [length, head_checksum(length).to_le_bytes()];
    [a, b, c, d, e, f, g, h]
}

/// A frame with this body, of at most [`MAX_BODY_BYTES`].
pub(super) fn frame(body: &[u8]) -> Vec<u8> {
    debug_assert!(body.len() <= MAX_BODY_BYTES, "a body is too long");
    let mut bytes = Vec::with_capacity(HEAD_BYTES + body.len());
    bytes.extend_from_slice(&head(body.len() as u32));
    bytes.extend_from_slice(&crc32fast::hash(body).to_le_bytes());
    bytes.extend_from_slice(body);
    bytes
}

/// What stands at a place of a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found<'a> {
    /// A frame with this body.
    Body(&'a [u8]),
    /// The file's end.
    End,
    /// The beginning of a frame whose rest is missing.
    CutOff,
    /// Something else, why, and how many bytes of a body were looked at to know it.
    Damaged { reason: &'static str, vain_bytes: usize },
}

/// How many bytes of a file must be known where it goes on with `head`, so that [`next_frame`] tells what begins there.
pub(super) fn needed_bytes(head: &[u8]) -> usize {
    let Some(&[a, b, c, d, e, f, g, h, ..]) = head.first_chunk::<HEAD_BYTES>() else { return HEAD_BYTES };
    let length = u32::from_le_bytes([a, b, c, d]) as usize;
    let is_head = length <= MAX_BODY_BYTES && u32::from_le_bytes([e, f, g, h]) == head_checksum([a, b, c, d]);
    HEAD_BYTES + if is_head { length } else { 0 }
}

/// What begins where `bytes`, the rest of a file, begin, or [`needed_bytes`] of it.
pub(super) fn next_frame(bytes: &[u8]) -> Found<'_> {
    if bytes.is_empty() {
        return Found::End;
    }
    let Some(&[a, b, c, d, ref checksums @ ..]) = bytes.first_chunk::<HEAD_BYTES>() else { return Found::CutOff };
    let length = [a, b, c, d];
    let word = |at: usize| [checksums[at], checksums[at + 1], checksums[at + 2], checksums[at + 3]];
    let damaged = |reason, vain_bytes| Found::Damaged { reason, vain_bytes };
    // First what is cheap: a search asks at each byte.
    let is_possible = u32::from_le_bytes(length) as usize <= MAX_BODY_BYTES && (length, word(0)) != ([0; 4], [0; 4]);
    if !is_possible || u32::from_le_bytes(word(0)) != head_checksum(length) {
        return damaged("no frame begins here", 0);
    }
    let length = u32::from_le_bytes(length) as usize;
    let Some(body) = bytes.get(HEAD_BYTES..HEAD_BYTES + length) else { return Found::CutOff };
    if u32::from_le_bytes(word(4)) != crc32fast::hash(body) {
        return damaged("the checksum of a frame is wrong", length);
    }
    Found::Body(body)
}

/// Reads a body from its beginning.
#[derive(Debug)]
pub(super) struct Bytes<'a> {
    pub(super) rest: &'a [u8],
}

impl<'a> Bytes<'a> {
    pub(super) fn byte(&mut self) -> Option<u8> {
        let (&byte, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(byte)
    }

    /// A number; `None` if it is not complete, or larger than 64 bits.
    pub(super) fn number(&mut self) -> Option<u64> {
        let mut number = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return None;
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    /// A block's size; `None` if it is more than any machine has, so that sums of them are numbers.
    pub(super) fn size(&mut self) -> Option<u64> {
        self.number().filter(|&bytes| bytes < 1 << 48)
    }

    pub(super) fn small(&mut self) -> Option<u32> {
        u32::try_from(self.number()?).ok()
    }

    pub(super) fn changed(&mut self, from: u64) -> Option<u64> {
        let number = self.number()?;
        let change = (number >> 1) as i64 ^ -((number & 1) as i64);
        Some(from.wrapping_add(change as u64))
    }

    pub(super) fn text(&mut self) -> Option<&'a str> {
        let length = usize::try_from(self.number()?).ok()?;
        let (text, rest) = self.rest.split_at_checked(length)?;
        self.rest = rest;
        std::str::from_utf8(text).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::{Bytes, Found, frame, next_frame, put, put_change};

    #[test]
    fn numbers_come_back_as_they_were() {
        for number in [0, 1, 127, 128, 300, u64::from(u32::MAX), u64::MAX - 1, u64::MAX] {
            let mut bytes = Vec::new();
            put(&mut bytes, number);
            put_change(&mut bytes, 5, number);
            put_change(&mut bytes, number, 7);
            let mut read = Bytes { rest: &bytes };
            assert_eq!(read.number(), Some(number));
            assert_eq!(read.changed(5), Some(number));
            assert_eq!(read.changed(number), Some(7));
            assert_eq!(read.byte(), None);
        }
        assert_eq!(Bytes { rest: &[0xff; 10] }.number(), None, "more than 64 bits");
        assert_eq!(Bytes { rest: &[0x80] }.number(), None, "not complete");
    }

    #[test]
    fn a_frame_that_lacks_its_end_is_no_damaged_one() {
        let whole = frame(b"body");
        assert_eq!(next_frame(&whole), Found::Body(b"body"));
        for length in 1..whole.len() {
            assert_eq!(next_frame(&whole[..length]), Found::CutOff, "{length} bytes");
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            assert!(matches!(next_frame(&damaged), Found::Damaged { .. }), "byte {at}");
        }
        assert!(matches!(next_frame(&[0; 40]), Found::Damaged { .. }));
    }
}
