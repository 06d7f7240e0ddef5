//! Which small blocks are samples, and what one of them stands for.

use super::shared::{Kind, Thread};
use std::sync::atomic::{AtomicU64, Ordering};

/// Blocks of so many bytes and more are charged each.
pub(super) const EXACT_FROM: usize = 1024;

/// On average so many bytes of small blocks have one sample.
const SAMPLE: u64 = 16 << 10;
/// A thread looks who is selected at least once in so many bytes of small blocks, where the binding remembers that.
const LOOK: i64 = 2048;
/// Before a thread has asked for so many bytes of small blocks it looks again whether its own code does.
const BETWEEN_LOOKS: u64 = 512;

impl Thread {
    /// An exponentially distributed number with the mean [`SAMPLE`]: then each byte is as likely as any other, whatever
    /// the program's pattern.
    #[inline]
    fn draw(&mut self) -> i64 {
        if self.draws_left == 0 {
            self.draw_some();
        }
        self.draws_left -= 1;
        self.draws[self.draws_left as usize].into()
    }

    /// Several at a time: between two samples a program needs the caches for other things than this.
    #[cold]
    #[inline(never)]
    fn draw_some(&mut self) {
        for at in 0..self.draws.len() {
            let uniform = ((self.next_random() >> 11) + 1) as f64 / (1u64 << 53) as f64;
            self.draws[at] = (-ln(uniform) * SAMPLE as f64) as i32; // 53 bits: at most 37 times the mean
        }
        self.draws_left = self.draws.len() as u32;
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
            self.sample_left = self.draw();
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
            self.sample_left = self.draw();
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
/// many bytes has a sample, `1 - exp(-x)` with `x = bytes / SAMPLE`. The reciprocal of that is `1 / x + 1 / 2 + x / 12`
/// as far as it matters here: the next term is below a hundred-millionth.
#[inline]
pub(super) fn weight_of_sample(kind: Kind, size_bytes: usize, drawn_bytes: u32) -> usize {
    debug_assert!(drawn_bytes as usize <= EXACT_FROM + 8);
    let (taken, bytes) = (taken(kind, size_bytes) as u64, u64::from(drawn_bytes));
    (taken * (12 * SAMPLE * SAMPLE + 6 * SAMPLE * bytes + bytes * bytes) / (12 * SAMPLE * bytes)) as usize
}

/// The logarithm of a positive number, to seven places. Not libm's, which has tables.
fn ln(number: f64) -> f64 {
    const MANTISSA: u64 = (1 << 52) - 1;
    let bits = number.to_bits();
    let exponent = (bits >> 52) as i64 - 1023;
    let one_to_two = f64::from_bits(bits & MANTISSA | 1023 << 52);
    let x = (one_to_two - 1.0) / (one_to_two + 1.0);
    let square = x * x;
    let series = (1..=7).rev().fold(0.0, |sum, n| sum * square + 1.0 / f64::from(2 * n - 1));
    exponent as f64 * std::f64::consts::LN_2 + 2.0 * x * series
}

#[cfg(test)]
mod tests {
    use super::{EXACT_FROM, Kind, SAMPLE, fresh_state, ln, taken, weight_of_sample};

    #[test]
    fn threads_at_one_address_have_numbers_of_their_own() {
        let states: Vec<u64> = (0..10_000).map(|_| fresh_state(0x7F00_1234_5680)).collect();
        let mean = states.iter().map(|&state| state as f64 / 2_f64.powi(64)).sum::<f64>() / states.len() as f64;
        assert!((mean - 0.5).abs() < 0.02, "{mean}"); // a deviation is 0.003
        assert!(states.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn what_is_computed_by_series_is_what_the_library_computes() {
        for step in 1..=10_000 {
            for number in [f64::from(step) / 10_000.0, f64::from(step) / f64::from(1 << 30), f64::from(step)] {
                assert!((ln(number) - number.ln()).abs() < 2e-8, "ln({number})");
            }
        }
        for bytes in 1..=EXACT_FROM as u32 + 8 {
            let chance = -(-f64::from(bytes) / SAMPLE as f64).exp_m1();
            let exact = taken(Kind::Obj, EXACT_FROM) as f64 / chance;
            let weight = weight_of_sample(Kind::Obj, EXACT_FROM, bytes) as f64;
            assert!(weight <= exact && exact - weight < 1.001, "{bytes} bytes: {weight}, {exact}"); // whole bytes
        }
    }
}
