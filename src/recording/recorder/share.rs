//! Which requests are recorded: one in so many, and so few that recording keeps to its share of the time.

use super::super::encoded::rate;
use super::super::options::Options;
use super::Core;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// How often it looks what recording takes: after so many requests, and not more often than this.
const LOOKS_EACH: u64 = 64;
const LOOKS_AFTER_NS: u64 = 100_000_000;
const HIGHEST_ONE_IN: u64 = 1 << 20;
/// What may be spent beyond the share: a recording begins with requests, and its first ones are worth it.
const AHEAD_NS: u64 = 2_000_000;

impl Core {
    /// Whether a request is one of those that are recorded.
    pub(in crate::recording) fn chooses(&self) -> bool {
        let seen = self.seen.fetch_add(1, Relaxed);
        if seen % LOOKS_EACH == LOOKS_EACH - 1 {
            self.look();
        }
        let is_chosen = mixed(seen).is_multiple_of(self.one_in.load(Relaxed)) && self.can_afford_one();
        self.chosen.fetch_add(u64::from(is_chosen), Relaxed);
        is_chosen
    }

    /// Whether what was spent so far is within the share. It may be far beyond after one large request: nobody knows
    /// how large a request gets, and it is recorded whole.
    fn can_afford_one(&self) -> bool {
        let Some((options, began)) = self.with_a_share() else { return true };
        let spent = self.gather_spent();
        let may = began.elapsed().as_nanos() as f64 * options.share + AHEAD_NS as f64;
        if spent as f64 <= may {
            return true;
        }
        let times = ((spent as f64 / may).ceil() as u64).next_power_of_two();
        let least = u64::from(options.one_in).saturating_mul(times).min(HIGHEST_ONE_IN);
        if self.one_in.fetch_max(least, Relaxed) < least {
            self.output(|output| output.append(&rate(least)));
        }
        false
    }

    /// The recording's options and when it began, if it keeps to a share. `None` too where it has just ended.
    fn with_a_share(&self) -> Option<(Options, Instant)> {
        let found = self.session.with(|session| session.as_ref().map(|it| (it.options, it.began)));
        found.filter(|(options, _)| options.share < 1.0)
    }

    /// What recording has taken since it began.
    fn gather_spent(&self) -> u64 {
        for shard in &self.shards {
            self.spent_ns.fetch_add(shard.with(|shard| std::mem::take(&mut shard.spent_ns)), Relaxed);
        }
        self.spent_ns.load(Relaxed)
    }

    /// Records fewer requests where recording takes more than its share, and more where it takes far less.
    #[cold]
    fn look(&self) {
        let Some((options, began)) = self.with_a_share() else { return };
        let (now, spent) = (began.elapsed().as_nanos() as u64, self.gather_spent());
        let since = self.looked.with(|looked| {
            let (then, before) = *looked;
            (now.saturating_sub(then) >= LOOKS_AFTER_NS).then(|| {
                *looked = (now, spent);
                (now - then, spent.saturating_sub(before))
            })
        });
        let Some((time, spent_since)) = since else { return };
        let (share, one_in) = (spent_since as f64 / time as f64, self.one_in.load(Relaxed));
        let next = if share > options.share {
            (one_in * 2).min(HIGHEST_ONE_IN)
        } else if share < options.share / 4.0 && spent as f64 <= now as f64 * options.share {
            (one_in / 2).max(u64::from(options.one_in))
        } else {
            one_in
        };
        if next != one_in {
            self.one_in.store(next, Relaxed);
            self.output(|output| output.append(&rate(next)));
        }
    }
}

/// Numbers in order become random ones: work that comes in turns is recorded evenly.
fn mixed(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}
