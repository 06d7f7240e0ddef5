"""``@ctxalloc.use(...)`` and ``@ctxalloc.request(...)``: functions and generators of all kinds, run in a scope.

A generator's selection must not reach its caller across a ``yield``, nor the caller's selection the generator. So each
step runs in a scope of its own, and what the body selects is kept from one step to the next: a generator behaves like a
task with a context of its own (as PEP 568 proposed). All other ContextVars are the caller's, as always in Python. The
request of a decorated generator lasts from its first step to its end.
"""

import contextlib
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, NamedTuple

from ctxalloc._native import Handler, Request, _anext_unhooked, current, use


class _How(NamedTuple):
    """What a decorator does for each call."""

    name: str
    block: Callable[[], contextlib.AbstractContextManager[object]]
    """A block with the handler selected."""
    steps: Callable[[], contextlib.AbstractContextManager[Handler]]
    """A block that selects nothing, and whose ``as`` is the handler to select in each step of a generator."""
    admission: Callable[[], contextlib.AbstractAsyncContextManager[object]] = contextlib.nullcontext
    """As ``block``, for a request that waits for room."""
    waits: bool = False


class _Steps:
    """A request for a generator, whose steps select its handler themselves."""

    __slots__ = ("_is_admitted", "_request")

    def __init__(self, request: Request) -> None:
        self._request = request
        self._is_admitted = False

    async def wait(self) -> None:
        """Wait for room, before it is entered: a thread that runs an event loop must not wait on entering."""
        from ctxalloc import _room  # noqa: PLC0415 - it needs asyncio, and few generators wait

        await _room.enter(self._request, selects=False)
        self._is_admitted = True

    def __enter__(self) -> Handler:
        if self._is_admitted:
            return self._request.handler
        return self._request._begin()  # noqa: SLF001 - it exists for this call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self._request._end(error)  # noqa: SLF001 - it exists for this call

    def tell(self) -> None:
        """BudgetExceeded: a step was given more than the request's limit, and nobody was told."""
        self._request._tell()  # noqa: SLF001 - it exists for this call


def _tell_of(steps: object) -> Callable[[], None]:
    """What is asked after each step, before the generator's caller has what it made."""
    tell: Callable[[], None] = getattr(steps, "tell", lambda: None)
    return tell


def in_scope(handler: Handler, function: Any) -> Any:
    """Make ``function`` run with ``handler`` selected. ``inspect`` sees the same kind of function."""
    block = functools.partial(use, handler)
    return _decorated(_How(f"use({handler.name!r})", block, lambda: contextlib.nullcontext(handler)), function)


def in_request(request: Request, function: Any) -> Any:
    """Make each call of ``function`` a request of its own, on the terms of ``request``."""
    again = request._again  # noqa: SLF001 - it exists for this call
    waits = request._reserves  # noqa: SLF001 - as above
    return _decorated(_How("request(...)", again, lambda: _Steps(again()), again, waits), function)


def _decorated(how: _How, function: Any) -> Any:
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(_decorated(how, function.__func__))
    if not callable(function) or isinstance(function, type):
        raise TypeError(
            f"@ctxalloc.{how.name} decorates functions, coroutine functions and (async) generators, not {function!r}"
        )
    # Of an object with `async def __call__` only the method is a coroutine function.
    body = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    return _of_kind(how, function, body)


def in_blocks(
    block: Callable[[], contextlib.AbstractContextManager[object]],
    steps: Callable[[], contextlib.AbstractContextManager[Handler]],
    function: Callable[..., Any],
    body: Callable[..., Any],
) -> Callable[..., Any]:
    """Make each call of ``function`` run in a block of its own; ``body`` tells which kind of function it is.

    A block of ``steps`` selects nothing: its ``as`` is the handler to select in each step of a generator.
    """
    return _of_kind(_How("request(...)", block, steps), function, body)


def _of_kind(how: _How, function: Callable[..., Any], body: Callable[..., Any]) -> Callable[..., Any]:
    for is_kind, wrap in _KINDS:
        if is_kind(function) or is_kind(body):
            return wrap(how, function)
    return _function(how, function)


def _function(how: _How, function: Callable[..., Any]) -> Callable[..., Any]:
    block = how.block

    @functools.wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with block():
            return function(*args, **kwargs)

    return scoped


def _coroutine(how: _How, function: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    block = how.block

    @functools.wraps(function)
    async def scoped(*args: Any, **kwargs: Any) -> Any:
        with block():
            return await function(*args, **kwargs)

    @functools.wraps(function)
    async def admitted(*args: Any, **kwargs: Any) -> Any:
        async with how.admission():
            return await function(*args, **kwargs)

    return admitted if how.waits else scoped


def _generator(how: _How, function: Callable[..., Any]) -> Callable[..., Generator[Any, Any, Any]]:
    @functools.wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        steps = how.steps()
        tell = _tell_of(steps)
        with steps as handler:
            selected = handler
            with use(selected):
                body = function(*args, **kwargs)
            step: Callable[[], Any] = functools.partial(next, body)
            while True:
                with use(selected):
                    try:
                        item = step()
                    except StopIteration as stop:
                        return stop.value
                    finally:
                        selected = current()
                        del step  # it may hold an exception, whose traceback holds this frame
                try:
                    tell()
                    sent = yield item
                except BaseException as error:
                    step = functools.partial(body.throw, error)
                else:
                    step = functools.partial(body.send, sent)

    return scoped


def _async_generator(how: _How, function: Callable[..., Any]) -> Callable[..., AsyncGenerator[Any, Any]]:
    @functools.wraps(function)
    async def scoped(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        steps = how.steps()
        tell = _tell_of(steps)
        if how.waits and isinstance(steps, _Steps):
            await steps.wait()
        with steps as handler:
            selected = handler
            with use(selected):
                body = function(*args, **kwargs)
            # The event loop must know the wrapper only: when it shuts down it closes all generators that it knows at
            # the same time. If it closed `body` too, one of the two would find the other one running.
            step: Callable[[], Any] = functools.partial(_anext_unhooked, body)
            while True:
                with use(selected):
                    try:
                        item = await step()
                    except StopAsyncIteration:
                        return
                    finally:
                        selected = current()
                        del step  # it may hold an exception, whose traceback holds this frame
                try:
                    tell()
                    sent = yield item
                except BaseException as error:
                    step = functools.partial(body.athrow, error)
                else:
                    step = functools.partial(body.asend, sent)

    return scoped


_KINDS: tuple[tuple[Callable[[Any], bool], Callable[[_How, Callable[..., Any]], Callable[..., Any]]], ...] = (
    (inspect.isasyncgenfunction, _async_generator),
    (inspect.iscoroutinefunction, _coroutine),
    (inspect.isgeneratorfunction, _generator),
)
