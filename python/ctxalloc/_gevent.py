"""A plain ``with`` of a request that waits for room in a greenlet: the others go on meanwhile.

Imported where gevent is there already: who waits otherwise blocks its thread, and with it gevent's hub and all
greenlets, of which one may be what it waits for.
"""

import asyncio
import sys
from types import FrameType
from typing import Any

import gevent
import gevent.event
import gevent.monkey


def runs_elsewhere(loop: object) -> bool:
    """Whether another greenlet runs this event loop, which asyncio knows of the thread.

    One that does not say in whose frames it runs (uvloop's) may be this greenlet's.
    """
    if not isinstance(loop, asyncio.BaseEventLoop) or not isinstance(gevent.getcurrent(), gevent.Greenlet):
        return False
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - a greenlet's frames end where it begins
    while frame is not None:
        if frame.f_code is asyncio.BaseEventLoop.run_forever.__code__ and frame.f_locals.get("self") is loop:
            return False
        frame = frame.f_back
    return True


def turn() -> "Turn | None":
    """For the greenlet that runs here; None where this is a thread like any other."""
    if gevent.monkey.is_module_patched("threading") or isinstance(gevent.getcurrent(), gevent.Greenlet):
        return Turn()
    return None


class Turn:
    """The turn of a greenlet: ``wake`` is called on whatever thread, ``wait`` and ``close`` on its own."""

    __slots__ = ("_came", "_watcher")

    def __init__(self) -> None:
        self._came = gevent.event.Event()
        # Started before anybody may call it: what comes before is lost.
        self._watcher: Any = gevent.get_hub().loop.async_()
        self._watcher.start(self._came.set)

    def wake(self) -> None:
        """Its turn may have come."""
        self._watcher.send()

    def wait(self) -> None:
        """Let other greenlets run until it may. It raises what the greenlet is killed by."""
        self._came.wait()
        self._came.clear()

    def close(self) -> None:
        """Nobody waits any more; `wake` may still be called."""
        self._watcher.stop()
