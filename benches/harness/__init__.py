"""What the Python benches share: loops without a call in them, medians in turn, tables of ratios, where results go."""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

__all__ = ["OUT", "Loop", "Row", "keep", "loop", "machine", "medians", "rounds_asked", "row_of", "table"]

OUT: Final = Path(__file__).parents[2] / "target" / "bench"
Loop = Callable[[int], float]
"""Does something n times; nanoseconds for one."""
Row = dict[str, float]


def loop(body: str, **names: Any) -> Loop:
    """`body` n times in a function of its own, as a program has it: names are locals."""
    setup = "".join(f"    {name} = _names[{name!r}]\n" for name in names)
    lines = body.replace("\n", "\n        ")
    source = (
        f"def run(_n):\n{setup}    _r = range(_n)\n    _t = _now()\n    for _ in _r:\n        {lines}\n"
        "    return (_now() - _t) / _n * 1e9\n"
    )
    space: dict[str, Any] = {"_names": names, "_now": time.perf_counter}
    exec(source, space)  # noqa: S102 - our own text: a loop with no call of a body in it
    run: Loop = space.pop("run")  # else each would hold the other, and the arrays in between
    return run


def row_of(times: list[float]) -> Row:
    """Median and quartiles, in nanoseconds."""
    low, median, high = statistics.quantiles(times, n=4)
    return {"median_ns": median, "quarter_ns": low, "three_quarters_ns": high}


def medians(variants: dict[str, Loop], rounds: int, repeats: int) -> dict[str, Row]:
    """Each variant's median and quartiles in nanoseconds, measured in turn."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run(max(1, repeats // 10))
    for _ in range(rounds):
        for name, run in variants.items():
            times[name].append(run(repeats))
    return {name: row_of(all_times) for name, all_times in times.items()}


def table(title: str, rows: dict[str, Row], base: str) -> None:
    """Prints the rows with their ratios to `base`."""
    print(f"\n{title}\n{'':44}{'median':>12}{'quarters':>24}{'ratio':>9}")
    for name, row in rows.items():
        quarters = f"{row['quarter_ns']:.1f} .. {row['three_quarters_ns']:.1f}"
        ratio = row["median_ns"] / rows[base]["median_ns"]
        print(f"{name:44}{row['median_ns']:9.1f} ns{quarters:>24}{ratio:8.2f}x", flush=True)


def machine() -> str:
    """What it ran on, for the head of a table."""
    processor = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # not a Linux on x86
    cores = os.cpu_count()
    return f"{processor}, {cores} cores, CPython {platform.python_version()}, NumPy {np.__version__}"


def keep(name: str, numbers: dict[str, Any]) -> Path:
    """Writes the raw numbers to target/bench/NAME.json."""
    OUT.mkdir(parents=True, exist_ok=True)
    place = OUT / f"{name}.json"
    place.write_text(json.dumps({"machine": machine(), **numbers}, indent=1), encoding="utf-8")
    print(f"\nkept in {place}")
    return place


def rounds_asked(description: str | None) -> int:
    """The rounds that the command line asks for, printed with the machine."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=41, help="how often each variant has its turn")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run?")
    options = parser.parse_args()
    rounds: int = 5 if options.quick else options.rounds
    print(f"{machine()}; {rounds} rounds, medians")
    return rounds
