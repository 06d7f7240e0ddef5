"""Thousands of tasks of mixed size, a few of which want more than their worker has: without the plugin and with it.

`test_proof.py` holds it to what it claims, and `scripts/draw_clusters.py` draws it. Each run has a process of its own,
which is killed with all of its workers once it has answered: a cluster that closes while a worker restarts may hang.
`make clusters-proof` prints both, on Dask and on Ray.
"""

import argparse
import contextlib
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import dask
import distributed
import numpy as np

import ctxalloc.dask
from ctxalloc import MiB

MEMORY_LIMIT = 640 * MiB
TASK_LIMIT = 64 * MiB
GREEDY_BYTES = 900 * MiB
WITHOUT_SECONDS = 200
"""Without the plugin a task that has not ended by then counts as pending: Dask may lose a worker that it restarts."""
WITH_SECONDS = 240
LIMIT_SECONDS = 300


class Sample(NamedTuple):
    """One worker at one moment."""

    seconds: float
    worker: Any
    pid: int
    memory_bytes: int
    """What its process has resident."""
    status: str
    """What the scheduler takes it for."""


class Outcome(NamedTuple):
    """What became of the tasks and of their workers."""

    statuses: list[str]
    """Of each task: `finished`, the name of its exception, or `pending` if it did not end in time."""
    greedy: list[bool]
    """Which of them are."""
    restarts: int
    """How often a worker was killed for its memory; on Ray, how many tasks say so."""
    seconds: float
    samples: list[Sample]
    left_bytes: int | None
    """What was charged to all workers when nobody wanted a result any more; on Ray, what their pools had in use.

    None without the plugin.
    """

    def counted(self, *, greedy: bool) -> Counter[str]:
        """How the greedy tasks ended, or the others."""
        return Counter(
            status for status, is_greedy in zip(self.statuses, self.greedy, strict=True) if is_greedy == greedy
        )


def workload(tasks: int, greedy_every: int) -> tuple[list[int], list[bool]]:
    """The sizes of the tasks, and which of them are greedy."""
    sizes = np.random.default_rng(7).choice([10_000, 100_000, MiB, 8 * MiB], tasks)
    return sizes.tolist(), [number % greedy_every == greedy_every // 2 for number in range(tasks)]


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


def run(*, with_plugin: bool, tasks: int, greedy_every: int, on: str = "proof") -> Outcome:
    """The workload on two workers with two threads each, or on Ray (`on="proof_ray"`). TimeoutError: it did not end."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "outcome")
        code = "import sys, importlib; importlib.import_module(sys.argv[1]).answer(*sys.argv[2:])"
        arguments = [on, str(place), str(int(with_plugin)), str(tasks), str(greedy_every)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
        child = subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, start_new_session=True)
        try:
            end = time.monotonic() + LIMIT_SECONDS
            while not place.exists():
                if child.poll() is not None and not place.exists():
                    raise RuntimeError(f"the workload ended with {child.returncode}")
                if time.monotonic() > end:
                    raise TimeoutError(f"the workload did not end in {LIMIT_SECONDS} s")
                time.sleep(0.05)
            found: Outcome = pickle.loads(place.read_bytes())
            return found
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def keep(place: str, outcome: Outcome) -> None:
    """Leave it for `run`, whole or not at all."""
    written = Path(place + ".part")
    written.write_bytes(pickle.dumps(outcome))
    written.rename(place)


def answer(place: str, plugin: str, tasks: str, greedy_every: str) -> None:
    """In the process of a run: the workload; its outcome is left in a file."""
    with_plugin = plugin == "1"
    settings = {"distributed.scheduler.allowed-failures": 1, "distributed.worker.memory.recent-to-old-time": "1s"}
    sizes, is_greedy = workload(int(tasks), int(greedy_every))
    samples: list[Sample] = []
    done = threading.Event()
    with (
        dask.config.set(settings),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=2, memory_limit=MEMORY_LIMIT, dashboard_address=":0", silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        if with_plugin:
            client.register_plugin(ctxalloc.dask.RequestPlugin(limit_bytes=TASK_LIMIT))
        begun = time.monotonic()

        def sample() -> None:
            while not done.wait(0.05):
                known = {worker.name: worker.status.name for worker in list(cluster.scheduler.workers.values())}
                for nanny in list(cluster.workers.values()):
                    try:
                        resident = int(Path(f"/proc/{nanny.pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
                    except OSError:
                        continue  # between two processes
                    if nanny.name in known:
                        seconds = time.monotonic() - begun
                        samples.append(Sample(seconds, nanny.name, nanny.pid, resident, known[nanny.name]))

        sampler = threading.Thread(target=sample)
        sampler.start()
        futures = [
            client.submit(greedy, GREEDY_BYTES, number, pure=False)
            if is_greedy[number]
            else client.submit(modest, size, number, pure=False)
            for number, size in enumerate(sizes)
        ]
        # A result that a killed worker had is made anew. Without the plugin a worker may be lost for good.
        end = begun + (WITH_SECONDS if with_plugin else WITHOUT_SECONDS)
        while not all(future.done() for future in futures) and time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                distributed.wait([future for future in futures if not future.done()], timeout=end - time.monotonic())
        statuses = [_status(future) for future in futures]
        seconds = time.monotonic() - begun
        del futures
        left = None
        if with_plugin:
            left = _left(client)
        done.set()
        sampler.join()
        restarts = len(client.get_events("worker-restart-memory"))
        keep(place, Outcome(statuses, is_greedy, restarts, seconds, samples, left))
        threading.Event().wait()  # for the end


def _status(future: Any) -> str:
    """How a task ended."""
    if future.status == "error":
        return type(future.exception()).__name__
    return str(future.status)


def _left(client: Any) -> int:
    """What stays charged; it waits for the scheduler to forget results, at most a minute."""
    end = time.monotonic() + 60
    while True:
        left = sum(report.budget.in_use_bytes for report in client.run(ctxalloc.dask.report).values())
        if left == 0 or time.monotonic() > end:
            return left
        time.sleep(0.05)


def text(found: Outcome) -> str:
    """What became of the tasks and of their workers, in a line."""
    paused = len([sample for sample in found.samples if sample.status == "paused"])
    return (
        f"{found.seconds:.0f} s, workers killed {found.restarts} times, paused in {paused} of {len(found.samples)} "
        f"looks; greedy: {dict(found.counted(greedy=True))}; others: {dict(found.counted(greedy=False))}; left "
        f"charged: {found.left_bytes}"
    )


def main() -> None:
    """Runs both, and prints what became of the tasks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=3000)
    parser.add_argument("--greedy-every", type=int, default=750)
    parser.add_argument("--on", choices=["proof", "proof_ray"], default="proof")
    options = parser.parse_args()
    for with_plugin, title in ((False, "without ctxalloc"), (True, "with it")):
        print(f"{title}: {text(run(with_plugin=with_plugin, **vars(options)))}", flush=True)


if __name__ == "__main__":
    main()
