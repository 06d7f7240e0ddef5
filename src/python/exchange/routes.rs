//! Finds the row of `routes` whose terms a request gets.
//!
//! Rows are matched by path first. Where the framework's routes are known ([`Framework`]), the row that is written as
//! the route that the framework serves goes before: see docs/decisions/0032.

use super::framework::{Framework, Served};
use super::pattern::Pattern;
use crate::python::interned::intern;
use crate::python::request::{PyRequest, ServedTerms};
use pyo3::exceptions::PyValueError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyTuple};
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::OnceLock;

/// Routes of a middleware: for each a `_Found` of `_choices.py`. Look-ups take no lock: it never changes, but that it
/// is told the framework's routes, once.
#[pyclass(frozen, name = "RouteTable", module = "ctxalloc._native")]
pub(in crate::python) struct PyRouteTable {
    /// All of them: those without parameters, then those with.
    rows: Vec<Found>,
    /// Those without parameters, by ``METHOD /path`` or ``/path``.
    exact: HashMap<String, usize>,
    /// Those with parameters, in their order.
    patterns: Vec<(Option<String>, Pattern, usize)>,
    has_methods: bool,
    /// What a view gets that has no row.
    default: Found,
    /// What a path gets that no row matches and, if the framework can be asked, no route.
    unmatched: Found,
    /// Whether `unmatched` is something else than `default`.
    tells_unmatched: bool,
    framework: OnceLock<Framework>,
}

/// A route, and what its requests get.
pub(super) struct Found {
    tuple: Py<PyTuple>,
    pub(super) route: Option<Py<PyString>>,
    /// The terms of its requests, if the choice is a `ctxalloc.request(...)`.
    pub(super) terms: Option<ServedTerms>,
    pub(super) has_budget: bool,
}

impl Found {
    fn of(tuple: &Bound<'_, PyTuple>) -> PyResult<Self> {
        let (route, terms) = (tuple.get_item(0)?, tuple.get_item(2)?);
        let route: Option<Bound<'_, PyString>> = route.extract()?;
        let name = tuple.get_item(4)?.extract::<Option<String>>()?.map(Into::into);
        let terms = match terms.is_none() {
            true => None,
            false => Some(ServedTerms::of(tuple.py(), terms.cast::<PyRequest>()?.get(), name)),
        };
        let has_budget = tuple.get_item(3)?.is_truthy()?;
        Ok(Self { tuple: tuple.clone().unbind(), route: route.map(Bound::unbind), terms, has_budget })
    }
}

