"""The pytest plugin, by pytest run anew: marks, the fixture, the report, pytest-xdist and pytest-asyncio."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import ctxalloc_pytest
import numpy as np
import pytest

import ctxalloc

pytestmark = pytest.mark.any_numpy
HEAD = "import asyncio, threading\nimport numpy as np\nimport pytest\nimport ctxalloc\nkept = []\n"


class Run:
    """One run of pytest with our plugin, and with no others than those named: to import all takes a second."""

    def __init__(
        self, folder: Path, tests: str, *options: str, settings: str = "", others: tuple[str, ...] = ()
    ) -> None:
        if "asyncio" not in settings:
            settings += "\naddopts = -p no:asyncio"  # of which there is one version that warns where it is not set up
        (folder / "pytest.ini").write_text(f"[pytest]\nfilterwarnings = error\n{settings}\n")
        (folder / "test_it.py").write_text(HEAD + tests)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *options]
        command += [word for plugin in ("ctxalloc_pytest", *others) for word in ("-p", plugin)]
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=300, check=False, env=environment
        )
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
    assert "1 array of 8000 bytes outlive the test, more than escaped=0" in run.text
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
        others=("pytest_asyncio.plugin",),
    )
    assert run.outcomes == {"test_within": "PASSED", "test_beyond": "FAILED"}, run.text
    assert "has no room for 9000000 more bytes" in run.text


REPORTED = """
@pytest.mark.parametrize("size", range(1, 9))
def test_of_a_size(size):
    np.zeros(size * 1_000_000, np.uint8)

@pytest.mark.parametrize("name", [0], ids=["a[::]" * 60])
def test_alone(name):
    np.zeros(6_000_000, np.uint8)
"""


@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_the_report_lists_the_largest_peaks(tmp_path: Path, options: tuple[str, ...]) -> None:
    if options:
        pytest.importorskip("xdist")
    run = Run(tmp_path, REPORTED, "--ctxalloc-report", *options, others=("xdist.plugin",) if options else ())
    assert run.code == 0, run.text
    report = run.text.partition("ctxalloc: the largest peaks of arrays")[2].partition("=== short test summary")[0]
    assert re.search(
        r"7.63 MiB peak +34.3 MiB total +0 escaped  test_it.py::test_of_a_size  \(8 cases, the largest \[8\]\)", report
    )
    assert re.search(r"5.72 MiB peak .* test_it.py::test_alone\[.{300}\]\n", report), report
    assert report.count("test_of_a_size") == 1, report
    assert report.index("test_of_a_size") < report.index("test_alone")
    assert "9 tests measured" in report


def test_marks_hold_for_classes_unittest_and_hypothesis(tmp_path: Path) -> None:
    tests = """
import unittest
from hypothesis import given, settings, strategies

limited = pytest.mark.ctxalloc(limit="1 MB")
once = settings(max_examples=3, database=None, deadline=None)
number = given(strategies.integers(1, 9))

@limited
class TestOfAClass:
    def setup_method(self):
        self.array = np.ones(1_000_000)

    def test_within(self):
        np.ones(1000)

    def test_beyond_in_a_class(self):
        np.ones(1_000_000)

    @pytest.mark.ctxalloc(limit="10 MB")
    def test_its_own_mark_wins(self):
        np.ones(1_000_000)

class TestUnit(unittest.TestCase):
    @limited
    def test_beyond_in_unittest(self):
        np.ones(1_000_000)

