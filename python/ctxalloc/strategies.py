"""Strategies: how a handler gets and hands out memory.

Construct one, register it under a name with ``ctxalloc.register(name, strategy)``, and select it with
``ctxalloc.use(name)``. Options are keywords, and sizes are ints in bytes. Each class is one arm of
``src/python/strategies.rs``.
"""

import ctypes
from _ctypes import CFuncPtr
from collections.abc import Sequence
from typing import Literal, Protocol, Self, TypeAlias

from ctxalloc._native import Budget, Strategy

__all__ = [
    "Aligned",
    "Arena",
    "Budgeted",
    "Callbacks",
    "Fallback",
    "Faulty",
    "Guard",
    "HugePages",
    "Locked",
    "Numa",
    "Pool",
    "SharedMemory",
    "Strategy",
    "System",
    "Tracked",
    "Zeroing",
]


class _HasAddress(Protocol):
    @property
    def address(self) -> int: ...


_CFunction: TypeAlias = int | _HasAddress | CFuncPtr | None


class System(Strategy):
    """The C heap: ``malloc``, ``calloc``, ``realloc`` and ``free`` of the process, with 16-byte alignment."""

    __slots__ = ()

    def __new__(cls) -> Self:
        return super().__new__(cls, "System")


class Aligned(Strategy):
    """Blocks whose address is a multiple of ``align`` bytes: a power of two from 16 to 2 MiB.

    Each block takes up to ``align + 16`` bytes more than its size. ValueError: ``align`` is another number.
    """

    __slots__ = ()

    def __new__(cls, *, align: int = 64) -> Self:
        return super().__new__(cls, "Aligned", align=align)


class Arena(Strategy):
    """Memory of its own from the process's pool, which it uses again and shares with nobody; 64-byte alignment.

    All of it goes back to the pool when the arena goes. Requests that are given the same arena share it.
    ``Handler.trim()`` gives back what is not in use.
    """

    __slots__ = ()

    def __new__(cls) -> Self:
        return super().__new__(cls, "Arena")


class Budgeted(Strategy):
    """``upstream`` with a limit: at most ``limit_bytes`` are alive at one time, and more is a MemoryError in NumPy.

    Instead of a limit of its own it may have a ``budget``, which others are charged to as well, and which may be part
    of a larger one. ``Fallback(Budgeted(HugePages(), limit_bytes=256 * MiB), System())`` uses that much of scarce
    memory, and then the heap. Each array takes 8 bytes more, rounded up to the upstream's alignment and not charged.
    TypeError: neither or both of ``limit_bytes`` and ``budget`` are given.
    """

    __slots__ = ()

    def __new__(cls, upstream: Strategy, /, *, limit_bytes: int | None = None, budget: Budget | None = None) -> Self:
        return super().__new__(cls, "Budgeted", upstream=upstream, limit_bytes=limit_bytes, budget=budget)


class Fallback(Strategy):
    """``first``, or ``second`` when the first one refuses. Each array is freed by the one that made it.

    The one that made an array also resizes it; only if it refuses does the array move to the other one. The alignment
    is the smaller one of the two. Each array takes 16 bytes more, rounded up to the alignment of the one that made it.
    ValueError: both are the same strategy.
    """

    __slots__ = ()

    def __new__(cls, first: Strategy, second: Strategy, /) -> Self:
        return super().__new__(cls, "Fallback", first=first, second=second)


class Faulty(Strategy):
    """``upstream``, but some allocations fail on purpose, with a MemoryError in NumPy.

    ``every=n``: every nth allocation fails (1: all). Or ``probability`` (0 to 1): allocations fail at random; with the
    same ``seed`` a single-threaded program sees the same ones fail each time. Freeing never fails. TypeError: neither
    or both of ``every`` and ``probability`` are given.
    """

    __slots__ = ()

    def __new__(
        cls,
        upstream: Strategy,
        /,
        *,
        every: int | None = None,
        probability: float | None = None,
        seed: int = 0,
    ) -> Self:
        return super().__new__(cls, "Faulty", upstream=upstream, every=every, probability=probability, seed=seed)


class Pool(Strategy):
    """Size classes with a cache for each thread, and large blocks whose memory is used again; 64-byte alignment.

    The memory of freed large blocks (above 256 KiB) is kept for new ones of any size, as much as they are likely to
    need. ``warm_bytes``: how many bytes at most; an eighth of the machine's memory by default. ``decay_seconds``: for
    how long; ten seconds by default. ``Handler.trim()`` gives everything back at once.
    """

    __slots__ = ()

    def __new__(cls, *, warm_bytes: int | None = None, decay_seconds: float | None = None) -> Self:
        return super().__new__(cls, "Pool", warm_bytes=warm_bytes, decay_seconds=decay_seconds)


