"""The counters for OpenTelemetry: observable instruments, which the SDK reads when it exports.

::

    ctxalloc.opentelemetry.instrument()

Nothing is recorded beside what Rust counts. OpenTelemetry has no observable histogram, so peaks are reported as
counters by bucket: ``ctxalloc.request.memory.peak.bucket`` with the attribute ``le`` in bytes, each with all that are
smaller, as Prometheus has them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from ctxalloc import metrics
from ctxalloc._buckets import PER_DOUBLING, buckets_of, checked
from ctxalloc._coverage import coverage
from ctxalloc._native import __version__
from ctxalloc._optional import need
from ctxalloc.prometheus import BOUNDS_BYTES, parts_of

__all__ = ["instrument"]

NAME = "ctxalloc.request.name"


def instrument(
    meter_provider: Any = None, *, bounds_bytes: Sequence[int] = BOUNDS_BYTES, per_doubling: int = PER_DOUBLING
) -> None:
    """Create the instruments, once for each provider; by default the global one.

    ``bounds_bytes`` and ``per_doubling``: the upper ends of the buckets, as ``prometheus.Collector`` has them.
    ValueError: a bound is no power of two, or ``per_doubling`` is none of 0, 1, 2, 4, 8 and 16.
    TypeError: ``meter_provider`` has no meters.
    ModuleNotFoundError: ``opentelemetry-api`` is not installed.
    """
    api: Any = need("opentelemetry.metrics", "ctxalloc.opentelemetry.instrument", "opentelemetry-api")
    bounds = checked(bounds_bytes, per_doubling)
    if meter_provider is not None and not hasattr(meter_provider, "get_meter"):
        raise TypeError(f"instrument({meter_provider!r}): give a MeterProvider, or None for the global one")
    meter = api.get_meter("ctxalloc", __version__, meter_provider)

    def by_name(field: str) -> Any:
        def read(_options: Any) -> Iterable[Any]:
            for series in metrics.snapshot().series.values():
                yield api.Observation(getattr(series, field), {NAME: series.name})

        return [read]

    def allocated(_options: Any) -> Iterable[Any]:
        for series in metrics.snapshot().series.values():
            yield api.Observation(series.total_bytes.sum, {NAME: series.name})

    def peaks(_options: Any) -> Iterable[Any]:
        for series in metrics.snapshot().series.values():
            for end, count in buckets_of(series.peak_bytes, *bounds):
                yield api.Observation(count, {NAME: series.name, "le": str(end)})
            yield api.Observation(series.peak_bytes.count, {NAME: series.name, "le": "+Inf"})

    def peak_sum(_options: Any) -> Iterable[Any]:
        for series in metrics.snapshot().series.values():
            yield api.Observation(series.peak_bytes.sum, {NAME: series.name})

    def waits(_options: Any) -> Iterable[Any]:
        for series in metrics.snapshot().series.values():
            for end, count in buckets_of(series.waited_micros, *bounds):
                yield api.Observation(count, {NAME: series.name, "le": str(end)})
            yield api.Observation(series.waited_micros.count, {NAME: series.name, "le": "+Inf"})

    def wait_sum(_options: Any) -> Iterable[Any]:
        for series in metrics.snapshot().series.values():
            yield api.Observation(series.waited_micros.sum, {NAME: series.name})

    def waiting(_options: Any) -> Iterable[Any]:
        yield api.Observation(sum(process.waiting_requests for process in metrics.snapshot().processes))

    def victims(_options: Any) -> Iterable[Any]:
        yield api.Observation(metrics.made_room().victims)

    def reclaimed(_options: Any) -> Iterable[Any]:
        yield api.Observation(metrics.made_room().reclaimed_bytes)

    def active(_options: Any) -> Iterable[Any]:
        yield api.Observation(sum(process.live_requests for process in metrics.snapshot().processes))

    def used(_options: Any) -> Iterable[Any]:
        processes = metrics.snapshot().processes
        yield api.Observation(sum(process.live_bytes for process in processes), {"ctxalloc.state": "live"})
        yield api.Observation(sum(process.escaped_bytes for process in processes), {"ctxalloc.state": "escaped"})

    def unseen(_options: Any) -> Iterable[Any]:
        yield api.Observation(coverage().unseen_bytes)

    def parts(_options: Any) -> Iterable[Any]:
        for series in metrics.snapshot().series.values():
            for part, size_bytes in parts_of(series):
                yield api.Observation(size_bytes, {NAME: series.name, "ctxalloc.part": part})

    def nobodys(_options: Any) -> Iterable[Any]:
        for thread, size_bytes in (coverage().nobodys_by_thread or {}).items():
            yield api.Observation(size_bytes, {"ctxalloc.thread": thread})

    def error(_options: Any) -> Iterable[Any]:
        yield api.Observation(coverage().error_bytes)

    counters = (
        ("request.count", by_name("requests"), "{request}", "Requests that have ended."),
        ("request.refused", by_name("refused_requests"), "{request}", "Ended requests that were refused memory."),
        ("request.refused_allocations", by_name("refused_allocations"), "{allocation}", "Refused allocations."),
        ("request.escaped", by_name("escaped_requests"), "{request}", "Ended requests that left arrays behind."),
        ("request.memory.escaped", by_name("escaped_bytes"), "By", "Bytes in arrays alive at their request's end."),
        ("request.whole", by_name("whole_requests"), "{request}", "Ended requests that counted native memory too."),
        ("request.memory.part", [parts], "By", "Parts of the peaks of requests that counted them."),
        ("request.memory.allocated", [allocated], "By", "All bytes that ended requests allocated."),
        ("request.memory.peak.bucket", [peaks], "{request}", "Ended requests with a peak of at most `le` bytes."),
        ("request.memory.peak.sum", [peak_sum], "By", "The sum of the peaks of ended requests."),
        ("request.timed_out", by_name("timed_out"), "{request}", "Requests that waited until their time was over."),
        ("request.turned_away", by_name("turned_away"), "{request}", "Requests that could not wait."),
        ("room.victims", [victims], "{request}", "Requests of this process chosen to make room for others."),
        ("room.reclaimed", [reclaimed], "By", "Bytes that came back in this process while reclaimers ran."),
        ("request.wait.bucket", [waits], "{request}", "Requests that waited for at most `le` microseconds."),
        ("request.wait.sum", [wait_sum], "us", "The sum of the waits of requests that got their reservation."),
    )
    for name, callbacks, unit, text in counters:
        meter.create_observable_counter(f"ctxalloc.{name}", callbacks, unit=unit, description=text)
    gauges = (
        ("request.active", active, "{request}", "Requests that have not ended."),
        ("request.waiting", waiting, "{request}", "Requests that wait for their reservation."),
        ("memory.used", used, "By", "Bytes in live arrays of requests, by whether they have ended."),
        ("memory.unseen", unseen, "By", "Resident bytes of this process that are in no handler."),
        ("memory.nobodys", nobodys, "By", "Native memory and objects asked for so far that no request was charged."),
        ("memory.unseen.error", error, "By", "ctxalloc.memory.unseen is too small by at most this."),
    )
    for name, callback, unit, text in gauges:
        meter.create_observable_up_down_counter(f"ctxalloc.{name}", [callback], unit=unit, description=text)
