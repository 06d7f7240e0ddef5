"""A service in a process of its own, the load on it, and what is seen of it meanwhile; also for ``whole``."""

import asyncio
import contextlib
import sys
import time
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from ctxalloc import MiB

PAGE: Final = 4096


@dataclass
class Run:
    """What was seen of one service."""

    name: str
    statuses: dict[str, Counter[int]] = field(default_factory=lambda: {"patient": Counter(), "greedy": Counter()})
    latencies_ms: dict[str, list[float]] = field(default_factory=lambda: {"patient": [], "greedy": []})
    """Of the requests that were served."""
    memory: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the load began, MiB in memory."""
    load_s: float = 0.0
    peaks: dict[str, list[Any]] = field(default_factory=dict)
    """By route: what the service says of each request's peak, in bytes."""

    @property
    def most_mib(self) -> float:
        """The most that was in memory."""
        return max(mib for _, mib in self.memory)

    def refused(self, statuses: frozenset[int], tenant: str) -> int:
        """How many answers to a tenant had one of these statuses."""
        return sum(count for status, count in self.statuses[tenant].items() if status in statuses)


@dataclass(frozen=True)
class Client:
    """One of those who ask, again and again."""

    tenant: str
    path: str


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Says what is done and how long it took."""
    begun = time.monotonic()
    print(f"{what} ... ", end="", flush=True)
    yield
    print(f"{time.monotonic() - begun:.1f} s", flush=True)


@contextlib.asynccontextmanager
async def started(
    module: str, name: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[int, str]]:
    """The service's process and address, while the context lasts: ``python -m module name``, which prints both."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, name),
        cwd=Path(__file__).parents[2],
        env=environment,
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


async def measured(
    run: Run, process: int, http: httpx.AsyncClient, clients: Sequence[Client], *, seconds: float, rest: float
) -> None:
    """The service under the load, and for a while after it."""
    begun = time.monotonic()
    watching = asyncio.create_task(_watch(run, process, begun))
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(_ask(run, http, client, begun + seconds))
    run.load_s = time.monotonic() - begun
    await asyncio.sleep(rest)
    run.peaks = (await http.get("/peaks")).json()
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching


async def _watch(run: Run, process: int, begun: float) -> None:
    """The process's memory, twenty times a second."""
    while True:
        pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])  # noqa: ASYNC240 - no disk
        run.memory.append((time.monotonic() - begun, pages * PAGE / MiB))
        await asyncio.sleep(0.05)


async def _ask(run: Run, http: httpx.AsyncClient, client: Client, until: float) -> None:
    """One client: waits where it is told to."""
    while time.monotonic() < until:
        begun = time.monotonic()
        answer = await http.post(client.path, headers={"tenant": client.tenant})
        run.statuses[client.tenant][answer.status_code] += 1
        if answer.status_code == 200:
            run.latencies_ms[client.tenant].append((time.monotonic() - begun) * 1e3)
        else:
            await asyncio.sleep(0.2 * float(answer.headers.get("retry-after", 1)))  # shorter, so that the demo is


def verdict(run: Run, refusals: frozenset[int], rise_mib: float, limit_mib: float, ok: str) -> int:
    """The exit status, and why: the patient tenant was always served, the greedy one now and then; memory stayed."""
    patient, greedy = run.statuses["patient"], run.statuses["greedy"]
    rise = run.most_mib - run.memory[0][1]
    wrong = []
    if set(patient) != {200}:
        wrong.append(f"the patient tenant was answered {dict(patient)}")
    if not run.refused(refusals, "greedy") or not greedy[200] or not set(greedy) <= {200, *refusals}:
        wrong.append(f"the greedy tenant was answered {dict(greedy)}")
    if rise > rise_mib:
        wrong.append(f"memory rose by {rise:.0f} MiB, and the service's budget is {limit_mib:.0f}")
    for what in wrong:
        print(f"FAILED: {what}")
    if not wrong:
        print(f"ok: {ok}")
    return 1 if wrong else 0
