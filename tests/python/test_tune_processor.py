"""What a gain is worth is seen beside what processors spent on the requests, and not beside what they waited for."""

import json
import time
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import recordings
import subprocesses

import ctxalloc
from ctxalloc import _native, _together

SECOND = 10**9


def whole(path: Path) -> dict[str, Any]:
    return _native._recorded_routes(_native._Recording(path), 1000)[1]


def waiting() -> recordings.Script:
    """Requests that allocate for a millisecond and wait for a second."""
    made = recordings.Script()
    for _ in range(24):
        request = made.begin("GET /waits")
        for block in [made.make(request, 300 * recordings.KiB + 4096 * at) for at in range(40)]:
            made.free(block)
        made.rest(1)
        made.end(request)
    return made


@pytest.mark.long
def test_a_request_that_waits_is_worth_what_it_takes_of_a_processor(tmp_path: Path) -> None:
    words = ("--rounds", "3", "--strategy", "default,pool", "--json")
    made = waiting()
    (route,) = json.loads(commands.ctxalloc("recommend", made.write(tmp_path / "old"), *words).stdout)["routes"]
    assert route["verdict"] == "leave"
    made.used = [(5 * SECOND, 0, 0), (5 * SECOND + SECOND // 20, 24, 24)]
    (route,) = json.loads(commands.ctxalloc("recommend", made.write(tmp_path / "new"), *words).stdout)["routes"]
    assert route["verdict"] == "unknown" or (route["verdict"], route["strategy"]) == ("change", "pool")
    assert min(one["faults"] for one in route["rounds"]["default"]) > max(
        one["faults"] for one in route["rounds"]["pool"]
    )


def test_all_routes_together_take_no_more_than_processors_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two routes may have had all of that time, and both together no more."""
    made = waiting()
    for _ in range(24):
        request = made.begin("GET /other")
        made.free(made.make(request, 2 * recordings.MiB))
        made.rest(1)
        made.end(request)
    asked: list[_together.Asked] = []

    def everywhere(_plan: object, what: _together.Asked, *_rest: object, **_options: object) -> None:
        asked.append(what)

    monkeypatch.setattr(_together, "everywhere", everywhere)
    words = ("--rounds", "1", "--strategy", "default,pool", "--json")
    for used, most in (([], 50), ([(0, 0, 0), (2 * SECOND, 48, 48)], 2)):
        made.used = used
        commands.ctxalloc("recommend", made.write(tmp_path / "a.rec"), *words)
        assert asked.pop().seconds == pytest.approx(most, rel=0.05)


@pytest.mark.parametrize("one_in", [1, 2])
def test_a_recording_says_what_processors_spent_on_its_requests(one_in: int, tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    before = time.process_time_ns()
    with ctxalloc.record(path, one_in=one_in, share=1.0):
        for _ in range(60):
            with ctxalloc.request(name="GET /waits"):
                np.ones(1000)
                time.sleep(0.002)
                until = time.thread_time_ns() + 1_000_000
                while time.thread_time_ns() < until:
                    pass
    spent = time.process_time_ns() - before
    found = whole(path)
    share = found["requests"] / 60
    assert (share == 1) == (one_in == 1)
    assert 60_000_000 * share <= found["processor_ns"] <= spent * share
    assert found["duration_ns"] > 2 * found["processor_ns"]
    assert sum(found["alone_ns"]) == found["duration_ns"]
    assert 60_000_000 * share <= sum(found["alone_processor_ns"]) <= spent * share + spent * (one_in > 1)


def test_what_children_of_fork_spend_is_theirs(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    subprocesses.says(
        f"""
import os, time, ctxalloc, numpy as np
def works(seconds):
    with ctxalloc.request(name="works"):
        np.ones(10)
        until = time.process_time() + seconds
        while time.process_time() < until: pass
with ctxalloc.record({str(path)!r}, one_in=1, share=1.0):
    works(0.1)
    child = os.fork()
    if child == 0:
        works(0.3)
    else:
        os.waitpid(child, 0)
        works(0.1)
""",
        "-W",
        "ignore::DeprecationWarning",
    )
    found = whole(path)
    assert found["requests"] == 3
    assert 0.49 <= found["processor_ns"] / SECOND <= 1.5
