//! `Drain`: how fast a queue gets shorter, which tells those whom it has no place for when to come again.

use std::time::{Duration, Instant};

/// After so long what was counted has half of its weight.
const HALF: Duration = Duration::from_secs(5);
/// Less weight than that of one waiter a minute ago says nothing any more.
const NOTHING: f64 = 1.0 / 4096.0;

/// Counts who got room, with weights that fade.
#[derive(Debug, Clone, Copy)]
pub(super) struct Drain {
    weight: f64,
    at: Instant,
}

impl Drain {
    pub(super) fn new(now: Instant) -> Self {
        Self { weight: 0.0, at: now }
    }

    fn weight(&self, now: Instant) -> f64 {
        let age = now.saturating_duration_since(self.at).as_secs_f64();
        self.weight * 0.5_f64.powf(age / HALF.as_secs_f64())
    }

    /// One more got room.
    pub(super) fn count(&mut self, now: Instant) {
        (self.weight, self.at) = (self.weight(now) + 1.0, now);
    }

    pub(super) fn has_faded(&self, now: Instant) -> bool {
        self.weight(now) < NOTHING
    }

    /// How long so many waiters will take; `None` where nobody got room lately.
    #[cfg_attr(not(any(feature = "python", feature = "tower")), allow(dead_code, reason = "only services ask"))]
    pub(super) fn time_of(&self, waiters: usize, now: Instant) -> Option<Duration> {
        // Who comes steadily, `rate` a second, has the weight `rate * HALF / ln 2` in the end.
        let rate = self.weight(now) * std::f64::consts::LN_2 / HALF.as_secs_f64();
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
        assert_eq!(drain.time_of(1, began), None, "nobody got room yet");
        let mut now = began;
        for _ in 0..400 {
            now += Duration::from_millis(100);
            drain.count(now);
        }
        let seconds = drain.time_of(50, now).expect("ten a second").as_secs_f64();
        assert!((4.8..5.2).contains(&seconds), "{seconds}");
        let later = drain.time_of(50, now + Duration::from_secs(5)).expect("ten a second, a while ago");
        assert!((9.0..11.0).contains(&later.as_secs_f64()), "{later:?}: it has slowed down");
        assert_eq!(drain.time_of(50, now + Duration::from_secs(3600)), None);
    }
}
