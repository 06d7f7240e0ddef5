"""What CI says at its end: scripts/test_totals.py and scripts/test_failures.py read the logs of its steps."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

SCRIPTS = Path(__file__).parents[2] / "scripts"

RUST = """
running 3 tests
..F
failures:

---- heap::counts stdout ----

thread 'heap::counts' (417) panicked at tests/rust/heap.rs:12:5:
assertion `left == right` failed: one block more
  left: 1
 right: 0
stack backtrace:
   0: panicked at nothing:

---- src/lib.rs - documents::readme (line 5) stdout ----

failures:
    heap::counts
    src/lib.rs - documents::readme (line 5)

test result: FAILED. 1 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s

error: 1 target failed:
    `--test heap`
"""
RACE = """
WARNING: ThreadSanitizer: data race (pid=1)
SUMMARY: ThreadSanitizer: data race src/sync.rs:9:1 in ctxalloc::sync::look
"""
PYTHON = """
tests/python/test_request.py .F                                            [100%]
=========================== short test summary info ============================
FAILED tests/python/test_request.py::test_limit - AssertionError: 1 != 2
========================= 1 failed, 1 passed in 0.10s ==========================
"""
GOOD = "\nrunning 2 tests\n..\ntest result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n"


def said(script: str, log: str, folder: Path) -> list[str]:
    path = folder / "log"
    path.write_text(log)
    run = subprocess.run([sys.executable, SCRIPTS / script, path], capture_output=True, text=True, check=True)
    return [line.strip() for line in run.stdout.splitlines()]


@pytest.mark.parametrize(
    ("log", "failed"),
    [
        (
            RUST,
            [
                "heap::counts: tests/rust/heap.rs:12:5: assertion `left == right` failed: one block more",
                "src/lib.rs - documents::readme (line 5)",
            ],
        ),
        (RACE, ["SUMMARY: ThreadSanitizer: data race src/sync.rs:9:1 in ctxalloc::sync::look"]),
        (PYTHON, ["FAILED tests/python/test_request.py::test_limit - AssertionError: 1 != 2"]),
        (GOOD, []),
    ],
    ids=["rust", "race", "python", "good"],
)
def test_what_failed_is_named_in_one_line_each(log: str, failed: list[str], tmp_path: Path) -> None:
    assert said("test_failures.py", GOOD + log + GOOD, tmp_path) == failed


def test_of_many_failures_the_first_are_named(tmp_path: Path) -> None:
    log = "".join(f"FAILED tests/python/test_{number}.py::test - {'x' * 1000}\n" for number in range(100))
    lines = said("test_failures.py", log, tmp_path)
    assert (len(lines), lines[-1]) == (6, "and 95 more")
    assert sum(map(len, lines)) < 700


def test_totals_add_up_the_closing_lines(tmp_path: Path) -> None:
    assert said("test_totals.py", RUST + PYTHON + GOOD, tmp_path) == ["4 passed, 3 failed, 1 skipped"]
