"""Compares CPython and ctxalloc on random programs: `run.py --programs 5000 --seed 1 --seed fresh --jobs 2`.

Ends with 0 where all sides agree, with 1 where they do not (after showing a small program on which they differ, and
the command that runs it again), with 3 where one of them hangs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import secrets
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent))

from compare import HANG_SECONDS, Comparer, Difference, Tally, differ, generated, report
from language import Node, dump, parse
from rust import RUNTIMES, RustSide, build
from selection import Bare, NumPy, Selection

CHUNK: Final = 200
SELECTIONS: Final[dict[str, type[NumPy | Bare]]] = {"contextvars": Bare, "numpy": NumPy}
"""CPython's sides."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=2000, help="how many for each seed (default: 2000)")
    parser.add_argument("--seconds", type=float, help="go on with the last seed until so much time has passed")
    parser.add_argument("--seed", action="append", help="any word; `fresh` makes one up and prints it; may be repeated")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many processes (default: cores)")
    parser.add_argument("--program", type=int, help="only this program of the seed, shown with its traces")
    parser.add_argument("--text", help="only this program, in the language of README.md, shown with its traces")
    parser.add_argument("--repeat", type=int, default=1, help="with --program or --text: how often")
    parser.add_argument("--sides", default="contextvars,numpy,current,multi,local", help="which sides to compare")
    parser.add_argument("--profile", default="dev", help="cargo's profile for the Rust interpreter (default: dev)")
    parser.add_argument("--interpreter", type=Path, help="a Rust interpreter that is built already")
    parser.add_argument("--hang-seconds", type=float, default=HANG_SECONDS, help=argparse.SUPPRESS)
    parser.add_argument("--no-shrink", action="store_true", help="show the first program that differs as it is")
    options = parser.parse_args()
    options.sides = options.sides.split(",")
    for side in options.sides:
        if side not in SELECTIONS and side not in RUNTIMES:
            parser.error(f"{side!r} is no side; there are {', '.join([*SELECTIONS, *RUNTIMES])}")
    options.seed = [secrets.token_hex(4) if seed == "fresh" else seed for seed in options.seed or ["1"]]
    if options.interpreter is None and set(options.sides) & set(RUNTIMES):
        options.interpreter = build(options.profile)
    return options


def comparer(sides: list[str], interpreter: Path | None, hang_seconds: float) -> Comparer:
    selections: list[Selection] = [SELECTIONS[side]() for side in sides if side in SELECTIONS]
    runtimes = [side for side in sides if side in RUNTIMES]
    rust = RustSide(interpreter, runtimes) if runtimes and interpreter else None
    return Comparer(selections, rust, hang_seconds)


# ---- one program ----


def show(program: Node, options: argparse.Namespace) -> int:
    """Runs one program and shows its traces."""
    with comparer(options.sides, options.interpreter, options.hang_seconds) as sides:
        all_traces = list(sides.compare([program] * options.repeat))
    bad = [traces for traces in all_traces if differ(traces)]
    print(dump(program))
    print(report(Difference(program, (bad or all_traces)[0])))
    print(f"oracle: the sides differed in {len(bad)} of {len(all_traces)} runs")
    return 1 if bad else 0


# ---- many programs, on some processes ----

_sides: Comparer | None = None


def _start(sides: list[str], interpreter: Path | None, hang_seconds: float) -> None:
    global _sides  # noqa: PLW0603
    _sides = comparer(sides, interpreter, hang_seconds)


def _run(seed: str, first: int, count: int) -> Tally:
    assert _sides is not None
    tally = _sides.run(seed, range(first, first + count))
    if _sides.rust is not None:
        tally.suspended, tally.migrated = _sides.rust.migrations()
    return tally


def chunks(options: argparse.Namespace, deadline: float | None) -> Iterator[tuple[str, int, int]]:
    for seed in options.seed:
        for first in range(0, options.programs, CHUNK):
            yield seed, first, min(CHUNK, options.programs - first)
    first = options.programs
    while deadline is not None and time.monotonic() < deadline:
        yield options.seed[-1], first, CHUNK
        first += CHUNK


def compare_all(options: argparse.Namespace) -> int:
    started = time.monotonic()
    deadline = None if options.seconds is None else started + options.seconds
    total = Tally()
    shown = started
    print(f"oracle: seeds {' '.join(options.seed)}; sides {' '.join(options.sides)}", flush=True)
    pool = concurrent.futures.ProcessPoolExecutor(
        options.jobs,
        multiprocessing.get_context("spawn"),
        _start,
        (options.sides, options.interpreter, options.hang_seconds),
    )
    with pool:
        work = chunks(options, deadline)
        running = {pool.submit(_run, *chunk) for _, chunk in zip(range(2 * options.jobs), work, strict=False)}
        try:
            while running and not total.differences:
                done, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    total.add(future.result())
                    running |= {pool.submit(_run, *chunk) for _, chunk in zip(range(1), work, strict=False)}
                if time.monotonic() - shown > 15:
                    shown = time.monotonic()
                    print(f"oracle: {total.programs} programs, {total.programs / (shown - started):.0f}/s", flush=True)
        except concurrent.futures.process.BrokenProcessPool:
            print("oracle: a process ended: it says above which program hung it, or it crashed", file=sys.stderr)
            return 3
        finally:
            for future in running:
                future.cancel()
    elapsed = time.monotonic() - started
    if total.differences:
        return explain(min(total.differences, key=lambda found: found.number), total, options)
    migrated = ""
    if total.suspended:
        migrated = f"; {100 * total.migrated / total.suspended:.0f} % of the yields moved their task to another worker"
    print(
        f"oracle: {total.programs} programs ({total.steps} steps) agree on {len(options.sides)} sides, "
        f"in {elapsed:.1f} s: {total.programs / elapsed:.0f} programs/s{migrated}"
    )
    return 0


def explain(found: Difference, total: Tally, options: argparse.Namespace) -> int:
    """Shows a difference, small, and how to run it again."""
    print(f"oracle: DIFFERENCE in program {found.number} of seed {found.seed}, after {total.programs} programs")
    small = found
    if not options.no_shrink:
        with comparer(options.sides, options.interpreter, options.hang_seconds) as sides:
            small = sides.shrink(found)
    print(report(small))
    script = f"{Path(sys.executable)} {Path(__file__)}"
    repeat = "" if generated(found.seed, found.number) == small.program else " --repeat 100"
    print("The program of the generator:")
    print(f"  {script} --seed {found.seed} --program {found.number}")
    print("This one:")
    print(f"  {script}{repeat} --text {shlex.quote(dump(small.program))}")
    return 1


def main() -> int:
    options = arguments()
    if options.text is not None:
        return show(parse(options.text), options)
    if options.program is not None:
        return show(generated(options.seed[0], options.program), options)
    return compare_all(options)


if __name__ == "__main__":
    sys.exit(main())
