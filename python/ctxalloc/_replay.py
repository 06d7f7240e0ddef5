"""``ctxalloc replay``: a recording under several strategies in turn, each time in a process of its own.

A fresh process is the honest way to the peak of the resident memory and to page faults: an earlier replay leaves warm
memory, grown heaps and glibc's adapted thresholds behind. Rounds are interleaved, so that what disturbs the machine
disturbs all strategies. That process reads a plan and not the recording, whose reader would leave such things behind
too (``src/tune/stored.rs``). ``src/tune`` replays; ``_recommend`` uses what is measured here too.
"""

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

from ctxalloc import _native
from ctxalloc._ending import ENDING, StoppedError
from ctxalloc._native import _Recording
from ctxalloc._program import UsageError
from ctxalloc._text import printable, size_text

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


class FailedError(Exception):
    """A replay failed: what its process said."""


def opened(path: Path) -> _Recording:
    """The recording, which stays as it is now: its files stay open, and what comes later is not read. UsageError."""
    try:
        with ENDING.waiting():
            return _Recording(path)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None


class Planned(NamedTuple):
    """What of a recording is replayed."""

    path: Path
    facts: dict[str, Any]


@contextlib.contextmanager
def planned(
    recording: _Recording,
    *,
    route: str | None = None,
    on_one_thread: bool = False,
    shown: Callable[[str], None] = lambda _: None,
) -> Iterator[Planned]:
    """Reads the recording, once for all replays within. StoppedError; FailedError: it cannot be replayed."""
    with _folder() as folder:
        path = folder / "plan"
        shown("reading the recording")
        try:
            with ENDING.waiting():
                facts = _native._plan(  # noqa: SLF001 - for this
                    recording, path, route=route, on_one_thread=on_one_thread
                )
        except (OSError, ValueError, RuntimeError) as error:
            raise FailedError(str(error)) from None
        _check_memory(facts["peak_live_bytes"])
        yield Planned(path, facts)


