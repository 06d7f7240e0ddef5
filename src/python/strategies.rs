//! From the classes of `python/ctxalloc/strategies.py` to strategies. One arm a kind; the class has the docs.

use super::callbacks::callbacks;
use super::request::PyBudget;
use super::tracked;
use super::usm::PyQueue;
use crate::error::Error;
use crate::source::{HugePages, LockedPages, NumaPages, NumaPolicy, PrivatePages, UsmPages};
use crate::strategy::{
    Aligned, Arena, Budget, Budgeted, Fallback, Faulty, Guard, GuardOptions, Pool, PoolOptions, SharedMemory, Strategy,
    System, Tracked, Zeroing,
};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyInt, PyType};
use std::sync::Arc;
use std::time::Duration;

/// How memory is handed out: the base of the classes in ``ctxalloc.strategies``. Immutable.
#[pyclass(frozen, subclass, name = "Strategy", module = "ctxalloc.strategies")]
pub(super) struct PyStrategy {
    strategy: Arc<dyn Strategy>,
    /// The name of its class here.
    kind: Box<str>,
    /// The same one, where it is a Guard: it can be asked what it found.
    guard: Option<Guard>,
}

impl PyStrategy {
    pub(super) fn strategy(&self) -> Arc<dyn Strategy> {
        Arc::clone(&self.strategy)
    }
}

#[pymethods]
impl PyStrategy {
    #[new]
    #[pyo3(signature = (kind, /, **options))]
    fn new(py: Python<'_>, kind: &str, options: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let options = Options { kind, given: options };
        let mut found_guard = None;
        let strategy: Arc<dyn Strategy> = match kind {
            "System" => Arc::new(System),
            "Aligned" => Arc::new(Aligned::new(options.size("align")?)?),
            "Pool" => Arc::new(Pool::over(PrivatePages, options.of_pool()?)),
            "HugePages" => {
                let reserved = options.maybe_flag("reserved")?.unwrap_or(false);
                let source = if reserved { HugePages::reserved()? } else { HugePages::transparent() };
                Arc::new(Pool::over(source, options.of_pool()?))
            }
            "Arena" => Arc::new(Arena::over(Pool::shared())),
            "Budgeted" => {
                let upstream = options.upstream()?;
                let budget = options.maybe("budget", "a ctxalloc.Budget", |value| {
                    Ok(value.cast::<PyBudget>()?.get().budget().clone())
                })?;
                let budget = match (options.maybe_size("limit_bytes")?, budget) {
                    (Some(limit_bytes), None) => Budget::new("strategies.Budgeted", Some(limit_bytes)),
                    (None, Some(budget)) => budget,
                    (given, _) => return Err(options.one_of(["limit_bytes=", "budget="], given.is_some())),
                };
                Arc::new(Budgeted::new(upstream, budget))
            }
            "Fallback" => {
                let (first, second) = (options.strategy("first")?, options.strategy("second")?);
                // Those of these kinds are all the same one.
                let stateless = |kind: &str| matches!(kind, "System" | "SharedMemory");
                let kinds = (options.kind_of("first")?, options.kind_of("second")?);
                if Arc::ptr_eq(&first, &second) || (kinds.0 == kinds.1 && kinds.0.as_deref().is_some_and(stateless)) {
                    return Err(PyValueError::new_err(
                        "Fallback(): both strategies are the same one, and what it refused it refuses again; \
                         give another one as the second",
                    ));
                }
                Arc::new(Fallback::new(first, second))
            }
            "Numa" => {
                let nodes = options.maybe_nodes("node")?.unwrap_or_default();
                let source = NumaPages::new(&nodes, options.policy()?)?;
                Arc::new(Pool::over(source, options.of_pool()?))
            }
            "Locked" => Arc::new(Pool::over(LockedPages::new()?, options.of_pool()?)),
            "Guard" => {
                let guard = Guard::new(options.of_guard()?)?;
                found_guard = Some(guard.clone());
                Arc::new(guard)
            }
            "SharedMemory" => Arc::new(SharedMemory),
            "Usm" => Arc::new(options.usm_pool()?),
            "UsmArena" => Arc::new(Arena::over(&options.usm_pool()?)),
            "Callbacks" => callbacks(&options)?,
            "Faulty" => {
                let upstream = options.upstream()?;
                match (options.maybe_count("every")?, options.maybe_number("probability")?) {
                    (Some(every), None) => Arc::new(Faulty::every(upstream, every)?),
                    (None, Some(probability)) => {
                        let seed = options.maybe_count("seed")?.unwrap_or(0);
                        Arc::new(Faulty::with_probability(upstream, probability, seed)?)
                    }
                    (given, _) => return Err(options.one_of(["every=", "probability="], given.is_some())),
                }
            }
            "Tracked" => {
                let upstream = options.maybe_strategy("upstream")?.unwrap_or_else(|| Arc::new(Pool::shared().clone()));
                let frames = options.maybe_count("traceback")?.unwrap_or(0) as usize;
                let tasks = options.maybe("tasks", "True or False", |value| value.extract())?.unwrap_or(false);
                if frames == 0 && !tasks {
                    Arc::new(Tracked::new(upstream).map_err(in_pythons_error)?)
                } else {
                    let teller = tracked::teller(py, frames, tasks)?;
                    Arc::new(Tracked::with_attribution(upstream, teller).map_err(in_pythons_error)?)
                }
            }
            "Zeroing" => {
                let reason = match options.kind_of("upstream")?.as_deref() {
                    Some("Zeroing") => Some("upstream is a Zeroing, which wipes its blocks already"),
                    Some("Guard") => {
                        Some("nobody finds anything in a block that a Guard took back: its memory is gone")
                    }
                    _ => None,
                };
                if let Some(reason) = reason {
                    return Err(PyValueError::new_err(format!("Zeroing(): {reason}; use upstream as it is")));
                }
                Arc::new(Zeroing::new(options.upstream()?))
            }
            _ => {
                return Err(PyValueError::new_err(format!(
                    "there is no strategy of kind {kind:?}; use the classes in ctxalloc.strategies"
                )));
            }
        };
        Ok(Self { strategy, kind: kind.into(), guard: found_guard })
    }

