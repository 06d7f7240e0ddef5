//! What the requests of a name needed lately: how much the next one is to reserve, if it leaves that to us.
//!
//! A histogram in the buckets of `buckets`, whose counts are halved every [`HALF`] requests: it has the weight of the
//! last hundred or so, and forgets a change of code in a few hundred. Kept for names that asked for it only.

use super::buckets::{BUCKETS, bucket_of, end_of};
use super::snapshot::UNNAMED;
use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, held_across_fork};
use crate::unattributed::unattributed;
use std::collections::BTreeMap;
use std::sync::Arc;

/// After so many requests older ones have half of their weight.
const HALF: u32 = 64;
/// Fewer say nothing yet.
const COLD: f32 = 10.0;
/// After so many it is worked out anew what was enough.
const SOME: u32 = 8;
/// Less than this of one request says nothing any more.
const NOTHING: f32 = 1.0 / 1024.0;
/// The part of the requests for which the reservation is to be enough, and what is added for those to come.
const PART: f32 = 0.95;
const HEADROOM: f64 = 1.2;
/// At least so much is reserved.
const LEAST_BYTES: usize = 64 << 10;
/// So many names have a history; others stay cold.
const MAX_NAMES: usize = 1024;

/// The peaks of one name's requests.
pub(crate) struct History(Locked<Peaks>);

struct Peaks {
    counts: Vec<f32>,
    /// Their sum, and the highest that is not zero: so it takes a few steps to find what was enough.
    all: f32,
    last: usize,
    /// Starts again at each half.
    since_half: u32,
    /// What was enough for [`PART`] of them, worked out again at some of the additions; `None` while they are too few,
    /// and where a part of them has no bucket.
    enough_bytes: Option<u64>,
}

impl Peaks {
    fn add(&mut self, bucket: usize) {
        self.counts[bucket] += 1.0;
        self.all += 1.0;
        self.last = self.last.max(bucket);
        self.since_half += 1;
        let is_young = self.enough_bytes.is_none();
        if self.since_half == HALF {
            self.since_half = 0;
            let known = &mut self.counts[..=self.last];
            known.iter_mut().for_each(|count| *count = if *count < NOTHING { 0.0 } else { *count / 2.0 });
            self.all = known.iter().sum();
            self.last = known.iter().rposition(|count| *count > 0.0).unwrap_or(0);
        }
        if is_young || self.since_half.is_multiple_of(SOME) {
            self.enough_bytes = self.enough();
        }
    }

    fn enough(&self) -> Option<u64> {
        if self.all < COLD {
            return None;
        }
        // The lowest bucket with which it is enough for that part, from the highest one on.
        let (mut up_to, mut reached) = (self.all, None);
        for (bucket, &count) in self.counts[..=self.last].iter().enumerate().rev() {
            if up_to < self.all * PART {
                break;
            }
            if count > 0.0 {
                reached = Some(bucket);
            }
            up_to -= count;
        }
        reached.filter(|&bucket| bucket < BUCKETS).map(end_of)
    }
}

impl HeldAcrossFork for History {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.0.lock());
    }
}

struct Histories(Locked<BTreeMap<Arc<str>, Arc<History>>>);

impl HeldAcrossFork for Histories {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.0.lock());
    }
}

/// The history of a name, which lives as long as the process; `None` where too many names have one.
pub(crate) fn history_of(name: Option<&str>) -> Option<Arc<History>> {
    static HISTORIES: Made<Arc<Histories>> = Made::new();
    let histories = HISTORIES.get_or_make(|| held_across_fork(Histories(Locked::new(BTreeMap::new()))));
    let name = name.unwrap_or(UNNAMED);
    let (known, is_full) = histories.0.with(|all| (all.get(name).cloned(), all.len() >= MAX_NAMES));
    if known.is_some() || is_full {
        return known;
    }
    let _unattributed = unattributed();
    let fresh = held_across_fork(History::new());
    // Another thread may have been faster: then its history counts.
    Some(histories.0.with(|all| Arc::clone(all.entry(name.into()).or_insert(fresh))))
}

impl History {
    fn new() -> Self {
        Self(Locked::new(Peaks {
            counts: vec![0.0; BUCKETS + 1],
            all: 0.0,
            last: 0,
            since_half: 0,
            enough_bytes: None,
        }))
    }

