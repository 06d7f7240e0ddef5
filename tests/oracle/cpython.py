"""CPython's interpreter of programs: contextvars, asyncio, threads and executors, on either selection.

Each word is one method, which does with the standard library what README.md says the word means. A step writes two
entries into the trace, an outcome and the current handler each: when its body begins, and when it ends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

from language import IN_CONTEXT, PLAIN, WITH_HANDLER, Node
from line import Boom, Child, Frame, Hub, Line, Pool, leave
from selection import InContext, Selection

NOTHING: Final = "--"
"""A step that did not run, or did not end."""
THREADS_INHERIT: Final = bool(getattr(sys.flags, "thread_inherit_context", False))
"""Python 3.14's flag, on in free-threaded builds: a plain thread starts with a copy of its starter's context."""


class Step:
    """A node with its place in the trace."""

    __slots__ = ("bodies", "index", "numbers", "word")

    def __init__(self, node: Node, count: list[int]) -> None:
        self.index = count[0]
        count[0] += 1
        self.word = node.word
        self.numbers = node.numbers
        self.bodies = tuple(tuple(Step(child, count) for child in body) for body in node.bodies)


class Interpreter:
    """An event loop and a pool, used for program after program."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.pool = Pool(3)
        self.loop.set_default_executor(self.pool)

    def run(self, program: Node, selection: Selection) -> str:
        """The trace of a program."""
        count = [0]
        root = Step(program, count)
        run = Run(selection, count[0])
        hub = Hub(self.loop, contextvars.Context(), self.pool)
        self.loop.run_until_complete(run.main(root, hub))
        return "".join(run.trace)

    def close(self) -> None:
        """Ends the loop and the pool's threads."""
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.pool.shutdown()
        self.loop.close()


