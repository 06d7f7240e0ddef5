"""``async with`` of a request that reserves memory: it waits in the queue for room.

The queue is in Rust (``src/room``). Here is only what the loops have: asyncio's future and trio's cancel scope, by
which a task is woken from whatever thread room came on.
"""

import asyncio
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from ctxalloc._native import _is_trios

if TYPE_CHECKING:
    from ctxalloc._native import Request, _Admission


class Listener(Protocol):
    """Who does something while a request waits. What it raises is as a cancellation."""

    async def until(self, turn: "asyncio.Future[None]") -> None:
        """Under asyncio: returns when the turn has come."""

    async def until_cancelled(self) -> None:
        """Under trio, where it is cancelled when the turn has come: never returns."""


async def enter(
    request: "Request",
    *,
    selects: bool = True,
    listener: Listener | None = None,
) -> "Request":
    """Enter ``request`` when there is room. Cancelled, it leaves the queue, or returns what it has just got.

    ``selects``: whether its handler is selected.
    """
    admission = request._enter_or_wait(selects)  # noqa: SLF001 - made for this
    return request if admission is None else await wait(request, admission, listener)


async def wait(request: "Request", admission: "_Admission", listener: Listener | None = None) -> "Request":
    """Enter ``request`` when it is its turn."""
    if _is_trios():
        return await _wait_in_trio(request, admission, listener)
    watched: _Waiters | None = None
    try:
        loop = _running_loop(request)
        while True:
            turn = loop.create_future()
            if admission.enter(_Call(loop, turn, admission)):
                return request
            if watched is None:
                watched = _watched(loop)
            watched[id(admission)] = (turn, weakref.ref(admission))
            await (turn if listener is None else listener.until(turn))
            if admission.enter():  # woken for nothing it asks once more
                return request
    finally:
        admission.leave()
        if watched is not None:
            watched.pop(id(admission), None)


async def _wait_in_trio(request: "Request", admission: "_Admission", listener: Listener | None) -> "Request":
    """The same in a task of trio, which lives until it has ended: nobody needs to hold it."""
    trio: Any = sys.modules["trio"]
    token = trio.lowlevel.current_trio_token()
    try:
        while True:
            turn = trio.CancelScope()
            if admission.enter(_TrioCall(token, turn, admission)):
                return request
            with turn:
                await (trio.sleep_forever() if listener is None else listener.until_cancelled())
            if admission.enter():
                return request
    finally:
        admission.leave()


def _running_loop(request: "Request") -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            f"{request!r} has to wait for room, and `async with` waits in tasks of asyncio and of trio, none of which "
            "runs here; enter it with `with` in a thread"
        ) from None


_Waiters: TypeAlias = dict[int, tuple["asyncio.Future[None]", "weakref.ref[_Admission]"]]
"""The turns that are awaited in a loop. A loop's tasks are weak: it is its turn that holds a task that waits."""


class _Watch:
    """Holds those who wait in a loop, and takes them out of the queue when it is closed, where nothing ever goes on.

    A loop tells nobody that it is closed, but it lets go of its timers then. One of them has this, and nobody else has.
    So a task that nobody else refers to waits as long as its loop lives, and one that somebody does refer to does not
    stand before all others for ever.
    """

    __slots__ = ("__weakref__", "loop", "watched")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = weakref.ref(loop)
        self.watched: _Waiters = {}
        loop.call_later(_WATCH_SECONDS, self)

    def __call__(self) -> None:
        """Its time is over: who waits still is watched once more."""
        loop = self.loop()
        if loop is not None and self.watched:
            loop.call_later(_WATCH_SECONDS, self)

    def __del__(self) -> None:
        admissions = [known() for _, known in self.watched.values()]
        self.watched.clear()  # frames of those who wait refer to it
        for admission in admissions:
            if admission is not None:
                admission.leave()


_WATCH_SECONDS: Final = 600.0

_HERE = threading.local()
"""``watch``: weak, the last _Watch of this thread."""


def _watched(loop: asyncio.AbstractEventLoop) -> _Waiters:
    """Those who wait in this loop."""
    known: weakref.ref[_Watch] | None = getattr(_HERE, "watch", None)
    watch = None if known is None else known()
    if watch is None or watch.loop() is not loop:
        watch = _Watch(loop)
        _HERE.watch = weakref.ref(watch)
    return watch.watched


class _Call:
    """Wakes a coroutine that waits, from whatever thread. Where its loop is closed, it leaves the queue in its place.

    All weak: the queue has this, and the garbage collector does not see into the queue. The loop's ``_Watch`` holds the
    turn.
    """

    __slots__ = ("_admission", "_is_over", "_loop", "_turn")

    def __init__(self, loop: asyncio.AbstractEventLoop, turn: "asyncio.Future[None]", admission: "_Admission") -> None:
        self._loop = weakref.ref(loop)
        self._turn = weakref.ref(turn)
        self._admission = weakref.ref(admission)
        self._is_over = True  # it has asked nobody for anything yet

    def __call__(self) -> None:
        loop = self._loop()
        if loop is None:
            return
        self._is_over = False
        # One who ends its request in a step of the same loop, after which the loop looks at what is ready.
        if loop is asyncio._get_running_loop() and asyncio.current_task(loop) is not None:  # noqa: SLF001 - for loops
            self.settle()
            return
        try:
            loop.call_soon_threadsafe(self.settle)
        except RuntimeError:  # it is closed
            self._leave()

    def settle(self) -> None:
        """On the loop's thread."""
        self._is_over = True
        turn = self._turn()
        if turn is not None and not turn.done():
            turn.set_result(None)

    def _leave(self) -> None:
        self._is_over = True
        admission = self._admission()
        if admission is not None:
            admission.leave()

    def __del__(self) -> None:
        # The loop was closed before it came to this.
        if not self._is_over:
            self._leave()


class _TrioCall:
    """Wakes a task of trio that waits, from whatever thread. Weak, as ``_Call`` is."""

    __slots__ = ("_admission", "_token", "_turn")

    def __init__(self, token: Any, turn: Any, admission: "_Admission") -> None:
        self._token = weakref.ref(token)
        self._turn = weakref.ref(turn)
        self._admission = weakref.ref(admission)

    def __call__(self) -> None:
        token, turn = self._token(), self._turn()
        if token is None or turn is None:
            return
        try:
            token.run_sync_soon(turn.cancel)
        except sys.modules["trio"].RunFinishedError:
            admission = self._admission()
            if admission is not None:
                admission.leave()
