"""What to advise for a route: pure functions of what was recorded and measured, and the rules that are printed.

A strategy is advised only where it gains something beyond the spread of the rounds, in both halves of the recording,
and where the gain is worth it beside the time of the request. Else the advice is to leave it as it is, or, where the
numbers do not agree, that it is not known. Gains are told against what the route was recorded under (``as_it_is``).
"""

import math
import re
import statistics
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from ctxalloc._replay import BASE, Measured, Round, median_peak
from ctxalloc._sites import UNNAMED
from ctxalloc._sizes import (
    DEFAULT_DECAY,
    GAPS_IN_DECAY,
    LIMIT_OVER_PEAK,
    LONGEST_GAP,
    MIN_REQUESTS,
    halves_differ,
)
from ctxalloc._text import counted, size_text, tidy

MIN_ROUNDS: Final = 3
"""With fewer rounds of each strategy nothing is known of the spread."""
WORTH: Final = 0.02
"""What share of a request's time a gain has to be."""
LESS_MEMORY: Final = 0.1
"""By what share the peak of the resident memory must be smaller to be a reason by itself, and by how many bytes."""
LESS_MEMORY_BYTES: Final = 1 << 20
MORE_MEMORY: Final = 0.25
"""By what share, and by how many bytes, it must be larger to be a reason against."""
MORE_MEMORY_BYTES: Final = 8 << 20
PAYS: Final = 0.5
"""How large a share of memory each share of processor time pays for: half of the time, a quarter more memory."""
STEADY: Final = 1.3
"""Slowest over fastest round of the strategy that it has, above which small differences say nothing."""
HALVES: Final = 1.5
"""Larger over smaller p95 of the peaks of both halves, above which the recording does not say what is usual."""
BLOCK_SECONDS: Final = 0.5e-6
FAULT_SECONDS: Final = 1e-6
"""At most what a block, and a first touch of a page, costs: what cannot be gained need not be measured."""
MIN_FAULT_SECONDS: Final = 0.25e-6
"""What a page fault costs at least."""
PREFERENCE: Final = (BASE, "pool", "hugepages", "arena")
"""Of strategies that are as good: the one that is the simplest to run comes first."""

RULES: Final = (
    (
        "another strategy than the one that it was recorded under: only if each of its rounds takes less processor "
        f"time than each of that one's, by at least {WORTH:.0%} of the requests' time, or of what processors spent on "
        "all requests if that is less, of each half of the recording too; or if it takes "
        f"{LESS_MEMORY:.0%} less memory, and each of its rounds 1 MiB less, and no more time"
    ),
    (f"more memory: 8 MiB, or {MORE_MEMORY:.0%}, or half the share of processor time that it saves, whichever is most"),
    f"limit_bytes: {LIMIT_OVER_PEAK:g} times the p99.9 of the peaks; reserve_bytes: 1.2 times their p95",
    (
        "warm_bytes of each process, where routes have a pool: 1.2 times the most bytes alive at one time in one, or a "
        "sixteenth or a quarter of that if all together take at most 1% of the requests' time more with it; "
        f"decay: {GAPS_IN_DECAY} times the p95 of a process's gaps between requests that are not above "
        f"{LONGEST_GAP:.0f} s, at least {DEFAULT_DECAY:.0f} s; 1 s where all gaps are longer"
    ),
    f"not known: fewer than {MIN_REQUESTS} requests, or a gain that the spread of the rounds hides",
    (
        "withdrawn: all routes are replayed together, each as advised; advice is not given with which they take 5% "
        "more processor time, by medians and by fastest rounds, or with which all rounds take more than each as they "
        "are; or all hold more memory: by 8 MiB, by 5%, and by more than half the share that the routes save of the "
        "time of all, or that one of them saves for what it adds"
    ),
    (
        f"the pool for all routes: only if all together take {WORTH:.0%} of the requests' time less with it than as "
        f"advised for each, as for one route; or {LESS_MEMORY:.0%} and 1 MiB less memory and no more time"
    ),
)

Verdict: TypeAlias = Literal["change", "leave", "unknown"]


