"""``ctxalloc replay`` and ``recommend``: their malloc keeps what the recorded program's had learnt to keep."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import recordings
from test_tune import ONCE, command

from ctxalloc import _native

pytestmark = [pytest.mark.once, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

has_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc learns from what is freed")


@pytest.mark.long
def test_what_the_reader_had_is_not_the_replays(tmp_path: Path) -> None:
    """Reading a large recording frees large blocks, of which glibc learns to keep what it would give back."""
    faults = []
    for tiny in (1, 3000):
        script = recordings.Script()
        for _ in range(30):
            request = script.begin("POST /a")
            blocks = [script.make(request, 400 << 10) for _ in range(60)]
            for block in blocks:
                script.free(block)
            for _at in range(tiny):
                script.free(script.make(request, 8))
            script.end(request)
        path = script.write(tmp_path / f"{tiny}.rec")
        told = json.loads(command("replay", path, *ONCE, "--json").stdout)
        faults.append(told["strategies"]["default"][0]["faults"])
    assert faults[1] > 0.9 * faults[0], faults


@has_glibc
def test_the_main_thread_is_replayed_as_the_heap_serves_that(tmp_path: Path) -> None:
    """Memory of the main thread goes back to the system by glibc, and hardly ever that of others."""
    program = """
import sys, threading, numpy as np, ctxalloc
terms = ctxalloc.request(name="GET /table", strategy=ctxalloc.strategies.System())
@terms
def serve():
    columns = [np.ones(20_000) for _ in range(60)]
    return sum((column - column.mean()).std() for column in columns)
def all_of_them():
    for _ in range(20):
        serve()
with ctxalloc.record(sys.argv[1], one_in=1, share=1.0):
    if sys.argv[2] == "main":
        all_of_them()
    else:
        thread = threading.Thread(target=all_of_them)
        thread.start()
        thread.join()
"""
    faults = {}
    for thread in ("main", "other"):
        path = tmp_path / f"{thread}.rec"
        subprocess.run([sys.executable, "-c", program, path, thread], check=True)
        told = json.loads(command("replay", path, *ONCE, "--json").stdout)
        assert (told["compared"], told["threads"]) == (20, 1)
        faults[thread] = told["strategies"]["default"][0]["faults"]
    assert faults["main"] > 5 * faults["other"], faults


SERVICE = """
import ctypes, resource, sys
import numpy as np
import ctxalloc
from ctxalloc import strategies

heap = ctypes.CDLL(None)
heap.malloc.restype, heap.malloc.argtypes, heap.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
for _ in range(int(sys.argv[2])):
    heap.free(heap.malloc(31 << 20))  # malloc keeps up to twice as much from here on

def serve(requests):
    for _ in range(requests):
        with ctxalloc.request(name="table", strategy=strategies.System()):
            kept = [np.ones(400_000) for _ in range(4)]
            del kept

serve(3)
with ctxalloc.record(sys.argv[1], one_in=1, share=1.0):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    serve(40)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults_of(recording: Path, *, taught: bool) -> int:
    words = [sys.executable, "-c", SERVICE, str(recording), str(int(taught))]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    return int(subprocess.run(words, check=True, capture_output=True, text=True, env=env).stdout)


@has_glibc
@pytest.mark.parametrize("taught", [False, True])
def test_a_recording_says_how_many_page_faults_its_requests_had(tmp_path: Path, *, taught: bool) -> None:
    recorded = faults_of(tmp_path / "trace", taught=taught)
    [route], *_ = _native._recorded_routes(_native._Recording(str(tmp_path / "trace")), 10)
    assert 0.9 * recorded - 100 <= route["page_faults"] <= recorded


@pytest.mark.long
@has_glibc
def test_what_malloc_kept_in_the_program_no_pool_saves(tmp_path: Path) -> None:
    found = {}
    for taught in (False, True):
        faults_of(trace := tmp_path / f"{taught}.trace", taught=taught)
        done = command("recommend", trace, "--rounds", "3", "--strategy", "pool", "--json")
        [found[taught]] = json.loads(done.stdout)["routes"]
    assert found[False]["mmap_threshold"] is None
    assert found[False]["verdict"] == "change"
    assert found[True]["mmap_threshold"] is not None
    assert found[True]["verdict"] != "change"
    assert "fewer than a new program has" in found[True]["confidence"]


@pytest.mark.long
@has_glibc
def test_a_replay_has_the_malloc_of_the_program(tmp_path: Path) -> None:
    recorded = faults_of(trace := tmp_path / "trace", taught=True)
    told = json.loads(command("replay", trace, *ONCE, "--json").stdout)
    assert told["mmap_threshold"] is not None
    touched_once = told["peak_live_bytes"] / os.sysconf("SC_PAGE_SIZE")  # as the program did before it was recorded
    assert told["strategies"]["default"][0]["faults"] <= touched_once + 1.2 * recorded + 1000
    assert "fewer than a new program has" in command("replay", trace, *ONCE).stdout
    faults_of(fresh := tmp_path / "fresh", taught=False)
    assert json.loads(command("replay", fresh, *ONCE, "--json").stdout)["mmap_threshold"] is None
    assert "mmap threshold" not in command("replay", fresh, *ONCE).stdout
