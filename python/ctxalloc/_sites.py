"""Which code made the arrays of a request's peak, and those that outlive it: of one request, and summed up by route.

``asgi``, ``wsgi`` and ``django`` look at one in ``sites=`` requests; ``metrics.sites()`` has the sums of this process.
Rust notes what is made (``src/python/sited.rs``); here it gets names, and bounds: neither routes nor sites grow for
ever.
"""

import functools
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from ctxalloc._native import Request
from ctxalloc._profile import Frame, Profile, Sums, place_of, short_name

MAX_NAMES: Final = 128
"""Names that have sums of their own; those that come later have them together."""
MAX_STACKS: Final = 1000
"""Stacks of each name; what comes from others is one."""
OTHER: Final = "other"
UNNAMED: Final = "unnamed"

_Five: TypeAlias = tuple[int, int, int, int, int]
_Numbers: TypeAlias = tuple[_Five, int, list[tuple[list[Frame], _Five]]]


class Site(NamedTuple):
    """What one line of code made."""

    where: str
    """``file:line function``: the innermost call that is neither in NumPy nor in ctxalloc."""
    at_peak_bytes: int
    """What of it was alive when the request had most."""
    escaped_bytes: int
    """What of it outlives the request."""
    total_bytes: int
    """All that it made."""
    arrays: int
    """How many arrays those were."""


class Sites:
    """What was seen of one request, or of several of one name together: then all numbers are sums."""

    __module__ = "ctxalloc.metrics"

    def __init__(self, name: str, requests: int, stacks: dict[tuple[Frame, ...], Sums]) -> None:
        self.name = name
        """The route's pattern or the request's name; ``unnamed`` and ``other`` as in ``metrics.snapshot()``."""
        self.requests = requests
        """How many requests were looked at."""
        self._stacks = stacks

    def largest(self, count: int = 5, /, *, escaped: bool = False) -> list[Site]:
        """The lines with most at the peak; with ``escaped``, those whose arrays outlive their request."""
        found: dict[str, list[int]] = {}
        for frames, sums in self._stacks.items():
            place = found.setdefault(place_of(list(frames)), [0, 0, 0, 0])
            numbers = (sums.at_peak_bytes, sums.live_bytes, sums.total_bytes, sums.arrays)
            place[:] = map(sum, zip(place, numbers, strict=True))
        sites = [Site(where, *numbers) for where, numbers in found.items()]
        if escaped:
            sites = [site for site in sites if site.escaped_bytes]
            return sorted(sites, key=lambda site: (-site.escaped_bytes, -site.total_bytes, site.where))[:count]
        return sorted(sites, key=lambda site: (-site.at_peak_bytes, -site.total_bytes, site.where))[:count]

    def written(self, format: Literal["html", "folded", "pb.gz"] = "html", /) -> bytes:  # noqa: A002 - what it is
        """All stacks: a page with a flame graph (``html``), folded stacks (``folded``) or pprof (``pb.gz``).

        ValueError: another format.
        """
        from ctxalloc import _flame  # noqa: PLC0415 - for those who ask

        if f".{format}" not in _flame.SUFFIXES:
            raise ValueError(f"Sites.written({format!r}): give 'html', 'folded' or 'pb.gz'")
        profile, shortened = Profile(), functools.cache(short_name)
        for frames, sums in self._stacks.items():
            profile.stacks.append(([(shortened(file), line, name) for file, line, name in frames], sums))
        profile.all = _sum_of(self._stacks.values())
        of = f"{self.requests} request" + ("s" if self.requests != 1 else "")
        return _flame.written_as(Path(f"sites.{format}"), profile, f"ctxalloc: {self.name}, {of} looked at")

    def __repr__(self) -> str:
        return f"<ctxalloc.metrics.Sites {self.name!r}: {self.requests} looked at, {len(self._stacks)} stacks>"


def _sum_of(all_sums: Iterable[Sums]) -> Sums:
    """All together, as if the peaks of all requests were at one moment."""
    total = (0, 0, 0, 0, 0)
    for sums in all_sums:
        total = _added(total, sums)
    live, _, at_peak, made, arrays = total
    return Sums(live, at_peak, at_peak, made, arrays)


def _added(one: _Five, other: _Five) -> Sums:
    return Sums(*(first + second for first, second in zip(one, other, strict=True)))


_OTHER_STACK: Final[tuple[Frame, ...]] = (("", 0, OTHER),)


class _Known:
    """The sums of a name."""

    def __init__(self) -> None:
        self.requests = 0
        self.stacks: dict[tuple[Frame, ...], Sums] = {}

    def add(self, stacks: Iterable[tuple[list[Frame], _Five]]) -> None:
        self.requests += 1
        for frames, numbers in stacks:
            stack = tuple(frames)
            before = self.stacks.get(stack)
            if before is None and len(self.stacks) >= MAX_STACKS:
                stack = _OTHER_STACK
                before = self.stacks.get(stack)
            self.stacks[stack] = Sums(*numbers) if before is None else _added(before, numbers)


_LOCK = threading.Lock()
_KNOWN: Final[dict[str, _Known]] = {}


def note(name: str | None, numbers: _Numbers) -> None:
    """Add what was seen of a request that has ended."""
    name = UNNAMED if name is None else name
    with _LOCK:
        known = _KNOWN.get(name)
        if known is None:
            if len(_KNOWN) >= MAX_NAMES:
                name = OTHER
            known = _KNOWN.setdefault(name, _Known())
        known.add(numbers[2])


def sites() -> dict[str, Sites]:
    """Which code made the arrays of peaks, and those that escaped, by name.

    Of this process's requests that a middleware with ``sites=`` has looked at.
    """
    with _LOCK:
        return {name: Sites(name, known.requests, dict(known.stacks)) for name, known in _KNOWN.items()}


sites.__module__ = "ctxalloc.metrics"


def sites_of(request: Request, name: str | None) -> Sites | None:
    """What was seen of one request; None where nobody looked."""
    numbers = request._sites()  # noqa: SLF001 - made for this
    if numbers is None:
        return None
    known = _Known()
    known.add(numbers[2])
    return Sites(UNNAMED if name is None else name, 1, known.stacks)


def _forget_the_parents() -> None:
    global _LOCK  # noqa: PLW0603 - its holder is not here
    _LOCK = threading.Lock()
    _KNOWN.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_the_parents)
