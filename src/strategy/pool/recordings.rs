//! Recordings, which the decay thread writes when no request's event does: a process that rests and is killed then has
//! lost nothing. Where there is no such thread (Windows), only events write.

use super::decay::{self, Noted};
use crate::recording::flush;
use crate::survived::survived;
use std::time::Duration;

/// Set while the thread knows that something waits to be written.
static WAITS: Noted = Noted::new();

/// Makes the thread ready for recordings; what tells it that something waits. That is called after each event: it is
/// cheap, and allocates nothing.
pub(crate) fn flush_recordings() -> fn() {
    decay::watched();
    || WAITS.note()
}

/// Writes what waits long enough; when to do so again. For the decay thread.
pub(super) fn pass() -> Option<Duration> {
    WAITS.clear();
    let after = survived(flush)??;
    WAITS.keep();
    Some(super::clock::now() + after)
}
