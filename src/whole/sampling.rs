//! Which small blocks are samples, and what one of them stands for.

use super::shared::{Kind, Thread};
use std::sync::atomic::{AtomicU64, Ordering};

/// Blocks of so many bytes and more are charged each.
pub(super) const EXACT_FROM: usize = 1024;

/// On average so many bytes of small blocks have one sample.
const SAMPLE: u64 = 32 << 10;
/// And so many at least lie between two: no block has two of them.
const BETWEEN_SAMPLES: u64 = SAMPLE / 2;
const _: () = assert!(BETWEEN_SAMPLES as usize > EXACT_FROM + size_of::<usize>());
/// A thread looks who is selected at least once in so many bytes of small blocks, where the binding remembers that.
const LOOK: i64 = 2048;
/// Before a thread has asked for so many bytes of small blocks it looks again whether its own code does.
const BETWEEN_LOOKS: u64 = 512;

impl Thread {
    /// From one sample to the next: as often any number from [`BETWEEN_SAMPLES`] to three times as many. A program
    /// cannot have its blocks where no sample is, since nothing in it repeats; and what is alive is estimated better
    /// than by a Poisson process, which has its samples in heaps: where all stays alive, more than three times as well.
    #[inline]
    fn draw(&mut self) -> i64 {
        (BETWEEN_SAMPLES + below(self.next_random(), SAMPLE)) as i64
    }

    /// From where a thread begins to its first sample: as if there had been others before, at a byte that is as likely
    /// as any other. So each byte from the first one on is as likely to have a sample, one in [`SAMPLE`].
    #[cold]
    #[inline(never)]
    fn draw_first(&mut self) -> i64 {
        let [which, one, another] = std::array::from_fn(|_| self.next_random());
        // That a distance is longer than so many bytes is certain below BETWEEN_SAMPLES, and ever less likely
        // above: so half of the first ones are below, all as likely, and of the others a long one is less likely.
        let first = if which >> 63 == 0 {
            below(one, BETWEEN_SAMPLES)
        } else {
            BETWEEN_SAMPLES + SAMPLE - 1 - below(one, SAMPLE).max(below(another, SAMPLE))
        };
        first as i64
    }

