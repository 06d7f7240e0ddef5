"""``make demo``: the same load on the service without the middleware and with it.

Six seconds of load, then three of rest, each time. Exit status 0: with the middleware the patient tenant was
always served, the greedy one was refused with 503 now and then and served else, and memory stayed within the service's
budget and what the process had before; 1: otherwise.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Final

import httpx
import numpy as np

from ctxalloc import MiB

from . import load
from .app import PAGE as LIVE_PAGE
from .figure import draw
from .load import Client, Run, step
from .serving import SERVICE

SMALL_MIB: Final = 4
LARGE_MIB: Final = 24
LIMIT_MIB: Final = (SERVICE.limit_bytes or 0) / MiB
NAMES: Final = {"bare": ("without", "without"), "guarded": ("with the middleware", "with")}
REFUSALS: Final = frozenset({503})
CLIENTS: Final = [
    *[Client("patient", f"/smooth/{SMALL_MIB}")] * 2,
    Client("patient", f"/total/{SMALL_MIB}"),
    *[Client("greedy", f"/smooth/{LARGE_MIB}")] * 12,
]


async def measured(name: str, seconds: float, rest: float) -> Run:
    """One service under the load, and for a while after it."""
    run = Run(name)
    async with (
        load.started("examples.tenants.app", name) as (process, address),
        httpx.AsyncClient(base_url=address, timeout=60, trust_env=False) as http,
    ):
        if name == "guarded":
            print(f"(live page while it runs: {address}{LIVE_PAGE}/) ", end="", flush=True)
        await http.post(f"/total/{SMALL_MIB}", headers={"tenant": "patient"})
        await load.measured(run, process, http, CLIENTS, seconds=seconds, rest=rest)
    return run


def table(runs: list[Run]) -> str:
    """Who was served, and what memory it took."""
    lines = [f"{'':22}{'tenant':>10}{'served':>9}{'503':>7}{'p50 ms':>9}{'p99 ms':>9}{'memory at most':>18}"]
    for run in runs:
        for tenant, statuses in run.statuses.items():
            p50, p99 = np.percentile(run.latencies_ms[tenant] or [float("nan")], [50, 99])
            memory = f"{run.most_mib:14.0f} MiB" if tenant == "patient" else ""
            title = NAMES[run.name][0] if memory else ""
            lines.append(f"{title:22}{tenant:>10}{statuses[200]:>9}{statuses[503]:>7}{p50:9.0f}{p99:9.0f}{memory:>18}")
    return "\n".join(lines)


def verdict(runs: list[Run]) -> int:
    """The exit status, and why."""
    ok = "the greedy tenant was refused with 503 now and then, the patient one never"
    return load.verdict(runs[-1], REFUSALS, LIMIT_MIB * 1.25, LIMIT_MIB, ok)  # the pool rounds up


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.tenants", description=__doc__)
    parser.add_argument("--seconds", type=float, default=6, help="of load for each service (%(default)s)")
    parser.add_argument("--rest", type=float, default=3, help="seconds after it (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("target/demo"), help="folder of the drawing (%(default)s)")
    options = parser.parse_args()
    runs = []
    for name, what in (("bare", "the service without the middleware"), ("guarded", "the same load with it")):
        with step(f"{what}, {options.seconds:.0f} s of load and {options.rest:.0f} s of rest"):
            runs.append(asyncio.run(measured(name, options.seconds, options.rest)))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "tenants.png"
    with step(f"draw {path}"):
        draw(path, runs, NAMES, REFUSALS, LIMIT_MIB)
    print(f"\n{table(runs)}\n\npeak of a request, by route (MiB)")
    for route, peaks in sorted(runs[-1].peaks.items()):
        print(f"{route:22}{len(peaks):6} served{np.median(peaks) / MiB:9.1f} median{max(peaks) / MiB:9.1f} most")
    print()
    return verdict(runs)


if __name__ == "__main__":
    sys.exit(main())
