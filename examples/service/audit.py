"""Whose memory is this array? Asked of every array the service makes, and counted.

A ``Witness`` knows which handler its arrays were asked for. It is told so in words, not by reading the current
selection: otherwise a wrong selection would agree with itself. Neighbours: ``pipelines`` calls it, ``app`` serves
the counts as JSON, ``report`` prints them.
"""

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self, TypeVar

import numpy.typing as npt

import ctxalloc

Place = Literal["coroutine", "thread", "rust"]
"""Where an array was made."""

NOBODY = "(no handler's memory)"
"""Found for an array that owns nothing and whose owner is not an array."""

_A = TypeVar("_A", bound=npt.NDArray[Any])


class Seen(NamedTuple):
    """One kind of observation."""

    route: str
    asked: str
    place: Place
    found: str

    @property
    def wrong(self) -> bool:
        return self.asked != self.found


class Visit:
    """One request, told apart from the others."""

    __slots__ = ("begun",)

    def __init__(self) -> None:
        self.begun = False


@dataclass
class Audit:
    """All counts of a service, and how often requests were interleaved.

    ``interleaved`` counts the arrays that a request made in its midst, right after another request had made one for
    another handler: where a selection that is not each request's own would go wrong.
    """

    counts: Counter[Seen] = field(default_factory=Counter)
    interleaved: int = 0
    _last: tuple[Visit, str] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, visit: Visit, seen: Seen) -> None:
        """Count one array; from any thread."""
        with self._lock:
            self.counts[seen] += 1
            if self._last and visit.begun:
                last_visit, last_asked = self._last
                self.interleaved += last_visit is not visit and last_asked != seen.asked
            visit.begun = True
            self._last = visit, seen.asked

    @property
    def arrays(self) -> int:
        return self.counts.total()

    @property
    def mismatches(self) -> int:
        return sum(count for seen, count in self.counts.items() if seen.wrong)

    def to_json(self) -> dict[str, Any]:
        """As ``from_json`` takes it."""
        with self._lock:
            return {"counts": [[*seen, count] for seen, count in self.counts.items()], "interleaved": self.interleaved}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        """The audit of a service in another process."""
        rows: Iterable[tuple[str, str, Place, str, int]] = document["counts"]
        counts = {Seen(route, asked, place, found): count for route, asked, place, found, count in rows}
        return cls(Counter(counts), document["interleaved"])


@dataclass(frozen=True)
class Witness:
    """Looks at arrays made in one request, for which one handler was asked. Each method gives the array back."""

    audit: Audit
    visit: Visit
    route: str
    asked: str

    def coroutine(self, array: _A, /) -> _A:
        """Made in a coroutine, on the event loop's thread."""
        return self._look(array, "coroutine")

    def thread(self, array: _A, /) -> _A:
        """Made in a worker thread (``asyncio.to_thread``)."""
        return self._look(array, "thread")

    def rust(self, array: _A, /) -> _A:
        """Made in a Rust future, on a thread of tokio's."""
        return self._look(array, "rust")

    def _look(self, array: _A, place: Place) -> _A:
        owner = ctxalloc.handler_of(array)
        self.audit.note(self.visit, Seen(self.route, self.asked, place, owner.name if owner else NOBODY))
        return array
