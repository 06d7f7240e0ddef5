"""The files of a recording: workers that rotate together, files that are removed, and children of ``fork``."""

import collections
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from subprocesses import run, says

import ctxalloc
from ctxalloc._command import main

pytestmark = [pytest.mark.once, pytest.mark.skipif(sys.platform == "win32", reason="has no fork")]

SERVES = """
import os, time, numpy, ctxalloc
def serve(name, count):
    for _ in range(count):
        with ctxalloc.request(name=name, root=True):
            numpy.ones(1000)
"""


def told(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What ``ctxalloc trace info --json`` says."""
    assert main(["trace", "info", "--json", str(path)]) == 0
    return dict(json.loads(capsys.readouterr().out))


def counts(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    return {one["name"]: one["ended"] for one in told(path, capsys)["requests"]}


def processes_of(path: Path) -> list[int]:
    """The numbers of the processes that begin in a file."""
    content, at, found = path.read_bytes(), 8, []
    while at < len(content):
        length = int.from_bytes(content[at : at + 4], "little")
        body = content[at + 12 : at + 12 + length]
        if body[0] == 0:
            pid, shift = 0, 0
            for byte in body[1:]:
                pid |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
            found.append(pid)
        at += 12 + length
    return found


ROTATE_TOGETHER = (
    SERVES
    + """
path, workers = os.environ["TRACE"], 4
pids = []
for number in range(workers):
    if (pid := os.fork()) == 0:
        recorder = ctxalloc.record(path, one_in=1, share=1.0, max_bytes=65536)
        until = time.monotonic() + 1
        while time.monotonic() < until:
            serve("GET /", 50)
        time.sleep(0.3)  # what waits is written
        os.kill(os.getpid(), 9)
    pids.append(pid)
for pid in pids:
    os.waitpid(pid, 0)
print(*pids)
"""
)


def test_workers_that_rotate_together_keep_their_files(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    pids = [int(pid) for pid in says(ROTATE_TOGETHER, TRACE=str(path)).split()]
    files = collections.defaultdict(set)
    for file in tmp_path.iterdir():
        assert file.stat().st_size <= 32768
        for pid in processes_of(file):
            files[pid].add(file.name.removesuffix(".old"))
    # One name each, so two files each, and 65536 bytes: and nobody's was put in the place of another one's.
    assert sorted(files) == sorted(pids)
    assert sorted(map(sorted, files.values())) == [["trace"], ["trace.1"], ["trace.2"], ["trace.3"]]


def test_a_file_that_is_removed_is_begun_anew_and_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    program = SERVES + (
        f"recorder = ctxalloc.record({str(path)!r}, one_in=1, share=1.0, max_bytes=1 << 20)\n"
        "serve('GET /first', 1000)\n"
        "for name in ('GET /second', 'GET /third'):\n"
        f"    os.rename({str(path)!r}, {str(tmp_path / 'kept')!r})\n"
        "    serve(name, 3000)\n"
        "serve('GET /first', 9000)\n"
        "recorder.stop()\n"
    )
    code, _out, err = run(program)
    assert code == 0, err
    assert err == f"ctxalloc: the recording's file {path} was removed or renamed; the recording begins it anew\n"
    found = counts(path, capsys)
    assert found["GET /third"] > 2000
    assert found["GET /first"] > 5000
    assert sorted(file.name for file in tmp_path.iterdir()) == ["kept", "trace", "trace.old"]
    found = told(path, capsys)
    assert not found["is_cut_off"]
    # Those of the file that was taken away, and of the ones that rotation replaced: 16000 were recorded.
    missing = found["missing_requests"]
    assert missing >= 1000
    assert missing + sum(one["requests"] for one in found["requests"]) == 16_000
    assert main(["trace", "info", str(path)]) == 0
    assert (
        f"\n  {missing} recorded requests missing: they began in a file that is there no more"
        in capsys.readouterr().out
    )


def test_a_file_that_is_emptied_is_begun_anew_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    program = SERVES + (
        f"with ctxalloc.record({str(path)!r}, one_in=1, share=1.0):\n"
        "    serve('GET /first', 3000)\n"
        f"    os.truncate({str(path)!r}, 0)\n"
        "    serve('GET /second', 3000)\n"
    )
    code, _out, err = run(program)
    assert (code, err) == (0, f"ctxalloc: the recording's file {path} was emptied; the recording begins it anew\n")
    found = told(path, capsys)
    assert (found["gaps"], found["is_cut_off"]) == ([], False)
    assert counts(path, capsys)["GET /second"] == 3000
    assert sum(one["requests"] for one in found["requests"]) + found["missing_requests"] == 6000


@pytest.mark.skipif(sys.platform != "linux", reason="is of RLIMIT_FSIZE")
@pytest.mark.parametrize("kind", ["rmm.csv", "perfetto", "pprof"])
def test_an_export_that_fails_leaves_nothing(kind: str, tmp_path: Path) -> None:
    program = SERVES + (
        "import random, resource, signal\n"
        "from ctxalloc._command import main\n"
        "path = os.environ['TRACE']\n"
        "with ctxalloc.record(path, one_in=1, share=1.0):\n"
        "    for _ in range(500): serve(random.randbytes(60).hex(), 1)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        f"print(main(['trace', 'export', path, '--to', {kind!r}]))\n"
    )
    code, out, err = run(program, TRACE=str(tmp_path / "trace"))
    assert (code, out) == (0, "2\n"), err
    assert err.endswith(": File too large\n")
    assert [file.name for file in tmp_path.iterdir()] == ["trace"]


@pytest.mark.parametrize("words", [["info"], *(["export", "--to", kind] for kind in ("rmm.csv", "perfetto", "pprof"))])
def test_a_file_that_is_changed_meanwhile_is_told(words: list[str], tmp_path: Path) -> None:
    program = SERVES + (
        "import pathlib, sys\n"
        "from ctxalloc import _command, _trace\n"
        "path = os.environ['TRACE']\n"
        "with ctxalloc.record(path, one_in=1, share=1.0): serve('a', 1000)\n"
        "read, parts = _trace.Trace.info, _trace.Trace.parts\n"
        "def changed(self, *to):\n"
        "    pathlib.Path(path).write_bytes(b'')\n"
        "    return parts(self, *to) if to else read(self)\n"
        "_trace.Trace.info = _trace.Trace.parts = changed\n"
        f"sys.exit(_command.main(['trace', *{words!r}, path]))\n"
    )
    code, out, err = run(program, TRACE=str(tmp_path / "trace"))
    assert (code, out) == (2, "")
    assert "it was changed while it was read" in err
    assert [file.name for file in tmp_path.iterdir()] == ["trace"]


@pytest.mark.parametrize("words", [["info"], ["export", "--to", "pprof"]])
def test_an_interrupt_of_trace_is_no_traceback(words: list[str], tmp_path: Path) -> None:
    program = SERVES + (
        "import signal, sys\n"
        "from ctxalloc import _command, _trace\n"
        "path = os.environ['TRACE']\n"
        "with ctxalloc.record(path, one_in=1): serve('a', 1)\n"
        "def interrupted(self, *to):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return ()\n"
        "_trace.Trace.info = _trace.Trace.parts = interrupted\n"
        f"sys.exit(_command.main(['trace', *{words!r}, path]))\n"
    )
    code, out, err = run(program, TRACE=str(tmp_path / "trace"))
    assert (code, out, err) == (130, "", "")


def test_a_symbolic_link_is_named_as_what_it_is(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "trace")
    with pytest.raises(OSError, match="this is a symbolic link; give the file that it leads to"):
        ctxalloc.record(link)


ENDS_IN_A_CHILD = (
    SERVES
    + """
def child(work):
    if (pid := os.fork()) == 0:
        work()
        os._exit(0)
    os.waitpid(pid, 0)
path = os.environ["TRACE"]
def stops():
    serve('child', 3)
    recorder.stop()
    serve('after', 3)
    recorder.stop()
def leaves():
    with recorder:
        serve('child', 3)
    serve('after', 3)
def stops_at_once():
    recorder.stop()
    serve('after', 3)
def begins_anew():
    recorder.stop()
    with ctxalloc.record(path, one_in=1, share=1.0):
        serve('anew', 3)
    serve('after', 3)
def has_a_child():
    serve('child', 3)
    child(stops)
    serve('child', 3)
    recorder.stop()
with ctxalloc.record(path, one_in=1, share=1.0) as recorder:
    serve('parent', 3)
    child(globals()[os.environ["HOW"]])
    serve('parent', 3)
"""
)


@pytest.mark.parametrize(
    ("how", "expected", "processes"),
    [
        ("stops", {"child": 3}, 2),
        ("leaves", {"child": 3}, 2),
        ("stops_at_once", {}, 1),
        ("begins_anew", {"anew": 3}, 2),
        ("has_a_child", {"child": 9}, 3),
    ],
)
def test_a_child_of_fork_ends_its_own_recording(
    how: str, expected: dict[str, int], processes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    assert says(ENDS_IN_A_CHILD, TRACE=str(path), HOW=how) == ""
    assert counts(path, capsys) == {"parent": 6, **expected}
    found = told(path, capsys)
    assert (found["processes"], found["is_cut_off"]) == (processes, False)
    assert len(list(tmp_path.iterdir())) <= processes
