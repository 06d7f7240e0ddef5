//! Random numbers, and how many programs are made of them.

#[path = "../../../src/random.rs"]
mod numbers;

pub(crate) use numbers::Random;

impl Random {
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
