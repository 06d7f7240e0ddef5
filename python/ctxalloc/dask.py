"""Memory, an account and a limit for each task of Dask, in its worker.

::

    client.register_plugin(ctxalloc.dask.RequestPlugin(limit_bytes=2 * ctxalloc.GiB))
    with dask.annotate(ctxalloc={"limit_bytes": 8 * ctxalloc.GiB}):
        ...
    print(ctxalloc.dask.summary(client))

Without a line in the client: ``distributed.worker.preload: ctxalloc.dask`` in Dask's configuration, with the options
under ``ctxalloc``. Needs ``distributed`` 2024.12.0 or later (it is imported here and nowhere else). Where a task enters
its request, and why there: ``docs/decisions/0026-a-task-enters-its-request-in-its-worker.md``; docs/clusters.md is the
guide.
"""

import contextlib
import contextvars
import functools
import importlib.util
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Literal

try:
    import dask
    import distributed
    from dask._task_spec import GraphNode
    from distributed.diagnostics.plugin import WorkerPlugin
except ImportError:
    raise ImportError(
        "ctxalloc.dask needs distributed 2024.12.0 or later, and its import fails: pip install 'distributed>=2024.12'"
    ) from sys.exception()

from ctxalloc import _native, metrics
from ctxalloc._coverage import coverage
from ctxalloc._errors import BudgetExceeded
from ctxalloc._native import Budget, trim
from ctxalloc._tasks import BudgetNumbers, Choice, ProcessReport, Suggestion, Summary, Terms, TermsOf, named

__all__ = ["ANNOTATION", "ProcessReport", "RequestPlugin", "Suggestion", "Summary", "dask_setup", "report", "summary"]

ANNOTATION: Final = "ctxalloc"
"""The key of ``dask.annotate`` that has a task's terms, and of Dask's configuration that has the plugin's options."""

OLDEST: Final = (2024, 12, 0)
"""The oldest release of ``distributed`` that the tests run with."""

NAME: Final = "ctxalloc"
"""The plugin's name on a worker: registered again, it replaces the one before."""

MARGIN: Final = 0.05
"""The part of a worker's memory limit that is left for what grows between two looks at the process."""

TERMINATE: Final = 0.95
"""Where workers are killed, if Dask's configuration does not say it."""

WORTH_TRIMMING_BYTES: Final = 1 << 20
"""Less than this is not given back: it costs more than it gains."""

IDLE_SECONDS: Final = 2.0
"""After this time without a task, a worker gives back what its pools keep."""

_PREFIXES: Final = 4096
"""Prefixes whose terms are kept ready; users may give every task a name of its own."""

log = logging.getLogger("ctxalloc")


