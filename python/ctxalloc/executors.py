"""The caller's context in threads: ``ThreadPoolExecutor``, ``wrap``.

``asyncio.to_thread`` carries the context; ``Executor.submit``, ``loop.run_in_executor`` and ``threading.Thread`` do not
(before CPython 3.14). What runs there is then in no request. Neighbour: ``_serving.detached``, which is the way out.
"""

import concurrent.futures
import contextvars
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["ThreadPoolExecutor", "wrap"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class ThreadPoolExecutor(concurrent.futures.ThreadPoolExecutor):
    """``concurrent.futures.ThreadPoolExecutor``, whose calls run in a copy of the submitter's context.

    So they belong to the submitter's request and have its handler selected, and all its other ContextVars too. What they
    set is not seen by the submitter. As an event loop's default executor it does so for ``loop.run_in_executor``::

        asyncio.get_running_loop().set_default_executor(ctxalloc.ThreadPoolExecutor())
    """

    def submit(  # noqa: D102 - as its base's
        self, fn: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> concurrent.futures.Future[_R]:
        return super().submit(contextvars.copy_context().run, fn, *args, **kwargs)


def wrap(function: Callable[_P, _R], /) -> Callable[_P, _R]:
    """The function, each of whose calls runs in a copy of the context that ``wrap`` was called in.

    For what starts threads by itself: ``threading.Thread(target=ctxalloc.wrap(work))``, ``joblib.delayed(ctxalloc.wrap(work))``
    with joblib's backend "threading", callbacks of C libraries. It holds the context, and with it the request, for as long
    as it lives, and cannot be pickled. TypeError: a coroutine function; tasks carry the context by themselves.
    """
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise TypeError(
            f"ctxalloc.wrap({function!r}): wrap plain functions; tasks carry the context by themselves, and generators run in "
            "that of their caller"
        )
    context = contextvars.copy_context()

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return context.copy().run(function, *args, **kwargs)

    return wrapped
