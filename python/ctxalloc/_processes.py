"""What a pool of processes runs in each of them first: ``process_initializer``.

A task of its own is what ``@ctxalloc.request(...)`` on the function makes; this is for a whole process. Neighbours:
``dask`` and ``ray`` for clusters, ``_executors`` for threads.
"""

import functools
from collections.abc import Callable

from ctxalloc._native import Request, request, set_handler
from ctxalloc._terms import Terms

__all__ = ["process_initializer"]

# The request of this process, which lasts as long as it.
_KEPT: list[Request] = []


def process_initializer(
    *,
    limit_bytes: int | None = None,
    handler: str | None = None,
    strict: bool = False,
    name: str = "process",
    whole: bool = False,
) -> Callable[[], None]:
    """An ``initializer=`` for processes that run tasks: what a process makes is in one request, or in a handler.

    ::

        concurrent.futures.ProcessPoolExecutor(initializer=ctxalloc.process_initializer(limit_bytes=n))

    As well for ``multiprocessing.Pool`` and for joblib, hence for scikit-learn (``joblib.parallel_config("loky",
    initializer=...)``). It can be pickled. ``limit_bytes``: the most that the process may have at one time, whichever
    tasks made it; what does not fit is a MemoryError in the task, and the process goes on. ``strict``, ``name``: as in
    ``ctxalloc.request``. ``handler``: instead of a request, the name of a handler. ``whole``: count and limit native
    memory and Python objects too; a process that was not started with the library for it (docs/whole.md) fails with a
    RuntimeError that says so, and its pool is broken. A result whose pickle does not fit is a MemoryError of the task
    in an executor; ``multiprocessing.Pool`` makes its ``repr`` then, which does not fit either: that ends the worker,
    and ``get()`` waits for ever.

    What the main thread's tasks make, that is, and threads that carry its context; a ``threading.Thread`` of a task
    carries none, and has neither limit nor handler, unless its target is ``ctxalloc.wrap(...)``.

    TypeError, ValueError: an argument is not possible. Whether a process has the handler is only known in there.
    """
    terms = Terms(limit_bytes, handler, strict, whole).checked("process_initializer")
    try:
        request(name=name)
    except (TypeError, ValueError) as error:
        raise type(error)(f"process_initializer(name={name!r}): {error}") from None
    return functools.partial(_begin, terms, name)


process_initializer.__module__ = "ctxalloc"


def _begin(terms: Terms, name: str) -> None:
    if terms.handler is not None:
        set_handler(terms.handler)
        return
    begun = terms.request(name=name)
    begun.__enter__()
    _KEPT.append(begun)
