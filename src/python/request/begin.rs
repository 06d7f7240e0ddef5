//! How a Request begins: at once, or where it was admitted after waiting; with its handler selected, or without.

use super::admission::{Enter, PyAdmission};
use super::cancelling::Cancelling;
use super::{Phase, PyRequest};
use crate::handler::requests::on_chosen::OnChosen;
use crate::handler::requests::{Begun, Prepared};
use crate::handler::{Handler, Held};
use crate::python::handler::{capsule_of, capsule_that_holds};
use crate::python::numpy::Numpy;
use crate::python::scope::entered_already;
use crate::room::{Admission, take_now};
use pyo3::prelude::*;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl PyRequest {
    pub(super) fn enter(&self, py: Python<'_>) -> PyResult<()> {
        self.enter_by(|| self.select(py))
    }

    /// Enters it where it was admitted.
    pub(super) fn enter_begun(&self, py: Python<'_>, begun: Begun) -> PyResult<()> {
        self.enter_by(|| self.select_begun(py, begun))
    }

    /// Begins it, where it was admitted, without selecting its handler.
    pub(super) fn keep_begun(&self, begun: Begun) -> PyResult<()> {
        if !self.token.begin() {
            return Err(entered_already(&self.text()));
        }
        self.put_begun(begun);
        Ok(())
    }

    /// What it begins with where it may have to wait, and how long it may.
    #[inline]
    pub(super) fn prepare(&self, py: Python<'_>) -> PyResult<(Prepared, Option<Duration>)> {
        self.check_new()?;
        let (terms, timeout) = self.arguments().terms(py, self.on_chosen(py)?)?;
        Ok((Prepared::new(terms)?, timeout))
    }

    /// RuntimeError: it was entered before, or another Request began it.
    #[inline]
    pub(super) fn check_new(&self) -> PyResult<()> {
        // Relaxed: as it is set (`put_begun`).
        if !self.is_used.load(Ordering::Relaxed) {
            return Ok(());
        }
        let is_carried = matches!(&*self.phase(), Phase::Carried(_));
        Err(self.used(is_carried))
    }

    /// Enters it if that needs no waiting; else its place in the queue.
    pub(super) fn enter_or_wait(slf: &Bound<'_, Self>, selects: bool) -> PyResult<Option<PyAdmission>> {
        let (py, this) = (slf.py(), slf.get());
        if !this.token.begin() {
            return Err(entered_already(&this.text()));
        }
        let mut waits = None;
        let entered = this.prepare(py).and_then(|(prepared, timeout)| {
            if !take_now(&prepared)? {
                waits = Some((prepared, timeout));
                return Ok(None);
            }
            let begun = prepared.begin();
            if selects {
                return this.select_begun(py, begun).map(Some);
            }
            this.put_begun(begun);
            Ok(None)
        });
        match (entered, waits) {
            (Ok(Some(token)), _) => this.token.put(token),
            (Ok(None), None) => {} // it is entered, without a token
            (Ok(None), Some((prepared, timeout))) => {
                this.token.clear();
                return Self::waiting(slf, prepared, timeout, selects).map(Some);
            }
            (Err(error), _) => {
                this.token.clear();
                return Err(error);
            }
        }
        Ok(None)
    }

    pub(super) fn waiting(
        slf: &Bound<'_, Self>,
        prepared: Prepared,
        timeout: Option<Duration>,
        selects: bool,
    ) -> PyResult<PyAdmission> {
        // Other Python code may run while wakers of others are called.
        let admission = slf.py().detach(|| Admission::of(prepared, timeout))?;
        Ok(PyAdmission::new(slf.clone().unbind().into_any(), admission, Self::enter_as(selects)))
    }

    pub(super) fn enter_as(selects: bool) -> Enter {
        if selects {
            |request, begun| request.cast::<Self>()?.get().enter_begun(request.py(), begun)
        } else {
            |request, begun| request.cast::<Self>()?.get().keep_begun(begun)
        }
    }

    pub(super) fn enter_by<'py>(&self, select: impl FnOnce() -> PyResult<Bound<'py, PyAny>>) -> PyResult<()> {
        if !self.token.begin() {
            return Err(entered_already(&self.text()));
        }
        match select() {
            Ok(token) => {
                self.token.put(token);
                Ok(())
            }
            Err(error) => {
                self.token.clear();
                Err(error)
            }
        }
    }

    /// Begins the request and selects its handler. After an error nothing has changed.
    pub(super) fn select<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.check_new()?;
        let (begun, held) = self.begun(py)?;
        let held = held.unwrap_or_else(|| Held::on(begun.handler()));
        self.select_by(&capsule_that_holds(py, held)?, begun)
    }

    /// Begins the request. The caller is the one that may enter.
    pub(super) fn begin(&self, py: Python<'_>) -> PyResult<Handler> {
        self.check_new()?;
        let (begun, _held) = self.begun(py)?;
        let handler = begun.handler();
        self.put_begun(begun);
        Ok(handler)
    }

    #[inline]
    fn begun(&self, py: Python<'_>) -> PyResult<(Begun, Option<Held>)> {
        self.arguments().begin(py, self.on_chosen(py)?, || self.text())
    }

    /// What is called when it is chosen to make room, for the task that runs here.
    pub(super) fn on_chosen(&self, py: Python<'_>) -> PyResult<Option<OnChosen>> {
        if !self.arguments().cancel_if_chosen {
            return Ok(None);
        }
        let cancelling = Cancelling::running(py, &self.text())?;
        let on_chosen = cancelling.on_chosen();
        *self.cancelling.lock().unwrap_or_else(PoisonError::into_inner) = Some(cancelling);
        Ok(Some(on_chosen))
    }

    pub(super) fn select_begun<'py>(&self, py: Python<'py>, begun: Begun) -> PyResult<Bound<'py, PyAny>> {
        let capsule = capsule_of(py, begun.handler())?;
        self.check_new()?;
        self.select_by(&capsule, begun)
    }

    #[inline]
    fn select_by<'py>(&self, capsule: &Bound<'py, PyAny>, begun: Begun) -> PyResult<Bound<'py, PyAny>> {
        let token = Numpy::get(capsule.py())?.selection().set(capsule)?; // where it fails `begun` ends
        self.put_begun(begun);
        Ok(token)
    }
}
