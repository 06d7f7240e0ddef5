"""Live progress on one line of a terminal; where there is none (CI, a file), a line every tenth of the way."""

import os
import sys
import time
from typing import TextIO

WIDTH = 28


class Progress:
    """``advance`` after each piece of work; ``close`` before anything else is printed."""

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self.label = label
        self.total = total
        self.stream = stream or sys.stderr
        self.done = 0
        self.failed = 0
        self._lively = self.stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._began = time.monotonic()
        self._drawn_tenth = -1
        self._drawn_at = 0.0

    def advance(self, *, failed: bool = False) -> None:
        """One more is done."""
        self.done += 1
        self.failed += failed
        now = time.monotonic()
        tenth = 10 * self.done // max(self.total, 1)
        if self._lively:
            if now - self._drawn_at >= 0.1 or self.done == self.total:
                self._drawn_at = now
                filled = WIDTH * self.done // max(self.total, 1)
                self.stream.write(f"\r{self.label} [{'#' * filled}{'.' * (WIDTH - filled)}] {self._numbers(now)}")
                self.stream.flush()
        elif tenth > self._drawn_tenth:
            self._drawn_tenth = tenth
            print(f"{self.label} {self._numbers(now)}", file=self.stream, flush=True)

    def close(self) -> None:
        """Leave the line."""
        if self._lively:
            print(file=self.stream, flush=True)

    def _numbers(self, now: float) -> str:
        rate = self.done / max(now - self._began, 1e-9)
        return f"{self.done:4}/{self.total} answered, {self.failed} failed, {rate:5.1f}/s"
