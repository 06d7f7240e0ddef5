"""The words of a synchronous body, done with contextvars, threads and executors. Beside awaited.py."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import start
from line import Boom, Frame, Hub, leave
from selection import StrangeError
from steps import Called, Run, Step


def look(run: Run, _frame: Frame, step: Step) -> None:
    run.end(step, handler=run.selection.block() if step.numbers[0] else None)


def set_(run: Run, frame: Frame, step: Step) -> None:
    label, handler = step.numbers
    token = run.selection.set(handler)
    frame.line.tokens[label] = token
    run.begin(step, handler=run.selection.old(token))
    run.end(step)


def reset(run: Run, frame: Frame, step: Step) -> None:
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


def enter(run: Run, frame: Frame, step: Step) -> None:
    label, handler = step.numbers
    scope = run.selection.scope(handler)
    scope.__enter__()
    frame.line.holds[label] = scope
    run.end(step)


def leave_hold(run: Run, frame: Frame, step: Step) -> None:
    scope = frame.line.holds.pop(step.numbers[0], None)
    run.end(step, "n" if scope is None else leave(scope))


def sync_with(run: Run, frame: Frame, step: Step) -> None:
    flavour, handler = step.numbers
    if flavour == 2:
        run.selection.decorated(handler, lambda: run.sync_inner(frame, step))()
    else:
        with run.selection.scope(handler):
            run.sync_inner(frame, step)
    run.end(step)


def sync_try(run: Run, frame: Frame, step: Step) -> None:
    try:
        run.sync_inner(frame, step)
    finally:
        run.run_sync(frame, step.bodies[1])
    run.end(step)


def sync_catch(run: Run, frame: Frame, step: Step) -> None:
    try:
        run.sync_inner(frame, step)
    except Boom:
        run.end(step, "p")
    else:
        run.end(step)


def raise_(run: Run, _frame: Frame, step: Step) -> None:
    run.end(step)
    raise Boom


def copy(run: Run, frame: Frame, step: Step) -> None:
    frame.line.contexts[step.numbers[0]] = contextvars.copy_context()
    run.end(step)


def fresh(run: Run, frame: Frame, step: Step) -> None:
    frame.line.contexts[step.numbers[0]] = contextvars.Context()
    run.end(step)


def clone(run: Run, frame: Frame, step: Step) -> None:
    label, of = step.numbers
    context = frame.line.contexts.get(of)
    if context is not None:
        frame.line.contexts[label] = context.copy()
    run.end(step, "n" if context is None else "k")


def peek(run: Run, frame: Frame, step: Step) -> None:
    context = frame.line.contexts.get(step.numbers[0])
    if context is not None:
        run.begin(step, handler=context.run(run.selection.current))
    run.end(step, "n" if context is None else "k")


def run_in(run: Run, frame: Frame, step: Step) -> None:
    (label,) = step.numbers
    context = frame.line.contexts.pop(label, None)  # gone while it runs: nobody else may run it then
    if context is None:
        return run.end(step, "n")
    try:
        context.run(run.sync_inner, frame, step)
    finally:
        frame.line.contexts[label] = context
    return run.end(step)


def sync_work(run: Run, frame: Frame, step: Step) -> None:
    line, pool, future = start.submit(run, frame, step)
    outcome = future.result()
    start.take_back_worker(frame, step, line, pool)
    run.end(step, outcome)


def sync_join(run: Run, frame: Frame, step: Step) -> None:
    child = frame.line.children.pop(step.numbers[0], None)
    if child is None:
        return run.end(step, "n")
    assert child.thread is not None
    outcome = child.ended.result()
    child.thread.join()
    frame.line.take_back(child.line)
    return run.end(step, outcome)


def loop_(run: Run, frame: Frame, step: Step) -> None:
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


def drive(run: Run, frame: Frame, step: Step) -> None:
    steps = run.inner(replace(frame, by_hand=True), step)
    with contextlib.suppress(StopIteration):
        while True:
            steps.send(None)
    run.end(step)


def hop(run: Run, frame: Frame, step: Step) -> None:
    polls, elsewhere, handler = step.numbers
    context = contextvars.copy_context()
    if handler >= 0:
        context.run(run.selection.set, handler)
    hub = None if elsewhere else frame.hub
    steps = run.inner(Frame(frame.line, hub, by_hand=True), step)
    try:
        for _ in range(polls):
            call(context, lambda: steps.send(None), elsewhere=bool(elsewhere & 1))
    except StopIteration:
        return run.end(step)
    call(context, steps.close, elsewhere=bool(elsewhere & 2))
    return run.end(step, "d")


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


CALLED: Final[dict[str, Called]] = {
    "look": look,
    "set": set_,
    "reset": reset,
    "enter": enter,
    "leave": leave_hold,
    "with": sync_with,
    "try": sync_try,
    "catch": sync_catch,
    "raise": raise_,
    "copy": copy,
    "fresh": fresh,
    "clone": clone,
    "peek": peek,
    "run": run_in,
    "spawn": start.spawn,
    "thread": start.thread,
    "job": start.job,
    "work": sync_work,
    "join": sync_join,
    "loop": loop_,
    "drive": drive,
    "hop": hop,
}
"""What a synchronous body may contain."""
