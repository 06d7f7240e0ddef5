"""``ctxalloc recommend``: what each route of a recording should get, measured by replays and told with its reason.

``_advice`` has the rules, ``_snippets`` what to paste, ``_advice_page`` the page.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

from ctxalloc import _advice, _advice_page, _files, _gaps, _native, _snippets, _together, _trace
from ctxalloc._advice import Decision, Sizes
from ctxalloc._program import UsageError
from ctxalloc._replay import FailedError, Measured, StoppedError, measured, progress_on, round_of
from ctxalloc._sites import UNNAMED
from ctxalloc._text import counted, printable, size_text, tidy
from ctxalloc._together import Together

ALL_ROUTES: Final = "all routes"


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

    @property
    def busy_seconds(self) -> float:
        """The time of its requests, or of their replay where that is longer."""
        return _advice.seconds_of(self.facts, self.measured)


class Found(NamedTuple):
    """The advice for a recording."""

    advice: list[Advice]
    whole: dict[str, Any]
    """What was recorded, all routes together."""
    left: list[str]
    """Routes that were not reached before it was interrupted."""
    together: Together | None = None
    """Of all routes in one process; None where nothing is advised, or there is one route only."""

    @property
    def kept(self) -> _snippets.Kept | None:
        """What the process should keep warm, for all routes that have a pool; None where none has one."""
        pooled = [one for one in self.advice if one.decision.strategy in _advice.OVER_POOLS]
        if not pooled:
            return None
        whole = _advice.sizes_of(self.whole)
        # At most what all routes had at one time, and at most what each of these had at some time.
        return _snippets.Kept(min(whole.warm_bytes, sum(one.sizes.warm_bytes for one in pooled)), whole.decay_seconds)

    @property
    def is_partial(self) -> bool:
        """Whether it was interrupted."""
        is_tried = self.together is None or not self.together.untried or self.together.problem is not None
        return bool(self.left) or not is_tried or any(one.is_partial for one in self.advice)


def advise(
    path: Path, strategies: Sequence[str], rounds: int, shown: Callable[[str], None], only: str | None = None
) -> Found:
    """Measures each route and decides. UsageError: the recording cannot be read or replayed."""
    try:
        *routes, whole = _native._recorded_routes(path)  # noqa: SLF001 - made for this
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(str(error)) from None
    if not routes:
        raise UsageError(_gaps.nothing(path, "finished request", whole["gaps"]))
    count = len(routes)
    if only is not None:
        wanted = [route for route in routes if route["name"] == only]
        routes = wanted or [route for route in routes if not route["name"] and only == UNNAMED]
        if not routes:
            raise UsageError(f"--route {only!r}: no finished request of that name is in {path}")
    found: list[Advice] = []
    left = [route["name"] for route in routes]
    failures: dict[str, str] = {}
    for number, route in enumerate(routes):
        name = route["name"]
        prefix = f"route {number + 1} of {len(routes)}, {name or UNNAMED}: "
        its = _advice.as_it_is(route).strategy
        rounds_of: Measured = {strategy: [] for strategy in (its, *strategies)}
        decision, is_partial = _advice.needs_no_replay(route), False
        if decision is None:
            try:
                _measure(path, name, list(rounds_of), rounds, into=rounds_of, shown=_behind(prefix, shown))
            except (StoppedError, KeyboardInterrupt):
                is_partial = True
            except FailedError as error:
                if str(error).startswith("strategy="):  # there is none of that name: no route's fault
                    raise UsageError(str(error)) from None
                failures[name] = str(error)
                decision = Decision("unknown", its, f"it cannot be replayed: {error}", None)
            decision = decision or _advice.decide(route, rounds_of)
        left.remove(name)
        confidence = _advice.confidence_of(route, rounds_of)
        change = _advice.would_change(route, decision)
        sizes = _advice.sizes_of(route)
        found.append(Advice(name, route["requests"], decision, sizes, confidence, change, rounds_of, route, is_partial))
        if is_partial:
            break
    else:
        left = []
    if len(failures) == len(routes):  # no route was told apart: it is the recording, or what was asked for
        name, why = next(iter(failures.items()))
        raise UsageError(f"route {name or UNNAMED!r}: {why}")
    told = Found(found, whole, left)
    return told if told.is_partial or count == 1 else _with_all_together(path, told, routes, rounds, shown)


def _with_all_together(
    path: Path, found: Found, routes: list[dict[str, Any]], rounds: int, shown: Callable[[str], None]
) -> Found:
    """Without the advice that makes the whole process worse."""
    as_they_are = {route["name"]: _advice.as_it_is(route).strategy for route in routes}
    seconds = sum(one.busy_seconds for one in found.advice)
    wanted = []
    for one in found.advice:
        if one.decision.verdict == "change" and one.decision.gain is not None:
            saved = one.decision.gain.cpu_seconds * one.requests
            wanted.append(_together.Wanted(one.route, one.decision.strategy, saved, saved / max(seconds, 1e-9)))
    if not wanted:
        return found
    together = None
    try:
        for known in _together.tried(path, wanted, as_they_are, rounds, _behind("all routes together: ", shown)):
            together = known
    except (StoppedError, KeyboardInterrupt):
        pass
    except FailedError as error:
        together = _together.Together({}, {}, [one.route for one in wanted], str(error))
    withdrawn = {} if together is None else together.withdrawn
    return found._replace(advice=[_withdrawn(one, withdrawn.get(one.route)) for one in found.advice], together=together)


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
    path: Path,
    route: str,
    strategies: Sequence[str],
    rounds: int,
    *,
    into: Measured,
    shown: Callable[[str], None],
) -> None:
    for strategy, numbers in measured(path, strategies, rounds, route=route, shown=shown):
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
    shown = progress_on(sys.stderr)
    try:
        found = advise(path, strategies, rounds, shown, only)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        shown("")
    _gaps.warn("recommend", found.whole["gaps"])
    if is_json:
        json.dump(as_json(path, found), out, indent=2)
        print(file=out)
    else:
        _print(path, found, out)
    if target is not None:
        told = as_json(path, found)
        page = _advice_page.page(path.name, told, together_text(told))
        try:
            target.write(page.encode("utf-8", "backslashreplace"))
        except OSError as error:
            raise UsageError(f"--output {output}: {error.strerror}") from None
    return 128 + signal.SIGINT if found.is_partial else 0


def sets_of(found: Found) -> list[_snippets.Set]:
    """What each route is to get."""
    return [
        _snippets.Set(one.route, _strategy_of(one), one.sizes.limit_bytes, one.sizes.reserve_bytes)
        for one in found.advice
        if one.decision.verdict != "unknown" or one.sizes.limit_bytes is not None
    ]


def _strategy_of(one: Advice) -> str | None:
    """None: the one that it has, which is more than its name says."""
    its = _advice.as_it_is(one.facts)
    return None if one.decision.verdict != "change" and not its.is_exact else one.decision.strategy


def snippets_of(found: Found) -> dict[str, str]:
    """What to paste, by where."""
    sets = sets_of(found)
    if not sets:
        return {}
    return {"python": _snippets.python(sets, found.kept), "rust": _snippets.rust(sets), "dask": _snippets.dask(sets)}


def as_json(path: Path, found: Found) -> dict[str, Any]:
    """All of it, for programs and for the page."""
    return {
        "recording": os.fspath(path),
        "is_partial": found.is_partial,
        "routes_left": [name or UNNAMED for name in found.left],
        "requests": found.whole["requests"],
        "warm_bytes": None if found.kept is None else found.kept.warm_bytes,
        "decay_seconds": None if found.kept is None else found.kept.decay_seconds,
        "gaps": _gaps.as_json(found.whole["gaps"]),
        "together": _together_as_json(found.together),
        "rules": list(_advice.RULES),
        "routes": [_route_as_json(one) for one in found.advice],
        "snippets": snippets_of(found),
    }


def _together_as_json(found: Together | None) -> dict[str, Any] | None:
    if found is None:
        return None
    rounds = {name: [one._asdict() for one in part] for name, part in found.rounds.items()}
    return {"rounds": rounds, "untried": [name or UNNAMED for name in found.untried], "problem": found.problem}


def together_text(told: dict[str, Any]) -> str | None:
    """What all routes together take as advised. None: nothing was replayed together, or nothing is advised."""
    if told["together"] is None:
        return None
    if told["together"]["problem"] is not None:
        return (
            f"they could not be replayed together as advised, which may withdraw advice: {told['together']['problem']}"
        )
    if told["together"]["untried"]:
        return "interrupted before all routes were replayed together as advised, which may withdraw advice"
    rounds = told["together"]["rounds"]
    return _together.text_of(rounds) if rounds else "nothing that is advised for one route is good for all together"


def _route_as_json(one: Advice) -> dict[str, Any]:
    peaks = sorted(one.facts["peak_bytes"])
    has_pool = one.decision.strategy in _advice.OVER_POOLS
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
        **({} if has_pool else {"warm_bytes": None, "decay_seconds": None}),
        "confidence": one.confidence,
        "would_change": one.would_change,
        "peak_bytes": {name: _advice.quantile(peaks, q) for name, q in quantiles.items()} if peaks else {},
        "peak_live_bytes": one.facts["peak_live_bytes"],
        "max_concurrent": one.facts["max_concurrent"],
        "escaped_blocks": one.facts["escaped_blocks"],
        "freed_elsewhere": one.facts["freed_elsewhere"],
        "zeroed_bytes": one.facts["zeroed_bytes"],
        "total_bytes": one.facts["total_bytes"],
        "sizes": {str(size): count for size, count in one.facts["sizes"].items()},
        "rounds": {name: [part._asdict() for part in rounds] for name, rounds in one.measured.items() if rounds},
    }


def headline(one: dict[str, Any]) -> str:
    """The advice for a route in a few words."""
    if one["verdict"] == "unknown":
        return "not known"
    if one["verdict"] == "change":
        return f"use {one['strategy']}"
    return f"leave it as it is, recorded under {one['as_it_is']['handler']}"


def gain_text(gain: dict[str, Any]) -> str:
    """What a strategy saves, with its spread."""
    middle, low, most = (tidy(gain[f"{which}_seconds"] * 1e6, 1) for which in ("cpu", "low", "high"))
    text = f"{middle:.1f} us of CPU a request ({low:.1f} to {most:.1f})"
    text += f", {tidy(gain['share'], 3):.1%} of its time"
    text += f"; {tidy(gain['faults'], 1):.1f} page faults a request"
    if gain["peak_bytes"] is not None:
        text += f"; {size_text(gain['peak_bytes'])} of RSS at the peak"
    return f"{gain['strategy']} saves {text}"


def _print(path: Path, found: Found, out: TextIO) -> None:
    told = as_json(path, found)

    def tell(text: str) -> None:
        print(printable(text), file=out)  # names of routes are a program's own

    print(file=out)
    tell(f"{path.name}: {counted(told['requests'], 'request')} in {counted(len(told['routes']), 'route')}")
    if told["is_partial"]:
        tell("  interrupted: what follows is what was measured until then")
    for one in told["routes"]:
        partial = " (measured in part)" if one["is_partial"] else ""
        print(file=out)
        tell(f"{one['route']}: {headline(one)}{partial}")
        tell(f"  why         {one['reason']}")
        if one["gain"] is not None:
            tell(f"  measured    {gain_text(one['gain'])}")
        if one["limit_bytes"] is not None:
            sizes = f"limit_bytes={one['limit_bytes']} ({size_text(one['limit_bytes'])})"
            sizes += f", reserve_bytes={one['reserve_bytes']} ({size_text(one['reserve_bytes'])})"
            tell(f"  set         {sizes}")
        if one["warm_bytes"] is not None:
            tell(f"  keep warm   {size_text(one['warm_bytes'])} for {one['decay_seconds']:g} s")
        tell(f"  rests on    {one['confidence']}")
        for number, text in enumerate(one["would_change"]):
            tell(f"  {'changed by' if number == 0 else '':<11} {text}")
    for name in told["routes_left"]:
        print(file=out)
        tell(f"{name}: not measured")
    if told["warm_bytes"] is None:
        print(file=out)
        tell(f"{ALL_ROUTES} together: no route has a pool, so there is nothing to keep warm")
    else:
        warm = f"warm_bytes={told['warm_bytes']}, decay_seconds={told['decay_seconds']:g}"
        print(file=out)
        tell(f"{ALL_ROUTES} together: keep {warm} (ctxalloc.configure)")
    if (together := together_text(told)) is not None:
        tell(f"  {together}")
    for where, snippet in told["snippets"].items():
        print(file=out)
        tell(f"# {where}")
        for line in snippet.splitlines():
            tell(line)
    print(file=out)
    tell("rules:")
    for rule in told["rules"]:
        tell(f"  - {rule}")
