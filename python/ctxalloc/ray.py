"""Memory, an account and a limit for each task and each call of an actor's method of Ray, in its worker.

::

    ray.init(runtime_env=ctxalloc.ray.runtime_env(limit_bytes="memory"))      # Ray's memory=, as a limit
    print(ctxalloc.ray.report())

or, for accounts only, ``runtime_env={"worker_process_setup_hook": "ctxalloc.ray.setup"}``. Needs Ray 2.40 or later in
the process that calls it. Where a task enters its request, and why there:
``docs/decisions/0026-a-task-enters-its-request-in-its-worker.md``; docs/clusters.md is the guide.
"""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from ctxalloc import _decorate, _whole
from ctxalloc._errors import UnknownHandlerError
from ctxalloc._native import Budget
from ctxalloc._optional import need
from ctxalloc._recording import path_of, record_once
from ctxalloc._tasks import Choice, NamedBlock, NamedSteps, ProcessReport, Suggestion, Summary
from ctxalloc._terms import Terms, TermsOf, by_name

__all__ = ["OPTIONS", "ProcessReport", "Suggestion", "Summary", "report", "runtime_env", "setup"]

OPTIONS: Final = "CTXALLOC_RAY"
"""The environment variable in which ``runtime_env`` sends the options to the workers."""

OLDEST: Final = (2, 40)
"""The oldest release of Ray that the tests run with."""

_HOOK: Final = "ctxalloc.ray.setup"
_DECLARED: Final = "memory"
_METRICS: Final = "CTXALLOC_METRICS_DIR"


def runtime_env(
    *,
    limit_bytes: int | Literal["memory"] | None = None,
    handler: str | None = None,
    strict: bool = False,
    whole: bool = False,
    functions: Mapping[str, TermsOf] | None = None,
    record: str | os.PathLike[str] | None = None,
    base: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A ``runtime_env`` for ``ray.init`` or ``.options`` whose workers run each task in a ``ctxalloc.request()``.

    A task's or an actor's own overrides the job's. (Its hook is an environment variable: Ray ignores a
    ``worker_process_setup_hook`` in ``.options``.)

    - ``limit_bytes``: the limit of each task and each call of a method. ``"memory"``: what ``memory=`` of
      ``@ray.remote`` declares, which Ray itself uses only to schedule; for an actor, it is the limit of all that its
      methods make and keep. Where nothing is declared, there is no limit.
    - ``handler``: instead of a request, the name of a handler that arrays live in; there is no account.
    - ``strict``: no overdraft, as in ``ctxalloc.request``.
    - ``whole``: native memory and Python objects too are counted and limited. Workers are then started with the library
      for it, whose file has the same path on each node, or with one that ``LD_PRELOAD`` in the ``env_vars`` of ``base``
      names (docs/whole.md). In a worker that does not have it, tasks fail with a RuntimeError that says so.
    - ``functions``: other terms by name, ``{"module.function": {"limit_bytes": n}, "Class.method": None}``. None is no
      request. What a script or a notebook defines is ``__main__.function``.
    - ``record``: a file on its own node that each worker records its tasks into, for ``ctxalloc trace`` and ``ctxalloc
      recommend``; workers of one node share the name (docs/tune.md). Where that cannot be, tasks fail with an OSError.
    - ``base``: a ``runtime_env`` to add all this to.

    A refused task fails with ``TaskBudgetExceeded``: the cause of Ray's RayTaskError, which is an instance of both. Its
    worker goes on. TypeError, ValueError: an option is not possible, or ``base`` has a hook already; a handler that
    workers do not have is an UnknownHandlerError in each task. RuntimeError: this Ray is not one that is known, or
    there is no library for ``whole`` here.
    """
    options = {
        "limit_bytes": limit_bytes,
        "handler": handler,
        "strict": strict,
        "whole": whole,
        "functions": {} if functions is None else functions,
        "record": path_of(record, "runtime_env"),
    }
    wanted = _Wanted(options)
    if not isinstance(base, Mapping | None):
        raise TypeError(f"runtime_env(base={base!r}): give a runtime_env, which is a dict, or None")
    env = dict(base or {})
    other = env.get("worker_process_setup_hook")
    if other is not None and other != _HOOK:
        raise ValueError(
            f"runtime_env(base=...): it has a worker_process_setup_hook, {other!r}; Ray takes one: call "
            "ctxalloc.ray.setup() in that, and leave this function out"
        )
    # Ray turns a job's hook into this variable, and ignores a task's; the variable it heeds of both.
    env.pop("worker_process_setup_hook", None)
    variables = {**env.get("env_vars", {}), _hook_variable(): _HOOK, OPTIONS: json.dumps(_plain(options))}
    if wanted.has_whole:
        variables[_whole.PRELOAD] = _whole.preload(variables.get(_whole.PRELOAD))
    env["env_vars"] = variables
    return env


def _hook_variable() -> str:
    """The environment variable that tells a worker of Ray its hook. RuntimeError: this Ray has none."""
    ray = need("ray", "ctxalloc.ray", "ray")
    constants = need("ray._private.ray_constants", "ctxalloc.ray", "ray")
    name: str | None = getattr(constants, "WORKER_PROCESS_SETUP_HOOK_ENV_VAR", None)
    if name is None:
        raise RuntimeError(
            f"ctxalloc.ray does not know ray {ray.__version__}: it works with {'.'.join(map(str, OLDEST))} and later, "
            "whose workers read their hook from the environment; take such a release, or give ray.init() "
            "runtime_env={'worker_process_setup_hook': 'ctxalloc.ray.setup'}"
        )
    return name


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """For JSON, which knows dicts only."""
    functions = {name: None if terms is None else dict(terms) for name, terms in options["functions"].items()}
    return {**options, "functions": functions}


class _Wanted:
    """The options, checked. TypeError, ValueError: they are not possible."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        limit = options.get("limit_bytes")
        self.is_declared = limit == _DECLARED
        if isinstance(limit, str) and not self.is_declared:
            raise ValueError(f"runtime_env(limit_bytes={limit!r}): give a number of bytes, 'memory' or None")
        terms = Terms(None if self.is_declared else limit, options.get("handler"), options.get("strict", False))
        terms = terms._replace(whole=options.get("whole", False))
        if self.is_declared and terms.handler is not None:
            raise ValueError("runtime_env(limit_bytes='memory', handler=...): a handler has nothing to limit; give one")
        self.terms = terms.checked("runtime_env")
        self.record = path_of(options.get("record"), "runtime_env")
        functions = by_name(options.get("functions", {}), "runtime_env(functions=...)")
        self.functions = {
            name: self.terms.changed(changes, f"runtime_env(functions={{{name!r}: ...}})")
            for name, changes in functions.items()
        }
        self.has_whole = any(terms is not None and terms.whole for terms in (self.terms, *self.functions.values()))
        self.own_limits = {name for name, changes in functions.items() if changes and "limit_bytes" in changes}


