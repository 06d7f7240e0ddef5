"""Threads and executors: which of them start with the handler of whoever starts them, and how to take it along.

`python examples/threads_and_executors.py` prints::

    threading.Thread                    default_allocator
    loop.run_in_executor                default_allocator
    asyncio.to_thread                   aligned64
    copy_context().run in an executor   aligned64
    an executor with its own handler    pool, pool, pool
    made on 4 threads, freed on another: all of aligned64
"""

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

import ctxalloc


def here() -> str:
    """Name the handler of an array that is made here and now."""
    handler = ctxalloc.handler_of(np.ones(10))
    assert handler is ctxalloc.current()
    return handler.name


async def main() -> None:
    loop = asyncio.get_running_loop()
    with ctxalloc.use("aligned64"):
        # A new thread starts with the default, as with any ContextVar. (From Python 3.14 on
        # `sys.flags.thread_inherit_context` can say otherwise; it does on free-threaded builds.)
        seen: list[str] = []
        thread = threading.Thread(target=lambda: seen.append(here()))
        thread.start()
        thread.join()
        print(f"threading.Thread                    {seen[0]}")

        # So do the workers of an executor; asyncio copies the context only where its documentation says so.
        print(f"loop.run_in_executor                {await loop.run_in_executor(None, here)}")
        print(f"asyncio.to_thread                   {await asyncio.to_thread(here)}")

        # To take it along yourself: run the function in a copy of your context, one copy a call.
        carried = await loop.run_in_executor(None, contextvars.copy_context().run, here)
        print(f"copy_context().run in an executor   {carried}")

    # Or give an executor a handler of its own, whoever submits: each worker selects it when it starts.
    with ThreadPoolExecutor(2, initializer=ctxalloc.set_handler, initargs=("pool",)) as executor:
        print(f"an executor with its own handler    {', '.join(executor.map(lambda _: here(), range(3)))}")

    with ThreadPoolExecutor(4, initializer=ctxalloc.set_handler, initargs=("aligned64",)) as executor:
        arrays = list(executor.map(make, range(4)))
    assert [array[0] for array in arrays] == [0, 1, 2, 3]
    assert {ctxalloc.handler_of(array) for array in arrays} == {ctxalloc.handler("aligned64")}
    freeing = threading.Thread(target=arrays.clear)  # this thread has the default: an array does not care
    freeing.start()
    freeing.join()
    print("made on 4 threads, freed on another: all of aligned64")


def make(number: int) -> npt.NDArray[np.int64]:
    """An array that says who made it."""
    return np.full(100_000, number)


if __name__ == "__main__":
    asyncio.run(main())
