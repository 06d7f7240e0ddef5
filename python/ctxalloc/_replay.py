"""``ctxalloc replay``: a recording under several strategies in turn, each time in a process of its own.

A fresh process is the honest way to the peak of the resident memory and to page faults: an earlier replay leaves warm
memory, grown heaps and glibc's adapted thresholds behind. Rounds are interleaved, so that what disturbs the machine
disturbs all strategies. That process reads a plan and not the recording, whose reader would leave such things behind
too (``src/tune/stored.rs``). ``src/tune`` replays; ``_recommend`` uses what is measured here too.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

from ctxalloc import _gaps, _native
from ctxalloc._program import UsageError
from ctxalloc._text import counted, printable, size_text, table

STRATEGIES: Final = ("default", "pool", "arena", "hugepages")
"""What is compared unless others are asked for."""

BASE: Final = "default"
"""What others are compared with: the C heap, which NumPy's default handler takes its memory from."""


class Round(NamedTuple):
    """What one replay took. Memory is what it added; None where the system does not say."""

    time: float
    cpu: float
    cpu_first_half: float
    faults: int
    peak_bytes: int | None
    after_bytes: int | None


Measured = dict[str, list[Round]]
"""The rounds by strategy."""


class StoppedError(Exception):
    """The user has interrupted it."""


class FailedError(Exception):
    """A replay failed: what its process said."""


class Ending:
    """SIGTERM's handler: ends this process, and with it the one that replays."""

    def __init__(self) -> None:
        self._is_held_back = False
        self._number: int | None = None

    def __call__(self, number: int, _frame: object) -> None:
        """SystemExit: it is ended."""
        self._number = number
        if not self._is_held_back:
            sys.exit(128 + number)

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """While a process begins: only once it is known can it be ended. SystemExit: this one was to be ended."""
        self._is_held_back = True
        try:
            yield
        finally:
            self._is_held_back = False
        if self._number is not None:
            sys.exit(128 + self._number)


ENDING: Final = Ending()
"""There is one process that replays at a time."""