class Run:
    """One run of one program."""

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
            assert child.thread is not None
            child.ended.result()
            child.thread.join()
        for pool in self.pools:
            pool.shutdown()

    async def line(self, frame: Frame, step: Step) -> str:
        """A task from its first step to its last."""
        try:
            await self.inner(frame, step)
        finally:
            frame.line.end()
        return "k"

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
            awaited = AWAITED.get(step.word)
            if awaited is None:
                CALLED[step.word](self, frame, step)
            else:
                await awaited(self, frame, step)

    def run_sync(self, frame: Frame, body: tuple[Step, ...]) -> None:
        for step in body:
            CALLED[step.word](self, frame, step)

    # ---- the selection of the running context ----

    def look(self, _frame: Frame, step: Step) -> None:
        self.end(step, handler=self.selection.block() if step.numbers[0] else None)

    def set(self, frame: Frame, step: Step) -> None:
        label, handler = step.numbers
        token = self.selection.set(handler)
        frame.line.tokens[label] = token
        self.begin(step, handler=self.selection.old(token))
        self.end(step)

    def reset(self, frame: Frame, step: Step) -> None:
        token = frame.line.tokens.get(step.numbers[0])
        outcome = "n"
        if token is not None:
            try:
                self.selection.reset(token)
                outcome = "k"
            except RuntimeError:
                outcome = "u"
            except ValueError:
                outcome = "f"
        self.end(step, outcome)

    def enter(self, frame: Frame, step: Step) -> None:
        label, handler = step.numbers
        scope = self.selection.scope(handler)
        scope.__enter__()
        frame.line.holds[label] = scope
        self.end(step)

    def leave(self, frame: Frame, step: Step) -> None:
        scope = frame.line.holds.pop(step.numbers[0], None)
        self.end(step, "n" if scope is None else leave(scope))

    async def with_(self, frame: Frame, step: Step) -> None:
        flavour, handler = step.numbers
        if flavour == 0:
            with self.selection.scope(handler):
                await self.inner(frame, step)
        elif flavour == 1:
            async with self.selection.scope(handler):
                await self.inner(frame, step)
        else:

            async def function() -> None:
                await self.inner(frame, step)

            await self.selection.decorated(handler, function)()
        self.end(step)

    def sync_with(self, frame: Frame, step: Step) -> None:
        flavour, handler = step.numbers
        if flavour == 2:
            self.selection.decorated(handler, lambda: self.sync_inner(frame, step))()
        else:
            with self.selection.scope(handler):
                self.sync_inner(frame, step)
        self.end(step)

    # ---- ways out of a body ----

    async def try_(self, frame: Frame, step: Step) -> None:
        try:
            await self.inner(frame, step)
        finally:
            self.run_sync(frame, step.bodies[1])
        self.end(step)

    def sync_try(self, frame: Frame, step: Step) -> None:
        try:
            self.sync_inner(frame, step)
        finally:
            self.run_sync(frame, step.bodies[1])
        self.end(step)

    async def catch(self, frame: Frame, step: Step) -> None:
        try:
            await self.inner(frame, step)
        except Boom:
            self.end(step, "p")
        else:
            self.end(step)

    def sync_catch(self, frame: Frame, step: Step) -> None:
        try:
            self.sync_inner(frame, step)
        except Boom:
            self.end(step, "p")
        else:
            self.end(step)

    def raise_(self, _frame: Frame, step: Step) -> None:
        self.end(step)
        raise Boom

    # ---- contexts as values ----

    def copy(self, frame: Frame, step: Step) -> None:
        frame.line.contexts[step.numbers[0]] = contextvars.copy_context()
        self.end(step)

    def fresh(self, frame: Frame, step: Step) -> None:
        frame.line.contexts[step.numbers[0]] = contextvars.Context()
        self.end(step)

    def clone(self, frame: Frame, step: Step) -> None:
        label, of = step.numbers
        context = frame.line.contexts.get(of)
        if context is not None:
            frame.line.contexts[label] = context.copy()
        self.end(step, "n" if context is None else "k")

    def peek(self, frame: Frame, step: Step) -> None:
        context = frame.line.contexts.get(step.numbers[0])
        if context is not None:
            self.begin(step, handler=context.run(self.selection.current))
        self.end(step, "n" if context is None else "k")

    def run_in(self, frame: Frame, step: Step) -> None:
        (label,) = step.numbers
        context = frame.line.contexts.pop(label, None)  # gone while it runs: nobody else may run it then
        if context is None:
            return self.end(step, "n")
        try:
            context.run(self.sync_inner, frame, step)
        finally:
            frame.line.contexts[label] = context
        return self.end(step)

    # ---- lines of execution ----

    def spawn(self, frame: Frame, step: Step) -> None:
        label, kind, with_, *gives = step.numbers
        assert frame.hub is not None
        context: contextvars.Context | None = None
        if kind == PLAIN:
            context = frame.hub.ambient.copy()
        elif kind == IN_CONTEXT:
            context = frame.line.contexts.pop(with_, None)
            if context is None:
                return self.end(step, "n")
        elif kind == WITH_HANDLER:
            context = contextvars.copy_context()
            context.run(self.selection.set, with_)
        line = Line()
        frame.line.give(tuple(gives), line)
        future = frame.hub.loop.create_task(self.line(Frame(line, frame.hub), step), context=context)
        future.add_done_callback(line.wake_watcher)
        frame.line.children[label] = child = Child(line, frame.hub, is_task=True, future=future)
        frame.hub.children.append(child)
        return self.end(step)

    def thread(self, frame: Frame, step: Step) -> None:
        label, kind, with_, *gives = step.numbers
        context: contextvars.Context | None = None
        if kind == IN_CONTEXT:
            context = frame.line.contexts.pop(with_, None)
            if context is None:
                return self.end(step, "n")
        elif kind != PLAIN:
            context = contextvars.copy_context()
        child = Child(Line(is_free=True), None, is_task=False)
        frame.line.give(tuple(gives), child.line)

        def body() -> str:
            return self.sync_line(Frame(child.line), step)

        def target() -> None:
            try:
                child.ended.set_result(body() if context is None else context.run(body))
            except BaseException as error:  # noqa: BLE001
                child.ended.set_exception(error)

        child.thread = threading.Thread(target=target)
        child.thread.start()
        frame.line.children[label] = child
        self.threads.append(child)
        return self.end(step)

    def job(self, frame: Frame, step: Step) -> None:
        label, kind, _, *gives = step.numbers
        assert frame.hub is not None
        line = Line(is_free=True)
        frame.line.give(tuple(gives), line)
        executor = frame.hub.executor()
        future: asyncio.Future[str]
        if kind == PLAIN:
            future = frame.hub.loop.run_in_executor(executor, self.sync_line, Frame(line), step)
        else:
            future = frame.hub.loop.create_task(asyncio.to_thread(self.sync_line, Frame(line), step))
        frame.line.children[label] = child = Child(line, frame.hub, is_task=False, future=future)
        frame.hub.children.append(child)
        self.end(step)

    async def work(self, frame: Frame, step: Step) -> None:
        line, pool, future = self._submit(frame, step)
        outcome = await asyncio.wrap_future(future)
        self._take_back_worker(frame, step, line, pool)
        self.end(step, outcome)

    def sync_work(self, frame: Frame, step: Step) -> None:
        line, pool, future = self._submit(frame, step)
        outcome = future.result()
        self._take_back_worker(frame, step, line, pool)
        self.end(step, outcome)

    def _submit(self, frame: Frame, step: Step) -> tuple[Line, Pool, concurrent.futures.Future[str]]:
        label, kind, _, *gives = step.numbers
        pool = frame.line.workers.pop(label, None)  # gone while it works: its job must not wait for itself
        if pool is None:
            pool = Pool(1)
            self.pools.append(pool)
        line = Line(is_free=True)
        frame.line.give(tuple(gives), line)
        if kind == PLAIN:
            return line, pool, pool.submit(self.sync_line, Frame(line), step)
        return line, pool, pool.submit(contextvars.copy_context().run, self.sync_line, Frame(line), step)

    def _take_back_worker(self, frame: Frame, step: Step, line: Line, pool: Pool) -> None:
        frame.line.take_back(line)
        frame.line.workers[step.numbers[0]] = pool

    async def join(self, frame: Frame, step: Step) -> None:
        child = frame.line.children.pop(step.numbers[0], None)
        if child is None:
            return self.end(step, "n")
        child.line.set_free()
        outcome = await child.outcome()
        frame.line.take_back(child.line)
        return self.end(step, outcome)

    def sync_join(self, frame: Frame, step: Step) -> None:
        child = frame.line.children.pop(step.numbers[0], None)
        if child is None:
            return self.end(step, "n")
        assert child.thread is not None
        outcome = child.ended.result()
        child.thread.join()
        frame.line.take_back(child.line)
        return self.end(step, outcome)

    async def gate(self, frame: Frame, step: Step) -> None:
        self.begin(step)
        await frame.line.pass_gate()
        self.end(step)

    async def open(self, frame: Frame, step: Step) -> None:
        child = frame.line.children.get(step.numbers[0])
        if child is None or not child.is_task:
            self.end(step, "n")
        elif await child.is_at_gate():
            child.line.open()
            self.end(step)
        else:
            self.end(step, "e")

    async def cancel(self, frame: Frame, step: Step) -> None:
        child = frame.line.children.get(step.numbers[0])
        if child is None or not child.is_task:
            return self.end(step, "n")
        del frame.line.children[step.numbers[0]]
        if await child.is_at_gate():
            assert child.future is not None
            child.future.cancel()
        outcome = await child.outcome()
        frame.line.take_back(child.line)
        return self.end(step, outcome)

    async def yield_(self, _frame: Frame, step: Step) -> None:
        self.begin(step)
        await asyncio.sleep(0)
        self.end(step)

    def loop(self, frame: Frame, step: Step) -> None:
        loop = asyncio.new_event_loop()
        hub = Hub(loop, contextvars.copy_context())
        try:
            try:
                loop.run_until_complete(self.inner(Frame(frame.line, hub), step))
            finally:
                children = frame.line.children
                its_own = {label: child for label, child in children.items() if child.hub is hub}
                frame.line.children = {label: child for label, child in children.items() if child.hub is not hub}
                frame.line.orphan(its_own)
                loop.run_until_complete(hub.drain())
                loop.run_until_complete(loop.shutdown_asyncgens())
                loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()
        self.end(step)

    # ---- futures ----

    async def scoped(self, frame: Frame, step: Step) -> None:
        flavour, with_ = step.numbers
        if flavour == IN_CONTEXT:
            context = frame.line.contexts.pop(with_, None)
            if context is None:
                return self.end(step, "n")
        else:
            context = contextvars.copy_context()
            if flavour == WITH_HANDLER:
                context.run(self.selection.set, with_)
        inner = self.inner(frame, step)
        if frame.by_hand:
            await InContext(context, inner)
        else:
            await asyncio.create_task(inner, context=context)
        return self.end(step)

    def drive(self, frame: Frame, step: Step) -> None:
        steps = self.inner(replace(frame, by_hand=True), step)
        with contextlib.suppress(StopIteration):
            while True:
                steps.send(None)
        self.end(step)

    def hop(self, frame: Frame, step: Step) -> None:
        polls, elsewhere, handler = step.numbers
        context = contextvars.copy_context()
        if handler >= 0:
            context.run(self.selection.set, handler)
        hub = None if elsewhere else frame.hub
        steps = self.inner(Frame(frame.line, hub, by_hand=True), step)
        try:
            for _ in range(polls):
                call(context, lambda: steps.send(None), elsewhere=bool(elsewhere & 1))
        except StopIteration:
            return self.end(step)
        except Boom:
            raise
        call(context, steps.close, elsewhere=bool(elsewhere & 2))
        return self.end(step, "d")

    async def both(self, frame: Frame, step: Step) -> None:
        self.begin(step)
        frame = replace(frame, by_hand=True)
        live = [self.run(frame, body) for body in step.bodies]
        try:
            while True:
                for branch in list(live):
                    if is_done(branch, live):
                        live.remove(branch)
                if not live:
                    break
                await asyncio.sleep(0)
        finally:
            for branch in live:
                branch.close()
        self.end(step)

    async def race(self, frame: Frame, step: Step) -> None:
        self.begin(step)
        frame = replace(frame, by_hand=True)
        live = [self.run(frame, body) for body in step.bodies]
        first, second = live
        winner = ""
        try:
            while not winner:
                if is_done(first, live):
                    winner = "a"
                elif is_done(second, live):
                    winner = "b"
                else:
                    await asyncio.sleep(0)
        finally:
            for branch in live:
                branch.close()
        self.end(step, winner)

    async def stream(self, frame: Frame, step: Step) -> None:
        sub = Frame(Line(is_free=True), frame.hub, by_hand=True)

        async def producer() -> AsyncGenerator[None, None]:
            self.begin(step)
            try:
                for child in step.bodies[0]:
                    if child.word == "emit":
                        self.begin(child)
                        yield
                        self.end(child)
                    else:
                        await self.run(sub, (child,))
            finally:
                self.run_sync(sub, step.bodies[1])
                sub.line.end()

        items: Any = self.selection.stream(step.numbers[0], producer)
        try:
            await self.run(replace(frame, stream=items), step.bodies[2])
        finally:
            await items.aclose()
        self.end(step)

    async def next(self, frame: Frame, step: Step) -> None:
        self.begin(step)
        try:
            await anext(frame.stream)
        except StopAsyncIteration:
            self.end(step, "e")
        else:
            self.end(step)


