//! `Writer`: finds the series of a name in a region, and makes room for a new one.

use super::admitted::Admitted;
use super::place::Place;
use super::region::{MAX_NAME, Region, SERIES, Sample};
use super::snapshot::{Gauges, OTHER, UNNAMED};

/// The series of names that have no room.
pub(super) const OTHER_AT: usize = 0;
/// The series of requests without a name.
pub(super) const UNNAMED_AT: usize = 1;

/// A power of two, so large that few names meet.
const PLACES: usize = 512;
const NONE: u16 = u16::MAX;

/// Counts into a region, which is this process's. Allocates nothing.
#[derive(Debug)]
pub(super) struct Writer {
    place: Place,
    /// An open hash table: the number of the series, or NONE.
    places: [u16; PLACES],
    hashes: [u32; SERIES],
    used: usize,
}

fn hash_of(name: &[u8]) -> u32 {
    // FNV-1a by words: names are short, and an attacker's names are bounded anyway.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64 ^ name.len() as u64;
    for chunk in name.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        hash = (hash ^ u64::from_le_bytes(word)).wrapping_mul(0x0000_0100_0000_01b3);
        hash ^= hash >> 29;
    }
    (hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}

/// As much of a name as is kept: whole characters.
fn kept(name: &str) -> &[u8] {
    let mut end = name.len().min(MAX_NAME);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    &name.as_bytes()[..end]
}

impl Writer {
    /// A writer for a region that this process has taken. [`open`](Self::open) comes before the first count.
    pub(super) fn new(place: Place) -> Self {
        Self { place, places: [NONE; PLACES], hashes: [0; SERIES], used: UNNAMED_AT + 1 }
    }

    /// Finds the names that are there.
    pub(super) fn open(&mut self) {
        self.region().series(OTHER_AT).set_name(OTHER.as_bytes());
        self.region().series(UNNAMED_AT).set_name(UNNAMED.as_bytes());
        for number in 0..SERIES {
            if let Some(hash) = self.region().series(number).with_name(hash_of) {
                self.hashes[number] = hash;
                self.put(number);
                self.used = self.used.max(number + 1);
            }
        }
    }

    pub(super) fn region(&self) -> &Region {
        self.place.region()
    }

    /// Counts one request.
    #[inline]
    pub(super) fn record(&mut self, name: Option<&str>, sample: &Sample) {
        let number = self.number(name);
        self.region().add(number, sample, |bytes| self.place.grow(bytes));
    }

    #[cfg(feature = "python")]
    pub(super) fn record_escapes(&mut self, name: Option<&str>, blocks: u64, bytes: u64) {
        let number = self.number(name);
        self.region().add_escapes(number, blocks, bytes);
    }

    pub(super) fn record_admission(&mut self, name: Option<&str>, admitted: Admitted) {
        let number = self.number(name);
        self.region().add_admission(number, admitted, |bytes| self.place.grow(bytes));
    }

    /// The series of a name.
    #[inline]
    fn number(&mut self, name: Option<&str>) -> usize {
        match name {
            None => UNNAMED_AT,
            Some(name) => {
                let name = kept(name);
                let hash = hash_of(name);
                match self.find(name, hash) {
                    Some(number) => number,
                    None => self.make(name, hash),
                }
            }
        }
    }

    pub(super) fn set_gauges(&self, gauges: Gauges) {
        self.region().set_gauges(gauges);
    }

    #[inline]
    fn find(&self, name: &[u8], hash: u32) -> Option<usize> {
        let mut place = hash as usize % PLACES;
        loop {
            let number = self.places[place];
            if number == NONE {
                return None;
            }
            let number = usize::from(number);
            if self.hashes[number] == hash && self.region().series(number).is_named(name) {
                return Some(number);
            }
            place = (place + 1) % PLACES;
        }
    }

    /// A series for a new name. Where all are taken, the name counts as [`OTHER`] from its first request on: numbers
    /// never go from one series to another, for exporters would count them twice.
    #[cold]
    fn make(&mut self, name: &[u8], hash: u32) -> usize {
        if name.is_empty() {
            return UNNAMED_AT;
        }
        if self.used == SERIES {
            return OTHER_AT;
        }
        let number = self.used;
        self.used += 1;
        self.region().series(number).set_name(name);
        self.hashes[number] = hash;
        self.put(number);
        number
    }

    fn put(&mut self, number: usize) {
        let mut place = self.hashes[number] as usize % PLACES;
        while self.places[place] != NONE {
            place = (place + 1) % PLACES;
        }
        self.places[place] = number as u16;
    }
}

const _: () = assert!(PLACES > 2 * SERIES && SERIES < NONE as usize);
