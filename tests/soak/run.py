"""Mixed work for minutes or hours: what a process has after it is what it had in the middle.

    run.py --seconds 60 [--seed 7] [--leak]

Each round, threads with loops of their own begin requests that nest, share budgets, run into limits, fail, are
cancelled half-way, hand arrays to other threads and leave some behind in a cache of fixed size; meanwhile the process
forks, and children begin requests too. After a round everything is quiet: the requests that are alive are those of the
cache, and the tenants are charged for its bytes, exactly. At the end three figures must be flat over the
rounds: resident memory, requests alive, CPU time for a request. `--leak` keeps what the cache drops, to see that this
is noticed.
"""

import argparse
import asyncio
import gc
import os
import random
import statistics
import sys
import threading
import time
import warnings
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import ctxalloc
from ctxalloc import Budget, BudgetExceeded, KiB, MiB, request
from ctxalloc.strategies import Arena, Pool, Tracked

THREADS = 3
JOBS = 150  # of a thread in a round
FORKS = 3  # in a round
CACHE = 500  # escapes that are alive
WARM_UP = 0.3  # the share of the rounds that nothing is concluded from
# What may be more at the end than in the middle.
RSS_SLACK_BYTES = 6 * MiB
TIME_SLACK = 2.0
CHILD_SECONDS = 60.0

Array = np.ndarray[Any, Any]


class SoakError(AssertionError):
    """What the soak was to find."""


def check(holds: bool, *what: object) -> None:
    if not holds:
        raise SoakError(*what)


def rss() -> int:
    """Resident bytes of this process."""
    with open("/proc/self/statm") as statm:  # noqa: PTH123
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Sample:
    """What a round left, and what it took."""

    rss: int
    present: int
    seconds: float  # of CPU time, for a request