    /// Adds what a request needed, in bytes.
    pub(crate) fn add(&self, peak_bytes: usize) {
        let bucket = bucket_of(peak_bytes as u64).unwrap_or(BUCKETS);
        self.0.with(|peaks| peaks.add(bucket));
    }

    /// How much the next one is to reserve: what was enough for 95 % of the last ones, times 1.2, but no more than
    /// `limit_bytes`, which it is while too few have ended.
    pub(crate) fn reserve_bytes(&self, limit_bytes: usize) -> usize {
        let enough = self.0.with(|peaks| peaks.enough_bytes);
        enough.map_or(limit_bytes, |bytes| ((bytes as f64 * HEADROOM) as usize).max(LEAST_BYTES).min(limit_bytes))
    }
}

#[cfg(all(test, not(ctxalloc_loom)))]
mod tests {
    use super::{COLD, History, LEAST_BYTES, PART, end_of, history_of};
    use std::sync::Arc;

    const MIB: usize = 1 << 20;
    const LIMIT: usize = 1000 * MIB;

    #[test]
    fn until_ten_have_ended_the_limit_is_reserved() {
        let history = History::new();
        for _ in 0..9 {
            assert_eq!(history.reserve_bytes(LIMIT), LIMIT);
            history.add(MIB);
        }
        assert_eq!(history.reserve_bytes(LIMIT), LIMIT);
        history.add(MIB);
        assert_eq!(history.reserve_bytes(LIMIT), MIB * 6 / 5);
        assert_eq!(history.reserve_bytes(MIB), MIB, "never more than the limit");
    }

    #[test]
    fn it_is_enough_for_nineteen_of_twenty() {
        let history = History::new();
        for number in 1..=56 {
            history.add(if number % 28 == 0 { 500 * MIB } else { number * MIB });
        }
        let reserved = history.reserve_bytes(LIMIT);
        let exact = 55.0 * 1.2 * MIB as f64; // 54 of 56 are at most this
        assert!(reserved as f64 >= exact && reserved as f64 <= exact * 1.05, "{reserved}");
        (0..8).for_each(|_| history.add(900 * MIB));
        assert!(history.reserve_bytes(LIMIT) >= 500 * MIB, "ten of sixty-four are more than one of twenty");
    }

    #[test]
    fn a_change_is_forgotten_in_a_few_hundred_requests() {
        let history = History::new();
        (0..1000).for_each(|_| history.add(100 * MIB));
        (0..300).for_each(|_| history.add(MIB));
        assert_eq!(history.reserve_bytes(LIMIT), MIB * 6 / 5);
        (0..32).for_each(|_| history.add(100 * MIB));
        assert!(history.reserve_bytes(LIMIT) >= 120 * MIB, "and more is noticed sooner");
    }

    #[test]
    fn requests_that_need_nothing_reserve_a_little() {
        let history = History::new();
        (0..20).for_each(|_| history.add(0));
        assert_eq!(history.reserve_bytes(LIMIT), LEAST_BYTES);
        (0..200).for_each(|_| history.add(usize::MAX));
        assert_eq!(history.reserve_bytes(LIMIT), LIMIT, "what has no bucket is as large as may be");
    }

    #[test]
    fn what_was_enough_is_found_from_above_as_by_adding_all_up() {
        let (history, mut state) = (History::new(), 7_u32);
        for number in 0..5000_u32 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            history.add(1 << (state >> 27) >> (number / 700));
            history.0.with(|peaks| {
                let all: f32 = peaks.counts.iter().sum();
                let mut below = 0.0;
                let reached = peaks.counts.iter().position(|count| {
                    below += count;
                    *count > 0.0 && below >= all * PART
                });
                assert!((peaks.all - all).abs() < 0.001, "{number}: {} {all}", peaks.all);
                assert_eq!(peaks.enough(), reached.filter(|_| all >= COLD).map(end_of), "{number}");
            });
        }
    }

    #[test]
    fn a_name_has_one_history() {
        let one = history_of(Some("a name with a history")).expect("there are few");
        assert!(Arc::ptr_eq(&one, &history_of(Some("a name with a history")).expect("there are few")));
        assert!(!Arc::ptr_eq(&one, &history_of(None).expect("there are few")));
    }
}
