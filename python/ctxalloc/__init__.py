"""Which allocator serves this piece of work?

ctxalloc selects NumPy's data allocator (NEP 49) for a thread, an asyncio task or one request, exactly as
``contextvars`` select values, and carries the selection into Rust and back::

    with ctxalloc.use("aligned64"):
        a = numpy.ones(1000)          # lives in 64-byte aligned memory
    ctxalloc.handler_of(a)            # <ctxalloc.Handler "aligned64": Aligned(align=64), version 1>

An array stays with the handler that made it, wherever it goes and however long it lives.
"""

from ctxalloc import asgi, strategies
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
    "use",
]
