//! Where samples lie: each at an address that agrees with that of its *twin*, the block that would be in its place, in
//! all bits below [`WINDOW`].
//!
//! ```text
//!   4 MiB: a chunk | head and bits | window | window | ...    32 KiB each
//!                   a bit for each    |<- before ->|<- room ->|
//!                   16 bytes                       ^ lies in a window as the twin lies in its own
//! ```
//! CPython's cache of attributes keeps the last name of each of its 4,096 places, which is chosen by bits 3 to 14 of
//! its address. Names that a program makes (`getattr(visitor, "visit_" + kind)`) take each other's places there, since
//! they take each other's addresses; a sample that lay elsewhere would have a place of its own, be kept while they go,
//! and stand for 32 KiB of them.

use super::range::{self, Range};
use crate::source::Pages;
use crate::sync::{ForkLock, HeldAcrossFork, Locked, held_across_fork};
use std::ptr::NonNull;
use std::sync::Arc;

/// What addresses agree in: `1 << 12` places of CPython's cache, chosen by an address without its lowest three bits.
pub(super) const WINDOW: usize = 32 << 10;
const CHUNK: usize = range::UNIT;
/// One bit is for so many bytes.
const GRAIN: usize = 16;
/// The window behind the bits is left free, as is the last one: a sample may begin in the one before, and end in the
/// one behind.
const FIRST: usize = CHUNK / GRAIN / 8 / WINDOW + 1;
const LAST: usize = CHUNK / WINDOW - 2;
/// So many windows are looked at before another one is opened: where two fifths of each are in use, for one sample of
/// 128 bytes in some 100,000.
const TRIES: usize = 32;

/// At a chunk's beginning, where the bits of the bits themselves would be. Chunks are a ring.
#[repr(C)]
struct Head {
    next: usize,
    live: usize,
}

const _: () = assert!(size_of::<Head>() <= WINDOW / GRAIN / 8);

/// All samples of one kind.
pub(super) struct Samples {
    range: Range,
    state: Arc<State>,
}

struct State(Locked<Area>);

impl HeldAcrossFork for State {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.0.lock());
    }
}

/// The chunk that was made last and the window that was opened last in it, and where the last sample was placed.
#[derive(Debug, Clone, Copy)]
struct Opened {
    chunk: usize,
    window: usize,
    at: usize,
    at_window: usize,
}

#[derive(Debug)]
struct Area(Option<Opened>);

fn head(chunk: usize) -> *mut Head {
    std::ptr::with_exposed_provenance_mut(chunk)
}

/// The words and bits that are for so many bytes from here on.
fn each_word(start: usize, bytes: usize, mut see: impl FnMut(*mut u64, u64) -> bool) -> bool {
    let chunk = start & !(CHUNK - 1);
    let (mut bit, end) = ((start - chunk) / GRAIN, (start - chunk + bytes) / GRAIN);
    while bit < end {
        let (first, count) = (bit % 64, (64 - bit % 64).min(end - bit));
        let mask = (u64::MAX >> (64 - count)) << first;
        if !see(std::ptr::with_exposed_provenance_mut(chunk + bit / 64 * 8), mask) {
            return false;
        }
        bit += count;
    }
    true
}

/// # Safety
/// - the bytes lie in one chunk of an area, whose lock is held.
unsafe fn take(start: usize, bytes: usize) -> bool {
    // SAFETY: the chunk's own bits, which nobody else reads or writes (this function's contract).
    unsafe {
        let is_free = each_word(start, bytes, |word, mask| word.read() & mask == 0);
        is_free
            && each_word(start, bytes, |word, mask| {
                word.write(word.read() | mask);
                true
            })
    }
}

impl Opened {
    /// Goes on to the next window that is open.
    ///
    /// # Safety
    /// - the area's lock is held.
    unsafe fn go_on(&mut self) {
        let last = if self.at == self.chunk { self.window } else { LAST };
        self.at_window += 1;
        if self.at_window > last {
            self.at_window = FIRST;
            // SAFETY: a chunk's head, under the lock (this function's contract).
            self.at = unsafe { (*head(self.at)).next };
        }
    }
}