def setup() -> None:
    """Ray's ``worker_process_setup_hook``: runs in each worker before its first task.

    RuntimeError: this Ray is not one that is known; the workers do not start then, and Ray says why. Where the
    environment's ``CTXALLOC_RAY`` is not what ``runtime_env`` makes, the tasks fail with a ValueError or TypeError.
    """
    ray = need("ray", "ctxalloc.ray", "ray")
    internal = need("ray._private.worker", "ctxalloc.ray", "ray")
    manager: Any = getattr(getattr(internal, "global_worker", None), "function_actor_manager", None)
    numbers = tuple(int(part) for part in ray.__version__.split(".")[:2] if part.isdigit())
    if numbers < OLDEST or not hasattr(manager, "get_execution_info"):
        raise RuntimeError(
            f"ctxalloc.ray does not know ray {ray.__version__}: it works with {'.'.join(map(str, OLDEST))} and later, "
            "whose workers look functions up by get_execution_info; take such a release, or decorate the functions "
            "with @ctxalloc.request(...) below @ray.remote instead"
        )
    wanted = _recorded(_sent())
    _share_counters(internal)
    if not isinstance(getattr(manager.get_execution_info, "__self__", None), _LookUp):
        manager.get_execution_info = _LookUp(ray, manager.get_execution_info, wanted).get_execution_info


def _sent() -> "_Wanted | Exception":
    """The options in the environment; or what is wrong with them, which fails the tasks.

    A worker that did not start would not say why.
    """
    text = os.environ.get(OPTIONS) or "{}"
    try:
        options = json.loads(text)
        return _Wanted(options) if isinstance(options, dict) else TypeError(_not_ours(text, "it is no object of JSON"))
    except TypeError as error:
        return TypeError(_not_ours(text, error))
    except ValueError as error:
        return ValueError(_not_ours(text, error))


def _recorded(wanted: "_Wanted | Exception") -> "_Wanted | Exception":
    """The options, once what they ask for is recorded; or why it cannot be, which fails the tasks."""
    if isinstance(wanted, Exception) or wanted.record is None:
        return wanted
    try:
        record_once(wanted.record)
    except OSError as error:
        return error
    return wanted


