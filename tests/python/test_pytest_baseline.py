"""``--ctxalloc-compare`` where it cannot do what is asked, and fixtures that a test asks for while it runs."""

import json
import os
import re
import stat
from pathlib import Path

import pytest
from test_pytest_plugin import Run

pytestmark = [pytest.mark.any_numpy, pytest.mark.once]
SIZED = "def test_it(): np.zeros(SIZE, np.uint8)\n"


def sized(size: int) -> str:
    return SIZED.replace("SIZE", str(size))


@pytest.mark.parametrize("folder", ["/no/such/folder", "test_it.py"])
def test_a_baseline_that_cannot_be_written_is_an_error_at_once(folder: str, tmp_path: Path) -> None:
    run = Run(tmp_path, sized(1), f"--ctxalloc-compare={folder}/x.json", "--ctxalloc-update")
    assert run.code == 4, run.text
    assert re.search("no file can be written there|Not a directory", run.text)
    assert "passed" not in run.text


def test_a_baseline_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "way")
    run = Run(tmp_path, sized(1), "--ctxalloc-compare=way", "--ctxalloc-update")
    assert (run.code, "it is no file; name another one" in run.text) == (4, True), run.text
    assert stat.S_ISFIFO((tmp_path / "way").stat().st_mode)


def test_a_baseline_that_is_not_written_in_the_end_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    gone = "import os\ndef test_fails(): assert 0\ndef test_gone(): os.rmdir('folder')\n"
    for tests, code in ((gone, 1), (gone.replace("assert 0", "pass"), 1)):
        (tmp_path / "folder").mkdir(exist_ok=True)
        run = Run(tmp_path, tests, "--ctxalloc-compare=folder/x.json", "--ctxalloc-update")
        assert run.code == code
        assert "it was not written: No such file or directory" in run.text, run.text
        assert "Traceback" not in run.text
        assert "short test summary info" in run.text


def test_a_link_to_a_baseline_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("peaks.json")
    assert Run(tmp_path, sized(1_000_000), "--ctxalloc-compare=link.json", "--ctxalloc-update").code == 0
    assert (tmp_path / "link.json").is_symlink()
    assert len(json.loads((tmp_path / "peaks.json").read_text())["tests"]) == 1


def test_the_tolerance_and_64_kib_are_added(tmp_path: Path) -> None:
    tests = {"test_it.py::test_it": {"peak_bytes": 100_000, "total_bytes": 100_000}}
    (tmp_path / "x.json").write_text(json.dumps({"format": "ctxalloc baseline", "version": 1, "tests": tests}))
    assert Run(tmp_path, sized(175_536), "--ctxalloc-compare=x.json").code == 0
    assert Run(tmp_path, sized(175_537), "--ctxalloc-compare=x.json").code == 1


def test_a_run_that_compares_nothing_is_not_green(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    compare = "--ctxalloc-compare=inner/peaks.json"
    made = Run(inner, sized(1), "--ctxalloc-compare=peaks.json", "--ctxalloc-update")
    assert "the peaks of 1 test are in" in made.text
    (inner / "pytest.ini").unlink()
    run = Run(tmp_path, "", compare, "inner/test_it.py")
    assert run.code == 1
    assert "has 'test_it.py::test_it', and here it is 'inner/test_it.py::test_it'; run pytest with" in run.text
    new = Run(tmp_path, sized(1).replace("test_it", "test_new"), compare, "test_it.py")
    assert new.code == 0
    assert "WARNING: nothing was compared: none of 1 test that passed is in" in new.text


def test_collecting_alone_writes_no_baseline(tmp_path: Path) -> None:
    run = Run(tmp_path, sized(1), "--collect-only", "--ctxalloc-compare=x.json", "--ctxalloc-update")
    assert run.code == 0, run.text
    assert not (tmp_path / "x.json").exists()


def test_a_fixture_that_is_asked_for_late_is_not_the_tests_work(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        """
import ctxalloc
@pytest.fixture
def big():
    yield np.ones(3_000_000, np.uint8)
    assert ctxalloc.current().name == "default_allocator"
@pytest.mark.ctxalloc(escaped=0, limit="1 MB")
def test_lazy(request, ctxalloc_request):
    np.empty(10_000)
    assert len(request.getfixturevalue("big")) == 3_000_000
    assert ctxalloc.current_request() == ctxalloc_request
    assert ctxalloc_request.stats.peak_bytes == 80_000
    assert ctxalloc.handler_of(request.getfixturevalue("big")).name == "default_allocator"
""",
    )
    assert run.code == 0, run.text