class Tracked(Strategy):
    """Keeps a list of the live blocks of ``upstream``: the size, the age, and the thread that made each.

    ``Handler.live_blocks()`` returns them, and ``ctxalloc.tracking`` works with them. ``upstream`` is the process's
    pool by default.

    ``traceback``: how many calls of the Python stack are kept with each block, 0 for none. That takes about 0.2 us for
    each block and 0.15 us for each call; the rest takes 0.02 us. ``tasks``: also the name of the asyncio task, if it is
    of asyncio's own type; a tokio task has its number. Neither runs Python code or waits for the GIL: a block that is
    allocated without the GIL has neither.

    Each block takes 64 bytes more. The handler ``tracked`` is a ``Tracked()``. Give each request one of its own:
    requests that share one see each other's blocks. ValueError: ``upstream`` is tracked already, or aligns to less than
    8 bytes.
    """

    __slots__ = ()

    def __new__(cls, upstream: Strategy | None = None, /, *, traceback: int = 0, tasks: bool = False) -> Self:
        return super().__new__(cls, "Tracked", upstream=upstream, traceback=traceback, tasks=tasks)


class Zeroing(Strategy):
    """Overwrites each array's memory with zeros when the array is freed or resized: for keys and personal data.

    ``Zeroing(Locked())`` also keeps them out of the swap. It takes the time to fill the array once more, and 8 bytes
    more for each array, rounded up to the upstream's alignment. It cannot reach copies: temporaries made elsewhere,
    pickles, printed text. ValueError: ``upstream`` is a ``Zeroing`` or a ``Guard``, of whose freed blocks nothing can
    be read anyway.
    """

    __slots__ = ()

    def __new__(cls, upstream: Strategy, /) -> Self:
        return super().__new__(cls, "Zeroing", upstream=upstream)


class HugePages(Strategy):
    """A ``Pool`` with its blocks of 2 MiB and more on huge pages, at a multiple of 2 MiB, and others on ordinary pages.

    One entry of the processor's TLB covers 2 MiB instead of 4 KiB, and one page fault does the work of 512. By default
    the kernel provides such pages if it can (``MADV_HUGEPAGE``), and ordinary ones if not. With ``reserved`` they are
    those that the administrator has set aside (``vm.nr_hugepages``), and MemoryError is raised if none is left; each
    block then takes whole huge pages, and a process with such arrays must not fork and write to them in the child.

    RuntimeError: ``reserved``, and no such page is free; the message says how many there are and how to get some.
    ``warm_bytes`` and ``decay_seconds``: as for ``Pool``. The handler ``hugepages`` is a ``HugePages()``.
    """

    __slots__ = ()

    def __new__(
        cls, *, reserved: bool = False, warm_bytes: int | None = None, decay_seconds: float | None = None
    ) -> Self:
        return super().__new__(cls, "HugePages", reserved=reserved, warm_bytes=warm_bytes, decay_seconds=decay_seconds)


class Numa(Strategy):
    """A ``Pool`` whose memory is on NUMA nodes of your choice, whichever thread touches it first.

    ``node``: the number of a node, or several; None for all nodes (``interleave`` only). ``policy``: ``"bind"`` uses
    memory of these nodes alone (if they have none left, the kernel kills a process); ``"preferred"``, of one node while
    it has some; ``"interleave"``, of all nodes in turn, page by page.

    ValueError: a node does not exist (the message lists those that do), or there are several for ``preferred``.
    RuntimeError: the system refuses ``mbind``, as some containers do. ``warm_bytes`` and ``decay_seconds``: as for
    ``Pool``.
    """

    __slots__ = ()

    def __new__(
        cls,
        *,
        node: int | Sequence[int] | None = None,
        policy: Literal["bind", "preferred", "interleave"] = "bind",
        warm_bytes: int | None = None,
        decay_seconds: float | None = None,
    ) -> Self:
        return super().__new__(
            cls, "Numa", node=node, policy=policy, warm_bytes=warm_bytes, decay_seconds=decay_seconds
        )


class Locked(Strategy):
    """A ``Pool`` whose blocks are locked in memory (``mlock``): never swapped out, and used without page faults.

    For keys and passwords, and for work that cannot wait for a disk. All blocks are locked, in spans of 64 KiB and
    more, and so is the memory that the pool keeps for later. In a child of ``fork`` the copies are not locked.
    MemoryError is raised where the limit (``ulimit -l``) leaves no room.

    RuntimeError: not even one span can be locked; the message says what the limit is and how to raise it.
    ``warm_bytes`` and ``decay_seconds``: as for ``Pool``. The handler ``locked`` is a ``Locked()``, checked only when
    it is used.
    """

    __slots__ = ()

    def __new__(cls, *, warm_bytes: int | None = None, decay_seconds: float | None = None) -> Self:
        return super().__new__(cls, "Locked", warm_bytes=warm_bytes, decay_seconds=decay_seconds)


