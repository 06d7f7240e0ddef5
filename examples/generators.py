"""Generators: a `with` across a `yield` leaks into the caller; the decorator does not.

`python examples/generators.py` prints::

    with across a yield: the item is in aligned64, the caller in aligned64
    decorated:           the items are in aligned64, aligned64, aligned64, the caller in default_allocator
    decorated, async:    the items are in pool, pool, the caller in default_allocator
    two at once:         aligned64 pool, aligned64 pool
"""

import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np
import numpy.typing as npt

import ctxalloc

Array = npt.NDArray[np.float64]


def where(array: Array) -> str:
    """Name the handler of an array."""
    handler = ctxalloc.handler_of(array)
    return handler.name if handler else "no handler"


# A generator's body runs in the context of whoever calls next(), and stops in the middle of it. So this scope
# lasts, for the caller, until the generator goes on: what PEP 567 says of every ContextVar.
def leaking() -> Iterator[Array]:
    """Do not do this."""
    with ctxalloc.use("aligned64"):
        yield np.ones(10)


def plain(count: int) -> Iterator[Array]:
    """Make arrays in whatever is selected at each step."""
    for _ in range(count):
        yield np.ones(10)


# The decorator enters the scope for each step and leaves it before the item goes out.
@ctxalloc.use("aligned64")
def chunks(count: int) -> Iterator[Array]:
    """Make arrays one by one."""
    for _ in range(count):
        yield np.ones(10)


@ctxalloc.use("pool")
async def incoming(count: int) -> AsyncIterator[Array]:
    """Make arrays one by one, with awaits between."""
    for _ in range(count):
        await asyncio.sleep(0)
        yield np.ones(10)


async def main() -> None:
    generator = leaking()
    item = next(generator)
    print(f"with across a yield: the item is in {where(item)}, the caller in {ctxalloc.current().name}")
    assert ctxalloc.current().name == "aligned64"
    assert next(generator, None) is None  # runs to its end, and so out of the scope
    assert ctxalloc.current().name == "default_allocator"

    names = []
    for item in chunks(3):
        names.append(where(item))
        assert ctxalloc.current().name == "default_allocator"
    print(f"decorated:           the items are in {', '.join(names)}, the caller in {ctxalloc.current().name}")

    names = []
    async for item in incoming(2):
        names.append(where(item))
        assert ctxalloc.current().name == "default_allocator"
    print(f"decorated, async:    the items are in {', '.join(names)}, the caller in {ctxalloc.current().name}")

    # Steps of several generators may alternate: each has its own selection.
    one, other = ctxalloc.use("aligned64")(plain)(2), ctxalloc.use("pool")(plain)(2)
    steps = [f"{where(a)} {where(b)}" for a, b in zip(one, other, strict=True)]
    print(f"two at once:         {', '.join(steps)}")


if __name__ == "__main__":
    asyncio.run(main())
