//! `OnChosen`: what is called when a request is chosen to make room for others.

use crate::error::Error;
use crate::strategy::account::Account;
use std::fmt;
use std::sync::Arc;

/// Called on a thread of the queue, under no lock.
#[derive(Clone)]
pub(crate) struct OnChosen(pub(crate) Arc<Call>);

/// With what the request's next allocation will say, and its account.
type Call = dyn Fn(&Error, &Arc<Account>) + Send + Sync;

impl fmt::Debug for OnChosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnChosen")
    }
}
