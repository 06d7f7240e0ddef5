"""Drives the service: many clients at once, every route with every picture, shuffled, a bounded number of times.

Each answer is compared with the reference, byte for byte. Neighbours: ``reference`` says what must come back, ``demo``
counts what did.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import httpx

from .reference import Wanted


@dataclass(frozen=True)
class Job:
    """One request to make: a picture, posted to a route."""

    route: str
    picture: str


@dataclass(frozen=True)
class Sample:
    """One request made. ``failure`` says what was wrong with its answer; None: nothing."""

    job: Job
    latency_s: float
    failure: str | None


def jobs(routes: Sequence[str], names: Sequence[str], *, rounds: int) -> list[Job]:
    """Every route with every picture, ``rounds`` times, in an order that is the same every time."""
    all_jobs = [Job(route, name) for _ in range(rounds) for route in routes for name in names]
    random.Random(20).shuffle(all_jobs)
    return all_jobs


async def drive(
    http: httpx.AsyncClient,
    todo: Sequence[Job],
    pictures: Mapping[str, bytes],
    wanted: Wanted,
    *,
    clients: int,
    done: Callable[[Sample], None],
) -> list[Sample]:
    """Make all requests, ``clients`` at a time: each client makes the next one when its last was answered."""
    samples: list[Sample] = []
    remaining = iter(todo)

    async def client() -> None:
        for job in remaining:
            sample = await post(http, job, pictures[job.picture], wanted)
            samples.append(sample)
            done(sample)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return samples


async def post(http: httpx.AsyncClient, job: Job, body: bytes, wanted: Wanted) -> Sample:
    """Make one request and judge its answer."""
    began = time.perf_counter()
    try:
        response = await http.post(job.route, content=body)
    except httpx.HTTPError as error:
        return Sample(job, time.perf_counter() - began, f"no answer: {type(error).__name__}: {error}")
    latency_s = time.perf_counter() - began
    if response.status_code != 200:
        return Sample(job, latency_s, f"status {response.status_code}: {response.text[:200]}")
    if response.content != wanted[job.route, job.picture].content:
        return Sample(job, latency_s, "the answer differs from the one made under NumPy's default handler")
    return Sample(job, latency_s, None)
