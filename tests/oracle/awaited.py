"""The words of an asynchronous body that suspend, or that are done in another way there: asyncio's part."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import replace
from typing import Any, Final

import start
from language import IN_CONTEXT, WITH_HANDLER
from line import Boom, Frame, Line
from selection import InContext
from steps import Awaited, Run, Step


async def with_(run: Run, frame: Frame, step: Step) -> None:
    flavour, handler = step.numbers
    if flavour == 0:
        with run.selection.scope(handler):
            await run.inner(frame, step)
    elif flavour == 1:
        async with run.selection.scope(handler):
            await run.inner(frame, step)
    else:

        async def function() -> None:
            await run.inner(frame, step)

        await run.selection.decorated(handler, function)()
    run.end(step)


async def try_(run: Run, frame: Frame, step: Step) -> None:
    try:
        await run.inner(frame, step)
    finally:
        run.run_sync(frame, step.bodies[1])
    run.end(step)


async def catch(run: Run, frame: Frame, step: Step) -> None:
    try:
        await run.inner(frame, step)
    except Boom:
        run.end(step, "p")
    else:
        run.end(step)


async def work(run: Run, frame: Frame, step: Step) -> None:
    line, pool, future = start.submit(run, frame, step)
    outcome = await asyncio.wrap_future(future)
    start.take_back_worker(frame, step, line, pool)
    run.end(step, outcome)


async def join(run: Run, frame: Frame, step: Step) -> None:
    child = frame.line.children.pop(step.numbers[0], None)
    if child is None:
        return run.end(step, "n")
    child.line.set_free()
    outcome = await child.outcome()
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


async def both(run: Run, frame: Frame, step: Step) -> None:
    run.begin(step)
    frame = replace(frame, by_hand=True)
    live = [run.run(frame, body) for body in step.bodies]
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
    run.end(step)


async def race(run: Run, frame: Frame, step: Step) -> None:
    run.begin(step)
    frame = replace(frame, by_hand=True)
    live = [run.run(frame, body) for body in step.bodies]
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
    run.end(step, winner)


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
            run.run_sync(sub, step.bodies[1])
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


AWAITED: Final[dict[str, Awaited]] = {
    "with": with_,
    "try": try_,
    "catch": catch,
    "work": work,
    "join": join,
    "gate": gate,
    "open": open_,
    "cancel": cancel,
    "yield": yield_,
    "scoped": scoped,
    "both": both,
    "race": race,
    "stream": stream,
    "next": next_,
}
"""Asynchronous bodies look here first, then among called.CALLED."""
