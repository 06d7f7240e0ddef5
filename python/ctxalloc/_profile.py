"""What a stretch of a program allocates, by site and by handler: ``ctxalloc run --report`` shows it.

Arrays, whatever handlers are selected; of whole requests (``request(whole=True)``) native memory and objects too.
"""

import functools
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple, TextIO, TypeAlias

import numpy as np

from ctxalloc import _native
from ctxalloc._text import counted, say, size_text, table

FRAMES = 8
"""How deep a site is looked for: NumPy's own Python functions are not one."""


Frame: TypeAlias = tuple[str, int, str]
"""The file, the line and the function of a call."""


OUTSIDE: Final[Frame] = ("", 0, "outside of Python")
"""Where no Python code ran, or nobody could look."""


class Sums(NamedTuple):
    """What one site, one handler or all of them allocated."""

    live_bytes: int
    peak_bytes: int
    at_peak_bytes: int
    total_bytes: int
    arrays: int


PARTS: Final = ("arrays", "native memory", "objects")
"""What a site may be of."""


class PartSite(NamedTuple):
    """What one line made of one kind."""

    where: str
    part: str
    """One of ``PARTS``."""
    sums: Sums


class Profile:
    """The result: filled at the end of ``profiled()``."""

    def __init__(self) -> None:
        self.all = Sums(0, 0, 0, 0, 0)
        self.refused = 0
        self.is_complete = True
        """False: the program set an event hook of its own meanwhile."""
        self.parts: dict[str, Sums] = {}
        """What of ``all`` was arrays, native memory and objects, if a whole request was selected; else nothing."""
        self.sites: list[PartSite] = []
        self.handlers: list[tuple[str, Sums]] = []
        self.stacks: list[tuple[list[Frame], Sums]] = []
        """The same sites by all calls that were looked at, the innermost first, without those that ran the program.
        Where there are parts, the outermost is the part."""

    def print_sums(self, out: TextIO) -> None:
        """What all of it took."""
        for part, sums in (self.parts or {"arrays": self.all}).items():
            block, refused = ("array", f", {self.refused} refused") if part == "arrays" else ("block", "")
            say(
                f"  {part}: {size_text(sums.peak_bytes)} at the peak, {size_text(sums.total_bytes)} in "
                f"{counted(sums.arrays, block)}, {size_text(sums.live_bytes)} alive at the end{refused}",
                file=out,
            )
        if self.parts:
            at_peak = ", ".join(f"{size_text(sums.at_peak_bytes)} of {part}" for part, sums in self.parts.items())
            say(f"  together: {size_text(self.all.peak_bytes)} at the peak: {at_peak}", file=out)
        if not self.is_complete:
            say("  incomplete: the program set an event hook of its own (set_event_hook)", file=out)

    def print_handlers(self, out: TextIO) -> None:
        """A table of the handlers."""
        rows = [
            [
                shown_handler(name),
                size_text(sums.peak_bytes),
                size_text(sums.total_bytes),
                str(sums.arrays),
                size_text(sums.live_bytes),
            ]
            for name, sums in sorted(self.handlers, key=lambda one: -one[1].peak_bytes)
        ]
        table("By handler", ["handler", "peak", "total", self._blocks(), "alive at the end"], rows, out)

    def _blocks(self) -> str:
        return "blocks" if self.parts else "arrays"

    def print_sites(self, out: TextIO, count: int) -> None:
        """A table of the largest sites."""
        largest = sorted(self.sites, key=lambda one: (-one.sums.at_peak_bytes, -one.sums.total_bytes))
        rows = [
            [
                size_text(sums.at_peak_bytes),
                size_text(sums.total_bytes),
                str(sums.arrays),
                size_text(sums.live_bytes),
                *([part] if self.parts else []),
                where,
            ]
            for where, part, sums in largest[:count]
        ]
        heads = ["at the peak", "total", self._blocks(), "alive at the end", *(["of"] if self.parts else []), "where"]
        table("Largest sites", heads, rows, out)
        rest = largest[count:]
        if rest:
            more = sum(one.sums.at_peak_bytes for one in rest)
            say(f"  and {len(rest)} more, {size_text(more)} at the peak: --sites shows them", file=out)