def measured(
    path: Path,
    strategies: Sequence[str],
    rounds: int,
    *,
    route: str | None = None,
    by_route: Mapping[str, Mapping[str, str]] | None = None,
    on_one_thread: bool = False,
    shown: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The numbers of each replay, as they come: the name of its strategy, and what ``_native._replay`` says.

    ``by_route``: strategies of single routes, by a name that stands for all of them beside the default.
    StoppedError: interrupted by the user; FailedError: a replay failed.
    """
    with tempfile.TemporaryDirectory(prefix="ctxalloc-") as folder:
        plan = Path(folder, "plan")
        shown("reading the recording")
        try:
            facts = _native._plan(path, plan, route=route, on_one_thread=on_one_thread)  # noqa: SLF001 - for this
        except (OSError, ValueError, RuntimeError) as error:
            raise FailedError(str(error)) from None
        for number in range(rounds):
            # Each round in another order: nobody is always the first, or always behind the same one.
            at = number % len(strategies)
            for strategy in (*strategies[at:], *strategies[:at]):
                shown(f"round {number + 1} of {rounds}: {strategy}")
                routes = (by_route or {}).get(strategy)
                yield strategy, {**facts, **_in_a_process(path, plan, strategy if routes is None else BASE, routes)}


def _in_a_process(path: Path, plan: Path, strategy: str, by_route: Mapping[str, str] | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "ctxalloc._replay_one", strategy]
    asked = None if by_route is None else dict(by_route)
    pipe = subprocess.PIPE
    process = None
    try:
        with ENDING.held_back():
            process = subprocess.Popen(  # noqa: S603 - this program again
                [*command, os.fspath(plan)], stdin=pipe, stdout=pipe, stderr=pipe, env=_environment()
            )
        out, said = process.communicate(json.dumps(asked).encode())  # a name may be no argument: too long, or with NUL
    except BaseException as error:
        if process is not None:
            process.kill()
            process.wait()
        if isinstance(error, KeyboardInterrupt):
            raise StoppedError from None
        raise
    if process.returncode == -signal.SIGINT or process.returncode == 128 + signal.SIGINT:
        raise StoppedError
    if process.returncode != 0:
        text = said.decode("utf-8", "replace").strip()
        if text.startswith("strategy="):  # there is none of that name: no recording's fault
            raise FailedError(text)
        raise FailedError(f"{path}: {text or f'the replay with {strategy} ended with status {process.returncode}'}")
    numbers: dict[str, Any] = json.loads(out)
    return numbers


def _environment() -> dict[str, str]:
    """Of a replay: nothing of it is recorded, counted for others or preloaded, and no library starts threads."""
    left_out = ("CTXALLOC_RECORD", "CTXALLOC_HANDLER", "CTXALLOC_METRICS_DIR", "LD_PRELOAD")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {**kept, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def round_of(numbers: dict[str, Any]) -> Round:
    """The part of a replay's numbers that differs from round to round."""
    return Round(
        numbers["time_ns"] / 1e9,
        numbers["cpu_ns"] / 1e9,
        numbers["cpu_first_half_ns"] / 1e9,
        numbers["faults"],
        numbers["peak_resident_bytes"],
        numbers["resident_bytes_after"],
    )


def progress_on(out: TextIO) -> Callable[[str], None]:
    """Shows what is done now, in one line of a terminal; nothing elsewhere. An empty text clears the line."""
    if not out.isatty():
        return lambda _: None
    return lambda text: print(f"\r\x1b[K{printable(text)[:100]}", end="", file=out, flush=True)


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
    rounds_of: Measured = {name: [] for name in strategies}
    facts: dict[str, Any] = {}
    is_partial = False
    try:
        for strategy, numbers in measured(
            path, strategies, rounds, route=route, on_one_thread=on_one_thread, shown=shown
        ):
            rounds_of[strategy].append(round_of(numbers))
            facts = numbers
            if not numbers["requests"] and route is None:
                raise UsageError(_gaps.nothing(path, "request", numbers["gaps"]))
            if route is not None and not numbers["requests"]:
                raise UsageError(
                    f"--route {route!r}: no request of the recording has this name; `trace info` shows them"
                )
    except (StoppedError, KeyboardInterrupt):
        is_partial = True
    except FailedError as error:
        raise UsageError(str(error)) from None
    finally:
        shown("")
    _gaps.warn("replay", facts.get("gaps", ()))
    if is_json:
        json.dump(_as_json(path, facts, rounds_of, is_partial=is_partial), out, indent=2)
        print(file=out)
    else:
        _print(path, facts, rounds_of, is_partial=is_partial, out=out)
    return 128 + signal.SIGINT if is_partial else 0


_FACTS: Final = (
    "events",
    "threads",
    "threads_at_once",
    "requests",
    "unfinished",
    "torn",
    "left_out",
    "unordered_peaks",
    "blocks",
    "freed_elsewhere",
    "peak_live_bytes",
    "live_at_end_bytes",
    "compared",
)


def waste_bytes(one: Round, peak_live_bytes: int) -> int | None:
    """What the peak of the resident memory has beyond the most bytes alive; below zero where not all were."""
    return None if one.peak_bytes is None else one.peak_bytes - peak_live_bytes


def median_of(values: Sequence[float | None]) -> float | None:
    """The median of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _as_json(path: Path, facts: dict[str, Any], rounds_of: Measured, *, is_partial: bool) -> dict[str, Any]:
    live = facts.get("peak_live_bytes", 0)
    return {
        "recording": os.fspath(path),
        "is_partial": is_partial,
        **{name: facts[name] for name in _FACTS if name in facts},
        "gaps": _gaps.as_json(facts.get("gaps", ())),
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
        peak, after = median_of([one.peak_bytes for one in rounds]), median_of([one.after_bytes for one in rounds])
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
        (
            facts["left_out"],
            "events left out: what they belong to is not in the recording, or they charge an ended request",
        ),
        (facts["unordered_peaks"], "peaks made by several threads, whose order is only as good as the clock"),
    ):
        if count:
            print(f"  {count} {what}", file=out)
