"""What each word does on CPython: contextvars, asyncio, threads and executors. start.py has those that start a line.

Every word is a coroutine function. A synchronous body is one whose coroutines never suspend (`frame.is_sync`): there
`with` and `@use` are the synchronous ones, and who waits blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

import start
from language import IN_CONTEXT, WITH_HANDLER
from line import Boom, Frame, Hub, Line, leave
from selection import InContext, StrangeError
from steps import Run, Step, Word, finish

# ---- the selection of the running context ----


async def look(run: Run, _frame: Frame, step: Step) -> None:
    run.end(step, handler=run.selection.block() if step.numbers[0] else None)


async def set_(run: Run, frame: Frame, step: Step) -> None:
    label, handler = step.numbers
    token = run.selection.set(handler)
    frame.line.tokens[label] = token
    run.begin(step, handler=run.selection.old(token))
    run.end(step)


async def reset(run: Run, frame: Frame, step: Step) -> None:
    token = frame.line.tokens.get(step.numbers[0])
    outcome = "n"
    if token is not None:
        try:
            run.selection.reset(token)
            outcome = "k"
        except RuntimeError:
            outcome = "u"
        except ValueError:
            outcome = "f"
        except StrangeError:
            outcome = "X"
    run.end(step, outcome)


async def enter(run: Run, frame: Frame, step: Step) -> None:
    label, handler = step.numbers
    scope = run.selection.scope(handler)
    scope.__enter__()
    frame.line.holds[label] = scope
    run.end(step)


async def leave_hold(run: Run, frame: Frame, step: Step) -> None:
    scope = frame.line.holds.pop(step.numbers[0], None)
    run.end(step, "n" if scope is None else leave(scope))


async def with_(run: Run, frame: Frame, step: Step) -> None:
    flavour, handler = step.numbers
    if flavour == 2 and frame.is_sync:
        run.selection.decorated(handler, lambda: finish(run.inner(frame, step)))()
    elif flavour == 2:

        async def function() -> None:
            await run.inner(frame, step)

        await run.selection.decorated(handler, function)()
    elif flavour == 1 and not frame.is_sync:
        async with run.selection.scope(handler):
            await run.inner(frame, step)
    else:
        with run.selection.scope(handler):
            await run.inner(frame, step)
    run.end(step)


# ---- ways out of a body ----


async def try_(run: Run, frame: Frame, step: Step) -> None:
    try:
        await run.inner(frame, step)
    finally:
        run.call(frame, step.bodies[1])
    run.end(step)


async def catch(run: Run, frame: Frame, step: Step) -> None:
    try:
        await run.inner(frame, step)
    except Boom:
        run.end(step, "p")
    else:
        run.end(step)


async def raise_(run: Run, _frame: Frame, step: Step) -> None:
    run.end(step)
    raise Boom


# ---- contexts as values ----


async def copy(run: Run, frame: Frame, step: Step) -> None:
    frame.line.contexts[step.numbers[0]] = contextvars.copy_context()
    run.end(step)


async def fresh(run: Run, frame: Frame, step: Step) -> None:
    frame.line.contexts[step.numbers[0]] = contextvars.Context()
    run.end(step)


async def clone(run: Run, frame: Frame, step: Step) -> None:
    label, of = step.numbers
    context = frame.line.contexts.get(of)
    if context is not None:
        frame.line.contexts[label] = context.copy()
    run.end(step, "n" if context is None else "k")


async def peek(run: Run, frame: Frame, step: Step) -> None:
    context = frame.line.contexts.get(step.numbers[0])
    if context is not None:
        run.begin(step, handler=context.run(run.selection.current))
    run.end(step, "n" if context is None else "k")


async def run_in(run: Run, frame: Frame, step: Step) -> None:
    (label,) = step.numbers
    context = frame.line.contexts.pop(label, None)  # gone while it runs: nobody else may run it then
    if context is None:
        return run.end(step, "n")
    try:
        context.run(run.call_inner, frame, step)
    finally:
        frame.line.contexts[label] = context
    return run.end(step)


# ---- lines, and how they wait for each other ----


async def work(run: Run, frame: Frame, step: Step) -> None:
    line, pool, future = start.submit(run, frame, step)
    outcome = future.result() if frame.is_sync else await asyncio.wrap_future(future)
    start.take_back_worker(frame, step, line, pool)
    run.end(step, outcome)


async def join(run: Run, frame: Frame, step: Step) -> None:
    child = frame.line.children.pop(step.numbers[0], None)
    if child is None:
        return run.end(step, "n")
    child.line.set_free()
    outcome = child.outcome_by_blocking() if frame.is_sync else await child.outcome()
    frame.line.take_back(child.line)
    return run.end(step, outcome)


async def gate(run: Run, frame: Frame, step: Step) -> None:
    run.begin(step)
    await frame.line.pass_gate()
    run.end(step)


async def open_(run: Run, frame: Frame, step: Step) -> None:
    child = frame.line.children.get(step.numbers[0])
    if child is None or not child.is_task:
        run.end(step, "n")
    elif await child.is_at_gate():
        child.line.open()
        run.end(step)
    else:
        run.end(step, "e")


async def cancel(run: Run, frame: Frame, step: Step) -> None:
    child = frame.line.children.get(step.numbers[0])
    if child is None or not child.is_task:
        return run.end(step, "n")
    del frame.line.children[step.numbers[0]]
    if await child.is_at_gate():
        assert child.future is not None
        child.future.cancel()
    outcome = await child.outcome()
    frame.line.take_back(child.line)
    return run.end(step, outcome)


async def yield_(run: Run, _frame: Frame, step: Step) -> None:
    run.begin(step)
    await asyncio.sleep(0)
    run.end(step)


async def loop_(run: Run, frame: Frame, step: Step) -> None:
    loop = asyncio.new_event_loop()
    hub = Hub(loop, contextvars.copy_context())
    try:
        try:
            loop.run_until_complete(run.inner(Frame(frame.line, hub), step))
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
    run.end(step)


# ---- coroutines stepped by hand, in a context of their own, or in turns in one ----


async def scoped(run: Run, frame: Frame, step: Step) -> None:
    flavour, with_ = step.numbers
    if flavour == IN_CONTEXT:
        context = frame.line.contexts.pop(with_, None)
        if context is None:
            return run.end(step, "n")
    else:
        context = contextvars.copy_context()
        if flavour == WITH_HANDLER:
            context.run(run.selection.set, with_)
    inner = run.with_ending(frame, step)
    if frame.by_hand:
        await InContext(context, inner)
    else:
        await asyncio.create_task(inner, context=context)
    return run.end(step)


async def drive(run: Run, frame: Frame, step: Step) -> None:
    steps = run.inner(replace(frame, by_hand=True, is_sync=False), step)
    with contextlib.suppress(StopIteration):
        while True:
            steps.send(None)
    run.end(step)


async def hop(run: Run, frame: Frame, step: Step) -> None:
    polls, elsewhere, handler = step.numbers
    context = contextvars.copy_context()
    if handler >= 0:
        context.run(run.selection.set, handler)
    hub = None if elsewhere else frame.hub
    steps = run.inner(Frame(frame.line, hub, by_hand=True), step)
    try:
        for _ in range(polls):
            call_in(context, lambda: steps.send(None), elsewhere=bool(elsewhere & 1))
    except StopIteration:
        return run.end(step)
    call_in(context, steps.close, elsewhere=bool(elsewhere & 2))
    return run.end(step, "d")


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


async def both(run: Run, frame: Frame, step: Step) -> None:
    await in_turns(run, frame, step, lambda live: "" if live[0] or live[1] else "k")


async def race(run: Run, frame: Frame, step: Step) -> None:
    await in_turns(run, frame, step, lambda live: "" if live[0] and live[1] else "b" if live[0] else "a")


async def in_turns(run: Run, frame: Frame, step: Step, outcome_of: Callable[[list[bool]], str]) -> None:
    """Steps both branches by turns until there is an outcome: of which of them are live, asked after every step."""
    run.begin(step)
    frame = replace(frame, by_hand=True)
    branches = [run.run(frame, body) for body in step.bodies]
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
    run.end(step, outcome)


def still_live(branch: Coroutine[Any, Any, None]) -> bool:
    """Steps it once."""
    try:
        branch.send(None)
    except StopIteration:
        return False
    return True


async def stream(run: Run, frame: Frame, step: Step) -> None:
    sub = Frame(Line(is_free=True), frame.hub, by_hand=True)

    async def producer() -> AsyncGenerator[None, None]:
        run.begin(step)
        try:
            for child in step.bodies[0]:
                if child.word == "emit":
                    run.begin(child)
                    yield
                    run.end(child)
                else:
                    await run.run(sub, (child,))
        finally:
            run.call(sub, step.bodies[1])
            sub.line.end()

    items: Any = run.selection.stream(step.numbers[0], producer)
    try:
        await run.run(replace(frame, stream=items), step.bodies[2])
    finally:
        await items.aclose()
    run.end(step)


async def next_(run: Run, frame: Frame, step: Step) -> None:
    run.begin(step)
    try:
        await anext(frame.stream)
    except StopAsyncIteration:
        run.end(step, "e")
    else:
        run.end(step)


WORDS: Final[dict[str, Word]] = {
    "look": look,
    "set": set_,
    "reset": reset,
    "enter": enter,
    "leave": leave_hold,
    "with": with_,
    "try": try_,
    "catch": catch,
    "raise": raise_,
    "copy": copy,
    "fresh": fresh,
    "clone": clone,
    "peek": peek,
    "run": run_in,
    "spawn": start.spawn,
    "thread": start.thread,
    "job": start.job,
    "work": work,
    "join": join,
    "gate": gate,
    "open": open_,
    "cancel": cancel,
    "yield": yield_,
    "loop": loop_,
    "scoped": scoped,
    "drive": drive,
    "hop": hop,
    "both": both,
    "race": race,
    "stream": stream,
    "next": next_,
}
"""All but `main`, which is the program itself, and `emit`, which is its stream's."""
