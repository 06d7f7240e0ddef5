//! `ExternalCharge`: bytes that no handler made, on a request's account.

use super::seen::RequestHandle;
use super::slot::Slot;
use crate::error::Error;
use crate::handler::held::Held;
use crate::recording::Noted;
use crate::strategy::account::Chain;
use std::sync::Arc;

impl RequestHandle {
    /// Charges bytes that come from elsewhere (memory of a device, a library's own) to it, until the charge is dropped.
    ///
    /// # Errors
    /// [`Error::BudgetExceeded`]; it counts among the request's refusals. [`Error::RequestEnded`] where it has ended
    /// and refuses what comes after ([`AfterEnd::Refuse`](super::AfterEnd::Refuse)).
    pub fn charge(&self, bytes: usize) -> Result<ExternalCharge, Error> {
        let held = Held::try_on(self.seen.handler);
        let slot = held.as_ref().and_then(|held| Slot::behind(held.handler()));
        let state = slot
            .map(Slot::state)
            .ok_or_else(|| Error::RequestEnded { request: self.name().into_owned(), requested_bytes: bytes })?;
        if bytes == 0 {
            return Ok(ExternalCharge { _held: held, chain: Arc::clone(&self.seen.chain), bytes, noted: None });
        }
        let (is_counted, number) = state.charge_external(bytes).map_err(|refused| {
            state.remember(refused);
            self.seen.chain.error(refused)
        })?;
        Ok(ExternalCharge {
            _held: held,
            chain: Arc::clone(&self.seen.chain),
            bytes: if is_counted { bytes } else { 0 },
            noted: state.memory.noted().filter(|_| number.is_some()).map(|noted| Box::new((noted.clone(), number))),
        })
    }
}

/// Bytes from elsewhere that a request is charged. Dropping it gives them back.
#[derive(Debug)]
#[must_use = "dropping it gives the bytes back"]
pub struct ExternalCharge {
    _held: Option<Held>,
    chain: Arc<Chain>,
    /// 0: detached.
    bytes: usize,
    /// Its number in a recording.
    noted: Option<Box<(Noted, Option<u64>)>>,
}

impl ExternalCharge {
    /// How many bytes are charged: none where the request had ended and lets go of what comes after
    /// ([`AfterEnd::Detach`](super::AfterEnd::Detach)).
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Charges so many bytes instead. One that has none stays as it is.
    ///
    /// # Errors
    /// [`Error::BudgetExceeded`]; the charge is as it was.
    pub(crate) fn resize(&mut self, bytes: usize) -> Result<(), Error> {
        if self.bytes == 0 {
            return Ok(());
        }
        let (before, chain) = (self.bytes, &self.chain);
        let charge = || match bytes.checked_sub(before) {
            Some(growth) => chain.take(growth, 0),
            None => {
                chain.give_back(before - bytes, 0);
                Ok(())
            }
        };
        let charged = match &self.noted {
            Some(noted) => noted.0.recharged(noted.1, bytes, charge),
            None => charge(),
        };
        charged.map_err(|refused| chain.error(refused))?;
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for ExternalCharge {
    fn drop(&mut self) {
        match &self.noted {
            Some(noted) => noted.0.clone().freed(noted.1, || self.chain.give_back(self.bytes, 1)),
            None if self.bytes > 0 => self.chain.give_back(self.bytes, 1),
            None => {}
        }
    }
}
