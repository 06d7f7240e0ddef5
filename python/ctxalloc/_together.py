"""All advice of ``ctxalloc recommend`` in one process: routes that gain something alone may cost one another memory.

A route is measured by itself, where it has the process's memory for itself too. Here all routes are replayed together,
each as advised, beside all of them as they are. More memory is worse only if what is saved does not pay for it: a few
MiB are not worth most of a route's time. Where all of them pay for it together (routes share a pool, and either alone
would have to pay for all of it), routes are left out one after the other, those that gain the least first: whichever
does not pay for what it adds is not advised. Otherwise routes are added one after the other, those that gain the most
first, and whichever makes it worse is not advised.

At last all routes have the pool (``everywhere``). What one route leaves free another one uses, and what many routes ask
of malloc by turns leaves it in pieces: neither is seen by who replays one route.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from ctxalloc import _advice
from ctxalloc._replay import Measured, Planned, Round, measured, median_peak
from ctxalloc._text import size_text

AS_THEY_ARE: Final = "as they are"
"""The arm in which each route has what it was recorded under."""
ADVISED: Final = "advised"
"""The one beside it: each route with its advice."""

EVERYWHERE: Final = "everywhere"
"""The one in which all routes have one strategy."""

MORE_MEMORY: Final = 0.05
"""By what share the peak of the resident memory may be larger together, if it is 8 MiB or more."""


MORE_TIME: Final = 0.05
"""By what share the processor time may be longer together, by medians and by fastest rounds, where rounds overlap."""


class Wanted(NamedTuple):
    """What was advised for a route by itself."""

    route: str
    strategy: str
    saved_seconds: float
    """Of processor time, of all its requests."""
    share: float
    """What part of the time of all routes that is."""


class Together(NamedTuple):
    """What was found."""

    rounds: Measured
    """Of what is advised in the end, and of all as they are beside it."""
    withdrawn: dict[str, str]
    """Routes whose advice makes it worse, and in what."""
    untried: list[str]
    """Routes whose advice was not measured together with the others: it was interrupted, or failed."""
    problem: str | None = None
    """Why it failed."""


def tried(
    plan: Planned,
    wanted: list[Wanted],
    as_they_are: Mapping[str, str],
    rounds: int,
    shown: Callable[[str], None],
    *,
    mmap_threshold: int | None = None,
) -> Iterator[Together]:
    """What is known, from nothing on, better with each that follows: the last one is the answer. FailedError.

    ``as_they_are``: what each route was recorded under. ``mmap_threshold``: as for ``_replay.replays``.
    """
    order = sorted(wanted, key=lambda one: -one.saved_seconds)
    names = [one.route for one in order]
    yield Together({}, {}, names)

    def with_these(routes: Mapping[str, str]) -> Measured:
        arms = {AS_THEY_ARE: as_they_are, ADVISED: {**as_they_are, **routes}}
        return measured(plan, arms, rounds, mmap_threshold=mmap_threshold, shown=shown)

    every = with_these({one.route: one.strategy for one in order})
    if worse(every, allowed=sum(_advice.paid(one.share) for one in order)) is None:
        yield from _paying(order, every, with_these)
        return
    kept: dict[str, str] = {}
    withdrawn: dict[str, str] = {}
    best: Measured = {}
    for number, one in enumerate(order):
        last = number == len(order) - 1 and not withdrawn
        # With the last one they are all, which were measured.
        found = every if last else with_these({**kept, one.route: one.strategy})
        # What those hold more that are kept was paid for by what they save.
        why = worse(found, allowed=more_memory(best) + _advice.paid(one.share))
        if why is None:
            kept[one.route] = one.strategy
            best = found
        else:
            withdrawn[one.route] = _withdrawal(one, why, kept)
        yield Together(best, dict(withdrawn), names[number + 1 :])


class Everywhere(NamedTuple):
    """One strategy is better for all routes than what is advised for each."""

    rounds: Measured
    """Of all of them under it, as ``ADVISED``, and of all as they are."""
    reason: str


class Asked(NamedTuple):
    """What all routes may have together."""

    strategy: str
    routes: list[str]
    otherwise: Mapping[str, str]
    """What is advised for each."""
    requests: int
    seconds: float
    """What all requests take."""


def everywhere(
    plan: Planned,
    asked: Asked,
    as_they_are: Mapping[str, str],
    rounds: int,
    shown: Callable[[str], None],
    *,
    mmap_threshold: int | None = None,
) -> Everywhere | None:
    """All these routes under one strategy, if that is better than what is advised for each."""
    arms: dict[str, Mapping[str, str]] = {AS_THEY_ARE: as_they_are}
    if asked.otherwise:
        arms[ADVISED] = {**as_they_are, **asked.otherwise}
    arms[EVERYWHERE] = {**as_they_are, **dict.fromkeys(asked.routes, asked.strategy)}
    found = measured(plan, arms, rounds, mmap_threshold=mmap_threshold, shown=shown)
    base, these, those = found[AS_THEY_ARE], found[EVERYWHERE], found.get(ADVISED, found[AS_THEY_ARE])
    if _advice.gain_of(asked.strategy, those, these, asked.requests, asked.seconds) is None:
        return None
    told = {AS_THEY_ARE: base, ADVISED: these}
    gain = _advice.gain_of(asked.strategy, base, these, asked.requests, asked.seconds)
    if gain is None or worse(told, allowed=_advice.paid(gain.share)) is not None:
        return None
    shares = _shares(*([one._asdict() for one in part] for part in (those, these)))
    otherwise = "as advised for each" if asked.otherwise else "as they are"
    return Everywhere(
        told, f"with {asked.strategy} for all of them all routes together take {shares} that they take {otherwise}"
    )


def _paying(
    order: list[Wanted], every: Measured, with_these: Callable[[Mapping[str, str]], Measured]
) -> Iterator[Together]:
    """Without the routes that do not pay for the memory that they add to the others."""
    found, withdrawn = every, dict[str, str]()
    kept = {one.route: one.strategy for one in order}
    yield Together(found, {}, [])
    for one in reversed(order):
        if len(kept) == 1 or worse(found) is None:
            return
        others = {route: strategy for route, strategy in kept.items() if route != one.route}
        without = with_these(others)
        why = _larger(found[ADVISED], without[ADVISED], _advice.paid(one.share))
        if why is not None:
            withdrawn[one.route] = _withdrawal(one, why, others)
            kept, found = others, without
            yield Together(found, dict(withdrawn), [])


def more_memory(found: Measured) -> float:
    """By what share the peak is larger as advised; 0 where it is not, or nothing was measured."""
    before, after = (median_peak(found.get(arm, [])) for arm in (AS_THEY_ARE, ADVISED))
    return max(0.0, after / before - 1) if before and after else 0.0


def worse(found: Measured, allowed: float = 0.0) -> str | None:
    """In what the advised rounds are worse than the others by more than the rounds differ; None if they are not.

    ``allowed``: what share of memory more is no reason.
    """
    base, advised = found[AS_THEY_ARE], found[ADVISED]
    larger = _larger(advised, base, allowed)
    if larger is not None:
        return larger
    before, after = (statistics.median(map(_cpu, part)) for part in (base, advised))
    fastest, slowest = min(map(_cpu, advised)), max(map(_cpu, base))
    is_much_slower = after > before * (1 + MORE_TIME) and fastest > min(map(_cpu, base)) * (1 + MORE_TIME)
    if fastest > slowest or is_much_slower:
        return f"take {(after - before) * 1000:.1f} ms more of processor time ({_ratio(after, before)})"
    return None


def _larger(rounds: list[Round], than: list[Round], allowed: float) -> str | None:
    if not _advice.is_larger(rounds, than, max(MORE_MEMORY, allowed), _advice.MORE_MEMORY_BYTES):
        return None
    before, after = (median_peak(part) or 0 for part in (than, rounds))
    return f"hold {size_text(after - before)} more at the peak ({_ratio(after, before)})"


def _cpu(one: Round) -> float:
    return one.cpu


def _ratio(after: float, before: float) -> str:
    return f"{after / before:.2f} times as much" if before else "as they are they take none"


def _withdrawal(one: Wanted, why: str, kept: Mapping[str, str]) -> str:
    beside = "beside the other routes as advised" if kept else "beside the other routes as they are"
    return (
        f"{one.strategy} saves {one.share:.1%} of the time of all requests, but {beside} these together then {why}: it "
        "is withdrawn"
    )


def text_of(rounds: Mapping[str, Any]) -> str:
    """What all routes together take as advised, beside what they take as they are."""
    base, advised = rounds[AS_THEY_ARE], rounds[ADVISED]
    return f"as advised they take {_shares(base, advised)} that they take as they are ({len(advised)} rounds)"


def _shares(base: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> str:
    parts = []
    for field, what in (("cpu", "of the processor time"), ("peak_bytes", "of the RSS at the peak")):
        values = [[one[field] for one in part if one[field] is not None] for part in (base, rounds)]
        if all(values):
            before, after = map(statistics.median, values)
            parts.append(f"{after / before:.2f} {what}" if before else f"{what[3:]} of {after:g} instead of none")
    return " and ".join(parts)