    /// `Guard.misuses` of the package.
    fn _misuses(&self) -> PyResult<u64> {
        let guard = self.guard.as_ref().ok_or_else(|| PyTypeError::new_err("only a Guard counts misuse"))?;
        Ok(guard.misuses())
    }

    fn __repr__(&self) -> String {
        let text = in_pythons_words(&format!("{:?}", self.strategy));
        if text.ends_with(')') { text } else { text + "()" }
    }
}

/// The Debug text of a strategy in Python's words: `Aligned { align: 64 }` is `Aligned(align=64)`.
pub(super) fn in_pythons_words(debug: &str) -> String {
    let text = debug.replace(" { ", "(").replace(" }", ")").replace(": ", "=");
    text.replace("=true", "=True").replace("=false", "=False")
}

/// An error about a strategy that is wrapped, which it shows by its Debug text.
fn in_pythons_error(error: Error) -> Error {
    match error {
        Error::BadOption { option, value, wanted } => {
            Error::BadOption { option, value: in_pythons_words(&value), wanted }
        }
        other => other,
    }
}

/// The name of the class, where a class was given in place of a strategy.
pub(super) fn class_of_strategies(given: &Bound<'_, PyAny>) -> Option<String> {
    let class = given.cast::<PyType>().ok()?;
    let strategies = class.is_subclass_of::<PyStrategy>().ok()?;
    if strategies { class.name().ok().map(|name| name.to_string()) } else { None }
}

