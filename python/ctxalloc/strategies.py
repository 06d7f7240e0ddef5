"""How memory is handed out: what stands behind a handler.

Construct one, give it a name with ``ctxalloc.register(name, strategy)``, and select it with ``ctxalloc.use(name)``.
Options are keywords, sizes are ints in bytes. Each class here is one arm of ``src/python/strategies.rs``.
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
    """The C heap as it is: ``malloc``, ``calloc``, ``realloc`` and ``free`` of the process; 16-byte alignment."""

    __slots__ = ()

    def __new__(cls) -> Self:
        return super().__new__(cls, "System")


class Aligned(Strategy):
    """Blocks that start at a multiple of ``align`` bytes: a power of two from 16 to 2 MiB.

    Each block costs up to ``align + 16`` bytes more than asked for. ValueError: another alignment.
    """

    __slots__ = ()

    def __new__(cls, *, align: int = 64) -> Self:
        return super().__new__(cls, "Aligned", align=align)


class Arena(Strategy):
    """Memory of its own from the process's pool, which is used again and again but by nobody else; 64-byte alignment.

    Memory that goes as a whole. One that is given to several requests is theirs
    together. ``Handler.trim()`` gives back what is not alive.
    """

    __slots__ = ()

    def __new__(cls) -> Self:
        return super().__new__(cls, "Arena")


class Budgeted(Strategy):
    """``upstream``, but no more than ``limit_bytes`` at a time: more is refused, a MemoryError in NumPy.

    Or charged to a ``budget``, which may be others' too, and under a higher one.
    ``Fallback(Budgeted(HugePages(), limit_bytes=256 * MiB), System())``: so much of what is scarce, then the heap. Each
    array costs 8 bytes more, rounded up to the upstream's alignment, not charged. TypeError: neither or both are given.
    """

    __slots__ = ()

    def __new__(cls, upstream: Strategy, /, *, limit_bytes: int | None = None, budget: Budget | None = None) -> Self:
        return super().__new__(cls, "Budgeted", upstream=upstream, limit_bytes=limit_bytes, budget=budget)


class Fallback(Strategy):
    """``first``, and ``second`` where it refuses; each array goes back to the one that made it.

    An array is resized by its own, and moves to the other one only where that refuses. Aligned to the lesser of both
    alignments; each array costs 16 bytes more, rounded up to its maker's alignment. ValueError: both are the same.
    """

    __slots__ = ()

    def __new__(cls, first: Strategy, second: Strategy, /) -> Self:
        return super().__new__(cls, "Fallback", first=first, second=second)


class Faulty(Strategy):
    """``upstream``, but some requests for memory fail on purpose: MemoryError in NumPy.

    ``every``: each request whose number is a multiple of it fails (1: all). Or ``probability`` (0 to 1): at random, the
    same ones each time for one ``seed`` in a single-threaded program. Freeing never fails.
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
    """Size classes with a cache for each thread, and large blocks whose memory is kept; 64-byte alignment.

    The memory of large blocks (above 256 KiB) that nobody uses is kept for the next ones of any size, as much as will
    be wanted. ``warm_bytes``: how much at most; an eighth of the machine's memory by default. ``decay_seconds``: for
    how long; ten by default. ``Handler.trim()`` gives everything back at once.
    """

    __slots__ = ()

    def __new__(cls, *, warm_bytes: int | None = None, decay_seconds: float | None = None) -> Self:
        return super().__new__(cls, "Pool", warm_bytes=warm_bytes, decay_seconds=decay_seconds)


class Tracked(Strategy):
    """Knows each live block of ``upstream``: its size, its age and the thread that made it.

    ``Handler.live_blocks()`` lists them, ``ctxalloc.tracking`` has more. ``upstream`` is the process's own pool where
    there is none.

    ``traceback``: how many calls of the Python stack are kept with each block, 0 for none; about 0.2 us a block and
    0.15 us a call, where the rest costs 0.02 us. ``tasks``: the name of the asyncio task too, if it is of asyncio's own
    type; a tokio task has its number. Neither runs any Python code, nor waits for the GIL: what is allocated without it
    has none of both.

    Each block costs 64 bytes more. The handler ``tracked`` is one without options. A request wants one of its own:
    those that share one see all its blocks. ValueError: ``upstream`` is tracked already, or aligns to less than 8
    bytes.
    """

    __slots__ = ()

    def __new__(cls, upstream: Strategy | None = None, /, *, traceback: int = 0, tasks: bool = False) -> Self:
        return super().__new__(cls, "Tracked", upstream=upstream, traceback=traceback, tasks=tasks)


class Zeroing(Strategy):
    """Wipes each array's memory when the array goes, or is resized: for keys, passwords, and other people's data.

    ``Zeroing(Locked())`` keeps them out of the swap too. It costs what it takes to fill the array once more, and each
    array 8 bytes more, rounded up to the upstream's alignment. Copies (temporaries made elsewhere, pickles, what was
    printed) it cannot reach. ValueError: ``upstream`` is a ``Zeroing``, or a ``Guard``, which keep nothing anyway.
    """

    __slots__ = ()

    def __new__(cls, upstream: Strategy, /) -> Self:
        return super().__new__(cls, "Zeroing", upstream=upstream)


