"""A suite's peaks in a file, and tests that take more than they did: ``--ctxalloc-compare FILE``.

A test is compared where it runs, so under pytest-xdist in its worker. The file is written by the controlling process,
with ``--ctxalloc-update``: tests that ran and passed get their numbers, all others keep theirs.
"""

import json
from pathlib import Path
from typing import Any, Final

import pytest

FORMAT: Final = "ctxalloc baseline"
NUMBERS: Final = ("peak_bytes", "total_bytes")
SLACK_BYTES: Final = 64 << 10
"""What is no growth, whatever the tolerance: caches and small arrays of libraries."""


class Baseline:
    """The numbers of a file, and those of this run."""

    def __init__(self, path: Path, tolerance: float, *, updates: bool) -> None:
        self.path = path
        self.updates = updates
        self._factor = 1 + tolerance
        self._found: dict[str, dict[str, int]] = {}
        self._before = self._read()

    def _read(self) -> dict[str, dict[str, int]]:
        try:
            found: Any = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if self.updates:
                return {}
            raise pytest.UsageError(
                f"--ctxalloc-compare={self.path}: there is no such file; make it with --ctxalloc-update"
            ) from None
        except (OSError, ValueError) as error:
            raise pytest.UsageError(f"--ctxalloc-compare={self.path}: {error}") from None
        tests = found.get("tests") if isinstance(found, dict) and found.get("format") == FORMAT else None
        if not isinstance(tests, dict) or not all(
            isinstance(test, dict) and all(isinstance(test.get(name), int) for name in NUMBERS)
            for test in tests.values()
        ):
            raise pytest.UsageError(f"--ctxalloc-compare={self.path}: it is no baseline; name another file")
        return tests

    def growth(self, test: str, numbers: dict[str, int]) -> str | None:
        """What a test takes more of than it may; None: nothing, or nothing is known of it."""
        from ctxalloc._text import size_text  # noqa: PLC0415 - not before a test is measured

        before = self._before.get(test)
        if before is None or self.updates:
            return None
        grown = [
            f"{name.removesuffix('_bytes')} {size_text(before[name])} -> {size_text(numbers[name])}"
            for name in NUMBERS
            if numbers[name] > before[name] * self._factor + SLACK_BYTES
        ]
        return ", ".join(grown) or None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the numbers of a test that passed."""
        if report.when == "call" and report.passed:
            given = {name: value for name, value in report.user_properties if isinstance(value, int)}
            numbers = {name: given.get(f"ctxalloc_{name}") for name in NUMBERS}
            known = {name: value for name, value in numbers.items() if value is not None}
            if len(known) == len(NUMBERS):
                self._found[report.nodeid] = known

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Writes the file, where that is asked for."""
        if self.updates and not hasattr(session.config, "workerinput"):
            tests = dict(sorted({**self._before, **self._found}.items()))
            text = json.dumps({"format": FORMAT, "version": 1, "tests": tests}, indent=1)
            part = self.path.with_name(f".{self.path.name}.part")
            part.write_text(text + "\n", encoding="utf-8")
            part.replace(self.path)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Says what was compared or written."""
        if self.updates:
            terminalreporter.line(f"ctxalloc: the peaks of {len(self._found)} tests are in {self.path}")
        else:
            known = sum(test in self._before for test in self._found)
            terminalreporter.line(
                f"ctxalloc: {known} tests that passed take no more than in {self.path}; "
                f"{len(self._found) - known} are not in it (--ctxalloc-update)"
            )


def tolerance_of(text: str) -> float:
    """``10%`` or ``0.1`` as 0.1. UsageError: it is neither."""
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e6:
        raise pytest.UsageError(f"--ctxalloc-tolerance={text}: give a part such as 10% or 0.1")
    return number
