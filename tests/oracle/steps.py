"""One run of one program on CPython: its trace, and how bodies and lines are run.

A step writes two entries into the trace, an outcome and the current handler each: when its body begins, and when it
ends. What a word does is in called.py, awaited.py and start.py.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from language import Node
from line import Boom, Child, Frame, Hub, Line, Pool
from selection import Selection

NOTHING: Final = "--"
"""A step that did not run, or did not end."""


class Step:
    """A node with its place in the trace."""

    __slots__ = ("bodies", "index", "numbers", "word")

    def __init__(self, node: Node, count: list[int]) -> None:
        self.index = count[0]
        count[0] += 1
        self.word = node.word
        self.numbers = node.numbers
        self.bodies = tuple(tuple(Step(child, count) for child in body) for body in node.bodies)


class Run:
    """One run of one program."""

    def __init__(
        self, selection: Selection, steps: int, called: Mapping[str, Called], awaited: Mapping[str, Awaited]
    ) -> None:
        self.selection = selection
        self.called = called
        self.awaited = awaited
        self.trace = [NOTHING] * (2 * steps)
        self.threads: list[Child] = []
        self.pools: list[Pool] = []

    # ---- the trace ----

    def begin(self, step: Step, outcome: str = "k", handler: int | None = None) -> None:
        self._record(2 * step.index, outcome, handler)

    def end(self, step: Step, outcome: str = "k", handler: int | None = None) -> None:
        self._record(2 * step.index + 1, outcome, handler)

    def _record(self, entry: int, outcome: str, handler: int | None) -> None:
        twice = self.trace[entry] != NOTHING
        self.trace[entry] = "!!" if twice else f"{outcome}{self.selection.current() if handler is None else handler}"

    # ---- bodies and lines ----

    async def main(self, root: Step, hub: Hub) -> None:
        """The whole program, until nothing of it runs any more."""
        frame = Frame(Line(is_free=True), hub)
        task = hub.loop.create_task(self.line(frame, root), context=contextvars.Context())
        await asyncio.wait([task])
        error = task.exception()
        if error is not None and not isinstance(error, Boom):
            raise error
        await hub.drain()
        while self.threads:
            child = self.threads.pop()
            assert child.thread is not None
            child.ended.result()
            child.thread.join()
        for pool in self.pools:
            pool.shutdown()

    async def line(self, frame: Frame, step: Step) -> str:
        """A task from its first step to its last."""
        try:
            await self.with_ending(frame, step)
        finally:
            frame.line.end()
        return "k"

    async def with_ending(self, frame: Frame, step: Step) -> None:
        """The body, and then the ending (a task's or a scoped future's), whatever way the body was left."""
        try:
            await self.inner(frame, step)
        finally:
            for body in step.bodies[1:]:
                self.run_sync(frame, body)

    def sync_line(self, frame: Frame, step: Step) -> str:
        """A thread or a job."""
        try:
            self.sync_inner(frame, step)
        except Boom:
            return "p"
        finally:
            frame.line.end()
        return "k"

    async def inner(self, frame: Frame, step: Step, body: int = 0) -> None:
        """One body of a step, begun in the trace."""
        self.begin(step)
        await self.run(frame, step.bodies[body])

    def sync_inner(self, frame: Frame, step: Step, body: int = 0) -> None:
        self.begin(step)
        self.run_sync(frame, step.bodies[body])

    async def run(self, frame: Frame, body: tuple[Step, ...]) -> None:
        for step in body:
            awaited = self.awaited.get(step.word)
            if awaited is None:
                self.called[step.word](self, frame, step)
            else:
                await awaited(self, frame, step)

    def run_sync(self, frame: Frame, body: tuple[Step, ...]) -> None:
        for step in body:
            self.called[step.word](self, frame, step)


Called = Callable[[Run, Frame, Step], None]
Awaited = Callable[[Run, Frame, Step], Awaitable[None]]
