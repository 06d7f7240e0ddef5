"""One run of one program on CPython: its trace, and how bodies and lines are run.

A step writes two entries into the trace, an outcome and the current handler each: when its body begins, and when it
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Final

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
    """One run of one program. What a word does, with its outcome, is a method of words.Words: `do_look`, ..."""

    def __init__(self, selection: Selection, steps: int) -> None:
        self.selection = selection
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
            child.outcome_by_blocking()
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
                self.call(frame, body)

    def sync_line(self, frame: Frame, step: Step) -> str:
        """A thread or a job."""
        try:
            self.call_inner(frame, step)
        except Boom:
            return "p"
        finally:
            frame.line.end()
        return "k"

    async def inner(self, frame: Frame, step: Step) -> None:
        """The first body of a step, begun in the trace."""
        self.begin(step)
        await self.run(frame, step.bodies[0])

    async def run(self, frame: Frame, body: tuple[Step, ...]) -> None:
        for step in body:
            outcome = await getattr(self, f"do_{step.word}")(frame, step)
            if outcome is not None:  # else the word wrote its end itself
                self.end(step, outcome)

    def call_inner(self, frame: Frame, step: Step) -> None:
        """The same as a synchronous function."""
        self.begin(step)
        self.call(frame, step.bodies[0])

    def call(self, frame: Frame, body: tuple[Step, ...]) -> None:
        finish(self.run(replace(frame, is_sync=True), body))


def finish(steps: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine that never suspends."""
    with contextlib.suppress(StopIteration):
        steps.send(None)
        steps.close()
        raise AssertionError("a synchronous body suspended: language.py should not allow that")
