"""``make demo``: the same load on the service without the middleware and with it.

Six seconds of load, then three of rest, each time. Exit status 0: with the middleware the patient tenant was
always served, the greedy one was refused with 503 now and then and served else, and memory stayed within the service's
budget and what the process had before; 1: otherwise.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
import numpy as np

from ctxalloc import MiB

from . import figure
from .app import PAGE as LIVE_PAGE
from .app import SERVICE

PAGE: Final = 4096
SMALL_MIB: Final = 4
LARGE_MIB: Final = 24


@dataclass
class Run:
    """What was seen of one service."""

    name: str
    statuses: dict[str, Counter[int]] = field(default_factory=lambda: {"patient": Counter(), "greedy": Counter()})
    latencies_ms: dict[str, list[float]] = field(default_factory=lambda: {"patient": [], "greedy": []})
    memory: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the load began, MiB in memory."""
    load_s: float = 0.0
    peaks: dict[str, list[int]] = field(default_factory=dict)


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Says what is done and how long it took."""
    begun = time.monotonic()
    print(f"{what} ... ", end="", flush=True)
    yield
    print(f"{time.monotonic() - begun:.1f} s", flush=True)


@contextlib.asynccontextmanager
async def started(name: str) -> AsyncIterator[tuple[int, str]]:
    """The service's process and address, while the context lasts."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "examples.tenants.app", name),
        cwd=Path(__file__).parents[2],
        stdin=PIPE,
        stdout=PIPE,
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


async def watch(run: Run, process: int, begun: float) -> None:
    """The process's memory, twenty times a second."""
    while True:
        pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])  # noqa: ASYNC240 - no disk
        run.memory.append((time.monotonic() - begun, pages * PAGE / MiB))
        await asyncio.sleep(0.05)


async def client(run: Run, http: httpx.AsyncClient, tenant: str, path: str, until: float) -> None:
    """One client of a tenant: asks again and again, and waits where it is told to."""
    while time.monotonic() < until:
        begun = time.monotonic()
        answer = await http.post(path, headers={"tenant": tenant})
        run.statuses[tenant][answer.status_code] += 1
        if answer.status_code == 200:
            run.latencies_ms[tenant].append((time.monotonic() - begun) * 1e3)
        else:
            await asyncio.sleep(0.2 * float(answer.headers.get("retry-after", 1)))  # shorter, so that the demo is


async def measured(name: str, seconds: float, rest: float) -> Run:
    """One service under the load, and for a while after it."""
    run = Run(name)
    async with (
        started(name) as (process, address),
        httpx.AsyncClient(base_url=address, timeout=60, trust_env=False) as http,
    ):
        if name == "guarded":
            print(f"(live page while it runs: {address}{LIVE_PAGE}/) ", end="", flush=True)
        await http.post(f"/total/{SMALL_MIB}", headers={"tenant": "patient"})
        begun = time.monotonic()
        watching = asyncio.create_task(watch(run, process, begun))
        until = begun + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(client(run, http, "patient", f"/smooth/{SMALL_MIB}", until))
            group.create_task(client(run, http, "patient", f"/total/{SMALL_MIB}", until))
            for _ in range(12):
                group.create_task(client(run, http, "greedy", f"/smooth/{LARGE_MIB}", until))
        run.load_s = time.monotonic() - begun
        await asyncio.sleep(rest)
        run.peaks = (await http.get("/peaks")).json()
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    return run


def table(runs: list[Run]) -> str:
    """Who was served, and what memory it took."""
    lines = [f"{'':22}{'tenant':>10}{'served':>9}{'503':>7}{'p50 ms':>9}{'p99 ms':>9}{'memory at most':>18}"]
    for run in runs:
        most = max(mib for _, mib in run.memory)
        for tenant, statuses in run.statuses.items():
            p50, p99 = np.percentile(run.latencies_ms[tenant] or [float("nan")], [50, 99])
            memory = f"{most:14.0f} MiB" if tenant == "patient" else ""
            title = {"bare": "without", "guarded": "with the middleware"}[run.name] if memory else ""
            lines.append(f"{title:22}{tenant:>10}{statuses[200]:>9}{statuses[503]:>7}{p50:9.0f}{p99:9.0f}{memory:>18}")
    return "\n".join(lines)


def verdict(runs: list[Run]) -> int:
    """The exit status, and why."""
    guarded = runs[-1]
    patient, greedy = guarded.statuses["patient"], guarded.statuses["greedy"]
    rise = max(mib for _, mib in guarded.memory) - guarded.memory[0][1]
    limit = (SERVICE.limit_bytes or 0) / MiB
    wrong = []
    if set(patient) != {200}:
        wrong.append(f"the patient tenant was answered {dict(patient)}")
    if not greedy[503] or not greedy[200] or set(greedy) != {200, 503}:
        wrong.append(f"the greedy tenant was answered {dict(greedy)}")
    if rise > limit * 1.25:  # the pool rounds up
        wrong.append(f"memory rose by {rise:.0f} MiB, and the service's budget is {limit:.0f}")
    for what in wrong:
        print(f"FAILED: {what}")
    if not wrong:
        print("ok: the greedy tenant was refused with 503 now and then, the patient one never")
    return 1 if wrong else 0


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
        figure.draw(path, runs)
    print(f"\n{table(runs)}\n\npeak of a request, by route (MiB)")
    for route, peaks in sorted(runs[-1].peaks.items()):
        print(f"{route:22}{len(peaks):6} served{np.median(peaks) / MiB:9.1f} median{max(peaks) / MiB:9.1f} most")
    print()
    return verdict(runs)


if __name__ == "__main__":
    sys.exit(main())
