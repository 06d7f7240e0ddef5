//! How a Request ends: the selection is restored, what has escaped is settled, and its refusals are told.

use super::left::{Left, Settling, running_loop};
use super::{Phase, PyRequest, noted, refusal};
use crate::python::imported::Imported;
use crate::python::scope::{deselect, not_entered};
use crate::room::Ending;
use pyo3::prelude::*;
use std::sync::PoisonError;

impl PyRequest {
    /// Restores the selection. ValueError: this is another Context; nothing changes.
    pub(in crate::python) fn leave(&self, py: Python<'_>) -> PyResult<()> {
        let Some(token) = self.token.take(py) else { return Err(not_entered(&self.text())) };
        deselect(py, &self.token, token, &|| self.text())
    }

    /// Ends it, if it has not ended, and leaves the selection alone: this may be another task.
    pub(in crate::python) fn close(slf: &Bound<'_, Self>) -> PyResult<()> {
        Self::end(slf, None)
    }

    /// The same in a step of a server's application. Returns whether blocks are alive: then `settle_open` is to be
    /// called when the step ends.
    pub(in crate::python) fn close_open(slf: &Bound<'_, Self>) -> PyResult<bool> {
        Self::end_by(slf, None, true)
    }

    /// Settles what `close_open` left: now if nothing is alive or no loop runs, else when the loop has had its turn.
    pub(in crate::python) fn settle_open(slf: &Bound<'_, Self>) -> PyResult<()> {
        if Self::settle_if(slf.as_any(), false)? {
            return Ok(());
        }
        match running_loop(slf.py()) {
            Some(it) => Settling::new(slf.clone().into_any(), Self::settle_if, it).begin(slf.py()),
            None => Self::settle(slf),
        }
    }

    pub(super) fn exit(slf: &Bound<'_, Self>, error: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let (py, this) = (slf.py(), slf.get());
        let Some(token) = this.token.take(py) else { return Err(not_entered(&this.text())) };
        let left = deselect(py, &this.token, token, &|| this.text());
        if this.token.is_in_use() {
            return left; // still entered, in another Context
        }
        Self::end_told(slf, error, left)
    }

    /// Ends the request, and raises what `left` is, what ends with it, or what it was given beyond a limit.
    pub(super) fn end_told(
        slf: &Bound<'_, Self>,
        error: Option<&Bound<'_, PyAny>>,
        left: PyResult<()>,
    ) -> PyResult<()> {
        let over = if error.is_none() { slf.get().overdraft(true) } else { Ok(()) };
        let refused = Self::end(slf, error);
        match (left.and(refused), over) {
            (Err(raised), Err(over)) => Err(refusal::raised_during(slf.py(), raised, over)),
            (refused, over) => refused.and(over),
        }
    }

    /// Ends the request. BudgetExceeded: `error`, which ended the block, comes from one of its refusals.
    pub(super) fn end(slf: &Bound<'_, Self>, error: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        Self::end_by(slf, error, false).map(drop)
    }

    /// Unless the caller `settles` what is alive, the loop will. Returns whether the caller has to.
    fn end_by(slf: &Bound<'_, Self>, error: Option<&Bound<'_, PyAny>>, settles: bool) -> PyResult<bool> {
        let (py, this) = (slf.py(), slf.get());
        let mut phase = this.phase();
        let Phase::Begun { begun, left: None } = &*phase else { return Ok(false) }; // it has ended already
        let has_blocks = begun.has_live_blocks();
        let has_to = settles && has_blocks;
        let mut settling = None;
        if has_blocks && !settles {
            drop(phase); // Python code runs
            settling = running_loop(py).map(|it| Settling::new(slf.clone().into_any(), Self::settle_if, it));
            phase = this.phase();
        }
        let Phase::Begun { begun, left: left @ None } = &mut *phase else { return Ok(false) };
        let ending = Ending::begin();
        *left = Some(if has_to || settling.is_some() { Left::open(begun) } else { Left::settled(begun) });
        let refusals = if error.is_some() { begun.take_refusals() } else { Vec::new() };
        let noted = noted::of(begun);
        drop(phase);
        ending.look(); // who gets its room is woken by this thread, which has the GIL
        let noted = noted::tell(py, noted);
        let settled = match settling {
            Some(settling) => settling.begin(py),
            None if has_to => Ok(()),
            None => Self::tell_sites(slf),
        };
        let cancelling = if this.arguments().cancel_if_chosen {
            this.cancelling.lock().unwrap_or_else(PoisonError::into_inner).take()
        } else {
            None
        };
        let cancelled = cancelling.map_or(Ok(()), |cancelling| cancelling.end(py, error));
        let refused = match error {
            Some(error) => cancelled.and_then(|()| refusal::raise(py, error, &refusals, this.is_whole())),
            None => cancelled,
        };
        match (noted.and(settled), refused) {
            (Err(raised), Err(refused)) => Err(refusal::raised_during(py, raised, refused)),
            (told, refused) => told.and(refused).map(|()| has_to),
        }
    }

    /// Settles what has escaped, unless that is done: see [`Left`].
    ///
    /// # Errors
    /// What a signal's handler, or the function that was to be called, raised.
    pub(super) fn settle(slf: &Bound<'_, Self>) -> PyResult<()> {
        let (is_fresh, told) = match &mut *slf.get().phase() {
            Phase::Begun { begun, left: Some(left) } => left.settle(begun),
            _ => (false, None),
        };
        let noted = if is_fresh { Self::tell_sites(slf) } else { Ok(()) };
        let called = told.map_or(Ok(()), |told| told.call0(slf.py()).map(drop));
        noted.and(called)
    }

    /// Adds what was seen of it to the sums of its name. After its end, once. What a signal's handler raised meanwhile.
    pub(super) fn tell_sites(slf: &Bound<'_, Self>) -> PyResult<()> {
        static NOTE: Imported = Imported::new("ctxalloc._sites", "note");
        let Some(numbers) = slf.get()._sites() else { return Ok(()) };
        let name = slf.get().if_begun(|request| request.given_name().map(str::to_owned)).flatten();
        NOTE.get(slf.py())?.call1((name, numbers)).map(drop)
    }

    /// For [`Settling`]: the same; unless it `must`, only if nothing is alive that may have escaped. Whether it did.
    pub(super) fn settle_if(object: &Bound<'_, PyAny>, must: bool) -> PyResult<bool> {
        let Ok(request) = object.cast::<Self>() else { return Ok(true) };
        let is_gone = match &*request.get().phase() {
            Phase::Begun { begun, left: Some(left) } => left.is_gone(begun),
            _ => true,
        };
        if must && !is_gone && request.get().if_begun(|request| request.was_chosen()) == Some(true) {
            // Somebody waits for its memory, and what is left may lie in a cycle, as asyncio.TaskGroup makes them of
            // its errors (CPython issue 124958).
            static COLLECT: Imported = Imported::new("gc", "collect");
            COLLECT.get(object.py())?.call0()?;
        }
        if is_gone || must {
            Self::settle(request)?;
        }
        Ok(is_gone || must)
    }
}
