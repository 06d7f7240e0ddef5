"""The caller's context in threads: ``ThreadPoolExecutor``, ``wrap``.

``asyncio.to_thread`` carries the context; ``Executor.submit``, ``loop.run_in_executor`` and ``threading.Thread`` do not
(by default). What runs there is then in no request. Neighbour: ``_serving.detached``, which is the way out.
"""

import concurrent.futures
import contextvars
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ctxalloc._native import set_handler

__all__ = ["ThreadPoolExecutor", "wrap"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class ThreadPoolExecutor(concurrent.futures.ThreadPoolExecutor):
    """``concurrent.futures.ThreadPoolExecutor``, whose calls run in a copy of the submitter's context.

    So they belong to the submitter's request and have its handler selected, and all its other ContextVars too. What
    they set is not seen by the submitter. As an event loop's default executor it does so for
    ``loop.run_in_executor``::

        asyncio.get_running_loop().set_default_executor(ctxalloc.ThreadPoolExecutor())

    What ``initializer`` selects does nothing for the calls, since it runs in the thread's own context.
    ValueError: it is ``ctxalloc.set_handler``.
    """

    __module__ = "ctxalloc"

    def __init__(
        self,
        max_workers: int | None = None,
        thread_name_prefix: str = "",
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        """As its base's."""
        if initializer is set_handler:
            raise ValueError(
                "ctxalloc.ThreadPoolExecutor(initializer=ctxalloc.set_handler) would select nothing: each call runs in "
                "the context of whoever submits it; submit inside ctxalloc.use(...), or take "
                "concurrent.futures.ThreadPoolExecutor"
            )
        super().__init__(max_workers, thread_name_prefix, initializer, initargs)

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> concurrent.futures.Future[_T]:
        """As its base's, in a copy of the caller's context."""
        call = functools.partial(contextvars.copy_context().run, fn, *args, **kwargs)
        # A thread that this starts lives on: with thread_inherit_context (CPython 3.14) it would hold this request.
        return contextvars.Context().run(super().submit, call)


def wrap(function: Callable[_P, _T], /) -> Callable[_P, _T]:
    """The function, each of whose calls runs in a copy of the context that ``wrap`` was called in.

    For what starts threads by itself: ``threading.Thread(target=ctxalloc.wrap(work))``,
    ``joblib.delayed(ctxalloc.wrap(work))`` with joblib's backend "threading", callbacks of C libraries. It holds the
    context, and with it the request, for as long as it lives, and cannot be pickled. TypeError: it cannot be called,
    or it is a coroutine function (tasks carry the context by themselves) or a generator function.
    """
    if not callable(function):
        raise TypeError(f"ctxalloc.wrap({function!r}): give a function or another callable")
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    # Of an object with `async def __call__` only the method is a coroutine function.
    bodies = (function, getattr(type(function), "__call__", None))  # noqa: B004
    if any(is_kind(body) for is_kind in kinds for body in bodies):
        raise TypeError(
            f"ctxalloc.wrap({function!r}): wrap plain functions; tasks carry the context by themselves, and generators "
            "run in that of their caller"
        )
    context = contextvars.copy_context()

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return context.copy().run(function, *args, **kwargs)

    return wrapped