@dataclass
class Soak:
    """The state that lives through all rounds."""

    leaks: bool
    process: Budget = field(default_factory=lambda: Budget(name="process"))
    cache: deque[Array] = field(default_factory=lambda: deque(maxlen=CACHE))
    passed_on: deque[Array] = field(default_factory=lambda: deque(maxlen=50))

    def __post_init__(self) -> None:
        self.tenants = [Budget(64 * MiB, parent=self.process, name=f"tenant {number}") for number in range(4)]
        self.forgotten: list[Array] = []

    # -- one job: a request, as services have them -----------------------------------------------

    async def job(self, choose: random.Random) -> None:
        kinds = (self.plain, self.nested, self.refused, self.failing, self.handing_over, self.generating)
        tenant = choose.choice(self.tenants)
        strategy = choose.choice((None, None, None, Arena, Pool, lambda: Tracked(Pool())))
        options: dict[str, Any] = {"budget": tenant, "after_end": choose.choice(("charge", "detach", "refuse"))}
        if strategy is not None and choose.random() < 0.2:
            options["strategy"] = strategy()
        async with request(**options):
            await choose.choice(kinds)(choose)

    def keep(self, array: Array) -> None:
        self.cache.append(array)
        if self.leaks and len(self.forgotten) < 1 << 20:
            self.forgotten.append(array)

    async def plain(self, choose: random.Random) -> None:
        scratch = [np.ones(choose.randrange(1, 20_000)) for _ in range(3)]
        await asyncio.sleep(0)
        scratch.append(scratch[0] * 2)
        if choose.random() < 0.5:
            self.keep(np.full(choose.randrange(1, 300), 7.0))

    async def nested(self, choose: random.Random) -> None:
        async with request(limit_bytes=MiB) as outer:
            kept = np.zeros(choose.randrange(1, 1000))
            with request(budget=choose.choice(self.tenants)) as inner:
                more = np.ones(100)
                await asyncio.sleep(0)
                check(inner.stats.live_bytes == more.nbytes, inner.stats)
            check(outer.stats.live_bytes == kept.nbytes + more.nbytes, outer.stats)

    async def refused(self, choose: random.Random) -> None:
        with suppress(BudgetExceeded):
            async with request(limit_bytes=10 * KiB, name="small"):
                kept = np.ones(choose.randrange(1, 1000))
                await asyncio.sleep(0)
                kept = np.concatenate([kept, np.ones(20_000)])
                raise SoakError("a limit was passed")

    async def failing(self, choose: random.Random) -> None:
        with suppress(ZeroDivisionError), request():
            kept = np.ones(choose.randrange(1, 5000))
            kept[0] /= 1 // choose.randrange(1)

    async def handing_over(self, choose: random.Random) -> None:
        self.passed_on.append(np.ones(choose.randrange(1, 3000)))
        with suppress(IndexError):
            taken = self.passed_on.popleft()
            taken = await asyncio.to_thread(np.add, taken, 1)
            check(bool((taken == 2).all()), "an array that another thread handed over has other bytes")

    async def generating(self, choose: random.Random) -> None:
        @request(name="chunks")
        async def chunks() -> Any:
            for size in range(1, choose.randrange(2, 6)):
                yield np.ones(size * 100)

        async for chunk in chunks():
            if chunk.size > choose.randrange(100, 600):
                break  # the rest is closed by the loop or the collector

    # -- a round ---------------------------------------------------------------------------------

    def loop_of(self, seed: int, errors: list[BaseException]) -> None:
        choose = random.Random(seed)

        async def main() -> None:
            for _ in range(JOBS // 10):
                tasks = [asyncio.create_task(self.job(choose)) for _ in range(10)]
                await asyncio.sleep(0)
                for task in choose.sample(tasks, 2):
                    task.cancel()
                for result in await asyncio.gather(*tasks, return_exceptions=True):
                    if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                        raise result

        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001  # told by the main thread
            errors.append(error)

    def fork_once(self) -> None:
        """While the threads work. The child begins requests of its own, and sees what was alive."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: that is the point
            child = os.fork()
        if child == 0:
            status = 1
            with suppress(BaseException), request(limit_bytes=MiB, root=True) as scope:
                kept = np.ones(1000)
                with suppress(MemoryError):
                    np.ones(MiB)
                    os._exit(2)
                if scope.stats.live_bytes == kept.nbytes and scope.stats.refused == 1:
                    self.cache.clear()
                    status = 0
            os._exit(status)
        until = time.monotonic() + CHILD_SECONDS
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > until:
                os.kill(child, 9)
                os.waitpid(child, 0)
                raise SoakError("a child of fork hangs")
            time.sleep(0.001)
        check(status == 0, f"a child of fork ended with {status}")

    def round(self, seed: int) -> Sample:
        begun, cpu = ctxalloc.request_metrics().begun, time.process_time()
        errors: list[BaseException] = []
        threads = [threading.Thread(target=self.loop_of, args=(seed * THREADS + n, errors)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for _ in range(FORKS):
            self.fork_once()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        self.passed_on.clear()
        gc.collect()
        metrics = ctxalloc.request_metrics()
        seconds = (time.process_time() - cpu) / (metrics.begun - begun)
        alive = sum(array.nbytes for array in {id(array): array for array in (*self.cache, *self.forgotten)}.values())
        check(self.process.in_use_bytes == alive, self.process, "is not charged for what is alive:", alive)
        check(sum(tenant.in_use_bytes for tenant in self.tenants) == alive, self.tenants)
        return Sample(rss(), metrics.present, seconds)


def judge(samples: list[Sample]) -> None:
    """The last third against the middle: nothing grows."""
    used = samples[int(len(samples) * WARM_UP) :]
    half = len(used) // 2
    check(half >= 3, f"{len(samples)} rounds are too few to say anything: more seconds")
    early, late = used[:half], used[-half:]

    def medians(figure: str) -> tuple[float, float]:
        return tuple(statistics.median(getattr(sample, figure) for sample in part) for part in (early, late))  # type: ignore[return-value]

    for figure, grown in (
        ("rss", lambda before, after: after > before + RSS_SLACK_BYTES),
        ("present", lambda before, after: after > max(before, CACHE)),
        ("seconds", lambda before, after: after > before * TIME_SLACK),
    ):
        before, after = medians(figure)
        print(f"{figure}: median {before:.6g} in the middle, {after:.6g} at the end")
        check(not grown(before, after), f"{figure} is not flat: {before:.6g}, then {after:.6g}")


def main() -> int:
    """0 if all was exact and flat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--leak", action="store_true", help="forget arrays on purpose: the run must fail")
    options = parser.parse_args()
    print(f"soak: {options.seconds:.0f} s, seed {options.seed}", flush=True)
    ctxalloc.configure(decay_seconds=1.0)
    soak, samples = Soak(leaks=options.leak), []
    until = said = time.monotonic() + options.seconds
    said -= options.seconds
    while time.monotonic() < until:
        samples.append(soak.round(options.seed + len(samples)))
        if time.monotonic() - said > 30:
            said = time.monotonic()
            print(f"round {len(samples)}: {samples[-1]}", flush=True)
    metrics = ctxalloc.request_metrics()
    print(f"{len(samples)} rounds, {metrics.begun} requests, {len(samples) * FORKS} forks; {samples[-1]}")
    try:
        judge(samples)
    except SoakError as failed:
        print(f"FAILED: {failed}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
