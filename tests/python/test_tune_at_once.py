"""How much ``ctxalloc recommend`` advises the routes to hold at once."""

import asyncio
import json
from pathlib import Path
from typing import Any

import asgi_calls
import commands
import numpy as np
import pytest
import recordings

import ctxalloc
from ctxalloc import MiB, _at_once, _snippets
from ctxalloc._snippets import Common, Set

pytestmark = pytest.mark.once
SECOND = 10**9


def script(*, size: int, busy: float = 1.0, at_once: int = 6, alone: int = 6, small: int = 0) -> recordings.Script:
    """Requests of a second, some by themselves and others together. ``busy``: the part that is a processor's."""
    made = recordings.Script()

    def begun(name: str, size: int) -> tuple[int, int]:
        request = made.begin(name)
        return request, made.make(request, size)

    def ended(*these: tuple[int, int]) -> None:
        made.rest(1)
        for request, block in these:
            made.free(block)
            made.end(request, processor_ns=int(min(2, busy * len(these)) * SECOND))

    for _ in range(alone):
        ended(begun("GET /large", size))
        if small:
            ended(begun("GET /small", small))
    for _ in range(24 // at_once):
        ended(*(begun("GET /large", size) for _ in range(at_once)))
        if small:
            ended(*(begun("GET /small", small) for _ in range(at_once)))
    return made


def told(made: recordings.Script, path: Path) -> Any:
    done = commands.ctxalloc(
        "recommend", made.write(path, handler="pool"), "--rounds", "1", "--strategy", "pool", "--json"
    )
    assert done.returncode == 0, done
    return json.loads(done.stdout)


def test_no_more_than_the_processors_take(tmp_path: Path) -> None:
    """The recordings' machine has two, and what computes gains nothing by a third."""
    found = told(script(size=20 * MiB, small=MiB), tmp_path / "a.rec")
    at_once = found["at_once"]
    assert (at_once["limit_bytes"], at_once["routes"]) == (60 * MiB, ["GET /large"])
    assert (at_once["requests"], at_once["live_bytes"]) == (2, 120 * MiB)
    assert at_once["expected_bytes"] == 46 * MiB, "two, and the others' six"
    large, small = sorted(found["routes"], key=lambda one: -one["limit_bytes"])
    assert (large["reserve_bytes"], large["waits"]) == (large["limit_bytes"], True) == (30 * MiB, True)
    assert (small["reserve_bytes"] < small["limit_bytes"], small["waits"]) == (True, False)
    row = f"ctxalloc.request(limit_bytes={30 * MiB}, reserve_bytes={30 * MiB}, budget=at_once, timeout=60)"
    assert f"'GET /large': {row}," in found["snippets"]["python"]
    assert f'let at_once = Budget::new("at once", Some({60 * MiB}));' in found["snippets"]["rust"]
    assert f"terms.limit_bytes({30 * MiB}).reserve_bytes({30 * MiB}).budget(&at_once)," in found["snippets"]["rust"]
    assert "layer.waiting().timeout(Duration::from_secs(60));" in found["snippets"]["rust"]
    assert (at_once["timeout_seconds"], at_once["max_waiting"]) == (60, None)
    assert found["rules"][-1] == _at_once.RULE


def test_what_waits_leaves_the_processors_to_others(tmp_path: Path) -> None:
    """Four fifths of each are no processor's: ten keep two of them busy."""
    assert told(script(size=20 * MiB, busy=0.2), tmp_path / "a.rec")["at_once"] is None
    found = told(script(size=20 * MiB, busy=0.2, at_once=24), tmp_path / "b.rec")["at_once"]
    assert (found["limit_bytes"], found["expected_bytes"]) == (300 * MiB, 200 * MiB)
    assert found["requests"] == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize("alone", [0, 4])
def test_without_quiet_times_it_is_not_known(alone: int, tmp_path: Path) -> None:
    found = told(script(size=20 * MiB, alone=alone), tmp_path / "a.rec")
    assert (found["at_once"]["limit_bytes"], found["routes"][0]["waits"]) == (None, False)
    why = "fewer than 5 requests of GET /large ran while no other one was open: record quiet times too"
    assert found["at_once"]["reason"].endswith(why)
    assert "at_once" not in found["snippets"]["python"]
    assert found["routes"][0]["reserve_bytes"] == 24 * MiB


@pytest.mark.parametrize("changed", [{"size": MiB}, {"at_once": 2}, {"at_once": 1}])
def test_where_nothing_is_gained_nothing_waits(changed: dict[str, int], tmp_path: Path) -> None:
    found = told(script(**{"size": 20 * MiB, **changed}), tmp_path / "a.rec")
    assert (found["at_once"], found["routes"][0]["waits"]) == (None, False)


def facts(name: str, live: int, *, processor_ns: int = SECOND) -> dict[str, Any]:
    return {
        "name": name,
        "requests": 100,
        "alone_ns": [SECOND] * 5,
        "alone_processor_ns": [processor_ns] * 5,
        "duration_ns": 300 * SECOND,
        "open_processor_ns": 500 * SECOND,
        "lasting_blocks": 0,
        "peak_live_bytes": live,
        "max_concurrent": 8,
    }


def test_requests_that_nobody_recorded_may_have_run_beside_it() -> None:
    sized = [_at_once.Sized(facts("GET /a", 800 * MiB), 150 * MiB)]
    found = _at_once.advised(facts("", 800 * MiB), sized, 2, is_complete=False)
    assert found is not None
    assert (found.limit_bytes, found.expected_bytes) == (None, 200 * MiB)
    assert "not all requests were recorded (one_in=1, share=1.0)" in found.reason
    found = _at_once.advised(facts("", 800 * MiB), sized, 2, is_complete=True)
    assert found is not None
    assert found.limit_bytes == 300 * MiB


def told_of(**changed: Any) -> _at_once.AtOnce | None:
    """Of a route of 800 MiB, and of all, which is the same; with these facts changed."""
    these = {**facts("GET /a", 800 * MiB), **changed}
    return _at_once.advised({**these, "name": ""}, [_at_once.Sized(these, 150 * MiB)], 2, is_complete=True)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"duration_ns": 2500 * SECOND}, "beside others GET /a took longer than they explain"),
        ({"open_processor_ns": 100 * SECOND}, "where they ran at once the process used 0.32 processors only"),
        ({"open_processor_ns": None}, "not all requests say what processors spent on them"),
        ({"alone_ns": [0] * 5}, "the times of GET /a are none that a program takes"),
        ({"alone_processor_ns": [2**64 - 1] * 5}, "the times of GET /a are none that a program takes"),
        ({"lasting_blocks": 1}, "keep no memory beyond their end"),
    ],
)
def test_what_does_not_add_up_is_not_known(changed: dict[str, Any], why: str) -> None:
    found = told_of(**changed)
    assert found is not None
    assert found.limit_bytes is None
    assert why in found.reason