_RECORDED: Final = {
    "default": BASE,
    "default_allocator": BASE,
    "system": BASE,
    "System": BASE,
    "pool": "pool",
    "Pool over PrivatePages": "pool",
    "Pool over HugePages": "hugepages",
    "Pool over LockedPages": "locked",
    "Pool over NumaPages": "numa",
    "Arena": "arena",
    "Tracked": "tracked",
    "Guard": "guard",
    "SharedMemory": "shared_memory",
}
"""The strategy of a replay for each name that a recording has for a handler."""

OVER_POOLS: Final = ("pool", "arena", "hugepages", "tracked", "locked", "numa")
"""Strategies that keep memory warm."""


class AsItIs(NamedTuple):
    """What a route was recorded under."""

    strategy: str
    """What replays it, and what others are compared with: the C heap where no replay has its handler."""
    handler: str
    """The recording's name for it: that of most of the route's requests."""
    is_exact: bool
    """Whether all its requests had that strategy, with the options that it has by itself."""


def as_it_is(route: dict[str, Any]) -> AsItIs:
    """What the route was recorded under."""
    handlers: dict[str, int] = route.get("handlers", {})
    if not handlers:
        return AsItIs(BASE, BASE, is_exact=True)
    handler = max(handlers, key=lambda name: handlers[name])
    strategy = _replayed_as(handler)
    # Another pool of the program's own may have other options.
    is_exact = strategy is not None and len(handlers) == 1 and not handler.startswith("Pool over ")
    return AsItIs(strategy or BASE, handler, is_exact)


def _replayed_as(handler: str) -> str | None:
    """The strategy of a replay; None: no replay has it."""
    aligned = re.fullmatch(r"Aligned (\d+)", handler)
    return f"aligned{aligned[1]}" if aligned else _RECORDED.get(handler)


class Gain(NamedTuple):
    """What a strategy saves against the one that the route was recorded under. Negative: it costs."""

    strategy: str
    cpu_seconds: float
    """Of each request, by the medians."""
    low_seconds: float
    """Of each request, by the rounds that differ least."""
    high_seconds: float
    share: float
    """Of the time of the requests."""
    faults: float
    """Page faults of each request."""
    peak_bytes: float | None
    """Resident memory at the peak."""


class Decision(NamedTuple):
    """Which strategy, and why."""

    verdict: Verdict
    strategy: str
    """The one that the route was recorded under where nothing is advised."""
    reason: str
    gain: Gain | None


def needs_no_replay(route: dict[str, Any], *, is_program: bool = False) -> Decision | None:
    """The decision where it is known before anything is measured. ``is_program``: it is all that a program did."""
    requests = route["requests"]
    if is_program:
        said = (
            "it is the program, which began no request: put ctxalloc.request(name=...) around what it does again and "
            f"again, at least {MIN_REQUESTS} times, and record that"
        )
        return Decision("unknown", as_it_is(route).strategy, said, None)
    if requests < MIN_REQUESTS:
        said = f"{counted(requests, 'request')} {'says' if requests == 1 else 'say'} too little"
        said += f"; record at least {MIN_REQUESTS}"
        return Decision("unknown", as_it_is(route).strategy, said, None)
    its = as_it_is(route)
    if _replayed_as(its.handler) is None:  # it may be there to erase what goes, or to count
        said = f"it was recorded under {its.handler}, which no replay has, and what it is for no measurement says"
        return Decision("leave", its.strategy, said, None)
    bound = route["blocks"] * BLOCK_SECONDS + route["total_bytes"] / 4096 * FAULT_SECONDS
    seconds = recorded_seconds(route)
    if bound < WORTH * seconds and route["peak_live_bytes"] < LESS_MEMORY_BYTES:
        said = (
            f"its blocks can cost at most {bound / requests * 1e6:.1f} us of the {seconds / requests * 1e6:.0f} us of "
            "a request, and hold less than 1 MiB in a process, so there is nothing to gain"
        )
        return Decision("leave", its.strategy, said, None)
    return None


