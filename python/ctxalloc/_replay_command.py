"""``ctxalloc replay``: what each strategy took, as a table or as JSON."""

import json
import os
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

from ctxalloc import _advice, _gaps, _malloc, _native
from ctxalloc._ending import ENDING, StoppedError
from ctxalloc._native import _Recording
from ctxalloc._program import UsageError
from ctxalloc._replay import (
    BASE,
    FailedError,
    Measured,
    Planned,
    median_of,
    median_peak,
    opened,
    planned,
    progress_on,
    replays,
    round_of,
    waste_bytes,
)
from ctxalloc._text import counted, size_text, table


class Taught(NamedTuple):
    """Malloc's mmap threshold in bytes where it is not a new program's, and why."""

    threshold: int | None = None
    why: str | None = None


def _taught(plan: Planned, recording: _Recording, route: str | None, shown: Callable[[str], None]) -> Taught:
    """What malloc had learnt in the program. StoppedError; FailedError: a replay failed."""
    with ENDING.waiting():
        every, whole, *_ = _native._recorded_routes(recording, 1, first=route)  # noqa: SLF001 - for this
    told = whole if route is None else next(iter(every), whole)
    if not told["requests"]:  # none has ended
        return Taught()
    threshold = _malloc.mmap_threshold(plan, told, lambda text: shown(f"what malloc had learnt: {text}"))
    return Taught() if threshold is None else Taught(threshold, _advice.why_taught(told, threshold))


def replay(
    path: Path,
    strategies: Sequence[str],
    rounds: int,
    *,
    route: str | None,
    on_one_thread: bool,
    is_json: bool,
    out: TextIO,
) -> int:
    """Compares strategies and prints what each took. The exit status. UsageError: it cannot be done."""
    shown = progress_on(sys.stderr)
    recording = opened(path)
    rounds_of: Measured = {name: [] for name in strategies}
    facts: dict[str, Any] = {}
    is_partial, problem, taught = False, None, Taught()
    try:
        with planned(recording, route=route, on_one_thread=on_one_thread, shown=shown) as plan:
            if not plan.facts["requests"]:
                raise UsageError(
                    _gaps.nothing(path, "request", recording.gaps)
                    if route is None
                    else f"--route {route!r}: no request of the recording has this name, {_gaps.BUT_THESE}"
                )
            taught = _taught(plan, recording, route, shown)
            for strategy, numbers in replays(plan, strategies, rounds, mmap_threshold=taught.threshold, shown=shown):
                rounds_of[strategy].append(round_of(numbers))
                facts = numbers
    except (StoppedError, KeyboardInterrupt):
        is_partial = True
    except FailedError as error:
        problem = str(error)
        if not problem.startswith("strategy=") and str(path) not in problem:
            problem = f"{path}: {problem}"
    finally:
        shown("")
    if problem is not None and not facts:
        raise UsageError(problem)
    _gaps.warn("replay", recording.gaps)
    is_partial = is_partial or problem is not None
    if is_json:
        told = _as_json(path, facts, rounds_of, is_partial=is_partial)
        told["mmap_threshold"] = taught.threshold
        json.dump({**told, "gaps": _gaps.as_json(recording.gaps), "problem": problem}, out, indent=2)
        print(file=out)
    else:
        _print(path, facts, rounds_of, is_partial=is_partial, out=out)
        if taught.why is not None and facts:
            print(f"  {taught.why}", file=out)
    if problem is not None:
        out.flush()
        raise UsageError(f"{problem}; what was measured before is above")
    return 128 + signal.SIGINT if is_partial else 0


_FACTS: Final = (
    "events",
    "threads",
    "threads_at_once",
    "requests",
    "unfinished",
    "torn",
    "with_others",
    "left_out",
    "unordered_peaks",
    "blocks",
    "freed_elsewhere",
    "peak_live_bytes",
    "live_at_end_bytes",
    "compared",
)


def _as_json(path: Path, facts: dict[str, Any], rounds_of: Measured, *, is_partial: bool) -> dict[str, Any]:
    live = facts.get("peak_live_bytes", 0)
    return {
        "recording": os.fspath(path),
        "is_partial": is_partial,
        **{name: facts[name] for name in _FACTS if name in facts},
        "strategies": {
            name: [{**one._asdict(), "waste_bytes": waste_bytes(one, live)} for one in rounds]
            for name, rounds in rounds_of.items()
        },
    }


def _print(path: Path, facts: dict[str, Any], rounds_of: Measured, *, is_partial: bool, out: TextIO) -> None:
    done = {name: rounds for name, rounds in rounds_of.items() if rounds}
    if not done:
        print("ctxalloc replay: interrupted before the first replay was over", file=out)
        return
    fewest, most = (pick(len(rounds) for rounds in rounds_of.values()) for pick in (min, max))
    often = f"{fewest} to {most} rounds" if fewest < most else counted(most, "round")
    partial = "; interrupted: these are the rounds until then" if is_partial else ""
    threads = counted(facts["threads"], "thread")
    if facts["threads_at_once"] < facts["threads"]:
        threads += f" ({facts['threads_at_once']} at one time)"
    title = (
        f"{path.name}: {counted(facts['events'], 'event')} of {counted(facts['requests'], 'request')} on "
        f"{threads}; medians of {often}{partial}"
    )
    live = facts["peak_live_bytes"]
    base = done.get(BASE)
    rows = []
    for name, rounds in done.items():
        times = [one.time for one in rounds]
        peak, after = median_peak(rounds), median_of([one.after_bytes for one in rounds])
        time = statistics.median(times)
        ratio = "-" if base is None else f"{time / max(statistics.median(one.time for one in base), 1e-9):.2f}x"
        rows.append(
            [
                name,
                f"{time * 1000:.1f} ms",
                ratio,
                f"{max(times) / max(min(times), 1e-9):.2f}",
                f"{statistics.median(one.cpu for one in rounds) * 1000:.1f} ms",
                f"{statistics.median(one.faults for one in rounds):.0f}",
                *("-" if size is None else size_text(size) for size in (peak, after)),
                "-" if peak is None else size_text(peak - live),
            ]
        )
    heads = ["strategy", "time", "ratio", "spread", "CPU", "page faults", "RSS at most", "after", "waste"]
    table(title, heads, rows, out)
    print(
        "  spread: slowest over fastest round; RSS: what the replay added; waste: RSS at most less live bytes", file=out
    )
    print(
        f"  recorded: {size_text(live)} alive at most, {counted(facts['blocks'], 'block')}, "
        f"{facts['freed_elsewhere']} freed by another thread, {size_text(facts['live_at_end_bytes'])} never freed",
        file=out,
    )
    print(f"  {counted(facts['compared'], 'account')} compared with the recording: the same", file=out)
    for count, what in (
        (facts["unfinished"], "without an end in the recording, not compared"),
        (facts["torn"], "requests that were open where the recording has a gap, not compared"),
        (facts["with_others"], "requests whose budget others were charged to, not compared"),
        (
            facts["left_out"],
            "events left out: what they belong to is not in the recording, or they charge an ended request",
        ),
        (facts["unordered_peaks"], "peaks made by several threads, whose order is only as good as the clock"),
    ):
        if count:
            print(f"  {count} {what}", file=out)
