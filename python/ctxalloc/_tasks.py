"""What the adapters to clusters share: the terms of a task's request, its refusal with the task's name, sums.

``Terms`` (``_terms``) say what a task gets, ``Choice`` is terms made ready for the tasks of one prefix. Each process
counts by name, in Rust; ``Summary`` adds the counters of all up. Used by ``dask``, ``ray`` and ``celery``; the reasons
are in ``docs/decisions/0026-a-task-enters-its-request-in-its-worker.md``.
"""

import collections
import functools
import html
import io
import math
import os
import socket
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Final, NamedTuple

from ctxalloc import metrics
from ctxalloc._coverage import coverage
from ctxalloc._errors import BudgetExceeded, TaskBudgetExceeded
from ctxalloc._frames import clear_frames
from ctxalloc._native import Budget, Handler, Request, Scope, handler, use
from ctxalloc._terms import Terms
from ctxalloc._text import size_text, table
from ctxalloc._units import MiB

_HEADS: Final = ("prefix", "ended", "refused", "largest peak", "95 % within", "allocated", "left alive")


class Choice:
    """Terms made ready: ``block()`` is a block that one task runs in."""

    __slots__ = ("block", "terms")
    block: Callable[[], Request | Scope]

    def __init__(self, terms: Terms, name: str, budget: Budget | None) -> None:
        """UnknownHandlerError, RuntimeError: this process does not have the handler, or whole requests."""
        self.terms = terms
        if terms.handler is not None:
            self.block = functools.partial(use, handler(terms.handler))
        else:
            template = terms.request(name=name or None, budget=budget)
            self.block = template._again  # noqa: SLF001 - made for this


def named(refused: BudgetExceeded, key: object, prefix: str) -> TaskBudgetExceeded:
    """A refusal that names its task. The task's frames are cleared."""
    clear_frames(refused)
    if isinstance(refused, TaskBudgetExceeded):  # of another task, whose result this one asked for
        return refused
    error = TaskBudgetExceeded(
        refused.budget, refused.limit_bytes, refused.in_use_bytes, refused.requested_bytes, key, prefix
    )
    error.held_bytes, error.budget_id, error.of_request = refused.held_bytes, refused.budget_id, refused.of_request
    error.guaranteed_bytes = refused.guaranteed_bytes
    # The cause does not go through pickle; its traceback does, and says where in the task it was.
    return error.with_traceback((refused.__cause__ or refused).__traceback__)


class NamedBlock:
    """The block of a task whose function is wrapped. A refusal that leaves it names the task."""

    __slots__ = ("_block", "_key", "_prefix")

    def __init__(self, block: Request | Scope, key: Callable[[], object], prefix: str) -> None:
        self._block = block
        self._key = key
        self._prefix = prefix

    def __enter__(self) -> object:
        return self._block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        try:
            self._block.__exit__(kind, error, traceback)
        except BudgetExceeded as refused:
            raise named(refused, self._key(), self._prefix) from refused.__cause__
        self._name(error)

    def _name(self, error: BaseException | None) -> None:
        """Name a refusal that a request inside of the task's has raised."""
        if isinstance(error, BudgetExceeded) and not isinstance(error, TaskBudgetExceeded):
            raise named(error, self._key(), self._prefix) from error.__cause__


class NamedSteps(NamedBlock):
    """The same for a generator, whose steps select the handler themselves."""

    __slots__ = ()

    def __enter__(self) -> Handler:
        if isinstance(self._block, Request):
            return self._block._begin()  # noqa: SLF001 - made for this, here and below
        return self._block.handler

    def tell(self) -> None:
        """See ``_decorate._Steps``."""
        if isinstance(self._block, Request):
            self._block._tell()  # noqa: SLF001

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        if isinstance(self._block, Request):
            try:
                self._block._end(error)  # noqa: SLF001
            except BudgetExceeded as refused:
                raise named(refused, self._key(), self._prefix) from refused.__cause__
        self._name(error)


class BudgetNumbers(NamedTuple):
    """The budget of a worker, at one moment."""

    limit_bytes: int | None
    """Its limit."""
    in_use_bytes: int
    """What is charged to it: tasks that run, and results that are kept."""
    peak_bytes: int
    """The largest ``in_use_bytes`` so far."""
    refused: int
    """How many charges it refused."""


class ProcessReport(NamedTuple):
    """What one process of a cluster counted, as plain data."""

    host: str
    """The machine."""
    pid: int
    """Its number there."""
    resident_bytes: int
    """Its resident memory."""
    warm_bytes: int
    """Of that, free pages that pools keep."""
    budget: BudgetNumbers | None
    """The worker's budget; None where it has none."""
    series: dict[str, metrics.Series]
    """The counters of its ended requests by name, which is the task's prefix."""

    @classmethod
    def here(cls, budget: Budget | None) -> "ProcessReport":
        """This process's. RuntimeError: ``CTXALLOC_METRICS_DIR`` cannot be used."""
        seen = coverage()
        numbers = None
        if budget is not None:
            numbers = BudgetNumbers(budget.limit_bytes, budget.in_use_bytes, budget.peak_bytes, budget.refused)
        series = metrics.snapshot().series
        return cls(socket.gethostname(), os.getpid(), seen.resident_bytes, seen.pools_warm_bytes, numbers, series)


class Suggestion(NamedTuple):
    """What to declare for the tasks of one prefix."""

    limit_bytes: int
    """A limit."""
    resources: dict[str, int]
    """For ``dask.annotate(resources=...)``, where workers were started with ``--resources "memory=..."``."""


