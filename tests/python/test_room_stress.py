"""Tasks of two event loops, threads, cancellations, time-outs, a reclaimer and a patient tenant at the same budgets.

What each of them has is noted in a plain list, and after each step the sums of that list must fit; what a tenant was
guaranteed is never refused. `CTXALLOC_STRESS` multiplies the work (`make stress`: a million requests).
"""

import asyncio
import contextlib
import os
import random
import threading
import time

import numpy as np
import pytest

import ctxalloc

LIVES = 1000 * int(os.environ.get("CTXALLOC_STRESS", "1"))
LIMIT, PROMISED, OF_C = 100_000, 30_000, 10_000


class House:
    def __init__(self):
        self.process = ctxalloc.Budget(LIMIT, name="process")
        self.patient = ctxalloc.Budget(parent=self.process, name="patient", guarantee_bytes=PROMISED)
        self.others = (
            ctxalloc.Budget(65_000, parent=self.process, name="b"),
            ctxalloc.Budget(50_000, parent=self.process, name="c", guarantee_bytes=OF_C),
        )
        self.live = []
        self.lock = threading.Lock()
        self.done = 0
        self.failed = []
        self.cache = []
        self.others[1].add_reclaimer(lambda _: self.cache.clear())

    @contextlib.contextmanager
    def noted(self, budget, size):
        """In the list until just before its end: the list never has more than there is."""
        entry = (budget, size)
        with self.lock:
            self.live.append(entry)
            of = [sum(size for budget, size in self.live if budget == which) for which in range(3)]
        try:
            assert max(of[0], PROMISED) + of[1] + max(of[2], OF_C) <= LIMIT, of
            assert of[1] <= 65_000
            assert of[2] <= 50_000
            assert self.process.peak_bytes <= LIMIT
            yield
        finally:
            with self.lock:
                self.live.remove(entry)
                self.done += 1

    def terms(self, choose, **more):
        which, size = choose.randrange(2), choose.randrange(1, 25_000)
        request = ctxalloc.request(budget=self.others[which], reserve_bytes=size, root=True, strict=True, **more)
        return which + 1, size, request

    def work(self, choose, size):
        block = np.empty(size, np.uint8)  # within its reservation it is never refused
        if choose.random() < 0.3:
            with contextlib.suppress(MemoryError):
                np.empty(choose.randrange(1, 20_000), np.uint8)
        del block

    def run(self, work, *arguments):
        try:
            work(*arguments)
        except BaseException as error:  # noqa: BLE001 - told by the main thread
            self.failed.append(error)


def in_a_thread(house, seed, lives):
    choose = random.Random(seed)
    for _ in range(lives):
        timeout = choose.choice([None, None, 0.0, 0.0003])
        which, size, request = house.terms(choose, **({} if timeout is None else {"timeout": timeout}))
        try:
            with request, house.noted(which, size):
                house.work(choose, size)
        except ctxalloc.NoRoom as error:
            if timeout is None or error.reason != "timed out":
                raise


async def in_tasks(house, seed, lives):
    choose = random.Random(seed)

    async def one():
        which, size, request = house.terms(choose)
        async with request:
            with house.noted(which, size):
                if choose.random() < 0.5:
                    await asyncio.sleep(0)
                house.work(choose, size)

    for _ in range(lives // 10):
        tasks = [asyncio.create_task(one()) for _ in range(10)]
        if choose.random() < 0.5:
            await asyncio.sleep(choose.random() * 0.001)
            for task in tasks[:3]:
                task.cancel()
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
                raise end


def patiently(house, is_over):
    """Within what it is guaranteed it is never refused, and never waits."""
    choose = random.Random(3)
    while not is_over.is_set():
        size = choose.randrange(1, PROMISED)
        with ctxalloc.request(budget=house.patient, reserve_bytes=size, timeout=0, root=True), house.noted(0, size):
            block = np.empty(PROMISED, np.uint8)  # beyond its reservation, within the guarantee
            del block
        time.sleep(0)


def fill(house, is_over):
    choose = random.Random(4)
    while not is_over.is_set():
        with contextlib.suppress(MemoryError), ctxalloc.request(budget=house.others[1], root=True, strict=True):
            house.cache.append(np.empty(choose.randrange(1, 5000), np.uint8))
        if len(house.cache) > 4:
            house.cache.clear()
        time.sleep(0.0002)
    house.cache.clear()


# The cache is asked while it is empty now and then, which is told once until it gives something.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <function House:pytest.PytestUnraisableExceptionWarning")
def test_stress_of_tasks_and_threads_that_wait_for_the_same_room():
    house, is_over = House(), threading.Event()
    ever = [threading.Thread(target=house.run, args=(work, house, is_over)) for work in (patiently, fill)]
    while_there_is_work = [
        *(threading.Thread(target=house.run, args=(in_a_thread, house, seed, LIVES // 4)) for seed in (10, 11)),
        *(
            threading.Thread(target=house.run, args=(lambda seed: asyncio.run(in_tasks(house, seed, LIVES // 4)), seed))
            for seed in (20, 21)
        ),
    ]
    for thread in (*ever, *while_there_is_work):
        thread.start()
    for thread in while_there_is_work:
        thread.join()
    is_over.set()
    for thread in ever:
        thread.join()
    assert not house.failed, house.failed
    assert house.live == []
    assert house.done > LIVES // 4
    left = [(one.in_use_bytes, one.reserved_bytes, one.waiting) for one in (house.patient, *house.others)]
    assert left == [(0, 0, 0)] * 3
    assert (house.process.in_use_bytes, house.process.reserved_bytes) == (0, PROMISED + OF_C)
    assert house.process.waiting == 0
