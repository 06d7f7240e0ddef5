"""Reference counts and memory: what is used a thousand times costs no more than what is used once."""

import asyncio
import contextvars
import gc
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy_c import ForeignHandler

import ctxalloc
import ctxalloc_example as example
from ctxalloc import adopt, current, get_handler_name, handler, handler_of, handlers, reset, set_handler, use

TIMES = 2000
# A leak grows in each round; what another thread or an interpreter's table takes once, in one.
ROUNDS = 3


def nested() -> None:
    with use("aligned64"), use("system"):
        pass


def refused() -> None:
    scope = use("aligned64")
    with scope:
        with pytest.raises(RuntimeError):
            scope.__enter__()
        with pytest.raises(ValueError, match="another Context"):
            contextvars.copy_context().run(scope.__exit__, None, None, None)


def reset_twice() -> None:
    token = set_handler("aligned64")
    reset(token)
    with pytest.raises(RuntimeError):
        reset(token)


@use("aligned64")
def decorated() -> None:
    pass


@use("aligned64")
def generator() -> Any:
    yield 1
    yield 2


def left_open() -> None:
    contextvars.copy_context().run(use("aligned64").__enter__)


def async_block() -> None:
    step = use("aligned64").__aenter__()
    with pytest.raises(StopIteration):
        step.send(None)
    set_handler(None)


def unknown() -> None:
    with pytest.raises(ctxalloc.UnknownHandlerError):
        use("no such handler")


def whole_request() -> None:
    with ctxalloc.request(limit_bytes=100, strict=True) as scope:
        _ = (scope.stats, scope.handler, scope.budget, current(), scope.handler.capsule)
    _ = scope.escaped


ACTIONS: dict[str, Callable[[], Any]] = {
    "use": lambda: use("aligned64"),
    "nested blocks": nested,
    "refused blocks": refused,
    "blocks left open": left_open,
    "async blocks": async_block,
    "set and reset": lambda: reset(set_handler("aligned64")),
    "a token that is not used": lambda: contextvars.copy_context().run(set_handler, "aligned64"),
    "a token's old handler": lambda: set_handler(None).old_handler,
    "reset twice": reset_twice,
    "current": current,
    "handler": lambda: handler("aligned64"),
    "handlers": handlers,
    "an unknown name": unknown,
    "handler_of": lambda: handler_of(np.empty(3)[1:]),
    "get_handler_name": lambda: get_handler_name(np.empty(3)),
    "capsule": lambda: handler("aligned64").capsule,
    "adopt our own": lambda: adopt(handler("aligned64").capsule),
    "repr": lambda: repr((handler("aligned64"), use("aligned64"), set_handler(None))),
    "a decorated function": decorated,
    "a decorated generator": lambda: list(generator()),
    "a generator that is not finished": lambda: next(generator()),
    "decorating": lambda: use("aligned64")(lambda: None),
    "a request, and what it says": whole_request,
    "Rust": example.handler_here,
}


def growth(action: Callable[[], Any]) -> int:
    """Bytes of Python's heap that stay after `TIMES` runs of `action`."""
    gc.collect()
    tracemalloc.start()
    try:
        action()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(TIMES):
            action()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS.keys())
def test_nothing_grows_by_repeating(action: Callable[[], Any]) -> None:
    for _ in range(20):
        action()
    gc.collect()  # cycles that earlier tests left refer to handlers too
    things = [thing for found in handlers() for thing in (found, found.capsule)]
    before = [sys.getrefcount(thing) for thing in things]
    grown = [growth(action) for _ in range(ROUNDS)]
    after = [sys.getrefcount(thing) for thing in things]
    # A frozen count (3.12's immortals) is equal too.
    assert [now - then for now, then in zip(after, before, strict=True) if abs(now - then) > 20] == []
    assert min(grown) < TIMES * 8, f"{grown} bytes after {TIMES} times each"


def test_adopting_a_foreign_capsule_again_keeps_one_reference(fresh_name: Callable[[], str]) -> None:
    foreign = ForeignHandler(fresh_name())
    adopt(foreign.capsule)
    before = sys.getrefcount(foreign.capsule)
    for _ in range(TIMES):
        adopt(foreign.capsule)
        with foreign.selected():
            current()
    assert abs(sys.getrefcount(foreign.capsule) - before) <= 2


def test_a_token_kept_in_its_own_context_is_collected(collect: Callable[[], None]) -> None:
    # Token -> Context -> Token: the collector must see through ours.
    class Held:
        pass

    tokens: contextvars.ContextVar[Any] = contextvars.ContextVar("tokens")

    def leaves_a_cycle() -> weakref.ref[Held]:
        held = Held()
        scope = use("aligned64")
        scope.__enter__()
        tokens.set([held, set_handler("system"), scope, scope.__aenter__()])
        return weakref.ref(held)

    alive = [contextvars.copy_context().run(leaves_a_cycle) for _ in range(10)]
    collect()
    assert [reference() for reference in alive] == [None] * 10


def test_a_task_that_ends_inside_of_scopes_is_collected(collect: Callable[[], None]) -> None:
    class Held:
        pass

    held_here: contextvars.ContextVar[Any] = contextvars.ContextVar("held_here")

    async def leaves_open() -> weakref.ref[Held]:
        held = Held()
        held_here.set((held, asyncio.current_task()))
        await use("aligned64").__aenter__()
        return weakref.ref(held)

    async def main() -> list[weakref.ref[Held]]:
        return [await asyncio.create_task(leaves_open()) for _ in range(10)]

    alive = asyncio.run(main())
    collect()
    assert [reference() for reference in alive] == [None] * 10


def test_crossings_do_not_grow_by_repeating() -> None:
    async def tells() -> str:
        return current().name

    async def some(times: int) -> None:
        for _ in range(times):
            with use("aligned64"):
                await example.await_python(tells)
                await example.array_made_in("system", 10)

    with asyncio.Runner() as runner:
        runner.run(some(50))
        gc.collect()
        before = len(gc.get_objects())
        counts = [sys.getrefcount(found.capsule) for found in handlers()]
        runner.run(some(500))
        gc.collect()
        assert len(gc.get_objects()) - before < 250
        after = [sys.getrefcount(found.capsule) for found in handlers()]
    assert max(abs(now - then) for now, then in zip(after, counts, strict=True)) < 50
