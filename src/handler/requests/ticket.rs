//! A number that a layer above gives a request, for as long as anybody can reach the request: by it, that layer finds
//! the request again without keeping anything of it.

use crate::handler::word::Handler;
use crate::sync::Made;
use std::sync::atomic::{AtomicU32, Ordering};

/// Who gives the numbers. Its functions are called in the middle of allocations: they allocate nothing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tickets {
    /// A new number above 0 for the request with this handler. `None`: there are no more.
    pub(crate) take: fn(Handler) -> Option<u32>,
    /// The request with this number can be reached no more.
    pub(crate) give_back: fn(u32),
}

static TICKETS: Made<Tickets> = Made::new();

/// Called once.
pub(crate) fn give_tickets(tickets: Tickets) {
    TICKETS.get_or_make(|| tickets);
}

/// A request's number; 0: it has none yet.
#[derive(Debug, Default)]
pub(super) struct Ticket(AtomicU32);

impl Drop for Ticket {
    fn drop(&mut self) {
        let number = *self.0.get_mut();
        if let (1.., Some(tickets)) = (number, TICKETS.get()) {
            (tickets.give_back)(number);
        }
    }
}

impl Ticket {
    /// The number of the request with this handler, whose it is, which gets one now if it has none.
    pub(super) fn number(&self, handler: Handler) -> Option<u32> {
        let tickets = TICKETS.get()?;
        // Acquire pairs with the exchange below: whoever uses the number sees what `take` wrote for it.
        match self.0.load(Ordering::Acquire) {
            0 => {
                let fresh = (tickets.take)(handler)?;
                match self.0.compare_exchange(0, fresh, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => Some(fresh),
                    Err(theirs) => {
                        (tickets.give_back)(fresh);
                        Some(theirs)
                    }
                }
            }
            number => Some(number),
        }
    }
}
