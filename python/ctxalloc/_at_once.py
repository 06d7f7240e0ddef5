"""How much the requests of a process may hold at once: as much as keeps its processors busy.

Of more requests than that each takes longer, and all hold their memory meanwhile. How many it takes is seen where a
request ran by itself: what it waited for then it waits for at any time, and others have the processors meanwhile.
Requests of the routes with the largest limits reserve these of one budget, so that none of them is refused by it, and
wait for it.
"""

import statistics
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ctxalloc._advice import LESS_MEMORY, LIMIT_OVER_PEAK, MORE_MEMORY_BYTES
from ctxalloc._sites import UNNAMED
from ctxalloc._text import counted, size_text, tidy

LEAST_ALONE: Final = 5
"""Of fewer requests by themselves nothing is known."""
PART: Final = 8
"""A route whose limit is less than this part of the largest one does not wait: it would wait for others' memory."""
LEAST_SAVED: Final = MORE_MEMORY_BYTES
"""What has to be gained, in bytes, beside ``LESS_MEMORY``."""

LEAST_TIMEOUT: Final = 60
TIMES_TIMEOUT: Final = 100
"""A request waits so many seconds at most, or so many times what the slowest route takes: a service that asks itself
would wait for ever."""

RULE: Final = (
    "at once: a budget that requests of the routes with the largest limits reserve these of, if then a tenth and 8 MiB "
    "less is alive at one time. It has room for the processors' number of the largest ones, and for so many as keep "
    "the processors busy: their number, times what a request takes by itself, over what it takes of a processor then. "
    f"They wait {LEAST_TIMEOUT} s at most, or {TIMES_TIMEOUT} times what the slowest route takes by itself"
)


class Sized(NamedTuple):
    """A route with the limit that it is to have; None: its requests cannot wait."""

    facts: dict[str, Any]
    limit_bytes: int | None


class AtOnce(NamedTuple):
    """What to give the routes together."""

    limit_bytes: int | None
    """None: not known."""
    routes: list[str]
    requests: float
    """So many at once keep the processors busy."""
    live_bytes: int
    """The most that was alive at one time, in the recording."""
    expected_bytes: int
    """The same with the budget, at most."""
    reason: str
    timeout_seconds: int = LEAST_TIMEOUT


def advised(whole: dict[str, Any], routes: Sequence[Sized], processors: int, *, is_complete: bool) -> AtOnce | None:
    """What to give to all routes, which are ``whole`` together; None: nothing is gained.

    ``is_complete``: all requests were recorded.
    """
    largest = max((one.limit_bytes or 0 for one in routes), default=0)
    waiting, beside = [], 0
    for one in routes:
        if one.limit_bytes is not None and one.limit_bytes * PART >= largest:
            waiting.append((one.facts, one.limit_bytes))
        else:
            beside += one.facts["peak_live_bytes"]
    live, concurrent = whole["peak_live_bytes"], whole["max_concurrent"]
    if not waiting or processors < 1 or concurrent <= processors:
        return None
    names = [facts["name"] for facts, _ in waiting]
    # Requests that are not recorded beside it would be taken for itself.
    few = [facts["name"] for facts, _ in waiting if min(len(facts[what]) for what in _ALONE) < LEAST_ALONE]
    least = _expected(live, beside, processors * largest)
    if not _is_less(least, live):
        return None
    if not is_complete or few:
        why = "not all requests were recorded (one_in=1, share=1.0)"
        if few:
            named = few[0] or UNNAMED
            why = f"fewer than {LEAST_ALONE} requests of {named} ran by themselves: record quiet times too"
        said = f"{size_text(least)} might be alive at one time in place of {size_text(live)}, but {why}"
        return AtOnce(None, names, 0.0, live, least, said)
    took, spent, held = 0.0, 0.0, 0.0
    for facts, size in waiting:
        seconds, processor = (facts["requests"] * statistics.median(facts[what]) for what in _ALONE)
        took, spent, held = took + seconds, spent + processor, held + seconds * size
    requests = round(processors * max(1.0, took / max(spent, 1.0)), 1)
    room = max(requests * held / max(took, 1.0), processors * largest)
    limit = -(-int(room) // (1 << 20)) << 20
    expected = _expected(live, beside, limit)
    if not _is_less(expected, live):
        return None
    said = (
        f"{requests:g} requests at once keep {counted(processors, 'processor')} busy, since one by itself "
        f"has one for {tidy(min(1.0, spent / max(took, 1.0)), 2):.0%} of its time; there were {concurrent}. At most "
        f"{size_text(expected)} are alive then at one time, in place of {size_text(live)}"
    )
    slowest = max(statistics.median(facts["alone_ns"]) for facts, _ in waiting) / 1e9
    timeout = max(LEAST_TIMEOUT, round(TIMES_TIMEOUT * slowest))
    return AtOnce(limit, names, requests, live, expected, said, timeout)


_ALONE: Final = ("alone_ns", "alone_processor_ns")


def _expected(live: int, beside: int, limit_bytes: int) -> int:
    """The most that is alive at one time if those that wait have so much: limits are 1.5 times the largest peaks."""
    return min(live, int(limit_bytes / LIMIT_OVER_PEAK) + beside)


def _is_less(size: int, than: int) -> bool:
    return size <= than * (1 - LESS_MEMORY) and than - size >= LEAST_SAVED


def as_json(one: AtOnce) -> dict[str, Any]:
    """All of it, for programs and for the page."""
    return {**one._asdict(), "routes": [name or UNNAMED for name in one.routes]}


def text_of(told: dict[str, Any]) -> str:
    """What is to be told of it."""
    if told["limit_bytes"] is None:
        return f"how much at once is not known: {told['reason']}"
    return (
        f"at most {size_text(told['limit_bytes'])} of limits at once, for {', '.join(told['routes'])}: {told['reason']}"
    )