def decide(route: dict[str, Any], measured: Measured) -> Decision:
    """Which strategy, by what was measured of the one that it was recorded under and of others."""
    its = as_it_is(route).strategy
    base = measured.get(its, [])
    others = {name: rounds for name, rounds in measured.items() if name != its and len(rounds) >= MIN_ROUNDS}
    if len(base) < MIN_ROUNDS or not others:
        said = f"it was not measured often enough: {MIN_ROUNDS} rounds of each strategy are needed"
        if len(measured) == 1 and its in measured:
            said = f"there is nothing to compare it with: it was recorded under {its}; name others with --strategy"
        return Decision("unknown", its, said, None)
    requests, seconds = max(1, route["requests"]), seconds_of(route, measured)
    gains = {name: _gain(name, base, rounds, requests, seconds) for name, rounds in others.items()}
    good = [name for name, rounds in others.items() if _is_better(base, rounds, gains[name], seconds)]
    if good:
        best = _best(good, others)
        if halves_differ(route) > HALVES and not _agree_on_counts(base, others[best]):
            said = f"{best} may gain something, but the two halves of the recording differ in size; record for longer"
            return Decision("unknown", its, said, gains[best])
        return Decision("change", best, _why(best, gains[best], its), gains[best])
    hopes = [name for name, rounds in others.items() if _may_be_better(base, rounds, gains[name])]
    if hopes:
        best = max(hopes, key=lambda name: gains[name].share)
        said = (
            f"{best} may save {max(0, gains[best].share):.0%} of a request's time and {tidy(gains[best].faults):.0f} "
            f"page faults, but {_why_unsure(gains[best])}; measure on a quiet machine, or with more rounds"
        )
        return Decision("unknown", its, said, gains[best])
    best = max(gains, key=lambda name: gains[name].share)
    return Decision("leave", its, _why_not(its, base, others, gains, seconds), gains[best])


def _cpu(rounds: list[Round]) -> list[float]:
    return [one.cpu for one in rounds]


def seconds_of(route: dict[str, Any], measured: Measured) -> float:
    """The time of a route's requests, in seconds, as far as a processor may have spent it on them.

    A replay leaves out what the program does with its arrays; where it takes longer than the requests did, its own time
    is what can be gained from.
    """
    return max(recorded_seconds(route), replayed_seconds(route, measured), 1e-9)


def replayed_seconds(route: dict[str, Any], measured: Measured) -> float:
    """What a replay of a route as it is takes of a processor; 0 if it was not replayed."""
    base = measured.get(as_it_is(route).strategy, [])
    return statistics.median(_cpu(base)) if base else 0.0


def recorded_seconds(route: dict[str, Any]) -> float:
    """The most that processors spent on a route's requests, in seconds.

    A request that waits, or that others run beside, takes more time than that. So it is its time, or what the processes
    spent on all recorded requests together, where they say that and it is less.
    """
    duration_ns: int = route["duration_ns"]
    processor_ns: int | None = route.get("processor_ns")
    return (duration_ns if processor_ns is None else min(duration_ns, processor_ns)) / 1e9


def _gain(name: str, base: list[Round], rounds: list[Round], requests: int, seconds: float) -> Gain:
    saved = statistics.median(_cpu(base)) - statistics.median(_cpu(rounds))
    before, after = median_peak(base), median_peak(rounds)
    return Gain(
        name,
        saved / requests,
        (min(_cpu(base)) - max(_cpu(rounds))) / requests,
        (max(_cpu(base)) - min(_cpu(rounds))) / requests,
        saved / seconds,
        (statistics.median(one.faults for one in base) - statistics.median(one.faults for one in rounds)) / requests,
        None if before is None or after is None else before - after,
    )


def gain_of(name: str, base: list[Round], rounds: list[Round], requests: int, seconds: float) -> Gain | None:
    """What the strategy of these rounds saves of so many requests that take so long; None: it is not worth a change."""
    if min(len(base), len(rounds)) < MIN_ROUNDS:
        return None
    gain = _gain(name, base, rounds, max(1, requests), seconds)
    return gain if _is_better(base, rounds, gain, seconds) else None


def may_have_another(route: dict[str, Any]) -> bool:
    """Whether enough is known of its requests, and a replay has what they were recorded under."""
    return route["requests"] >= MIN_REQUESTS and _replayed_as(as_it_is(route).handler) is not None


def _is_faster(base: list[Round], rounds: list[Round], seconds: float) -> bool:
    """In every round, and by enough in both halves of the recording: what a strategy takes once is in the first."""
    return max(_cpu(rounds)) < min(_cpu(base)) and all(
        statistics.median(map(half, base)) - statistics.median(map(half, rounds)) >= WORTH * seconds / 2
        for half in (_first, _second)
    )


