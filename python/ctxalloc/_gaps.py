"""What of a recording cannot be read, for ``trace``, ``replay`` and ``recommend`` to tell."""

import sys
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from ctxalloc._text import counted, printable

RECORD_SOME: Final = (
    "it needs the program to begin some: by a middleware (ctxalloc.asgi, wsgi or django), or with ctxalloc.request(); "
    "if it does, record for longer, or with a smaller one_in"
)
"""What to do where a recording has no requests."""

BUT_THESE: Final = "but for those inside of others, and a program with others inside"
"""Which requests are no route's."""

Gaps: TypeAlias = Iterable[tuple[str, int, int, int, str]]
"""Each with its file, its offset and bytes there, in how many places these are, and the reason."""


def texts_of(gaps: Gaps) -> list[str]:
    """Each in a line."""
    return [printable(_text(*gap)) for gap in gaps]


def _text(file: str, offset: int, count: int, places: int, reason: str) -> str:
    if offset == 0:  # a recording's own first bytes can be read
        return f"{file} is passed over: {reason}"
    where = f"{file}: {counted(count, 'byte')} at offset {offset} cannot be read"
    if places > 1:
        return f"{where}, in {places} places of this and later files; what is between them is ({reason})"
    return f"{where}: {reason}; what follows is"


def nothing(path: object, what: str, gaps: Gaps) -> str:
    """Why a recording has nothing of it, with its first gap: that is where it may have been."""
    found = texts_of(gaps)
    if not found:
        return f"{path} has no {what}; {RECORD_SOME}"
    more = f", and in {counted(len(found) - 1, 'more place')}" if len(found) > 1 else ""
    return f"{path} has no {what} that can be read: {found[0]}{more}"


def as_json(gaps: Gaps) -> list[dict[str, Any]]:
    """The same for programs."""
    names = ("file", "offset", "bytes", "places", "reason")
    return [dict(zip(names, gap, strict=True)) for gap in gaps]


def warn(command: str, gaps: Gaps) -> None:
    """Tell them on standard error."""
    for text in texts_of(gaps):
        print(f"ctxalloc {command}: warning: {text}", file=sys.stderr)
