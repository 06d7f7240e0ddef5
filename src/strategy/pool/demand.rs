//! How many bytes of large blocks the next peak is expected to need.

use std::time::Duration;

/// One part in this many of the demand may be kept beyond it.
const SLACK: usize = 32;

/// Or one part in this many of what the use varies by, within these bounds, where that is more: blocks of several sizes
/// leave holes. What goes back at a time is half of the lower bound.
const SLACK_OF_SWING: usize = 4;
const MIN_SLACK: usize = 4 << 20;
const MAX_SLACK: usize = 16 << 20;

/// How long a peak is expected to come again as high as it was: this long, up to twice as long.
const TURN: Duration = Duration::from_millis(20);

/// An estimate of the bytes in use at the next peak, from earlier peaks.
///
/// A peak is where a block comes back after one was taken. The estimate is the highest of the last turns, or the
/// running mean plus the running deviation, whichever is more. So a request that has many peaks and comes again and
/// again is expected to need its highest.
///
/// Under light load peaks are rare, so the estimate is at most twice the highest peak of the last moments
/// (decision 0031).
#[derive(Debug, Default)]
pub(super) struct Demand {
    mean_bytes: usize,
    deviation_bytes: usize,
    is_rising: bool,
    turns: Lately,
    turn_ends: Duration,
    moments: Lately,
}

/// What was in use in the present span of time and in the one before.
#[derive(Debug, Default)]
struct Lately {
    present: Use,
    before: Use,
}

/// The most and the least bytes in use.
#[derive(Debug, Default, Clone, Copy)]
struct Use {
    highest_bytes: usize,
    lowest_bytes: usize,
}

impl Use {
    /// Nobody has looked yet.
    const UNSEEN: Self = Self { highest_bytes: 0, lowest_bytes: usize::MAX };
}

impl Lately {
    /// Another span begins, and perhaps one has passed without anybody looking.
    fn next(&mut self, one_was_missed: bool) {
        self.before = if one_was_missed { Use::UNSEEN } else { self.present };
        self.present = Use::UNSEEN;
    }

    /// What is in use falls.
    fn fall(&mut self, from_bytes: usize, to_bytes: usize) {
        self.present.highest_bytes = self.present.highest_bytes.max(from_bytes);
        self.present.lowest_bytes = self.present.lowest_bytes.min(to_bytes);
    }

    fn highest_bytes(&self) -> usize {
        self.present.highest_bytes.max(self.before.highest_bytes)
    }

    fn lowest_bytes(&self) -> usize {
        self.present.lowest_bytes.min(self.before.lowest_bytes)
    }
}

impl Demand {
    /// A block was taken.
    pub(super) fn rise(&mut self) {
        self.is_rising = true;
    }

    /// Another moment begins, and perhaps one has passed without anybody looking.
    pub(super) fn next_moment(&mut self, one_was_missed: bool) {
        self.moments.next(one_was_missed);
    }

    /// A block comes back, and so much less is in use.
    pub(super) fn fall(&mut self, from_bytes: usize, to_bytes: usize, now: Duration) {
        if now >= self.turn_ends {
            self.turns.next(now.saturating_sub(self.turn_ends) >= TURN);
            self.turn_ends = now.saturating_add(TURN);
        }
        // What is in use rises only until a block comes back, so here is each span's highest.
        self.turns.fall(from_bytes, to_bytes);
        self.moments.fall(from_bytes, to_bytes);
        if std::mem::take(&mut self.is_rising) {
            let off = from_bytes.abs_diff(self.mean_bytes);
            self.deviation_bytes = self.deviation_bytes - self.deviation_bytes / 4 + off / 4;
            self.mean_bytes = self.mean_bytes - self.mean_bytes / 8 + from_bytes / 8;
        }
    }

    /// What the next peak is expected to need.
    pub(super) fn bytes(&self) -> usize {
        let usual = self.mean_bytes.saturating_add(self.deviation_bytes);
        usual.max(self.turns.highest_bytes()).min(self.moments.highest_bytes().saturating_mul(2))
    }

    /// How much may be kept beyond the expected bytes, so that holes serve too, and each return to the system is a
    /// larger one.
    pub(super) fn slack_bytes(&self, expected: usize) -> usize {
        let swing = expected.saturating_sub(self.moments.lowest_bytes());
        (swing / SLACK_OF_SWING).clamp(MIN_SLACK, MAX_SLACK).max(expected / SLACK)
    }
}

#[cfg(test)]
mod tests {
    use super::{Demand, SLACK};
    use std::time::Duration;

    /// After these peaks, one each two milliseconds.
    fn after(peaks: impl IntoIterator<Item = usize>) -> Demand {
        let mut demand = Demand::default();
        for (number, bytes) in peaks.into_iter().enumerate() {
            let now = Duration::from_millis(2 * number as u64);
            demand.rise();
            demand.fall(bytes, bytes / 2, now);
            demand.fall(bytes / 2, 0, now); // nothing was taken in between, so this is no peak
        }
        demand
    }

    #[test]
    fn demand_follows_a_rise_at_once_and_forgets_a_rare_one() {
        let big = 1 << 28;
        assert!(after([big]).bytes() >= big, "the first busy moment counts in full");
        assert!(after([big; 100]).bytes() >= big);
        assert!(after([big; 100]).bytes() < big + big / 8, "what is always wanted is not doubled");
        let rare = std::iter::once(big).chain([1 << 20; 40]);
        assert!(after(rare).bytes() < 8 << 20);
    }

    #[test]
    fn a_request_with_many_peaks_is_expected_to_need_its_highest() {
        let (high, low) = (64 << 20, 1 << 20);
        for lower_ones in 1..9 {
            let request = std::iter::once(high).chain(std::iter::repeat_n(low, lower_ones));
            let requests = std::iter::repeat_n(request, 20).flatten();
            assert!(after(requests).bytes() >= high, "{lower_ones} lower peaks");
        }
    }

    #[test]
    fn what_never_comes_back_allows_no_slack() {
        let base = 1 << 30;
        let mut demand = Demand::default();
        for number in 0..2000 {
            let now = Duration::from_millis(2 * number);
            if number % 600 == 0 {
                demand.next_moment(false);
            }
            demand.rise();
            demand.fall(base + (8 << 20), base, now);
        }
        assert_eq!(demand.slack_bytes(demand.bytes()), demand.bytes() / SLACK, "a quarter of 8 MiB is less");
        let demand = after([48 << 20; 40]);
        assert!(demand.slack_bytes(demand.bytes()) >= 12 << 20, "all of it comes back");
    }
}
