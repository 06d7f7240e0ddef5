//! The error of one that gets no reservation.

use crate::error::{Error, NoRoom};
use crate::strategy::account::{Account, Chain};
use crate::unattributed::unattributed;

/// The error, with the account that is the reason. Where it could never fit the caller knows which one that is.
pub(super) fn no_room(chain: &Chain, bytes: usize, reason: NoRoom) -> Error {
    // Room may have come meanwhile: then the nearest one above stands for them.
    no_room_in(chain, chain.obstacle(bytes).or(chain.above().first()).unwrap_or(chain.own()), bytes, reason)
}

/// The same, where it is known which account it is.
pub(super) fn no_room_in(chain: &Chain, account: &Account, bytes: usize, reason: NoRoom) -> Error {
    let _unattributed = unattributed(); // a heap at its limit could not tell of it
    Error::NoRoom {
        budget: account.name().into_owned(),
        budget_id: account.number(),
        of_request: account.is_of_request(),
        limit_bytes: account.limit_bytes(),
        in_use_bytes: account.live_bytes().saturating_add(account.pending_bytes()),
        requested_bytes: bytes,
        guaranteed_bytes: chain.kept_for_others(account, bytes),
        reason,
    }
}
