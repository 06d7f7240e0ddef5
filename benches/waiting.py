"""What a reservation costs one that need not wait, also while ten thousand others do, and how long a wake-up takes.

The aims of the table: a reservation within 100 ns of the same request without one; ten thousand waiters of another
budget change nothing for it (within 10 %); from the end of what was waited for to the first step of the coroutine that
waited, 20 us. Variants run in turn, round after round; the medians are compared. Numbers go to
target/bench/waiting.json. Options: --rounds N, --quick.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from harness import Loop, Row, keep, loop, medians, rounds_asked, row_of, table

import ctxalloc

AIM_RESERVATION_NS = 100.0
AIM_WAKE_UP_NS = 20_000.0
WAITERS = 10_000
ON_A_THREAD, PLAIN, ON_THE_LOOP = "by a thread", "by a thread, of a plain future", "by a task of the same loop"
WITHOUT, WITH = "with a budget and a limit", "the same, with a reservation"


def passing(rounds: int, title: str) -> dict[str, Row]:
    """Entering and leaving, with room for all."""
    tenant = ctxalloc.Budget(1 << 30, parent=ctxalloc.Budget(1 << 40))
    names: dict[str, Any] = {"request": ctxalloc.request, "tenant": tenant}
    terms = "limit_bytes=100000, name='bench', budget=tenant"
    variants = {
        WITHOUT: loop(f"with request({terms}):\n    pass", **names),
        WITH: loop(f"with request({terms}, reserve_bytes=1000):\n    pass", **names),
        "the same, with a timeout": loop(f"with request({terms}, reserve_bytes=1000, timeout=1.0):\n    pass", **names),
        "the same, by history": loop(f"with request({terms}, reserve_bytes='auto'):\n    pass", **names),
    }
    rows = medians(variants, rounds, 3000)
    table(title, rows, WITHOUT)
    return rows


def awaiting(rounds: int) -> dict[str, Row]:
    """The same by ``async with``, in a coroutine that never suspends."""
    tenant, request = ctxalloc.Budget(1 << 30, parent=ctxalloc.Budget(1 << 40)), ctxalloc.request

    async def without(count: int) -> None:
        for _ in range(count):
            async with request(limit_bytes=100000, name="bench", budget=tenant):
                pass

    async def reserving(count: int) -> None:
        for _ in range(count):
            async with request(limit_bytes=100000, name="bench", budget=tenant, reserve_bytes=1000):
                pass

    async def patient(count: int) -> None:
        for _ in range(count):
            async with request(limit_bytes=100000, name="bench", budget=tenant, reserve_bytes=1000, timeout=1.0):
                pass

    def driven(enters: Callable[[int], Coroutine[Any, Any, None]]) -> Loop:
        def run(count: int) -> float:
            began = time.perf_counter()
            try:
                enters(count).send(None)
            except StopIteration:
                return (time.perf_counter() - began) / count * 1e9
            raise AssertionError("there is room, so nobody waits")

        return run

    variants = {WITHOUT: driven(without), WITH: driven(reserving), "the same, with a timeout": driven(patient)}
    rows = medians(variants, rounds, 3000)
    table("the same by async with", rows, WITHOUT)
    return rows


async def with_waiters(rounds: int) -> dict[str, Row]:
    """The same while others wait for a budget of their own."""
    full = ctxalloc.Budget(1000, name="full")
    full.max_waiting = WAITERS

    async def wait() -> None:
        async with ctxalloc.request(budget=full, reserve_bytes=1000, root=True):
            pass

    async with ctxalloc.request(budget=full, reserve_bytes=1000, root=True):
        waiting = [asyncio.create_task(wait()) for _ in range(WAITERS)]
        while full.waiting < WAITERS:  # noqa: ASYNC110 - the queue has no event
            await asyncio.sleep(0)
        title = f"the same, while {WAITERS} wait for another budget"
        # Not `to_thread`, which carries the request.
        rows = await asyncio.get_running_loop().run_in_executor(None, passing, rounds, title)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return rows


async def wake_ups(count: int) -> dict[str, Row]:
    """From the end of a request to the step of the coroutine that waited for it; beside what asyncio alone takes."""
    budget = ctxalloc.Budget(1000, name="one at a time")
    running = asyncio.get_running_loop()
    times: dict[str, list[float]] = {ON_A_THREAD: [], PLAIN: [], ON_THE_LOOP: []}
    began = [0.0]

    def wanting() -> ctxalloc.Request:
        return ctxalloc.request(budget=budget, reserve_bytes=1000, root=True)

    def hold(has_begun: threading.Event) -> None:
        with wanting():
            has_begun.set()
            time.sleep(0.002)
            began[0] = time.perf_counter()

    def settle(turn: "asyncio.Future[None]") -> None:
        time.sleep(0.002)
        began[0] = time.perf_counter()
        running.call_soon_threadsafe(turn.set_result, None)

    async def hold_here(is_awaited: asyncio.Event) -> None:
        async with wanting():
            is_awaited.set()
            while not budget.waiting:  # noqa: ASYNC110 - the queue has no event
                await asyncio.sleep(0)
            began[0] = time.perf_counter()

    for _ in range(count):
        has_begun = threading.Event()
        holder = threading.Thread(target=hold, args=(has_begun,))
        holder.start()
        has_begun.wait()
        async with wanting():
            times[ON_A_THREAD].append((time.perf_counter() - began[0]) * 1e9)
        holder.join()
        turn = running.create_future()
        holder = threading.Thread(target=settle, args=(turn,))
        holder.start()
        await turn
        times[PLAIN].append((time.perf_counter() - began[0]) * 1e9)
        holder.join()
        is_awaited = asyncio.Event()
        task = asyncio.create_task(hold_here(is_awaited))
        await is_awaited.wait()
        async with wanting():
            times[ON_THE_LOOP].append((time.perf_counter() - began[0]) * 1e9)
        await task
    rows = {text: row_of(taken) for text, taken in times.items()}
    table("from the end of what was waited for to the coroutine", rows, PLAIN)
    return rows


def main() -> int:
    """Measures, prints, says what missed its aim, and keeps."""
    rounds = rounds_asked(__doc__)
    alone = passing(rounds, "a request that need not wait")
    by_async = awaiting(rounds)
    crowded = asyncio.run(with_waiters(rounds))
    wake_up = asyncio.run(wake_ups(10 * rounds))
    costs = {
        text: rows[WITH]["median_ns"] - rows[WITHOUT]["median_ns"]
        for text, rows in (
            ("a reservation", alone),
            ("a reservation by async with", by_async),
            (f"a reservation beside {WAITERS} waiters", crowded),
        )
    }
    for text, cost in costs.items():
        print(f"{text:44}{cost:+9.1f} ns  {'kept' if cost <= AIM_RESERVATION_NS else 'MISSED'}")
    for text, row in wake_up.items():
        times = row["median_ns"]
        print(f"{'a wake-up ' + text:44}{times:9.1f} ns  {'kept' if times <= AIM_WAKE_UP_NS else 'MISSED'}")
    keep("waiting", {"rounds": rounds, "alone": alone, "by_async": by_async, "crowded": crowded, "wake_up": wake_up})
    return 0


if __name__ == "__main__":
    sys.exit(main())
