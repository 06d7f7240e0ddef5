"""Which buckets Prometheus and OpenTelemetry get: fine where a name has values, few elsewhere, and none ever goes."""

import bisect
import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import subprocesses

import ctxalloc
from ctxalloc import _buckets
from ctxalloc.metrics import Histogram
from ctxalloc.prometheus import BOUNDS_BYTES

SIXTEEN = sorted({_buckets.root(power, 16) for power in range(48 * 16 + 1)})
pytestmark = [pytest.mark.once, pytest.mark.any_numpy]


def histogram(values: Sequence[int]) -> Histogram:
    """As Rust counts them: ``test_the_ends_are_those_of_the_counters`` holds that these are its buckets."""
    ends = [SIXTEEN[bisect.bisect_left(SIXTEEN, value)] for value in values]
    return Histogram(tuple((end, ends.count(end)) for end in sorted(set(ends))), sum(values))


def quantile(q: float, buckets: list[tuple[int, int]], count: int) -> float:
    """``histogram_quantile`` of Prometheus, whose buckets' rates are these counts."""
    rank = q * count
    low, below = 0, 0
    for end, at_most in buckets:
        if at_most >= rank:
            return low + (end - low) * (rank - below) / (at_most - below)
        low, below = end, at_most
    return low


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("per_doubling", [1, 2, 4, 8, 16])
def test_a_quantile_is_as_near_as_a_bucket_is_wide(seed: int, per_doubling: int) -> None:
    chance = random.Random(seed)
    # A median of 159 kB with a p99 of 1.5 MB, all the same size, and others.
    middle, spread = [(159_000, 0.963), (1_500_000, 0), (5000, 0.1), (3e9, 2)][seed % 4]
    values = sorted(max(4097, min(1 << 36, int(chance.lognormvariate(0, spread) * middle))) for _ in range(2000))
    buckets = _buckets.buckets_of(histogram(values), BOUNDS_BYTES, per_doubling)
    width = 2 ** (1 / per_doubling) * 1.0002  # ends are integers
    for q in (0.01, 0.5, 0.9, 0.95, 0.99, 0.999):
        exact = values[int(q * len(values) + 0.999999) - 1]
        assert exact / width <= quantile(q, buckets, len(values)) <= exact * width, q


@pytest.mark.parametrize("seed", range(20))
def test_what_was_exported_never_goes_and_never_falls(seed: int) -> None:
    chance = random.Random(seed)
    values, before = list[int](), dict[int, int]()
    for _ in range(60):
        values += [int(2 ** chance.uniform(0, 40)) for _ in range(chance.randrange(1, 4))]
        buckets = _buckets.buckets_of(histogram(values), BOUNDS_BYTES, 4)
        now = dict(buckets)
        assert all(now[end] >= count for end, count in before.items())
        for end, count in buckets:
            assert count == sum(value <= end for value in values), "each has all that are smaller"
        assert all(low < high and less <= more for (low, less), (high, more) in pairwise(buckets))
        before = now


def test_an_end_is_there_before_its_first_value() -> None:
    few = [end for end, _ in _buckets.buckets_of(histogram([1_500_000]), BOUNDS_BYTES, 4)]
    # Its bucket's lower end, which has none; the rest of its doubling; the next one's end; and all bounds above.
    assert few == [1482910, 1763487, 1 << 21, 1 << 22, 1 << 24, 1 << 28, 1 << 32, 1 << 36]
    assert _buckets.buckets_of(histogram([1_500_000]), BOUNDS_BYTES, 0) == [
        (1 << 20, 0),
        *((1 << power, 1) for power in (24, 28, 32, 36)),
    ]
    # What is outside of the bounds has none of its own.
    assert [end for end, _ in _buckets.buckets_of(histogram([100, 1 << 40]), (4096, 8192), 4)] == [4096, 8192]
    assert _buckets.buckets_of(histogram([100]), (), 4) == []


def test_the_ends_are_those_of_the_counters() -> None:
    sizes = [_buckets.root(step, 4) for step in range(12 * 4, 24 * 4)]
    for size in sizes:
        with ctxalloc.request(name="exact ends"):
            np.empty(size, np.uint8)
    counted = ctxalloc.metrics.snapshot().series["exact ends"].peak_bytes
    assert [end for end, _ in counted.buckets] == sizes
    assert counted == histogram(sizes)


MANY = """
import random, numpy as np, ctxalloc
from prometheus_client import CollectorRegistry, generate_latest
chance, registry = random.Random(7), CollectorRegistry()
registry.register(ctxalloc.prometheus.Collector())
for route in range(128):
    largest = chance.choice([30_000, 100_000, 1_000_000, 30_000_000])
    for _ in range(20):
        with ctxalloc.request(name=f"route {route}"):
            np.empty(int(largest * chance.uniform(0.5, 1)), np.uint8)
print(sum(line[:1] != "#" for line in generate_latest(registry).decode().splitlines()))
"""


def test_a_scrape_of_all_names_is_below_4800_samples() -> None:
    pytest.importorskip("prometheus_client")
    assert int(subprocesses.says(MANY)) < 4800


@pytest.mark.parametrize("wrong", [3, -1, 32, True, 2.5, None])
def test_a_number_per_doubling_that_our_buckets_cannot_have_is_refused(wrong: object) -> None:
    pytest.importorskip("prometheus_client")
    with pytest.raises(ValueError, match=r"per_doubling=.*: give 0 \(the bounds only\), 1, 2, 4, 8 or 16"):
        ctxalloc.prometheus.Collector(per_doubling=wrong)  # type: ignore[arg-type]
