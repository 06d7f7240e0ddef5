"""Standard error as it was when a program began, for what is said after it: the program may replace ``sys.stderr``."""

import io
import sys
from typing import Final, TextIO

from ctxalloc import _files

_NUMBER: Final = 2


class StandardError:
    """Where it leads at its creation."""

    def __init__(self) -> None:
        self._stream: TextIO | None = sys.stderr
        self._identity: tuple[int, int] | None = None
        try:
            if self._stream is not None and self._stream.fileno() == _NUMBER:
                self._identity = _files.identity_of(_NUMBER)
        except (OSError, ValueError):  # it is no file
            pass

    def open(self) -> TextIO | None:
        """A stream that leads there; None where nobody can be told anything.

        Where the program has closed or redirected the descriptor itself, that is its ``sys.stderr``.
        """
        if self._identity is not None and _files.identity_of(_NUMBER) == self._identity:
            _files.flush_printed()
            raw = io.BufferedWriter(io.FileIO(_NUMBER, "wb", closefd=False))
            encoding = self._stream.encoding if self._stream is not None else "utf-8"
            return io.TextIOWrapper(raw, encoding, "backslashreplace", line_buffering=True)
        stream = sys.stderr if self._identity is not None else self._stream
        return None if stream is None or stream.closed else stream
