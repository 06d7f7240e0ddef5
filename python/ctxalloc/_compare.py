"""``ctxalloc run --compare``: the same program with NumPy's default handler and with another one, in turn."""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TextIO

from ctxalloc._program import Program, UsageError
from ctxalloc._run import check_handler, environment_of
from ctxalloc._text import size_text, table


class _Round(NamedTuple):
    wall: float
    user: float
    system: float
    faults: float
    peak_bytes: float


def compare(program: Program, handler: str, limit: int | None, rounds: int, out: TextIO) -> int:
    """Runs both, ``rounds`` times each; prints medians. The exit status of the first run that failed, or 0."""
    program.check()
    check_handler(handler)
    if handler == "default_allocator":
        raise UsageError("--compare compares with default_allocator; give another --handler")
    given = _input_of_each()
    if program.name == "-" and given == subprocess.DEVNULL:
        raise UsageError("--compare reads a program from standard input only where that is a file; give its path")
    limits = [] if limit is None else ["--limit", str(limit)]
    what = [*limits, *program.command()]
    found: dict[str, list[_Round]] = {"default_allocator": [], handler: []}
    signal.signal(signal.SIGTERM, _end)  # else the program would outlive us
    is_shown = out.isatty()
    for number in range(rounds):
        for name, measured in found.items():
            if is_shown:
                print(f"\r  round {number + 1} of {rounds}: {name:<20}", end="", file=out, flush=True)
            # What it prints is shown once.
            is_quiet = number > 0 or name != "default_allocator"
            try:
                status, one = _run(["--handler", name, *what], given, is_quiet=is_quiet)
            except KeyboardInterrupt:
                return 128 + signal.SIGINT
            if status != 0:
                how = f"status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
                print(f"\nctxalloc run --compare: the run with {name} ended with {how}", file=out)
                return status if status > 0 else 128 - status
            measured.append(one)
    if is_shown:
        print("\r" + " " * 60 + "\r", end="", file=out)
    _print(program, found, handler, rounds, out)
    return 0


def _run(options: list[str], given: Path | int, *, is_quiet: bool) -> tuple[int, _Round]:
    """One run in a process of its own: its status, as ``subprocess`` has it, and what it took."""
    command = [sys.executable, *_options_of_python(), "-m", "ctxalloc", "run", *options]
    stdout = subprocess.DEVNULL if is_quiet else None
    with contextlib.ExitStack() as files:
        stdin = given if isinstance(given, int) else files.enter_context(given.open("rb"))
        begun = time.perf_counter()
        child = subprocess.Popen(  # noqa: S603 - what the user asked for
            command, stdin=stdin, stdout=stdout, env=environment_of(None)
        )
        try:
            _, ended, usage = os.wait4(child.pid, 0)
        except KeyboardInterrupt:  # the terminal has told it to the child too, which says so
            child.wait()
            raise
        except SystemExit:
            child.terminate()
            child.wait()
            raise
        wall = time.perf_counter() - begun
    child.returncode = status = os.waitstatus_to_exitcode(ended)
    faults = usage.ru_minflt + usage.ru_majflt
    return status, _Round(wall, usage.ru_utime, usage.ru_stime, faults, usage.ru_maxrss * 1024)


def _options_of_python() -> list[str]:
    """What stands before the program in the command of this process: ``-O``, ``-W error``, ``-X utf8``.

    Not ``-i``: each run would wait for somebody to type.
    """
    given: list[str] = []
    words = iter(sys.orig_argv[1:])
    for word in words:
        if word.startswith("--"):
            given += [word, next(words, "")]  # --check-hash-based-pycs, the only one that can be here
            continue
        if len(word) < 2 or word[0] != "-":
            break
        flags = ""
        for at, flag in enumerate(word[1:], 2):
            if flag in "cm":
                return given + ([f"-{flags}"] if flags else [])
            if flag in "WX":
                given += [f"-{flag}", word[at:] or next(words, "")]
                break
            flags += flag.replace("i", "")
        if flags:
            given.append(f"-{flags}")
    return given


def _end(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _input_of_each() -> Path | int:
    """What each run reads: a file from its beginning, the terminal, and nothing of a pipe, which can be read once."""
    here = Path("/proc/self/fd/0")
    if here.is_file():
        return here.resolve()
    return 0 if os.isatty(0) else subprocess.DEVNULL


def _print(program: Program, found: dict[str, list[_Round]], handler: str, rounds: int, out: TextIO) -> None:
    medians = {
        name: _Round(*(statistics.median(values) for values in zip(*measured, strict=True)))
        for name, measured in found.items()
    }
    base, other = medians["default_allocator"], medians[handler]
    each = [list(zip(*measured, strict=True)) for measured in found.values()]
    # Where the runs of both overlap, the ratio may be chance.
    is_noise = [max(min(one), min(two)) <= min(max(one), max(two)) for one, two in zip(*each, strict=True)]
    lines: tuple[tuple[str, float, float, Callable[[float], str]], ...] = (
        ("time", base.wall, other.wall, lambda seconds: f"{seconds:.2f} s"),
        ("CPU, user", base.user, other.user, lambda seconds: f"{seconds:.2f} s"),
        ("CPU, system", base.system, other.system, lambda seconds: f"{seconds:.2f} s"),
        ("page faults", base.faults, other.faults, lambda faults: f"{faults:.0f}"),
        ("process at most", base.peak_bytes, other.peak_bytes, size_text),
    )
    rows = [
        [name, show(before), show(after), _ratio(before, after, is_noise=noise and rounds > 1)]
        for (name, before, after, show), noise in zip(lines, is_noise, strict=True)
    ]
    spread = [max(one.wall for one in measured) / min(one.wall for one in measured) for measured in found.values()]
    runs = "1 run" if rounds == 1 else f"{rounds} runs"
    title = f"{program.name}: medians of {runs} each, in turn; whole processes, with their start"
    table(title, ["", "default_allocator", handler, "ratio"], rows, out)
    if rounds > 1:
        print(f"  slowest over fastest run: {spread[0]:.2f} and {spread[1]:.2f}", file=out)
    if rounds > 1 and any(is_noise):
        print("  ~: some runs of the one were no larger than some of the other; this may be chance", file=out)


def _ratio(before: float, after: float, *, is_noise: bool) -> str:
    return f"{'~ ' if is_noise else ''}{after / before:.2f}x" if before else "-"
