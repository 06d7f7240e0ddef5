"""``@ctxalloc.use(...)``: a function, coroutine function, generator or async generator, run in a scope.

A generator's scope must not leak into its caller across a ``yield``, nor the caller's into it. So each step runs in
a scope of its own, and what the body itself selected is taken along from step to step: a generator behaves like
a task with a context of its own (what PEP 568 wanted). All other ContextVars stay the caller's, as Python has it.
"""

import functools
import inspect
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any

from ctxalloc._native import Handler, current, use


def in_scope(handler: Handler, function: Any) -> Any:
    """Make ``function`` run with ``handler`` selected; it stays of its kind, for ``inspect`` too."""
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(in_scope(handler, function.__func__))
    if not callable(function) or isinstance(function, type):
        raise TypeError(
            f"@ctxalloc.use({handler.name!r}) decorates functions, coroutine functions and (async) generators, "
            f"not {function!r}"
        )
    # An object with `async def __call__` is none of these itself.
    body = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    for is_kind, wrap in _KINDS:
        if is_kind(function) or is_kind(body):
            return wrap(handler, function)
    return _function(handler, function)


def _function(handler: Handler, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with use(handler):
            return function(*args, **kwargs)

    return scoped


def _coroutine(handler: Handler, function: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(function)
    async def scoped(*args: Any, **kwargs: Any) -> Any:
        with use(handler):
            return await function(*args, **kwargs)

    return scoped


def _generator(handler: Handler, function: Callable[..., Any]) -> Callable[..., Generator[Any, Any, Any]]:
    @functools.wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with use(handler):
            body = function(*args, **kwargs)
        selected = handler
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
                sent = yield item
            except BaseException as error:
                step = functools.partial(body.throw, error)
            else:
                step = functools.partial(body.send, sent)

    return scoped


def _async_generator(handler: Handler, function: Callable[..., Any]) -> Callable[..., AsyncGenerator[Any, Any]]:
    @functools.wraps(function)
    async def scoped(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        with use(handler):
            body = function(*args, **kwargs)
        selected = handler
        step: Callable[[], Any] = functools.partial(_first_step, body)
        while True:
            with use(selected):
                try:
                    item = await step()
                except StopAsyncIteration:
                    return
                finally:
                    selected = current()
                    del step  # as above
            try:
                sent = yield item
            except BaseException as error:
                step = functools.partial(body.athrow, error)
            else:
                step = functools.partial(body.asend, sent)

    return scoped


def _first_step(body: AsyncGenerator[Any, Any]) -> Any:
    """``anext(body)``, with the event loop kept from knowing ``body``.

    A loop closes all generators that it knows at once when it shuts down; body and wrapper would meet there, and
    one would find the other running. It knows the wrapper, which closes the body.
    """
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        return anext(body)
    finally:
        sys.set_asyncgen_hooks(*hooks)


_KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Handler, Callable[..., Any]], Callable[..., Any]]], ...] = (
    (inspect.isasyncgenfunction, _async_generator),
    (inspect.iscoroutinefunction, _coroutine),
    (inspect.isgeneratorfunction, _generator),
)