def _first(one: Round) -> float:
    return one.cpu_first_half


def _second(one: Round) -> float:
    return one.cpu - one.cpu_first_half


def is_larger(rounds: list[Round], than: list[Round], share: float, size: int) -> bool:
    """Whether each of these rounds takes more memory than each of those, by this share and so many bytes."""
    these, those = ([one.peak_bytes for one in part if one.peak_bytes is not None] for part in (rounds, than))
    if not these or not those:
        return False
    return min(these) > max(those) * (1 + share) and min(these) - max(those) >= size


def paid(share: float) -> float:
    """What share of memory such a share of processor time pays for."""
    return PAYS * max(0.0, share)


def _is_much_larger(rounds: list[Round], base: list[Round], gain: Gain) -> bool:
    return is_larger(rounds, base, max(MORE_MEMORY, paid(gain.share)), MORE_MEMORY_BYTES)


def _is_smaller(rounds: list[Round], base: list[Round]) -> bool:
    """Each of these rounds, and by enough in the middle: the more rounds there are, the larger is the largest one."""
    before, after = median_peak(base), median_peak(rounds)
    is_enough = before is not None and after is not None and before >= after * (1 + LESS_MEMORY)
    return is_enough and is_larger(base, rounds, 0, LESS_MEMORY_BYTES)


def _is_better(base: list[Round], rounds: list[Round], gain: Gain, seconds: float) -> bool:
    if _is_much_larger(rounds, base, gain):
        return False
    if _is_faster(base, rounds, seconds) and gain.share >= WORTH:
        return True
    is_slower = statistics.median(_cpu(rounds)) > statistics.median(_cpu(base)) * 1.05
    return _is_smaller(rounds, base) and not is_slower


def _may_be_better(base: list[Round], rounds: list[Round], gain: Gain) -> bool:
    """Whether medians, or page faults, promise what the spread does not let be known."""
    if _is_much_larger(rounds, base, gain):
        return False
    before, after = (statistics.median(one.faults for one in part) for part in (base, rounds))
    has_fewer_faults = after <= before * (1 - LESS_MEMORY)
    # The medians' share, and what the faults alone would make.
    seconds_of_a_share = gain.cpu_seconds / gain.share if gain.share else math.inf
    promise = gain.faults * MIN_FAULT_SECONDS / seconds_of_a_share
    if has_fewer_faults and max(gain.share, promise) >= WORTH:
        return True
    return gain.share >= WORTH and max(map(_spread, (base, rounds))) > STEADY


def _spread(rounds: list[Round]) -> float:
    return max(_cpu(rounds)) / max(min(_cpu(rounds)), 1e-9)


def _agree_on_counts(base: list[Round], rounds: list[Round]) -> bool:
    """Whether page faults, which noise does not touch, say the same: each round has fewer."""
    return max(one.faults for one in rounds) < min(one.faults for one in base)


def _why_unsure(gain: Gain) -> str:
    if gain.low_seconds <= 0:
        return "rounds differ by as much"
    if gain.share < WORTH:
        return f"in these rounds it saves less than {WORTH:.0%}"
    return f"it does not save {WORTH:.0%} in both halves of the recording"


def _best(good: list[str], others: Measured) -> str:
    first = min(good, key=lambda name: statistics.median(_cpu(others[name])))
    # Whose rounds overlap with those of the fastest are as good as it is.
    alike = [name for name in good if min(_cpu(others[name])) <= max(_cpu(others[first]))]
    smaller = [name for name in alike if not any(_is_smaller(others[other], others[name]) for other in alike)]
    order = {name: at for at, name in enumerate(PREFERENCE)}
    return min(smaller or alike, key=lambda name: order.get(name, len(order)))


def _why(name: str, gain: Gain, its: str) -> str:
    parts = []
    if gain.share >= WORTH and gain.low_seconds > 0:
        parts.append(f"takes {gain.cpu_seconds * 1e6:.0f} us of processor time less for a request ({gain.share:.0%})")
    if gain.faults >= 1:
        parts.append(f"has {gain.faults:.0f} page faults less for a request")
    if gain.peak_bytes is not None and gain.peak_bytes >= LESS_MEMORY_BYTES:
        parts.append(f"holds {size_text(gain.peak_bytes)} less at the peak")
    return f"{name} {', '.join(parts)} than {its}, which it was recorded under"