def is_done(branch: Coroutine[Any, Any, None], live: list[Coroutine[Any, Any, None]]) -> bool:
    """Steps a branch once; whether it ended. One that raised is not live any more."""
    try:
        branch.send(None)
    except StopIteration:
        return True
    except Boom:
        live.remove(branch)
        raise
    return False


def call(context: contextvars.Context, function: Callable[[], object], *, elsewhere: bool) -> None:
    """`context.run`, on this thread or on one of its own."""
    if not elsewhere:
        context.run(function)
        return
    errors: list[BaseException] = []

    def target() -> None:
        try:
            context.run(function)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


Called = Callable[[Run, Frame, Step], None]
Awaited = Callable[[Run, Frame, Step], Awaitable[None]]

CALLED: Final[dict[str, Called]] = {
    "look": Run.look,
    "set": Run.set,
    "reset": Run.reset,
    "enter": Run.enter,
    "leave": Run.leave,
    "with": Run.sync_with,
    "try": Run.sync_try,
    "catch": Run.sync_catch,
    "raise": Run.raise_,
    "copy": Run.copy,
    "fresh": Run.fresh,
    "clone": Run.clone,
    "peek": Run.peek,
    "run": Run.run_in,
    "spawn": Run.spawn,
    "thread": Run.thread,
    "job": Run.job,
    "work": Run.sync_work,
    "join": Run.sync_join,
    "loop": Run.loop,
    "drive": Run.drive,
    "hop": Run.hop,
}
"""What a synchronous body may contain."""

AWAITED: Final[dict[str, Awaited]] = {
    "with": Run.with_,
    "try": Run.try_,
    "catch": Run.catch,
    "work": Run.work,
    "join": Run.join,
    "gate": Run.gate,
    "open": Run.open,
    "cancel": Run.cancel,
    "yield": Run.yield_,
    "scoped": Run.scoped,
    "both": Run.both,
    "race": Run.race,
    "stream": Run.stream,
    "next": Run.next,
}
"""What an asynchronous body does in another way, or alone."""
