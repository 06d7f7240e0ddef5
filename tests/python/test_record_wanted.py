"""One recording of a process, however many adapters ask for it: it ends when the last one leaves."""

from pathlib import Path

import pytest
from subprocesses import says

import ctxalloc
from ctxalloc._recording import path_of, recording
from ctxalloc._trace import Trace

pytestmark = pytest.mark.any_numpy


def test_it_ends_when_the_last_one_leaves(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    first = recording(str(path))
    second = recording(str(path))
    with pytest.raises(OSError, match="records already"):
        recording(str(tmp_path / "another"))
    first.close()
    with pytest.raises(OSError, match="records already"):
        ctxalloc.record(path)
    second.close()
    second.close()
    assert not Trace(path).recording.is_cut_off
    with ctxalloc.record(tmp_path / "another"):
        pass


def test_who_records_until_the_end_is_not_stopped_by_those_who_leave(tmp_path: Path) -> None:
    program = """
import os, sys
import numpy, ctxalloc
from ctxalloc._recording import record_once, recording
os.chdir(sys.argv[1])
for turn in range(2):  # each run of a task asks again, wherever the program is then
    record_once("trace")
    os.chdir("/")
recording(f"{sys.argv[1]}/trace").close()
for _ in range(300):
    with ctxalloc.request(name="after", root=True):
        numpy.ones(1000)
"""
    assert says(program.replace("sys.argv[1]", repr(str(tmp_path)))) == ""
    assert [one.name for one in tmp_path.iterdir()] == ["trace"]
    assert Trace(tmp_path / "trace").recording.names == ["after"]


def test_what_is_no_path_is_said(tmp_path: Path) -> None:
    assert path_of(None, "here") is None
    assert path_of(tmp_path, "here") == str(tmp_path)
    with pytest.raises(TypeError, match=r"here: record=5 is no path; give one on each worker's machine, or None"):
        path_of(5, "here")
    with pytest.raises(TypeError, match=r"here: record=b'trace' is no path"):
        path_of(b"trace", "here")
