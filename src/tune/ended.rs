//! `Ended`: requests that have ended, until the step that ended them is over.
//!
//! What that step still holds has not escaped: an application's own variables, while it sends the last of an answer. It
//! is over when its thread does something else in a request than to free blocks.

use crate::recording::What;
use std::collections::HashMap;

/// By the thread that ended them.
#[derive(Debug, Default)]
pub(super) struct Ended(HashMap<u32, Vec<u64>>);

impl Ended {
    pub(super) fn push(&mut self, thread: u32, request: u64) {
        self.0.entry(thread).or_default().push(request);
    }

    /// Takes out the requests whose step is over, since this thread does that now.
    pub(super) fn settled_by(&mut self, thread: u32, what: &What) -> Vec<u64> {
        let goes_on = !self.0.is_empty() && !matches!(what, What::Free { .. });
        goes_on.then(|| self.0.remove(&thread)).flatten().unwrap_or_default()
    }

    /// Takes out all others: nothing more is known of their threads.
    #[cfg_attr(not(any(test, feature = "python")), allow(dead_code, reason = "is for `trace`"))]
    pub(super) fn rest(&mut self) -> impl Iterator<Item = u64> + use<> {
        std::mem::take(&mut self.0).into_values().flatten()
    }
}
