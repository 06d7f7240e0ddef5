"""What CPython's side keeps for each line of execution, for each event loop, and for its pools of threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from dataclasses import dataclass, field
from typing import Any

from selection import Scope


class Boom(Exception):  # noqa: N818
    """What `raise` raises and `catch` catches."""


class Pool(concurrent.futures.ThreadPoolExecutor):
    """An executor whose threads were all started in an empty context, whatever the interpreter's flags."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        started = threading.Barrier(threads + 1)
        for _ in range(threads):
            contextvars.Context().run(self.submit, started.wait)
        started.wait()


@dataclass(slots=True, eq=False)
class Line:
    """A task, a thread or a job: what it holds, and the gate that its parent guards.

    Nothing in here is shared: it moves to a child when that starts (`gives`), and all the child has comes back
    when it is joined. So every look-up has one answer, whatever the scheduling.
    """

    tokens: dict[int, Any] = field(default_factory=dict)
    contexts: dict[int, contextvars.Context] = field(default_factory=dict)
    workers: dict[int, Pool] = field(default_factory=dict)
    holds: dict[int, Scope] = field(default_factory=dict)
    children: dict[int, Child] = field(default_factory=dict)
    arrived: int = 0
    opened: int = 0
    is_free: bool = False
    """Nobody will act on its gates any more: it passes them."""
    gate: asyncio.Future[None] | None = None
    watcher: asyncio.Future[None] | None = None

    def give(self, labels: tuple[int, ...], child: Line) -> None:
        for label in labels:
            for have, get in self._belongings(child):
                if label in have:
                    get[label] = have.pop(label)

    def take_back(self, child: Line) -> None:
        for have, get in self._belongings(child):
            have.update(get)
            get.clear()

    def _belongings(self, other: Line) -> tuple[tuple[dict[int, Any], dict[int, Any]], ...]:
        return (
            (self.tokens, other.tokens),
            (self.contexts, other.contexts),
            (self.workers, other.workers),
        )

    def end(self) -> None:
        """Leaves the scopes that are still held, oldest first, in the context that runs; children are on their own."""
        for scope in self.holds.values():
            leave(scope)
        self.holds.clear()
        self.orphan(self.children)

    def orphan(self, children: dict[int, Child]) -> None:
        """Nobody will open or cancel them any more."""
        for child in children.values():
            child.line.set_free()

    async def pass_gate(self) -> None:
        self.arrived += 1
        self.wake_watcher()
        if not self.is_free and self.opened < self.arrived:
            self.gate = asyncio.get_running_loop().create_future()
            await self.gate

    @property
    def is_at_gate(self) -> bool:
        return not self.is_free and self.arrived > self.opened

    def open(self) -> None:
        self.opened = self.arrived
        self._open_gate()

    def set_free(self) -> None:
        self.is_free = True
        self._open_gate()

    def _open_gate(self) -> None:
        if self.gate is not None and not self.gate.done():
            self.gate.set_result(None)

    def wake_watcher(self, *_: object) -> None:
        if self.watcher is not None and not self.watcher.done():
            self.watcher.set_result(None)


def leave(scope: Scope) -> str:
    """The outcome of leaving a scope here."""
    try:
        scope.__exit__(None, None, None)
    except ValueError:
        return "f"
    return "k"


@dataclass(slots=True, eq=False)
class Child:
    """A line as its parent sees it."""

    line: Line
    hub: Hub | None
    is_task: bool
    future: asyncio.Future[str] | None = None
    """A task's or a job's."""
    thread: threading.Thread | None = None
    ended: concurrent.futures.Future[str] = field(default_factory=concurrent.futures.Future)
    """A thread's."""

    async def is_at_gate(self) -> bool:
        """Waits until the task is at a gate (true) or has ended (false)."""
        assert self.future is not None
        while not self.future.done():
            if self.line.is_at_gate:
                return True
            self.line.watcher = asyncio.get_running_loop().create_future()
            await self.line.watcher
        return False

    async def outcome(self) -> str:
        """Waits for its end: k (returned), p (raised) or c (cancelled)."""
        if self.future is None:
            await asyncio.wrap_future(self.ended)
            return self.outcome_by_blocking()
        await asyncio.wait([self.future])
        if self.future.cancelled():
            return "c"
        error = self.future.exception()
        if isinstance(error, Boom):
            return "p"
        return self.future.result()

    def outcome_by_blocking(self) -> str:
        """A thread's."""
        assert self.thread is not None
        outcome = self.ended.result()
        self.thread.join()
        return outcome


@dataclass(slots=True, eq=False)
class Hub:
    """An event loop and what was started on it."""

    loop: asyncio.AbstractEventLoop
    ambient: contextvars.Context
    """What a task that carries nothing runs in: the context of the thread that runs the loop."""
    pool: Pool | None = None
    children: list[Child] = field(default_factory=list)

    def executor(self) -> Pool:
        if self.pool is None:
            self.pool = Pool(2)
            self.loop.set_default_executor(self.pool)
        return self.pool

    async def drain(self) -> None:
        """Waits until nothing runs on the loop any more."""
        while self.children:
            await self.children.pop().outcome()


@dataclass(slots=True, frozen=True)
class Frame:
    """Where a body runs."""

    line: Line
    hub: Hub | None = None
    stream: Any = None
    by_hand: bool = False
    """It is stepped by hand: only `yield` may suspend it."""
    is_sync: bool = False
    """Nothing may suspend it: it waits by blocking."""
