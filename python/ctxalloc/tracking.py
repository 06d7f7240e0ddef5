"""What is alive under a handler whose strategy is ``strategies.Tracked``: the handler ``tracked``, or one of your own.

``Handler.live_blocks()`` lists the blocks; ``report`` groups a list; ``LeakCheck`` finds what a stretch of code left
behind.
"""

import gc
from types import TracebackType
from typing import Self

from ctxalloc._native import Block, Handler, Scope, report, use

__all__ = ["Block", "LeakCheck", "report"]


class LeakCheck:
    """Selects a tracked handler for a block of code, and lists what was made in it and outlives it.

    ::

        with ctxalloc.tracking.LeakCheck() as leaks:
            answer = handle(request)
        del answer
        assert not leaks.blocks(), leaks.report()

    ``handler`` is ``tracked`` unless you name another; with ``register("where", strategies.Tracked(traceback=5))`` the
    report says where. Garbage in cycles is collected first, so that what is left is held by somebody. What other
    threads and tasks make under the same handler meanwhile counts too. ValueError: the handler does not track.
    """

    __slots__ = ("_before", "_handler", "_inside", "_scope")

    def __init__(self, *, handler: Handler | str = "tracked") -> None:
        self._scope: Scope = use(handler)
        self._handler = self._scope.handler
        self._handler.live_blocks()  # it says so if it knows none
        self._before: frozenset[Block] = frozenset()
        self._inside: frozenset[Block] | None = None

    def __enter__(self) -> Self:
        self._scope.__enter__()
        self._before = frozenset(self._handler.live_blocks())
        self._inside = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self._scope.__exit__(kind, error, traceback)
        self._inside = frozenset(self._handler.live_blocks())

    @property
    def handler(self) -> Handler:
        """The handler that is selected."""
        return self._handler

    def blocks(self) -> list[Block]:
        """What was made inside and is still alive now, the oldest first; inside, all of it so far."""
        gc.collect()
        alive = [block for block in self._handler.live_blocks() if block not in self._before]
        return alive if self._inside is None else [block for block in alive if block in self._inside]

    def report(self) -> str:
        """The same, grouped by where they were made, as text."""
        return report(self.blocks())