def _not_ours(text: str, why: object) -> str:
    return f"{OPTIONS}={text!r} in the environment is not what ctxalloc.ray.runtime_env makes: {why}"


def _share_counters(internal: Any) -> None:
    """The workers of a node count into files in the session's own directory, and each of them reads all."""
    if not os.environ.get(_METRICS):
        folder = Path(internal._global_node.get_session_dir_path(), "ctxalloc")  # noqa: SLF001 - Ray's own modules do
        folder.mkdir(exist_ok=True)
        os.environ[_METRICS] = str(folder)


class _LookUp:
    """Takes the place of Ray's look-up of a task's function: finds the same one, made to run in a request."""

    def __init__(self, ray: Any, found: Callable[..., Any], wanted: _Wanted | Exception) -> None:
        self._ray = ray
        self._found = found
        self._wanted = wanted
        self._wrapped: dict[Any, tuple[Any, Any]] = {}
        self._of_actor: Budget | None = None

    def get_execution_info(self, job_id: Any, function_descriptor: Any) -> Any:
        """Like Ray's own."""
        info = self._found(job_id, function_descriptor)
        before = self._wrapped.get(function_descriptor.function_id)
        if before is not None and before[0] is info:
            return before[1]
        wrapped = info._replace(function=self._in_request(info, function_descriptor))
        self._wrapped[function_descriptor.function_id] = info, wrapped
        return wrapped

    def _in_request(self, info: Any, descriptor: Any) -> Any:
        function = info.function
        method = descriptor.function_name
        # In the descriptor, the module of a script is its file's name, and that of a notebook's cell is a number.
        module = getattr(function, "__module__", None) or descriptor.module_name
        name = f"{descriptor.class_name or module}.{method}"
        if method.startswith("__ray") or descriptor.module_name == __name__:
            return function  # Ray's own, and what `report` runs
        wanted = self._wanted
        if isinstance(wanted, Exception):
            return _failing(function, wanted)
        terms = wanted.functions.get(name, wanted.terms)
        if terms is None:
            return function
        is_declared = wanted.is_declared and terms.handler is None and name not in wanted.own_limits
        try:
            choice = (
                functools.partial(self._declared, terms, name) if is_declared else _always(Choice(terms, name, None))
            )
        except (UnknownHandlerError, RuntimeError) as error:
            return _failing(function, error)
        runtime = self._ray.get_runtime_context

        def key() -> object:
            return runtime().get_task_id()

        return _decorate.in_blocks(
            lambda: NamedBlock(choice().block(), key, name),
            lambda: NamedSteps(choice().block(), key, name),
            function,
            getattr(function, "method", function),
        )

    def _declared(self, terms: Terms, name: str) -> Choice:
        """The terms with what ``memory=`` declares as their limit."""
        context = self._ray.get_runtime_context()
        declared = context.get_assigned_resources().get("memory")
        limit = None if declared is None else int(declared)
        if limit is None or context.get_actor_id() is None:
            return Choice(terms._replace(limit_bytes=limit), name, None)
        if self._of_actor is None:
            self._of_actor = Budget(limit, name=f"actor {name.partition('.')[0]}")
        return Choice(terms, name, self._of_actor)


class _Fails(contextlib.AbstractContextManager[Any]):
    """A block in the place of a request that cannot be begun: entering it fails, and says why."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __enter__(self) -> Any:
        raise self._error.with_traceback(None)

    def __exit__(self, *_: object) -> None:
        """Nothing was begun."""


def _failing(function: Any, error: Exception) -> Any:
    fails = functools.partial(_Fails, error)
    return _decorate.in_blocks(fails, fails, function, getattr(function, "method", function))


def _always(choice: Choice) -> Callable[[], Choice]:
    return lambda: choice


def _read() -> ProcessReport:
    """What the workers of a node counted."""
    if not os.environ.get(_METRICS):
        raise RuntimeError(
            "this worker has no counters of ctxalloc; start Ray with runtime_env=ctxalloc.ray.runtime_env(...)"
        )
    return ProcessReport.here(None)


def report() -> Summary:
    """The counters of all nodes by name of function, those of workers that have ended included.

    It runs a small task on each node. RuntimeError: no worker counts, because Ray was started without ``runtime_env``.
    """
    ray = need("ray", "ctxalloc.ray.report()", "ray")
    strategies = need("ray.util.scheduling_strategies", "ctxalloc.ray.report()", "ray")
    read = ray.remote(_read)
    asked = [
        read.options(
            num_cpus=0,
            scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False),
        ).remote()
        for node in ray.nodes()
        if node["Alive"]
    ]
    return Summary(ray.get(asked))