class TestAsyncUnit(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        self.array = np.ones(1_000_000)

    @limited
    async def test_beyond_in_async_unittest(self):
        np.ones(1_000_000)

    @limited
    async def test_within_async_unittest(self):
        np.ones(1000)

@limited
@number
@once
def test_beyond_in_hypothesis(n):
    np.ones(1_000_000)

@limited
@pytest.mark.asyncio
@number
@once
async def test_beyond_in_async_hypothesis(n):
    np.ones(1_000_000)

@limited
@pytest.mark.asyncio
@number
@once
async def test_within_async_hypothesis(n):
    np.ones(1000)

@pytest.mark.ctxalloc(limit=0)
def test_beyond_a_limit_of_nothing():
    np.ones(1000)
"""
    settings = "asyncio_mode = strict\nasyncio_default_fixture_loop_scope = function"
    run = Run(tmp_path, tests, settings=settings, others=("pytest_asyncio.plugin", "_hypothesis_pytestplugin"))
    assert len(run.outcomes) == 10
    for test, outcome in run.outcomes.items():
        assert outcome == ("FAILED" if "beyond" in test else "PASSED"), run.text
    assert run.text.count("BudgetExceeded: budget 'test_beyond") >= 6


def test_a_test_that_did_not_run_in_its_request_is_not_called_passed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import pytest\n@pytest.hookimpl(wrapper=True)\ndef pytest_pyfunc_call(pyfuncitem):\n"
        "    pyfuncitem.obj = lambda: None\n    return (yield)\n"
    )
    run = Run(tmp_path, "@pytest.mark.ctxalloc\ndef test_elsewhere(): ...\n")
    assert run.outcomes == {"test_elsewhere": "FAILED"}
    assert "nothing of the test ran in its request" in run.text


def test_a_wrong_value_of_a_mark_is_named(tmp_path: Path) -> None:
    marks = ["escaped=True", "escaped='2'", "escaped=-1", "frames='x'", "limit=-5", "limit=1.5", "total=True"]
    tests = [f"@pytest.mark.ctxalloc({mark})\ndef test_{at}(): ...\n" for at, mark in enumerate(marks)]
    run = Run(tmp_path, "".join(tests))
    for mark in marks:
        assert f"\nctxalloc: @pytest.mark.ctxalloc({mark}): give" in run.text
    assert set(run.outcomes.values()) == {"FAILED"}
    assert "__init__.py" not in run.text, "a frame of ours"


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

@pytest.mark.ctxalloc(limit="8 leagues")
def test_with_the_fixture(ctxalloc_request): ...

@pytest.mark.ctxalloc(total="8 hours")
def test_total(): ...
""",
    )
    assert set(run.outcomes.values()) == {"FAILED", "ERROR"}
    assert len(run.outcomes) == 5
    assert "limit='8 leagues'" in run.text
    assert "total='8 hours'" in run.text
    assert "__init__.py" not in run.text, "a frame of ours"
    assert "limit='8 parsecs'" in run.text
    assert "'limits' is no option; give limit, total, escaped, handler, frames, whole by keyword" in run.text
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
    assert (
        "the setting ctxalloc_limit = lots: 'lots' is no size"
        in Run(tmp_path, tests, settings="ctxalloc_limit = lots").text
    )


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


def test_garbage_is_collected_only_after_a_test_that_left_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr(ctxalloc_pytest, "gc", SimpleNamespace(collect=lambda: collected.append(1)))
    ctxalloc_pytest._in_request(lambda: float(np.ones(1000).sum()), ctxalloc.request())()
    assert collected == []
    kept = ctxalloc_pytest._in_request(lambda: np.ones(1000), ctxalloc.request())()
    assert collected == [1]
    del kept


def test_a_refusal_is_shown_by_the_test_and_not_by_pytests_own_frames(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        """
@pytest.mark.ctxalloc(limit="8 MB")
def test_beyond():
    np.zeros(9_000_000, np.uint8)

@pytest.mark.ctxalloc(limit="8 MB")
async def test_beyond_in_a_coroutine():
    np.zeros(9_000_000, np.uint8)

import unittest
@pytest.mark.ctxalloc(limit="8 MB")
class Test(unittest.TestCase):
    def test_beyond_in_a_class(self):
        np.zeros(9_000_000, np.uint8)
""",
        settings="asyncio_mode = auto\nasyncio_default_fixture_loop_scope = function",
        others=("pytest_asyncio.plugin",),
    )
    assert set(run.outcomes.values()) == {"FAILED"}, run.text
    assert len(run.outcomes) == 3 or "Test::test_beyond_in_a_class" in run.text
    assert run.text.count("BudgetExceeded: budget") >= 3
    for frame in ("ctxalloc_pytest", "pluggy", "_pytest/", "unittest/case.py", "entries are hidden"):
        assert frame not in run.text.partition("= FAILURES =")[2].partition("= short test summary")[0], run.text


