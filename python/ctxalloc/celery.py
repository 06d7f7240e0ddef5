"""Memory, an account and a limit for each task of Celery.

::

    @app.task(base=ctxalloc.celery.RequestTask, limit_bytes=64 * ctxalloc.MiB)
    def thumbnail(path): ...

Needs Celery (it is imported here and nowhere else). Neighbours: ``dask`` and ``ray``; docs/clusters.md is the guide.
"""

import functools
import os
import sys
from typing import Any

try:
    from celery import Task
except ImportError:
    raise ImportError("ctxalloc.celery needs Celery, and its import fails: pip install celery") from sys.exception()

from ctxalloc._errors import BudgetExceeded, TaskBudgetExceeded
from ctxalloc._native import Budget, request
from ctxalloc._recording import path_of, record_once
from ctxalloc._tasks import named

__all__ = ["RequestTask", "RunRefused"]


class RunRefused(RuntimeError):  # noqa: N818 - says what happened, like ctxalloc.BudgetExceeded
    """A budget had no room for an allocation of a task's run.

    It is no MemoryError, for which Celery ends the worker. The attributes are those of ``ctxalloc.TaskBudgetExceeded``,
    which is its ``__cause__`` in the worker: ``key`` is the run's id, or the task's name where it was called directly;
    ``prefix``, the task's name. Only what it is made with travels to the client, which is all but ``budget_id``.
    """

    budget: str
    limit_bytes: int
    in_use_bytes: int
    requested_bytes: int
    key: object
    prefix: str
    held_bytes: int
    of_request: bool
    guaranteed_bytes: int
    budget_id: int | None

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)  # Celery makes it anew from its `args`
        self.__dict__.update(vars(self._refusal()))

    @classmethod
    def of(cls, refusal: TaskBudgetExceeded) -> "RunRefused":
        """The same refusal, as no MemoryError."""
        made = cls(*refusal.args, refusal.held_bytes, refusal.of_request, refusal.guaranteed_bytes)
        made.budget_id = refusal.budget_id
        return made

    def _refusal(self) -> TaskBudgetExceeded:
        budget, limit_bytes, in_use_bytes, requested_bytes, key, prefix, *more = self.args
        refusal = TaskBudgetExceeded(budget, limit_bytes, in_use_bytes, requested_bytes, key, prefix)
        refusal.held_bytes, refusal.of_request, refusal.guaranteed_bytes = (*more, 0, False, 0)[:3]
        return refusal

    @property
    def never_fits(self) -> bool:
        """Whether the budget could not give as much even if the run were the only one that it is charged with."""
        return self._refusal().never_fits

    def __str__(self) -> str:
        return str(self._refusal())


class RequestTask(Task):  # type: ignore[misc] # Celery has no types
    """A base for tasks whose every run is a ``ctxalloc.request()``, named after the task.

    Its options are those of the task: ``limit_bytes``, ``strict`` and ``whole`` as in ``ctxalloc.request``, ``budget``
    a Budget of the worker's process that the task is charged to. What a limit refuses fails the run with
    ``RunRefused``; ``autoretry_for=(RunRefused,)`` and ``retry`` apply, and the worker goes on. TypeError, ValueError,
    from a run: an option is not possible. RuntimeError, from a run: it is to be ``whole``, and its worker was not
    started with the library for that (docs/whole.md). ``record``: a file that the worker's processes record all their
    requests into from the task's first run on, for ``ctxalloc trace`` and ``ctxalloc recommend`` (docs/tune.md).
    OSError, from a run: it cannot be recorded there, or another task has another file.
    """

    abstract = True
    limit_bytes: int | None = None
    strict = False
    whole = False
    budget: Budget | None = None
    record: str | os.PathLike[str] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make its ``run`` a request: Celery wraps that for ``autoretry_for``, which has to see what is refused."""
        super().__init_subclass__(**kwargs)
        run = cls.__dict__.get("run")
        if run is not None:
            cls.run = _in_request(run)


def _in_request(run: Any) -> Any:
    is_bound = not isinstance(run, staticmethod)
    function = run if is_bound else run.__func__

    @functools.wraps(function)
    def in_request(self: RequestTask, /, *args: Any, **kwargs: Any) -> Any:
        if (path := path_of(self.record, "RequestTask")) is not None:
            record_once(path)
        block = request(
            limit_bytes=self.limit_bytes,
            strict=self.strict,
            whole=self.whole,
            budget=self.budget,
            name=self.name or None,
            root=True,
        )
        try:
            with block:
                return function(self, *args, **kwargs) if is_bound else function(*args, **kwargs)
        except BudgetExceeded as refused:
            error = named(refused, self.request.id or self.name, self.name)
            raise RunRefused.of(error) from error

    if not is_bound:
        del in_request.__wrapped__  # whose signature has no `self`
    return in_request
