"""Which buckets of a histogram are exported, for ``prometheus`` and ``opentelemetry``.

A name has some bounds from its first request on, and finer ends where it has values. Ends never go again, since a
histogram only grows. An end that comes later begins with all values below it, so for the length of one range
``rate()`` misses them there, and ``histogram_quantile`` reads the next end that was there before: too high for a while,
and too low only below all others. Therefore the end of the next doubling is there before it has values.
``src/metrics/ends.rs`` is
the same for Rust.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import isqrt
from typing import Final

from ctxalloc import metrics

MAX_BOUND: Final = 1 << 48
PER_DOUBLING: Final = 4
_POSSIBLE: Final = (0, 1, 2, 4, 8, 16)


def root(power: int, per_doubling: int) -> int:
    """``2 ** (power / per_doubling)``, rounded down exactly: a square root of a square root, rounded down at each."""
    value = 1 << power
    for _ in range(per_doubling.bit_length() - 1):
        value = isqrt(value)
    return value


_STEPS: Final = [root(power, PER_DOUBLING) for power in range(48 * PER_DOUBLING + 1)]


def step_of(size_bytes: int) -> int:
    """The number of the bucket, of four a doubling."""
    return bisect_left(_STEPS, size_bytes)


def buckets_of(histogram: metrics.Histogram, bounds_bytes: Sequence[int], per_doubling: int) -> list[tuple[int, int]]:
    """The ends to export, in order, each with how many values are at most as large.

    Of those below the smallest value only the last is there: what is missing counts as zero in a sum, and a bucket
    needs a lower end. One above the largest value could not be left out.
    """
    ends = _ends(histogram, bounds_bytes, per_doubling)
    found, below, rest = list[tuple[int, int]](), 0, iter(histogram.buckets)
    one = next(rest, None)
    for end in ends:
        while one is not None and one[0] <= end:
            below += one[1]
            one = next(rest, None)
        if not below:
            found.clear()
        found.append((end, below))
    return found


def _ends(histogram: metrics.Histogram, bounds_bytes: Sequence[int], per_doubling: int) -> list[int]:
    ends = set(bounds_bytes)
    if per_doubling and bounds_bytes:
        low, high = bounds_bytes[0], bounds_bytes[-1]
        used = {(end - 1).bit_length() - 1 for end, _ in histogram.buckets if low < end <= high}
        for power in used:
            first = power * per_doubling
            ends.update(root(step, per_doubling) for step in range(first, first + per_doubling + 1))
            ends.add(min(1 << (power + 2), high))
    return sorted(ends)


def checked(bounds_bytes: Sequence[int], per_doubling: int) -> tuple[list[int], int]:
    """Increasing powers of two and a divisor of 16: ends of our own buckets. ValueError: one is none."""
    bounds: list[int] = []
    for bound in bounds_bytes:
        if bound < 1 or bound.bit_count() > 1 or bound > MAX_BOUND or (bounds and bound <= bounds[-1]):
            raise ValueError(
                f"bounds_bytes: {bound!r} is not possible; give powers of two in increasing order, up to 2**48"
            )
        bounds.append(bound)
    if isinstance(per_doubling, bool) or per_doubling not in _POSSIBLE:
        raise ValueError(f"per_doubling={per_doubling!r}: give 0 (the bounds only), 1, 2, 4, 8 or 16")
    return bounds, per_doubling
