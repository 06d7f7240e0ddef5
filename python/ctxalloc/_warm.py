"""How much memory the pools of a process should keep warm: as little as costs next to nothing.

Most is kept where the next peak finds all that it needs: 1.2 times the most bytes that were alive at one time. What is
kept is missing elsewhere, though, and native memory, which no recording has, peaks at other moments. So all routes are
replayed together with less kept, too, and the least is advised that takes no more time.
"""

import statistics
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from ctxalloc import _advice
from ctxalloc._replay import Measured, Planned, Round, measured
from ctxalloc._text import size_text, tidy

PARTS: Final = (16, 4)
"""The parts of the most that are tried, the least first."""

LEAST_SAVED: Final = 8 << 20
"""What a part has to leave to others, in bytes, to be tried."""

COSTS: Final = 0.01
"""What share of the requests' time less warm memory may cost."""


class Warm(NamedTuple):
    """What to keep."""

    size: int
    most: int
    reason: str
    rounds: Measured
    """By the size, as text."""


def sizes_of(most: int) -> list[int]:
    """What is tried in place of the most, the least first."""
    parts = [max(1 << 20, most // part >> 20 << 20) for part in PARTS]
    return [size for size in parts if most - size >= LEAST_SAVED]


def tried(
    plan: Planned,
    strategies: Mapping[str, str],
    rounds: int,
    shown: Callable[[str], None],
    *,
    most: int,
    seconds: float,
    mmap_threshold: int | None = None,
) -> Warm | None:
    """What to keep of ``most``, for requests that take so many seconds; None: there is nothing to try. FailedError."""
    sizes = [*sizes_of(most), most]
    if len(sizes) == 1:
        return None
    arms = {f"{size_text(size)} warm": size for size in sizes}
    options: dict[str, Any] = {"mmap_threshold": mmap_threshold, "warm_bytes": arms, "shown": shown}
    return chosen(arms, measured(plan, dict.fromkeys(arms, strategies), rounds, **options), seconds)


def chosen(arms: Mapping[str, int], found: Measured, seconds: float) -> Warm:
    """The least that costs no more than ``COSTS``; the most is the last of the arms."""
    *less, full = arms
    share = 0.0
    for arm in less:
        share = _costs(found[arm], found[full]) / max(seconds, 1e-9)
        if share <= COSTS:
            saved = f"{tidy(share, 3):.1%} of the requests' time, which is not worth that memory"
            said = f"with {full} they save {saved if share > 0 else 'no time'}"
            return Warm(arms[arm], arms[full], said, found)
    said = f"with {less[-1]} they take {tidy(share, 3):.1%} of the requests' time more"
    return Warm(arms[full], arms[full], said, found)


def as_json(warm: Warm) -> dict[str, Any]:
    """All of it, for programs and for the page."""
    rounds = {arm: [one._asdict() for one in part] for arm, part in warm.rounds.items()}
    return {"most_bytes": warm.most, "reason": warm.reason, "rounds": rounds}


def _costs(rounds: list[Round], full: list[Round]) -> float:
    """The seconds more that these rounds take, by medians, by fastest rounds, and by page faults: whichever is most."""
    if min(len(rounds), len(full)) < _advice.MIN_ROUNDS:
        return float("inf")
    times, those = ([one.cpu for one in part] for part in (rounds, full))
    faults = statistics.median(one.faults for one in rounds) - statistics.median(one.faults for one in full)
    medians = statistics.median(times) - statistics.median(those)
    return max(medians, min(times) - min(those), faults * _advice.MIN_FAULT_SECONDS)
