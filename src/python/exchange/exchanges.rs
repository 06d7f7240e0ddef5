//! `Exchanges`: how a request of a server begins, by its route and its tenant.

use super::message::is_text;
use super::routes::{Found, PyRouteTable};
use super::steps::Steps;
use super::{Begun, PyExchange};
use crate::python::budget::PyBudget;
use crate::python::interned::intern;
use crate::python::numpy::Numpy;
use crate::python::request::PyRequest;
use crate::python::selection::Variable;
use crate::python::sited::Sampler;
use crate::python::vectorcall;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyType};

/// What a middleware begins its exchanges with. ``kind`` is the subclass of ``Exchange`` that it makes, ``service`` has
/// its options, ``serving`` is the ContextVar of the record that a Context carries.
#[pyclass(frozen, name = "Exchanges", module = "ctxalloc._native")]
pub(in crate::python) struct PyExchanges {
    kind: Py<PyType>,
    pub(super) service: Py<PyAny>,
    pub(super) serving: Variable,
    routes: Py<PyRouteTable>,
    tenant: Option<Py<PyAny>>,
    /// Chooses the requests of which is noted which code made what, if any.
    sampler: Option<Py<Sampler>>,
    pub(super) tells: bool,
    pub(super) answers: bool,
    pub(super) ends_with_response: bool,
    /// The application has a `root_path` of its own, which `asgi.py` takes off each path.
    has_root: bool,
}

#[pymethods]
impl PyExchanges {
    #[new]
    #[pyo3(signature = (kind, service, serving, *, answers, ends_with_response, has_root))]
    fn new(
        kind: Bound<'_, PyType>,
        service: Bound<'_, PyAny>,
        serving: Bound<'_, PyAny>,
        answers: bool,
        ends_with_response: bool,
        has_root: bool,
    ) -> PyResult<Self> {
        let tenant = service.getattr("tenant")?;
        Ok(Self {
            kind: kind.unbind(),
            serving: Variable::of(&serving)?,
            routes: service.getattr("routes")?.cast_into()?.unbind(),
            tenant: (!tenant.is_none()).then(|| tenant.unbind()),
            sampler: service.getattr("sampler")?.extract()?,
            tells: !service.getattr("on_end")?.is_none(),
            service: service.unbind(),
            answers,
            ends_with_response,
            has_root,
        })
    }

    /// Begins a request for an ASGI scope, selects its handler, and calls the application: what `Exchange.call`
    /// returns. Returns None and changes nothing unless it is of the usual kind: an HTTP request on terms that its
    /// route names, in a Context that serves no other request.
    #[pyo3(signature = (app, scope, receive, send, /))]
    fn begin<'py>(
        slf: &Bound<'py, Self>,
        app: &Bound<'py, PyAny>,
        scope: &Bound<'py, PyAny>,
        receive: Bound<'py, PyAny>,
        send: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, Steps>>> {
        let (py, this) = (slf.py(), slf.get());
        let Ok(items) = scope.cast_exact::<PyDict>() else { return Ok(None) };
        let is_http = items.get_item(intern!(py, "type"))?.is_some_and(|kind| is_text(&kind, "http"));
        if !is_http || this.has_root || this.serving.get(py)?.is_some() {
            return Ok(None);
        }
        let Some(path) = items.get_item(intern!(py, "path"))? else { return Ok(None) };
        let root = items.get_item(intern!(py, "root_path"))?;
        if root.is_some_and(|root| !is_text(&root, "")) {
            return Ok(None);
        }
        let Ok(path) = path.cast_into::<PyString>() else { return Ok(None) };
        let found = this.routes.get().find(scope, intern!(py, "method"), &path, true)?;
        // Whether it has to wait is found out in a coroutine of asgi.py's.
        let Some(terms) = found.terms.as_ref().filter(|terms| !terms.reserves()) else { return Ok(None) };
        let tenant = match &this.tenant {
            None => None,
            Some(tenant) => this.checked(found, vectorcall::call(tenant.bind(py), [scope])?)?,
        };
        let exchange = this.kind.bind(py).call0()?.cast_into::<PyExchange>()?;
        let base = Numpy::get(py)?.current_capsule(py)?;
        let by_site = this.sampler.as_ref().is_some_and(|sampler| sampler.get().is_due());
        let tenants = tenant.as_ref().map(Bound::get);
        let request = terms.begin(py, tenants, by_site)?;
        let request = Bound::new(py, request)?.unbind();
        exchange.get().fields().tenant = tenant.map(|tenant| tenant.into_any().unbind());
        let route = found.route.as_ref().map(|route| route.clone_ref(py).into_any());
        let begun = Begun { exchanges: slf.clone().unbind(), request, base: base.unbind(), route };
        Self::complete(begun, &exchange, scope, send)?;
        PyExchange::call(&exchange, app, receive).map(Some)
    }

    /// An exchange for a request that `asgi.py` has begun, in one of the rarer cases.
    #[pyo3(signature = (scope, send, route, request, base, /))]
    fn around<'py>(
        slf: &Bound<'py, Self>,
        scope: &Bound<'py, PyAny>,
        send: &Bound<'py, PyAny>,
        route: Option<Py<PyAny>>,
        request: Py<PyRequest>,
        base: Py<PyAny>,
    ) -> PyResult<Bound<'py, PyExchange>> {
        let exchange = slf.get().kind.bind(slf.py()).call0()?.cast_into::<PyExchange>()?;
        let begun = Begun { exchanges: slf.clone().unbind(), request, base, route };
        Self::complete(begun, &exchange, scope, send)?;
        Ok(exchange)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.kind)?;
        visit.call(&self.service)?;
        visit.call(&self.routes)?;
        visit.call(&self.tenant)
    }
}

impl PyExchanges {
    /// The budget that `tenant` has returned for a route, checked.
    fn checked<'py>(&self, found: &Found, tenant: Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyBudget>>> {
        if tenant.is_none() {
            return Ok(None);
        }
        if found.has_budget || !tenant.is_instance_of::<PyBudget>() {
            let arguments = (&found.route, &tenant, found.has_budget);
            self.service.bind(tenant.py()).call_method1(intern!(tenant.py(), "check_tenant"), arguments)?;
        }
        Ok(Some(tenant.cast_into()?))
    }

    /// Makes an exchange complete whose request is begun and selected: marks the Context, and fills in the other
    /// fields.
    fn complete<'py>(
        begun: Begun,
        exchange: &Bound<'py, PyExchange>,
        scope: &Bound<'py, PyAny>,
        send: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        let py = scope.py();
        let inner = match scope.cast_exact::<PyDict>() {
            Ok(scope) => scope.copy()?,
            Err(_) => py.get_type::<PyDict>().call1((scope,))?.cast_into::<PyDict>()?,
        };
        inner.set_item(intern!(py, "ctxalloc.serving"), exchange)?;
        inner.set_item(intern!(py, "ctxalloc.request"), &begun.request)?;
        let exchanges = begun.exchanges.clone_ref(py);
        let exchanges = exchanges.bind(py).get();
        let mark = exchanges.serving.set(exchange.as_any())?;
        let is_fresh = exchange.get().begun.set(begun).is_ok();
        debug_assert!(is_fresh, "made by the caller");
        let mut fields = exchange.get().fields();
        fields.mark = Some(mark.unbind());
        fields.scope = Some(scope.clone().unbind());
        fields.inner = Some(inner.unbind());
        fields.to_server = Some(send.clone().unbind());
        drop(fields);
        if exchanges.tells {
            exchange.call_method0(intern!(py, "_expect_telling"))?;
        }
        Ok(())
    }
}
