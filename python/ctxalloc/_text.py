"""Sizes and tables as text, for the command line and the tests' reports."""

import importlib.util
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TextIO, TypedDict

say: Final = print
"""``print`` as it was before the program began, which may have put its own in its place."""

_UNITS: Final = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS.update({"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30})


def size_of(text: str) -> int:
    """The bytes that a text such as ``2GiB``, ``80 MB`` or ``4096`` says. ValueError: it says none."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is no size; give bytes, or a number with a unit: 4096, 80MB, 2GiB")
    size = int(float(found[1]) * _UNITS[found[2].lower()])
    if size >= 1 << 63:
        raise ValueError(f"{text!r} is more than any memory; give less than {1 << 63} bytes")
    return size


def size_text(size: float) -> str:
    """Bytes for people: three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def counted(count: int, what: str, plural: str = "s") -> str:
    """How many of something there are: ``1 array``, ``2 arrays``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}{plural}"


def tidy(number: float, digits: int = 0) -> float:
    """Rounded, and never ``-0.0``."""
    return round(number, digits) + 0.0


class Says(TypedDict):
    """What a parser's command does: a line in the list of all, and a sentence above its own options."""

    help: str
    description: str


def says(what: str) -> Says:
    """One sentence for both."""
    return {"help": what, "description": f"{what[0].upper()}{what[1:]}."}


def printable(text: str) -> str:
    """The text with escapes for what a terminal would obey: names are a program's own."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


_LONGEST: Final = 60


def shortened(text: str) -> str:
    """A name for a line or a column: printable, and cut in its middle where it is long."""
    first, last = printable(text[:_LONGEST]), printable(text[-_LONGEST:])
    if len(text) <= _LONGEST and len(first) <= _LONGEST:
        return first
    return f"{first[:38]}...{last[-19:]}"


_MAX_RICH: Final = 500
"""So many rows may be a table of ``rich``, which keeps each of them."""

_LEFT: Final = ("where", "value")
"""Heads of columns that are text; the first column is too."""


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], out: TextIO) -> None:
    """Prints a table: by ``rich`` where that is there and ``out`` is a terminal, else as plain text.

    In plain text it goes through the rows twice, and keeps none.
    """
    if not rows:
        return
    title = printable(title)
    if len(rows) <= _MAX_RICH and out.isatty() and importlib.util.find_spec("rich"):
        _rich_table(title, heads, rows, out)
        return
    widths = [len(head) for head in heads]
    for cells in _printable(rows):
        widths = [max(width, len(cell)) for width, cell in zip(widths, cells, strict=True)]
    say(f"\n{title}", file=out)
    for texts in itertools.chain([heads], _printable(rows)):
        cells = [
            cell.ljust(width) if column == 0 or heads[column] in _LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(texts, widths, strict=True))
        ]
        say(f"  {'  '.join(cells)}".rstrip(), file=out)


def _printable(rows: Iterable[Sequence[str]]) -> Iterator[list[str]]:
    return ([printable(cell) for cell in row] for row in rows)


def _rich_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], out: TextIO) -> None:
    import rich.console  # noqa: PLC0415 - only where it is there
    import rich.table  # noqa: PLC0415
    import rich.text  # noqa: PLC0415

    def plain(text: str) -> Any:
        return rich.text.Text(text)  # names may have brackets, which are markup in a str

    made: Any = rich.table.Table(title=plain(title), title_justify="left", box=None, pad_edge=False)
    for column, head in enumerate(heads):
        made.add_column(head, justify="left" if column == 0 or head in _LEFT else "right", overflow="fold")
    for row in _printable(rows):
        made.add_row(*map(plain, row))
    rich.console.Console(file=out).print(made)
