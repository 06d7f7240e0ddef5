"""``ctxalloc replay`` and ``recommend`` on recordings whose best answer is known."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import recordings

import ctxalloc
from ctxalloc import _native

pytestmark = [pytest.mark.once, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HAS_HUGE_PAGES = HUGE.exists() and "[never]" not in HUGE.read_text()
"""The C heap asks for them from 4 MiB on, as NumPy's default does: then a zeroed giant costs it some twenty faults."""

KNOWN: dict[str, set[tuple[str, str]]] = {
    "all_die_at_once": {("change", "pool"), ("change", "arena"), ("change", "hugepages")},
    "long_tail": {("change", "pool"), ("change", "arena")},
    "one_size": {("leave", "default")},
    "powers_and_one": {("leave", "default")},
    "zeroed_giants": {("leave", "default")}
    if HAS_HUGE_PAGES
    else {("change", "pool"), ("change", "arena"), ("change", "hugepages")},
    "passed_on": {("change", "pool"), ("change", "arena"), ("change", "hugepages")},
    "bursts": {("change", "pool"), ("change", "arena"), ("change", "hugepages")},
    "slow_requests": {("leave", "default")},
    "growing": {("change", "pool"), ("change", "arena"), ("change", "hugepages")},
    "two_halves": {("change", "pool"), ("change", "arena"), ("change", "hugepages")},
    "few_requests": set(),
}
"""What each should get. That it is not known is never wrong."""

IS_STRESS = "CTXALLOC_STRESS" in os.environ
ROUNDS = 10 if IS_STRESS else 3
LIKE_ANOTHER = ("long_tail", "powers_and_one", "zeroed_giants", "bursts", "two_halves")
TRIED = [name for name in KNOWN if IS_STRESS or name not in LIKE_ANOTHER]
"""`make stress` takes more rounds, and all shapes: five have the answer of another one."""

ONCE = ("--rounds", "1", "--strategy", "default")
"""For what more replays would not show."""


def command(*words: str | Path, status: int = 0) -> commands.Done:
    """In this process: each replay has one of its own."""
    done = commands.ctxalloc(*words)
    assert done.returncode == status, done
    return done


def advice(folder: Path, name: str, rounds: int = 3) -> dict[str, Any]:
    path = getattr(recordings, name)().write(folder / f"{name}.rec")
    told = json.loads(command("recommend", path, "--rounds", str(rounds), "--json").stdout)
    (route,) = told["routes"]
    return {**route, "all": told}


@pytest.mark.long
@pytest.mark.parametrize("name", TRIED)
def test_the_advice_is_the_known_answer_or_that_it_is_not_known(name: str, tmp_path: Path) -> None:
    found = advice(tmp_path, name, ROUNDS)
    assert found["verdict"] == "unknown" or (found["verdict"], found["strategy"]) in KNOWN[name], found
    for rounds in found["rounds"].values():
        assert len(rounds) == ROUNDS
    # What counts decide, however busy the machine is.
    faults = {strategy: [one["faults"] for one in rounds] for strategy, rounds in found["rounds"].items()}
    if name in ("all_die_at_once", "passed_on", "growing") or (name == "zeroed_giants" and not HAS_HUGE_PAGES):
        assert max(faults["pool"]) < min(faults["default"])
    if name in ("few_requests", "slow_requests"):
        assert not faults, "it was replayed for nothing"


def test_bursts_and_rests_keep_nothing_warm_over_the_rests(tmp_path: Path) -> None:
    path = recordings.bursts().write(tmp_path / "bursts.rec")
    told = json.loads(command("recommend", path, *ONCE, "--json").stdout)
    assert (told["decay_seconds"], told["warm_bytes"]) == (None, None), "there is no pool"
    (route,) = told["routes"]
    pooled = recordings.bursts().write(tmp_path / "pooled.rec", handler="pool")
    told = json.loads(command("recommend", pooled, "--rounds", "1", "--strategy", "pool", "--json").stdout)
    assert (told["decay_seconds"], told["warm_bytes"]) == (1, 18 << 20)
    assert (route["max_concurrent"], route["peak_live_bytes"]) == (5, 15 << 20)
    assert (route["limit_bytes"], route["verdict"]) == (4.5 * (1 << 20), "unknown")


