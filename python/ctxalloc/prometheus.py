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

from ctxalloc import _exemplars, metrics
from ctxalloc._buckets import PER_DOUBLING, buckets_of, checked
from ctxalloc._coverage import Coverage, coverage
from ctxalloc._native import Budget
from ctxalloc._optional import need

__all__ = ["BOUNDS_BYTES", "Collector"]

BOUNDS_BYTES: Final = tuple(1 << power for power in range(12, 37, 4))
"""The upper ends of the buckets that each name has, by default: 4 KiB, 64 KiB, ... 64 GiB."""


class Collector:
    """What ``registry.register`` takes.

    ``bounds_bytes``: the upper ends of the histograms' buckets that each name has from its first request on, powers of
    two in increasing order. ``per_doubling``: between the first and the last of them a name has so many more in each
    doubling in which it has values (0: none, 1, 2, 4, 8 or 16); with 4 a bucket ends at most 19 % above its values.
    ``budgets``: budgets of this process whose use and limit are exported, by name; under a server that forks, those of
    the worker that is scraped. ``exemplars=True``: in OpenMetrics a bucket of the peaks names the trace of a request
    that is in it, and the refused ones that of the last; of requests of this process that end inside of a sampled span
    of OpenTelemetry. A registry refuses a second Collector. TypeError: a budget is no Budget. ValueError: a bound is no
    power of two, ``per_doubling`` is none of these, or two budgets have one name, which Prometheus could not tell
    apart. ModuleNotFoundError: ``prometheus_client`` is not installed.
    """

    def __init__(
        self,
        *,
        bounds_bytes: Sequence[int] = BOUNDS_BYTES,
        per_doubling: int = PER_DOUBLING,
        budgets: Iterable[Budget] = (),
        exemplars: bool = False,
    ) -> None:
        self._bounds = checked(bounds_bytes, per_doubling)
        self._budgets = tuple(budgets)
        for budget in self._budgets:
            if not isinstance(budget, Budget):
                raise TypeError(f"Collector(budgets=...): {budget!r} is not a ctxalloc.Budget")
        names = [budget.name for budget in self._budgets]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"budgets: two are named {name!r}; give each a name of its own: Budget(name=...)")
        if not isinstance(exemplars, bool):
            raise TypeError(f"Collector(exemplars={exemplars!r}): give True or False")
        self._exemplars = exemplars
        self._core: Any = need("prometheus_client.core", "ctxalloc.prometheus.Collector", "prometheus_client")
        if exemplars:
            _exemplars.begin()

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
            (
                "ctxalloc_requests_timed_out",
                "Requests that waited for their reservation until their time was over.",
                "timed_out",
            ),
            ("ctxalloc_requests_turned_away", "Requests that could not wait for their reservation.", "turned_away"),
            ("ctxalloc_requests_whole", "Ended requests that counted native memory and objects too.", "whole_requests"),
        )
        all_series = snapshot.series.values()
        # Who asks for neither has no samples of them: from the first one on there are those of all names.
        counts_whole = any(series.whole_requests for series in all_series)
        has_waited = any(series.waited_micros.count for series in all_series)
        for name, text, field in counters:
            family = core.CounterMetricFamily(name, text, labels=["name"])
            for series in all_series if counts_whole or field != "whole_requests" else ():
                family.add_metric([series.name], getattr(series, field))
                if field == "refused_requests" and self._exemplars and series.refused_requests:
                    family.samples[-1] = family.samples[-1]._replace(
                        exemplar=self._exemplar(_exemplars.refused(series.name), value=1)
                    )
            yield family
        parts = core.CounterMetricFamily(
            "ctxalloc_request_memory_part_bytes",
            "What of the peaks of requests that counted it was arrays, native memory and objects.",
            labels=["name", "part"],
        )
        for series in snapshot.series.values():
            for part, size_bytes in parts_of(series):
                parts.add_metric([series.name, part], size_bytes)
        yield parts
        histograms = (
            (
                "ctxalloc_request_memory_peak_bytes",
                "The most bytes that a request had alive at one time.",
                "peak_bytes",
            ),
            ("ctxalloc_request_memory_allocated_bytes", "All bytes that a request allocated.", "total_bytes"),
            (
                "ctxalloc_request_wait_microseconds",
                "How long requests waited for their reservation that got it, and not at once.",
                "waited_micros",
            ),
        )
        for name, text, field in histograms:
            family = core.HistogramMetricFamily(name, text, labels=["name"])
            for series in all_series if has_waited or field != "waited_micros" else ():
                histogram: metrics.Histogram = getattr(series, field)
                buckets: list[Any] = [(str(float(end)), count) for end, count in buckets_of(histogram, *self._bounds)]
                buckets.append(("+Inf", histogram.count))
                if field == "peak_bytes" and self._exemplars:
                    buckets = self._with_exemplars(series.name, buckets)
                family.add_metric([series.name], buckets, histogram.sum)
            yield family
        yield from self._gauges(snapshot, seen)

    def _with_exemplars(self, name: str, buckets: list[Any]) -> list[Any]:
        """The same buckets, each with an exemplar that is in it and in no smaller one, if there is any."""
        found, below = [], -1.0
        for end, count in buckets:
            exemplar = _exemplars.between(name, below, float(end))
            found.append((end, count) if exemplar is None else (end, count, self._exemplar(exemplar)))
            below = float(end)
        return found

    def _exemplar(self, found: _exemplars.Exemplar | None, value: float | None = None) -> Any:
        if found is None:
            return None
        ids = {"trace_id": found.trace_id, "span_id": found.span_id}
        return self._core.Exemplar(ids, found.value if value is None else value, found.time)

    def _gauges(self, snapshot: metrics.Snapshot, seen: Coverage | None) -> Iterable[Any]:
        core, processes = self._core, snapshot.processes
        yield core.GaugeMetricFamily(
            "ctxalloc_requests_active",
            "Requests that have not ended.",
            value=sum(process.live_requests for process in processes),
        )
        yield core.GaugeMetricFamily(
            "ctxalloc_requests_waiting",
            "Requests that wait for their reservation.",
            value=sum(process.waiting_requests for process in processes),
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
        nobodys = core.GaugeMetricFamily(
            "ctxalloc_memory_nobodys_bytes",
            "Native memory and objects that the scraped process asked for and that no request was charged, so far.",
            labels=["thread"],
        )
        for thread, size_bytes in ((seen and seen.nobodys_by_thread) or {}).items():
            nobodys.add_metric([thread], size_bytes)
        yield nobodys
        made = metrics.made_room()
        yield core.CounterMetricFamily(
            "ctxalloc_room_victims",
            "Requests of the scraped process that were chosen to make room for others.",
            value=made.victims,
        )
        yield core.CounterMetricFamily(
            "ctxalloc_room_reclaimed_bytes",
            "Bytes that came back in the scraped process while reclaimers ran.",
            value=made.reclaimed_bytes,
        )
        if self._budgets:
            in_use = core.GaugeMetricFamily(
                "ctxalloc_budget_used_bytes", "Bytes charged to a budget.", labels=["budget"]
            )
            limit = core.GaugeMetricFamily("ctxalloc_budget_limit_bytes", "The limit of a budget.", labels=["budget"])
            reserved = core.GaugeMetricFamily(
                "ctxalloc_budget_reserved_bytes", "Bytes reserved in a budget and not in use.", labels=["budget"]
            )
            waiting = core.GaugeMetricFamily(
                "ctxalloc_budget_waiting", "Requests that wait for room in a budget.", labels=["budget"]
            )
            victims = core.CounterMetricFamily(
                "ctxalloc_budget_victims", "Requests that were chosen to make room in a budget.", labels=["budget"]
            )
            reclaimed = core.CounterMetricFamily(
                "ctxalloc_budget_reclaimed_bytes",
                "Bytes that came back to a budget while reclaimers ran.",
                labels=["budget"],
            )
            for budget in self._budgets:
                victims.add_metric([budget.name], budget.victims)
                reclaimed.add_metric([budget.name], budget.reclaimed_bytes)
                reserved.add_metric([budget.name], budget.reserved_bytes)
                waiting.add_metric([budget.name], budget.waiting)
                in_use.add_metric([budget.name], budget.in_use_bytes)
                if budget.limit_bytes is not None:
                    limit.add_metric([budget.name], budget.limit_bytes)
            yield in_use
            yield reserved
            yield waiting
            yield limit
            yield victims
            yield reclaimed


def parts_of(series: metrics.Series) -> Sequence[tuple[str, int]]:
    """The parts of the peaks of whole requests, if there were any."""
    if not series.whole_requests:
        return ()
    return (
        ("arrays", series.whole_array_bytes),
        ("native", series.whole_native_bytes),
        ("objects", series.whole_object_bytes),
    )
