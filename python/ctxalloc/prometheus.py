"""The counters for Prometheus: a collector for ``prometheus_client``, right under servers that fork too.

::

    from prometheus_client import REGISTRY
    REGISTRY.register(ctxalloc.prometheus.Collector())

Nothing is recorded beside what Rust counts: ``collect`` reads it when somebody scrapes. With ``CTXALLOC_METRICS_DIR``
whichever worker is scraped tells of all of them, also in a registry of its own beside
``prometheus_client.multiprocess.MultiProcessCollector``, which ignores custom collectors.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from ctxalloc import metrics
from ctxalloc._coverage import Coverage, coverage
from ctxalloc._native import Budget
from ctxalloc._optional import need

__all__ = ["BOUNDS_BYTES", "Collector"]

BOUNDS_BYTES: Final = tuple(1 << power for power in range(12, 37, 2))
"""The upper ends of the buckets by default: 4 KiB, 16 KiB, ... 64 GiB."""
_MAX_BOUND: Final = 1 << 48


class Collector:
    """What ``registry.register`` takes.

    ``bounds_bytes``: the upper ends of the histograms' buckets, powers of two in increasing order. ``budgets``: budgets
    of this process whose use and limit are exported, by name; under a server that forks, those of the worker that is
    scraped. A registry refuses a second Collector. TypeError: a budget is no Budget. ValueError: a bound is no power of
    two, or two budgets have one name, which Prometheus could not tell apart. ModuleNotFoundError: ``prometheus_client``
    is not installed.
    """

    def __init__(self, *, bounds_bytes: Sequence[int] = BOUNDS_BYTES, budgets: Iterable[Budget] = ()) -> None:
        self._bounds = checked(bounds_bytes)
        self._budgets = tuple(budgets)
        for budget in self._budgets:
            if not isinstance(budget, Budget):
                raise TypeError(f"Collector(budgets=...): {budget!r} is not a ctxalloc.Budget")
        names = [budget.name for budget in self._budgets]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"budgets: two are named {name!r}; give each a name of its own: Budget(name=...)")
        self._core: Any = need("prometheus_client.core", "ctxalloc.prometheus.Collector", "prometheus_client")

    def describe(self) -> Iterable[Any]:
        """The names, so that a registry refuses what is there already; the counters are not read."""
        return self._families(metrics.Snapshot({}, []), None)

    def collect(self) -> Iterable[Any]:
        """The metrics now. RuntimeError: ``CTXALLOC_METRICS_DIR`` cannot be used."""
        return self._families(metrics.snapshot(), coverage())

    def _families(self, snapshot: metrics.Snapshot, seen: Coverage | None) -> Iterable[Any]:
        core = self._core
        counters = (
            ("ctxalloc_requests", "Requests that have ended.", "requests"),
            ("ctxalloc_requests_refused", "Ended requests that were refused memory at least once.", "refused_requests"),
            ("ctxalloc_allocations_refused", "Allocations that a limit refused.", "refused_allocations"),
            ("ctxalloc_requests_escaped", "Ended requests that left arrays behind.", "escaped_requests"),
            ("ctxalloc_escaped_bytes", "Bytes in arrays that were alive when their request ended.", "escaped_bytes"),
        )
        for name, text, field in counters:
            family = core.CounterMetricFamily(name, text, labels=["name"])
            for series in snapshot.series.values():
                family.add_metric([series.name], getattr(series, field))
            yield family
        histograms = (
            (
                "ctxalloc_request_memory_peak_bytes",
                "The most bytes that a request had alive at one time.",
                "peak_bytes",
            ),
            ("ctxalloc_request_memory_allocated_bytes", "All bytes that a request allocated.", "total_bytes"),
        )
        for name, text, field in histograms:
            family = core.HistogramMetricFamily(name, text, labels=["name"])
            for series in snapshot.series.values():
                histogram: metrics.Histogram = getattr(series, field)
                buckets = buckets_of(histogram, self._bounds)
                family.add_metric([series.name], [*buckets, ("+Inf", histogram.count)], histogram.sum)
            yield family
        yield from self._gauges(snapshot, seen)

    def _gauges(self, snapshot: metrics.Snapshot, seen: Coverage | None) -> Iterable[Any]:
        core, processes = self._core, snapshot.processes
        yield core.GaugeMetricFamily(
            "ctxalloc_requests_active",
            "Requests that have not ended.",
            value=sum(process.live_requests for process in processes),
        )
        used = core.GaugeMetricFamily(
            "ctxalloc_memory_used_bytes",
            "Bytes in live arrays of requests, by whether they have ended.",
            labels=["state"],
        )
        used.add_metric(["live"], sum(process.live_bytes for process in processes))
        used.add_metric(["escaped"], sum(process.escaped_bytes for process in processes))
        yield used
        yield core.GaugeMetricFamily("ctxalloc_processes", "Processes that count.", value=len(processes))
        yield core.GaugeMetricFamily(
            "ctxalloc_memory_unseen_bytes",
            "Resident bytes of the scraped process that are in no handler.",
            value=None if seen is None else seen.unseen_bytes,
        )
        yield core.GaugeMetricFamily(
            "ctxalloc_memory_unseen_error_bytes",
            "ctxalloc_memory_unseen_bytes is too small by at most this.",
            value=None if seen is None else seen.error_bytes,
        )
        if self._budgets:
            in_use = core.GaugeMetricFamily(
                "ctxalloc_budget_used_bytes", "Bytes charged to a budget.", labels=["budget"]
            )
            limit = core.GaugeMetricFamily("ctxalloc_budget_limit_bytes", "The limit of a budget.", labels=["budget"])
            for budget in self._budgets:
                in_use.add_metric([budget.name], budget.in_use_bytes)
                if budget.limit_bytes is not None:
                    limit.add_metric([budget.name], budget.limit_bytes)
            yield in_use
            yield limit


def buckets_of(histogram: metrics.Histogram, bounds_bytes: Sequence[int]) -> list[tuple[str, int]]:
    """Prometheus' buckets, each with all that are smaller. Those below the smallest value are left out.

    What is not there counts as zero in a sum, so sums over names and instances stay right; a bucket above the largest
    value could not be left out.
    """
    counts = ((bound, histogram.at_most(bound)) for bound in bounds_bytes)
    return [(str(float(bound)), count) for bound, count in counts if count]


def checked(bounds_bytes: Sequence[int]) -> list[int]:
    """Increasing powers of two, which are ends of our own buckets. ValueError: one is none."""
    bounds: list[int] = []
    for bound in bounds_bytes:
        if bound < 1 or bound.bit_count() > 1 or bound > _MAX_BOUND or (bounds and bound <= bounds[-1]):
            raise ValueError(
                f"bounds_bytes: {bound!r} is not possible; give powers of two in increasing order, up to 2**48"
            )
        bounds.append(bound)
    return bounds
