"""Memory, an account and a limit for each task of Celery.

::

    @app.task(base=ctxalloc.celery.RequestTask, limit_bytes=64 * ctxalloc.MiB)
    def thumbnail(path): ...

Needs Celery (it is imported here and nowhere else). Neighbours: ``dask`` and ``ray``; docs/clusters.md is the guide.
"""

import sys
from typing import Any

try:
    from celery import Task
except ImportError:
    raise ImportError("ctxalloc.celery needs Celery, and its import fails: pip install celery") from sys.exception()

from ctxalloc._errors import BudgetExceeded, TaskBudgetExceeded
from ctxalloc._native import Budget, request
from ctxalloc._tasks import named

__all__ = ["RequestTask", "RunRefused"]


class RunRefused(RuntimeError):  # noqa: N818 - says what happened, like ctxalloc.BudgetExceeded
    """A budget had no room for an allocation of a task's run.

    It is no MemoryError, for which Celery ends the worker. The attributes are those of ``ctxalloc.TaskBudgetExceeded``,
    which is its ``__cause__`` in the worker: ``key`` is the run's id, ``prefix`` the task's name.
    """

    def __init__(  # noqa: PLR0917 - Celery makes it anew from its `args`
        self, budget: str, limit_bytes: int, in_use_bytes: int, requested_bytes: int, key: str, prefix: str
    ) -> None:
        super().__init__(budget, limit_bytes, in_use_bytes, requested_bytes, key, prefix)
        self.budget = budget
        self.limit_bytes = limit_bytes
        self.in_use_bytes = in_use_bytes
        self.requested_bytes = requested_bytes
        self.key = key
        self.prefix = prefix

    def __str__(self) -> str:
        return str(TaskBudgetExceeded(*self.args))


class RequestTask(Task):  # type: ignore[misc] # Celery has no types
    """A base for tasks whose every run is a ``ctxalloc.request()``, named after the task.

    Its options are those of the task: ``limit_bytes`` and ``strict`` as in ``ctxalloc.request``, ``budget`` a Budget of
    the worker's process that the task is charged to. What a limit refuses fails the run with ``RunRefused``;
    ``autoretry_for`` and ``retry`` apply, and the worker goes on.
    """

    abstract = True
    limit_bytes: int | None = None
    strict = False
    budget: Budget | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One run, in a request. TypeError, ValueError: an option is not possible."""
        block = request(
            limit_bytes=self.limit_bytes, strict=self.strict, budget=self.budget, name=self.name or None, root=True
        )
        try:
            with block:
                return super().__call__(*args, **kwargs)
        except BudgetExceeded as refused:
            error = named(refused, self.request.id, self.name)
            raise RunRefused(*error.args) from error
