//! The error of one that gets no reservation.

use crate::error::{Error, NoRoom};
use crate::strategy::account::Chain;

/// The error, with the account that is the reason.
pub(super) fn no_room(chain: &Chain, bytes: usize, reason: NoRoom) -> Error {
    let own = chain.own();
    let full = || chain.above().iter().find(|account| account.is_wanted() || !account.has_room_for(bytes));
    let account = if reason == NoRoom::NeverFits { chain.never_fits(bytes) } else { full() };
    // Room may have come meanwhile: then the nearest one above stands for them.
    let account = account.or(chain.above().first()).unwrap_or(own);
    Error::NoRoom {
        budget: account.name().into_owned(),
        budget_id: account.number(),
        of_request: account.is_of_request(),
        limit_bytes: account.limit_bytes(),
        in_use_bytes: account.live_bytes().saturating_add(account.pending_bytes()),
        requested_bytes: bytes,
        reason,
    }
}