SUITE = """
SIZES = {"peak": PEAK, "stays": 100_000, "total": TOTAL}
@pytest.mark.parametrize("name", SIZES)
def test_of(name):
    for _ in range(SIZES[name] // 1_000_000 if name == "total" else 1):
        np.zeros(1_000_000 if name == "total" else SIZES[name], np.uint8)
"""


def of_sizes(peak: int, total: int) -> str:
    return SUITE.replace("PEAK", str(peak)).replace("TOTAL", str(total))


def test_a_test_that_takes_more_than_its_baseline_fails(tmp_path: Path) -> None:
    compare = "--ctxalloc-compare=peaks.json"
    first = Run(tmp_path, of_sizes(5_000_000, 5_000_000), compare, "--ctxalloc-update")
    assert first.code == 0, first.text
    assert "the peaks of 3 tests are in" in first.text
    same = Run(tmp_path, of_sizes(5_100_000, 5_000_000), compare)
    assert same.code == 0, same.text
    assert "3 tests that passed take no more" in same.text
    grown = Run(tmp_path, of_sizes(9_000_000, 50_000_000), compare)
    assert_grown(grown)
    wide = Run(tmp_path, of_sizes(9_000_000, 5_000_000), compare, "--ctxalloc-tolerance=100%")
    assert wide.code == 0, wide.text
    # Only those that ran get new numbers.
    assert Run(tmp_path, of_sizes(9_000_000, 50_000_000), compare, "--ctxalloc-update", "-k", "peak").code == 0
    again = Run(tmp_path, of_sizes(9_000_000, 50_000_000), compare)
    assert "1 failed, 2 passed" in again.text


def assert_grown(run: Run) -> None:
    assert run.code == 1
    assert "in peaks.json: peak 4.77 MiB -> 8.58 MiB, total 4.77 MiB -> 8.58 MiB; if that is meant" in run.text
    assert "in peaks.json: total 4.77 MiB -> 47.7 MiB; if" in run.text
    assert "2 failed, 1 passed" in run.text


@pytest.mark.long
def test_xdists_processes_share_one_baseline(tmp_path: Path) -> None:
    def run(peak: int, total: int, *options: str) -> Run:
        suite = of_sizes(peak, total)
        return Run(tmp_path, suite, "-n", "2", "--ctxalloc-compare=peaks.json", *options, others=("xdist.plugin",))

    first = run(5_000_000, 5_000_000, "--ctxalloc-update")
    assert first.code == 0, first.text
    assert "the peaks of 3 tests are in" in first.text
    assert_grown(run(9_000_000, 50_000_000))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ctxalloc-compare=none.json",), "there is no such file; make it with --ctxalloc-update"),
        (("--ctxalloc-compare=pytest.ini",), "--ctxalloc-compare="),
        (("--ctxalloc-compare=list.json",), "it is no baseline; name another file"),
        (("--ctxalloc-update",), "--ctxalloc-update goes with --ctxalloc-compare FILE"),
        (("--ctxalloc-compare=x", "--ctxalloc-tolerance=much"), "give a part such as 10% or 0.1"),
    ],
)
def test_a_baseline_that_is_none_is_named(options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    run = Run(tmp_path, of_sizes(1, 1), *options)
    assert (run.code, said in run.text) == (4, True), run.text
