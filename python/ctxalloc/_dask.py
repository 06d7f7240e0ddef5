"""What ``ctxalloc.dask.RequestPlugin`` puts onto a worker of Dask.

Requests around its tasks and the calls of its actors, its budget, and a watch on its memory. Where a task enters
its request, and why there: ``docs/decisions/0026-a-task-enters-its-request-in-its-worker.md``.
"""

import contextlib
import contextvars
import functools
import importlib.util
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Literal

import dask
import distributed
from dask._task_spec import GraphNode

from ctxalloc import _native
from ctxalloc._coverage import coverage
from ctxalloc._frames import clear_frames
from ctxalloc._native import Budget, trim
from ctxalloc._recording import recording
from ctxalloc._tasks import Choice, NamedBlock
from ctxalloc._terms import Terms

ANNOTATION: Final = "ctxalloc"
"""The key of ``dask.annotate`` that has a task's terms, and of Dask's configuration that has the plugin's options."""

MARGIN: Final = 0.05
"""The part of a worker's memory limit that is left for growth between two measurements of the process."""

TERMINATE: Final = 0.95
"""At which part of its memory limit a worker is killed, unless Dask's configuration says another one."""

WORTH_TRIMMING_BYTES: Final = 1 << 20
"""Less than this is not given back: it costs more than it gains."""

IDLE_SECONDS: Final = 2.0
"""After this time without a task, a worker gives back what its pools keep."""

_PREFIXES: Final = 4096
"""Prefixes whose terms are kept ready; users may give every task a name of its own."""


class Failing:
    """Takes the place of a task whose terms cannot be kept: it fails, and says why."""

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
        return Failing, (self._inner, self._error)


class InRequest:
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
            with self._block():
                return self._inner(*args, **kwargs)
        except BaseException as error:
            clear_frames(error)
            raise

    async def _awaited(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with self._block():
                return await self._inner(*args, **kwargs)
        except BaseException as error:
            clear_frames(error)
            raise

    def _block(self) -> NamedBlock:
        return NamedBlock(self._choice.block(), lambda: self._key, self._prefix)

    def __repr__(self) -> str:
        return repr(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """For executors that run processes: the task's limit applies there; the worker's budget cannot."""
        return _in_process, (self._inner, self._choice.terms, self._key, self._prefix)


def _in_process(inner: Any, terms: Terms, key: Any, prefix: str) -> InRequest:
    return InRequest(inner, Choice(terms, prefix, None), key, prefix)


class Attached:
    """A plugin on its worker: the budget, the terms made ready, and what was changed in the worker."""

    def __init__(
        self,
        worker: Any,
        terms: Terms,
        prefixes: Mapping[str, Terms | None],
        budget: int | Literal["auto"] | None,
        record: str | None,
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
        for one in (terms, *prefixes.values()):  # what is wrong with them shows before anything is changed
            if one is not None:
                self._choice_of(one, "")
        self._was_busy = time.monotonic()
        self._undo = contextlib.ExitStack()
        if record is not None:
            self._undo.enter_context(recording(record))
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
        if type(spec) in {InRequest, Failing}:  # left by an earlier execution, perhaps with other terms
            spec = spec._inner  # noqa: SLF001 - of this file
        if not isinstance(spec, GraphNode):
            error = RuntimeError(
                f"ctxalloc.dask does not know distributed {distributed.__version__}: a task is a "
                f"{type(spec).__name__}; take an older release, or decorate the functions with @ctxalloc.request(...)"
            )
            task.run_spec = Failing(spec, error)
            return
        try:
            choice = self._choice(task, task.prefix)
        except (TypeError, ValueError, RuntimeError) as error:
            task.run_spec = Failing(spec, error)
            return
        if choice is not None:
            task.run_spec = InRequest(spec, choice, task.key, task.prefix)

    def _choice(self, task: Any, name: str) -> Choice | None:
        """What a task or a call of an actor's method gets.

        TypeError, ValueError: its annotation is not valid. RuntimeError: it wants a whole request, which cannot be had.
        """
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
        """Replace the worker's handler of calls of actors' methods, which are no tasks: each call gets a request.

        The handler awaits async methods itself, and gives the others to an executor that carries no Context.
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
            except (TypeError, ValueError, RuntimeError) as error:
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
            with NamedBlock(choice.block(), lambda: key, prefix):
                answer = await called(actor=actor, function=function, args=args, kwargs=kwargs)
                _raise_memory_error(answer)  # the end of the request finds out whether it is a refusal
        except MemoryError as error:
            clear_frames(error)
            return _answer(error)
        return answer

    # ---- memory

    @staticmethod
    def _lowest_threshold(memory: Any) -> int | None:
        """The resident memory above which Dask spills or pauses; None where it does neither."""
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
        """When Dask measures the process: first give back what pools only keep, and measure what others use."""
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
    """Show the counters and the budget on the worker's page for Prometheus, which shows the default registry."""
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
