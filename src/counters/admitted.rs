//! `Admitted`: what became of a reservation that was not taken at once.

use std::time::Duration;

/// What became of one that was to reserve memory, and did not get it at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admitted {
    /// It got it after so long.
    Waited(Duration),
    /// Its time was over.
    TimedOut,
    /// It did not wait: it could never fit, too many waited, or it was not to wait.
    TurnedAway,
}
