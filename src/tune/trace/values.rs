//! `Values`: numbers of which quantiles are wanted, in no more memory than a recording has for them.

use crate::recording::{Full, Room};

/// Numbers as LEB128, in parts that never move: a list that grows leaves holes behind.
#[derive(Debug, Default)]
pub(super) struct Values {
    parts: Vec<Vec<u8>>,
    pub(super) count: u64,
    bytes: usize,
    max: u64,
}

const LONGEST: usize = 10;
const MIN_PART: usize = 16;
const MAX_PART: usize = 64 << 10;
/// What the heap adds to a block.
const HEAP_BYTES: usize = 16;

/// The value at some shares of them all, and the largest one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Quantiles {
    pub(crate) p50: u64,
    pub(crate) p95: u64,
    pub(crate) p99: u64,
    pub(crate) max: u64,
}

impl Values {
    pub(super) fn push(&mut self, value: u64, room: &mut Room) -> Result<(), Full> {
        let (mut told, mut length, mut rest) = ([0; LONGEST], 0, value);
        while rest > 0x7f {
            told[length] = rest as u8 | 0x80;
            (rest, length) = (rest >> 7, length + 1);
        }
        told[length] = rest as u8;
        let told = &told[..=length];
        let has_room = self.parts.last().is_some_and(|part| part.capacity() - part.len() >= told.len());
        if !has_room {
            let more = (self.bytes / 8).clamp(MIN_PART, MAX_PART);
            room.take(more + HEAP_BYTES)?;
            if self.parts.len() == self.parts.capacity() {
                let more = 1 + self.parts.len() / 8;
                room.take(more * size_of::<Vec<u8>>() + HEAP_BYTES)?;
                self.parts.reserve_exact(more);
            }
            self.parts.push(Vec::with_capacity(more));
        }
        if let Some(part) = self.parts.last_mut() {
            part.extend_from_slice(told);
        }
        self.count += 1;
        self.bytes += told.len();
        self.max = self.max.max(value);
        Ok(())
    }

    fn for_each(&self, mut use_it: impl FnMut(u64)) {
        for part in &self.parts {
            let (mut value, mut shift) = (0, 0);
            for &byte in part {
                value |= u64::from(byte & 0x7f) << shift;
                shift += 7;
                if byte < 0x80 {
                    use_it(value);
                    (value, shift) = (0, 0);
                }
            }
        }
    }

    /// The value that has so many below it, if they were sorted: found byte by byte, the highest first.
    fn sorted_at(&self, mut at: u64) -> u64 {
        let bytes = (u64::BITS - self.max.leading_zeros()).div_ceil(8);
        let mut prefix = 0_u64;
        for byte in (0..bytes).rev() {
            let mut counts = [0_u64; 256];
            let above = |value: u64| value.checked_shr(8 * (byte + 1)).unwrap_or(0);
            self.for_each(|value| counts[(value >> (8 * byte) & 0xff) as usize] += u64::from(above(value) == prefix));
            let mut found = 0;
            while found < 255 && at >= counts[found] {
                at -= counts[found];
                found += 1;
            }
            prefix = prefix << 8 | found as u64;
        }
        prefix
    }

    /// `None`: there are none.
    pub(super) fn quantiles(&self) -> Option<Quantiles> {
        let last = self.count.checked_sub(1)?;
        let at = |share: u128| {
            let rank = (u128::from(self.count) * share).div_ceil(100).max(1) - 1;
            self.sorted_at(last.min(u64::try_from(rank).unwrap_or(last)))
        };
        Some(Quantiles { p50: at(50), p95: at(95), p99: at(99), max: self.max })
    }
}

#[cfg(test)]
mod tests {
    use super::{Quantiles, Values};
    use crate::recording::Room;

    #[test]
    fn quantiles_are_those_of_the_sorted_list() {
        let mut random = 1_u64;
        for count in 0..300_usize {
            let (mut values, mut all, mut room) = (Values::default(), Vec::new(), Room(1 << 20));
            for _ in 0..count {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let value = if random >> 60 == 0 { u64::MAX } else { random >> (random >> 58) };
                values.push(value, &mut room).expect("room");
                all.push(value);
            }
            all.sort_unstable();
            let at = |share: usize| all[(count * share).div_ceil(100).max(1) - 1];
            let expected =
                (count > 0).then(|| Quantiles { p50: at(50), p95: at(95), p99: at(99), max: all[count - 1] });
            assert_eq!(values.quantiles(), expected, "{count}");
        }
    }

    #[test]
    fn they_take_little_more_than_their_bytes() {
        let (mut values, mut room) = (Values::default(), Room(1 << 20));
        for value in 0..200_000_u64 {
            values.push(value % 16_000, &mut room).expect("room");
        }
        let taken = (1 << 20) - room.0;
        assert!(taken < 2 * 200_000 * 9 / 8, "{taken}");
    }
}
