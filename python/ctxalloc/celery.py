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

from ctxalloc._errors import BudgetExceeded
from ctxalloc._native import Budget, request
from ctxalloc._tasks import named

__all__ = ["RequestTask"]


class RequestTask(Task):  # type: ignore[misc] # Celery has no types
    """A base for tasks whose every run is a ``ctxalloc.request()``, named after the task.

    Its options are those of the task: ``limit_bytes`` and ``strict`` as in ``ctxalloc.request``, ``budget`` a Budget of
    the worker's process that the task is charged to. What a limit refuses fails the run with ``TaskBudgetExceeded``,
    whose ``key`` is the run's id and whose ``prefix`` is the task's name; ``autoretry_for`` and ``retry`` apply.
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
            raise named(refused, self.request.id, self.name) from refused.__cause__
