"""How much the requests of a process may hold at once: as much as keeps its processors busy.

Of more requests than that each takes longer, and all hold their memory meanwhile. How many it takes is seen where a
request ran by itself: what it waited for then it waits for at any time, and others have the processors meanwhile.
Requests of the routes with the largest limits reserve these of one budget, and wait for it: none that has begun is
refused by it. What a request leaves behind stays on that budget: routes that keep memory do not wait.
"""

import statistics
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ctxalloc._advice import LESS_MEMORY, MORE_MEMORY_BYTES
from ctxalloc._sites import UNNAMED
from ctxalloc._sizes import LIMIT_OVER_PEAK, rounded_up
from ctxalloc._text import counted, size_text, tidy

LEAST_ALONE: Final = 5
"""Of fewer requests by themselves nothing is known."""
PART: Final = 8
"""A route whose limit is less than this part of the largest one does not wait: it would wait for others' memory."""
LEAST_SAVED: Final = MORE_MEMORY_BYTES
"""What has to be gained, in bytes, beside ``LESS_MEMORY``."""
BUSY: Final = 0.7
"""So many processors the process must have used where requests ran together. With the GIL it may be one at most."""
LATER: Final = 3
"""Beside others a request takes up to their number of times as long, and so many times that where all want the GIL."""
LEAST_TIMEOUT: Final = 60
MOST_TIMEOUT: Final = 86_400
"""A day: nobody waits for longer, and no request is believed to take a processor for longer."""
PLACES: Final = 1024
"""So many may wait for a budget that does not say another number."""

RULE: Final = (
    "at once: a budget that requests of the routes with the largest limits reserve these of, if then a tenth and 8 MiB "
    "less is alive at one time in a process. It has room for the processors' number of the largest ones, and for so "
    "many as keep the processors busy: their number, times what a request takes by itself, over what it takes of a "
    "processor then. Routes that keep memory beyond their requests do not wait; others wait "
    f"{LEAST_TIMEOUT} s at most, or twice what all that ran at once take one after the other"
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
    """The most that was alive at one time in a process, in the recording."""
    expected_bytes: int
    """The same with the budget, at most."""
    reason: str
    timeout_seconds: int = LEAST_TIMEOUT
    max_waiting: int | None = None
    """None: a budget's usual number is enough."""


_ALONE: Final = ("alone_ns", "alone_processor_ns")


def advised(whole: dict[str, Any], routes: Sequence[Sized], processors: int, *, is_complete: bool) -> AtOnce | None:
    """What to give to all routes, which are ``whole`` together; None: nothing is gained.

    ``is_complete``: all requests were recorded.
    """
    live, concurrent = whole["peak_live_bytes"], whole["max_concurrent"]
    if processors < 1 or concurrent <= processors:
        return None
    limits = [None if one.facts["lasting_blocks"] else one.limit_bytes for one in routes]
    largest = max((limit or 0 for limit in limits), default=0)
    waiting, beside = [], 0
    for one, limit in zip(routes, limits, strict=True):
        if limit is not None and limit * PART >= largest:
            waiting.append((one.facts, limit))
        else:
            beside += one.facts["peak_live_bytes"]
    if not waiting and _is_less(live * processors // concurrent, live):
        said = "no requests can wait: those that can are of a row of routes, and keep no memory beyond their end"
        return AtOnce(None, [], 0.0, live, live, said)
    least = _expected(live, beside, processors * largest)
    if not _is_less(least, live):
        return None
    names = [facts["name"] for facts, _ in waiting]
    why = _why_unknown(whole, waiting) if is_complete else "not all requests were recorded (one_in=1, share=1.0)"
    if why is not None:
        said = f"{size_text(least)} might be alive at one time in place of {size_text(live)}, but {why}"
        return AtOnce(None, names, 0.0, live, least, said)
    took, spent, held = 0.0, 0.0, 0.0
    for facts, size in waiting:
        seconds, processor = (facts["requests"] * statistics.median(facts[what]) for what in _ALONE)
        took, spent, held = took + seconds, spent + processor, held + seconds * size
    requests = round(processors * max(1.0, took / max(spent, 1.0)), 1)
    room = max(requests * held / took, processors * largest)
    limit = rounded_up(int(room), 1 << 20)
    expected = _expected(live, beside, limit)
    if not _is_less(expected, live):
        return None
    said = (
        f"{requests:g} requests at once keep {counted(processors, 'processor')} busy, since one by itself has one for "
        f"{tidy(min(1.0, spent / took), 2):.0%} of its time; there were {concurrent} in a process. At most "
        f"{size_text(expected)} are alive there then at one time, in place of {size_text(live)}"
    )
    slowest = max(statistics.median(facts["alone_ns"]) for facts, _ in waiting) / 1e9
    timeout = min(MOST_TIMEOUT, max(LEAST_TIMEOUT, round(2 * concurrent * slowest)))
    places = 2 * concurrent if 2 * concurrent > PLACES else None
    return AtOnce(limit, names, requests, live, expected, said, timeout, places)


def _why_unknown(whole: dict[str, Any], waiting: Sequence[tuple[dict[str, Any], int]]) -> str | None:
    """Why what requests take by themselves is not known, or says nothing of what they take together; None: it does."""
    for facts, _ in waiting:
        name, (alone, processor) = facts["name"], (facts[what] for what in _ALONE)
        if min(len(alone), len(processor)) < LEAST_ALONE:
            few = f"fewer than {LEAST_ALONE} requests of {name} ran while no other one was open"
            return f"{few}: record quiet times too"
        usual = statistics.median(alone)
        if not usual > 0 or not 0 < statistics.median(processor) < MOST_TIMEOUT * 1e9:
            return f"the times of {name} are none that a program takes"
        if facts["duration_ns"] > LATER * whole["max_concurrent"] * usual * facts["requests"]:
            return f"beside others {name} took longer than they explain: it waits for something else too"
    together = whole["duration_ns"] - sum(whole["alone_ns"])
    if whole["open_processor_ns"] is None:
        return "not all requests say what processors spent on them"
    used = whole["open_processor_ns"] - sum(whole["alone_processor_ns"])
    if used < BUSY * together:
        share = tidy(max(0.0, used / max(together, 1)), 2)
        return f"where they ran at once the process used {share:g} processors only: they waited for something else"
    return None


def _expected(live: int, beside: int, limit_bytes: int) -> int:
    """The most that is alive at one time if those that wait have so much: limits are 1.5 times the largest peaks."""
    return min(live, int(limit_bytes / LIMIT_OVER_PEAK) + beside)


def _is_less(size: int, than: int) -> bool:
    return size <= than * (1 - LESS_MEMORY) and than - size >= LEAST_SAVED


def as_json(one: AtOnce) -> dict[str, Any]:
    """All of it, for programs and for the page."""
    return {**one._asdict(), "routes": [name or UNNAMED for name in one.routes]}


def set_text(route: dict[str, Any]) -> str:
    """What stands behind the reservation of a route, as programs are told of it."""
    return ", of the common budget" if route["waits"] else ""


def text_of(told: dict[str, Any]) -> str:
    """What is to be told of it."""
    if told["limit_bytes"] is None:
        return f"how much at once is not known: {told['reason']}"
    return (
        f"at most {size_text(told['limit_bytes'])} of limits at once, for {', '.join(told['routes'])}: {told['reason']}"
    )
