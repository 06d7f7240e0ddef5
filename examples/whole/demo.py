"""``make demo-whole``: the same load on a service whose requests count their arrays, and one whose count everything.

Eight seconds of load, then three of rest, each time. Exit status 0: where everything is counted the patient tenant was
always served, the greedy one was refused now and then and served else, and memory stayed within the service's budget
and what the process had before; 1: otherwise.
"""

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import httpx
import matplotlib as mpl
from matplotlib.figure import Figure

from ctxalloc import MiB

from .app import SERVICE
from .load import Run, client, step, watch

NAMES: Final = {"arrays": "arrays counted", "whole": "everything counted"}
COLOURS: Final = {"arrays": "#d0342c", "whole": "#2f6f9f"}
LIMIT_MIB: Final = (SERVICE.limit_bytes or 0) / MiB
REFUSALS: Final = frozenset({413, 503})


def environment(name: str) -> dict[str, str]:
    """Of the service's process: ``whole`` needs the library before malloc."""
    if name != "whole":
        return dict(os.environ)
    made = subprocess.run([sys.executable, "-m", "ctxalloc", "whole"], capture_output=True, text=True, check=True)
    return {**os.environ, "LD_PRELOAD": made.stdout.strip(), "CTXALLOC_WHOLE": "1"}


@contextlib.asynccontextmanager
async def started(name: str) -> AsyncIterator[tuple[int, str]]:
    """The service's process and address, while the context lasts."""
    command = [sys.executable, "-m", "examples.whole.app", name]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=Path(__file__).parents[2], env=environment(name), stdin=PIPE, stdout=PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()
        if not line:
            raise RuntimeError("the service ended before it listened")
        yield int(line[0]), line[1]
    finally:
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 5)
        if process.returncode is None:
            process.kill()
            await process.wait()


async def measured(name: str, seconds: float, rest: float) -> Run:
    """One service under the load, and for a while after it."""
    run = Run(name)
    async with (
        started(name) as (process, address),
        httpx.AsyncClient(base_url=address, timeout=120, trust_env=False) as http,
    ):
        for path in ("/parse/small", "/decode/small", "/read/small"):
            await http.post(path, headers={"tenant": "patient"})
        begun = time.monotonic()
        watching = asyncio.create_task(watch(run, process, begun))
        until = begun + seconds
        async with asyncio.TaskGroup() as group:
            for path in ("/parse/small", "/decode/small", "/read/small"):
                group.create_task(client(run, http, "patient", path, until))
            for path in ("/parse/large", "/decode/large", "/read/large"):
                for _ in range(4):
                    group.create_task(client(run, http, "greedy", path, until))
        run.load_s = time.monotonic() - begun
        await asyncio.sleep(rest)
        run.peaks = (await http.get("/peaks")).json()
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    return run


def refused(run: Run, tenant: str) -> int:
    """How many answers said that there was no memory."""
    return sum(count for status, count in run.statuses[tenant].items() if status in REFUSALS)


def draw(path: Path, runs: list[Run]) -> None:
    """Write the picture to ``path`` (PNG)."""
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10}):
        figure = Figure(figsize=(12, 4.6), dpi=110, layout="constrained")
        memory, served = figure.subplots(1, 2, width_ratios=[2, 1])
        for run in runs:
            memory.plot(*zip(*run.memory, strict=True), color=COLOURS[run.name], label=NAMES[run.name])
            memory.axvline(run.load_s, color=COLOURS[run.name], linewidth=0.6, linestyle=":")
        level = runs[-1].memory[0][1] + LIMIT_MIB
        memory.axhline(level, color="#5f6b78", linewidth=0.8, linestyle="--")
        memory.text(0, level, f"the service's budget, {LIMIT_MIB:.0f} MiB", va="bottom", color="#5f6b78")
        memory.set(title="Memory of the process", xlabel="seconds; dotted: the load ends", ylabel="MiB", ylim=(0, None))
        memory.legend(frameon=False)
        labels = [f"{tenant}\n{NAMES[run.name].split()[0]}" for run in runs for tenant in run.statuses]
        ok = [run.statuses[tenant][200] for run in runs for tenant in run.statuses]
        no = [refused(run, tenant) for run in runs for tenant in run.statuses]
        served.bar(labels, ok, color="#4f9d69", label="served")
        served.bar(labels, no, bottom=ok, color="#e0a13a", label="refused, 503 or 413")
        served.set_title("Answers")
        served.tick_params(axis="x", labelsize=8)
        served.set_ylim(top=1.25 * max(map(sum, zip(ok, no, strict=True))))
        served.legend(frameon=False)
        figure.savefig(path)


def table(runs: list[Run]) -> str:
    """Who was served, and what memory it took."""
    lines = [f"{'':22}{'tenant':>10}{'served':>9}{'refused':>9}{'memory at most':>18}"]
    for run in runs:
        for tenant, statuses in run.statuses.items():
            is_first = tenant == "patient"
            memory = f"{max(mib for _, mib in run.memory):14.0f} MiB" if is_first else ""
            title = NAMES[run.name] if is_first else ""
            lines.append(f"{title:22}{tenant:>10}{statuses[200]:>9}{refused(run, tenant):>9}{memory:>18}")
    return "\n".join(lines)


def peaks_of(run: Run) -> str:
    """What the requests needed, by route, as each saw itself."""
    lines = [f"largest peak of a request, MiB: {NAMES[run.name]}"]
    for route, found in sorted(run.peaks.items()):
        arrays, native, objects = (part / MiB for part in max(found, key=sum))
        lines.append(f"  {route:16} {arrays:6.1f} of arrays {native:7.1f} native {objects:7.1f} of objects")
    return "\n".join(lines)


def verdict(runs: list[Run]) -> int:
    """The exit status, and why."""
    whole = runs[-1]
    patient, greedy = whole.statuses["patient"], whole.statuses["greedy"]
    rise = max(mib for _, mib in whole.memory) - whole.memory[0][1]
    wrong = []
    if set(patient) != {200}:
        wrong.append(f"the patient tenant was answered {dict(patient)}")
    if not refused(whole, "greedy") or not greedy[200] or not set(greedy) <= {200, *REFUSALS}:
        wrong.append(f"the greedy tenant was answered {dict(greedy)}")
    if rise > LIMIT_MIB:
        wrong.append(f"memory rose by {rise:.0f} MiB, and the service's budget is {LIMIT_MIB:.0f}")
    for what in wrong:
        print(f"FAILED: {what}")
    if not wrong:
        print("ok: the greedy tenant was refused now and then, the patient one never; memory stayed below the budget")
    return 1 if wrong else 0


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.whole", description=__doc__)
    parser.add_argument("--seconds", type=float, default=8, help="of load for each service (%(default)s)")
    parser.add_argument("--rest", type=float, default=3, help="seconds after it (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("target/demo"), help="folder of the drawing (%(default)s)")
    options = parser.parse_args()
    runs = []
    for name, what in NAMES.items():
        with step(f"the service with {what}, {options.seconds:.0f} s of load and {options.rest:.0f} s of rest"):
            runs.append(asyncio.run(measured(name, options.seconds, options.rest)))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "whole.png"
    with step(f"draw {path}"):
        draw(path, runs)
    print(f"\n{table(runs)}\n")
    for run in runs:
        print(peaks_of(run))
    print()
    return verdict(runs)