def shown_handler(name: str) -> str:
    """A handler's name in a table: as long as names of requests are, with Python's escapes in place of Rust's."""
    name = re.sub(r"\\u\{([0-9a-f]{1,6})\}", lambda one: chr(int(one[1], 16)), name)
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..."


MAX_NAME: Final = 128

_ONE = threading.Lock()
"""Held while a profile begins, runs and ends: there is one hook."""

_counts = False


def is_running() -> bool:
    """Whether a profile has begun, and counts what is made from now on."""
    return _counts


def forget() -> None:
    """In a child of fork, whose parent goes on with the profile that it has begun, or was beginning."""
    global _ONE, _counts  # noqa: PLW0603 - its holder is not here
    _counts = False
    with suppress(RuntimeError):  # it had not begun, or it had ended
        _native._profile_end()  # noqa: SLF001 - made for this
    _ONE = threading.Lock()


@contextmanager
def profiled(frames: int = FRAMES) -> Iterator[Profile]:
    """Profiles the block, whatever handlers it selects. RuntimeError: another profile has begun."""
    global _counts  # noqa: PLW0603 - whoever holds _ONE changes it
    result = Profile()
    if not _ONE.acquire(blocking=False):
        raise RuntimeError("a profile has begun already; end it first")
    before = None
    try:
        before = _native.set_event_hook(None)
        _native._profile_begin(frames)  # noqa: SLF001 - made for this
    except BaseException:
        _native.set_event_hook(before)
        _ONE.release()
        raise
    try:
        _counts = True
        yield result
    finally:
        _counts = False
        ended = _native._profile_end()  # noqa: SLF001
        sums, result.refused, sites, handlers, result.is_complete, parts, parts_of_sites = ended
        if result.is_complete and before is not None:
            _native.set_event_hook(before)
        _ONE.release()
        result.all = Sums(*sums)
        result.handlers = [(name, Sums(*numbers)) for name, numbers in handlers]
        if any(total for _, _, _, total, _ in parts[1:]):
            result.parts = {part: Sums(*numbers) for part, numbers in zip(PARTS, parts, strict=True)}
        by_place: dict[tuple[str, str], list[int]] = {}
        short = functools.cache(short_name)
        for (calls, numbers), at in zip(sites, parts_of_sites, strict=True):
            part = PARTS[at]
            place = by_place.setdefault((place_of(calls), part), [0, 0, 0, 0, 0])
            place[:] = map(sum, zip(place, numbers, strict=True))
            count = len(calls)
            while count and calls[count - 1][0].startswith(_RUNNING):
                count -= 1
            stack = [(short(file), line, name) for file, line, name in calls[:count]]
            if result.parts:
                stack = [*(stack or [OUTSIDE]), ("", 0, part)]
            result.stacks.append((stack, Sums(*numbers)))
        result.sites = [PartSite(where, part, Sums(*numbers)) for (where, part), numbers in by_place.items()]


_INNER: Final = ("<frozen", *(f"{folder}{os.sep}" for folder in [*np.__path__, str(Path(__file__).parent)]))
"""What is between a program and its arrays: NumPy, wherever it is installed, and this package."""

_RUNNING: Final = ("<frozen runpy", f"{Path(__file__).parent}{os.sep}")
"""What is around a program that ``ctxalloc run`` runs."""


def place_of(frames: list[Frame]) -> str:
    """The innermost call that is neither in NumPy itself nor here."""
    for file, line, function in frames:
        if not file.startswith(_INNER):
            return f"{short_name(file)}:{line} {function}"
    return f"{short_name(frames[0][0])}:{frames[0][1]} {frames[0][2]}" if frames else OUTSIDE[2]


def short_name(file: str) -> str:
    """The file's name below the longest folder that modules are imported from, or the current one."""
    for folder in sorted(_folders(), key=len, reverse=True):
        if file.startswith(f"{folder}{os.sep}"):
            return file[len(folder) + 1 :]
    return file


def _folders() -> list[str]:
    """Python skips what is no str in ``sys.path``; the current folder may have been removed."""
    try:
        current = os.getcwd()  # noqa: PTH109 - as a str
    except OSError:
        current = ""
    given: object = getattr(sys, "path", None)
    entries = given if isinstance(given, (list, tuple)) else ()
    return [folder for folder in [*entries, current] if isinstance(folder, str) and folder]