    fn next_random(&mut self) -> u64 {
        if self.random == 0 {
            self.random = fresh_state(std::ptr::from_ref(self).addr());
        }
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// Takes what was counted down off the sample's distance, the block that this look is for included; whether a
    /// sample is due. `remembers`: the binding does.
    pub(super) fn settle(&mut self, remembers: bool) -> bool {
        if !self.has_looked() {
            self.sample_left = self.draw_first();
        }
        self.settle_again(remembers)
    }

    /// Whether this is not its first look.
    #[inline(always)]
    pub(super) fn has_looked(&self) -> bool {
        self.granted != 0
    }

    /// [`settle`](Self::settle) for a thread that has looked before.
    #[inline(always)]
    pub(super) fn settle_again(&mut self, remembers: bool) -> bool {
        self.sample_left -= self.granted - self.left;
        let is_due = self.sample_left < 0;
        if is_due {
            self.sample_left = (self.sample_left + self.draw()).max(0); // from where the sample is, within the block
        }
        self.granted = if remembers { (self.sample_left + 1).min(LOOK) } else { self.sample_left + 1 };
        self.left = self.granted;
        is_due
    }

    /// The next block is looked at, whatever its size. The sample's distance stays as it is.
    pub(crate) fn look_soon(&mut self) {
        self.look_at(0);
    }

    /// A block is looked at before [`BETWEEN_LOOKS`] more bytes have been asked for: at random, or a loop of a program
    /// might have each look at the same place.
    pub(crate) fn look_again(&mut self) {
        let at = self.next_random() >> 32;
        self.look_at((at % BETWEEN_LOOKS) as i64);
    }

    fn look_at(&mut self, bytes: i64) {
        if self.left > bytes {
            self.granted = (self.granted - (self.left - bytes)).max(1); // 0 is a thread that has not looked
            self.left = bytes;
        }
    }

    /// Sets how many bytes it may ask for before its next look; returns how many these were.
    pub(crate) fn replace_left(&mut self, left: i64) -> i64 {
        std::mem::replace(&mut self.left, left)
    }
}

/// Where a thread's random numbers begin: elsewhere for each thread that ever was, also where the next one has the
/// address of one that has ended. Else short threads all have their samples at the same places, or none.
fn fresh_state(address: usize) -> u64 {
    static THREADS: AtomicU64 = AtomicU64::new(0);
    let number = THREADS.fetch_add(1, Ordering::Relaxed);
    // SplitMix64's steps, which spread what tells numbers apart over all bits.
    let mut state = (address as u64).wrapping_add(number.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    state = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (state ^ (state >> 31)).max(1)
}

/// What pymalloc or glibc takes for a small block.
pub(super) fn taken(kind: Kind, size_bytes: usize) -> usize {
    match kind {
        Kind::Native => (size_bytes + 8).next_multiple_of(16).max(32),
        Kind::Mem | Kind::Obj => size_bytes.next_multiple_of(16).max(16),
    }
}

/// How many bytes `preload.c` counts down for a small block.
pub(super) fn counted(kind: Kind, size_bytes: usize) -> u32 {
    (size_bytes + if kind == Kind::Native { 8 } else { 0 }).max(1) as u32
}

/// What a sample that was drawn by so many bytes stands for: what is taken for it, divided by how likely a block of so
/// many bytes has a sample.
#[inline]
pub(super) fn weight_of_sample(kind: Kind, size_bytes: usize, drawn_bytes: u32) -> usize {
    weight_of_taken(taken(kind, size_bytes), drawn_bytes)
}

/// The same where as many bytes are taken for it.
#[inline]
pub(super) fn weight_of_taken(taken_bytes: usize, drawn_bytes: u32) -> usize {
    debug_assert!(drawn_bytes as usize <= EXACT_FROM + 8);
    (taken_bytes as u32 * SAMPLE as u32 / drawn_bytes) as usize
}

/// What an allocator takes for a block of `malloc` that has so much room: glibc 8 bytes more, which makes it a multiple
/// of 16, as the room is with others.
pub(super) fn taken_for_room(room_bytes: usize) -> usize {
    room_bytes.next_multiple_of(16)
}

/// A random number below this one, which is a power of two.
#[inline]
fn below(random: u64, end: u64) -> u64 {
    debug_assert!(end.is_power_of_two());
    random >> (64 - end.trailing_zeros())
}

#[cfg(test)]
mod tests {
    use super::super::shared::Thread;
    use super::{EXACT_FROM, Kind, SAMPLE, counted, fresh_state, taken, weight_of_sample};

    #[test]
    fn threads_at_one_address_have_numbers_of_their_own() {
        let states: Vec<u64> = (0..10_000).map(|_| fresh_state(0x7F00_1234_5680)).collect();
        let mean = states.iter().map(|&state| state as f64 / 2_f64.powi(64)).sum::<f64>() / states.len() as f64;
        assert!((mean - 0.5).abs() < 0.02, "{mean}"); // a deviation is 0.003
        assert!(states.windows(2).all(|pair| pair[0] != pair[1]));
    }

    /// A thread of its own, which has asked for nothing.
    fn thread() -> Thread {
        // SAFETY: numbers, pointers and options of references, for all of which zeros are a value.
        unsafe { std::mem::zeroed() }
    }

    /// Whether a block of so many bytes has a sample, as `preload.c` asks.
    fn is_sample(thread: &mut Thread, bytes: u32) -> bool {
        thread.left -= i64::from(bytes);
        thread.left < 0 && thread.settle(false)
    }

    /// From a thread's first byte on, wherever that is in a block, of whatever size.
    #[test]
    fn each_byte_is_as_likely_to_have_a_sample() {
        const PARTS: usize = 24;
        const THREADS: usize = 40_000;
        for bytes in [16, 504, 1031] {
            let (mut found, per_part) = ([0; PARTS], SAMPLE as u32 / 8 / bytes);
            for _ in 0..THREADS {
                let mut thread = thread();
                for part in &mut found {
                    *part += (0..per_part).filter(|_| is_sample(&mut thread, bytes)).count();
                }
            }
            let expected = THREADS as f64 * f64::from(per_part * bytes) / SAMPLE as f64; // some 5,000
            for (part, &found) in found.iter().enumerate() {
                assert!((found as f64 / expected - 1.0).abs() < 0.06, "{bytes} bytes, {part}: {found}, {expected}");
            }
        }
    }

    /// How far off the estimate of `kept` blocks of 1000 is, in standard deviations of a Poisson process, which is what
    /// `error_bytes` says.
    fn deviation(kept: fn(u32) -> bool) -> f64 {
        const BYTES: u32 = 64;
        const BLOCKS: u32 = 20_000;
        const TIMES: usize = 1000;
        let weight = f64::from(BYTES) * SAMPLE as f64 / f64::from(BYTES);
        let alive = (0..BLOCKS).filter(|&at| kept(at)).count() as f64 * f64::from(BYTES);
        let squares = (0..TIMES).map(|_| {
            let mut thread = thread();
            let samples = (0..BLOCKS).filter(|&at| is_sample(&mut thread, BYTES) && kept(at)).count();
            (samples as f64 * weight - alive).powi(2)
        });
        (squares.sum::<f64>() / TIMES as f64).sqrt() / (alive * SAMPLE as f64).sqrt()
    }

    #[test]
    fn an_estimate_is_no_worse_than_is_said_of_it() {
        let all = deviation(|_| true);
        assert!(all < 0.4, "{all}"); // 0.29 in the long run
        for (what, of_some) in [
            ("each second", deviation(|at| at % 2 == 0)),
            ("a tenth, spread", deviation(|at| at.wrapping_mul(2_654_435_761) % 10 == 0)),
            ("those of each second 32 KiB", deviation(|at| at / 512 % 2 == 0)),
            ("8 KiB in each 32", deviation(|at| at % 512 < 128)),
            ("8 KiB in each 40", deviation(|at| at % 640 < 128)),
            ("1 KiB in each 44", deviation(|at| at % 704 < 16)),
        ] {
            assert!(of_some < 1.1, "{what}: {of_some}"); // a deviation of 1000 times is 0.022
        }
    }

    #[test]
    fn a_sample_stands_for_what_has_none() {
        for kind in [Kind::Native, Kind::Mem, Kind::Obj] {
            for size in 0..EXACT_FROM {
                let counted = counted(kind, size);
                let exact = taken(kind, size) as f64 * SAMPLE as f64 / f64::from(counted);
                let weight = weight_of_sample(kind, size, counted) as f64;
                assert!(weight <= exact && exact - weight < 1.0, "{size} bytes: {weight}, {exact}"); // whole bytes
            }
        }
    }
}