def replays(
    plan: Planned,
    strategies: Sequence[str],
    rounds: int,
    *,
    by_route: Mapping[str, Mapping[str, str]] | None = None,
    mmap_threshold: int | None = None,
    warm_bytes: Mapping[str, int] | None = None,
    shown: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The numbers of each replay, as they come: the name of its strategy, and what ``_native._replay`` says.

    ``by_route``: strategies of single routes, by a name that stands for all of them beside the default.
    ``mmap_threshold``: that of malloc, in bytes, where blocks that went have taught it; None: as a new program has it.
    ``warm_bytes``: what pools keep, by the same names; else as they do.
    StoppedError: interrupted by the user; FailedError: a replay failed.
    """
    for number in range(rounds):
        # Each round in another order: nobody is always the first, or always behind the same one.
        at = number % len(strategies)
        for strategy in (*strategies[at:], *strategies[:at]):
            shown(f"round {number + 1} of {rounds}: {strategy}")
            routes = (by_route or {}).get(strategy)
            base = strategy if routes is None else BASE
            env = _environment(mmap_threshold, (warm_bytes or {}).get(strategy))
            yield strategy, {**plan.facts, **_in_a_process(plan.path, base, routes, env)}


def measured(
    plan: Planned,
    arms: Mapping[str, Mapping[str, str]],
    rounds: int,
    *,
    mmap_threshold: int | None = None,
    warm_bytes: Mapping[str, int] | None = None,
    shown: Callable[[str], None] = lambda _: None,
) -> Measured:
    """All rounds of these strategies of single routes, as ``replays`` has them. StoppedError; FailedError."""
    found: Measured = {arm: [] for arm in arms}
    options: dict[str, Any] = {"mmap_threshold": mmap_threshold, "warm_bytes": warm_bytes, "shown": shown}
    for arm, numbers in replays(plan, list(arms), rounds, by_route=arms, **options):
        found[arm].append(round_of(numbers))
    return found


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A new folder, which is gone in the end. FailedError: there is none."""
    try:
        made = tempfile.mkdtemp(prefix="ctxalloc-")
    except OSError as error:
        why = error.strerror or str(error)
        raise FailedError(f"there is no folder for the plan of a replay: {why}; name one with TMPDIR") from None
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _check_memory(peak_live_bytes: int) -> None:
    """FailedError: a replay would take more memory than there is, and other programs with it."""
    known = [size for size in _native._system_limits("/")[:2] if size is not None]  # noqa: SLF001 - made for this
    if known and peak_live_bytes > min(known):
        live, most = size_text(peak_live_bytes), size_text(min(known))
        said = f"{live} of its blocks are alive at one time, and this machine, or its control group, has {most}"
        raise FailedError(f"{said}: replay single routes, or on a larger machine")


def _in_a_process(
    plan: Path, strategy: str, by_route: Mapping[str, str] | None, env: Mapping[str, str]
) -> dict[str, Any]:
    command = [sys.executable, "-m", "ctxalloc._replay_one", strategy]
    asked = None if by_route is None else dict(by_route)
    pipe = subprocess.PIPE
    ENDING.check()
    try:
        process = subprocess.Popen(  # noqa: S603 - this program again
            [*command, os.fspath(plan)], stdin=pipe, stdout=pipe, stderr=pipe, env=env
        )
    except OSError as error:
        raise FailedError(f"no process can be started for a replay: {error.strerror}") from None
    try:
        with ENDING.waiting():
            # A name may be no argument: too long, or with NUL.
            out, said = process.communicate(json.dumps(asked).encode())
    except BaseException as error:
        process.kill()
        process.wait()
        if isinstance(error, KeyboardInterrupt):
            raise StoppedError from None
        raise
    status = process.returncode
    if status in (-signal.SIGINT, 128 + signal.SIGINT):
        raise StoppedError
    if status == 0:
        with contextlib.suppress(ValueError, IndexError):
            numbers: dict[str, Any] = json.loads(out.splitlines()[-1])  # before it whatever Python's own site prints
            return numbers
    text = said.decode("utf-8", "replace").strip()
    if not text:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        text = f"the replay with {strategy} {how}"
        if status == -signal.SIGKILL:
            text += ": it may have taken more memory than there is"
    raise FailedError(text)


def _environment(mmap_threshold: int | None, warm_bytes: int | None) -> dict[str, str]:
    """Of a replay: nothing of it is recorded, counted for others or preloaded, and no library starts threads."""
    left_out = ("CTXALLOC_RECORD", "CTXALLOC_HANDLER", "CTXALLOC_METRICS_DIR", "LD_PRELOAD")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    malloc = {}
    if mmap_threshold is not None:  # glibc sets the second to twice the first; other systems read neither
        malloc = {
            "MALLOC_MMAP_THRESHOLD_": str(mmap_threshold),
            "MALLOC_TRIM_THRESHOLD_": str(2 * mmap_threshold),
        }
    warm = {} if warm_bytes is None else {"CTXALLOC_WARM_BYTES": str(warm_bytes)}
    return {**kept, **malloc, **warm, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


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


SECONDS_BETWEEN_LINES: Final = 10.0
"""How often progress is told where there is no terminal."""


def progress_on(out: TextIO | None) -> Callable[[str], None]:
    """Shows what is done now: in one line of a terminal; elsewhere in a line of its own every ten seconds.

    An empty text clears the line.
    """
    if out is None:
        return lambda _: None
    is_terminal, told = out.isatty(), time.monotonic()

    def shown(text: str) -> None:
        nonlocal told
        with contextlib.suppress(OSError):  # it is gone, or full
            if is_terminal:
                print(f"\r\x1b[K{printable(text)[:100]}", end="", file=out, flush=True)
            elif text and time.monotonic() - told >= SECONDS_BETWEEN_LINES:
                told = time.monotonic()
                print(f"ctxalloc: {printable(text)}", file=out, flush=True)

    return shown


def waste_bytes(one: Round, peak_live_bytes: int) -> int | None:
    """What the peak of the resident memory has beyond the most bytes alive; below zero where not all were."""
    return None if one.peak_bytes is None else one.peak_bytes - peak_live_bytes


def median_peak(rounds: Sequence[Round]) -> float | None:
    """The median of the resident memory at the peak, in bytes; None where no round says it."""
    return median_of([one.peak_bytes for one in rounds])


def median_of(values: Sequence[float | None]) -> float | None:
    """The median of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
