//! `Drain`: how fast a queue gets shorter, which tells those whom it has no place for when to come again.

use std::time::{Duration, Instant};

/// After so long what was counted has half of its weight.
const HALF: Duration = Duration::from_secs(5);
/// Less weight than that of one waiter a minute ago says nothing any more.
const NOTHING: f64 = 1.0 / 4096.0;

/// What is left of a weight after so long.
fn fades(time: Duration) -> f64 {
    0.5_f64.powf(time.as_secs_f64() / HALF.as_secs_f64())
}

/// Counts who got room, and the time in which somebody waited for it, both with weights that fade: a pause says nothing
/// of how fast a queue gets shorter, and what has just begun is not slow because it was not there before.
#[derive(Debug, Clone, Copy)]
pub(super) struct Drain {
    weight: f64,
    /// In seconds.
    waited: f64,
    at: Instant,
}

impl Drain {
    /// For a queue whose first one came then.
    pub(super) fn new(since: Instant) -> Self {
        Self { weight: 0.0, waited: 0.0, at: since }
    }

    fn weight(&self, now: Instant) -> f64 {
        self.weight * fades(now.saturating_duration_since(self.at))
    }

    /// In seconds, where somebody has waited since then, or since it was counted last.
    fn waited(&self, since: Instant, now: Instant) -> f64 {
        let lately = fades(now.saturating_duration_since(since.max(self.at)));
        // A second fades as it goes by: so long in all, if somebody always waited.
        let always = HALF.as_secs_f64() / std::f64::consts::LN_2;
        self.waited * fades(now.saturating_duration_since(self.at)) + always * (1.0 - lately)
    }

    /// One more got room, who had waited since then.
    pub(super) fn count(&mut self, since: Instant, now: Instant) {
        (self.weight, self.waited, self.at) = (self.weight(now) + 1.0, self.waited(since, now), now);
    }

    pub(super) fn has_faded(&self, now: Instant) -> bool {
        self.weight(now) < NOTHING
    }

    /// How long so many waiters will take, the oldest of whom came then; `None` where nobody got room lately.
    #[cfg_attr(not(any(feature = "python", feature = "tower")), allow(dead_code, reason = "only services ask"))]
    pub(super) fn time_of(&self, waiters: usize, since: Instant, now: Instant) -> Option<Duration> {
        let rate = self.weight(now) / self.waited(since, now);
        let time = (!self.has_faded(now)).then(|| Duration::try_from_secs_f64(waiters as f64 / rate));
        time.and_then(Result::ok)
    }
}

#[cfg(test)]
mod tests {
    use super::Drain;
    use std::time::{Duration, Instant};

    #[test]
    fn a_steady_queue_takes_as_long_as_it_did() {
        let began = Instant::now();
        let mut drain = Drain::new(began);
        assert_eq!(drain.time_of(1, began, began), None, "nobody got room yet");
        let mut now = began;
        for turn in 1..=400 {
            now += Duration::from_millis(100);
            drain.count(began, now);
            if turn > 2 {
                let seconds = drain.time_of(50, began, now).expect("ten a second").as_secs_f64();
                assert!((4.8..5.2).contains(&seconds), "{seconds} after {turn}");
            }
        }
        let later = drain.time_of(50, began, now + Duration::from_secs(5)).expect("ten a second, a while ago");
        assert!((9.0..11.0).contains(&later.as_secs_f64()), "{later:?}: it has slowed down");
        assert_eq!(drain.time_of(50, began, now + Duration::from_secs(3600)), None);
        // Nobody waited for a while: that is no time in which nobody got room.
        let again = now + Duration::from_secs(20);
        let seconds = drain.time_of(50, again, again).expect("ten a second, when somebody waited").as_secs_f64();
        assert!((4.8..5.2).contains(&seconds), "{seconds}");
    }
}
