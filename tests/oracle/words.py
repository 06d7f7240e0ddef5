"""What each word does on CPython: contextvars, asyncio, threads and executors. start.py has those that start a line.

Every word is a method that returns its outcome. A synchronous body is one whose coroutines never suspend
(`frame.is_sync`): there `with` and `@use` are the synchronous ones, and waiting blocks the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from typing import Any

from language import IN_CONTEXT, WITH_HANDLER
from line import Boom, Frame, Hub, Line, leave
from selection import InContext, StrangeError
from start import Lines, take_back_worker
from steps import Step, finish


class Words(Lines):
    """All but `main`, which is the program itself, and `emit`, which is its stream's."""

    # ---- the selection of the running context ----

    async def do_look(self, _frame: Frame, step: Step) -> str | None:
        if not step.numbers[0]:
            return "k"
        self.end(step, handler=self.selection.block())
        return None

    async def do_set(self, frame: Frame, step: Step) -> str:
        label, handler = step.numbers
        token = self.selection.set(handler)
        frame.line.tokens[label] = token
        self.begin(step, handler=self.selection.old(token))
        return "k"

    async def do_reset(self, frame: Frame, step: Step) -> str:
        token = frame.line.tokens.get(step.numbers[0])
        if token is None:
            return "n"
        try:
            self.selection.reset(token)
        except RuntimeError:
            return "u"
        except ValueError:
            return "f"
        except StrangeError:
            return "X"
        return "k"

    async def do_enter(self, frame: Frame, step: Step) -> str:
        label, handler = step.numbers
        scope = self.selection.scope(handler)
        scope.__enter__()
        frame.line.holds[label] = scope
        return "k"

    async def do_leave(self, frame: Frame, step: Step) -> str:
        scope = frame.line.holds.pop(step.numbers[0], None)
        return "n" if scope is None else leave(scope)

    async def do_with(self, frame: Frame, step: Step) -> str:
        flavour, handler = step.numbers
        if flavour == 2 and frame.is_sync:
            self.selection.decorated(handler, lambda: finish(self.inner(frame, step)))()
        elif flavour == 2:

            async def function() -> None:
                await self.inner(frame, step)

            await self.selection.decorated(handler, function)()
        elif flavour == 1 and not frame.is_sync:
            async with self.selection.scope(handler):
                await self.inner(frame, step)
        else:
            with self.selection.scope(handler):
                await self.inner(frame, step)
        return "k"

    # ---- ways out of a body ----

    async def do_try(self, frame: Frame, step: Step) -> str:
        try:
            await self.inner(frame, step)
        finally:
            self.call(frame, step.bodies[1])
        return "k"

    async def do_catch(self, frame: Frame, step: Step) -> str:
        try:
            await self.inner(frame, step)
        except Boom:
            return "p"
        return "k"

    async def do_raise(self, _frame: Frame, step: Step) -> str:
        self.end(step)
        raise Boom

    # ---- contexts as values ----

    async def do_copy(self, frame: Frame, step: Step) -> str:
        frame.line.contexts[step.numbers[0]] = contextvars.copy_context()
        return "k"

    async def do_fresh(self, frame: Frame, step: Step) -> str:
        frame.line.contexts[step.numbers[0]] = contextvars.Context()
        return "k"

    async def do_clone(self, frame: Frame, step: Step) -> str:
        label, of = step.numbers
        context = frame.line.contexts.get(of)
        if context is not None:
            frame.line.contexts[label] = context.copy()
        return "n" if context is None else "k"

    async def do_peek(self, frame: Frame, step: Step) -> str:
        context = frame.line.contexts.get(step.numbers[0])
        if context is not None:
            self.begin(step, handler=context.run(self.selection.current))
        return "n" if context is None else "k"

    async def do_run(self, frame: Frame, step: Step) -> str:
        (label,) = step.numbers
        context = frame.line.contexts.pop(label, None)  # gone while it runs: nobody else may run it then
        if context is None:
            return "n"
        try:
            context.run(self.call_inner, frame, step)
        finally:
            frame.line.contexts[label] = context
        return "k"

    # ---- lines, and how they wait for each other ----

    async def do_work(self, frame: Frame, step: Step) -> str:
        line, pool, future = self.submit(frame, step)
        outcome = future.result() if frame.is_sync else await asyncio.wrap_future(future)
        take_back_worker(frame, step, line, pool)
        return outcome

    async def do_join(self, frame: Frame, step: Step) -> str:
        child = frame.line.children.pop(step.numbers[0], None)
        if child is None:
            return "n"
        child.line.set_free()
        outcome = child.outcome_by_blocking() if frame.is_sync else await child.outcome()
        frame.line.take_back(child.line)
        return outcome

    async def do_gate(self, frame: Frame, step: Step) -> str:
        self.begin(step)
        await frame.line.pass_gate()
        return "k"

    async def do_open(self, frame: Frame, step: Step) -> str:
        child = frame.line.children.get(step.numbers[0])
        if child is None or not child.is_task:
            return "n"
        if not await child.is_at_gate():
            return "e"
        child.line.open()
        return "k"

    async def do_cancel(self, frame: Frame, step: Step) -> str:
        child = frame.line.children.get(step.numbers[0])
        if child is None or not child.is_task:
            return "n"
        del frame.line.children[step.numbers[0]]
        if await child.is_at_gate():
            assert child.future is not None
            child.future.cancel()
        outcome = await child.outcome()
        frame.line.take_back(child.line)
        return outcome

    async def do_yield(self, _frame: Frame, step: Step) -> str:
        self.begin(step)
        await asyncio.sleep(0)
        return "k"

    async def do_loop(self, frame: Frame, step: Step) -> str:
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
        return "k"

    # ---- coroutines stepped by hand, in a context of their own, or in turns in one ----

    async def do_scoped(self, frame: Frame, step: Step) -> str:
        flavour, with_ = step.numbers
        if flavour == IN_CONTEXT:
            context = frame.line.contexts.pop(with_, None)
            if context is None:
                return "n"
        else:
            context = contextvars.copy_context()
            if flavour == WITH_HANDLER:
                context.run(self.selection.set, with_)
        inner = self.with_ending(frame, step)
        if frame.by_hand:
            await InContext(context, inner)
        else:
            await asyncio.create_task(inner, context=context)
        return "k"

    async def do_drive(self, frame: Frame, step: Step) -> str:
        steps = self.inner(replace(frame, by_hand=True, is_sync=False), step)
        with contextlib.suppress(StopIteration):
            while True:
                steps.send(None)
        return "k"

    async def do_hop(self, frame: Frame, step: Step) -> str:
        polls, elsewhere, handler = step.numbers
        context = contextvars.copy_context()
        if handler >= 0:
            context.run(self.selection.set, handler)
        hub = None if elsewhere else frame.hub
        steps = self.inner(Frame(frame.line, hub, by_hand=True), step)
        try:
            for _ in range(polls):
                call_in(context, lambda: steps.send(None), elsewhere=bool(elsewhere & 1))
        except StopIteration:
            return "k"
        call_in(context, steps.close, elsewhere=bool(elsewhere & 2))
        return "d"

    async def do_both(self, frame: Frame, step: Step) -> str:
        return await self.in_turns(frame, step, lambda live: "" if live[0] or live[1] else "k")

    async def do_race(self, frame: Frame, step: Step) -> str:
        return await self.in_turns(frame, step, lambda live: "" if live[0] and live[1] else "b" if live[0] else "a")

    async def in_turns(self, frame: Frame, step: Step, outcome_of: Callable[[list[bool]], str]) -> str:
        """Steps both branches by turns until there is an outcome: of which of them are live, asked after every step."""
        self.begin(step)
        frame = replace(frame, by_hand=True)
        branches = [self.run(frame, body) for body in step.bodies]
        live = [True, True]
        outcome = ""
        try:
            while not outcome:
                for index, branch in enumerate(branches):
                    if live[index] and not outcome:
                        live[index] = still_live(branch)
                        outcome = outcome_of(live)
                if not outcome:
                    await asyncio.sleep(0)
        finally:
            for branch in branches:
                branch.close()
        return outcome

    async def do_stream(self, frame: Frame, step: Step) -> str:
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
                self.call(sub, step.bodies[1])
                sub.line.end()

        items: Any = self.selection.stream(step.numbers[0], producer)
        try:
            await self.run(replace(frame, stream=items), step.bodies[2])
        finally:
            await items.aclose()
        return "k"

    async def do_next(self, frame: Frame, step: Step) -> str:
        self.begin(step)
        try:
            await anext(frame.stream)
        except StopAsyncIteration:
            return "e"
        return "k"


def call_in(context: contextvars.Context, function: Callable[[], object], *, elsewhere: bool) -> None:
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


def still_live(branch: Coroutine[Any, Any, None]) -> bool:
    """Steps it once."""
    try:
        branch.send(None)
    except StopIteration:
        return False
    return True
