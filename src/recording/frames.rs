//! `Frames`: the frames of a file one after the other, and what stands between them.
//!
//! Where no whole frame begins the next one is searched, so damage costs what is damaged. A search takes a window. Its
//! time is bounded: a head costs a checksum of some bytes, and the bodies that are looked at in vain are counted.

use super::window::{ReadAt, Window};
use super::wire::{Found, HEAD_BYTES, MAX_BODY_BYTES, needed_bytes, next_frame};
use std::io;

/// How many bytes of bodies may be looked at in vain: for each byte of the file, and beside that. If all bodies are
/// damaged there is one for each byte; a file that is made to be slow has many heads within one body.
const VAIN_FOR_EACH_BYTE: u64 = 4;
const VAIN_BESIDE: u64 = 64 << 20;

/// A frame, and what a search goes on by before the window has to move: each move copies a frame.
const WINDOW_BYTES: usize = HEAD_BYTES + MAX_BODY_BYTES + MAX_BODY_BYTES / 4;

/// A part of a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// A whole frame, whose body begins at `offset`: [`Frames::body`] has it.
    Body { offset: u64, bytes: usize },
    /// What cannot be read, and why.
    Gap { offset: u64, bytes: u64, reason: &'static str },
    /// The file ends here, within a frame whose writer came no further or before what a file system made room for.
    CutOff { offset: u64 },
}

/// Walks over a file from `offset` to its end, of which it has a frame at a time in memory.
pub(super) struct Frames<'a> {
    window: Window<'a>,
    offset: u64,
    vain_bytes_left: u64,
}

/// What walking over a file of this length takes of memory.
pub(super) fn window_bytes(length: u64) -> usize {
    usize::try_from(length).map_or(WINDOW_BYTES, |length| length.min(WINDOW_BYTES))
}

impl<'a> Frames<'a> {
    pub(super) fn new(source: &'a dyn ReadAt, length: u64, offset: u64) -> Self {
        let vain_bytes_left = length.saturating_mul(VAIN_FOR_EACH_BYTE).saturating_add(VAIN_BESIDE);
        Self { window: Window::new(source, length, WINDOW_BYTES), offset, vain_bytes_left }
    }

    /// The body of a frame that [`next`](Self::next) found.
    pub(super) fn body(&mut self, offset: u64, bytes: usize) -> io::Result<&[u8]> {
        self.window.get(offset, bytes)
    }

    fn look(&mut self, at: u64) -> io::Result<Found<'_>> {
        let needed = needed_bytes(self.window.get(at, HEAD_BYTES)?);
        Ok(next_frame(self.window.get(at, needed)?))
    }

    /// The place of the next whole frame, and whether all that is before it was looked at.
    fn search(&mut self, from: u64) -> io::Result<(u64, bool)> {
        let length = self.window.length();
        for at in from..(length.saturating_sub(HEAD_BYTES as u64) + 1).max(from) {
            match self.look(at)? {
                Found::Body(_) => return Ok((at, true)),
                Found::Damaged { vain_bytes, .. } => match self.vain_bytes_left.checked_sub(vain_bytes as u64) {
                    Some(left) => self.vain_bytes_left = left,
                    None => return Ok((length, false)),
                },
                Found::End | Found::CutOff => {}
            }
        }
        Ok((length, true))
    }

    /// Whether all that follows is zero.
    fn is_zero_from(&mut self, mut at: u64) -> io::Result<bool> {
        while at < self.window.length() {
            let bytes = self.window.get(at, 4096)?;
            if bytes.iter().any(|&byte| byte != 0) {
                return Ok(false);
            }
            at += bytes.len() as u64;
        }
        Ok(true)
    }

    /// What comes next; `None` at the file's end.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn next(&mut self) -> io::Result<Option<Part>> {
        let offset = self.offset;
        let reason = match self.look(offset)? {
            Found::End => return Ok(None),
            Found::Body(body) => {
                let (begin, bytes) = (offset + HEAD_BYTES as u64, body.len());
                self.offset = begin + bytes as u64;
                return Ok(Some(Part::Body { offset: begin, bytes }));
            }
            Found::CutOff => None,
            Found::Damaged { reason, .. } => Some(reason),
        };
        // A file system may have made room for what it had no time to write.
        let reason = if reason.is_some() && self.is_zero_from(offset)? { None } else { reason };
        let (next, is_searched) = self.search(offset + 1)?;
        self.offset = next;
        let gap = |reason| Ok(Some(Part::Gap { offset, bytes: next - offset, reason }));
        match reason {
            _ if !is_searched => gap("too much of it looks like a frame and is none; what follows was not looked at"),
            None if next == self.window.length() => Ok(Some(Part::CutOff { offset })),
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
            Part::Body { offset, bytes } => ('b', offset as usize, bytes),
            Part::Gap { offset, bytes, .. } => ('g', offset as usize, bytes as usize),
            Part::CutOff { offset } => ('c', offset as usize, 0),
        };
        let file = bytes.to_vec();
        let mut frames = Frames::new(&file, file.len() as u64, 0);
        std::iter::from_fn(|| frames.next().expect("bytes")).map(tell).collect()
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
