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
from typing import Any

from harness import Row, keep, loop, medians, rounds_asked, row_of, table

import ctxalloc

AIM_RESERVATION_NS = 100.0
AIM_WAKE_UP_NS = 20_000.0
WAITERS = 10_000
WITHOUT, WITH = "with a budget and a limit", "the same, with a reservation"


def passing(rounds: int, title: str) -> dict[str, Row]:
    """Entering and leaving, with room for all."""
    tenant = ctxalloc.Budget(1 << 30, parent=ctxalloc.Budget(1 << 40))
    names: dict[str, Any] = {"request": ctxalloc.request, "tenant": tenant}
    terms = "limit_bytes=100000, name='bench', budget=tenant"
    variants = {
        WITHOUT: loop(f"with request({terms}):\n    pass", **names),
        WITH: loop(f"with request({terms}, reserve_bytes=1000):\n    pass", **names),
        "the same, by history": loop(f"with request({terms}, reserve_bytes='auto'):\n    pass", **names),
    }
    rows = medians(variants, rounds, 3000)
    table(title, rows, WITHOUT)
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


async def wake_ups(count: int) -> Row:
    """From the end of a request on a thread to the step of the coroutine that waited for it."""
    budget = ctxalloc.Budget(1000, name="one at a time")
    ended = [0.0]
    times: list[float] = []

    def hold(has_begun: threading.Event, ends: threading.Event) -> None:
        with ctxalloc.request(budget=budget, reserve_bytes=1000, root=True):
            has_begun.set()
            ends.wait()
            ended[0] = time.perf_counter()

    for _ in range(count):
        has_begun, ends = threading.Event(), threading.Event()
        holder = threading.Thread(target=hold, args=(has_begun, ends))
        holder.start()
        await asyncio.get_running_loop().run_in_executor(None, has_begun.wait)
        timer = threading.Timer(0.002, ends.set)
        timer.start()
        async with ctxalloc.request(budget=budget, reserve_bytes=1000, root=True):
            times.append((time.perf_counter() - ended[0]) * 1e9)
        holder.join()
        timer.join()
    row = row_of(times)
    table("from the end of what was waited for to the coroutine", {"wake-up": row}, "wake-up")
    return row


def main() -> int:
    """Measures, prints, says what missed its aim, and keeps."""
    rounds = rounds_asked(__doc__)
    alone = passing(rounds, "a request that need not wait")
    crowded = asyncio.run(with_waiters(rounds))
    wake_up = asyncio.run(wake_ups(10 * rounds))
    costs = {
        text: rows[WITH]["median_ns"] - rows[WITHOUT]["median_ns"]
        for text, rows in (("a reservation", alone), (f"a reservation beside {WAITERS} waiters", crowded))
    }
    for text, cost in costs.items():
        print(f"{text:44}{cost:+9.1f} ns  {'kept' if cost <= AIM_RESERVATION_NS else 'MISSED'}")
    times = wake_up["median_ns"]
    print(f"{'a wake-up':44}{times:9.1f} ns  {'kept' if times <= AIM_WAKE_UP_NS else 'MISSED'}")
    keep("waiting", {"rounds": rounds, "alone": alone, "crowded": crowded, "wake_up": wake_up})
    return 0


if __name__ == "__main__":
    sys.exit(main())
