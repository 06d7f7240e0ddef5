"""How much, how often, under which name: counters of all ended requests, kept in Rust and read here as plain data.

::

    >>> with ctxalloc.request(name="a picture"):
    ...     picture = numpy.zeros(1000)
    >>> series = ctxalloc.metrics.snapshot().series["a picture"]
    >>> series.requests, series.max_peak_bytes, series.peak_bytes.quantile(0.95)
    (1, 8000, 8192)

A request adds to the counters of its name (in a middleware: its route) at its end. A process has room for 128 names;
whatever comes under another one counts as ``other``. Requests without a name are ``unnamed``. The bytes of a request
that is inside of another one are part of that one's too.

With ``CTXALLOC_METRICS_DIR`` in the environment, the workers of a server that forks share their counters by files in
that directory, and each of them reads all. ``prometheus`` and ``opentelemetry`` export them; docs/observe.md is the
guide.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ctxalloc import _native
from ctxalloc._sites import Site, Sites, sites

__all__ = [
    "Budgets",
    "Histogram",
    "MadeRoom",
    "Present",
    "Process",
    "Series",
    "Site",
    "Sites",
    "Snapshot",
    "Waiting",
    "budgets",
    "made_room",
    "present",
    "sites",
    "snapshot",
    "waiting",
]


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of bytes or microseconds, in sixteen buckets a doubling; each ends at most 4.5 % above its values."""

    buckets: tuple[tuple[int, int], ...]
    """The buckets that have values, in order: the largest value that belongs into it, and how many it has."""
    sum: int
    """The sum of all values."""

    @property
    def count(self) -> int:
        """How many values there are."""
        return sum(count for _, count in self.buckets)

    def quantile(self, q: float) -> int:
        """The end of the bucket in which the part ``q`` (0 to 1) of all values is reached; 0 without values.

        At most 4.5 % above the true quantile, and never below. ValueError: ``q`` is not from 0 to 1.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"quantile({q!r}): give a number from 0 to 1")
        wanted, below = max(1.0, q * self.count), 0
        for end, count in self.buckets:
            below += count
            if below >= wanted:
                return end
        return 0

    def at_most(self, size_bytes: int) -> int:
        """How many values are in buckets that end at ``size_bytes`` or below. Exact for powers of two."""
        return sum(count for end, count in self.buckets if end <= size_bytes)


class Series(NamedTuple):
    """The counters of all ended requests with one name."""

    name: str
    """Their name: the route, where a middleware began them."""
    requests: int
    """How many have ended: none of those that got no reservation (`timed_out`, `turned_away`)."""
    refused_requests: int
    """How many of them were refused memory at least once."""
    refused_allocations: int
    """How many allocations were refused."""
    escaped_requests: int
    """How many left blocks behind."""
    escaped_blocks: int
    """How many blocks were alive at their ends."""
    escaped_bytes: int
    """The bytes of these blocks."""
    max_peak_bytes: int
    """The largest peak of one request."""
    timed_out: int
    """How many waited for their reservation until their time was over. They did not begin."""
    turned_away: int
    """How many could not wait for it: as many waited as may, it could never fit, or they were not to wait."""
    peak_bytes: Histogram
    """Their peaks."""
    refused_peak_bytes: Histogram
    """The peaks of those that were refused memory."""
    total_bytes: Histogram
    """All bytes that each of them allocated."""
    waited_micros: Histogram
    """How many microseconds those waited for their reservation that got it, and not at once."""
    whole_requests: int = 0
    """How many of them counted native memory and objects too (``whole=True``). The bytes of these are of all that; of
    the others, of arrays."""
    whole_array_bytes: int = 0
    """What of the peaks of these was arrays: a sum over them."""
    whole_native_bytes: int = 0
    """The same of native memory."""
    whole_object_bytes: int = 0
    """The same of Python objects."""


class Process(NamedTuple):
    """What one process has in use: this one now, another one when its last request ended."""

    pid: int
    """Its number."""
    live_requests: int
    """Requests that have not ended."""
    live_bytes: int
    """The bytes of their live blocks."""
    escaping_requests: int
    """Requests that have ended, and whose blocks are alive."""
    escaped_bytes: int
    """The bytes of these blocks."""
    waiting_requests: int
    """Requests that wait for their reservation."""


class Snapshot(NamedTuple):
    """All counters at one moment."""

    series: dict[str, Series]
    """By name."""
    processes: list[Process]
    """The processes that live and count: this one, or all that share a ``CTXALLOC_METRICS_DIR``."""


class Present(NamedTuple):
    """A request of this process that has not ended, or of which blocks, tasks or capsules are alive."""

    name: str
    """Its name."""
    age_seconds: float
    """How long ago it began."""
    has_ended: bool
    """Whether it has ended."""
    is_root: bool
    """Whether it is inside of no other request that has not ended."""
    live_bytes: int
    """The bytes of its live blocks, with those of requests inside."""
    peak_bytes: int
    """The most bytes that were alive at one time."""
    limit_bytes: int | None
    """Its limit."""
    parent: str | None
    """The name of the budget or request that it is charged to next."""
    escapes: list[_native.Block] | None
    """Its live blocks, if it has ended and its strategy is a ``strategies.Tracked``."""
    whole: _native.WholeStats | None = None
    """The parts of its bytes, if it counts native memory and objects too; else these are of arrays."""


class Budgets(NamedTuple):
    """A budget of this process: ``budgets()`` lists them, and ``parent`` makes them a tree."""

    id: int
    """Its number, which no other budget has."""
    parent: int | None
    """The number of the budget above it."""
    name: str
    """Its name."""
    limit_bytes: int | None
    """Its limit."""
    in_use_bytes: int
    """The bytes that are charged to it."""
    peak_bytes: int
    """The most bytes that were charged to it at one time."""
    refused: int
    """How many charges it refused."""
    reserved_bytes: int
    """The bytes that are reserved in it and not in use."""
    waiting: int
    """How many requests wait for room in it, or in a budget below it."""
    max_waiting: int
    """How many may."""
    victims: int
    """How many requests were chosen to make room in it."""
    reclaimed_bytes: int
    """How many bytes came back to it while reclaimers ran: its own, and those of budgets below."""


class MadeRoom(NamedTuple):
    """What was done in this process to make room where somebody waited, or was refused."""

    victims: int
    """How many requests were chosen to give way."""
    reclaimed_bytes: int
    """How many bytes came back to full budgets while their reclaimers ran."""


class Waiting(NamedTuple):
    """A request of this process that waits for its reservation."""

    name: str | None
    """Its name, if it has one."""
    reserve_bytes: int
    """How many bytes it is to reserve."""
    waited_seconds: float
    """For how long it has waited."""
    left_seconds: float | None
    """For how long it will wait at most; None: for ever."""
    budget: str
    """The budget that has no room for it, or that those before it wait for."""
    budget_id: int
    """Its number."""


def snapshot() -> Snapshot:
    """All counters now. RuntimeError: the directory ``CTXALLOC_METRICS_DIR`` cannot be used; the message says why."""
    series, processes = _native._metrics()  # noqa: SLF001 - made for this, here and below
    found: dict[str, Series] = {}
    for numbers, histograms, whole in series:
        counted = (Histogram(tuple(buckets), total) for buckets, total in histograms)
        found[numbers[0]] = Series._make((*numbers, *counted, *whole))
    return Snapshot(found, [Process(*numbers) for numbers in processes])


def present() -> list[Present]:
    """The requests of this process that are present now, the oldest first."""
    return [Present(*numbers) for numbers in _native._present_requests()]  # noqa: SLF001


def budgets() -> list[Budgets]:
    """The budgets of this process, the oldest first."""
    return [Budgets(*numbers) for numbers in _native._budgets()]  # noqa: SLF001


def made_room() -> MadeRoom:
    """What was done in this process to make room so far. A child of ``fork`` goes on from its parent's numbers."""
    return MadeRoom(*_native._made_room())  # noqa: SLF001


def waiting(count: int = 1000) -> list[Waiting]:
    """The first ``count`` requests of this process that wait for their reservation, in the order in which they came."""
    return [Waiting(*numbers) for numbers in _native._waits(count)]  # noqa: SLF001
