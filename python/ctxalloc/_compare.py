"""``ctxalloc run --compare``: the same program with NumPy's default handler and with another one, in turn."""

import os
import statistics
import subprocess
import sys
import time
from typing import NamedTuple, TextIO

from ctxalloc._run import Program, UsageError, check_handler, environment_of
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
    limits = [] if limit is None else ["--limit", str(limit)]
    target = ["-m", program.name] if program.is_module else [program.name]
    found: dict[str, list[_Round]] = {"default_allocator": [], handler: []}
    is_shown = out.isatty()
    for number in range(rounds):
        for name, measured in found.items():
            if is_shown:
                print(f"\r  round {number + 1} of {rounds}: {name:<20}", end="", file=out, flush=True)
            command = [sys.executable, "-m", "ctxalloc", "run", "--handler", name, *limits, *target, *program.arguments]
            begun = time.perf_counter()
            # What it prints is shown once.
            quiet = None if number == 0 and name == "default_allocator" else subprocess.DEVNULL
            child = subprocess.Popen(command, stdout=quiet, env=environment_of(None))  # noqa: S603 - what the user asked for
            _, ended, usage = os.wait4(child.pid, 0)
            wall = time.perf_counter() - begun
            child.returncode = status = os.waitstatus_to_exitcode(ended)
            if status != 0:
                print(f"\nctxalloc run --compare: the run with {name} ended with status {status}", file=out)
                return status if status > 0 else 128 - status
            measured.append(
                _Round(wall, usage.ru_utime, usage.ru_stime, usage.ru_minflt + usage.ru_majflt, usage.ru_maxrss * 1024)
            )
    if is_shown:
        print("\r" + " " * 60 + "\r", end="", file=out)
    _print(program, found, handler, rounds, out)
    return 0


def _print(program: Program, found: dict[str, list[_Round]], handler: str, rounds: int, out: TextIO) -> None:
    medians = {
        name: _Round(*(statistics.median(values) for values in zip(*measured, strict=True)))
        for name, measured in found.items()
    }
    base, other = medians["default_allocator"], medians[handler]
    lines = (
        ("time", base.wall, other.wall, lambda seconds: f"{seconds:.2f} s"),
        ("CPU, user", base.user, other.user, lambda seconds: f"{seconds:.2f} s"),
        ("CPU, system", base.system, other.system, lambda seconds: f"{seconds:.2f} s"),
        ("page faults", base.faults, other.faults, lambda faults: f"{faults:.0f}"),
        ("process at most", base.peak_bytes, other.peak_bytes, size_text),
    )
    rows = [
        [name, show(before), show(after), f"{after / before:.2f}x" if before else "-"]
        for name, before, after, show in lines
    ]
    spread = [max(one.wall for one in measured) / min(one.wall for one in measured) for measured in found.values()]
    title = f"{program.name}: medians of {rounds} runs each, in turn; whole processes, with their start"
    table(title, ["", "default_allocator", handler, "ratio"], rows, out)
    if rounds > 1:
        print(f"  slowest over fastest run: {spread[0]:.2f} and {spread[1]:.2f}", file=out)