class Guard(Strategy):
    """An electric fence: each block ends at an unreadable page, to find code that reads or writes out of bounds.

    An access past the end, or to a freed block, stops at that instruction. A few lines on standard error say which
    address it was, how far from which block, and which threads made and freed that block; then the process gets the
    SIGSEGV as usual (``python -X faulthandler`` adds the Python traceback). Overwritten bytes within ``align`` of the
    end, or before the start, are reported when the block is freed. So are a double free and the free of a foreign
    pointer, which then do nothing.

    ``align``: the alignment of each block, and how closely its end is checked, in bytes; a power of two from 1 to 4096.
    With 1 the end is exact, and a block is only as aligned as its size. ``underrun``: a page before each block is
    unreadable too. ``quarantine_bytes``: how many bytes of freed blocks stay unreadable. ``report``: whether to write
    to standard error; for that a handler of SIGSEGV and SIGBUS is installed with the first block.

    A block takes some microseconds and a page of memory, and before Linux 6.13 two of the process's 65530 mappings. The
    handler ``guard`` is a ``Guard()``.
    """

    __slots__ = ()

    def __new__(
        cls,
        *,
        align: int = 64,
        underrun: bool = False,
        quarantine_bytes: int = 256 << 20,
        report: bool = True,
    ) -> Self:
        return super().__new__(
            cls, "Guard", align=align, underrun=underrun, quarantine_bytes=quarantine_bytes, report=report
        )

    @property
    def misuses(self) -> int:
        """How often misuse was found when a block was freed or resized; without faults, which end most processes."""
        return self._misuses()


class SharedMemory(Strategy):
    """Each block in a memory file of its own (``memfd``), which another process can map without a copy.

    ``ctxalloc.shared_memory_of(array)`` returns the descriptor and offset of an array or a view.

    Use it for a few large arrays: each block takes some ten microseconds, whole pages, and a file descriptor while it
    lives (``ulimit -n``); if there is none left, MemoryError is raised. Unlike under any other strategy, parent and
    child write to the *same* memory after ``os.fork``; each may free it independently. Resizing an array may move it to
    another descriptor. RuntimeError: the system is not Linux.
    """

    __slots__ = ()

    def __new__(cls) -> Self:
        return super().__new__(cls, "SharedMemory")


class Callbacks(Strategy):
    """Blocks from four C functions of yours, with the signatures of NEP 49's allocator.

    ::

        void *malloc(void *ctx, size_t size);
        void *calloc(void *ctx, size_t nelem, size_t elsize);
        void *realloc(void *ctx, void *ptr, size_t new_size);
        void free(void *ctx, void *ptr, size_t size);

    Each is an address, an object with an ``address`` (a numba ``cfunc``), or a ctypes function; for one of cffi's give
    ``int(ffi.cast("uintptr_t", function))``. The objects are kept as long as the strategy, and that of a handler for
    ever. ``free`` gets the true size of each block, which NumPy does not promise. ``align``: the alignment in bytes of
    every block, also after ``realloc``; 1 if nothing is known. MemoryError: a new block is less aligned than that.

    An address cannot be checked, and a wrong one crashes the process. The function there must be callable for ever, on
    any thread, by several threads at once, without the GIL, in a child of ``fork``, and while Python exits. A ctypes
    function may run Python code, so it is called with the GIL, and not at all once Python exits: blocks that are alive
    then are never freed. It must not raise, since ctypes returns garbage then and the process may crash: return None
    for memory that there is not. To call a C function without the GIL, give its address:
    ``ctypes.cast(function, ctypes.c_void_p).value``.

    RegistrationError (a ValueError): a function is None or NULL; all four are needed.
    """

    __slots__ = ()

    def __new__(
        cls,
        *,
        malloc: _CFunction,
        calloc: _CFunction,
        realloc: _CFunction,
        free: _CFunction,
        ctx: int | None = None,
        align: int = 1,
    ) -> Self:
        functions = {"malloc": malloc, "calloc": calloc, "realloc": realloc, "free": free}
        addresses = {name: _address(name, function) for name, function in functions.items()}
        return super().__new__(
            cls,
            "Callbacks",
            ctx=ctx,
            align=align,
            keep=[function for function in functions.values() if not isinstance(function, int | None)] or None,
            in_python=any(isinstance(function, CFuncPtr) for function in functions.values()),
            **addresses,
        )


def _address(name: str, function: object) -> int:
    """The address of a C function; 0 for none."""
    if function is None:
        return 0
    if isinstance(function, CFuncPtr):
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    address = function if isinstance(function, int) else getattr(function, "address", None)
    if not isinstance(address, int) or isinstance(address, bool):
        msg = f"Callbacks({name}={function!r}): give the address of a C function, a ctypes function, or a numba cfunc"
        raise TypeError(msg)
    return address
