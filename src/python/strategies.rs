//! Makes strategies for the classes of `python/ctxalloc/strategies.py`: one arm for each class, which has the docs.

use super::budget::PyBudget;
use super::callbacks::callbacks;
use super::cuda;
use super::options::{Options, no_bool};
use super::text::{copied, in_python_syntax};
use super::tracked::attribution;
use super::usm::PyQueue;
use crate::error::Error;
use crate::source::{HugePages, LockedPages, NumaPages, NumaPolicy, PrivatePages, UsmPages};
use crate::strategy::{
    Aligned, Arena, Budget, Budgeted, Fallback, Faulty, Guard, GuardOptions, Pool, PoolOptions, SharedMemory, Strategy,
    System, Tracked, Zeroing,
};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyType};
use std::sync::Arc;

/// How memory is handed out: the base of the classes in ``ctxalloc.strategies``. Immutable.
#[pyclass(frozen, subclass, name = "Strategy", module = "ctxalloc.strategies")]
pub(super) struct PyStrategy {
    strategy: Arc<dyn Strategy>,
    /// The name of its class in `ctxalloc.strategies`.
    kind: Box<str>,
    /// The strategy itself if it is a Guard, which can be asked how much misuse it found.
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
        let options = Options::new(kind, options);
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
            "Budgeted" => budgeted(&options)?,
            "Fallback" => fallback(&options)?,
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
            "SharedMemory" => Arc::new(SharedMemory::new()?),
            "Usm" => Arc::new(options.usm_pool()?),
            "cuda.Pool" => cuda::strategy(py, &options, false)?,
            "cuda.Arena" => cuda::strategy(py, &options, true)?,
            "UsmArena" => Arc::new(Arena::over(&options.usm_pool()?)),
            "Callbacks" => callbacks(&options)?,
            "Faulty" => faulty(&options)?,
            "Tracked" => tracked(py, &options)?,
            "Zeroing" => zeroing(&options)?,
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
        let text = in_python_syntax(&format!("{:?}", self.strategy));
        if text.ends_with(')') { text } else { text + "()" }
    }
}

fn budgeted(options: &Options<'_, '_>) -> PyResult<Arc<dyn Strategy>> {
    let upstream = options.upstream()?;
    let budget =
        options.maybe("budget", "a ctxalloc.Budget", |value| Ok(value.cast::<PyBudget>()?.get().budget().clone()))?;
    let budget = match (options.maybe_size("limit_bytes")?, budget) {
        (Some(limit_bytes), None) => Budget::new("strategies.Budgeted", Some(limit_bytes)),
        (None, Some(budget)) => budget,
        (given, _) => return Err(options.not_one_of(["limit_bytes=", "budget="], given.is_some())),
    };
    Ok(Arc::new(Budgeted::new(upstream, budget)))
}

fn fallback(options: &Options<'_, '_>) -> PyResult<Arc<dyn Strategy>> {
    let (first, second) = (options.strategy("first")?, options.strategy("second")?);
    // All strategies of one of these kinds are the same one.
    let is_stateless = |kind: &str| matches!(kind, "System" | "SharedMemory");
    let kinds = (options.kind_of("first")?, options.kind_of("second")?);
    if Arc::ptr_eq(&first, &second) || (kinds.0 == kinds.1 && kinds.0.as_deref().is_some_and(is_stateless)) {
        return Err(PyValueError::new_err(
            "Fallback(): both strategies are the same one, and what it refused it refuses again; give another one as \
             the second",
        ));
    }
    Ok(Arc::new(Fallback::new(first, second)))
}

fn faulty(options: &Options<'_, '_>) -> PyResult<Arc<dyn Strategy>> {
    let upstream = options.upstream()?;
    Ok(match (options.maybe_count("every")?, options.maybe_number("probability")?) {
        (Some(every), None) => Arc::new(Faulty::every(upstream, every)?),
        (None, Some(probability)) => {
            let seed = options.maybe_count("seed")?.unwrap_or(0);
            Arc::new(Faulty::with_probability(upstream, probability, seed)?)
        }
        (given, _) => return Err(options.not_one_of(["every=", "probability="], given.is_some())),
    })
}

fn tracked(py: Python<'_>, options: &Options<'_, '_>) -> PyResult<Arc<dyn Strategy>> {
    let upstream = options.maybe_strategy("upstream")?.unwrap_or_else(|| Arc::new(Pool::shared().clone()));
    let frames = options.maybe_count("traceback")?.unwrap_or(0) as usize;
    let tasks = options.maybe_flag("tasks")?.unwrap_or(false);
    if frames == 0 && !tasks {
        return Ok(Arc::new(Tracked::new(upstream).map_err(in_python_words)?));
    }
    let attribution = attribution(py, frames, tasks)?;
    let mut shown = Vec::new();
    if frames > 0 {
        shown.push(("traceback", frames.to_string()));
    }
    if tasks {
        shown.push(("tasks", "true".to_owned()));
    }
    Ok(Arc::new(Tracked::with_shown_attribution(upstream, attribution, shown).map_err(in_python_words)?))
}

