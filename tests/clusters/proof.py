"""Thousands of tasks of mixed size, a few of which want more than their worker has: without the plugin and with it.

`test_proof.py` holds it to what it claims, and `scripts/draw_clusters.py` draws it.
"""

import threading
import time
from collections import Counter
from typing import Any, NamedTuple

import dask
import distributed
import numpy as np

import ctxalloc.dask
from ctxalloc import MiB

MEMORY_LIMIT = 640 * MiB
TASK_LIMIT = 64 * MiB
GREEDY_BYTES = 900 * MiB


class Sample(NamedTuple):
    """What the scheduler knew of one worker at one moment."""

    seconds: float
    worker: Any
    address: str
    memory_bytes: int
    status: str


class Outcome(NamedTuple):
    """What became of the tasks and of their workers."""

    statuses: list[str]
    """Of each task: `finished`, or the name of its exception."""
    greedy: list[bool]
    """Which of them are."""
    restarts: int
    """How often a worker was killed for its memory."""
    seconds: float
    samples: list[Sample]
    left_bytes: int | None
    """What was charged to all workers when nobody wanted a result any more; None without the plugin."""

    def counted(self, *, greedy: bool) -> Counter[str]:
        """How the greedy tasks ended, or the others."""
        return Counter(
            status for status, is_greedy in zip(self.statuses, self.greedy, strict=True) if is_greedy == greedy
        )


def modest(size_bytes: int, seed: int) -> float:
    """Makes two arrays and returns a number."""
    array = np.full(size_bytes // 8, float(seed))
    return float((array + 1).max())


def greedy(size_bytes: int, _: int) -> int:
    """Collects arrays until it has too much, and holds them for a moment."""
    kept = []
    for _ in range(size_bytes // MiB):
        kept.append(np.ones(MiB, np.uint8))
        time.sleep(0.0005)
    time.sleep(0.3)
    return len(kept)


def run(*, with_plugin: bool, tasks: int = 2000, greedy_every: int = 1000) -> Outcome:
    """The workload on two workers with two threads each."""
    settings = {"distributed.scheduler.allowed-failures": 1, "distributed.worker.memory.recent-to-old-time": "1s"}
    samples: list[Sample] = []
    done = threading.Event()
    with (
        dask.config.set(settings),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=2, memory_limit=MEMORY_LIMIT, dashboard_address=None, silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        if with_plugin:
            client.register_plugin(ctxalloc.dask.RequestPlugin(limit_bytes=TASK_LIMIT))
        begun = time.monotonic()

        def sample() -> None:
            while not done.wait(0.1):
                for worker in list(cluster.scheduler.workers.values()):
                    memory = worker.metrics.get("memory", 0)
                    status = worker.status.name
                    seconds = time.monotonic() - begun
                    samples.append(Sample(seconds, worker.name, worker.address, memory, status))

        sampler = threading.Thread(target=sample)
        sampler.start()
        sizes = np.random.default_rng(7).choice([10_000, 100_000, MiB, 8 * MiB], tasks)
        is_greedy = [number % greedy_every == greedy_every // 2 for number in range(tasks)]
        futures = [
            client.submit(greedy, GREEDY_BYTES, number, pure=False)
            if is_greedy[number]
            else client.submit(modest, int(sizes[number]), number, pure=False)
            for number in range(tasks)
        ]
        distributed.wait(futures)
        # A result that a killed worker had is made anew, for which this waits.
        errors = [future.exception() for future in futures]
        statuses = ["finished" if error is None else type(error).__name__ for error in errors]
        seconds = time.monotonic() - begun
        del futures, errors
        left = None
        if with_plugin:
            left = _left(client)
        done.set()
        sampler.join()
        restarts = len(client.get_events("worker-restart-memory"))
        client.wait_for_workers(2, timeout=120)  # a cluster that closes while a worker restarts may hang
    return Outcome(statuses, is_greedy, restarts, seconds, samples, left)


def _left(client: Any) -> int:
    """What stays charged; it waits for the scheduler to forget results, at most a minute."""
    end = time.monotonic() + 60
    while True:
        left = sum(report.budget.in_use_bytes for report in client.run(ctxalloc.dask.report).values())
        if left == 0 or time.monotonic() > end:
            return left
        time.sleep(0.05)