/// Refuses True and False where a number is wanted: they count as 1 and 0, and are most often another argument's.
pub(super) fn no_bool<'a, 'py>(value: &'a Bound<'py, PyAny>) -> PyResult<&'a Bound<'py, PyAny>> {
    if value.is_exact_instance_of::<PyBool>() { Err(PyTypeError::new_err(())) } else { Ok(value) }
}

/// The keyword options that a class passed on.
pub(super) struct Options<'a, 'py> {
    kind: &'a str,
    given: Option<&'a Bound<'py, PyDict>>,
}

impl<'a, 'py> Options<'a, 'py> {
    pub(super) fn new(kind: &'a str, given: &'a Bound<'py, PyDict>) -> Self {
        Self { kind, given: Some(given) }
    }

    pub(super) fn given(&self, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
        let value = self.given.map(|given| given.get_item(name)).transpose()?.flatten();
        Ok(value.filter(|value| !value.is_none()))
    }

    /// A size in bytes that must be given: an int, not negative.
    fn size(&self, name: &str) -> PyResult<usize> {
        self.maybe_size(name)?
            .ok_or_else(|| PyTypeError::new_err(format!("{}() needs {name}=, a number of bytes", self.kind)))
    }

    /// A size in bytes: an int, not negative; None for the strategy's own choice.
    pub(super) fn maybe_size(&self, name: &str) -> PyResult<Option<usize>> {
        let wanted = format!("a number of bytes, an int from 0 to 2**{} - 1", usize::BITS);
        self.maybe(name, &wanted, |value| no_bool(value)?.extract())
    }

    /// How many bytes a pool keeps.
    pub(super) fn maybe_warm_bytes(&self) -> PyResult<Option<usize>> {
        self.maybe("warm_bytes", "a number of bytes, an int from 0 up", |value| no_bool(value)?.extract())
    }

    /// A time in seconds: a number, not negative; None for the strategy's own choice.
    pub(super) fn maybe_seconds(&self, name: &str) -> PyResult<Option<Duration>> {
        self.maybe(name, "a time in seconds, a number from 0 up", |value| {
            Duration::try_from_secs_f64(no_bool(value)?.extract()?).map_err(|_| PyValueError::new_err(()))
        })
    }

    /// A count: an int, not negative.
    fn maybe_count(&self, name: &str) -> PyResult<Option<u64>> {
        self.maybe(name, "a count, an int from 0 to 2**64 - 1", |value| no_bool(value)?.extract())
    }

    /// The pool of a kind on a queue.
    fn usm_pool(&self) -> PyResult<Pool<UsmPages>> {
        let queue = self.maybe("queue", "a UsmQueue", |value| Ok(value.cast::<PyQueue>()?.clone().unbind()))?;
        let kind = self.maybe("kind", "'shared' or 'host'", |value| value.extract::<String>())?;
        match (queue, kind) {
            (Some(queue), Some(kind)) => queue.get().pool(&kind),
            _ => Err(PyTypeError::new_err("a strategy over USM needs queue= and kind=")),
        }
    }

    /// Any number.
    fn maybe_number(&self, name: &str) -> PyResult<Option<f64>> {
        self.maybe(name, "a number", |value| no_bool(value)?.extract())
    }

    /// Yes or no: True or False, and nothing that only counts as such.
    pub(super) fn maybe_flag(&self, name: &str) -> PyResult<Option<bool>> {
        self.maybe(name, "True or False", |value| value.extract())
    }

    /// One NUMA node, or several.
    fn maybe_nodes(&self, name: &str) -> PyResult<Option<Vec<usize>>> {
        self.maybe(name, "the number of a node, an int from 0 up, or a sequence of them", |value| {
            if no_bool(value)?.is_instance_of::<PyInt>() {
                return Ok(vec![value.extract()?]);
            }
            value.try_iter()?.map(|node| no_bool(&node?)?.extract()).collect()
        })
    }

