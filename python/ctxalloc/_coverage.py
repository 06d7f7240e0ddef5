"""What ctxalloc does not see: the process's memory beside that of its handlers."""

import contextlib
import tracemalloc
from typing import NamedTuple

from ctxalloc import _native

_NUMPY_DOMAIN = 389047  # numpy.lib.tracemalloc_domain, which is what NumPy reports its arrays under


class Coverage(NamedTuple):
    """How much of the process's memory is in handlers, in bytes, at one moment."""

    resident_bytes: int
    """What the process has in memory (RSS), whoever asked for it."""
    pools_in_use_bytes: int
    """Pages of all pools that blocks or the caches of threads are in. Some may never have been touched."""
    pools_warm_bytes: int
    """Free pages that pools keep for later."""
    unseen_bytes: int
    """``resident_bytes`` less the pages of pools that are resident: code, Python objects, the C heap with arrays of
    NumPy's default handler, other libraries."""
    error_bytes: int
    """``unseen_bytes`` is too small by at most this, the resident pages of pools: those that were only read, or
    that are huge pages set aside, are no part of ``resident_bytes``."""
    traced_arrays_bytes: int | None
    """Live arrays of NumPy, whichever handler made them, if ``tracemalloc`` is tracing."""
    traced_buffers_bytes: int | None
    """Live blocks that Rust made under a handler, if ``tracemalloc`` is tracing."""
    traced_other_bytes: int | None
    """Everything else that ``tracemalloc`` traces: Python objects."""
    nobodys_bytes: int | None = None
    """How much native memory and how many objects were asked for and charged to no request, since this process began to
    count them; what was freed since is part of it. None where ``request(whole=True)`` was not enabled."""
    nobodys_by_thread: dict[str, int] | None = None
    """The same by who asked: the main thread, Python's threads, and the threads of each library, by the name of their
    pool, or by the library's file."""


Coverage.__module__ = "ctxalloc"


def coverage() -> Coverage:
    """How much of this process's memory is in handlers, and how much is not.

    ::

        >>> seen = ctxalloc.coverage()
        >>> 0 <= seen.unseen_bytes <= seen.resident_bytes
        True

    Asks the system which pages of the pools it has, which takes a millisecond for some gigabytes. While ``tracemalloc``
    traces, it also sums up what that has, which takes a while in a large program.
    """
    in_use, warm = _native._pools()  # noqa: SLF001 - made for this
    resident = _native._resident_bytes()  # noqa: SLF001
    in_pools = _native._pools_resident()  # noqa: SLF001
    seen = min(in_use + warm if in_pools is None else in_pools, resident)
    arrays = buffers = other = None
    if tracemalloc.is_tracing():
        arrays = buffers = other = 0
        with contextlib.suppress(RuntimeError):  # somebody has stopped it meanwhile
            # The public view makes an object of each.
            traces = tracemalloc.take_snapshot().traces._traces  # type: ignore[attr-defined] # noqa: SLF001
            for domain, size, *_ in traces:
                if domain == _NUMPY_DOMAIN:
                    arrays += size
                elif domain == _native.tracemalloc_domain:
                    buffers += size
                else:
                    other += size
    by_thread = _native._whole_nobodys()  # noqa: SLF001
    nobodys = None if by_thread is None else sum(by_thread.values())
    return Coverage(resident, in_use, warm, resident - seen, seen, arrays, buffers, other, nobodys, by_thread)