def _why_not(its: str, base: list[Round], others: Measured, gains: dict[str, Gain], seconds: float) -> str:
    larger = [
        name
        for name, rounds in others.items()
        if _is_much_larger(rounds, base, gains[name]) and _is_faster(base, rounds, seconds)
    ]
    if larger:
        name = max(larger, key=lambda one: gains[one].share)
        return (
            f"{name} would save {gains[name].share:.0%} of a request's time, but holds "
            f"{size_text(-(gains[name].peak_bytes or 0))} more at the peak"
        )
    best = max(gains.values(), key=lambda gain: gain.share)
    if best.share <= 0:
        return f"no strategy takes less processor time than the one that it was recorded under, {its}"
    if best.share < WORTH:
        said = f"no strategy saves {WORTH:.0%} of a request's time"
        return f"{said}: the best one, {best.strategy}, saves {tidy(best.share, 3):.1%}"
    if max(_cpu(others[best.strategy])) < min(_cpu(base)):
        return (
            f"what {best.strategy} saves it does not save in both halves of the recording: something that is done once"
        )
    return f"what {best.strategy} saves is within the spread of the rounds, and page faults say the same"


def why_taught(route: dict[str, Any], mmap_threshold: int) -> str:
    """Why malloc's mmap threshold is not a new program's (``_malloc``)."""
    return (
        f"recorded with {tidy(route['page_faults'] / route['requests']):g} page faults a request, fewer than a new "
        f"program has: replayed with malloc's mmap threshold at {size_text(mmap_threshold)}"
    )


def confidence_of(route: dict[str, Any], measured: Measured, *, mmap_threshold: int | None = None) -> str:
    """How much the advice rests on."""
    differ = halves_differ(route)
    parts = [counted(route["requests"], "request")]
    if len(route["peak_bytes"]) < 1000:
        parts.append("with fewer than 1000, the p99.9 is the largest one")
    how = "the two halves agree" if differ <= HALVES else "the two halves of the recording differ"
    parts.append(f"{how}: their p95 by a factor of {differ:.2f}")
    its = as_it_is(route)
    if not its.is_exact:
        parts.append(f"recorded under {its.handler}, replayed as {its.strategy}")
    for name, rounds in measured.items():
        if name == its.strategy and rounds:
            parts.append(f"{counted(len(rounds), 'round')} of {name}, slowest over fastest {_spread(rounds):.2f}")
    if mmap_threshold is not None:
        parts.append(why_taught(route, mmap_threshold))
    if route["refused_requests"]:
        parts.append(f"{counted(route['refused_requests'], 'request')} refused, not among the peaks")
    return "; ".join(parts)


def would_change(route: dict[str, Any], decision: Decision, *, is_withdrawn: bool = False) -> list[str]:
    """What would make the advice another one."""
    found = [
        f"a higher limit_bytes of {name or UNNAMED}, which refused {counted(times, 'time')}: raise it and record again"
        for name, times in route["refused_by"].items()
    ]
    if route["refused_by_budgets"]:
        found.append(
            "a higher limit of a budget (a tenant's, or the process's), which refused "
            f"{counted(route['refused_by_budgets'], 'time')} and is named by BudgetExceeded and metrics: raise it and "
            "record again"
        )
    if not route["name"]:
        found.append("names for these requests, which may be of several kinds: rows of routes, or request(name=...)")
    if decision.verdict == "unknown":
        found.append(f"a recording of {10 * MIN_REQUESTS} requests and more, and 10 rounds on a quiet machine")
    if decision.verdict == "change":
        times = decision.gain.share / WORTH if decision.gain else 0
        found.append(f"requests that take {times:.0f} times as long" if times >= 2 else "")
        found.append("blocks that outlive their requests for long" if not route["escaped_blocks"] else "")
    if is_withdrawn:
        found.append("a process that may hold so much more, or take so much longer: then set it by hand")
    elif decision.verdict == "leave":
        found.append("larger blocks, or more of them, in the same time")
    if route["escaped_blocks"]:
        found.append(f"if the {counted(route['escaped_blocks'], 'block')} that outlive their request did not")
    if len(route["peak_bytes"]) < 1000:
        found.append("larger requests than were recorded: 1000 requests make a p99.9")
    return [one for one in found if one]
