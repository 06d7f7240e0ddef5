//! `Frames`: the frames of a file one after the other, and what stands between them.
//!
//! Where no whole frame begins the next one is searched, so damage costs what is damaged. A search takes no memory. Its
//! time is bounded: a head costs a checksum of some bytes, and the bodies that are looked at in vain are counted.

use super::wire::{Found, HEAD_BYTES, next_frame};

/// How many bytes of bodies may be looked at in vain: for each byte of the file, and beside that. If all bodies are
/// damaged there is one for each byte; a file that is made to be slow has many heads within one body.
const VAIN_FOR_EACH_BYTE: usize = 4;
const VAIN_BESIDE: usize = 64 << 20;

/// A part of a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Part<'a> {
    /// A whole frame, whose body begins at `offset`.
    Body { offset: usize, body: &'a [u8] },
    /// What cannot be read, and why.
    Gap { offset: usize, bytes: usize, reason: &'static str },
    /// The file ends here, within a frame whose writer came no further or before what a file system made room for.
    CutOff { offset: usize },
}

/// Walks over a file from `offset` to its end.
#[derive(Debug)]
pub(super) struct Frames<'a> {
    bytes: &'a [u8],
    offset: usize,
    vain_bytes_left: usize,
}

impl<'a> Frames<'a> {
    pub(super) fn new(bytes: &'a [u8], offset: usize) -> Self {
        let vain_bytes_left = bytes.len().saturating_mul(VAIN_FOR_EACH_BYTE).saturating_add(VAIN_BESIDE);
        Self { bytes, offset, vain_bytes_left }
    }

    /// The place of the next whole frame, and whether all that is before it was looked at.
    fn search(&mut self, from: usize) -> (usize, bool) {
        for at in from..(self.bytes.len().saturating_sub(HEAD_BYTES) + 1).max(from) {
            match next_frame(&self.bytes[at..]) {
                Found::Body(_) => return (at, true),
                Found::Damaged { vain_bytes, .. } => match self.vain_bytes_left.checked_sub(vain_bytes) {
                    Some(left) => self.vain_bytes_left = left,
                    None => return (self.bytes.len(), false),
                },
                Found::End | Found::CutOff => {}
            }
        }
        (self.bytes.len(), true)
    }
}

impl<'a> Iterator for Frames<'a> {
    type Item = Part<'a>;

    fn next(&mut self) -> Option<Part<'a>> {
        let (bytes, offset) = (self.bytes, self.offset);
        let reason = match next_frame(&bytes[offset..]) {
            Found::End => return None,
            Found::Body(body) => {
                let begin = offset + HEAD_BYTES;
                self.offset = begin + body.len();
                return Some(Part::Body { offset: begin, body });
            }
            Found::CutOff => None,
            // A file system may have made room for what it had no time to write.
            Found::Damaged { .. } if bytes[offset..].iter().all(|&byte| byte == 0) => None,
            Found::Damaged { reason, .. } => Some(reason),
        };
        let (next, is_searched) = self.search(offset + 1);
        self.offset = next;
        let gap = |reason| Some(Part::Gap { offset, bytes: next - offset, reason });
        match reason {
            _ if !is_searched => gap("too much of it looks like a frame and is none; what follows was not looked at"),
            None if next == bytes.len() => Some(Part::CutOff { offset }),
            None => gap("a frame is not complete, or nothing was written"),
            Some(reason) => gap(reason),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::{MAX_BODY_BYTES, frame, head};
    use super::{Frames, Part};
    use std::time::{Duration, Instant};

    fn told(bytes: &[u8]) -> Vec<(char, usize, usize)> {
        let tell = |part| match part {
            Part::Body { offset, body } => ('b', offset, body.len()),
            Part::Gap { offset, bytes, .. } => ('g', offset, bytes),
            Part::CutOff { offset } => ('c', offset, 0),
        };
        Frames::new(bytes, 0).map(tell).collect()
    }

    #[test]
    fn what_follows_damage_is_found() {
        let (one, two) = (frame(b"the first"), frame(b"second"));
        let all = [&one[..], &one[..15], &two[..], &[7; 40], &two[..], &[0; 9], &one[..], &[0; 30]].concat();
        let (first, second) = (one.len(), two.len());
        let mut expected = vec![('b', 12, 9), ('g', first, 15), ('b', first + 27, 6)];
        let mut at = first + 15 + second;
        for (gap, bytes) in [(40, second), (9, first)] {
            expected.extend([('g', at, gap), ('b', at + gap + 12, bytes - 12)]);
            at += gap + bytes;
        }
        expected.push(('c', at, 0));
        assert_eq!(told(&all), expected);
        // Half a frame, and zeros that a file system has put behind it: no end that was merely cut off.
        let half = [&one[..15], &[0; 4096][..]].concat();
        assert_eq!(told(&half), [('g', 0, half.len())]);
        assert_eq!(told(&one[..15]), [('c', 0, 0)]);
    }

    #[test]
    fn a_frame_is_found_at_each_place() {
        let whole = frame(b"body");
        for before in 1..300 {
            let bytes = [&vec![0xaa; before][..], &whole].concat();
            assert_eq!(told(&bytes), [('g', 0, before), ('b', before + 12, 4)]);
        }
    }

    /// Heads that are right, each of the longest body, whose checksums are wrong.
    #[test]
    fn a_file_of_heads_takes_no_long_time() {
        let one = head(MAX_BODY_BYTES as u32);
        let count = if cfg!(miri) { 20 } else { 3 * MAX_BODY_BYTES / 12 };
        let bytes = one.iter().copied().chain([1, 2, 3, 4]).cycle().take(12 * count).collect::<Vec<u8>>();
        let begun = Instant::now();
        let parts = told(&bytes);
        // In full they would be a quarter of a million checksums of a megabyte each.
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
        assert_eq!(parts.len(), 1);
    }
}
