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

import inspect
import logging
import os
import sys
from collections.abc import Mapping
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

from ctxalloc._dask import ANNOTATION, Attached, Failing
from ctxalloc._native import Budget
from ctxalloc._recording import path_of
from ctxalloc._tasks import ProcessReport, Suggestion, Summary
from ctxalloc._terms import Terms, TermsOf, by_name

__all__ = ["ANNOTATION", "ProcessReport", "RequestPlugin", "Suggestion", "Summary", "dask_setup", "report", "summary"]

OLDEST: Final = (2024, 12, 0)
"""The oldest release of ``distributed`` that the tests run with."""

NAME: Final = "ctxalloc"
"""The plugin's name on a worker: registered again, it replaces the one before."""

log = logging.getLogger("ctxalloc")


class RequestPlugin(WorkerPlugin):  # type: ignore[misc] # distributed has no types
    """Runs each task of a worker in a ``ctxalloc.request()`` of its own. For ``client.register_plugin``.

    - ``limit_bytes``: the limit of each task. Its peak counts what the task makes, its result included, and not what it
      is given.
    - ``handler``: instead of a request, the name of a handler that each task's arrays live in; there is no account.
    - ``strict``: no overdraft, as in ``ctxalloc.request``.
    - ``whole``: native memory and Python objects too are counted and limited. The workers have to be started with the
      library for it, by ``distributed.nanny.pre-spawn-environ.LD_PRELOAD`` in Dask's configuration or by the
      environment (docs/whole.md); on any other worker the plugin is an error that says so, and its tasks fail with it.
    - ``prefixes``: other terms by the prefix of the key: ``{"read_parquet": {"limit_bytes": n}, "plot": None}``. None
      is no request. ``dask.annotate(ctxalloc={...})`` overrides both.
    - ``budget``: the limit of all tasks and results of a worker together. ``"auto"``: what the worker is killed at,
      less 5 % of its memory limit, and less what else is in the process, which is measured while it runs; no budget
      where the worker has no memory limit. A number of bytes: that limit. None: no budget.

    - ``record``: a file that each worker records its tasks into, for ``ctxalloc trace`` and ``ctxalloc recommend``: on
      its own machine, until the plugin is removed. Workers of one machine share the name (docs/tune.md). None: nothing.

    What a limit refuses fails its task with ``TaskBudgetExceeded``, and Dask's ``retries`` apply; the worker and its
    other tasks go on. The frames of every failed task are cleared, so its traceback has no local variables: what they
    held would stay charged until the garbage collector comes by. TypeError, ValueError: an option is not possible. On
    the worker, RuntimeError: this ``distributed`` is older than 2024.12.0, or differs from those that are known, or a
    whole request cannot be had; OSError: it cannot be recorded there. Its tasks fail with it too, until the plugin is
    removed.
    """

    name = NAME

    def __init__(
        self,
        *,
        limit_bytes: int | None = None,
        handler: str | None = None,
        strict: bool = False,
        whole: bool = False,
        prefixes: Mapping[str, TermsOf] | None = None,
        budget: int | Literal["auto"] | None = "auto",
        record: str | os.PathLike[str] | None = None,
    ) -> None:
        self.terms = Terms(limit_bytes, handler, strict, whole).checked("RequestPlugin")
        self.prefixes = {
            prefix: self.terms.changed(terms, f"RequestPlugin(prefixes={{{prefix!r}: ...}})")
            for prefix, terms in by_name({} if prefixes is None else prefixes, "RequestPlugin(prefixes=...)").items()
        }
        if isinstance(budget, str):
            if budget != "auto":
                raise ValueError(f"RequestPlugin(budget={budget!r}): give a number of bytes, 'auto' or None")
        else:
            Budget(budget)  # which says what is wrong with it
        self.budget = budget
        self.record = path_of(record, "RequestPlugin")
        self._attached: Attached | None = None
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
            self._be_the_only_one(worker)
            self._attached = Attached(worker, self.terms, self.prefixes, self.budget, self.record)
        except Exception as error:
            # A worker that joins later only logs the error, and keeps the plugin.
            self._broken = error
            raise

    def _be_the_only_one(self, worker: Any) -> None:
        """RuntimeError: another one is attached. Whichever left first would undo what the other changed."""
        for name, other in worker.plugins.items():
            if isinstance(other, RequestPlugin) and other is not self and other.is_attached:
                raise RuntimeError(
                    f"a second RequestPlugin: this worker has one already, {name!r}; unregister that, or leave out the "
                    "name of this one, which replaces it then"
                )

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
            task.run_spec = Failing(task.run_spec, self._broken or RuntimeError(f"{self!r} is not attached"))
        else:
            self._attached.put_into_request(task)

    @property
    def is_attached(self) -> bool:
        """Whether it is attached to a worker."""
        return self._attached is not None

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


def report(dask_worker: Any = None) -> ProcessReport:
    """What a worker's process counted, for ``client.run(ctxalloc.dask.report)``.

    RuntimeError: ``CTXALLOC_METRICS_DIR`` cannot be used.
    """
    plugins = () if dask_worker is None else dask_worker.plugins.values()
    budgets = (plugin.worker_budget for plugin in plugins if isinstance(plugin, RequestPlugin))
    return ProcessReport.here(next((budget for budget in budgets if budget is not None), None))


def summary(client: Any) -> Summary:
    """The counters of the whole cluster. With an asynchronous client: ``Summary((await client.run(report)).values())``.

    TypeError: the client is asynchronous, or is not a client.
    """
    if not isinstance(client, distributed.Client):
        raise TypeError(f"summary({client!r}): give the client, distributed.Client(...)")
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
    try:
        plugin = RequestPlugin(**_configured(dask.config.get(ANNOTATION, None)))
    except Exception as error:  # whatever it is: without a plugin the tasks would have no limit
        log.exception("Dask's configuration of ctxalloc is not possible; the worker's tasks fail")
        plugin = RequestPlugin.broken(error)
    await worker.plugin_add(plugin=plugin, name=NAME)


def _configured(found: object) -> dict[str, Any]:
    """The options in Dask's configuration. TypeError: it is of another shape, or has names that are no options."""
    where = f"{ANNOTATION!r} in Dask's configuration"
    possible = list(inspect.signature(RequestPlugin).parameters)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise TypeError(f"{where}: {found!r} has no options; give a mapping like {{'limit-bytes': n}}, of {possible}")
    options = {str(key).replace("-", "_"): value for key, value in found.items()}
    unknown = sorted(set(options) - set(possible))
    if unknown:
        raise TypeError(f"{where}: {unknown} are no options; there are {possible}")
    return options
