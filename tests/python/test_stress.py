"""Threads and tasks by the thousand: they switch handlers, allocate, resize, hand over and free elsewhere.

Bounded by rounds in normal runs; `CTXALLOC_STRESS_SECONDS` (`make stress`) repeats each test with fresh seeds until
the time is over. A failure names its seed.
"""

import asyncio
import concurrent.futures
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from built_in import HANDLERS

import ctxalloc
import ctxalloc_example as example
from ctxalloc import current, handler_of, set_handler, use

SECONDS = float(os.environ.get("CTXALLOC_STRESS_SECONDS", "0"))
THREADS = 64
TASKS = 10_000
SIZES = [0, 1, 8, 64, 100, 1000, 5000, 70_000]

Block = tuple[str, int, np.ndarray[Any, Any]]


def seeds() -> Iterator[int]:
    """One fixed seed and a fresh one; more of these while the time of a stress run lasts."""
    until = time.monotonic() + SECONDS / 3  # three tests share it
    yield 1
    yield random.SystemRandom().randrange(2**32)
    while time.monotonic() < until:
        yield random.SystemRandom().randrange(2**32)


def make(choose: random.Random, name: str) -> Block:
    """An array in the current handler, filled with a value that its size tells."""
    size = choose.choice(SIZES)
    value = size % 251
    how = choose.randrange(3)
    if how == 0:
        array = np.empty(size, np.uint8)
        array[:] = value
    elif how == 1:
        array = np.zeros(size, np.uint8)
        assert not array.any()
        array += np.uint8(value)
    else:
        array = np.full(choose.choice(SIZES), value, np.uint8)
        array.resize(size, refcheck=False)
        array[:] = value
    return name, value, array


def check(block: Block) -> None:
    name, value, array = block
    owner = handler_of(array)
    assert owner is not None
    assert owner.name == name == ctxalloc.get_handler_name(array)
    assert (array == value).all()


def change(choose: random.Random, block: Block) -> Block:
    """The same array with another size, by its own handler, whatever is selected."""
    name, value, array = block
    kept = array[: 1 << choose.randrange(10)].copy()
    array.resize(choose.choice(SIZES), refcheck=False)
    both = min(kept.size, array.size)
    assert (array[:both] == kept[:both]).all()
    array[:] = value
    return name, value, array


def names_of(fresh_handler: Callable[[], ctxalloc.Handler]) -> list[str]:
    return [*HANDLERS, *(fresh_handler().name for _ in range(4))]


@pytest.mark.long
def test_threads_switch_handlers_and_hand_their_arrays_around(fresh_handler: Callable[[], ctxalloc.Handler]) -> None:
    names = names_of(fresh_handler)
    for seed in seeds():
        mailboxes: list[queue.SimpleQueue[Block]] = [queue.SimpleQueue() for _ in range(THREADS)]
        barrier = threading.Barrier(THREADS)

        def work(
            own: int,
            seed: int = seed,
            mailboxes: list[queue.SimpleQueue[Block]] = mailboxes,
            barrier: threading.Barrier = barrier,
        ) -> None:
            choose = random.Random(f"{seed} {own}")
            kept: list[Block] = []
            tokens: list[ctxalloc.Token] = []
            barrier.wait()
            for _ in range(300):
                name = choose.choice(names)
                with use(name):
                    block = make(choose, name)
                    assert example.handler_here() == name
                mailboxes[choose.randrange(THREADS)].put(block)
                del block
                if tokens and choose.random() < 0.4:
                    ctxalloc.reset(tokens.pop(choose.randrange(len(tokens))))
                else:
                    name = choose.choice(names)
                    tokens.append(set_handler(name))
                    assert current().name == name
                while not mailboxes[own].empty():
                    kept.append(mailboxes[own].get())
                if kept:
                    at = choose.randrange(len(kept))
                    check(kept[at])
                    kept[at] = change(choose, kept[at])
                del kept[choose.randrange(1, 12) :]
            for block in kept:
                check(block)

        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(work, range(THREADS)))
        for mailbox in mailboxes:
            while not mailbox.empty():
                check(mailbox.get())
        assert current().name == "default_allocator", f"seed {seed}"


@pytest.mark.long
def test_ten_thousand_tasks_keep_their_handlers_and_exchange_arrays(
    fresh_handler: Callable[[], ctxalloc.Handler],
) -> None:
    names = names_of(fresh_handler)

    async def main(seed: int) -> None:
        handed: list[Block] = []
        through_rust = asyncio.Semaphore(50)

        async def task(number: int) -> None:
            choose = random.Random(f"{seed} {number}")
            name = choose.choice(names)
            async with use(name) as handler:
                for _ in range(3):
                    block = make(choose, name)
                    await asyncio.sleep(0)
                    assert current() is handler
                    handed.append(block)
                    other = choose.choice(names)
                    token = set_handler(other)
                    await asyncio.sleep(0)
                    assert current().name == other
                    if handed:
                        block = handed.pop(choose.randrange(len(handed)))
                        check(block)
                        handed.append(change(choose, block))
                    while len(handed) > 500:
                        check(handed.pop(0))
                    ctxalloc.reset(token)
                    assert current() is handler
                if number % 50 == 0:
                    other = choose.choice(names)
                    async with through_rust:
                        array = await example.array_made_in(other, 100)
                        assert handler_of(array) is ctxalloc.handler(other)
                        assert {own for own, _ in await example.handlers_on_the_way(1)} == {name}
                        check(await asyncio.to_thread(make, choose, name))

        await asyncio.gather(*(task(number) for number in range(TASKS)))
        for block in handed:
            check(block)

    for seed in seeds():
        asyncio.run(main(seed))
        assert current().name == "default_allocator", f"seed {seed}"
        if not SECONDS:
            break


def test_loops_on_many_threads_trade_arrays_through_rust(fresh_handler: Callable[[], ctxalloc.Handler]) -> None:
    names = names_of(fresh_handler)
    image = np.full((16, 16), 9, np.uint8)
    for seed in seeds():
        shared: queue.SimpleQueue[Block] = queue.SimpleQueue()

        def work(own: int, seed: int = seed, shared: queue.SimpleQueue[Block] = shared) -> None:
            choose = random.Random(f"{seed} {own}")

            async def request(name: str) -> None:
                async with use(name) as handler:
                    blurred = await example.box_blur(image, 2)
                    assert handler_of(blurred) is handler
                    shared.put((name, 9, blurred))
                    found = await example.await_python(tells)
                    assert found == name
                while not shared.empty() and choose.random() < 0.7:
                    try:
                        block = shared.get_nowait()
                    except queue.Empty:
                        break
                    check(block)

            async def tells() -> str:
                return current().name

            async def main() -> None:
                await asyncio.gather(*(request(choose.choice(names)) for _ in range(20)))

            asyncio.run(main())

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        while not shared.empty():
            check(shared.get())