fn zeroing(options: &Options<'_, '_>) -> PyResult<Arc<dyn Strategy>> {
    let reason = match options.kind_of("upstream")?.as_deref() {
        Some("Zeroing") => "upstream is a Zeroing, which wipes its blocks already",
        Some("Guard") => "nothing can be read in a block that a Guard took back: its memory is gone",
        _ => {
            let upstream = options.upstream()?;
            if upstream.is_read_after_release() {
                return Err(PyValueError::new_err(
                    "Zeroing(): a device may read a block of upstream after it was freed, and would find it wiped; wipe the \
                     array yourself when the device is done (a.fill(0)), or wrap a strategy without CUDA",
                ));
            }
            return Ok(Arc::new(Zeroing::new(upstream)));
        }
    };
    Err(PyValueError::new_err(format!("Zeroing(): {reason}; use upstream as it is")))
}

/// The same error with the strategy that it shows in Python's syntax.
fn in_python_words(error: Error) -> Error {
    match error {
        Error::BadOption { option, value, expected } => {
            Error::BadOption { option, value: in_python_syntax(&value), expected }
        }
        other => other,
    }
}

/// The name of the class, if a class was given in place of a strategy.
pub(super) fn class_of_strategies(given: &Bound<'_, PyAny>) -> Option<String> {
    let class = given.cast::<PyType>().ok()?;
    let strategies = class.is_subclass_of::<PyStrategy>().ok()?;
    if strategies { class.name().ok().map(|name| copied(&name)) } else { None }
}

/// What only strategies take.
impl Options<'_, '_> {
    /// The strategy that this one wraps.
    fn upstream(&self) -> PyResult<Arc<dyn Strategy>> {
        self.strategy("upstream")
    }

    /// A strategy that must be given.
    fn strategy(&self, name: &str) -> PyResult<Arc<dyn Strategy>> {
        self.maybe_strategy(name)?
            .ok_or_else(|| PyTypeError::new_err(format!("{}() needs a strategy to wrap", self.function())))
    }

    fn maybe_strategy(&self, name: &str) -> PyResult<Option<Arc<dyn Strategy>>> {
        let mut expected = "a strategy to wrap".to_owned();
        if let Some(class) = self.given(name)?.and_then(|value| class_of_strategies(&value)) {
            expected = format!("a strategy to wrap, strategies.{class}(...), and not the class");
        }
        self.maybe(name, &expected, |value| Ok(value.cast::<PyStrategy>()?.get().strategy()))
    }

    /// The class name of a strategy that was given.
    fn kind_of(&self, name: &str) -> PyResult<Option<Box<str>>> {
        self.maybe(name, "a strategy to wrap", |value| Ok(value.cast::<PyStrategy>()?.get().kind.clone()))
    }

    /// What every strategy over a pool takes.
    pub(super) fn of_pool(&self) -> PyResult<PoolOptions> {
        let mut options = PoolOptions::default();
        options.warm_bytes = self.maybe_warm_bytes()?.unwrap_or(options.warm_bytes);
        options.decay = self.maybe_seconds("decay_seconds")?.unwrap_or(options.decay);
        Ok(options)
    }

    fn of_guard(&self) -> PyResult<GuardOptions> {
        let mut options = GuardOptions::default();
        options.align = self.maybe_size("align")?.unwrap_or(options.align);
        options.underrun = self.maybe_flag("underrun")?.unwrap_or(options.underrun);
        options.quarantine_bytes = self.maybe_size("quarantine_bytes")?.unwrap_or(options.quarantine_bytes);
        options.report = self.maybe_flag("report")?.unwrap_or(options.report);
        Ok(options)
    }

    /// The pool of a kind of USM on a queue.
    fn usm_pool(&self) -> PyResult<Pool<UsmPages>> {
        let queue = self.maybe("queue", "a UsmQueue", |value| Ok(value.cast::<PyQueue>()?.clone().unbind()))?;
        let kind = self.maybe("kind", "'shared' or 'host'", |value| value.extract::<String>())?;
        match (queue, kind) {
            (Some(queue), Some(kind)) => queue.get().pool(&kind),
            _ => Err(PyTypeError::new_err("a strategy over USM needs queue= and kind=")),
        }
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

    /// How memory is spread over NUMA nodes.
    fn policy(&self) -> PyResult<NumaPolicy> {
        let all = [NumaPolicy::Bind, NumaPolicy::Preferred, NumaPolicy::Interleave];
        let policy = self.maybe("policy", "'bind', 'preferred' or 'interleave'", |value| {
            let name: String = value.extract()?;
            all.into_iter().find(|policy| policy.name() == name).ok_or_else(|| PyValueError::new_err(()))
        })?;
        Ok(policy.unwrap_or(NumaPolicy::Bind))
    }
}
