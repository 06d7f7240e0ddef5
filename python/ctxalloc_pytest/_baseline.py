"""A suite's peaks in a file, and tests that take more than they did: ``--ctxalloc-compare FILE``.

A test is compared where it runs, so under pytest-xdist in its worker. The file is written by the controlling process,
with ``--ctxalloc-update``: tests that ran and passed get their numbers, all others keep theirs.
"""

import json
import os
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
        self._unwritten: str | None = None
        if updates and (not path.parent.is_dir() or not os.access(path.parent, os.W_OK)):
            raise pytest.UsageError(
                f"--ctxalloc-compare={path}: no file can be written there; name one in a folder that is there and yours"
            )

    def _read(self) -> dict[str, dict[str, int]]:
        try:
            if self.path.exists() and not self.path.is_file():  # a FIFO would be waited for
                raise pytest.UsageError(f"--ctxalloc-compare={self.path}: it is no file; name another one")
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
        """Writes the file, where that is asked for. Else a run that was to be compared, and was not, is not green."""
        if hasattr(session.config, "workerinput") or session.config.getoption("collectonly"):
            return
        if self.updates:
            tests = dict(sorted({**self._before, **self._found}.items()))
            text = json.dumps({"format": FORMAT, "version": 1, "tests": tests}, indent=1)
            from ctxalloc import _files  # noqa: PLC0415 - see above

            try:
                _files.write(self.path, f"{text}\n".encode())
            except OSError as error:
                self._unwritten = f"it was not written: {error.strerror}"
        if (self._unwritten or self._namesakes()) and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _known(self) -> int:
        return sum(test in self._before for test in self._found)

    def _namesakes(self) -> list[tuple[str, str]]:
        """Where none of the tests is in the file: those that are there under another folder, and their names there."""
        if self.updates or self._known():
            return []
        return [
            (here, there)
            for here in self._found
            for there in self._before
            if here.endswith(f"/{there}") or there.endswith(f"/{here}")
        ]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Says what was compared or written."""
        from ctxalloc._text import counted  # noqa: PLC0415 - see above

        say, count = terminalreporter.line, len(self._found)
        if terminalreporter.config.getoption("collectonly"):
            return
        if self.updates:
            if self._unwritten is not None:
                say(f"ctxalloc: ERROR: --ctxalloc-compare={self.path}: {self._unwritten}", red=True)
            else:
                say(f"ctxalloc: the peaks of {counted(count, 'test')} are in {self.path}")
            return
        known, namesakes = self._known(), self._namesakes()
        if namesakes:
            here, there = namesakes[0]
            say(
                f"ctxalloc: ERROR: nothing was compared: {self.path} has {there!r}, and here it is {here!r}; run "
                "pytest with the rootdir of then (--rootdir)",
                red=True,
            )
        elif count and not known:
            say(
                f"ctxalloc: WARNING: nothing was compared: none of {counted(count, 'test')} that passed is in "
                f"{self.path} (--ctxalloc-update)",
                yellow=True,
            )
        else:
            unknown = count - known
            say(
                f"ctxalloc: {counted(known, 'test')} that passed {'takes' if known == 1 else 'take'} no more than in "
                f"{self.path}; {unknown} {'is' if unknown == 1 else 'are'} not in it (--ctxalloc-update)"
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
