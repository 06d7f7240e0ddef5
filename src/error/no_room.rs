//! Why a request did not begin: the reasons of [`Error::NoRoom`](super::Error::NoRoom).

use std::fmt::Display;

/// Why a request did not wait for room, or not longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NoRoom {
    /// The limit, less what it guarantees to others, is less than the reservation: it would wait for ever.
    NeverFits,
    /// It was to begin at once ([`Builder::begin`](crate::request::Builder::begin)).
    Busy,
    /// It is inside of another request, which may hold what it would wait for.
    InsideOfAnother,
    /// A reclaimer asked for it ([`Budget::add_reclaimer`](crate::strategy::Budget::add_reclaimer)), for whom others
    /// wait.
    InsideOfReclaimer,
    /// As many as may wait for that budget do so already.
    QueueIsFull,
    /// Its time was over.
    TimedOut,
    /// The process was forked while it waited: this is the child, where nobody waits.
    Forked,
}

/// Why there is no reservation, and what to do.
pub(super) fn no_reservation(
    budget: &dyn Display,
    limit_bytes: usize,
    requested_bytes: usize,
    guaranteed_bytes: usize,
    reason: &NoRoom,
) -> String {
    let bytes = requested_bytes;
    match reason {
        NoRoom::NeverFits if guaranteed_bytes > 0 => format!(
            "{bytes} bytes can never be reserved of '{budget}': of its {limit_bytes}, {guaranteed_bytes} are guaranteed to \
             others; reserve less, or give it a higher limit"
        ),
        NoRoom::NeverFits => format!(
            "{bytes} bytes can never be reserved of '{budget}', whose limit is {limit_bytes}; reserve less, or give it a \
             higher limit"
        ),
        NoRoom::Busy => {
            format!("'{budget}' has no room now for a reservation of {bytes} bytes; wait for it, or try again later")
        }
        NoRoom::InsideOfAnother => format!(
            "'{budget}' has no room for a reservation of {bytes} bytes inside of a request, which would wait for itself if \
             it waited, as would a root that begins in here; reserve these bytes with the request around it"
        ),
        NoRoom::InsideOfReclaimer => format!(
            "'{budget}' has no room for a reservation of {bytes} bytes, which a reclaimer asked for: others wait for what \
             it gives back, so it must not wait; let it do without"
        ),
        NoRoom::QueueIsFull => format!(
            "'{budget}' has no room for a reservation of {bytes} bytes, and as many wait for it as may; try again later, or \
             let more wait"
        ),
        NoRoom::TimedOut => {
            format!(
                "'{budget}' had no room for a reservation of {bytes} bytes in time; try again later, or wait longer"
            )
        }
        NoRoom::Forked => {
            format!("the process forked while {bytes} bytes of '{budget}' were waited for; ask again in the child")
        }
    }
}
