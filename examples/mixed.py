"""Python and Rust: one selection on both sides, and through each of the four crossings between them.

`ctxalloc_example` is an extension module in Rust (examples/extension); tokio runs its futures on threads of its own.
`python examples/mixed.py` prints::

    Python calls Rust             Rust sees aligned64, its buffer is in aligned64
    Python awaits a Rust future   7 looks on the way, in tasks and threads: all aligned64
    a Rust task makes an array    in pool, which is the task's, while the caller has aligned64
    Rust awaits a coroutine       which makes its array in pool
    three blurs at once           aligned64 pool default_allocator
    cancelled from Python         the coroutine that Rust awaited was cancelled
"""

import asyncio

import numpy as np

import ctxalloc
import ctxalloc_example as rust


def where(array: object) -> str:
    """Name the handler of an array."""
    assert isinstance(array, np.ndarray)
    handler = ctxalloc.handler_of(array)
    return handler.name if handler else "no handler"


async def blur(handler: str | None) -> str:
    """Blur a picture in Rust, and say where the new one lives."""
    picture = np.zeros((64, 64), np.uint8)
    picture[20:40, 20:40] = 255
    async with ctxalloc.use(handler):
        blurred = await rust.box_blur(picture, 2)
    assert (blurred[30, 30], blurred[0, 0]) == (255, 0)
    assert 0 < blurred[20, 30] < 255
    return where(blurred)


async def main() -> None:
    with ctxalloc.use("aligned64"):
        name, size_bytes = rust.buffer_of(1000)
        assert size_bytes == 1000
        print(f"Python calls Rust             Rust sees {rust.handler_here()}, its buffer is in {name}")

        looks = await rust.handlers_on_the_way(2)
        assert {name for name, _thread in looks} == {"aligned64"}
        print(f"Python awaits a Rust future   {len(looks)} looks on the way, in tasks and threads: all aligned64")

        array = await rust.array_made_in("pool", 1000)
        caller = ctxalloc.current().name
        print(f"a Rust task makes an array    in {where(array)}, which is the task's, while the caller has {caller}")

        async def coroutine() -> str:
            await asyncio.sleep(0)
            return where(np.ones(1000))

        print(f"Rust awaits a coroutine       which makes its array in {await rust.await_python(coroutine, 'pool')}")

    print("three blurs at once          ", *await asyncio.gather(blur("aligned64"), blur("pool"), blur(None)))

    # Cancelling either side cancels the other.
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def waits_for_ever() -> None:
        started.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    waiting = asyncio.ensure_future(rust.await_python(waits_for_ever))
    await started.wait()
    waiting.cancel()
    await cancelled.wait()
    print("cancelled from Python         the coroutine that Rust awaited was cancelled")


if __name__ == "__main__":
    asyncio.run(main())
