"""The load on the service, and what is seen of it meanwhile."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from ctxalloc import MiB

PAGE: Final = 4096


@dataclass
class Run:
    """What was seen of one service."""

    name: str
    statuses: dict[str, Counter[int]] = field(default_factory=lambda: {"patient": Counter(), "greedy": Counter()})
    memory: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the load began, MiB in memory."""
    load_s: float = 0.0
    peaks: dict[str, list[list[int]]] = field(default_factory=dict)
    """By route: of each request what of its peak was arrays, native memory and objects, in bytes."""


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Says what is done and how long it took."""
    begun = time.monotonic()
    print(f"{what} ... ", end="", flush=True)
    yield
    print(f"{time.monotonic() - begun:.1f} s", flush=True)


async def watch(run: Run, process: int, begun: float) -> None:
    """The process's memory, twenty times a second."""
    while True:
        pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])  # noqa: ASYNC240 - no disk
        run.memory.append((time.monotonic() - begun, pages * PAGE / MiB))
        await asyncio.sleep(0.05)


async def client(run: Run, http: httpx.AsyncClient, tenant: str, path: str, until: float) -> None:
    """One client of a tenant: asks again and again, and waits where it is told to."""
    while time.monotonic() < until:
        answer = await http.post(path, headers={"tenant": tenant})
        run.statuses[tenant][answer.status_code] += 1
        if answer.status_code != 200:
            await asyncio.sleep(0.2 * float(answer.headers.get("retry-after", 1)))  # shorter, so that the demo is
