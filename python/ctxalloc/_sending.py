"""Headers that are being sent, for ``asgi``: another task's part of the body waits for their end."""

import asyncio
import sys
from typing import Any


class Sending:
    """Under asyncio or trio."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        trio = sys.modules.get("trio")
        self._event: Any = asyncio.Event() if trio is None or not _runs(trio) else trio.Event()

    def end(self) -> None:
        self._event.set()

    async def ended(self) -> None:
        await self._event.wait()


def _runs(trio: Any) -> bool:
    """Whether this is one of its tasks; it may be a guest in asyncio's loop."""
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return False
    return True
