//! What a framework's own router would serve, as far as that decides which row of `routes` a request gets.
//!
//! Its routes are flattened once, into texts around parameters, which may be anything where their kinds are not known:
//! a path that such a pattern refuses is refused by the route too. Most paths leave one candidate, or candidates with
//! one row, and nobody is asked. Else the framework is (`_frameworks.py`), for who comes first of several, and what a
//! parameter takes, is its own affair.

use super::pattern::Pattern;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyList;

pub(super) struct Framework {
    ask: Py<PyAny>,
    /// Rows for one path of a route. They go before the row of the route.
    special: Vec<usize>,
    /// None: it is asked each time.
    endpoints: Option<Vec<Endpoint>>,
    /// The framework's lists of routes, and how long they were. What was added later was not flattened.
    lists: Vec<(Py<PyList>, usize)>,
}

/// A route of the framework.
struct Endpoint {
    /// Matches each path that the route serves, and more.
    pattern: Pattern,
    /// The rows that are written as it.
    rows: Vec<(Option<String>, usize)>,
}

/// What the framework does with a request.
pub(super) enum Served {
    /// It reaches a view by a route that this row is written as.
    Row(usize),
    /// It reaches a view, and no row is written as its route.
    NoRow,
    /// It reaches none.
    Nothing,
}

impl Framework {
    #[allow(clippy::type_complexity, reason = "as the tuples of Python are")]
    pub(super) fn of(
        ask: Bound<'_, PyAny>,
        special: Vec<usize>,
        endpoints: Option<Vec<(Vec<String>, Option<Vec<bool>>, Vec<(Option<String>, usize)>)>>,
        lists: Vec<Bound<'_, PyList>>,
    ) -> PyResult<Self> {
        let endpoints = endpoints.map(|all| {
            let all = all.into_iter().map(|(texts, are_paths, rows)| {
                let are_paths = are_paths.unwrap_or_else(|| vec![true; texts.len().saturating_sub(1)]);
                Ok(Endpoint { pattern: Pattern::of(texts, are_paths)?, rows })
            });
            all.collect::<PyResult<_>>()
        });
        let lists = lists.into_iter().map(|list| (list.len(), list.unbind())).map(|(len, list)| (list, len));
        Ok(Self { ask: ask.unbind(), special, endpoints: endpoints.transpose()?, lists: lists.collect() })
    }

    /// ``path``: None if it is not what the routes are matched with. ``found``: the row that matches the path.
    /// ``tells_nothing``: whether ``Nothing`` is something else than ``NoRow`` to who asks.
    pub(super) fn served(
        &self,
        scope: &Bound<'_, PyAny>,
        methods: &[Option<&str>],
        path: Option<&str>,
        found: Option<usize>,
        tells_nothing: bool,
    ) -> PyResult<Served> {
        if let Some(row) = found.filter(|row| self.special.contains(row)) {
            return Ok(Served::Row(row));
        }
        let py = scope.py();
        let mut candidates: Option<Vec<usize>> = None;
        // With a line break in it, Starlette's patterns and mounts take it apart in ways of their own.
        let path = path.filter(|path| !path.contains('\n'));
        if let (Some(endpoints), Some(path)) = (&self.endpoints, path)
            && self.lists.iter().all(|(list, len)| list.bind(py).len() == *len)
        {
            let theirs = endpoints.iter().enumerate().filter(|(_, endpoint)| endpoint.pattern.is(path));
            let theirs: Vec<usize> = theirs.map(|(number, _)| number).collect();
            let mut rows = theirs.iter().map(|number| endpoints[*number].row(methods));
            let Some(first) = rows.next() else { return Ok(Served::Nothing) };
            let is_sure = !tells_nothing || first.or(found).is_some();
            if is_sure && rows.all(|row| row.or(found) == first.or(found)) {
                return Ok(first.map_or(Served::NoRow, Served::Row));
            }
            candidates = Some(theirs);
        }
        let row: isize = self.ask.bind(py).call1((scope, methods.to_vec(), candidates))?.extract()?;
        Ok(usize::try_from(row).map_or(if row == -2 { Served::NoRow } else { Served::Nothing }, Served::Row))
    }

    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.ask)?;
        self.lists.iter().try_for_each(|(list, _)| visit.call(list))
    }
}

impl Endpoint {
    /// The row for these methods, the first of which comes first.
    fn row(&self, methods: &[Option<&str>]) -> Option<usize> {
        let of = |method: &Option<&str>| self.rows.iter().find(|(of, _)| of.as_deref() == *method).map(|(_, row)| *row);
        methods.iter().find_map(of)
    }
}
