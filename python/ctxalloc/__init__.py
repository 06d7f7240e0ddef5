"""Which allocator serves this piece of work?

ctxalloc selects NumPy's data allocator (NEP 49) for a thread, an asyncio task or one request, by the rules of
``contextvars``, and carries the selection into Rust code and back::

    >>> with ctxalloc.use("aligned64"):
    ...     array = numpy.ones(1000)
    >>> ctxalloc.handler_of(array)
    <ctxalloc.Handler "aligned64": Aligned(align=64), version 1>

An array stays with the handler that made it, wherever it goes and however long it lives.

- select: ``use`` for a block or a function, ``set_handler`` and ``reset`` anywhere else
- serve: ``asgi``, ``wsgi``, ``ctxalloc.django``, ``ctxalloc.fastapi``: an account and limits for each request of a
  service; ``problems`` for answers to refusals; ``ThreadPoolExecutor`` and ``wrap`` for threads, ``detached`` to opt
  out
- clusters: ``ctxalloc.dask``, ``ctxalloc.ray``, ``ctxalloc.celery``: an account and limits for each task;
  ``process_initializer`` for pools of processes; docs/clusters.md
- request: ``request`` for work with memory, numbers and a limit of its own; ``current_request``; ``Budget`` for limits
  of several requests together; ``ready`` for readiness probes
- ask: ``current``, ``handler_of``, ``handler``, ``handlers``, ``shared_memory_of``, and NumPy's ``get_handler_name``,
  ``get_handler_version``
- make: ``register`` with one of ``strategies``, ``adopt`` for what foreign C code offers
- watch: ``tracking``, with ``strategies.Tracked``; ``set_event_hook``; ``tracemalloc``, with ``tracemalloc_domain``
- see: ``metrics``, counters by name of route, for ``ctxalloc.prometheus`` and ``ctxalloc.opentelemetry``; ``coverage``,
  what no handler has; ``python -m ctxalloc run --report``; docs/observe.md
- tune: ``record``, what requests ask of memory, for ``ctxalloc trace``; docs/tune.md
- set: ``configure`` for how much pools keep and how long, ``trim`` to give it back now; in the environment
  ``CTXALLOC_HANDLER``, ``CTXALLOC_PROFILE_SIGNAL``, ``CTXALLOC_RECORD``, ``CTXALLOC_DECAY_SECONDS``,
  ``CTXALLOC_WARM_BYTES``
- extend in C: ``get_include``

For pytest, whose plugin comes with the package, and which may be run by ``ctxalloc run``: PYTEST_DONT_REWRITE.
"""

# _own_path comes before any import. In a subinterpreter _main_interpreter raises, and nothing else is imported.
from ctxalloc import _own_path, _main_interpreter  # noqa: F401, I001

import typing as _typing

from ctxalloc import _environment, _first_use
from ctxalloc._errors import (
    BudgetExceeded,
    NoRoom,
    RegistrationError,
    RequestEnded,
    RouteWarning,
    RustPanic,
    TaskBudgetExceeded,
    UnknownHandlerError,
)
from ctxalloc._native import (
    _C_API,  # noqa: F401 - what ctxalloc_import() of ctxalloc.h finds
    Budget,
    Escaped,
    Handler,
    Reclaimer,
    Recorder,
    Request,
    RequestMetrics,
    Scope,
    Stats,
    Token,
    WholeStats,
    __version__,
    adopt,
    configure,
    current,
    current_request,
    get_handler_name,
    get_handler_version,
    handler,
    handler_of,
    handlers,
    ready,
    record,
    register,
    request,
    request_metrics,
    reset,
    set_event_hook,
    set_handler,
    tracemalloc_domain,
    trim,
    use,
)
from ctxalloc._units import GiB, KiB, MiB

if _typing.TYPE_CHECKING:
    from ctxalloc import asgi, cuda, metrics, opentelemetry, problems, prometheus, strategies, tracking, usm, wsgi
    from ctxalloc._coverage import Coverage, coverage
    from ctxalloc._executors import ThreadPoolExecutor, wrap
    from ctxalloc._include import get_include
    from ctxalloc._on_signal import profile_on_signal
    from ctxalloc._processes import process_initializer
    from ctxalloc._serving import detached
    from ctxalloc._shared import SharedBlock, shared_memory_of

__all__ = [
    "Budget",
    "BudgetExceeded",
    "Coverage",
    "Escaped",
    "GiB",
    "Handler",
    "KiB",
    "MiB",
    "NoRoom",
    "Reclaimer",
    "Recorder",
    "RegistrationError",
    "Request",
    "RequestEnded",
    "RequestMetrics",
    "RouteWarning",
    "RustPanic",
    "Scope",
    "SharedBlock",
    "Stats",
    "TaskBudgetExceeded",
    "ThreadPoolExecutor",
    "Token",
    "UnknownHandlerError",
    "WholeStats",
    "__version__",
    "adopt",
    "asgi",
    "configure",
    "coverage",
    "cuda",
    "current",
    "current_request",
    "detached",
    "get_handler_name",
    "get_handler_version",
    "get_include",
    "handler",
    "handler_of",
    "handlers",
    "load_ipython_extension",
    "metrics",
    "opentelemetry",
    "problems",
    "process_initializer",
    "profile_on_signal",
    "prometheus",
    "ready",
    "record",
    "register",
    "request",
    "request_metrics",
    "reset",
    "set_event_hook",
    "set_handler",
    "shared_memory_of",
    "strategies",
    "tracemalloc_domain",
    "tracking",
    "trim",
    "unload_ipython_extension",
    "use",
    "usm",
    "wrap",
    "wsgi",
]

# Imported when first used: most programs use few of them, and the import of ctxalloc is to cost little beside NumPy's.
_MODULES = frozenset(
    {"asgi", "cuda", "metrics", "opentelemetry", "problems", "prometheus", "strategies", "tracking", "usm", "wsgi"}
)
# The same for what is in a module: its name, and the module's.
_MEMBERS = {
    "Coverage": "_coverage",
    "SharedBlock": "_shared",
    "ThreadPoolExecutor": "_executors",
    "coverage": "_coverage",
    "detached": "_serving",
    "get_include": "_include",
    "process_initializer": "_processes",
    "profile_on_signal": "_on_signal",
    "shared_memory_of": "_shared",
    "wrap": "_executors",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return _first_use.imported(name)
    if name not in _MEMBERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(_first_use.imported(_MEMBERS[name]), name)
    return found


def load_ipython_extension(shell: object) -> None:
    """``%load_ext ctxalloc``: the magic ``%%ctxalloc`` runs a cell and reports its arrays."""
    from ctxalloc import _ipython  # noqa: PLC0415 - for IPython only

    _ipython.load(shell)


def unload_ipython_extension(shell: object) -> None:
    """``%unload_ext ctxalloc``."""
    from ctxalloc import _ipython  # noqa: PLC0415 - as above

    _ipython.unload(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_MEMBERS})


_environment.select()
_environment.listen()
_environment.record()
_environment.count_the_whole()