class RequestPlugin(WorkerPlugin):  # type: ignore[misc] # distributed has no types
    """Runs each task of a worker in a ``ctxalloc.request()`` of its own. For ``client.register_plugin``.

    - ``limit_bytes``: the limit of each task. Its peak counts what the task makes, its result included, and not what it
      is given.
    - ``handler``: instead of a request, the name of a handler that each task's arrays live in; there is no account.
    - ``strict``: no overdraft, as in ``ctxalloc.request``.
    - ``prefixes``: other terms by the prefix of the key: ``{"read-parquet": {"limit_bytes": n}, "plot": None}``. None
      is no request. ``dask.annotate(ctxalloc={...})`` comes before both.
    - ``budget``: the limit of all tasks and results of a worker together. ``"auto"``: what the worker is killed at,
      less 5 % of its memory limit and less what others use in the process, which is followed while it runs; none where
      the worker has no memory limit. A number of bytes: as it is. None: none.

    What a limit refuses fails its task with ``TaskBudgetExceeded``, and Dask's ``retries`` apply; the worker and its
    other tasks go on. TypeError, ValueError: an option is not possible. On the worker, RuntimeError: this
    ``distributed`` is older than 2024.12.0, or differs from those that are known; its tasks fail with it too, until the
    plugin is removed.
    """

    name = NAME

    def __init__(
        self,
        *,
        limit_bytes: int | None = None,
        handler: str | None = None,
        strict: bool = False,
        prefixes: Mapping[str, TermsOf] | None = None,
        budget: int | Literal["auto"] | None = "auto",
    ) -> None:
        self.terms = Terms(limit_bytes, handler, strict).checked("RequestPlugin")
        self.prefixes = {
            prefix: self.terms.changed(terms, f"RequestPlugin(prefixes={{{prefix!r}: ...}})")
            for prefix, terms in (prefixes or {}).items()
        }
        if isinstance(budget, str):
            if budget != "auto":
                raise ValueError(f"RequestPlugin(budget={budget!r}): give a number of bytes, 'auto' or None")
        else:
            Budget(budget)  # which says what is wrong with it
        self.budget = budget
        self._attached: _Attached | None = None
        self._worker: Any = None
        self._broken: BaseException | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The options: a worker attaches its own copy."""
        return self.__dict__ | {"_attached": None, "_worker": None}

    @classmethod
    def broken(cls, error: BaseException) -> "RequestPlugin":
        """One whose worker runs no task: its tasks fail with that error."""
        plugin = cls()
        plugin._broken = error
        return plugin

    def setup(self, worker: Any) -> None:
        """Attach to a worker. RuntimeError: its ``distributed`` is not one that is known."""
        self._worker = worker
        if self._broken is not None:
            return
        try:
            _look(worker)
            self._attached = _Attached(worker, self.terms, self.prefixes, self.budget)
        except Exception as error:
            # A worker that joins later only logs it, and keeps the plugin.
            self._broken = error
            raise

    def teardown(self, worker: Any) -> None:  # noqa: ARG002 - Dask's signature
        """Detach from it. Tasks that run go on in their requests."""
        if self._attached is not None:
            self._attached.detach()
            self._attached = None

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:  # noqa: ARG002 - Dask's signature
        """Before a task is executed: put it into its request."""
        if finish != "executing" or self._worker is None:
            return
        task = self._worker.state.tasks[key]
        if self._broken is not None or self._attached is None:
            task.run_spec = _Failing(task.run_spec, self._broken or RuntimeError(f"{self!r} is not attached"))
        else:
            self._attached.put_into_request(task)

    @property
    def worker_budget(self) -> Budget | None:
        """The budget of the worker that it is attached to."""
        return None if self._attached is None else self._attached.budget


def _look(worker: Any) -> None:
    """Whether this ``distributed`` is as expected. RuntimeError: it is not."""
    here = f"distributed {distributed.__version__}"
    way_out = "decorate the functions with @ctxalloc.request(...) instead"
    numbers = tuple(int(part) for part in distributed.__version__.split(".")[:3] if part.isdigit())
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise RuntimeError(
            f"ctxalloc.dask works with distributed {oldest} and later, and this is {here}; upgrade, or {way_out}"
        )
    known = (
        hasattr(GraphNode, "is_coro")
        and "actor_execute" in getattr(worker, "handlers", ())
        and "actor" in getattr(worker, "executors", ())
        and hasattr(getattr(worker, "monitor", None), "get_process_memory")
        and hasattr(getattr(worker, "state", None), "tasks")
    )
    if not known:
        raise RuntimeError(
            f"ctxalloc.dask does not know {here}: its workers differ from those that the tests ran with; take an older "
            f"one, or {way_out}"
        )


class _Failing:
    """In the place of a task that was promised terms which cannot be kept."""

    __slots__ = ("_error", "_inner")
    is_coro = False

    def __init__(self, inner: Any, error: BaseException) -> None:
        self._inner = inner
        self._error = error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002 - a task's
        raise self._error.with_traceback(None)

    def __repr__(self) -> str:
        return repr(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Failing, (self._inner, self._error)


class _InRequest:
    """A task whose calls run in a request. All else is the task's own."""

    __slots__ = ("_choice", "_inner", "_key", "_prefix", "is_coro")

    def __init__(self, inner: Any, choice: Choice, key: Any, prefix: str) -> None:
        self._inner = inner
        self._choice = choice
        self._key = key
        self._prefix = prefix
        self.is_coro = inner.is_coro

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_coro:
            return self._awaited(*args, **kwargs)
        try:
            with self._choice.block():
                return self._inner(*args, **kwargs)
        except BudgetExceeded as refused:
            raise named(refused, self._key, self._prefix) from refused.__cause__

    async def _awaited(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with self._choice.block():
                return await self._inner(*args, **kwargs)
        except BudgetExceeded as refused:
            raise named(refused, self._key, self._prefix) from refused.__cause__

    def __repr__(self) -> str:
        return repr(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """For executors that are processes: its limit holds there; the worker's budget cannot."""
        return _in_process, (self._inner, self._choice.terms, self._key, self._prefix)


def _in_process(inner: Any, terms: Terms, key: Any, prefix: str) -> _InRequest:
    return _InRequest(inner, Choice(terms, prefix, None), key, prefix)


class _Attached:
    """A plugin on its worker: the budget, the terms made ready, and what was changed of the worker."""

    def __init__(
        self,
        worker: Any,
        terms: Terms,
        prefixes: Mapping[str, Terms | None],
        budget: int | Literal["auto"] | None,
    ) -> None:
        self._worker = worker
        self._terms = terms
        self._prefixes = prefixes
        self._ready: dict[str, Choice | None] = {}
        memory = worker.memory_manager
        self._memory_limit: int | None = memory.memory_limit or None
        self._others_bytes = coverage().unseen_bytes
        self._follows = budget == "auto" and self._memory_limit is not None
        limit = self._room() if self._follows else None if budget == "auto" else budget
        self.budget = None if limit is None else Budget(limit, name=f"worker {worker.name}")
        self._pressure_bytes = self._lowest_threshold(memory)
        for one in (terms, *prefixes.values()):  # what is wrong with them is seen before anything is changed
            if one is not None:
                self._choice_of(one, "")
        self._was_busy = time.monotonic()
        self._undo = contextlib.ExitStack()
        self._watch_memory()
        self._carry_to_actors()
        if self.budget is not None:
            self._undo.enter_context(_shown(self.budget))

    def detach(self) -> None:
        self._undo.close()

    # ---- tasks

    def put_into_request(self, task: Any) -> None:
        """Replace what the worker will call."""
        spec = task.run_spec
        if type(spec) is _InRequest:
            return
        if not isinstance(spec, GraphNode):
            error = RuntimeError(
                f"ctxalloc.dask does not know distributed {distributed.__version__}: a task is a "
                f"{type(spec).__name__}; take an older release, or decorate the functions with @ctxalloc.request(...)"
            )
            task.run_spec = _Failing(spec, error)
            return
        try:
            choice = self._choice(task, task.prefix)
        except (TypeError, ValueError) as error:
            task.run_spec = _Failing(spec, error)
            return
        if choice is not None:
            task.run_spec = _InRequest(spec, choice, task.key, task.prefix)

    def _choice(self, task: Any, name: str) -> Choice | None:
        """What a task gets, or a call of an actor's method. TypeError, ValueError: its annotation is no terms."""
        annotations = task.annotations
        if annotations and ANNOTATION in annotations:
            terms = self._terms_of(task, name) or Terms()
            changed = terms.changed(annotations[ANNOTATION], f"dask.annotate({ANNOTATION}=...) of task {task.key!r}")
            return None if changed is None else self._choice_of(changed, name)
        try:
            return self._ready[name]
        except KeyError:
            terms_of_prefix = self._terms_of(task, name)
            choice = None if terms_of_prefix is None else self._choice_of(terms_of_prefix, name)
            if len(self._ready) >= _PREFIXES:
                self._ready.clear()
            self._ready[name] = choice
            return choice

    def _terms_of(self, task: Any, name: str) -> Terms | None:
        return self._prefixes.get(name, self._prefixes.get(task.prefix, self._terms))

    def _choice_of(self, terms: Terms, name: str) -> Choice:
        return Choice(terms, name, self.budget)

    # ---- actors

    def _carry_to_actors(self) -> None:
        """Methods of actors are no tasks: put the worker's handler of their calls into a request.

        It runs async ones itself, and gives the others to an executor that has no Context.
        """
        handlers, executor = self._worker.handlers, self._worker.executors["actor"]
        called: Callable[..., Awaitable[dict[str, Any]]] = handlers["actor_execute"]
        submit = executor.submit

        @functools.wraps(called)
        async def in_request(
            actor: Any = None, function: Any = None, args: Any = (), kwargs: Any = None
        ) -> dict[str, Any]:
            task = self._worker.state.tasks.get(actor)
            if task is None:
                return await called(actor=actor, function=function, args=args, kwargs=kwargs)
            prefix = f"{task.prefix}.{function}"
            try:
                choice = self._choice(task, prefix)
            except (TypeError, ValueError) as error:
                return _answer(error)
            if choice is None:
                return await called(actor=actor, function=function, args=args, kwargs=kwargs)
            return await self._in_request(choice, actor, prefix, called, actor, function, args, kwargs)

        def carrying(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            return submit(contextvars.copy_context().run, function, *args, **kwargs)

        handlers["actor_execute"] = in_request
        executor.submit = carrying

        def undo() -> None:
            if handlers.get("actor_execute") is in_request:
                handlers["actor_execute"] = called
            if executor.__dict__.get("submit") is carrying:
                del executor.submit

        self._undo.callback(undo)

    @staticmethod
    async def _in_request(
        choice: Choice, key: Any, prefix: str, called: Callable[..., Awaitable[dict[str, Any]]], *arguments: Any
    ) -> dict[str, Any]:
        actor, function, args, kwargs = arguments
        try:
            with choice.block():
                answer = await called(actor=actor, function=function, args=args, kwargs=kwargs)
                _raise_memory_error(answer)  # the end of the request tells whether it is a refusal
        except BudgetExceeded as refused:
            return _answer(named(refused, key, prefix))
        except MemoryError as error:
            return _answer(error)
        return answer

    # ---- memory

    @staticmethod
    def _lowest_threshold(memory: Any) -> int | None:
        """Above which resident memory Dask spills or pauses; None where it does neither."""
        parts = [
            part
            for part in (memory.memory_spill_fraction, memory.memory_pause_fraction)
            if part is not False and part is not None
        ]
        return int(min(parts) * memory.memory_limit) if parts and memory.memory_limit else None

    def _room(self) -> int:
        """What tasks and results may have, if the worker is not to be killed."""
        assert self._memory_limit is not None  # noqa: S101 - else nothing is followed
        terminate = dask.config.get("distributed.worker.memory.terminate", TERMINATE) or TERMINATE
        return max(0, int((terminate - MARGIN) * self._memory_limit) - self._others_bytes)

    def _is_idle(self) -> bool:
        """Whether there has been no task for a while."""
        state, now = self._worker.state, time.monotonic()
        if state.executing or state.long_running:
            self._was_busy = now
        return now - self._was_busy > IDLE_SECONDS

    def _watch_memory(self) -> None:
        """When Dask asks for the process's memory: first give back what is only kept, and see what others have."""
        monitor = self._worker.monitor
        measured: Callable[[], int] = monitor.get_process_memory
        has_own = "get_process_memory" in monitor.__dict__

        def trimmed() -> int:
            memory = measured()
            in_use, warm = _native._pools()  # noqa: SLF001 - made for this
            is_pressed = self._pressure_bytes is not None and memory > self._pressure_bytes
            if (self._is_idle() or is_pressed) and warm >= WORTH_TRIMMING_BYTES:
                trim()
                memory = measured()
                in_use, warm = _native._pools()  # noqa: SLF001
            if self._follows and self.budget is not None:
                self._others_bytes = max(0, memory - in_use - warm)
                self.budget.limit_bytes = self._room()
            return memory

        monitor.get_process_memory = trimmed

        def undo() -> None:
            if monitor.__dict__.get("get_process_memory") is trimmed:
                if has_own:
                    monitor.get_process_memory = measured
                else:
                    del monitor.get_process_memory

        self._undo.callback(undo)


def _raise_memory_error(answer: dict[str, Any]) -> None:
    error = getattr(answer.get("exception"), "data", None)
    if isinstance(error, MemoryError):
        raise error


def _answer(error: BaseException) -> dict[str, Any]:
    """What a worker answers to the call of an actor's method that failed."""
    return {"status": "error", "exception": distributed.protocol.to_serialize(error)}


# One collector for the process: workers may share it.
_SHOWN: Final[list[Budget]] = []
_COLLECTOR: list[Any] = []
_SHOWING: Final = threading.Lock()


@contextlib.contextmanager
def _shown(budget: Budget) -> Any:
    """The counters and the budget are on the worker's page for Prometheus, which shows the default registry."""
    if importlib.util.find_spec("prometheus_client") is None:
        yield
        return
    _collect(lambda: _SHOWN.append(budget))
    try:
        yield
    finally:
        _collect(lambda: _SHOWN.remove(budget))


def _collect(change: Callable[[], None]) -> None:
    from prometheus_client import REGISTRY  # noqa: PLC0415 - where it is there

    from ctxalloc.prometheus import Collector  # noqa: PLC0415

    with _SHOWING:
        change()
        while _COLLECTOR:
            REGISTRY.unregister(_COLLECTOR.pop())
        if _SHOWN:
            _COLLECTOR.append(Collector(budgets=_SHOWN))
            REGISTRY.register(_COLLECTOR[0])


def report(dask_worker: Any = None) -> ProcessReport:
    """What a worker's process counted, for ``client.run(ctxalloc.dask.report)``.

    RuntimeError: ``CTXALLOC_METRICS_DIR`` cannot be used.
    """
    plugin = None if dask_worker is None else dask_worker.plugins.get(NAME)
    budget: Budget | None = getattr(plugin, "worker_budget", None)
    seen = coverage()
    numbers = None
    if budget is not None:
        numbers = BudgetNumbers(budget.limit_bytes, budget.in_use_bytes, budget.peak_bytes, budget.refused)
    series = metrics.snapshot().series
    return ProcessReport(
        socket.gethostname(), os.getpid(), seen.resident_bytes, seen.pools_warm_bytes, numbers, dict(series)
    )


def summary(client: Any) -> Summary:
    """The counters of the whole cluster. With an asynchronous client: ``Summary((await client.run(report)).values())``.

    TypeError: the client is asynchronous.
    """
    reports = client.run(report)
    if not isinstance(reports, dict):
        reports.close()
        raise TypeError(
            "summary(client): this client is asynchronous; write ctxalloc.dask.Summary((await "
            "client.run(ctxalloc.dask.report)).values())"
        )
    return Summary(reports.values())


async def dask_setup(worker: Any) -> None:
    """What Dask calls where ``distributed.worker.preload`` names this module.

    The options are those of ``RequestPlugin``, under ``ctxalloc`` in Dask's configuration or, in the environment,
    ``DASK_CTXALLOC__LIMIT_BYTES`` and so on. Dask only logs what fails in here, so the worker's tasks fail with it too.
    """
    options = {str(key).replace("-", "_"): value for key, value in dask.config.get(ANNOTATION, {}).items()}
    try:
        plugin = RequestPlugin(**options)
    except (TypeError, ValueError) as error:
        log.exception("the configuration %r of ctxalloc.dask is not possible", options)
        plugin = RequestPlugin.broken(error)
    await worker.plugin_add(plugin=plugin, name=NAME)