class HugePages(Strategy):
    """A ``Pool`` whose blocks of 2 MiB and more lie on huge pages, at a multiple of 2 MiB; the others on ordinary ones.

    One entry of the processor's address cache covers 2 MiB instead of 4 KiB, one page fault does the work of 512. By
    default the kernel finds such pages where it can (``MADV_HUGEPAGE``), else ordinary ones do. With ``reserved`` they
    come from those that the administrator set aside (``vm.nr_hugepages``): they are there, or MemoryError is raised;
    blocks take whole ones then, and a process with such arrays must not fork and write to them in the child.

    RuntimeError: ``reserved`` where none is free; it says how many there are and how to get some. ``warm_bytes`` and
    ``decay_seconds`` as for ``Pool``. The handler ``hugepages`` is one without options.
    """

    __slots__ = ()

    def __new__(
        cls, *, reserved: bool = False, warm_bytes: int | None = None, decay_seconds: float | None = None
    ) -> Self:
        return super().__new__(cls, "HugePages", reserved=reserved, warm_bytes=warm_bytes, decay_seconds=decay_seconds)


class Numa(Strategy):
    """A ``Pool`` whose memory lies on NUMA nodes of your choice, whatever thread touches it first.

    ``node``: the number of one, or several; None for all there are (``interleave`` only). ``policy``: ``"bind"`` takes
    memory of these nodes and no other (where they have none left, the kernel ends a process); ``"preferred"`` of one
    node while it has some; ``"interleave"`` of all in turn, page by page.

    ValueError: a node that is not there (those that are, are listed), or several for ``preferred``. RuntimeError: the
    system refuses ``mbind``, as some containers do. ``warm_bytes`` and ``decay_seconds`` as for ``Pool``.
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
    """A ``Pool`` whose blocks are locked in memory (``mlock``): never swapped out, no page fault when they are used.

    For keys and passwords, and for work that cannot wait for a disk. What is locked is what is handed out, in spans of
    64 KiB and more, and what the pool keeps for next time. A child of ``fork`` has copies that are not locked. Where
    the limit (``ulimit -l``) leaves no room, MemoryError is raised.

    RuntimeError: not even one span can be locked; it says what the limit is and how to raise it. ``warm_bytes`` and
    ``decay_seconds`` as for ``Pool``. The handler ``locked`` is one without options, not tried out before its use.
    """

    __slots__ = ()

    def __new__(cls, *, warm_bytes: int | None = None, decay_seconds: float | None = None) -> Self:
        return super().__new__(cls, "Locked", warm_bytes=warm_bytes, decay_seconds=decay_seconds)


class Guard(Strategy):
    """An electric fence: every block ends at an unreadable page, to find code that reads or writes where it must not.

    An access past the end, or to a block that was freed, stops at that instruction: a few lines on standard error say
    what was touched, how far from which block, and which threads made and freed it; then the process gets the SIGSEGV
    that it would have got (``python -X faulthandler`` adds the Python traceback). Bytes overwritten within ``align`` of
    the end, or before the start, are reported when the block is freed; so are a double free and the free of a foreign
    pointer, which then do nothing.

    ``align``: every block's alignment, and how exact its end is; a power of two from 1 to 4096. With 1 the end is
    exact, and a block as aligned as its size is. ``underrun``: a page before the block is unreadable too.
    ``quarantine_bytes``: how many bytes of addresses of freed blocks stay unreadable. ``report``: whether to write to
    standard error, for which a handler of SIGSEGV and SIGBUS is installed with the first block.

    A block costs some microseconds and a page of memory, and before Linux 6.13 two of the process's 65530 mappings. The
    handler ``guard`` is one without options.
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
        """How often misuse was found when a block was freed or resized. A fault is not counted: few survive one."""
        return self._misuses()


class SharedMemory(Strategy):
    """Each block in a file of memory of its own (``memfd``), which another process can map without a copy.

    ``ctxalloc.shared_memory_of(array)`` tells the descriptor and offset of an array or a view.

    Each block costs some ten microseconds, whole pages, and a descriptor while it lives (``ulimit -n``); without one,
    MemoryError is raised. So: for a few large arrays. After ``os.fork`` parent and child write to the *same* memory,
    other than under every other strategy; each may let go of it by itself. Resizing an array may move it to another
    descriptor.
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

    Each is an address, anything with an ``address`` (a numba ``cfunc``), or a ctypes function; from cffi it is
    ``int(ffi.cast("uintptr_t", function))``. Objects are kept as long as the strategy; a handler's is kept for ever.
    ``free`` gets the true size of each block, other than from NumPy. ``align``: what every block is aligned to, that of
    ``realloc`` too; 1 says that nothing is known. A new block that is less aligned is a MemoryError.

    What is at an address cannot be checked: a wrong one crashes the process. It must stay callable for ever, on any
    thread, several at once, without the GIL, in a child of ``fork``, and while Python exits. A ctypes function may be
    Python's, so it is called with the GIL, and not any more when Python exits: what is alive then is never freed. To
    call C without the GIL, give its address: ``ctypes.cast(function, ctypes.c_void_p).value``.

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
