"""The pytest plugin, by pytest run anew: marks, the fixture, the report, pytest-xdist and pytest-asyncio."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

HEAD = "import asyncio, threading\nimport numpy as np\nimport pytest\nimport ctxalloc\nkept = []\n"


class Run:
    """One run of pytest."""

    def __init__(self, folder: Path, tests: str, *options: str, settings: str = "") -> None:
        if "asyncio" not in settings:
            settings += "\naddopts = -p no:asyncio"  # of which there is one version that warns where it is not set up
        (folder / "pytest.ini").write_text(f"[pytest]\nfilterwarnings = error\n{settings}\n")
        (folder / "test_it.py").write_text(HEAD + tests)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *options]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
        self.text = done.stdout + done.stderr
        self.code = done.returncode
        self.outcomes = {
            test: outcome for outcome, test in re.findall(r"^(PASSED|FAILED|ERROR) \S+::(\w+)", self.text, re.MULTILINE)
        }


def test_a_limit_fails_the_test_that_exceeds_it_and_shows_sites(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        """
@pytest.mark.ctxalloc(limit="8 MB")
def test_within():
    for _ in range(10):
        np.zeros(7_000_000, np.uint8)

@pytest.mark.ctxalloc(limit="8 MB")
def test_beyond():
    first = np.zeros(5_000_000, np.uint8)
    second = np.zeros(5_000_000, np.uint8)

@pytest.mark.ctxalloc(limit=8_000_000)
def test_in_a_thread():
    from concurrent.futures import ThreadPoolExecutor
    with ctxalloc.ThreadPoolExecutor(1) as pool:
        pool.submit(np.zeros, 9_000_000, np.uint8).result()
""",
    )
    assert run.outcomes == {"test_within": "PASSED", "test_beyond": "FAILED", "test_in_a_thread": "FAILED"}, run.text
    assert "has no room for 5000000 more bytes" in run.text
    assert "Arrays that were alive when the test failed: 1 live block" in run.text
    assert re.search(r"5000000 bytes in 1 block.*test_it\.py:14", run.text), run.text


def test_escapes_and_totals_are_checked(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        """
@pytest.mark.ctxalloc(escaped=0)
def test_leaves_nothing():
    cycle = [np.zeros(100_000)]
    cycle.append(cycle)

@pytest.mark.ctxalloc(escaped=0)
def test_leaves_one():
    kept.append(np.zeros(1000))

@pytest.mark.ctxalloc(escaped=1)
def test_may_leave_one():
    kept.append(np.zeros(1000))

@pytest.mark.ctxalloc(total="1 MB")
def test_total():
    for _ in range(3):
        np.zeros(500_000, np.uint8)
""",
    )
    assert run.outcomes == {
        "test_leaves_nothing": "PASSED",
        "test_leaves_one": "FAILED",
        "test_may_leave_one": "PASSED",
        "test_total": "FAILED",
    }, run.text
    assert "1 arrays of 8000 bytes outlive the test, more than escaped=0" in run.text
    assert "more than total='1 MB'" in run.text


def test_a_handler_and_the_fixture(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        """
@pytest.mark.ctxalloc(handler="system")
def test_handler():
    assert ctxalloc.handler_of(np.zeros(10)).name == "test_handler"

def test_fixture(ctxalloc_request):
    assert ctxalloc_request == ctxalloc.current_request()
    array = np.zeros(1000)
    assert ctxalloc_request.stats.live_bytes == 8000

@pytest.mark.parametrize("size", [10, 20])
class TestOfClasses:
    @pytest.mark.ctxalloc(limit="1 MB")
    def test_method(self, size, ctxalloc_request):
        array = np.zeros(size)
        assert ctxalloc_request.stats.peak_bytes == 8 * size

def test_without_either():
    assert ctxalloc.current_request() is None
""",
    )
    assert run.code == 0, run.text


def test_pytest_asyncio(tmp_path: Path) -> None:
    pytest.importorskip("pytest_asyncio")
    run = Run(
        tmp_path,
        """
@pytest.fixture
async def loaded():
    await asyncio.sleep(0)
    return 3

@pytest.mark.ctxalloc(limit="8 MB", escaped=0)
async def test_within(loaded, ctxalloc_request):
    await asyncio.sleep(0)
    await asyncio.gather(*(asyncio.to_thread(np.zeros, 1_000_000, np.uint8) for _ in range(loaded)))
    assert ctxalloc_request.stats.total_bytes == 3_000_000

@pytest.mark.ctxalloc(limit="8 MB")
async def test_beyond():
    await asyncio.create_task(asyncio.to_thread(np.zeros, 9_000_000, np.uint8))
""",
        settings="asyncio_mode = auto\nasyncio_default_fixture_loop_scope = function",
    )
    assert run.outcomes == {"test_within": "PASSED", "test_beyond": "FAILED"}, run.text
    assert "has no room for 9000000 more bytes" in run.text


REPORTED = """
@pytest.mark.parametrize("size", range(1, 9))
def test_of_a_size(size):
    np.zeros(size * 1_000_000, np.uint8)
"""


@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_the_report_lists_the_largest_peaks(tmp_path: Path, options: tuple[str, ...]) -> None:
    if options:
        pytest.importorskip("xdist")
    run = Run(tmp_path, REPORTED, "--ctxalloc-report", *options)
    assert run.code == 0, run.text
    report = run.text.partition("ctxalloc: the largest peaks of arrays")[2]
    assert re.findall(r"test_of_a_size\[(\d)\]", report)[:8] == list("87654321"), report
    assert "7.63 MiB peak" in report
    assert "8 tests measured" in report


def test_mistakes_are_named(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        """
@pytest.mark.ctxalloc(limit="8 parsecs")
def test_size(): ...

@pytest.mark.ctxalloc(limits=3)
def test_option(): ...

@pytest.mark.ctxalloc(handler="nope")
def test_handler(): ...
""",
    )
    assert "limit='8 parsecs'" in run.text
    assert "'limits' is no option; give limit, total, escaped, handler, frames by keyword" in run.text
    assert "handler='nope'): give one of" in run.text


def test_the_setting_is_the_limit_of_marks_without_one(tmp_path: Path) -> None:
    tests = """
@pytest.mark.ctxalloc
def test_marked():
    np.zeros(2_000_000, np.uint8)

def test_unmarked():
    np.zeros(2_000_000, np.uint8)
"""
    run = Run(tmp_path, tests, settings="ctxalloc_limit = 1 MB")
    assert run.outcomes == {"test_marked": "FAILED", "test_unmarked": "PASSED"}, run.text


def test_a_suite_that_does_not_use_it_imports_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\ndef test_nothing():\n    assert not {'ctxalloc', 'numpy'} & set(sys.modules)\n"
        "    assert 'ctxalloc_pytest' in sys.modules\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:asyncio"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
