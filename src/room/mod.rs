//! The queue of requests that wait for room: `docs/decisions/0029-who-waits-waits-before-it-begins.md`.
//!
//! [`Admission`] is one request on its way in. Either its reservation is taken as it is made, which needs no lock but
//! the accounts' own; or it stands in the `queue` until there is room, its time is over, or it is dropped. `runner` is
//! the thread that looks at the queue when room came.

mod drain;
#[cfg_attr(not(feature = "python"), allow(dead_code, reason = "only Python ends requests so"))]
mod ending;
mod here;
#[cfg_attr(not(feature = "python"), allow(dead_code, reason = "as above"))]
mod kept;
#[cfg(all(test, ctxalloc_loom))]
mod loom_tests;
mod queue;
mod refusal;
mod runner;
mod turn;
mod victims;
mod waiter;

use crate::counters::{self, Admitted};
use crate::error::{Error, NoRoom};
use crate::handler::requests::{Begun, Prepared, Terms};
use crate::strategy::account::{Account, reclaimers, reclaiming};
#[cfg(feature = "python")]
pub(crate) use ending::Ending;
use here::Entered;
pub use here::Waits;
use refusal::{no_room, no_room_in};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use waiter::Waiter;

/// A request that begins when there is room. Dropping it leaves the queue, and returns what was reserved.
#[must_use = "it leaves the queue when it is dropped"]
pub(crate) struct Admission(State);

enum State {
    /// Its reservation is taken, or it has none. `None` once it has begun.
    Admitted(Option<Prepared>),
    Waiting(Option<Prepared>, Arc<Waiter>),
}

impl Admission {
    /// Takes the reservation, or a place in the queue. `timeout`: how long it waits at most.
    ///
    /// # Errors
    /// [`Error::NoRoom`] where it cannot wait; else as [`Prepared::new`].
    pub(crate) fn new(terms: Terms, timeout: Option<Duration>) -> Result<Self, Error> {
        Self::of(Prepared::new(terms)?, timeout)
    }

    /// The same, of terms that were checked.
    ///
    /// # Errors
    /// [`Error::NoRoom`] where it cannot wait.
    pub(crate) fn of(prepared: Prepared, timeout: Option<Duration>) -> Result<Self, Error> {
        match reserve(&prepared)? {
            None => Ok(Self(State::Admitted(Some(prepared)))),
            Some(bytes) if prepared.is_inside() => Err(refuse(&prepared, bytes, NoRoom::InsideOfAnother)),
            Some(bytes) if reclaiming::is_inside() => {
                Err(turned_away(&prepared, no_room(prepared.chain(), bytes, NoRoom::InsideOfReclaimer)))
            }
            Some(bytes) => match here::enter(prepared.chain(), bytes, timeout, prepared.max_waiting())
                .map_err(|error| turned_away(&prepared, error))?
            {
                Entered::Answered(answer) => answer.map(|()| Self(State::Admitted(Some(prepared)))),
                Entered::Waits(waiter, is_sooner) => {
                    let waiting = Self(State::Waiting(Some(prepared), waiter));
                    runner::there_is(is_sooner)?;
                    Ok(waiting)
                }
            },
        }
    }
}

/// Begins a request now, or not at all.
///
/// # Errors
/// [`Error::NoRoom`]; else as [`Prepared::new`].
pub(crate) fn begin(terms: Terms) -> Result<Begun, Error> {
    let prepared = Prepared::new(terms)?;
    match reserve(&prepared)? {
        None => Ok(prepared.begin()),
        Some(bytes) => Err(refuse(&prepared, bytes, NoRoom::Busy)),
    }
}

/// Does not wait, but has reclaimers asked, for the next one.
#[cold]
fn refuse(prepared: &Prepared, bytes: usize, reason: NoRoom) -> Error {
    if prepared.chain().miss_reservation(bytes) {
        reclaimers::have_asked();
    }
    turned_away(prepared, no_room(prepared.chain(), bytes, reason))
}

/// Takes the reservation if that needs no waiting, and returns whether it did. Runs nobody's code.
///
/// # Errors
/// [`Error::NoRoom`]: it can never fit.
#[cfg(feature = "python")]
pub(crate) fn take_now(prepared: &Prepared) -> Result<bool, Error> {
    Ok(reserve(prepared)?.is_none())
}

/// Takes the reservation if there is room, and nobody waits for it already. Else how many bytes could not be reserved.
fn reserve(prepared: &Prepared) -> Result<Option<usize>, Error> {
    let Some(bytes) = prepared.reserve_bytes() else { return Ok(None) };
    let chain = prepared.chain();
    if let Some(account) = chain.never_fits(bytes) {
        return Err(turned_away(prepared, no_room_in(chain, account, bytes, NoRoom::NeverFits)));
    }
    let is_taken = chain.admit(bytes, Account::is_wanted, None);
    Ok(if is_taken { None } else { Some(bytes) })
}

/// Counts one that did not wait.
fn turned_away(prepared: &Prepared, error: Error) -> Error {
    counters::record_admission(prepared.chain().own().given_name(), Admitted::TurnedAway);
    error
}

/// When one that this budget has no room for should come again, by how fast those get room who wait for it; `None`
/// where nobody got any lately.
#[cfg(any(feature = "python", feature = "tower"))]
pub(crate) fn retry_after(budget_id: u64) -> Option<Duration> {
    here::drain_time(budget_id)
}

/// The first of those who wait for room, in the order in which they came, at most `count`. A moment's answer.
#[must_use]
pub fn waits(count: usize) -> Vec<Waits> {
    here::waits(count)
}

impl Future for Admission {
    type Output = Result<Begun, Error>;

    /// Once it is ready it must not be polled again.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let admitted = match &mut self.0 {
            State::Admitted(prepared) => prepared.take(),
            State::Waiting(prepared, waiter) => match waiter.ask(cx.waker()) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(answer) => {
                    let prepared = prepared.take();
                    self.0 = State::Admitted(None); // nothing is left to return
                    if let Err(error) = answer {
                        return Poll::Ready(Err(error));
                    }
                    prepared
                }
            },
        };
        Poll::Ready(Ok(admitted.expect("polled after it was ready").begin()))
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        match &self.0 {
            State::Admitted(Some(prepared)) => prepared.chain().return_reservation(),
            State::Admitted(None) => {}
            State::Waiting(_, waiter) => here::leave(waiter),
        }
    }
}