@pytest.mark.long
def test_what_has_the_pool_already_keeps_it(tmp_path: Path) -> None:
    """Beside another route too: the joint rule compares with what was recorded."""
    both = recordings.all_die_at_once()
    for _ in range(24):
        request = both.begin("GET /other")
        both.free(both.make(request, 2 << 20))
        both.end(request)
    path = both.write(tmp_path / "pooled.rec", handler="pool")
    told = json.loads(command("recommend", path, "--rounds", "3", "--strategy", "default,pool", "--json").stdout)
    for one in told["routes"]:
        assert one["as_it_is"] == {"strategy": "pool", "handler": "pool", "is_exact": True}
        assert one["verdict"] == "unknown" or (one["verdict"], one["strategy"]) == ("leave", "pool"), one
    assert "strategy=" not in told["snippets"]["python"]
    assert "strategy(" not in told["snippets"]["rust"]
    assert told["warm_bytes"] >= 15 << 20


def test_a_replay_prints_what_each_strategy_took(tmp_path: Path) -> None:
    path = recordings.passed_on(20).write(tmp_path / "a.rec")
    text = command("replay", path, "--strategy", "default,pool,aligned64", "--rounds", "2").stdout
    assert "a.rec: 520 events of 20 requests on 2 threads; medians of 2 rounds" in text
    assert "240 freed by another thread" in text
    assert "20 accounts compared with the recording: the same" in text
    rows = [line.split() for line in text.splitlines() if line.startswith(("  default", "  pool", "  aligned64"))]
    assert [row[0] for row in rows] == ["default", "pool", "aligned64"]
    told = json.loads(command("replay", path, "--rounds", "1", "--one-thread", "--json").stdout)
    assert (told["threads"], told["compared"], told["freed_elsewhere"]) == (1, 20, 240)
    assert set(told["strategies"]) == {"default", "pool", "arena", "hugepages"}


def test_a_thread_for_each_request_is_replayed_as_it_was(tmp_path: Path) -> None:
    """As threaded WSGI servers do it. If all threads stayed, each of the first had an arena of the C heap."""
    path = tmp_path / "threads.rec"
    kept = []

    def serve() -> None:
        with ctxalloc.request(name="GET /", strategy=ctxalloc.strategies.System()):
            arrays = [np.ones(8000) for _ in range(100)]
            kept.append(np.ones(2000))  # on top of the others
            del arrays

    with ctxalloc.record(path, one_in=1, share=1.0):
        for _ in range(60):
            thread = threading.Thread(target=serve)
            thread.start()
            thread.join()
    text = command("replay", path, *ONCE).stdout
    assert re.search(r"of 60 requests on 60 threads \(\d+ at one time\); medians of 1 round", text), text
    told = json.loads(command("replay", path, *ONCE, "--json").stdout)
    assert (told["threads"], told["compared"]) == (60, 60)
    # `join` returns before the system's thread has ended.
    assert told["threads_at_once"] < 20
    (one,) = told["strategies"]["default"]
    assert told["peak_live_bytes"] < 8 << 20
    assert one["peak_bytes"] < 32 << 20, one


def test_a_recording_that_contradicts_its_sums_is_an_error(tmp_path: Path) -> None:
    made = recordings.Script()
    request = made.begin("x")
    made.make(request, 10)
    made.accounts[request].peak = 11
    made.end(request)
    path = made.write(tmp_path / "b.rec")
    said = command("replay", path, "--rounds", "1", status=2).stderr
    assert "ctxalloc replay: the recording contradicts itself: request 1: its events make 1 block of 10" in said
    content = path.read_bytes()
    place = re.search(rf"\({re.escape(str(path))}, at byte (\d+)\); record anew", said)
    assert place is not None, said
    assert content[int(place[1])] == 1, "a body of events"
    assert content[int(place[1]) + 1] & 0xF == recordings.END
    assert "Sums" not in said


@pytest.mark.parametrize("name", ["replay", "recommend"])
def test_where_nothing_can_be_read_the_first_damage_is_told(name: str, tmp_path: Path) -> None:
    path = recordings.one_size(3).write(tmp_path / "damaged.rec")
    content = bytearray(path.read_bytes())
    first = len(recordings.MAGIC) + 12 + int.from_bytes(content[8:12], "little")
    second = first + 12 + int.from_bytes(content[first : first + 4], "little")
    for at in range(second + 12, len(content), 7):
        content[at] ^= 0x55
    path.write_bytes(content)
    said = command(name, path, status=2).stderr
    assert f"ctxalloc {name}: {path} has no " in said
    assert f"request that can be read: {path}: {len(content) - second} bytes at offset {second} cannot" in said


