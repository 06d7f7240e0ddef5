"""asyncio: requests under way at the same time, each in its own handler, through awaits, tasks and threads.

`python examples/asyncio_requests.py` prints::

    /fft     asked for aligned64  found aligned64 on 4 of 4 arrays
    /resize  asked for pool       found pool on 4 of 4 arrays
    /health  asked for nothing    found default_allocator on 4 of 4 arrays
    outside of the requests: default_allocator
"""

import asyncio

import numpy as np
import numpy.typing as npt

import ctxalloc

ROUTES = {"/fft": "aligned64", "/resize": "pool", "/health": None}


def make() -> npt.NDArray[np.float64]:
    """Make an array, wherever it is called."""
    return np.ones(1000)


async def serve_one(handler: str | None, all_started: asyncio.Barrier) -> list[npt.NDArray[np.float64]]:
    """Make arrays before and after an await, in a task, and in a thread."""
    async with ctxalloc.use(handler):
        before = make()
        await all_started.wait()  # the other requests select their handlers now
        in_a_task = asyncio.create_task(asyncio.to_thread(make))
        in_a_thread = asyncio.to_thread(make)
        return [before, make(), await in_a_task, await in_a_thread]


async def main() -> None:
    all_started = asyncio.Barrier(len(ROUTES))
    made = await asyncio.gather(*(serve_one(handler, all_started) for handler in ROUTES.values()))

    # The scopes are over and their tasks are gone: an array still knows its handler, and will be freed by it.
    for (path, wanted), arrays in zip(ROUTES.items(), made, strict=True):
        expected = ctxalloc.handler(wanted or "default_allocator")
        right = sum(ctxalloc.handler_of(array) is expected for array in arrays)
        assert right == len(arrays), arrays
        print(f"{path:8} asked for {wanted or 'nothing':10} found {expected.name} on {right} of {len(arrays)} arrays")

    print(f"outside of the requests: {ctxalloc.current().name}")


if __name__ == "__main__":
    asyncio.run(main())