impl Area {
    /// A place for so many bytes, of which so many lie before the address that agrees with `twin`. `None`: another
    /// chunk is needed.
    ///
    /// # Safety
    /// - the lock is held.
    unsafe fn place(&mut self, twin: usize, before: usize, bytes: usize) -> Option<usize> {
        let opened = self.0.as_mut()?;
        // SAFETY: a place begins in this window or the one before it, and ends in this one or the next: in the chunk.
        let taken_in = |chunk: usize, window: usize| unsafe {
            let start = chunk + window * WINDOW + twin % WINDOW - before;
            if !take(start, bytes) {
                return None;
            }
            (*head(chunk)).live += 1;
            Some(start)
        };
        for _ in 0..TRIES {
            if let Some(start) = taken_in(opened.at, opened.at_window) {
                return Some(start);
            }
            // SAFETY: the lock is held (this function's contract).
            unsafe { opened.go_on() };
        }
        // The next sample is looked for where this one's search ended: else all would look at the same windows.
        while opened.window < LAST {
            opened.window += 1;
            if let Some(start) = taken_in(opened.chunk, opened.window) {
                return Some(start);
            }
        }
        None
    }

    /// # Safety
    /// - the lock is held; the chunk is zero, and in no area.
    unsafe fn add(&mut self, chunk: usize) {
        // SAFETY: the heads of this area's chunks, and of the new one (this function's contract).
        let next = unsafe {
            match self.0 {
                Some(opened) => std::mem::replace(&mut (*head(opened.chunk)).next, chunk),
                None => chunk,
            }
        };
        // SAFETY: the new chunk is zero and nobody else's (this function's contract).
        unsafe { head(chunk).write(Head { next, live: 0 }) };
        self.0 = Some(Opened { chunk, window: FIRST, at: chunk, at_window: FIRST });
    }

    /// Gives a place back; returns its chunk if nothing else is in that, which is in this area no longer. The one that
    /// was made last stays.
    ///
    /// # Safety
    /// - the lock is held; the place is one of [`place`](Self::place).
    unsafe fn give_back(&mut self, start: usize, bytes: usize) -> Option<usize> {
        let chunk = start & !(CHUNK - 1);
        let opened = self.0.as_mut()?;
        // SAFETY: the chunk's bits, and the heads of this area's chunks (this function's contract).
        unsafe {
            each_word(start, bytes, |word, mask| {
                word.write(word.read() & !mask);
                true
            });
            (*head(chunk)).live -= 1;
            if (*head(chunk)).live > 0 || chunk == opened.chunk {
                return None;
            }
            let next = (*head(chunk)).next;
            let mut before = next;
            while (*head(before)).next != chunk {
                before = (*head(before)).next;
            }
            (*head(before)).next = next;
            if opened.at == chunk {
                (opened.at, opened.at_window) = (next, FIRST);
            }
        }
        Some(chunk)
    }
}

impl Samples {
    /// Samples take whole units of the range, beside those of a pool over the same one.
    pub(super) fn over(range: Range) -> Self {
        Self { range, state: held_across_fork(State(Locked::new(Area(None)))) }
    }

    /// Room for so many bytes behind so many others, at an address that agrees with the twin's, but for its last four
    /// bits, which are 0: jemalloc aligns blocks of up to 8 bytes to 8. Both sizes are multiples of 16. What is in it
    /// is anything.
    pub(super) fn allocate(&self, twin: usize, before: usize, room_bytes: usize) -> Option<NonNull<u8>> {
        debug_assert!(room_bytes.is_multiple_of(GRAIN) && before.is_multiple_of(GRAIN));
        debug_assert!(before < WINDOW && room_bytes < WINDOW);
        let twin = twin & !(GRAIN - 1);
        loop {
            // SAFETY: the lock is held.
            let place = |area: &mut Area| unsafe { area.place(twin, before, before + room_bytes) };
            if let Some(start) = self.state.0.with(place) {
                return NonNull::new(std::ptr::with_exposed_provenance_mut(start + before));
            }
            let chunk = self.range.map(CHUNK, CHUNK)?.as_ptr().expose_provenance();
            // SAFETY: a new unit of the range is zero, and nobody else's.
            self.state.0.with(|area| unsafe { area.add(chunk) });
        }
    }

