"""``ctxalloc recommend``: what each route of a recording should get, measured by replays and told with its reason.

``_advice`` has the rules, ``_snippets`` what to paste, ``_advice_page`` the page.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

from ctxalloc import (
    _advice,
    _advice_page,
    _advice_text,
    _at_once,
    _files,
    _gaps,
    _malloc,
    _native,
    _sizes,
    _snippets,
    _together,
    _trace,
    _warm,
)
from ctxalloc._advice import Decision
from ctxalloc._ending import ENDING, StoppedError
from ctxalloc._native import _Recording
from ctxalloc._program import UsageError
from ctxalloc._replay import FailedError, Measured, Planned, opened, planned, progress_on, replays, round_of
from ctxalloc._sites import UNNAMED
from ctxalloc._sizes import Sizes
from ctxalloc._together import Together

POOL: Final = "pool"
OTHERS: Final = "(other)"
"""What a recording calls the requests whose names it has no room for: no terms suit all of them."""
MAX_ROUTES: Final = 1000
"""So many are advised, those with the most requests: a file may have a hundred thousand names."""


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
    """What is not advised, since there are ``MAX_ROUTES`` with more requests."""

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


def advise(
    path: Path,
    strategies: Sequence[str],
    rounds: int,
    shown: Callable[[str], None],
    recording: _Recording,
    *,
    only: str | None,
) -> Found:
    """Measures each route and decides. UsageError: the recording cannot be read or replayed. StoppedError."""
    shown("reading the recording")
    try:
        with ENDING.waiting():
            found_routes = _native._recorded_routes(recording, MAX_ROUTES, first=only)  # noqa: SLF001 - for this
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    every, whole, *beyond = found_routes
    for route in every:
        route["processor_ns"] = whole["processor_ns"]
    if not whole["requests"]:
        raise UsageError(_gaps.nothing(path, "finished request", recording.gaps))
    routes = every if only is None else [one for one in every[:1] if (one["name"] or UNNAMED) == (only or UNNAMED)]
    if not routes:
        raise UsageError(f"--route {only!r}: no finished request of that name is in {path}, {_gaps.BUT_THESE}")
    found: list[Advice] = []
    failures: dict[str, str] = {}
    for number, route in enumerate(routes):
        name = route["name"]
        prefix = f"route {number + 1} of {len(routes)}, {name or UNNAMED}: "
        its = _advice.as_it_is(route).strategy
        rounds_of: Measured = {strategy: [] for strategy in (its, *strategies)}
        is_program = recording.has_program and whole["requests"] == 1
        decision, is_partial, threshold = _advice.needs_no_replay(route, is_program=is_program), False, None
        if decision is None:
            try:
                with planned(recording, route=name, shown=_behind(prefix, shown)) as plan:
                    threshold = _malloc.mmap_threshold(plan, route, _behind(prefix, shown))
                    _measure(plan, rounds, threshold, into=rounds_of, shown=_behind(prefix, shown))
            except (StoppedError, KeyboardInterrupt):
                is_partial = True
            except FailedError as error:
                if str(error).startswith("strategy="):  # there is none of that name: no route's fault
                    raise UsageError(str(error)) from None
                failures[name] = str(error)
                decision = Decision("unknown", its, f"it cannot be replayed: {error}", None)
            decision = decision or _advice.decide(route, rounds_of)
        confidence = _advice.confidence_of(route, rounds_of, mmap_threshold=threshold)
        change = _advice.would_change(route, decision)
        sizes = _sizes.sizes_of(route)
        facts = (route["requests"], decision, sizes, confidence, change, rounds_of, route, is_partial)
        found.append(Advice(name, *facts, mmap_threshold=threshold, is_failed=name in failures))
        if is_partial:
            break
    if len(failures) == len(routes):  # no route was told apart: it is the recording, or what was asked for
        name, why = next(iter(failures.items()))
        raise UsageError(f"route {name or UNNAMED!r}: {why}")
    left = [route["name"] for route in routes[len(found) :]]
    told = Found(found, whole, left, Beyond(*beyond) if only is None else Beyond(0, 0))
    with _Plans(recording) as plans:
        if not told.is_partial and only is None:
            told = told._replace(at_once=_at_once_of(recording, told, every))
        if not told.is_partial and len(every) > 1:
            tries_pool = POOL in strategies and only is None
            told = _with_all_together(plans, told, every, rounds, shown, tries_pool=tries_pool)
        return told if told.is_partial else _with_least_warm(plans, told, routes, rounds, shown)


def _at_once_of(recording: _Recording, found: Found, routes: list[dict[str, Any]]) -> _at_once.AtOnce | None:
    header = _trace.header_of(recording)
    is_complete = header.one_in == header.highest_one_in == 1 and not header.missing_requests
    advised = {one.route: one for one in found.advice if not one.is_failed and _snippets.is_pattern(one.route)}
    sized = [
        _at_once.Sized(facts, advised[name].sizes.limit_bytes if (name := facts["name"]) in advised else None)
        for facts in routes
    ]
    return _at_once.advised(found.whole, sized, header.cores, is_complete=is_complete)


class _Plans(contextlib.ExitStack):
    """What is replayed of a whole process: planned once, when it is first needed."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self.recording = recording
        self.known: dict[str | None, tuple[Planned, int | None]] = {}

    def of(
        self, facts: dict[str, Any], shown: Callable[[str], None], *, route: str | None = None
    ) -> tuple[Planned, int | None]:
        """The plan of a route or of all, and what malloc had learnt there. StoppedError; FailedError: there is none."""
        if route not in self.known:
            plan = self.enter_context(planned(self.recording, route=route, shown=shown))
            self.known[route] = plan, _malloc.mmap_threshold(plan, facts, shown)
        return self.known[route]