def test_as_many_may_wait_as_there_were_and_as_long_as_they_take() -> None:
    usual = told_of()
    assert usual is not None
    assert (usual.timeout_seconds, usual.max_waiting) == (60, None)
    slow = told_of(max_concurrent=2000, alone_ns=[2 * SECOND] * 5)
    assert slow is not None
    assert (slow.timeout_seconds, slow.max_waiting) == (8000, 4000)
    names: dict[str, Any] = {}
    exec(_snippets.python([], None, Common(MiB, slow.timeout_seconds, slow.max_waiting)), names)
    assert names["at_once"].max_waiting == 4000
    ages = told_of(max_concurrent=10**6, alone_ns=[2 * SECOND] * 5)
    assert ages is not None
    assert ages.timeout_seconds == 86_400


def test_requests_of_no_route_cannot_wait(tmp_path: Path) -> None:
    made = recordings.Script()
    made.names.append("")
    for _ in range(24):
        six = [made.begin("") for _ in range(6)]
        blocks = [made.make(one, 20 * MiB) for one in six]
        for block, one in zip(blocks, six, strict=True):
            made.free(block)
            made.end(one)
    assert told(made, tmp_path / "a.rec")["at_once"]["reason"].startswith("no requests can wait: those that can are")


def test_a_service_that_keeps_what_requests_made_does_not_wait_for_it(tmp_path: Path) -> None:
    made = script(size=20 * MiB)
    kept = made.begin("GET /large")
    made.make(kept, MiB)
    made.rest(1)
    made.end(kept, processor_ns=SECOND)
    made.rest(0.9)
    made.end(made.begin("GET /other"), processor_ns=1)
    assert told(made, tmp_path / "a.rec")["at_once"]["limit_bytes"] == 60 * MiB, "it may go yet"
    made.rest(0.2)
    made.end(made.begin("GET /other"), processor_ns=1)
    assert told(made, tmp_path / "b.rec")["at_once"]["limit_bytes"] is None


