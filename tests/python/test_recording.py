"""Recordings: what is recorded by the API, the environment, the command and the middlewares, and told and exported."""

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
from subprocesses import run, says

import ctxalloc
from ctxalloc._command import main
from ctxalloc._native import _Recording

pytestmark = pytest.mark.any_numpy

SERVES = """
import numpy, ctxalloc
def serve(name, count):
    for _ in range(count):
        with ctxalloc.request(name=name, root=True):
            numpy.ones(1000)
"""

# In a process of its own: the metrics of one have room for 128 names.
TAKES_ALL_NAMES = """
import os, numpy, ctxalloc
with ctxalloc.record(os.environ["TRACE"], one_in=1, share=1.0, max_bytes=65536):
    for turn in range(2000):
        with ctxalloc.request(name=f"{turn % 600:04} {'x' * 239}", root=True):
            numpy.empty(1000)
"""


def told(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What ``ctxalloc trace info --json`` says."""
    assert main(["trace", "info", "--json", str(path)]) == 0
    return dict(json.loads(capsys.readouterr().out))


def by_name(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in told(path, capsys)["requests"]}


def test_a_recording_has_what_the_accounts_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    with ctxalloc.record(path, one_in=1, share=1.0):
        with ctxalloc.request(name="GET /a", limit_bytes=10_000_000) as outer:
            kept = np.zeros(1000)
            with ctxalloc.request(name="inner") as inner:
                array = np.empty(50_000)
                array.resize(80_000, refcheck=False)
            with pytest.raises(MemoryError):
                np.empty(20_000_000)
        stats, within = outer.stats, inner.stats
        with ctxalloc.request(name="the thread goes on"):
            del array
    found = by_name(path, capsys)
    of_a, of_inner = found["GET /a"], found["inner"]
    assert of_a["peak_bytes"]["max"] == stats.peak_bytes
    assert of_a["total_bytes"] + of_inner["total_bytes"] == stats.total_bytes
    assert of_inner["total_bytes"] == within.total_bytes
    assert of_inner["resizes"] == 1
    assert of_a["refused"] == stats.refused == 1
    assert of_a["zeroed_blocks"] == 1
    assert of_a["escaped_bytes"] == stats.live_bytes
    del kept


def test_who_was_refused_is_told_as_by_stats_and_as_by_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    before = {name: one.refused_allocations for name, one in ctxalloc.metrics.snapshot().series.items()}
    with ctxalloc.record(path, one_in=1, share=1.0), ctxalloc.request(name="limits", limit_bytes=1000) as limits:
        with ctxalloc.request(name="asks") as asks, pytest.raises(MemoryError):
            np.ones(100_000)
        kept = np.ones(10)
        stats = limits.stats, asks.stats
    found = by_name(path, capsys)
    assert {name: one["refused"] for name, one in found.items()} == {"limits": 1, "asks": 0}
    assert [one.refused for one in stats] == [1, 0]
    told = {name: one["refused_allocations"] for name, one in found.items()}
    counted = ctxalloc.metrics.snapshot().series
    assert told == {name: counted[name].refused_allocations - before.get(name, 0) for name in told}
    assert told == {"limits": 0, "asks": 1}
    recording = _Recording(path)
    ends = [numbers[4] for *_, kind, numbers in recording.events(0, 100) if kind == "end"]
    assert ends == [1, 0], "of the inner one, which ends first"
    # What an account says, and what a request made itself.
    assert found["limits"]["escaped_bytes"] == kept.nbytes
    assert main(["trace", "info", str(path)]) == 0
    assert "peak and escaped: with what requests inside made" in capsys.readouterr().out


def test_names_that_have_no_room_are_one_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    says(TAKES_ALL_NAMES, TRACE=str(path))
    assert sum(one.stat().st_size for one in tmp_path.iterdir()) <= 65536
    found = told(path, capsys)
    others = next(one["requests"] for one in found["requests"] if one["name"] == "(other)")
    assert 100 < others == found["other_requests"]
    assert main(["trace", "info", str(path)]) == 0
    assert f"{others} requests called (other), or with a handler that is: names take" in capsys.readouterr().out
    few = tmp_path / "few"
    with ctxalloc.record(few, one_in=1), ctxalloc.request(name="(other)"):
        np.empty(1000)
    assert told(few, capsys)["other_requests"] == 0, "a request of that name"
    assert main(["trace", "info", str(few)]) == 0
    assert "names take" not in capsys.readouterr().out


def test_arguments_are_checked(tmp_path: Path) -> None:
    wrong: list[tuple[str, Any]] = [("one_in", 0), ("one_in", -1), ("one_in", 1 << 40), ("one_in", 1 << 100)]
    wrong += [("share", 0), ("share", 2), ("max_bytes", 5), ("max_bytes", -5), ("max_bytes", 1 << 100)]
    for option, value in wrong:
        with pytest.raises(ValueError, match=f"{option}={value}"):
            ctxalloc.record(tmp_path / "trace", **{option: value})
    for option, most in (("one_in", 4294967295), ("max_bytes", 18446744073709551615)):
        with pytest.raises(ValueError, match=f"{option}={most + 1}.: give an int from .* to {most}"):
            ctxalloc.record(tmp_path / "trace", **{option: most + 1})
    with pytest.raises(TypeError, match=r"this is a path of bytes; give os\.fsdecode"):
        ctxalloc.record(bytes(tmp_path / "trace"))  # type: ignore[arg-type]
    for option, what in (("one_in", "many"), ("one_in", True), ("share", "all"), ("max_bytes", 1e6)):
        with pytest.raises(TypeError, match=f"{option}={what!r}"):
            ctxalloc.record(tmp_path / "trace", **{option: what})
    with ctxalloc.record(tmp_path / "trace") as recorder:
        with pytest.raises(OSError, match="records already"):
            ctxalloc.record(tmp_path / "other")
        recorder.stop()
    with pytest.raises(OSError, match="No such file or directory"):
        ctxalloc.record(tmp_path / "no" / "folder")
    (tmp_path / "text").write_text("something else")
    with pytest.raises(OSError, match="no recording of this version"):
        ctxalloc.record(tmp_path / "text")
    with pytest.raises(ValueError, match="at byte 0: this is no recording"):
        _Recording(tmp_path / "text")


@pytest.mark.once
def test_the_environment_records_workers_and_their_children(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    program = SERVES + (
        "import os, sys\n"
        "os.chdir('/')\n"
        "serve('parent', 5)\n"
        "child = os.fork()\n"
        "serve('both', 7)\n"
        "if child: os.waitpid(child, 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "CTXALLOC_RECORD": "trace", "CTXALLOC_RECORD_ONE_IN": "1"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b""), done
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace", "trace.1"]
    found = told(path, capsys)
    assert (found["processes"], found["is_cut_off"]) == (2, False)
    counts = {one["name"]: (one["requests"], one["ended"]) for one in found["requests"]}
    assert counts == {"parent": (5, 5), "both": (14, 14)}


@pytest.mark.once
def test_what_was_flushed_is_there_after_a_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    program = SERVES + (
        "import os, signal, sys, time\n"
        f"recorder = ctxalloc.record({str(path)!r}, one_in=1, share=1.0)\n"
        "begun = time.monotonic()\n"
        "while time.monotonic() < begun + 0.5: serve('GET /', 100)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert run(program).code == -signal.SIGKILL
    found = told(path, capsys)
    assert found["is_cut_off"]
    assert found["requests"][0]["ended"] >= 100
    assert main(["trace", "info", str(path)]) == 0
    assert "its end is missing" in capsys.readouterr().out


@pytest.mark.once
def test_a_disk_that_is_full_ends_the_recording_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    program = SERVES + (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"
        "try:\n"
        f"    with ctxalloc.record({str(path)!r}, one_in=1, share=1.0):\n"
        "        serve('GET /', 20_000)\n"
        "        raise KeyError('the body')\n"
        "except KeyError as error: print(error)\n"
        f"recorder = ctxalloc.record({str(tmp_path / 'again')!r}, one_in=1, share=1.0)\n"
        "serve('GET /', 20_000)\n"
        "recorder.stop()\n"
    )
    code, out, err = run(program)
    assert (code, out) == (0, "'the body'\n"), err
    assert err.count("cannot be written: File too large") == err.count("\n") == 2
    assert "nothing is recorded" not in err
    assert found_whole(told(path, capsys))


@pytest.mark.once
def test_a_descriptor_that_is_another_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, own = tmp_path / "trace", tmp_path / "own"
    program = SERVES + (
        "import os\n"
        f"recorder = ctxalloc.record({str(path)!r}, one_in=1, share=1.0)\n"
        "serve('GET /', 5000)\n"
        "os.closerange(3, 256)\n"
        f"files = [os.open({str(own)!r}, os.O_CREAT | os.O_RDWR | os.O_APPEND) for _ in range(20)]\n"
        "serve('GET /', 20_000)\n"
        "recorder.stop()\n"
        "for file in files: os.fstat(file)\n"
    )
    code, _out, err = run(program)
    assert code == 0, err
    assert own.read_bytes() == b""
    assert err.count("cannot be written: the program closed its descriptor") == err.count("\n") == 1
    assert found_whole(told(path, capsys))


RESTS = (
    SERVES
    + """
import os, sys
recorder = ctxalloc.record(sys.argv[1], one_in=1, share=1.0)
serve('GET /', 50)
if len(sys.argv) > 2 and os.fork() == 0:
    serve('GET /child', 50)
    os.set_blocking(0, True)
print('served', flush=True)
sys.stdin.read()
"""
)


@pytest.mark.once
@pytest.mark.skipif(sys.platform == "win32", reason="only events write there")
@pytest.mark.parametrize("kinds", [[], ["fork"]])
def test_a_process_that_rests_has_written_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kinds: list[str]
) -> None:
    path = tmp_path / "trace"
    command = [sys.executable, "-c", RESTS, str(path), *kinds]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        served = [process.stdout.readline() for _ in range(1 + len(kinds))]
        assert set(served) == {"served\n"}
        expected = {"GET /": 50, **({"GET /child": 50} if kinds else {})}
        ended: dict[str, int] = {}
        until = time.monotonic() + 30
        while ended != expected and time.monotonic() < until:
            time.sleep(0.1)
            ended = {one["name"]: one["ended"] for one in told(path, capsys)["requests"]}
        process.kill()
    assert ended == expected


@pytest.mark.once
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_recorder_with_nothing_to_write_sleeps(tmp_path: Path) -> None:
    program = SERVES + (
        "import pathlib, time\n"
        f"recorder = ctxalloc.record({str(tmp_path / 'trace')!r}, one_in=1, share=1.0)\n"
        "serve('GET /', 50)\n"
        "time.sleep(1.5)\n"
        "def woken():\n"
        "    said = [file.read_text() for file in pathlib.Path('/proc/self/task').glob('*/status')]\n"
        "    decay, = [text for text in said if 'ctxalloc-decay' in text]\n"
        "    return int(decay.split('voluntary_ctxt_switches:')[1].split()[0])\n"
        "before = woken()\n"
        "time.sleep(1.5)\n"
        "print(woken() - before)\n"
    )
    assert int(says(program)) <= 4


def test_what_the_step_that_ends_a_request_still_holds_has_not_escaped(tmp_path: Path) -> None:
    """As an ASGI application's own variables, while it sends the last body."""
    path, kept = tmp_path / "step.trace", []

    async def serve(number: int) -> None:
        async with ctxalloc.request(name="GET /"):
            array = np.ones(5000)
            if number % 4 == 0:
                kept.append(np.ones(100))
        assert array.nbytes == 40_000

    async def main() -> None:
        for number in range(20):
            await asyncio.gather(serve(number), asyncio.sleep(0))

    with ctxalloc.record(path, one_in=1, share=1.0):
        asyncio.run(main())
    found = json.loads(commands.ctxalloc("trace", "info", "--json", path).stdout)["requests"][0]
    assert (found["requests"], found["escaped_blocks"], found["escaped_bytes"]) == (20, 5, 4000)
    told = commands.ctxalloc("recommend", path, "--json", "--rounds", "1", "--strategy", "pool").stdout
    assert json.loads(told)["routes"][0]["escaped_blocks"] == 5


def test_a_recording_that_was_stopped_is_not_entered(tmp_path: Path) -> None:
    recorder = ctxalloc.record(tmp_path / "a.trace")
    recorder.stop()
    with pytest.raises(RuntimeError, match="was stopped"), recorder:
        pass


def test_what_did_not_run_leaves_no_recording(tmp_path: Path) -> None:
    path, program, before = tmp_path / "a.trace", tmp_path / "program.py", dict(os.environ)
    done = commands.ctxalloc("run", "--record", path, program)
    assert done.returncode == 2
    assert not path.exists()
    assert os.environ == before, "nor does anything that this process starts record"


def test_what_escaped_is_counted_in_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, kept = tmp_path / "trace", []
    with ctxalloc.record(path, one_in=1, share=1.0):
        for _ in range(4):
            with ctxalloc.request(name="outer"):
                kept.append(np.ones(1000))
                with ctxalloc.request(name="inner"):
                    kept += [np.ones(1000) for _ in range(4)]
                    np.ones(1000)
        with ctxalloc.request(name="the thread goes on"):
            kept.clear()
    found = by_name(path, capsys)
    assert (found["outer"]["escaped_blocks"], found["outer"]["escaped_bytes"]) == (20, 160_000)
    assert (found["inner"]["escaped_blocks"], found["inner"]["escaped_bytes"]) == (16, 128_000)


def found_whole(found: dict[str, Any]) -> bool:
    """What could be written is sound, and its end is missing."""
    return bool(found["is_cut_off"]) and found["requests"][0]["ended"] > 100


@pytest.mark.once
def test_run_records_the_program_and_its_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import numpy\nkept = numpy.ones(5000)\n{SERVES}\nserve('inside', 3)\n")
    path = tmp_path / "trace"
    command = [sys.executable, "-m", "ctxalloc", "run", "--record", str(path), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found = by_name(path, capsys)
    assert {name: one["requests"] for name, one in found.items()} == {"script.py": 1, "inside": 3}
    assert found["script.py"]["peak_bytes"]["max"] >= 40_000
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "it is there; remove it" in again.stderr


def test_middlewares_record_by_route(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = (
        "import ctxalloc, numpy\n"
        "from ctxalloc.wsgi import AllocatorMiddleware\n"
        "def app(environ, start):\n"
        "    numpy.ones(1000)\n"
        "    start('200 OK', [])\n"
        "    return [b'']\n"
        f"path = {str(tmp_path / 'trace')!r}\n"
        "routes = {'GET /items/{item}': ctxalloc.request()}\n"
        "served = AllocatorMiddleware(app, routes=routes, record=path)\n"
        "also = AllocatorMiddleware(app, record=path)\n"
        "for number in range(300):\n"
        "    environ = {'REQUEST_METHOD': 'GET', 'PATH_INFO': f'/items/{number}', 'SCRIPT_NAME': ''}\n"
        "    list(served(environ, lambda *_: None))\n"
    )
    assert says(program) == ""
    found = by_name(tmp_path / "trace", capsys)
    assert list(found) == ["GET /items/{item}"]
    assert 5 <= found["GET /items/{item}"]["requests"] <= 100


def test_exports_say_what_other_tools_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    with ctxalloc.record(path, one_in=1, share=1.0):
        for number in range(4):
            with ctxalloc.request(name=f"GET /{number % 2}"):
                array = np.empty(10_000)
                array.resize(20_000, refcheck=False)
                del array
    for kind in ("rmm.csv", "pprof", "perfetto"):
        assert main(["trace", "export", "--to", kind, str(path)]) == 0
    names = capsys.readouterr().out.split()
    csv, pprof, perfetto = [Path(name) for name in names]
    lines = csv.read_text().splitlines()
    assert lines[0] == "Thread,Time,Action,Pointer,Size,Stream"
    live: dict[str, str] = {}
    for line in lines[1:]:
        _thread, _time, action, pointer, size, _stream = line.split(",")
        if action == "allocate":
            assert pointer not in live
            live[pointer] = size
        else:
            assert live.pop(pointer) == size
    assert not live
    assert b"GET /1" in gzip.decompress(pprof.read_bytes())
    events = json.loads(perfetto.read_text())["traceEvents"]
    counters = [event["args"]["live"] for event in events if event["name"] == "GET /1 bytes"]
    assert max(counters) == 160_000
    assert counters[-1] == 0
    assert sum(event["ph"] == "b" for event in events) == sum(event["ph"] == "e" for event in events) == 4
    assert main(["trace", "info", str(path)]) == 0
    assert "GET /0" in capsys.readouterr().out


def test_what_cannot_be_read_is_said_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    with ctxalloc.record(path, one_in=1), ctxalloc.request(name="a"):
        np.ones(1000)
    content = bytearray(path.read_bytes())
    first = 12 + int.from_bytes(content[8:12], "little")
    path.write_bytes(content + b"\0" * 100 + content[8 : 8 + first])
    found = told(path, capsys)
    (gap,) = found["gaps"]
    assert (gap["file"], gap["offset"], gap["bytes"], gap["places"]) == (str(path), len(content), 100, 1)
    assert found["processes"] == 1
    content[40] ^= 0xFF
    path.write_bytes(content)
    assert main(["trace", "info", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"{path}: {first} bytes at offset 8 cannot be read: the checksum of a frame is wrong; what follows" in text
    assert f" {found['events']} events" in text
    assert "by ctxalloc" not in text, "who made it cannot be read"
    path.write_bytes(content[: 8 + first])
    assert main(["trace", "info", str(path)]) == 2
    assert "at byte 8: the checksum of a frame is wrong" in capsys.readouterr().err
    assert main(["trace", "info", str(tmp_path / "nothing")]) == 2
    assert "there is no such file" in capsys.readouterr().err


PAYS_FOR_OTHERS = """
import contextvars, os, threading, numpy, ctxalloc

def other(payer, name):
    with ctxalloc.request(name=name, budget=payer.budget):
        numpy.zeros(20_000)
        kept.append(numpy.zeros(30_000))

kept = []
recorder = ctxalloc.record(sys.argv[1], one_in=1, share=1.0)
with ctxalloc.request(name="around"):
    for _ in range(30):
        with ctxalloc.request(name="payer", root=True) as payer:
            left = numpy.zeros(1000)
            # CPython 3.14 may be told to start threads with their starter's context.
            thread = threading.Thread(target=contextvars.Context().run, args=(other, payer, "on a thread"))
            thread.start()
            thread.join()
            with ctxalloc.request(name="inside", budget=payer.budget):
                numpy.zeros(5000)
        with ctxalloc.request(name="payer at once") as payer:
            pass
        with ctxalloc.request(name="late", budget=payer.budget):
            numpy.zeros(7000)
    with ctxalloc.request(name="parents", root=True) as payer:
        child = os.fork() if hasattr(os, "fork") else None
        if child == 0:
            other(payer, "of the child")
            recorder.stop()
            os._exit(0)
        if child:
            os.waitpid(child, 0)
recorder.stop()
"""


def test_who_pays_for_others_by_a_budget_is_told_and_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    says(PAYS_FOR_OTHERS.replace("sys.argv[1]", repr(str(path))))
    for name, line in (
        ("replay", "30 requests whose budget others were charged to, not compared"),
        ("trace info", "30 requests whose budget others were charged to: peaks include that, and escapes do not"),
    ):
        words = [*name.split(), path, *(["--rounds", "1", "--strategy", "default"] if name == "replay" else [])]
        done = commands.ctxalloc(*words)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"  {line}\n" in done.stdout
    rows = by_name(path, capsys)
    assert {name for name, row in rows.items() if row["with_others"]} == {"payer"}
    assert rows["payer"]["peak_bytes"]["max"] == 8000 + 240_000 + 40_000
    assert rows["payer"]["escaped_bytes"] == 30 * 8000
    for words in (["replay", "--route", "payer"], ["recommend"]):
        done = commands.ctxalloc(*words, path, "--rounds", "1", "--strategy", "default")
        assert (done.returncode, done.stderr) == (0, "")
        assert "contradicts" not in done.stdout