def _with_all_together(
    plans: _Plans,
    found: Found,
    routes: list[dict[str, Any]],
    rounds: int,
    shown: Callable[[str], None],
    *,
    tries_pool: bool,
) -> Found:
    """Without the advice that makes the whole process worse; the pool for all, where that makes it better."""
    as_they_are, seconds = _as_they_are(found, routes), _seconds(found, routes)
    wanted = []
    for one in found.advice:
        if one.decision.verdict == "change" and one.decision.gain is not None:
            saved = one.decision.gain.cpu_seconds * one.requests
            wanted.append(_together.Wanted(one.route, one.decision.strategy, saved, saved / max(seconds, 1e-9)))
    pooled = [one.route for one in found.advice if _may_have_pool(one)]
    if not tries_pool or _advice.needs_no_replay(found.whole) is not None:
        pooled = []
    if not wanted and all(as_they_are[route] == POOL for route in pooled):
        return found
    together, everywhere = Together({}, {}, [one.route for one in wanted]), None
    try:
        told_of = _behind("all routes together: ", shown)
        plan, threshold = plans.of(found.whole, told_of)
        if wanted:
            for known in _together.tried(plan, wanted, as_they_are, rounds, told_of, mmap_threshold=threshold):
                together = known
        kept = {one.route: one.strategy for one in wanted if one.route not in together.withdrawn}
        if any({**as_they_are, **kept}[route] != POOL for route in pooled):
            asked = _together.Asked(POOL, pooled, kept, found.whole["requests"], seconds)
            together = together._replace(untried=pooled)
            # Whoever cannot be replayed with it is not advised it.
            with contextlib.suppress(FailedError):
                everywhere = _together.everywhere(plan, asked, as_they_are, rounds, told_of, mmap_threshold=threshold)
            together = together._replace(untried=[])
    except (StoppedError, KeyboardInterrupt):
        pass
    except FailedError as error:
        together = Together({}, {}, [one.route for one in wanted], str(error))
    if everywhere is not None:
        advice = [_with_pool(one, everywhere.reason) if one.route in pooled else one for one in found.advice]
        return found._replace(advice=advice, together=Together(everywhere.rounds, {}, []))
    advice = [_withdrawn(one, together.withdrawn.get(one.route)) for one in found.advice]
    is_told = wanted or together.untried or together.problem is not None
    return found._replace(advice=advice, together=together if is_told else None)


def _as_they_are(found: Found, routes: list[dict[str, Any]]) -> dict[str, str]:
    # A program too, which has the routes inside of it.
    return {route["name"]: _advice.as_it_is(route).strategy for route in (*found.whole["programs"], *routes)}


def _seconds(found: Found, routes: list[dict[str, Any]]) -> float:
    """What all requests take."""
    told = {one.route for one in found.advice}
    seconds = sum(one.busy_seconds for one in found.advice)
    seconds += sum(_advice.recorded_seconds(route) for route in routes if route["name"] not in told)
    replayed = sum(_advice.replayed_seconds(one.facts, one.measured) for one in found.advice)
    return min(seconds, max(_advice.recorded_seconds(found.whole), replayed))


