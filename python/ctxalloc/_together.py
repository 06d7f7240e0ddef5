"""All advice of ``ctxalloc recommend`` in one process: routes that gain something alone may cost one another memory.

A route is measured by itself, where it has the process's memory for itself too. Here all routes are replayed together,
each as advised, beside all of them as they are. Where that is worse, routes are added one after the other, those that
gain the most first, and whichever makes it worse is not advised.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ctxalloc import _advice
from ctxalloc._replay import BASE, Measured, Round, measured, median_of, round_of
from ctxalloc._text import size_text

ADVISED: Final = "advised"
"""The arm beside the default's: each route with its advice."""

MORE_MEMORY: Final = 0.05
"""By what share the peak of the resident memory may be larger together, if it is more than 1 MiB."""


class Wanted(NamedTuple):
    """What was advised for a route by itself."""

    route: str
    strategy: str
    saved_seconds: float
    """Of processor time, of all its requests."""


class Together(NamedTuple):
    """What was found."""

    rounds: Measured
    """Of what is advised in the end, and of the default beside it."""
    withdrawn: dict[str, str]
    """Routes whose advice makes it worse, and in what."""
    untried: list[str]
    """Routes whose advice was not measured together with the others: it was interrupted."""


def tried(
    path: Path,
    wanted: list[Wanted],
    rounds: int,
    shown: Callable[[str], None],
) -> Iterator[Together]:
    """What is known, from nothing on, better with each that follows: the last one is the answer. FailedError."""
    order = sorted(wanted, key=lambda one: -one.saved_seconds)
    names = [one.route for one in order]
    yield Together({}, {}, names)
    every = _rounds(path, {one.route: one.strategy for one in order}, rounds, shown)
    if worse(every) is None:
        yield Together(every, {}, [])
        return
    kept: dict[str, str] = {}
    withdrawn: dict[str, str] = {}
    best: Measured = {}
    for number, one in enumerate(order):
        last = number == len(order) - 1 and not withdrawn
        # With the last one they are all, which were measured.
        found = every if last else _rounds(path, {**kept, one.route: one.strategy}, rounds, shown)
        why = worse(found)
        if why is None:
            kept[one.route] = one.strategy
            best = found
        else:
            withdrawn[one.route] = _withdrawal(one, why, kept)
        yield Together(best, dict(withdrawn), names[number + 1 :])


def _rounds(path: Path, by_route: Mapping[str, str], rounds: int, shown: Callable[[str], None]) -> Measured:
    found: Measured = {BASE: [], ADVISED: []}
    for arm, numbers in measured(path, [BASE, ADVISED], rounds, by_route={ADVISED: by_route}, shown=shown):
        found[arm].append(round_of(numbers))
    return found


def worse(found: Measured) -> str | None:
    """In what the advised rounds are worse than the default's by more than the rounds differ; None if they are not."""
    base, advised = found[BASE], found[ADVISED]
    if _advice.is_larger(advised, base, MORE_MEMORY, _advice.LESS_MEMORY_BYTES):
        before, after = (median_of([one.peak_bytes for one in part]) or 0 for part in (base, advised))
        return f"hold {size_text(after - before)} more at the peak ({_ratio(after, before)})"
    if min(map(_cpu, advised)) > max(map(_cpu, base)):
        before, after = (statistics.median(map(_cpu, part)) for part in (base, advised))
        return f"take {(after - before) * 1000:.1f} ms more of processor time ({_ratio(after, before)})"
    return None


def _cpu(one: Round) -> float:
    return one.cpu


def _ratio(after: float, before: float) -> str:
    return f"{after / before:.2f} times as much" if before else "the default takes none"


def _withdrawal(one: Wanted, why: str, kept: Mapping[str, str]) -> str:
    beside = "beside the other routes as advised" if kept else "beside the other routes as they are"
    return f"{one.strategy} gains something by itself, but {beside} all requests together then {why}: it is withdrawn"


def text_of(rounds: Mapping[str, Any]) -> str:
    """What all routes together take as advised, beside the default."""
    base, advised = rounds[BASE], rounds[ADVISED]
    parts = []
    for field, what in (("cpu", "of the processor time"), ("peak_bytes", "of the RSS at the peak")):
        values = [[one[field] for one in part if one[field] is not None] for part in (base, advised)]
        if all(values):
            before, after = map(statistics.median, values)
            parts.append(f"{after / before:.2f} {what}" if before else f"{what[3:]} of {after:g} instead of none")
    return f"as advised they take {' and '.join(parts)} that they take as they are ({len(advised)} rounds)"
