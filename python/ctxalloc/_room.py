"""``async with`` of a request that reserves memory: it waits in the queue for room.

The queue is in Rust (``src/room``). Here is only what asyncio has: a future, woken from whatever thread room came on.
"""

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctxalloc._native import Request


async def enter(
    request: "Request",
    *,
    selects: bool = True,
    until: "Callable[[asyncio.Future[None]], Awaitable[object]] | None" = None,
) -> "Request":
    """Enter ``request`` when there is room. Cancelled, it leaves the queue, or returns what it has just got.

    ``selects``: whether its handler is selected. ``until``: awaits the turn; what it raises is as a cancellation.
    """
    loop = asyncio.get_running_loop()
    admission = request._admission(selects=selects)  # noqa: SLF001 - made for this
    try:
        while True:
            turn = loop.create_future()
            # Weak: the queue has this function, and the garbage collector does not see into the queue.
            weak_turn, weak_loop = weakref.ref(turn), weakref.ref(loop)

            def notify(
                weak_turn: "weakref.ref[asyncio.Future[None]]" = weak_turn,
                weak_loop: "weakref.ref[asyncio.AbstractEventLoop]" = weak_loop,
            ) -> None:
                loop = weak_loop()
                if loop is not None:
                    with contextlib.suppress(RuntimeError):  # it was closed: nobody waits any more
                        loop.call_soon_threadsafe(_settle, weak_turn)

            if admission.enter(notify):
                return request
            await (turn if until is None else until(turn))
    finally:
        admission.leave()


def _settle(weak_turn: "weakref.ref[asyncio.Future[None]]") -> None:
    turn = weak_turn()
    if turn is not None and not turn.done():
        turn.set_result(None)
