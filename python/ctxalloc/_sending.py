"""Headers that are being sent, for ``asgi``: another task's part of the body waits for their end."""

import asyncio
import sys
from typing import Any

from ctxalloc._native import _is_trios


class Sending:
    """Under asyncio or trio."""

    __slots__ = ("_event", "_is_over")

    def __init__(self) -> None:
        self._event: Any = None  # of who waits, which is seldom anybody
        self._is_over = False

    def end(self) -> None:
        self._is_over = True
        if self._event is not None:
            self._event.set()

    async def ended(self) -> None:
        if self._is_over:
            return
        if self._event is None:
            self._event = sys.modules["trio"].Event() if _is_trios() else asyncio.Event()
        await self._event.wait()