def _with_least_warm(
    plans: _Plans, found: Found, routes: list[dict[str, Any]], rounds: int, shown: Callable[[str], None]
) -> Found:
    """With as little kept warm as costs next to nothing. ``routes``: all, or the one that was asked for."""
    kept = found.kept
    if kept is None or rounds < _advice.MIN_ROUNDS or not _warm.sizes_of(kept.warm_bytes):
        return found
    changed = {one.route: one.decision.strategy for one in found.advice if one.decision.verdict == "change"}
    strategies, told_of = {**_as_they_are(found, routes), **changed}, _behind("how much to keep warm: ", shown)
    facts, route = (found.whole, None) if len(routes) > 1 else (routes[0], routes[0]["name"])
    seconds = _seconds(found, routes)
    try:
        plan, threshold = plans.of(facts, told_of, route=route)
        options: dict[str, Any] = {"most": kept.warm_bytes, "seconds": seconds, "mmap_threshold": threshold}
        return found._replace(warm=_warm.tried(plan, strategies, rounds, told_of, **options))
    except (StoppedError, KeyboardInterrupt):
        return found._replace(is_interrupted=True)
    except FailedError:  # all that may be needed is kept
        return found


def _may_have_pool(one: Advice) -> bool:
    return not one.is_failed and one.route != OTHERS and _advice.may_have_another(one.facts)


def _with_pool(one: Advice, why: str) -> Advice:
    """As all routes have it."""
    gain = one.decision.gain
    decision = Decision("change", POOL, why, gain if gain is not None and gain.strategy == POOL else None)
    if one.decision.verdict == "change" and one.decision.strategy == POOL:
        decision = one.decision
    elif _advice.as_it_is(one.facts).strategy == POOL:
        decision = one.decision._replace(verdict="leave", strategy=POOL)
    return one._replace(decision=decision, would_change=_advice.would_change(one.facts, decision))


def _withdrawn(one: Advice, why: str | None) -> Advice:
    if why is None:
        return one
    its = _advice.as_it_is(one.facts).strategy
    decision = one.decision._replace(verdict="leave", strategy=its, reason=why)
    change = _advice.would_change(one.facts, decision, is_withdrawn=True)
    return one._replace(decision=decision, would_change=change, withdrawn=one.decision.strategy)


def _behind(prefix: str, shown: Callable[[str], None]) -> Callable[[str], None]:
    return lambda text: shown(prefix + text)


def _measure(
    plan: Planned,
    rounds: int,
    mmap_threshold: int | None,
    *,
    into: Measured,
    shown: Callable[[str], None],
) -> None:
    for strategy, numbers in replays(plan, list(into), rounds, mmap_threshold=mmap_threshold, shown=shown):
        into[strategy].append(round_of(numbers))


def recommend(
    path: Path,
    strategies: Sequence[str],
    rounds: int,
    *,
    only: str | None,
    is_json: bool,
    output: Path | None,
    out: TextIO,
) -> int:
    """Prints the advice. The exit status. UsageError: it cannot be given."""
    target = None
    if output is not None:
        _trace.check_output(output)
        try:
            target = _files.target_of(output)
        except OSError as error:
            raise UsageError(f"--output {output}: no file can be written there ({error.strerror})") from None
    is_page_only = target is not None and target.is_standard_output
    if is_page_only and is_json:
        raise UsageError("--json goes to standard output, where --output has the page go: give that a file")
    recording = opened(path)
    shown = progress_on(sys.stderr)
    try:
        found = advise(path, strategies, rounds, shown, recording, only=only)
    except (StoppedError, KeyboardInterrupt):
        return 128 + signal.SIGINT
    finally:
        shown("")
    _gaps.warn("recommend", recording.gaps)
    told = {**as_json(path, found), "gaps": _gaps.as_json(recording.gaps)}
    # The page before the text: standard output may be full, or nobody's, and what was measured took long.
    problem = None if target is None else _page_problem(target, path, told)
    if is_json:
        json.dump(told, out, indent=2)
        print(file=out)
    elif not is_page_only or problem is not None:
        _advice_text.tell_all(path, told, out)
    if problem is not None:
        out.flush()
        raise UsageError(f"--output {output}: {problem}; what it would say is above")
    return 128 + signal.SIGINT if found.is_partial else 0


def _page_problem(target: _files.Target, path: Path, told: dict[str, Any]) -> str | None:
    """Writes the page. Why it cannot be written, where it cannot."""
    page = _advice_page.page(path.name, told, _advice_text.together_text(told), _advice_text.beyond_text(told))
    try:
        target.write(page.encode("utf-8", "backslashreplace"))
    except OSError as error:
        return error.strerror or str(error)
    return None


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