    /// # Safety
    /// - a block of [`allocate`](Self::allocate) with these sizes, which is not used again.
    pub(super) unsafe fn release(&self, block: NonNull<u8>, before: usize, room_bytes: usize) {
        let start = block.addr().get() - before;
        // SAFETY: a place of this area (this function's contract).
        let empty = self.state.0.with(|area| unsafe { area.give_back(start, before + room_bytes) });
        if let Some(chunk) = empty.and_then(|chunk| NonNull::new(std::ptr::with_exposed_provenance_mut(chunk))) {
            // SAFETY: a unit that `map` gave, which is in no area and has no sample.
            unsafe { self.range.unmap(chunk, CHUNK) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{CHUNK, FIRST, LAST, NonNull, Range, Samples, WINDOW, head};
    use crate::random::Random;

    const BEFORE: usize = 48;

    fn samples() -> Samples {
        let [range] = Range::reserve::<1>().expect("addresses");
        Samples::over(range)
    }

    fn twin(random: &mut Random) -> usize {
        (1 << 30) + random.below(1 << 17) * 8
    }

    fn chunks(samples: &Samples) -> usize {
        samples.state.0.with(|area| {
            let Some(opened) = area.0 else { return 0 };
            // SAFETY: heads of this area's chunks, under its lock.
            let next = |chunk| unsafe { (*head(chunk)).next };
            1 + std::iter::successors(Some(next(opened.chunk)), |&chunk| Some(next(chunk)))
                .take_while(|&chunk| chunk != opened.chunk)
                .count()
        })
    }

    /// Made and freed at random: each agrees with its twin, and keeps what is in it.
    #[test]
    fn samples_agree_with_their_twins_and_none_lies_in_another() {
        let (samples, mut random) = (samples(), Random::new(1));
        let mut live: Vec<(NonNull<u8>, usize, u8)> = Vec::new();
        for step in 0..200_000_usize {
            // It fills up, and empties, several times.
            let fills = step / 25_000 % 2 == 0;
            if live.is_empty() || random.below(4) < if fills { 3 } else { 1 } {
                let (twin, room) = (twin(&mut random), 16 * (1 + random.below(70)));
                let block = samples.allocate(twin, BEFORE, room).expect("memory");
                assert_eq!(block.addr().get() % WINDOW, twin % WINDOW / 16 * 16);
                // SAFETY: the block has so many bytes before it and behind it.
                unsafe { block.sub(BEFORE).write_bytes(step as u8, BEFORE + room) };
                live.push((block, room, step as u8));
            } else {
                let (block, room, what) = live.swap_remove(random.below(live.len()));
                // SAFETY: a live block, all of which was written.
                unsafe {
                    let all = std::slice::from_raw_parts(block.sub(BEFORE).as_ptr(), BEFORE + room);
                    assert!(all.iter().all(|&byte| byte == what));
                    samples.release(block, BEFORE, room);
                }
            }
        }
        for (block, room, _) in live {
            // SAFETY: a live block.
            unsafe { samples.release(block, BEFORE, room) };
        }
        assert_eq!(chunks(&samples), 1, "those that are empty go back, but for the last one");
    }

    #[test]
    fn they_lie_close_and_chunks_go_back_when_they_are_empty() {
        const ROOM: usize = 80;
        let (samples, mut random) = (samples(), Random::new(1));
        let mut live: Vec<_> =
            (0..100_000).map(|_| samples.allocate(twin(&mut random), BEFORE, ROOM).expect("memory")).collect();
        let taken = chunks(&samples) * CHUNK;
        let used = live.len() * (BEFORE + ROOM);
        assert!(taken > 3 * CHUNK && taken < used * 5 / 2, "{taken} bytes for {used}");
        for _ in 0..live.len() {
            let block = live.swap_remove(random.below(live.len()));
            // SAFETY: a live block.
            unsafe { samples.release(block, BEFORE, ROOM) };
        }
        assert_eq!(chunks(&samples), 1);
    }

    /// Windows at both ends of a chunk, and places that begin and end in a neighbouring one.
    #[test]
    fn a_chunk_has_room_for_twins_at_each_edge_of_a_window() {
        let samples = samples();
        for offset in [0, 16, WINDOW - 16] {
            let twin = (1 << 30) + offset;
            let blocks: Vec<_> =
                (FIRST..=LAST).map(|_| samples.allocate(twin, BEFORE, 2048).expect("memory")).collect();
            let all = chunks(&samples);
            for block in blocks {
                assert_eq!(block.addr().get() % WINDOW, offset);
                // SAFETY: a live block.
                unsafe {
                    block.sub(BEFORE).write_bytes(1, BEFORE + 2048);
                    samples.release(block, BEFORE, 2048);
                }
            }
            assert_eq!(all, 1, "twins at {offset}");
        }
    }
}
