"""Which blocks are alive under a handler with a ``strategies.Tracked``: the handler ``tracked``, or one of your own.

``Handler.live_blocks()`` lists them, ``report`` groups a list, ``LeakCheck`` finds those that a piece of code left
behind.
"""

import gc
from types import TracebackType
from typing import Self

from ctxalloc._native import Block, Handler, Scope, report, use

__all__ = ["Block", "LeakCheck", "report"]


class LeakCheck:
    """Selects a tracked handler for a ``with`` block, and lists the allocations made in it that outlive it.

    ::

        with ctxalloc.tracking.LeakCheck() as leaks:
            answer = handle(request)
        del answer
        assert not leaks.blocks(), leaks.report()

    ``handler`` is ``tracked`` by default; with one of ``register("where", strategies.Tracked(traceback=5))`` the report
    says where the blocks were made. Garbage is collected first, so that something refers to whatever is left.
    Allocations that other threads and tasks make under the same handler meanwhile count too. ValueError: the handler
    does not track its blocks.
    """

    __slots__ = ("_before", "_handler", "_inside", "_scope")

    def __init__(self, *, handler: Handler | str = "tracked") -> None:
        self._scope: Scope = use(handler)
        self._handler = self._scope.handler
        self._handler.live_blocks()  # raises ValueError here if it tracks none
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
        """The blocks that were made in the ``with`` block and are alive now, the oldest first."""
        gc.collect()
        alive = [block for block in self._handler.live_blocks() if block not in self._before]
        return alive if self._inside is None else [block for block in alive if block in self._inside]

    def report(self) -> str:
        """The same blocks as text, grouped by where they were made."""
        return report(self.blocks())
