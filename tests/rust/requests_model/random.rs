//! Random numbers, and how many programs are made of them.

/// xorshift: the same numbers everywhere.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % end
    }

    pub(crate) fn one_in(&mut self, chances: usize) -> bool {
        self.below(chances) == 0
    }

    pub(crate) fn size(&mut self) -> usize {
        match self.below(10) {
            0 => 1 + self.below(32),
            1..=5 => 1 + self.below(1024),
            6..=8 => 1025 + self.below(20_000),
            _ => 250_000 + self.below(300_000),
        }
    }
}

pub(crate) fn times() -> usize {
    std::env::var("CTXALLOC_STRESS").ok().and_then(|times| times.parse().ok()).unwrap_or(1)
}
