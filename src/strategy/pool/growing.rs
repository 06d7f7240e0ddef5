//! Which large blocks grew lately: where they end. The room behind them is not for others.

/// Where the blocks end that grew lately: the room that follows is theirs as long as there is other.
#[derive(Debug, Default)]
pub(super) struct Growing {
    /// Numbers of pages.
    ends: [usize; 16],
    next: usize,
}

impl Growing {
    /// A block that ends here is to grow.
    pub(super) fn begins(&mut self, end: usize) {
        self.ends[self.next] = end;
        self.next = (self.next + 1) % self.ends.len();
    }

    pub(super) fn goes_on(&mut self, from: usize, to: usize) {
        match self.ends.iter_mut().find(|end| **end == from) {
            Some(end) => *end = to,
            None => self.begins(to),
        }
    }

    pub(super) fn has(&self, end: usize) -> bool {
        self.ends.contains(&end)
    }
}
