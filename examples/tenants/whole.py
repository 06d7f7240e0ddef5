"""``make demo-whole``: the same load on a service whose requests count their arrays, and one whose count everything.

Eight seconds of load, then three of rest, each time. Exit status 0: where everything is counted the patient tenant was
always served, the greedy one was refused now and then and served else, and memory stayed within the service's budget
and what the process had before; 1: otherwise.
"""

import argparse
import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import httpx

from ctxalloc import MiB

from . import load
from .figure import draw
from .load import Client, Run, step
from .serving import SERVICE

NAMES: Final = {"arrays": ("arrays counted", "arrays"), "whole": ("everything counted", "everything")}
LIMIT_MIB: Final = (SERVICE.limit_bytes or 0) / MiB
REFUSALS: Final = frozenset({413, 503})
WORK: Final = ("parse", "decode", "read")
CLIENTS: Final = [
    *[Client("patient", f"/{work}/small") for work in WORK],
    *[Client("greedy", f"/{work}/large") for work in WORK for _ in range(4)],
]


def environment(name: str) -> dict[str, str]:
    """Of the service's process: ``whole`` needs the library before malloc."""
    if name != "whole":
        return dict(os.environ)
    made = subprocess.run([sys.executable, "-m", "ctxalloc", "whole"], capture_output=True, text=True, check=True)
    return {**os.environ, "LD_PRELOAD": made.stdout.strip(), "CTXALLOC_WHOLE": "1"}


async def measured(name: str, seconds: float, rest: float) -> Run:
    """One service under the load, and for a while after it."""
    run = Run(name)
    async with (
        load.started("examples.tenants.whole_app", name, environment(name)) as (process, address),
        httpx.AsyncClient(base_url=address, timeout=120, trust_env=False) as http,
    ):
        for work in WORK:
            await http.post(f"/{work}/small", headers={"tenant": "patient"})
        await load.measured(run, process, http, CLIENTS, seconds=seconds, rest=rest)
    return run


def table(runs: list[Run]) -> str:
    """Who was served, and what memory it took."""
    lines = [f"{'':22}{'tenant':>10}{'served':>9}{'refused':>9}{'memory at most':>18}"]
    for run in runs:
        for tenant, statuses in run.statuses.items():
            is_first = tenant == "patient"
            memory = f"{run.most_mib:14.0f} MiB" if is_first else ""
            title = NAMES[run.name][0] if is_first else ""
            lines.append(f"{title:22}{tenant:>10}{statuses[200]:>9}{run.refused(REFUSALS, tenant):>9}{memory:>18}")
    return "\n".join(lines)


def peaks_of(run: Run) -> str:
    """What the requests needed, by route, as each saw itself."""
    lines = [f"largest peak of a request, MiB: {NAMES[run.name][0]}"]
    for route, found in sorted(run.peaks.items()):
        arrays, native, objects = (part / MiB for part in max(found, key=sum))
        lines.append(f"  {route:16} {arrays:6.1f} of arrays {native:7.1f} native {objects:7.1f} of objects")
    return "\n".join(lines)


def verdict(runs: list[Run]) -> int:
    """The exit status, and why."""
    ok = "the greedy tenant was refused now and then, the patient one never; memory stayed below the budget"
    return load.verdict(runs[-1], REFUSALS, LIMIT_MIB, LIMIT_MIB, ok)


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.tenants.whole", description=__doc__)
    parser.add_argument("--seconds", type=float, default=8, help="of load for each service (%(default)s)")
    parser.add_argument("--rest", type=float, default=3, help="seconds after it (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("target/demo"), help="folder of the drawing (%(default)s)")
    options = parser.parse_args()
    runs = []
    for name, (what, _) in NAMES.items():
        with step(f"the service with {what}, {options.seconds:.0f} s of load and {options.rest:.0f} s of rest"):
            runs.append(asyncio.run(measured(name, options.seconds, options.rest)))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "whole.png"
    with step(f"draw {path}"):
        draw(path, runs, NAMES, REFUSALS, LIMIT_MIB)
    print(f"\n{table(runs)}\n")
    for run in runs:
        print(peaks_of(run))
    print()
    return verdict(runs)


if __name__ == "__main__":
    sys.exit(main())
