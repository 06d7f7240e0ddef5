"""``ctxalloc recommend``: what each route of a recording should get, measured by replays and told with its reason.

``_advice`` has the rules, ``_advised`` what is found, ``_snippets`` what to paste, ``_advice_page`` the page.
"""

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

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
from ctxalloc._advised import OTHERS, Advice, Beyond, Found, as_json
from ctxalloc._ending import ENDING, StoppedError
from ctxalloc._native import _Recording
from ctxalloc._program import UsageError
from ctxalloc._replay import FailedError, Measured, Planned, opened, planned, progress_on, replays, round_of
from ctxalloc._sites import UNNAMED
from ctxalloc._together import Together

POOL: Final = "pool"
MAX_ROUTES: Final = 1000
"""So many are advised, those with the most requests: a file may have a hundred thousand names."""


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
