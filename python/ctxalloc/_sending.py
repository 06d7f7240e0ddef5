"""Headers that are being sent, for ``asgi``: another task's part of the body waits for their end."""

import asyncio
import sys
from typing import Any

from ctxalloc._native import _is_trios


class Sending:
    """Under asyncio or trio."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event: Any = sys.modules["trio"].Event() if _is_trios() else asyncio.Event()

    def end(self) -> None:
        self._event.set()

    async def ended(self) -> None:
        await self._event.wait()
