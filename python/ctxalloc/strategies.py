"""How memory is handed out: what stands behind a handler.

Construct one, give it a name with ``ctxalloc.register(name, strategy)``, and select it with ``ctxalloc.use(name)``.
Options are keywords, sizes are ints in bytes. Each class here is one arm of ``src/python/strategies.rs``.
"""

from typing import Self

from ctxalloc._native import Budget, Strategy

__all__ = ["Aligned", "Arena", "Budgeted", "Fallback", "Faulty", "Pool", "Strategy", "System", "Tracked", "Zeroing"]


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

    What a ``request()`` has unless it is given another strategy. One that is given to several requests is theirs
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
    those that share one see all its blocks. ValueError: ``upstream`` is tracked already.
    """

    __slots__ = ()

    def __new__(cls, upstream: Strategy | None = None, /, *, traceback: int = 0, tasks: bool = False) -> Self:
        return super().__new__(cls, "Tracked", upstream=upstream, traceback=traceback, tasks=tasks)


class Zeroing(Strategy):
    """Wipes each array's memory when the array goes, or is resized: for keys, passwords, and other people's data.

    ``Zeroing(Locked())`` keeps them out of the swap too. It costs what it takes to fill the array once more, and each
    array 8 bytes more, rounded up to the upstream's alignment. Copies (temporaries made elsewhere, pickles, what was
    printed) it cannot reach.
    """

    __slots__ = ()

    def __new__(cls, upstream: Strategy, /) -> Self:
        return super().__new__(cls, "Zeroing", upstream=upstream)
