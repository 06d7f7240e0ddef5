"""What is advised for a recording, and how programs and the page are told of it."""

import os
from pathlib import Path
from typing import Any, Final, NamedTuple

from ctxalloc import _advice, _at_once, _sizes, _snippets, _warm
from ctxalloc._advice import Decision
from ctxalloc._replay import Measured
from ctxalloc._sites import UNNAMED
from ctxalloc._sizes import Sizes
from ctxalloc._together import Together

OTHERS: Final = "(other)"
"""What a recording calls the requests whose names it has no room for: no terms suit all of them."""


class Advice(NamedTuple):
    """What one route should get."""

    route: str
    requests: int
    decision: Decision
    sizes: Sizes
    confidence: str
    would_change: list[str]
    measured: Measured
    facts: dict[str, Any]
    is_partial: bool
    """Whether it was interrupted before all its rounds were measured."""
    withdrawn: str | None = None
    """What was advised for the route by itself, and is not."""
    mmap_threshold: int | None = None
    """Malloc's in its replays; None: as in a new program."""
    is_failed: bool = False
    """Whether it cannot be replayed: its sizes are those of no program that ran here."""

    @property
    def has_pool(self) -> bool:
        """Whether it keeps memory warm."""
        return self.decision.strategy in _advice.OVER_POOLS

    @property
    def busy_seconds(self) -> float:
        """The time of its requests, or of their replay where that is longer."""
        return _advice.seconds_of(self.facts, self.measured)


class Beyond(NamedTuple):
    """What is not advised, since there are so many with more requests."""

    routes: int
    requests: int


class Found(NamedTuple):
    """The advice for a recording."""

    advice: list[Advice]
    whole: dict[str, Any]
    """What was recorded, all routes together."""
    left: list[str]
    """Routes that were not reached before it was interrupted."""
    beyond: Beyond
    together: Together | None = None
    """Of all routes in one process; None where nothing is advised, or there is one route only."""
    warm: _warm.Warm | None = None
    """How much is kept warm; None: all that may be needed, since less was not tried."""
    is_interrupted: bool = False
    """Before less was tried."""
    at_once: _at_once.AtOnce | None = None
    """What the routes may hold together; None: nothing is gained by that, or not all were asked for."""

    @property
    def kept(self) -> _snippets.Kept | None:
        """What the process should keep warm, for all routes that have a pool; None where none has one."""
        pooled = [one for one in self.advice if one.has_pool and not one.is_failed]
        if not pooled:
            return None
        whole = _sizes.sizes_of(self.whole)
        # At most what all routes had at one time in a process, and at most what each of these had at some time.
        most = min(whole.warm_bytes, sum(one.sizes.warm_bytes for one in pooled))
        return _snippets.Kept(most if self.warm is None else self.warm.size, whole.decay_seconds)

    @property
    def common(self) -> _snippets.Common | None:
        """The budget that routes are to reserve of; None: none is advised."""
        one = self.at_once
        if one is None or one.limit_bytes is None:
            return None
        return _snippets.Common(one.limit_bytes, one.timeout_seconds, one.max_waiting)

    @property
    def is_partial(self) -> bool:
        """Whether it was interrupted."""
        is_tried = self.together is None or not self.together.untried or self.together.problem is not None
        is_tried = is_tried and not self.is_interrupted
        return bool(self.left) or not is_tried or any(one.is_partial for one in self.advice)


def sets_of(found: Found) -> list[_snippets.Set]:
    """What each route is to get."""
    return [
        _snippets.Set(
            one.route,
            _strategy_of(one),
            one.sizes.limit_bytes,
            _reserve_of(one, found),
            waits=_waits(one, found),
        )
        for one in found.advice
        if (one.decision.verdict != "unknown" or one.sizes.limit_bytes is not None) and one.route != OTHERS
    ]


def _waits(one: Advice, found: Found) -> bool:
    """Whether it waits for the routes' common budget."""
    return found.common is not None and found.at_once is not None and one.route in found.at_once.routes


