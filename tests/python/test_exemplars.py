"""Exemplars: a bucket of the peaks names the trace of a request that is in it."""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from asgi_calls import answer, call, http

import ctxalloc
from ctxalloc import _exemplars, _native, request
from ctxalloc.asgi import AllocatorMiddleware
from ctxalloc.prometheus import Collector

pytestmark = pytest.mark.any_numpy

client = pytest.importorskip("prometheus_client")
trace = pytest.importorskip("opentelemetry.trace")
sdk = pytest.importorskip("opentelemetry.sdk.trace")
openmetrics = pytest.importorskip("prometheus_client.openmetrics.exposition")
parser = pytest.importorskip("prometheus_client.openmetrics.parser")


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_exemplars, "_KNOWN", {})
    monkeypatch.setattr(_exemplars, "_AGE_S", 0)
    yield
    _native._note_ends(False)


@pytest.fixture
def tracer() -> Any:
    return sdk.TracerProvider().get_tracer("test")


def scraped(collector: Collector) -> dict[str, list[Any]]:
    registry = client.CollectorRegistry()
    registry.register(collector)
    text = openmetrics.generate_latest(registry).decode()
    # The parser refuses what is no OpenMetrics: exemplars out of place, too long, without a time.
    families = parser.text_string_to_metric_families(text)
    return {family.name: family.samples for family in families}


def of(samples: list[Any], name: str) -> dict[str, Any]:
    return {
        sample.labels.get("le", ""): sample.exemplar
        for sample in samples
        if sample.labels.get("name") == name and sample.exemplar is not None
    }


@pytest.mark.parametrize("per_doubling", [0, 1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_random_peaks_are_never_in_a_wrong_bucket(
    tracer: Any, monkeypatch: pytest.MonkeyPatch, seed: int, per_doubling: int
) -> None:
    chance, name = random.Random(seed), "random peaks"
    monkeypatch.setattr(_exemplars, "_KNOWN", type(_exemplars._KNOWN)())  # nothing of the same name's other tests
    bounds = sorted(chance.sample([1 << power for power in range(1, 22)], 6))
    collector = Collector(bounds_bytes=bounds, per_doubling=per_doubling, exemplars=True)
    peaks = dict[str, int]()  # in the order of their ends
    for _ in range(40):
        power = chance.randrange(1, 22)
        size = max(1, round(2 ** (power + chance.choice([0, 0.5]))) + chance.choice([-1, 0, 1]))
        with tracer.start_as_current_span("a request") as span, request(name=name) as scope:
            np.empty(size, np.uint8)
        peaks[f"{span.get_span_context().trace_id:032x}"] = scope.stats.peak_bytes
    samples = scraped(collector)["ctxalloc_request_memory_peak_bytes"]
    found = of(samples, name)
    exported = {sample.labels["le"] for sample in samples if sample.labels["name"] == name and "le" in sample.labels}
    ends = sorted({*map(float, bounds), *map(float, exported)})
    latest = {min(end for end in ends if peak <= end): trace for trace, peak in peaks.items()}
    assert {float(end): one.labels["trace_id"] for end, one in found.items()} == latest
    for one in found.values():
        assert peaks[one.labels["trace_id"]] == one.value
        assert len(one.labels["span_id"]) == 16
        assert one.timestamp is not None
        assert sum(map(len, [*one.labels, *one.labels.values()])) <= 128


def test_a_refused_request_of_a_service_is_the_exemplar_of_the_refused(tracer: Any) -> None:
    collector = Collector(exemplars=True)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        np.empty(10_000_000, np.uint8)
        await answer(send)

    async def traced(scope: Any, receive: Any, send: Any) -> None:
        with tracer.start_as_current_span("served"):
            await service(scope, receive, send)

    service = AllocatorMiddleware(app, routes={"/big": request(limit_bytes=1000)})
    assert asyncio.run(call(traced, http("/big"))).status == 413
    found = of(scraped(collector)["ctxalloc_requests_refused"], "/big")
    assert [one.value for one in found.values()] == [1]


def test_without_a_sampled_span_or_the_option_there_is_none(tracer: Any) -> None:
    off = sdk.TracerProvider(sampler=pytest.importorskip("opentelemetry.sdk.trace.sampling").ALWAYS_OFF)
    collector = Collector()
    with tracer.start_as_current_span("not asked for"), request(name="none"):
        np.empty(100)
    assert of(scraped(collector)["ctxalloc_request_memory_peak_bytes"], "none") == {}
    collector = Collector(exemplars=True)
    with off.get_tracer("test").start_as_current_span("not sampled"), request(name="none"):
        np.empty(100)
    with request(name="none"):
        np.empty(100)
    assert of(scraped(collector)["ctxalloc_request_memory_peak_bytes"], "none") == {}


def test_a_name_that_is_cut_has_its_exemplar_and_names_are_bounded(
    tracer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "\u00e9" * 100
    collector = Collector(exemplars=True)
    with tracer.start_as_current_span("long"), request(name=long):
        np.empty(100)
    assert of(scraped(collector)["ctxalloc_request_memory_peak_bytes"], "\u00e9" * 64)
    monkeypatch.setattr(_exemplars, "MAX_NAMES", 2)
    for number in range(5):
        with tracer.start_as_current_span("many"), request(name=f"many {number}"):
            np.empty(100)
    assert len(_exemplars._KNOWN) == 2


def test_the_old_format_goes_on_without_them(tracer: Any) -> None:
    registry = client.CollectorRegistry()
    registry.register(Collector(exemplars=True))
    with tracer.start_as_current_span("old"), request(name="old"):
        np.empty(100)
    text = client.generate_latest(registry).decode()
    assert "trace_id" not in text
    assert json.dumps("old") in text


def test_a_bad_option_is_refused() -> None:
    with pytest.raises(TypeError, match="exemplars=1"):
        Collector(exemplars=1)  # type: ignore[arg-type]
    assert ctxalloc.prometheus.Collector is Collector
