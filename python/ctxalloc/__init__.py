"""Which allocator serves this piece of work?

ctxalloc selects NumPy's data allocator (NEP 49) for a thread, an asyncio task or one request, exactly as
``contextvars`` select values, and carries the selection into Rust and back::

    >>> with ctxalloc.use("aligned64"):
    ...     array = numpy.ones(1000)
    >>> ctxalloc.handler_of(array)
    <ctxalloc.Handler "aligned64": Aligned(align=64), version 1>

An array stays with the handler that made it, wherever it goes and however long it lives.

- select: ``use`` for a block or a function, ``set_handler`` and ``reset`` for all else, ``asgi`` for requests
- ask: ``current``, ``handler_of``, ``handler``, ``handlers``, and NumPy's ``get_handler_name``, ``get_handler_version``
- make: ``register`` with one of ``strategies``, ``adopt`` for what foreign C code offers
- watch: ``tracking``, with ``strategies.Tracked``
"""

from ctxalloc import asgi, strategies, tracking
from ctxalloc._errors import RegistrationError, RustPanic, UnknownHandlerError
from ctxalloc._native import (
    Handler,
    Scope,
    Token,
    __version__,
    adopt,
    current,
    get_handler_name,
    get_handler_version,
    handler,
    handler_of,
    handlers,
    register,
    reset,
    set_handler,
    use,
)
from ctxalloc._units import GiB, KiB, MiB

__all__ = [
    "GiB",
    "Handler",
    "KiB",
    "MiB",
    "RegistrationError",
    "RustPanic",
    "Scope",
    "Token",
    "UnknownHandlerError",
    "__version__",
    "adopt",
    "asgi",
    "current",
    "get_handler_name",
    "get_handler_version",
    "handler",
    "handler_of",
    "handlers",
    "register",
    "reset",
    "set_handler",
    "strategies",
    "tracking",
    "use",
]
