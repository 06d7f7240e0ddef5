"""``@ctxalloc.use(...)``: a function, coroutine function, generator or async generator, run in a scope.

A generator's scope must not leak into its caller across a ``yield``, nor the caller's into it. So each step runs in
a scope of its own, and what the body itself selected is taken along from step to step: a generator behaves like
a task with a context of its own (what PEP 568 wanted).
"""

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

from ctxalloc._native import Handler, current, use


def in_scope(handler: Handler, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with ``handler`` selected while its body runs; of the same kind, for ``inspect`` too."""
    if not callable(function):
        raise TypeError(
            f"ctxalloc.use({handler.name!r}) decorates functions, coroutine functions and (async) generators, "
            f"not {type(function).__name__!r}"
        )
    if inspect.isasyncgenfunction(function):
        return _async_generator(handler, function)
    if inspect.iscoroutinefunction(function):
        return _coroutine(handler, function)
    if inspect.isgeneratorfunction(function):
        return _generator(handler, function)
    return _function(handler, function)


def _function(handler: Handler, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with use(handler):
            return function(*args, **kwargs)

    return scoped


def _coroutine(handler: Handler, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def scoped(*args: Any, **kwargs: Any) -> Any:
        with use(handler):
            return await function(*args, **kwargs)

    return scoped


def _generator(handler: Handler, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
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
            try:
                sent = yield item
            except GeneratorExit:
                with use(selected):
                    body.close()
                raise
            except BaseException as error:
                step = functools.partial(body.throw, error)
            else:
                step = functools.partial(body.send, sent)

    return scoped


def _async_generator(handler: Handler, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def scoped(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        body = function(*args, **kwargs)
        selected = handler
        step: Callable[[], Any] = functools.partial(anext, body)
        while True:
            with use(selected):
                try:
                    item = await step()
                except StopAsyncIteration:
                    return
                finally:
                    selected = current()
            try:
                sent = yield item
            except GeneratorExit:
                with use(selected):
                    await body.aclose()
                raise
            except BaseException as error:
                step = functools.partial(body.athrow, error)
            else:
                step = functools.partial(body.asend, sent)

    return scoped