def test_large_and_middling_requests_share_the_room() -> None:
    """Of four at once, by a middling one's fifteen sixteenths: room for two of the largest is more."""
    both = [
        _at_once.Sized(facts("GET /a", 400 * MiB, processor_ns=SECOND // 2), 150 * MiB),
        _at_once.Sized(facts("GET /b", 200 * MiB, processor_ns=SECOND // 2), 30 * MiB),
        _at_once.Sized(facts("GET /c", 9 * MiB), 3 * MiB),
        _at_once.Sized(facts("by hand", 5 * MiB), None),
    ]
    found = _at_once.advised(facts("", 600 * MiB), both, 2, is_complete=True)
    assert found is not None
    assert (found.limit_bytes, found.routes, found.requests) == (360 * MiB, ["GET /a", "GET /b"], 4)
    assert found.expected_bytes == (240 + 9 + 5) * MiB
    assert _at_once.advised(facts("", 600 * MiB), both, 8, is_complete=True) is None, "as many as there were"


class Staying(asgi_calls.Client):
    """Who waits for the answer, and does not go away meanwhile."""

    async def receive(self) -> dict[str, Any]:
        return self.messages.pop(0) if self.messages else await asyncio.Event().wait()


def test_whoever_finds_no_room_waits_and_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctxalloc, "configure", lambda **_: None)
    sets = [Set("GET /large", "pool", 30 * MiB, 30 * MiB, waits=True), Set("GET /small", "pool", MiB, MiB)]
    now, most = {"/large": 0, "/small": 0}, {"/large": 0, "/small": 0}
    # As many as are to run at once wait for each other.
    together = {"/large": asyncio.Barrier(2), "/small": asyncio.Barrier(6)}

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        path = scope["path"]
        held = np.ones(20 * MiB if path == "/large" else MiB // 2, np.uint8)
        now[path] += 1
        most[path] = max(most[path], now[path])
        async with asyncio.timeout(60):
            await together[path].wait()
        now[path] -= 1
        del held
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    names: dict[str, Any] = {"app": app}
    exec(_snippets.python(sets, None, Common(60 * MiB, 60)), names)

    async def load() -> list[Staying]:
        paths = ["/large"] * 6 + ["/small"] * 6
        clients = [Staying() for _ in paths]
        calls = [
            names["app"](asgi_calls.http(path), one.receive, one.send) for path, one in zip(paths, clients, strict=True)
        ]
        await asyncio.gather(*calls)
        return clients

    answers = asyncio.run(load())
    assert [answer.status for answer in answers] == [200] * 12
    assert most == {"/large": 2, "/small": 6}
    assert names["at_once"].reserved_bytes == 0


def test_the_text_and_the_page_say_it(tmp_path: Path) -> None:
    made = script(size=20 * MiB).write(tmp_path / "a.rec", handler="pool")
    page = tmp_path / "a.html"
    done = commands.ctxalloc("recommend", made, "--rounds", "1", "--strategy", "pool", "--output", page)
    said = (
        "at most 60 MiB of limits at once, for GET /large: 2 requests at once keep 2 processors busy, since one by "
        "itself has one for 100% of its time; there were 6 in a process. At most 40 MiB are alive there then at one "
        "time, in place of 120 MiB"
    )
    assert f"  {said}\n" in done.stdout
    assert f"All routes together: {said}." in page.read_text()
    assert "reserve_bytes=31457280 (30 MiB), of the common budget\n" in done.stdout


def test_one_route_alone_is_told_nothing_of_it(tmp_path: Path) -> None:
    made = script(size=20 * MiB, small=MiB).write(tmp_path / "a.rec", handler="pool")
    words = ("--rounds", "1", "--strategy", "pool", "--json", "--route", "GET /large")
    found = json.loads(commands.ctxalloc("recommend", made, *words).stdout)
    assert (found["at_once"], found["routes"][0]["waits"]) == (None, False)
