"""What a recording by itself says to set for a route, or for all: limit, reservation, warm memory and its decay."""

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

MIN_REQUESTS: Final = 20
"""With fewer requests nothing is known."""
LIMIT_OVER_PEAK: Final = 1.5
"""A limit, over the p99.9 of the peaks."""
LONGEST_GAP: Final = 60.0
"""Nothing is kept warm over longer gaps, in seconds."""
DEFAULT_DECAY: Final = 10.0
"""What pools keep by default, in seconds; less than this would cost requests that come again at once."""
GAPS_IN_DECAY: Final = 12
"""A pool forgets a peak after one to two eighths of its decay (decision 0031): those have to span a gap."""


class Sizes(NamedTuple):
    """Numbers to set; None where too little is known."""

    limit_bytes: int | None
    reserve_bytes: int | None
    warm_bytes: int
    """What a pool is to keep; nothing where there is none."""
    decay_seconds: float


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest of these that at least the share ``q`` of them are not above. They are sorted, and not none."""
    return values[max(0, math.ceil(q * len(values)) - 1)]


def sizes_of(route: dict[str, Any]) -> Sizes:
    """What to set for a route, or for all together."""
    peaks = sorted(route["peak_bytes"])
    limit = reserve = None
    if len(peaks) >= MIN_REQUESTS:
        limit = rounded_up(LIMIT_OVER_PEAK * quantile(peaks, 0.999), 64 << 10)
        reserve = min(limit, rounded_up(1.2 * quantile(peaks, 0.95), 64 << 10))
    return Sizes(limit, reserve, rounded_up(1.2 * route["peak_live_bytes"], 1 << 20), _decay(route["gaps_ns"]))


def rounded_up(size: float, step: int) -> int:
    """A multiple of ``step`` that is not less, and not none."""
    return max(1, math.ceil(size / step)) * step


def _decay(gaps_ns: Sequence[int]) -> float:
    gaps = sorted(gap / 1e9 for gap in gaps_ns)
    short = [gap for gap in gaps if gap <= LONGEST_GAP]
    if not gaps:
        return DEFAULT_DECAY
    return max(DEFAULT_DECAY, float(math.ceil(GAPS_IN_DECAY * quantile(short, 0.95)))) if short else 1.0


def halves_differ(route: dict[str, Any]) -> float:
    """By how much the p95 of the peaks of both halves differ: larger over smaller."""
    peaks = route["peak_bytes"]
    half = len(peaks) // 2
    if half == 0:
        return 1.0
    one, other = (max(1, quantile(sorted(part), 0.95)) for part in (peaks[:half], peaks[half:]))
    return max(one, other) / min(one, other)
