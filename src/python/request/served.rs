//! New requests on the terms of another one: for decorators, and for servers, where each request of a route shares the
//! route's terms.

use super::PyRequest;
use super::terms::Arguments;
use crate::python::budget::PyBudget;
use crate::python::sited::sited;
use pyo3::prelude::*;
use std::sync::Arc;

/// The terms of a server's requests: roots, with a name if their route has one.
pub(in crate::python) struct ServedTerms(Arc<Arguments>);

impl ServedTerms {
    /// Those of `request`, with this name if it has none.
    pub(in crate::python) fn of(py: Python<'_>, request: &PyRequest, name: Option<Arc<str>>) -> Self {
        Self(Arc::new(request.arguments_with(py, Some(true), name)))
    }

    /// Whether a request has to wait for its reservation first.
    pub(in crate::python) fn reserves(&self) -> bool {
        self.0.reserve.is_some()
    }

    /// Begins and selects a request, charged to this budget if the terms name none; `by_site`: it is noted which code
    /// made what. `close` ends it, and `leave` restores the selection, in either order: the request may end before the
    /// call that it was begun for returns.
    pub(in crate::python) fn begin(
        &self,
        py: Python<'_>,
        budget: Option<&PyBudget>,
        by_site: bool,
    ) -> PyResult<PyRequest> {
        let request = if budget.is_none() && !by_site {
            PyRequest::on(Arc::clone(&self.0))
        } else {
            PyRequest::made(py, self.0.clone_ref(py), budget, by_site)?
        };
        request.enter(py)?;
        Ok(request)
    }
}

impl PyRequest {
    /// Begins and selects a new request on the same terms, as [`ServedTerms::begin`] does: a root or not.
    pub(super) fn served(
        &self,
        py: Python<'_>,
        root: bool,
        name: Option<Arc<str>>,
        budget: Option<&PyBudget>,
        by_site: bool,
    ) -> PyResult<Self> {
        let request = self.anew(py, Some(root), name, budget, by_site)?;
        request.enter(py)?;
        Ok(request)
    }

    /// A new one on the same terms: a root or not, with this name if the terms have none, and charged to this budget if
    /// they name none.
    pub(super) fn anew(
        &self,
        py: Python<'_>,
        root: Option<bool>,
        name: Option<Arc<str>>,
        budget: Option<&PyBudget>,
        by_site: bool,
    ) -> PyResult<Self> {
        Self::made(py, self.arguments_with(py, root, name), budget, by_site)
    }

    fn arguments_with(&self, py: Python<'_>, root: Option<bool>, name: Option<Arc<str>>) -> Arguments {
        let mut arguments = self.arguments().clone_ref(py);
        arguments.is_root = root.unwrap_or(arguments.is_root);
        arguments.name = arguments.name.or_else(|| name.map(Into::into));
        arguments
    }

    fn made(py: Python<'_>, mut arguments: Arguments, budget: Option<&PyBudget>, by_site: bool) -> PyResult<Self> {
        arguments.budget = arguments.budget.or_else(|| budget.map(|budget| budget.budget().clone()));
        if !by_site {
            return Ok(Self::new(arguments));
        }
        let (strategy, seen) = sited(py, arguments.strategy.take())?;
        arguments.strategy = Some(strategy);
        Ok(Self { sited: Some(seen), ..Self::new(arguments) })
    }
}
