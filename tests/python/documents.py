"""Documents in Markdown as programs: their Python blocks are run in order, in one namespace.

A `text` block right behind one is what it prints. `python tests/python/documents.py README.md` runs one document;
`test_examples.py` runs them all.
"""

import contextlib
import io
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

FENCE = re.compile(r"^```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language, its text, the line its text starts in, and whether only space is before it."""

    language: str
    text: str
    line: int
    follows: bool


def blocks(document: str) -> list[Block]:
    """All fenced blocks of a document."""
    found = []
    end = 0
    for match in FENCE.finditer(document):
        follows = end > 0 and not document[end : match.start()].strip()
        line = document.count("\n", 0, match.start("text")) + 1
        found.append(Block(match["language"], match["text"], line, follows))
        end = match.end()
    return found


def said(source: str) -> str:
    """The lines that a program's docs say it prints: the indented block behind `prints::`."""
    match = re.search(r"prints::\n\n((?:    .*\n)+)", source)
    assert match, "the first lines of an example say what it prints, in an indented block behind `prints::`"
    return textwrap.dedent(match[1])


def run(path: Path) -> int:
    """Run a document's Python blocks in one namespace; say how many there were."""
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    printed: str | None = None
    for block in blocks(path.read_text()):
        if block.language == "python":
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                # Moved down to its own lines, so that a traceback points into the document.
                exec(compile("\n" * (block.line - 1) + block.text, path, "exec"), names)
            printed = output.getvalue()
            count += 1
            continue
        if block.language == "text" and block.follows and printed is not None:
            if printed != block.text:
                raise AssertionError(f"{path}:{block.line}: the document says\n{block.text}\nbut it prints\n{printed}")
            printed = None
    return count


if __name__ == "__main__":
    run(Path(sys.argv[1]))