def _reserve_of(one: Advice, found: Found) -> int | None:
    """What it reserves: its whole limit where it waits, so that the common budget never refuses it."""
    return one.sizes.limit_bytes if _waits(one, found) else one.sizes.reserve_bytes


def _strategy_of(one: Advice) -> str | None:
    """None: the one that it has, which is more than its name says."""
    its = _advice.as_it_is(one.facts)
    return None if one.decision.verdict != "change" and not its.is_exact else one.decision.strategy


def snippets_of(found: Found, kept: _snippets.Kept | None) -> dict[str, str]:
    """What to paste, by where."""
    sets = sets_of(found)
    if not sets:
        return {}
    told = {
        "python": _snippets.python(sets, kept, found.common),
        "rust": _snippets.rust(sets, found.common),
        "dask": _snippets.dask(sets),
    }
    return {where: text for where, text in told.items() if text is not None}


def as_json(path: Path, found: Found) -> dict[str, Any]:
    """All of it, for programs and for the page."""
    kept = found.kept
    return {
        "recording": os.fspath(path),
        "is_partial": found.is_partial,
        "routes_left": [name or UNNAMED for name in found.left],
        "requests": found.whole["requests"],
        "routes_beyond": found.beyond._asdict(),
        "warm_bytes": None if kept is None else kept.warm_bytes,
        "decay_seconds": None if kept is None else kept.decay_seconds,
        "warm": None if found.warm is None else _warm.as_json(found.warm),
        "together": _together_as_json(found.together),
        "at_once": None if found.at_once is None else _at_once.as_json(found.at_once),
        "rules": [*_advice.RULES, _at_once.RULE],
        "routes": [_route_as_json(one, found, kept) for one in found.advice],
        "snippets": snippets_of(found, kept),
    }


def _together_as_json(found: Together | None) -> dict[str, Any] | None:
    if found is None:
        return None
    rounds = {name: [one._asdict() for one in part] for name, part in found.rounds.items()}
    return {"rounds": rounds, "untried": [name or UNNAMED for name in found.untried], "problem": found.problem}


def _route_as_json(one: Advice, found: Found, kept: _snippets.Kept | None) -> dict[str, Any]:
    peaks = sorted(one.facts["peak_bytes"])
    quantiles = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    return {
        "route": one.route or UNNAMED,
        "requests": one.requests,
        "is_partial": one.is_partial,
        "verdict": one.decision.verdict,
        "strategy": one.decision.strategy,
        "as_it_is": _advice.as_it_is(one.facts)._asdict(),
        "reason": one.decision.reason,
        "withdrawn": one.withdrawn,
        "gain": None if one.decision.gain is None else one.decision.gain._asdict(),
        **one.sizes._asdict(),
        "reserve_bytes": _reserve_of(one, found),
        "waits": _waits(one, found),
        "warm_bytes": min(one.sizes.warm_bytes, kept.warm_bytes) if one.has_pool and kept is not None else None,
        **({} if one.has_pool else {"decay_seconds": None}),
        "mmap_threshold": one.mmap_threshold,
        "confidence": one.confidence,
        "would_change": one.would_change,
        "peak_bytes": {name: _sizes.quantile(peaks, q) for name, q in quantiles.items()} if peaks else {},
        "peak_live_bytes": one.facts["peak_live_bytes"],
        "max_concurrent": one.facts["max_concurrent"],
        "escaped_blocks": one.facts["escaped_blocks"],
        "freed_elsewhere": one.facts["freed_elsewhere"],
        "zeroed_bytes": one.facts["zeroed_bytes"],
        "total_bytes": one.facts["total_bytes"],
        "sizes": {str(size): count for size, count in one.facts["sizes"].items()},
        "rounds": {name: [part._asdict() for part in rounds] for name, rounds in one.measured.items() if rounds},
    }