def test_what_a_replay_cannot_do_is_told_with_its_file_and_request(tmp_path: Path) -> None:
    made = recordings.Script()
    made.end(made.begin("GET /a"))
    request = made.begin("GET /large")
    made.free(made.make(request, 1 << 46))
    made.end(request)
    path = made.write(tmp_path / "large.rec")
    said = command("replay", path, "--strategy", "pool", "--rounds", "1", status=2).stderr
    assert said.startswith(f"ctxalloc replay: {path}: 64 TiB of its blocks are alive at one time, and this machine"), (
        said
    )
    # Whoever replays it all the same is told by the replay's own process.
    _native._plan(_native._Recording(path), tmp_path / "plan")
    done = subprocess.run(
        [sys.executable, "-m", "ctxalloc._replay_one", "pool", tmp_path / "plan"],
        input="null",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert f'request 2, of "GET /large": strategy pool gave no {1 << 46} bytes' in done.stderr
    made = recordings.Script()
    for _ in range(5000):
        made.begin("deep", parent=made.requests)
    path = made.write(tmp_path / "deep.rec")
    said = command("replay", path, "--rounds", "1", status=2).stderr
    assert f"request 4098 is inside of 4097 others, and 4096 is the most ({path}, at byte " in said, said


@pytest.mark.long
def test_one_route_that_cannot_be_replayed_costs_the_others_nothing(tmp_path: Path) -> None:
    made = recordings.all_die_at_once()
    for _ in range(30):
        request = made.begin("GET /broken")
        made.free(made.make(request, 2 << 20))
        made.accounts[request].peak += 1
        made.end(request)
    for _ in range(30):
        request = made.begin("GET /other")
        made.free(made.make(request, 2 << 20))
        made.end(request)
    path = made.write(tmp_path / "broken.rec")
    output = tmp_path / "advice.html"
    words = ("recommend", path, "--rounds", "3", "--strategy", "pool", "--json", "--output", output)
    told = json.loads(command(*words).stdout)
    found = {one["route"]: one for one in told["routes"]}
    assert found["GET /broken"]["verdict"] == "unknown"
    assert found["GET /broken"]["reason"].startswith("it cannot be replayed: the recording contradicts itself: request")
    assert all(len(found[name]["rounds"]["pool"]) == 3 for name in ("POST /at-once", "GET /other"))
    if "change" in {one["verdict"] for one in told["routes"]}:
        assert told["together"]["problem"].startswith("the recording contradicts itself")
        assert "could not be replayed together as advised" in output.read_text()
    assert not told["is_partial"]
    said = command("recommend", path, "--route", "GET /broken", "--rounds", "1", status=2).stderr
    assert "ctxalloc recommend: route 'GET /broken': the recording contradicts itself" in said
    said = command("recommend", path, "--strategy", "best", status=2).stderr
    assert "ctxalloc recommend: strategy=best is not possible" in said


@pytest.mark.parametrize("name", ["replay", "recommend"])
def test_a_recording_without_requests_is_an_error(name: str, tmp_path: Path) -> None:
    path = recordings.Script().write(tmp_path / "empty.rec")
    said = command(name, path, status=2).stderr
    what = {"replay": "request", "recommend": "finished request"}[name]
    assert said.startswith(
        f"ctxalloc {name}: {path} has no {what}; it needs the program to begin some: by a middleware"
    )
    assert "with ctxalloc.request(); if it does, record for longer, or with a smaller one_in\n" in said
    if name == "replay":
        told = command("trace", "info", path).stdout
        assert "it has no request; it needs the program to begin some: by a middleware" in told
        assert "blocks by size" not in told


def test_what_cannot_be_replayed_is_said(tmp_path: Path) -> None:
    nothing = command("replay", tmp_path / "none.rec", status=2).stderr
    assert nothing.startswith("ctxalloc replay: there is no recording")
    (tmp_path / "text.rec").write_text("no recording at all")
    assert "ctxalloc recommend: " in command("recommend", tmp_path / "text.rec", status=2).stderr
    path = recordings.one_size(3).write(tmp_path / "c.rec")
    assert "strategy=best is not possible" in command("replay", path, "--strategy", "best", status=2).stderr
    assert "names no strategy" in command("replay", path, "--strategy", ",", status=2).stderr
    assert "no finished request of that name" in command("recommend", path, "--route", "/", status=2).stderr


def test_what_was_measured_before_an_interrupt_is_told(tmp_path: Path) -> None:
    script = recordings.zeroed_giants(20)
    path = script.write(tmp_path / "long.rec")
    process = subprocess.Popen(
        [sys.executable, "-m", "ctxalloc", "replay", path, "--rounds", "1000", "--strategy", "pool", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    seen: set[str] = set()
    while len(seen) < 3:  # the third replay begins when two are over
        seen |= set(children.read_text().split())
    os.killpg(process.pid, signal.SIGINT)
    out, said = process.communicate(timeout=60)
    told = json.loads(out)
    assert (process.returncode, said, told["is_partial"]) == (130, b"", True)
    assert 1 <= len(told["strategies"]["pool"]) < 1000


def test_the_page_has_everything_in_it(tmp_path: Path) -> None:
    script = recordings.two_halves(20)
    script.names[0] = "GET /<b>&{name}"
    path = script.write(tmp_path / "d.rec")
    text = command(
        "recommend", path, "--rounds", "3", "--strategy", "pool", "--output", tmp_path / "advice.html"
    ).stdout
    page = (tmp_path / "advice.html").read_text()
    assert "GET /&lt;b&gt;&amp;{name}" in page
    assert "<b>" not in page
    assert "<svg" in page
    assert "page faults of a replay" in page
    assert "blocks by size" in page
    assert "http://" not in page
    assert "https://" not in page
    for part in ("rests on", "keep warm", "# python", "# rust", "# dask", "rules:"):
        assert part in text


def test_names_bring_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    made = recordings.Script()
    for name in ("\x1b[2Jgone\r\n\x00end", "\u202e" + "long" * 60, "\x9b31m<i>"):
        for _ in range(30):
            request = made.begin(name)
            made.free(made.make(request, 1 << 20))
            made.end(request)
    path = made.write(tmp_path / "names.rec", "Own\x1b[31m")
    output = tmp_path / "advice.html"
    texts = [
        command("recommend", path, *ONCE, "--output", output).stdout,
        output.read_text(),
        command("trace", "info", path).stdout,
        command("trace", "info", "--json", path).stdout,
        command("replay", path, *ONCE, "--route", "\x9b31m<i>").stdout,
    ]
    for text in texts:
        found = {one for one in text if not one.isprintable()}
        assert found <= {"\n", "\N{INFINITY}"}, found
    assert "\n\\x1b[2Jgone\\r\\n\\x00end: " in texts[0], "and each in one line"
    assert "<bdi>\\x1b[2Jgone\\r\\n\\x00end</bdi>" in texts[1]
    assert max(map(len, texts[2].splitlines())) < 200, "a long name is cut"
    assert "longlong...onglong" in texts[2]


def test_any_name_of_a_route_gets_its_advice(tmp_path: Path) -> None:
    made = recordings.Script()
    names = ["good", "a\0b", "x" * 300_000, "--json", ""]
    for route in names:
        for _ in range(30):
            request = made.begin(route)
            made.free(made.make(request, 1 << 20))
            made.end(request)
    path = made.write(tmp_path / "names.rec")
    told = json.loads(command("recommend", path, *ONCE, "--json").stdout)
    assert {one["route"] for one in told["routes"]} == {name or "unnamed" for name in names}


def test_requests_without_a_name_are_called_the_same_everywhere(tmp_path: Path) -> None:
    made = recordings.Script()
    for _ in range(30):
        request = made.begin("")
        made.free(made.make(request, 1 << 20))
        made.end(request)
    path = made.write(tmp_path / "unnamed.rec")
    output = tmp_path / "advice.html"
    text = command("recommend", path, *ONCE, "--output", output).stdout
    assert "\nunnamed: " in text
    assert "name=''" not in text
    assert '""' not in text
    assert "<bdi>unnamed</bdi>" in output.read_text()
    assert json.loads(command("trace", "info", "--json", path).stdout)["requests"][0]["name"] == "unnamed"
    for route in ("unnamed", ""):
        told = json.loads(command("replay", path, *ONCE, "--route", route, "--json").stdout)
        assert told["requests"] == 30
        advised = json.loads(command("recommend", path, *ONCE, "--route", route, "--json").stdout)
        assert [one["route"] for one in advised["routes"]] == ["unnamed"]
    made.end(made.begin("unnamed"))
    told = json.loads(command("replay", made.write(path), *ONCE, "--route", "unnamed", "--json").stdout)
    assert told["requests"] == 1, "that is a name here"


def test_what_cannot_be_read_is_told_and_the_rest_replayed(tmp_path: Path) -> None:
    path = recordings.one_size(30).write(tmp_path / "gaps.rec")
    content = bytearray(path.read_bytes())
    place = len(content) // 2
    content[place] ^= 0xFF
    path.write_bytes(content)
    (tmp_path / "gaps.rec.3").write_text("my own notes")
    for name in ("replay", "recommend"):
        done = command(name, path, "--rounds", "1", "--strategy", "default,pool")
        broken, foreign = done.stderr.splitlines()
        assert broken.startswith(f"ctxalloc {name}: warning: {path}: ")
        assert "cannot be read: " in broken
        assert broken.endswith("; what follows is")
        assert foreign == f"ctxalloc {name}: warning: {path}.3 is passed over: this is no recording"
        told = json.loads(command(name, path, *ONCE, "--json").stdout)
        (gap, other) = told["gaps"]
        assert gap["offset"] <= place < gap["offset"] + gap["bytes"] < len(content)
        assert (other["file"], other["bytes"]) == (f"{path}.3", 12)
    told = json.loads(command("replay", path, *ONCE, "--json").stdout)
    assert told["compared"] + told["torn"] + told["unfinished"] == told["requests"] == 30
    assert told["compared"] >= 28
    assert "warning: " in command("trace", "export", path, "--to", "pprof").stderr
    said = command("replay", f"{path}.3", status=2).stderr
    assert f"{path}.3: at byte 0: this is no recording" in said


@pytest.mark.parametrize("name", ["replay", "recommend"])
def test_what_ends_a_replay_ends_its_process(name: str, tmp_path: Path) -> None:
    path = recordings.zeroed_giants(20).write(tmp_path / "long.rec")
    process = subprocess.Popen(
        [sys.executable, "-m", "ctxalloc", name, path, "--rounds", "1000", "--strategy", "pool"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def is_replaying(child: str) -> bool:
        return b"_replay_one" in Path(f"/proc/{child}/cmdline").read_bytes()

    while not ((child := children.read_text().split()) and is_replaying(child[0])):
        assert process.poll() is None, process.communicate()
    os.kill(int(child[0]), signal.SIGSTOP)  # it does not end by itself
    process.terminate()
    try:
        out, said = process.communicate(timeout=30)
        assert (process.returncode, out, said) == (128 + signal.SIGTERM, b"", b"")
        with pytest.raises(ProcessLookupError):
            os.kill(int(child[0]), 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child[0]), signal.SIGKILL)


def test_the_limit_that_refused_is_the_one_to_raise(tmp_path: Path) -> None:
    path = tmp_path / "refused.rec"
    with ctxalloc.record(path, one_in=1, share=1.0):
        for _ in range(3):
            outer = ctxalloc.request(name="outer", limit_bytes=2_000_000, root=True)
            with outer, pytest.raises(MemoryError), ctxalloc.request(name="inner"):
                np.ones(1_000_000)
    counts = {
        one["name"]: one["refused"] for one in json.loads(command("trace", "info", "--json", path).stdout)["requests"]
    }
    assert counts == {"outer": 3, "inner": 0}
    text = command("recommend", path, *ONCE).stdout
    assert "a higher limit_bytes of outer, which refused 3 times: raise it and record again" in text
    assert "budget" not in text.partition("\nrules:")[0]


def test_a_budget_that_refused_is_the_one_to_raise(tmp_path: Path) -> None:
    path, tenant = tmp_path / "refused.rec", ctxalloc.Budget(2_000_000, name="tenant")
    with ctxalloc.record(path, one_in=1, share=1.0):
        for _ in range(3):
            outer = ctxalloc.request(name="outer", budget=tenant, root=True)
            with outer, pytest.raises(MemoryError), ctxalloc.request(name="inner"):
                np.ones(1_000_000)
    text = command("recommend", path, *ONCE).stdout
    assert "a higher limit of a budget (a tenant's, or the process's), which refused 3 times" in text


def test_a_route_that_nobody_recorded_is_an_error(tmp_path: Path) -> None:
    path = recordings.one_size().write(tmp_path / "a.rec")
    said = command("replay", path, "--route", "nope", "--rounds", "1", status=2).stderr
    assert "--route 'nope': no request of the recording has this name" in said


def test_what_is_written_never_replaces_a_recording(tmp_path: Path) -> None:
    path = recordings.one_size().write(tmp_path / "a.rec")
    before = path.read_bytes()
    for words in (["trace", "export", path, "--to", "pprof"], ["recommend", path]):
        said = command(*words, "--output", path, status=2).stderr
        assert "is a recording; name another file with --output" in said
    assert path.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("name", ["replay", "recommend"])
def test_standard_output_that_is_full_is_told_as_by_the_other_commands(name: str, tmp_path: Path) -> None:
    path = recordings.one_size().write(tmp_path / "a.rec")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ctxalloc", name, path, *ONCE],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, f"ctxalloc {name}: standard output: No space left on device\n")