class Summary:
    """The counters of a whole cluster by prefix. ``print`` shows a table; a notebook, a table with a picture.

    ``series``: the counters by prefix, of all processes together. ``processes``: the reports they come from.
    """

    def __init__(self, reports: Iterable[ProcessReport]) -> None:
        # Workers in one process count together, and each reports it.
        self.processes = list({(report.host, report.pid): report for report in reports}.values())
        self.series: dict[str, metrics.Series] = {}
        for report in self.processes:
            for name, series in report.series.items():
                before = self.series.get(name)
                self.series[name] = series if before is None else _sum(before, series)

    def rows(self) -> list[metrics.Series]:
        """The prefixes, the one with the largest peak first."""
        return sorted(self.series.values(), key=lambda series: series.max_peak_bytes, reverse=True)

    def suggest(self, *, headroom: float = 1.5) -> dict[str, Suggestion]:
        """For each prefix its largest peak times ``headroom``, rounded up to whole MiB, as a limit and as a resource.

        Tasks that were refused did not reach their peak, so prefixes with refusals are left out. TypeError,
        ValueError: ``headroom`` is no number, or less than 1.
        """
        if not isinstance(headroom, int | float):
            raise TypeError(f"suggest(headroom={headroom!r}): give a number like 1.5")
        if not math.isfinite(headroom):
            raise ValueError(f"suggest(headroom={headroom!r}): no limit is that large; give a number like 1.5")
        if headroom < 1:
            raise ValueError(f"suggest(headroom={headroom!r}): a limit below the peaks would refuse; give 1 or more")
        found = {}
        for series in self.rows():
            if not series.refused_requests:
                peak = int(-(-series.max_peak_bytes * headroom // MiB)) * MiB
                found[series.name] = Suggestion(max(peak, MiB), {"memory": max(peak, MiB)})
        return found

    def __str__(self) -> str:
        out = io.StringIO()
        table("tasks, by prefix", _HEADS, [_cells(series) for series in self.rows()], out)
        heads = ("processes", "resident", "kept warm", "charged", "at the peak", "limit", "refused")
        table("processes", heads, [_of_process(report) for report in self.processes], out)
        return out.getvalue().strip("\n")

    def __repr__(self) -> str:
        return f"<ctxalloc.Summary: {len(self.series)} prefixes, {len(self.processes)} processes>"

    def _repr_html_(self) -> str:
        largest = max((series.max_peak_bytes for series in self.series.values()), default=0) or 1
        rows = ["<tr>" + "".join(f"<th>{text}</th>" for text in (*_HEADS, "")) + "</tr>"]
        for series in self.rows():
            share = 100 * series.max_peak_bytes / largest
            colour = "#c0392b" if series.refused_requests else "#2980b9"
            bar = f'<div style="width:{share:.1f}%;min-width:1px;height:0.8em;background:{colour}"></div>'
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(series))
            rows.append(f'<tr>{cells}<td style="width:16em">{bar}</td></tr>')
        return f"<table>{''.join(rows)}</table>"


def _sum(one: metrics.Series, other: metrics.Series) -> metrics.Series:
    return metrics.Series(
        name=one.name,
        requests=one.requests + other.requests,
        refused_requests=one.refused_requests + other.refused_requests,
        refused_allocations=one.refused_allocations + other.refused_allocations,
        escaped_requests=one.escaped_requests + other.escaped_requests,
        escaped_blocks=one.escaped_blocks + other.escaped_blocks,
        escaped_bytes=one.escaped_bytes + other.escaped_bytes,
        max_peak_bytes=max(one.max_peak_bytes, other.max_peak_bytes),
        peak_bytes=_together(one.peak_bytes, other.peak_bytes),
        refused_peak_bytes=_together(one.refused_peak_bytes, other.refused_peak_bytes),
        total_bytes=_together(one.total_bytes, other.total_bytes),
        waited_micros=_together(one.waited_micros, other.waited_micros),
        timed_out=one.timed_out + other.timed_out,
        turned_away=one.turned_away + other.turned_away,
        whole_requests=one.whole_requests + other.whole_requests,
        whole_array_bytes=one.whole_array_bytes + other.whole_array_bytes,
        whole_native_bytes=one.whole_native_bytes + other.whole_native_bytes,
        whole_object_bytes=one.whole_object_bytes + other.whole_object_bytes,
    )


def _together(one: metrics.Histogram, other: metrics.Histogram) -> metrics.Histogram:
    counts = collections.Counter(dict(one.buckets))
    counts.update(dict(other.buckets))
    return metrics.Histogram(tuple(sorted(counts.items())), one.sum + other.sum)


def _cells(series: metrics.Series) -> tuple[str, ...]:
    return (
        series.name,
        str(series.requests),
        str(series.refused_requests),
        size_text(series.max_peak_bytes),
        size_text(min(series.peak_bytes.quantile(0.95), series.max_peak_bytes)),
        size_text(series.total_bytes.sum),
        size_text(series.escaped_bytes),
    )


def _of_process(report: ProcessReport) -> tuple[str, ...]:
    memory = (f"{report.host}:{report.pid}", size_text(report.resident_bytes), size_text(report.warm_bytes))
    budget = report.budget
    if budget is None:
        return (*memory, "", "", "", "")
    limit = "none" if budget.limit_bytes is None else size_text(budget.limit_bytes)
    return (*memory, size_text(budget.in_use_bytes), size_text(budget.peak_bytes), limit, str(budget.refused))