#[pymethods]
impl PyRouteTable {
    /// ``exact``: ``METHOD /path`` or ``/path``, and a `_Found`. ``patterns``: a method or None; the texts around its
    /// parameters; for each parameter whether it is a path; a `_Found`. ``unmatched``: None is ``default``.
    #[new]
    #[pyo3(signature = (exact, patterns, default, *, has_methods, unmatched = None))]
    #[allow(clippy::type_complexity, reason = "as the tuples of Python are")]
    fn new(
        exact: Vec<(String, Bound<'_, PyTuple>)>,
        patterns: Vec<(Option<String>, Vec<String>, Vec<bool>, Bound<'_, PyTuple>)>,
        default: &Bound<'_, PyTuple>,
        has_methods: bool,
        unmatched: Option<&Bound<'_, PyTuple>>,
    ) -> PyResult<Self> {
        let mut rows = Vec::new();
        let mut number = |found: &Bound<'_, PyTuple>| {
            rows.push(Found::of(found)?);
            Ok::<_, PyErr>(rows.len() - 1)
        };
        let exact = exact.into_iter().map(|(path, found)| Ok((path, number(&found)?)));
        let exact = exact.collect::<PyResult<_>>()?;
        let patterns = patterns
            .into_iter()
            .map(|(method, texts, are_paths, found)| Ok((method, Pattern::of(texts, are_paths)?, number(&found)?)));
        let patterns = patterns.collect::<PyResult<_>>()?;
        Ok(Self {
            rows,
            exact,
            patterns,
            has_methods,
            default: Found::of(default)?,
            unmatched: Found::of(unmatched.unwrap_or(default))?,
            tells_unmatched: unmatched.is_some(),
            framework: OnceLock::new(),
        })
    }

    /// Tells it the framework's routes, once; another time changes nothing.
    ///
    /// ``ask(scope, methods, candidates)``: the number of the row that is written as the route that the framework
    /// serves; -1 where it serves none, -2 where no row is written as the route. ``candidates`` are numbers of
    /// ``endpoints``, of which the route is one, or None. ``special``: numbers of rows without parameters that are
    /// written as no route, so for one path of a route. ``endpoints``: for each route of the framework, in its order,
    /// the texts around its parameters; for each parameter whether it takes slashes, or None where that is not known;
    /// and the rows that are written as it with their methods. None if it has to be asked each time. ``lists``: the
    /// framework's lists of routes.
    #[pyo3(signature = (ask, special, endpoints, lists, /))]
    #[allow(clippy::type_complexity, reason = "as the tuples of Python are")]
    fn attach(
        &self,
        ask: Bound<'_, PyAny>,
        special: Vec<usize>,
        endpoints: Option<Vec<(Vec<String>, Option<Vec<bool>>, Vec<(Option<String>, usize)>)>>,
        lists: Vec<Bound<'_, PyList>>,
    ) -> PyResult<()> {
        let known = self.rows.len();
        let rows = endpoints.iter().flatten().flat_map(|(.., rows)| rows).map(|(_, row)| row).chain(&special);
        if let Some(row) = rows.copied().find(|row| *row >= known) {
            return Err(PyValueError::new_err(format!("there is no row {row}: there are {known}")));
        }
        let framework = Framework::of(ask, special, endpoints, lists)?;
        self.framework.get_or_init(|| framework);
        Ok(())
    }

    /// The route of a path: one without parameters before one with, one with the method before one without.
    ///
    /// ``method`` is the key under which the scope has the method. What one framework treats alike is treated alike
    /// here, or clients could get around a route's limit: HEAD is found as GET, and so is a WebSocket, which has no
    /// method; methods in any case (Flask, Django), a path with a line break at its end with it and without
    /// (Starlette's patterns end with ``$``), and slashes at its beginning as one (Flask). Where a path matches
    /// nothing, slashes within it count as one too: with a line break at the end, Starlette's mounts take one off.
    ///
    /// ``is_plain``: the path is what the framework's routes are matched with. If it is not, the framework is asked.
    #[pyo3(name = "find", signature = (scope, method, path, is_plain = true, /))]
    fn find_py(
        &self,
        py: Python<'_>,
        scope: &Bound<'_, PyAny>,
        method: &Bound<'_, PyString>,
        path: &Bound<'_, PyString>,
        is_plain: bool,
    ) -> PyResult<Py<PyTuple>> {
        Ok(self.find(scope, method, path, is_plain)?.tuple.clone_ref(py))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for found in self.rows.iter().chain([&self.default, &self.unmatched]) {
            visit.call(&found.tuple)?;
        }
        self.framework.get().map_or(Ok(()), |framework| framework.traverse(&visit))
    }
}

impl PyRouteTable {
    pub(super) fn find(
        &self,
        scope: &Bound<'_, PyAny>,
        method: &Bound<'_, PyString>,
        raw: &Bound<'_, PyString>,
        is_plain: bool,
    ) -> PyResult<&Found> {
        // No route contains a lone surrogate, so what replaces it does not matter.
        let raw = raw.to_string_lossy();
        let path = with_one_slash(&raw);
        let asked = self.has_methods.then(|| scope.call_method1(intern!(scope.py(), "get"), (method,))).transpose()?;
        let asked: Option<Cow<'_, str>> = asked.as_ref().map(|asked| asked.extract()).transpose()?.flatten();
        let asked = asked.map(|it| if it.chars().any(char::is_lowercase) { it.to_uppercase().into() } else { it });
        let methods: &[Option<&str>] = match asked.as_deref() {
            Some("HEAD") => &[Some("HEAD"), Some("GET"), None],
            Some(asked) => &[Some(asked), None],
            // A WebSocket, whose handshake is a GET.
            None => &[Some("GET"), None],
        };
        let found = self.among(&path, methods).or_else(|| self.among(&with_single_slashes(&path)?, methods));
        let Some(framework) = self.framework.get() else { return Ok(self.row(found, &self.unmatched)) };
        let path = is_plain.then_some(&*raw);
        Ok(match framework.served(scope, methods, path, found, self.tells_unmatched)? {
            Served::Row(row) => self.rows.get(row).unwrap_or(&self.unmatched),
            Served::NoRow => self.row(found, &self.default),
            Served::Nothing => self.row(found, &self.unmatched),
        })
    }

    fn row<'a>(&'a self, row: Option<usize>, otherwise: &'a Found) -> &'a Found {
        row.map_or(otherwise, |row| &self.rows[row])
    }

    fn among(&self, path: &str, methods: &[Option<&str>]) -> Option<usize> {
        let bare = path.strip_suffix('\n').unwrap_or(path);
        let exact = methods.iter().find_map(|method| match method {
            _ if self.exact.is_empty() => None,
            Some(method) => self.exact.get(&format!("{method} {bare}")),
            None => self.exact.get(bare),
        });
        exact.copied().or_else(|| {
            methods.iter().find_map(|method| {
                let mut theirs = self.patterns.iter().filter(|(of, ..)| of.as_deref() == *method);
                theirs
                    .find(|(_, pattern, _)| pattern.is(path) || (bare != path && pattern.is(bare)))
                    .map(|(.., row)| *row)
            })
        })
    }
}

/// The path with one slash at its beginning, however many it has.
fn with_one_slash(path: &str) -> Cow<'_, str> {
    let rest = path.trim_start_matches('/');
    match path.len() - rest.len() {
        0 => format!("/{rest}").into(),
        slashes => path[slashes - 1..].into(),
    }
}

/// The path with one slash for each run of them, if it has such runs.
fn with_single_slashes(path: &str) -> Option<String> {
    let mut before = ' ';
    let keep = |now: &char| std::mem::replace(&mut before, *now) != '/' || *now != '/';
    path.contains("//").then(|| path.chars().filter(keep).collect())
}
