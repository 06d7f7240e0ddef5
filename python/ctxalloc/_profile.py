"""What a stretch of a program allocates, by site and by handler: ``ctxalloc run --report`` shows it."""

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
from ctxalloc._text import counted, size_text, table

FRAMES = 8
"""How deep a site is looked for: NumPy's own Python functions are not one."""


Frame: TypeAlias = tuple[str, int, str]
"""The file, the line and the function of a call."""


class Sums(NamedTuple):
    """What one site, one handler or all of them allocated."""

    live_bytes: int
    peak_bytes: int
    at_peak_bytes: int
    total_bytes: int
    arrays: int


class Profile:
    """The result: filled at the end of ``profiled()``."""

    def __init__(self) -> None:
        self.all = Sums(0, 0, 0, 0, 0)
        self.refused = 0
        self.is_complete = True
        """False: the program set an event hook of its own meanwhile."""
        self.sites: list[tuple[str, Sums]] = []
        self.handlers: list[tuple[str, Sums]] = []
        self.stacks: list[tuple[list[Frame], Sums]] = []
        """The same sites by all calls that were looked at, the innermost first, without those that ran the program."""

    def print_sums(self, out: TextIO) -> None:
        """What all of it took."""
        sums = self.all
        print(
            f"  arrays: {size_text(sums.peak_bytes)} at the peak, {size_text(sums.total_bytes)} in "
            f"{counted(sums.arrays, 'array')}, {size_text(sums.live_bytes)} alive at the end, {self.refused} refused",
            file=out,
        )
        if not self.is_complete:
            print("  incomplete: the program set an event hook of its own (set_event_hook)", file=out)

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
        table("By handler", ["handler", "peak", "total", "arrays", "alive at the end"], rows, out)

    def print_sites(self, out: TextIO, count: int) -> None:
        """A table of the largest sites."""
        largest = sorted(self.sites, key=lambda one: (-one[1].at_peak_bytes, -one[1].total_bytes))
        rows = [
            [
                size_text(sums.at_peak_bytes),
                size_text(sums.total_bytes),
                str(sums.arrays),
                size_text(sums.live_bytes),
                where,
            ]
            for where, sums in largest[:count]
        ]
        table("Largest sites", ["at the peak", "total", "arrays", "alive at the end", "where"], rows, out)
        rest = largest[count:]
        if rest:
            more = sum(sums.at_peak_bytes for _, sums in rest)
            print(f"  and {len(rest)} more, {size_text(more)} at the peak: --sites shows them", file=out)


def shown_handler(name: str) -> str:
    """A handler's name in a table: as long as names of requests are, with Python's escapes in place of Rust's."""
    name = re.sub(r"\\u\{([0-9a-f]{1,6})\}", lambda one: chr(int(one[1], 16)), name)
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..."


MAX_NAME: Final = 128

_ONE = threading.Lock()
"""Held while a profile runs: there is one hook."""


def is_running() -> bool:
    """Whether a profile has begun."""
    return _ONE.locked()


def forget() -> None:
    """In a child of fork, whose parent goes on with the profile."""
    global _ONE  # noqa: PLW0603 - its holder is not here
    with suppress(RuntimeError):  # it had not begun, or it had ended
        _native._profile_end()  # noqa: SLF001 - made for this
    _ONE = threading.Lock()


@contextmanager
def profiled(frames: int = FRAMES) -> Iterator[Profile]:
    """Profiles the block, whatever handlers it selects. RuntimeError: another profile has begun."""
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
        yield result
    finally:
        sums, result.refused, sites, handlers, result.is_complete = _native._profile_end()  # noqa: SLF001
        if result.is_complete and before is not None:
            _native.set_event_hook(before)
        _ONE.release()
        result.all = Sums(*sums)
        result.handlers = [(name, Sums(*numbers)) for name, numbers in handlers]
        by_place: dict[str, list[int]] = {}
        short = functools.cache(short_name)
        for calls, numbers in sites:
            place = by_place.setdefault(place_of(calls), [0, 0, 0, 0, 0])
            place[:] = map(sum, zip(place, numbers, strict=True))
            count = len(calls)
            while count and calls[count - 1][0].startswith(_RUNNING):
                count -= 1
            result.stacks.append(([(short(file), line, name) for file, line, name in calls[:count]], Sums(*numbers)))
        result.sites = [(where, Sums(*numbers)) for where, numbers in by_place.items()]


_INNER: Final = ("<frozen", *(f"{folder}{os.sep}" for folder in [*np.__path__, str(Path(__file__).parent)]))
"""What is between a program and its arrays: NumPy, wherever it is installed, and this package."""

_RUNNING: Final = ("<frozen runpy", f"{Path(__file__).parent}{os.sep}")
"""What is around a program that ``ctxalloc run`` runs."""


def place_of(frames: list[Frame]) -> str:
    """The innermost call that is neither in NumPy itself nor here."""
    for file, line, function in frames:
        if not file.startswith(_INNER):
            return f"{short_name(file)}:{line} {function}"
    return f"{short_name(frames[0][0])}:{frames[0][1]} {frames[0][2]}" if frames else "outside of Python"


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