    /// What to do with the nodes.
    fn policy(&self) -> PyResult<NumaPolicy> {
        let all = [NumaPolicy::Bind, NumaPolicy::Preferred, NumaPolicy::Interleave];
        let policy = self.maybe("policy", "'bind', 'preferred' or 'interleave'", |value| {
            let name: String = value.extract()?;
            all.into_iter().find(|policy| policy.name() == name).ok_or_else(|| PyValueError::new_err(()))
        })?;
        Ok(policy.unwrap_or(NumaPolicy::Bind))
    }

    /// What every strategy over a pool takes.
    fn of_pool(&self) -> PyResult<PoolOptions> {
        let mut limits = PoolOptions::default();
        if let Some(warm_bytes) = self.maybe_warm_bytes()? {
            limits.warm_bytes = warm_bytes;
        }
        if let Some(decay) = self.maybe_seconds("decay_seconds")? {
            limits.decay = decay;
        }
        Ok(limits)
    }

    fn of_guard(&self) -> PyResult<GuardOptions> {
        let mut wishes = GuardOptions::default();
        wishes.align = self.maybe_size("align")?.unwrap_or(wishes.align);
        wishes.underrun = self.maybe_flag("underrun")?.unwrap_or(wishes.underrun);
        wishes.quarantine_bytes = self.maybe_size("quarantine_bytes")?.unwrap_or(wishes.quarantine_bytes);
        wishes.report = self.maybe_flag("report")?.unwrap_or(wishes.report);
        Ok(wishes)
    }

    /// The strategy that this one wraps.
    fn upstream(&self) -> PyResult<Arc<dyn Strategy>> {
        self.strategy("upstream")
    }

    /// A strategy that must be given.
    fn strategy(&self, name: &str) -> PyResult<Arc<dyn Strategy>> {
        self.maybe_strategy(name)?
            .ok_or_else(|| PyTypeError::new_err(format!("{}() needs a strategy to wrap", self.kind)))
    }

    /// Of two options exactly one must be given, and that is not so.
    fn one_of(&self, [one, other]: [&str; 2], given: bool) -> PyErr {
        let kind = self.kind;
        PyTypeError::new_err(match given {
            true => format!("{kind}() takes either {one} or {other}, and was given both; leave one out"),
            false => format!("{kind}() needs either {one} or {other}; give one of them"),
        })
    }

    /// The class of a strategy that was given.
    fn kind_of(&self, name: &str) -> PyResult<Option<Box<str>>> {
        self.maybe(name, "a strategy to wrap", |value| Ok(value.cast::<PyStrategy>()?.get().kind.clone()))
    }

    /// A strategy, or None.
    fn maybe_strategy(&self, name: &str) -> PyResult<Option<Arc<dyn Strategy>>> {
        let mut wanted = "a strategy to wrap".to_owned();
        if let Some(class) = self.given(name)?.and_then(|value| class_of_strategies(&value)) {
            wanted = format!("a strategy to wrap, strategies.{class}(...), and not the class");
        }
        self.maybe(name, &wanted, |value| Ok(value.cast::<PyStrategy>()?.get().strategy()))
    }

    /// An option as `read` takes it; what it refuses is named, with what is `wanted` instead.
    pub(super) fn maybe<T>(
        &self,
        name: &str,
        wanted: &str,
        read: impl FnOnce(&Bound<'py, PyAny>) -> PyResult<T>,
    ) -> PyResult<Option<T>> {
        let Some(value) = self.given(name)? else { return Ok(None) };
        let shown = value.repr()?;
        read(&value).map(Some).map_err(|error| {
            let message = format!("{}({name}={shown}): give {wanted}", self.kind);
            // A number out of range is a wrong value (OverflowError here); anything else is of a wrong type.
            let wrong_type = error.is_instance_of::<PyTypeError>(value.py());
            if wrong_type { PyTypeError::new_err(message) } else { PyValueError::new_err(message) }
        })
    }
}
